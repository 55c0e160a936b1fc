"""A model that does not fit on the GPU: `roost.place` beside accelerate's `device_map="auto"`, in
one run.

    python benchmarks/gpu/offload.py run MODEL CAP [CASE ...] [--without accelerate] [--seconds 10]
    rows, kept
    python benchmarks/gpu/offload.py page                                              the page made
    from them

MODEL is one of those below, CAP what the GPU may hold, as 6GiB, half or quarter (of the weights).
Weights are random. A case is a batch as 4x512, or generate: 64 tokens after 512. Times are medians
of calls in a row, each until what it returns is there (what is on its way for the next call is part
of that one's time); the first are not counted. The bound of streaming is the weights that do not
fit over the speed of the link, or what the unplaced model takes, if that is more. What the placed
model gives is compared with what the unplaced one gave on the same GPU, where PyTorch repeats
itself: attention of cuDNN does not (tokens of the same model differ from run to run) and is off
throughout; what is compared was made once more with deterministic algorithms, except for generate,
where only that would differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import roost
import rows as results
from roost.core.units import parse_bytes, show_bytes

RESULTS = Path(__file__).parents[1] / "results"
ROWS = Path(os.environ.get("ROWS", RESULTS / "offload_h200_202611.jsonl"))
GENERATED, PROMPT = 64, 512


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
    }
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, dtype=torch.bfloat16))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=1600, n_layer=48, n_head=25, dtype=torch.bfloat16))


def moe() -> nn.Module:
    sizes = {"layers": 8, "hidden": 2048, "heads": 16, "kv_heads": 4, "intermediate": 7168}
    return roost.zoo.model("moe", train=False, batch=4, length=128, **sizes)[0]


class Wide(nn.Sequential):
    """Convolutions that grow wider as images grow smaller: 640 million weights, most of them in the
    last part."""

    def __init__(self) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, 256, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(2)]
        before = 256
        for width, count in ((512, 2), (1024, 4), (2048, 16)):
            part: list[nn.Module] = []
            for _ in range(count):
                part += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
                before = width
            layers += [nn.Sequential(*part), nn.MaxPool2d(2)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


# Name -> how it is built, and its cases.
MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "llama": (llama, ["1x1", "4x512", "32x512", "generate"]),
    "gpt2": (gpt2, ["1x1", "4x512"]),
    "moe": (moe, ["4x128"]),
    "wide": (Wide, ["1x224", "16x224"]),
}


def inputs_of(model: nn.Module, case: str) -> Any:
    rows, size = (1, PROMPT) if case == "generate" else map(int, case.split("x"))
    if isinstance(model, Wide):
        images = torch.arange(rows * 3 * size * size).reshape(rows, 3, size, size) % 251 / 251
        return {"input": images.to(torch.bfloat16)}
    config = getattr(model, "config", None)
    ids = (
        torch.arange(rows * size).reshape(rows, size)
        * 7919
        % (config.vocab_size if config else 32000)
    )
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if config else {"tokens": ids}


def call(model: nn.Module, case: str) -> Callable[[], torch.Tensor]:
    inputs = {name: value.cuda() for name, value in inputs_of(model, case).items()}
    if case == "generate":
        length = {"max_new_tokens": GENERATED, "min_new_tokens": GENERATED}
        return lambda: model.generate(**inputs, **length, do_sample=False, pad_token_id=0)
    if hasattr(model, "config"):
        return lambda: model(**inputs, use_cache=False).logits
    return lambda: model(**inputs)


def timed(
    run: Callable[[], torch.Tensor], warm: int, repeats: int
) -> tuple[float, torch.Tensor, int]:
    """Median seconds, what was returned (on the CPU), and the most memory that PyTorch held."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    with torch.no_grad():
        for number in range(warm + repeats):
            begin = time.perf_counter()
            returned = run()
            torch.cuda.current_stream().synchronize()
            if number >= warm:
                seconds.append(time.perf_counter() - begin)
            if number < warm + repeats - 1:
                del returned
    peak = torch.cuda.max_memory_allocated()
    return statistics.median(seconds), returned.cpu(), peak


def repeatable(run: Callable[[], torch.Tensor], case: str, found: torch.Tensor) -> torch.Tensor:
    """What is given where sums are made in the same order each time; of text what was found
    already."""
    if case == "generate":
        return found
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.no_grad():
            return run().cpu()
    finally:
        torch.use_deterministic_algorithms(False)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest value; of tokens the share that differs."""
    if not expected.is_floating_point():
        return float((found != expected).float().mean())
    return max(
        float((a.float() - b.float()).abs().max()) for a, b in zip(found, expected, strict=True)
    ) / float(expected.abs().max())


def keep(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)
    with ROWS.open("a") as file:
        file.write(json.dumps(row) + "\n")


def run(name: str, cap: str, cases: list[str], without: list[str], seconds: float) -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = MODELS[name][0]().to(torch.bfloat16).eval()
    size = sum(
        t.numel() * t.element_size() for t in {id(p): p for p in model.parameters()}.values()
    )
    shares = {"half": size // 2, "quarter": size // 4}
    limit = shares[cap] if cap in shares else parse_bytes(cap)
    about = {
        "model": name,
        "weights": size,
        "cap": limit,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **results.measured_with(),
    }
    expected, alone = {}, {}
    for case in cases:
        once = call(model, case)
        alone[case], found, peak = timed(once, 2, 5 if case != "generate" else 1)
        expected[case] = repeatable(once, case, found)
        with torch.no_grad():
            # Whether PyTorch repeats itself.
            again = difference(repeatable(once, case, once().cpu()), expected[case])
        keep(
            {
                **about,
                "case": case,
                "how": "unplaced",
                "seconds": alone[case],
                "peak": peak,
                "difference": again,
            }
        )
    model.to("cpu")
    gc.collect()
    torch.cuda.empty_cache()
    if "roost" not in without:
        for case in cases:
            with_roost(model, case, limit, about, expected[case], alone[case], seconds)
    if "accelerate" not in without:
        with_accelerate(model, cases, limit, about, expected)


def with_roost(
    model: nn.Module,
    case: str,
    limit: int,
    about: Any,
    expected: torch.Tensor,
    alone: float,
    search: float,
) -> None:
    begin = time.perf_counter()
    shape = inputs_of(model, "1x1" if case == "generate" else case)
    if hasattr(model, "config") and case != "generate":
        # As it is called: keys and values would be kept beside what is returned.
        shape["use_cache"] = False
    tokens = PROMPT + GENERATED if case == "generate" else 0
    reserve = {"cuda:0": 128 * 2**20} if case == "generate" else None  # the prompt's activations
    plan = roost.place(
        model, shape, memory={"cuda:0": limit}, kv_tokens=tokens, reserve=reserve, seconds=search
    )
    planned = time.perf_counter() - begin
    print(plan, flush=True)
    plan.apply(model)
    applied = time.perf_counter() - begin - planned
    once = call(model, case)
    seconds, found, peak = timed(
        once, 3 if case != "generate" else 1, 7 if case != "generate" else 1
    )
    found = repeatable(once, case, found)
    link = float(1 / plan.on_real_devices()[0].cluster.seconds_per_byte[0, 1])
    moved = sum(size for how, size in plan._weights().items() if how.startswith("streamed"))
    steps = GENERATED if case == "generate" else 1
    bound = max((about["weights"] - limit) / link * steps, alone)
    keep({
        **about, "case": case, "how": "roost", "seconds": seconds, "peak": peak, "expected": plan.step_time * steps,
        "bound_of_streamed": max(moved / link * steps, alone),
        "difference": difference(found, expected), "bound": bound, "link": link, "planned": planned,
        "applied": applied, "fits": peak <= limit, "weights_by": plan._weights(),
        "simulated_peak": int(plan.timeline.peak_memory[1]), "plan": str(plan), "tried": plan.measured,
    })  # fmt: skip
    plan.remove(model)
    gc.collect()
    torch.cuda.empty_cache()


def with_accelerate(
    model: nn.Module, cases: list[str], limit: int, about: Any, expected: Any
) -> None:
    dispatch(model, limit)
    above = {}
    for case in cases:
        peak = accelerated(model, case, about | {"how": "accelerate"}, expected[case])
        if peak > limit and case != "generate":
            above[case] = peak
    # It counts weights alone. With as much less as it takes too much, it is held against us at
    # equal memory.
    for case, peak in above.items():
        allowed = limit
        for _ in range(3):
            allowed = max(0, allowed - (peak - limit) - 2**20)
            dispatch(model, allowed)
            peak = accelerated(
                model,
                case,
                about | {"how": "accelerate within", "allowed": allowed},
                expected[case],
            )
            if peak <= limit or not allowed:
                break


def dispatch(model: nn.Module, limit: int) -> None:
    import accelerate
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)
    model.to("cpu")
    gc.collect()
    torch.cuda.empty_cache()
    apart = getattr(model, "_no_split_modules", None)
    device_map = accelerate.infer_auto_device_map(
        model, {0: limit, "cpu": "100GiB"}, no_split_module_classes=list(apart or ())
    )
    if set(device_map.values()) == {"cpu"}:
        # All of it is brought, layer by layer.
        accelerate.cpu_offload(model, torch.device("cuda", 0))
    else:
        accelerate.dispatch_model(model, device_map)


def accelerated(model: nn.Module, case: str, row: dict[str, Any], expected: torch.Tensor) -> int:
    once = call(model, case)
    seconds, found, peak = timed(
        once, 1 if case != "generate" else 0, 3 if case != "generate" else 1
    )
    gap = difference(repeatable(once, case, found), expected)
    keep({**row, "case": case, "seconds": seconds, "peak": peak, "difference": gap})
    return peak


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("run", "page"))
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each search")
    given = parser.parse_args()
    if given.part == "run":
        name, cap, *cases = given.rest
        logging.basicConfig(level=logging.WARNING)
        logging.getLogger("roost.plan").setLevel(logging.INFO)
        run(name, cap, cases or MODELS[name][1], given.without, given.seconds)
    else:
        ROWS.with_suffix(".md").write_text(page(ROWS))


# Model, case, figure, goal, and whether the goal is the most that is allowed.
GOALS = (
    ("llama", "1x1", "times faster than accelerate", 12.0, False),
    ("llama", "1x1", "step over bound", 0.66, True),
    ("llama", "4x512", "times faster than accelerate", 8.0, False),
    ("llama", "4x512", "step over bound", 1.05, True),
    ("llama", "32x512", "times faster than accelerate", 4.8, False),
    ("llama", "generate", "times faster than accelerate", 8.0, False),
)


def _goals(found: dict[tuple[Any, ...], dict[str, Any]]) -> list[str]:
    """Each goal with the figure of the last rows, and whether it is met."""
    lines = ["| model | case | figure | found | goal | |", "|---|---|---|---|---|---|"]
    for model, case, figure, goal, at_most in GOALS:
        mine = {key[3]: row for key, row in found.items() if (key[0], key[2]) == (model, case)}
        ours = mine["roost"]
        used = [ours, mine["accelerate"]] if "times" in figure else [ours]
        reference = used[1]["seconds"] if "times" in figure else 1 / ours["bound"]
        value = reference / ours["seconds"] if "times" in figure else reference * ours["seconds"]
        said = results.verdict(value, goal, used, at_most)
        wanted = f"at {'most' if at_most else 'least'} {goal:g}"
        lines.append(f"| {model} | {case} | {figure} | {value:.3g} | {wanted} | {said} |")
    return [*lines, ""]


def page(path: Path) -> str:
    """The last row of each kind counts."""
    found, every = {}, results.read(path)
    for row in every:
        found[row["model"], row["cap"], row["case"], row["how"]] = row
    lines = [
        "# Models that do not fit on the GPU\n",
        results.provenance(every),
        "`python benchmarks/gpu/offload.py run MODEL CAP`, then `page`; accelerate in the same run, "
        "`infer_auto_device_map` and `dispatch_model` with the same cap, which it takes for weights alone; where it "
        "then holds more, it was run again with as much less (`within the cap`). Seconds are medians. `bound` is the "
        "larger of the weights that do not fit under the cap over the measured link, and what the unplaced model takes "
        "on the whole GPU; `of what it streams` is against the bytes that this plan brings, which are more where "
        "activations and the window need room, and fewer where the CPU computes. `peak` is `max_memory_allocated` over "
        "the cap. `difference` is the largest of logits over the largest logit, against the unplaced model on the same "
        "GPU; for `generate` the share of tokens that differ.\n",
    ]
    lines += _goals(found)
    head = (
        "| model, cap | case | unplaced | accelerate | roost | times faster | bound | roost / bound "
        "| of what it streams | expected | peak | difference | unplaced again "
    )
    lines += [
        head + "| accelerate's peak, difference | accelerate within the cap, peak |",
        "|---" * 15 + "|",
    ]
    for (model, cap, case, how), row in found.items():
        other, alone = (
            found.get((model, cap, case, "accelerate")),
            found.get((model, cap, case, "unplaced")),
        )
        within = found.get((model, cap, case, "accelerate within"))
        if how != "roost":
            continue
        cells = [
            f"{model}, {show_bytes(cap)}", case, f"{alone['seconds']:.3f}" if alone else "",
            f"{other['seconds']:.3f}" if other else "", f"{row['seconds']:.4f}",
            f"{other['seconds'] / row['seconds']:.2f}" if other else "", f"{row['bound']:.4f}",
            f"{row['seconds'] / row['bound']:.3f}", f"{row['seconds'] / row['bound_of_streamed']:.3f}",
            f"{row['expected']:.4f}", f"{row['peak'] / cap:.3f}", f"{row['difference']:.2g}",
            f"{alone['difference']:.2g}" if alone else "",
            f"{other['peak'] / cap:.3f}, {other['difference']:.2g}" if other else "",
            f"{within['seconds']:.3f}, {within['peak'] / cap:.3f}" if within else "",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("\n## What was planned\n")
    for (model, cap, case, how), row in found.items():
        if how == "roost":
            lines.append(f"{model}, {show_bytes(cap)}, {case}:\n\n```text\n{row['plan']}\n```\n")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
