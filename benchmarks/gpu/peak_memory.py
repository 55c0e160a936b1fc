"""Peak memory of a training step: simulated on one device against what PyTorch measures on a GPU.

    python benchmarks/gpu/peak_memory.py [--cpu] [MODEL ...]      rows

For each zoo model one step of eager PyTorch (forward, loss, backward, SGD; gradients start as
None), peak of `max_memory_allocated`, or with `--cpu` of what the CPU allocator hands out and takes
back; beside it the peak that Roost simulates for the captured step with everything on one device.
Rows go to benchmarks/results/peak_memory_MACHINE_202611.jsonl.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import rows as results
from roost import catalog
from roost.core.cluster import Cluster, Device
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.frontends.torch import capture
from roost.simulator.compiled import simulate

MODELS = [
    "inception_v3",
    "gpt2",
    "rnnlm",
    "resnet50",
    "bert",
    "vit",
    "t5",
    "transformer",
    "cifar10_cnn",
    "nmt",
]


def measured(settings) -> float:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = settings.model().train()
        inputs = settings.inputs(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    peaks = []
    for _ in range(3):  # the first step also loads kernels
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model(*inputs).backward()
        optimizer.step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    del model, inputs, optimizer
    gc.collect()
    torch.cuda.empty_cache()
    return float(peaks[-1])


def measured_on_cpu(settings) -> float:  # type: ignore[no-untyped-def]
    """Weights and inputs, and the most that was handed out beyond them."""
    torch.manual_seed(0)
    model = settings.model().train()
    inputs = settings.inputs(True)
    held = sum(
        tensor.numel() * tensor.element_size()
        for tensor in {*model.parameters(), *model.buffers(), *inputs}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
    with torch.profiler.profile(profile_memory=True) as profile:
        model(*inputs).backward()
        optimizer.step()
    changes = [
        (e.start_ns(), e.nbytes())
        for e in profile.profiler.kineto_results.events()
        if e.name() == "[memory]"
    ]
    return held + float(
        np.cumsum([size for _, size in sorted(changes, key=lambda change: change[0])]).max()
    )


def simulated(settings) -> tuple[float, int, float]:  # type: ignore[no-untyped-def]
    begin = time.process_time()
    with torch.device("meta"):
        graph = capture(settings.model(), settings.inputs(True), train=True)
    seconds = time.process_time() - begin
    cluster = Cluster("one", (Device("cuda:0", "cuda", 2**45),))
    problem = Problem(graph, cluster, np.zeros((graph.num_ops, 1)))  # type: ignore[arg-type]
    timeline = simulate(problem, Placement(np.zeros(graph.num_ops, int)))
    return float(timeline.peak_memory[0]), graph.num_ops, seconds


def page(rows_file: Path) -> str:
    """A table for each way of measuring."""
    rows = results.read(rows_file)
    lines = [
        "# Peak memory of a training step, simulated against measured\n",
        results.provenance(rows),
        "Eager PyTorch, zoo models at their default settings, float32, SGD, the last of several steps. "
        "Simulated: the captured step, everything on one device, program order. The workspaces of libraries "
        "are measured and not simulated; they are most of the difference in small models.\n",
    ]
    for command in dict.fromkeys(row["command"] for row in rows):
        here = [row for row in rows if row["command"] == command]
        lines += [
            f"## `{command}`\n",
            f"{here[0]['machine']}, torch {here[0]['versions']['torch']}.\n",
            "| model | ops | measured GiB | simulated GiB | simulated / measured |",
            "|---|---|---|---|---|",
        ]
        for row in here:
            gib = " | ".join(f"{row[name] / 2**30:.2f}" for name in ("measured", "simulated"))
            ratio = row["simulated"] / row["measured"]
            lines.append(f"| {row['model']} | {row['ops']} | {gib} | {ratio:.3f} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    on_cpu = "--cpu" in sys.argv
    device = "cpu" if on_cpu else torch.cuda.get_device_name(0).split()[-1].lower()
    path = results.RESULTS / f"peak_memory_{device}_202611.jsonl"
    for name in [argument for argument in sys.argv[1:] if argument != "--cpu"] or MODELS:
        settings = catalog.find("zoo", name)()
        real = measured_on_cpu(settings) if on_cpu else measured(settings)
        guess, ops, _ = simulated(settings)
        row = {"model": name, "ops": ops, "measured": real, "simulated": guess}
        row |= {"device": device, **results.measured_with()}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)


if __name__ == "__main__":
    main()
