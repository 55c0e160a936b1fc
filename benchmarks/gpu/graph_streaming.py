"""The graph runtime streaming a Llama-shaped model: step time against the bound of the copies, and
peak memory.

    PYTHONPATH=src python benchmarks/gpu/graph_streaming.py --resident 10 --windows 1 2 3

The first layers live on the GPU, and so do embedding and output layer; the rest is fetched in each
step. Every op runs on the GPU. A window is so many layers. Prints a JSON line for each window:
median of the steps, bytes fetched, seconds that they take at `--bandwidth`, and the peak of what
PyTorch allocated. `--device cpu:1` tries it without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # for `support`

from roost.frontends.tracing.captured_step import captured_step
from roost.frontends.tracing.trace import trace
from roost.runtime.ops.run import GraphRuntime
from roost.runtime.step.unplaced import residents_of
from roost.zoo._layers import Rotary
from roost.zoo.llama import Llama
from support.runs import mixed_problem


def filled(settings: Llama) -> nn.Module:
    """The model in bf16 with some numbers in it, without the time that drawing each of them
    takes."""
    with torch.device("meta"):
        model = settings.model().bfloat16()
    model = model.to_empty(device="cpu").eval()
    model.rotary = Rotary(
        settings.length, settings.hidden // settings.heads, settings.base
    ).bfloat16()
    numbers = torch.randn(2**20, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    for parameter in model.parameters():
        flat = parameter.data.view(-1)
        for begin in range(0, len(flat), len(numbers)):
            part = flat[begin : begin + len(numbers)]
            part.copy_(numbers[: len(part)])
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=1)
    parser.add_argument("--resident", type=int, default=10, help="layers that live on the GPU")
    parser.add_argument("--windows", type=float, nargs="+", default=[1, 2, 3], help="in layers")
    parser.add_argument("--bandwidth", type=float, default=55e9, help="bytes/s of the copies")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--graphs", action="store_true")
    given = parser.parse_args()
    shape = {"hidden": given.hidden, "intermediate": given.intermediate, "vocab": given.vocab}
    settings = Llama(batch=given.batch, length=given.length, layers=given.layers, **shape)
    model, inputs = filled(settings), settings.inputs(False)
    step = captured_step(trace(model, inputs), "llama")
    graph, problem = step.graph, mixed_problem(step, "cpu", given.device)
    away = [
        name.startswith("layers.") and int(name.split(".")[1]) >= given.resident
        for name in graph.op_names
    ]
    on_host = np.array(away) & graph.is_parameter
    layer = sum(p.nbytes for p in model.layers[0].parameters())
    for window in given.windows:
        begun = time.perf_counter()
        placement = problem.placement(np.where(on_host, 0, 1), prefetch_bytes=int(window * layer))
        with GraphRuntime(
            step, problem, placement, residents_of(model), graphs=given.graphs
        ) as run:
            built = time.perf_counter() - begun
            seconds = []
            for _ in range(given.steps + 2):
                begun = time.perf_counter()
                run.step(*inputs)
                seconds.append(time.perf_counter() - begun)
            fetched = int(graph.output_bytes[on_host].sum())
            row = {
                "window": window,
                "built_s": round(built, 2),
                "first_s": round(seconds[0], 4),
                "step_s": round(statistics.median(seconds[2:]), 5),
                "bound_s": round(fetched / given.bandwidth, 5),
                "fetched_bytes": fetched,
                "peak_bytes": run.peak_memory(),
                "window_bytes": {
                    str(place.device): getattr(place, "window_bytes", 0) for place in run.devices
                },
            }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
