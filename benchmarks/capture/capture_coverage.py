"""Capture of models of timm, torchvision, transformers and diffusers, for inference and training.

    python benchmarks/capture/capture_coverage.py measure [--again] [PACKAGE or MODEL ...]
    python benchmarks/capture/capture_coverage.py page

`measure` appends a row for each model and step that has none; it can be stopped and goes on. The
variable PROCESSES is how many run at a time. `page` renders the page from the rows.

`make bench-coverage` installs the packages in an environment of their own, and does both. Every
model is built on the meta device and captured in a process of its own with a time limit. A row
has success or the refusal, CPU seconds, and FLOP against PyTorch's counter, which runs the model
on meta tensors, or on the CPU where the model is small.

PyTorch's counter is blind to some ops and wrong about others. `hand_formulas` counts these anew,
from the definition of the op, and shares no code with Roost.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from coverage_page import page, ratio

import rows as results

ROWS = results.RESULTS / "coverage_x86_64_2core_202611.jsonl"
PACKAGES = ("timm", "torchvision", "transformers", "diffusers")
LIMIT = 240  # seconds of one model and step
PROCESSES = int(os.environ.get("PROCESSES", "1"))
RUN_ON_CPU = ("transformers", "diffusers")  # small models that read values: not on meta tensors


# --- measuring, in a child ----------------------------------------------------------------------


def grouped(first: Any, second: Any) -> float:
    """Rows that meet a matrix of their group each: rows x inner x columns, twice."""
    *rows, inner = first
    return 2.0 * math.prod(rows) * inner * second[-1]


def hand_grouped(x: Any, weight: Any, *rest: Any, out_shape: Any, **more: Any) -> float:
    return grouped(x, weight)


def hand_grouped_backward(
    gradient: Any, x: Any, weight: Any, *rest: Any, out_shape: Any, **more: Any
) -> float:
    return 2 * grouped(x, weight)


def hand_convolution_backward(
    gradient: Any, x: Any, weight: Any, *rest: Any, out_shape: Any, **more: Any
) -> float:
    """Each output number met `in_channels / groups x kernel` weights; once for each gradient.

    A transposed convolution scatters instead: each input number meets a row of weights.
    """
    transposed, wanted = rest[4], rest[-1]
    starts = x if transposed else gradient
    return float(2 * math.prod(starts) * math.prod(weight[1:]) * (wanted[0] + wanted[1]))


def hand_vector(matrix: Any, vector: Any, *rest: Any, out_shape: Any, **more: Any) -> float:
    return 2.0 * math.prod(matrix)


def hand_fourier(x: Any, dims: Any, *rest: Any, out_shape: Any, **more: Any) -> float:
    """5 N log2 N of a complex transform over these dimensions; half where one end is real."""
    length = math.prod(max(x[dim], out_shape[dim]) for dim in dims)
    whole = 5 * math.prod(map(max, zip(x, out_shape, strict=True))) * math.log2(length)
    return whole if tuple(x) == tuple(out_shape) else whole / 2


def hand_formulas() -> dict[Any, Any]:
    """Op -> its FLOP by hand, where PyTorch's counter has no formula or a wrong one."""
    import torch

    aten = torch.ops.aten
    formulas = {
        aten.convolution_backward: hand_convolution_backward,
        aten._grouped_mm: hand_grouped,
        aten.mv: hand_vector,
        aten.dot: hand_vector,
        aten._fft_r2c: hand_fourier,
        aten._fft_c2c: hand_fourier,
        aten._fft_c2r: hand_fourier,
    }
    if "transformers" in sys.modules:
        import transformers.integrations.moe  # noqa: F401  registers the ops

        theirs = torch.ops.transformers
        formulas[theirs.grouped_mm_fallback] = hand_grouped
        formulas[theirs.grouped_mm_fallback_backward] = hand_grouped_backward
    return formulas


@contextmanager
def scores_made_again(train: bool) -> Iterator[list[float]]:
    """Collect 2 x pairs x size of each attention whose backward makes the scores again.

    On the meta device PyTorch multiplies attention out and keeps the scores: 4 products in the
    backward. Its fused kernels, and Roost, make them again: 5 products.
    """
    import torch
    from torch.nn import functional
    from torch.overrides import TorchFunctionMode

    extra: list[float] = []

    class Attentions(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if function is functional.scaled_dot_product_attention and train:
                names = ("query", "key", "value", "attn_mask", "dropout_p")
                given = dict(zip(names, args, strict=False)) | kwargs
                query, key, mask = given["query"], given["key"], given.get("attn_mask")
                kept = given.get("dropout_p", 0.0) > 0 or (mask is not None and mask.requires_grad)
                if torch.is_grad_enabled() and query.requires_grad and not kept:
                    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
                    extra.append(2.0 * pairs * query.shape[-1])
            return function(*args, **kwargs)

    with Attentions():
        yield extra


def reference(model: Any, inputs: Any, loss: Any, train: bool) -> dict[str, Any]:
    """FLOP of PyTorch's counter, and the same with the formulas by hand, by kind of op."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from roost.frontends.tracing.trace import without_cache

    model.train(train)
    plain = FlopCounterMode(display=False)
    hand = FlopCounterMode(display=False, custom_mapping=hand_formulas())
    with (
        without_cache(model),
        torch.set_grad_enabled(train),
        sdpa_kernel(SDPBackend.MATH),  # the counter is blind to the fused kernel of CPUs
        scores_made_again(train) as extra,
        plain,
        hand,
    ):
        output = model(**inputs)
        if train:
            value = loss(output) if loss else output["loss"]
            value.backward()
    counted = {
        str(op).removeprefix("aten."): n for op, n in plain.get_flop_counts()["Global"].items()
    }
    by_hand = {
        str(op).removeprefix("aten."): n for op, n in hand.get_flop_counts()["Global"].items()
    }
    changed = {op: n - counted.get(op, 0) for op, n in by_hand.items() if n != counted.get(op, 0)}
    if extra:
        changed["attention, scores made again"] = sum(extra)
    total = sum(counted.values())
    return {
        "counter_flop": total,
        "reference_flop": total + sum(changed.values()),
        "by_hand": changed,
    }


def one(package: str, name: str, train: bool) -> dict[str, Any]:
    """Capture one model; the refusal where it is refused."""
    import coverage_preload  # noqa: F401  before any package imports torchvision
    import torch
    from coverage_models import COMPILED, DECLARED, MODELS

    from roost.errors import RoostError
    from roost.frontends.torch import step_of

    torch.set_num_threads(1)
    model = next(m for m in MODELS if (m.package, m.name) == (package, name))
    module, inputs = built(model, train, "meta")
    row: dict[str, Any] = {"parameters": sum(p.numel() for p in module.parameters())}
    if package == "torchvision":
        row["ops_declared_by_name"] = list(DECLARED) if COMPILED else []
    begin = time.process_time()
    try:
        step = step_of(module, inputs, train=train, loss=model.loss if train else None)
    except RoostError as error:
        row |= {"captured": False, "said": str(error)}
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        row |= {"captured": False, "said": f"CRASH {type(error).__name__}: {error} ({line.name})"}
    else:
        graph = step.graph
        by_formula = float(step.coverage.flop_by_formula) * float(graph.flop.sum())
        row |= {"captured": True, "ops": graph.num_ops, "flop": float(graph.flop.sum())}
        row |= {"product_flop": by_formula}
    row["cpu_seconds"] = round(time.process_time() - begin, 2)
    if model.by_hand:
        return row | {"analytic_flop": model.by_hand(train)}
    try:
        if model.package in RUN_ON_CPU:
            module, inputs = built(model, train, "cpu")
        row |= reference(module, inputs, model.loss, train)
    except Exception as error:
        row["no_reference"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return row


def built(model: Any, train: bool, device: str) -> tuple[Any, dict[str, Any]]:
    """The module and its inputs on a device."""
    import torch

    with torch.device(device):
        module, inputs = model.build()
        if train and model.labels:
            inputs |= model.labels()
    return module.train(train), inputs


def child(pipe: Any, package: str, name: str, train: bool) -> None:
    """Send the row of one model through the pipe."""
    try:
        row = one(package, name, train)
    except Exception as error:  # the benchmark failed, not the capture
        row = {"captured": False, "said": f"cannot be built: {type(error).__name__}: {error}"}
    if "said" in row:
        row["said"] = without_paths(row["said"])
    pipe.send(row)
    pipe.close()


def without_paths(text: str) -> str:
    """One line, at most 400 characters, with paths from their package on."""
    line = " ".join(text.split())
    return re.sub(r"/\S*?/(?:site-packages|src)/", "", line)[:400]


# --- measuring, in the parent -------------------------------------------------------------------


def versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES}


def measure(names: list[str]) -> None:
    """Append a row for each model and step that has no sound row yet, or for all `--again`."""
    again = "--again" in names
    names = [name for name in names if name != "--again"]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["coverage_preload"])  # imports take 10 s: once is enough
    from coverage_models import MODELS

    provenance = results.measured_with()
    provenance["versions"] |= versions()
    there = set() if again else {key(row) for row in results.sound(results.read(ROWS))}
    jobs = [(m.package, m.name, train) for m in MODELS for train in (False, True)]
    jobs = [job for job in jobs if job not in there and (not names or {job[0], job[1]} & {*names})]
    running: list[Any] = []
    while jobs or running:
        while jobs and len(running) < PROCESSES:
            ours, theirs = context.Pipe()
            process = context.Process(target=child, args=(theirs, *jobs[0]))
            process.start()
            theirs.close()
            running.append((jobs.pop(0), process, ours, time.monotonic()))
        time.sleep(0.05)
        for entry in list(running):
            job, process, ours, begin = entry
            row = ended(process, ours, begin)
            if row is None:
                continue
            running.remove(entry)
            row = dict(zip(("package", "model", "train"), job, strict=True)) | row | provenance
            with ROWS.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(job, row.get("said") or ratio_text(row), file=sys.stderr, flush=True)


def ended(process: Any, pipe: Any, begin: float) -> dict[str, Any] | None:
    """The row of a process that is done, or took too long; None while it runs."""
    if pipe.poll():
        try:
            row: dict[str, Any] = pipe.recv()
        except EOFError:
            row = {"captured": False, "said": f"the process ended with {process.exitcode}"}
        process.join()
        return row
    if not process.is_alive():
        return {"captured": False, "said": f"the process ended with {process.exitcode}"}
    if time.monotonic() - begin < LIMIT:
        return None
    process.kill()
    process.join()
    return {"captured": False, "said": f"took over {LIMIT} s"}


def key(row: dict[str, Any]) -> tuple[str, str, bool]:
    return row["package"], row["model"], row["train"]


def ratio_text(row: dict[str, Any]) -> str:
    to_counter, to_reference = ratio(row, "counter_flop"), ratio(row, "reference_flop")
    missing = row.get("no_reference", "")
    return f"{row['cpu_seconds']} s, counter {to_counter}, by hand {to_reference} {missing}"


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["measure", *names]:
            measure(names)
        case ["page"]:
            ROWS.with_suffix(".md").write_text(page(ROWS))
        case _:
            print(__doc__, file=sys.stderr)
            sys.exit(2)
