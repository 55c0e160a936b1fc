"""Training that does not fit: a GPT-2 with Adam in fp32 on a GPU with a cap, beside the same steps
without one.

    python benchmarks/gpu/train_offload.py run --layers 48 --hidden 1600 --heads 25 --batch 1 --cap
    12GiB --steps 10
    python benchmarks/gpu/train_offload.py run --tiny --devices virtual2 --cap 0.6 --seconds 10
    python benchmarks/gpu/train_offload.py page

The placement is found by `roost.solve` from costs profiled on this machine, and run by the graph
runtime. Three rows for each setting: `eager`, PyTorch with `torch.optim.Adam` all on the GPU;
`unplaced`, the captured step all on the GPU; and `placed`, under the cap. A cap below 1.5 is a
share of what the unplaced step takes as simulated. The bound of the transfers is the bytes that
cross each way over the rate of the link as probed, of the way that takes longest. Without a GPU the
devices are threads, the last of which has the cap. Rows that are there already are not run again.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import roost
import rows as results
from roost.core.graph import PHASES
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import TRANSFER_KINDS
from roost.core.units import parse_bytes
from roost.cost_models.profiled import Profiled
from roost.frontends.tracing.captured_step import CapturedStep, captured_step
from roost.frontends.tracing.trace import trace
from roost.runtime.ops.run import GraphRuntime
from roost.runtime.step.optimizers import Optimizer
from roost.runtime.step.unplaced import residents_of
from roost.search.measured.served_model import cores_of
from roost.simulator.compiled import simulate
from roost.zoo.gpt2 import Gpt2

RESULTS = Path(__file__).parents[1] / "results"
RATE = 1e-4
TINY = {"layers": 4, "hidden": 128, "heads": 4, "vocab": 500, "length": 32, "batch": 2}


def machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0).split()[-1].lower()
    return f"{platform.machine()}_{os.cpu_count()}core"


def rows_file() -> Path:
    return Path(os.environ.get("ROWS", RESULTS / f"train_offload_{machine()}_202611.jsonl"))


def measured_on() -> str:
    return rows_file().stem.removeprefix("train_offload_").rpartition("_")[0]


def rows() -> list[dict[str, Any]]:
    path = rows_file()
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep(row: dict[str, Any]) -> None:
    with rows_file().open("a") as file:
        file.write(json.dumps(row) + "\n")
    print({key: value for key, value in row.items() if key not in ("where", "losses")}, flush=True)
    print("  losses", [round(loss, 6) for loss in row.get("losses", [])], flush=True)


# ---------------------------------------------------------------------- the model


def filled(settings: Gpt2) -> torch.nn.Module:
    """The model with small numbers in it, without the minutes that drawing 1.5 billion of them
    takes."""
    with torch.device("meta"):
        model = settings.model()
    model = model.to_empty(device="cpu").train()
    numbers = torch.randn(2**20 + 7, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            flat = parameter.view(-1)
            if parameter.dim() < 2:
                flat.fill_(1.0 if name.endswith("norm.weight") else 0.0)
                continue
            for begin in range(0, len(flat), len(numbers)):
                part = flat[begin : begin + len(numbers)]
                part.copy_(numbers[: len(part)])
    return model


def inputs_of(settings: Gpt2, steps: int) -> list[tuple[torch.Tensor, ...]]:
    """A batch for each step."""
    torch.manual_seed(1)
    return [settings.inputs(True) for _ in range(steps)]


# ---------------------------------------------------------------------- ways to train


def eager(
    settings: Gpt2,
    batches: list[tuple[torch.Tensor, ...]],
    device: torch.device,
    threads: int | None,
) -> dict[str, Any]:
    """PyTorch, all on one device."""
    if threads is not None:
        torch.set_num_threads(threads)
    model = filled(settings).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    losses, seconds = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for batch in batches:
        here = [each.to(device) for each in batch]
        begun = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(*here)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))  # waits
        seconds.append(time.perf_counter() - begun)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {
        "losses": losses,
        "seconds": seconds,
        "step_s": statistics.median(seconds[1:]),
        "peak": peak,
    }


def placed(
    step: CapturedStep,
    problem: Problem,
    placement: Placement,
    model: torch.nn.Module,
    batches: list[tuple[torch.Tensor, ...]],
    one_thread: bool | None = None,
) -> dict[str, Any]:
    """The captured step, by the graph runtime; see there for `one_thread`."""
    losses, seconds = [], []
    begun = time.perf_counter()
    residents = residents_of(model)
    cores = (
        None
        if any(d.kind == "cuda" for d in problem.cluster.devices)
        else cores_of(problem.cluster)
    )
    with GraphRuntime(
        step, problem, placement, residents, Optimizer(rate=RATE), cores, one_thread=one_thread
    ) as run:
        built = time.perf_counter() - begun
        threads = len(run.launchers)
        peak: dict[str, int] = {}
        for batch in batches:
            begun = time.perf_counter()
            losses.append(float(run.step(*batch)[0]))
            seconds.append(time.perf_counter() - begun)
            peak = {name: max(held, peak.get(name, 0)) for name, held in run.peak_memory().items()}
    return {
        "losses": losses, "seconds": seconds, "step_s": statistics.median(seconds[1:]), "built_s": built,
        "peak": max(peak.values(), default=0), "threads": threads,
    }  # fmt: skip


def settle() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------- what went where


def where(problem: Problem, placement: Placement) -> list[dict[str, Any]]:
    """Ops by device, phase and kind: how many, and the bytes of what they make or hold."""
    graph, names = problem.graph, problem.cluster.device_names
    count: Counter[tuple[str, str, str]] = Counter()
    size: Counter[tuple[str, str, str]] = Counter()
    for op in range(graph.num_ops):
        key = names[int(placement.device[op])], PHASES[int(graph.phase[op])], graph.kinds[op]
        count[key] += 1
        size[key] += int(graph.output_bytes[op])
    rows = [
        {"device": d, "phase": p, "kind": k, "ops": n, "bytes": size[d, p, k]}
        for (d, p, k), n in count.items()
    ]
    return sorted(rows, key=lambda row: (row["device"], -row["bytes"]))


def transfers(problem: Problem, placement: Placement) -> dict[str, Any]:
    """Bytes that cross in a step, by way and kind, and how long the fullest way takes at the rate
    of its link."""
    from roost.simulator.reference import simulate as reference

    timeline, cluster = reference(problem, placement), problem.cluster
    moved: Counter[str] = Counter()
    ways: Counter[tuple[int, int]] = Counter()
    found = timeline.transfers
    for tensor, source, target, kind in zip(
        found.tensor.tolist(),
        found.source.tolist(),
        found.target.tolist(),
        found.kind.tolist(),
        strict=True,
    ):
        size = int(problem.graph.output_bytes[tensor])
        ways[source, target] += size
        moved[
            f"{cluster.device_names[source]} to {cluster.device_names[target]}, {TRANSFER_KINDS[kind]}"
        ] += size
    bound = max(
        (size * float(cluster.seconds_per_byte[way]) for way, size in ways.items()), default=0.0
    )
    busy = np.zeros(cluster.num_devices)
    np.add.at(
        busy, placement.device, problem.op_time[np.arange(len(placement.device)), placement.device]
    )
    return {
        "moved": dict(moved), "transfer_bound_s": bound, "num_transfers": timeline.num_transfers,
        "busy_s": dict(zip(cluster.device_names, busy.tolist(), strict=True)),
    }  # fmt: skip


# ---------------------------------------------------------------------- running


def run(given: argparse.Namespace) -> None:
    shape = dict(TINY) if given.tiny else {}
    named = ("layers", "hidden", "heads", "vocab", "length", "batch")
    shape |= {name: getattr(given, name) for name in named if getattr(given, name) is not None}
    settings = replace(Gpt2(**({} if given.tiny else Gpt2.SIZES["xl"])), **shape)
    settings = replace(settings, positions=max(settings.positions, settings.length))
    about: dict[str, Any] = {
        "devices": given.devices,
        "cap": given.cap,
        "steps": given.steps,
        "placer": given.placer,
    }
    about |= {name: getattr(settings, name) for name in named}
    done = {
        row["how"] for row in rows() if all(row.get(key) == value for key, value in about.items())
    }
    batches = inputs_of(settings, given.steps)
    main = torch.device("cuda", 0) if given.devices == "here" else torch.device("cpu")
    if given.devices == "here" and not torch.cuda.is_available():
        raise SystemExit("no GPU here; try --tiny --devices virtual2 --cap 0.6")
    if "eager" not in done and not given.without_eager:
        keep(
            {
                **about,
                "how": "eager",
                **eager(settings, batches, main, None if main.type == "cuda" else 1),
            }
        )
        settle()
    if {"unplaced", "placed"} <= done:
        return
    begun = time.perf_counter()
    model = filled(settings)
    step = captured_step(trace(model, batches[0], train=True), "gpt2", "adam")
    traced = time.perf_counter() - begun
    print(f"{step.graph.num_ops} ops, captured in {traced:.0f} s", flush=True)
    begun = time.perf_counter()
    cluster = roost.probe(virtual=2) if given.devices == "virtual2" else roost.probe()
    costs = Profiled(step).profile(step.graph, cluster)
    problem = Problem(step.graph, cluster, costs.costs)
    profiled = time.perf_counter() - begun
    print(f"profiled in {profiled:.0f} s, {costs.costs.source}", flush=True)
    last = cluster.num_devices - 1
    whole = problem.placement(np.full(step.graph.num_ops, last))
    about_run = {"num_ops": step.graph.num_ops, "captured_s": traced, "profiled_s": profiled}
    about_run["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    simulated = simulate(problem, whole)
    if "unplaced" not in done and not given.without_unplaced:
        row = {**about, **about_run, "how": "unplaced", "expected_s": simulated.step_time}
        keep(row | placed(step, problem, whole, model, batches) | transfers(problem, whole))
        settle()
    if "placed" in done:
        return
    share = float(given.cap) if given.cap.replace(".", "", 1).isdecimal() else 0.0
    cap = (
        int(share * int(simulated.peak_memory[last])) if 0 < share < 1.5 else parse_bytes(given.cap)
    )
    devices = (
        *cluster.devices[:-1],
        replace(cluster.devices[-1], memory=int(cap * (1 - given.spare))),
    )
    capped = Problem(step.graph, replace(cluster, devices=devices), costs.costs)
    begun = time.perf_counter()
    result = roost.solve(capped, given.placer, seconds=given.seconds, seed=0)
    solved = time.perf_counter() - begun
    best = result.best.placement
    best = replace(best, order="rank", priority=None) if best.order == "fifo" else best
    timeline = simulate(capped, best)
    print(f"found in {solved:.0f} s: {result!r}", flush=True)
    row = {
        **about, **about_run, "how": "placed", "solved_s": solved, "expected_s": timeline.step_time, "cap_bytes": cap,
        "expected_peak": timeline.peak_memory.tolist(), "order": best.order,
        "bound_s": None if result.bound is None else result.bound.step_time, **transfers(capped, best),
        "where": where(capped, best),
    }  # fmt: skip
    found = placed(step, capped, best, model, batches)
    keep(row | found)
    if given.other_threads:
        settle()
        other = found["threads"] > 1
        name = "placed, one thread" if other else "placed, a thread each"
        keep(row | {"how": name} | placed(step, capped, best, model, batches, other))


# ---------------------------------------------------------------------- the page


def page(path: Path) -> str:
    every, there = results.read(path), path.stem.removeprefix("train_offload_").rpartition("_")[0]
    lines = [
        "# Training that does not fit\n",
        results.provenance(every),
        f"Machine: {there}. GPT-2 shape, Adam in fp32; `python benchmarks/gpu/train_offload.py run` with the "
        "settings of the table, then `page`. `eager` is PyTorch, `unplaced` the captured step, both all on one device; "
        "`placed` is what `roost.solve` found under the cap. The loss is compared step by step with that of `eager`.\n",
    ]
    named = ("layers", "hidden", "batch", "length", "cap", "devices", "placer")
    for key in dict.fromkeys(tuple(row[name] for name in named) for row in every):
        some = {row["how"]: row for row in every if tuple(row[name] for name in named) == key}
        lines += [
            f"## {', '.join(f'{name} {value}' for name, value in zip(named, key, strict=True))}\n",
            *_table(some),
        ]
        if "placed" in some:
            lines += _went(some["placed"])
    return "\n".join(lines) + "\n"


def _table(some: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| | step, s | over eager | expected, s | peak, GiB | largest loss difference |",
        "|---|---|---|---|---|---|",
    ]
    base = some.get("eager")
    for how, row in some.items():
        gap = over = ""
        if base is not None:
            pairs = zip(row["losses"], base["losses"], strict=True)
            gap = f"{max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs):.1e}"
            over = f"{row['step_s'] / base['step_s']:.2f}"
        expected = f"{row['expected_s']:.4f}" if "expected_s" in row else ""
        peak = row["peak"] or (row.get("expected_peak") or [0])[-1]
        lines.append(
            f"| {how} | {row['step_s']:.4f} | {over} | {expected} | {peak / 2**30:.3f} | {gap} |"
        )
    return [*lines, ""]


def _went(row: dict[str, Any]) -> list[str]:
    fits = "within" if (row["peak"] or row["expected_peak"][-1]) <= row["cap_bytes"] else "ABOVE"
    over = row["step_s"] / row["transfer_bound_s"] if row["transfer_bound_s"] else float("inf")
    lines = [
        f"{row.get('parameters', 0) / 1e6:,.1f} M parameters, {row['num_ops']:,} ops, captured in "
        f"{row['captured_s']:.0f} s, profiled in {row['profiled_s']:.0f} s, searched for {row['solved_s']:.0f} s. Peak "
        f"{fits} the cap of {row['cap_bytes'] / 2**30:.3f} GiB. The fullest way takes {row['transfer_bound_s']:.4f} s "
        f"at the rate of its link: the step is {over:.2f} of that. Busy: "
        + ", ".join(f"{name} {seconds:.4f} s" for name, seconds in row["busy_s"].items())
        + ".\n",
        "| crosses | bytes a step |", "|---|---|",
        *(f"| {way} | {size:,} |" for way, size in row["moved"].items()),
        "", "| device | phase | kind | ops | bytes |", "|---|---|---|---|---|",
    ]  # fmt: skip
    phases: dict[tuple[str, str], list[int]] = {}
    for each in row["where"]:
        total = phases.setdefault((each["device"], each["phase"]), [0, 0])
        total[0] += each["ops"]
        total[1] += each["bytes"]
    lines += [
        f"| {d} | {p} | all | {n:,} | {size:,} |" for (d, p), (n, size) in sorted(phases.items())
    ]
    largest = sorted(row["where"], key=lambda each: -each["bytes"])[:12]
    lines += [
        f"| {each['device']} | {each['phase']} | {each['kind']} | {each['ops']:,} | {each['bytes']:,} |"
        for each in largest
    ]
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("run", "page"))
    parser.add_argument("--tiny", action="store_true")
    for name in ("layers", "hidden", "heads", "vocab", "length", "batch"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--devices", choices=("here", "virtual2"), default="here")
    parser.add_argument(
        "--cap", default="12GiB", help="of the last device; or a share of what the step takes there"
    )
    parser.add_argument(
        "--spare", type=float, default=0.08, help="share of the cap that the search leaves free"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--placer", default="auto")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the search")
    parser.add_argument(
        "--other-threads", action="store_true", help="also with one thread for all, or one for each"
    )
    parser.add_argument("--without-eager", action="store_true")
    parser.add_argument("--without-unplaced", action="store_true")
    given = parser.parse_args()
    if given.part == "page":
        rows_file().with_suffix(".md").write_text(page(rows_file()))
        return
    run(given)


if __name__ == "__main__":
    main()
