"""One thread for the CPU and the GPU beside it, or one for each; ops launched one by one, or as
CUDA graphs.

    python benchmarks/gpu/hosts.py [--models cifar10_cnn,gpt2,rnnlm] [--placements 6]

The same placements in all four ways, held ready together and timed in turn, in an order drawn anew
in each round. Rows go to benchmarks/results/hosts_MACHINE_202611.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # for `support`

import fidelity
import roost
import rows as results
from roost.core.problem import Problem
from roost.cost_models.profiled import Profiled
from roost.runtime.ops.run import GraphRuntime
from roost.runtime.step.optimizers import Optimizer
from roost.runtime.step.unplaced import residents_of
from roost.search.measured.served_model import cores_of
from roost.simulator.reference import simulate
from support.runs import any_placement, streamed

WAYS = {
    "a thread each": (False, False),
    "one thread": (True, False),
    "a thread each, graphs": (False, True),
    "one thread, graphs": (True, True),
}


def some(problem: Problem, count: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    on_gpu = np.full(problem.graph.num_ops, problem.cluster.num_devices - 1)
    found = {
        "all on the GPU": problem.placement(on_gpu),
        "expert": fidelity._found(problem, "expert", 200, 0),
        "2 pieces": fidelity._pieces(problem, rng, 2),
        "10 pieces": fidelity._pieces(problem, rng, 10),
        "any": any_placement(problem, rng),
        "streamed": streamed(problem, rng, problem.cluster.num_devices - 1),
    }
    return dict(list(found.items())[:count])


def run(name: str, given: argparse.Namespace, rows: Path) -> None:
    model, inputs, step = fidelity.captured(name, True, False)
    cluster = roost.probe()
    costs = Profiled(step, seconds_each=0.01).profile(step.graph, cluster).costs
    problem = Problem(step.graph, cluster, costs)
    cores, chance = cores_of(cluster), np.random.default_rng(0)
    for label, placement in some(problem, given.placements).items():
        runs: dict[str, GraphRuntime] = {}
        laps: dict[str, list[float]] = {way: [] for way in WAYS}
        for way, (together, graphs) in WAYS.items():
            how = {"graphs": graphs, "one_thread": together}
            runs[way] = GraphRuntime(
                step, problem, placement, residents_of(model), Optimizer(rate=1e-4), cores, **how
            )
            for _ in range(3):
                runs[way].step(*inputs)
        gc.collect()
        gc.disable()
        for _ in range(given.rounds):
            for way in chance.permutation(list(WAYS)).tolist():
                runs[way].step(*inputs)
                for _ in range(3):
                    began = time.perf_counter()
                    runs[way].step(*inputs)
                    laps[way].append(time.perf_counter() - began)
        gc.enable()
        for each in runs.values():
            each.close()
        timeline = simulate(problem, placement)
        row = {
            "model": name,
            "placement": label,
            "predicted": timeline.step_time,
            "transfers": timeline.num_transfers,
        }
        row |= {way: float(np.median(each)) for way, each in laps.items()}
        row |= results.measured_with()
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        said = "  ".join(f"{way} {row[way] * 1e3:7.2f}" for way in WAYS)
        shown = f"{timeline.step_time * 1e3:7.2f} predicted, {timeline.num_transfers:4d} transfers"
        print(f"{name:12s} {label:15s} {shown}  {said} ms", flush=True)


def page(rows_file: Path) -> str:
    """Step times of each way of launching, and their ratios over all rows."""
    rows = results.read(rows_file)
    lines = [
        "# One thread for the CPU and the GPU beside it, or one for each\n",
        results.provenance(rows),
        "`python benchmarks/gpu/hosts.py`, then `python benchmarks/pages.py write`. Training steps under the "
        "same placements, four ways held ready together and timed in turn; medians in ms. `graphs`: runs of "
        "ops without transfers are launched as CUDA graphs.\n",
        "| ratio of step times | geometric mean | least | most |",
        "|---|---|---|---|",
    ]
    pairs = [("one thread", "a thread each"), ("one thread, graphs", "a thread each, graphs")]
    pairs += [("a thread each, graphs", "a thread each"), ("one thread, graphs", "one thread")]
    for one, other in pairs:
        ratios = [row[one] / row[other] for row in rows]
        mean = float(np.exp(np.mean(np.log(ratios))))
        lines.append(f"| {one} / {other} | {mean:.2f} | {min(ratios):.2f} | {max(ratios):.2f} |")
    lines += [
        "",
        f"| model | placement | transfers | predicted | {' | '.join(WAYS)} |",
        "|---|---|---|---|" + "---|" * len(WAYS),
    ]
    for row in rows:
        times = " | ".join(f"{row[way] * 1e3:.2f}" for way in ("predicted", *WAYS))
        lines.append(f"| {row['model']} | {row['placement']} | {row['transfers']} | {times} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="cifar10_cnn,gpt2,rnnlm")
    parser.add_argument("--placements", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rows = fidelity.RESULTS / f"hosts_{fidelity.machine()}_202611.jsonl"
    print(torch.__version__, roost.probe().links, flush=True)
    for name in given.models.split(","):
        run(name, given, rows)


if __name__ == "__main__":
    main()
