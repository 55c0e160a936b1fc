"""Simulated training steps in microbatches: `auto` against pipelines and data parallelism.

    python benchmarks/microbatches/simulated.py capture
    python benchmarks/microbatches/simulated.py run [--seeds 5] [--only MODEL CLUSTER] [--part N/OF]
    python benchmarks/microbatches/simulated.py page

`capture` writes the graph of each model at each size of microbatch to `out/microbatches`. `run` adds
a row for each search that has none; it can be stopped and goes on. All of the first seed come first.
Part 1/2 and part 2/2 share the cells, for two processes. `page` renders the rows.

All searches have the same CPU seconds, on one thread: `auto` over all numbers of microbatches, `auto`
of today on the whole batch, and each of `pipeline`, `data_parallel` and `hybrid` over all numbers of
microbatches, orders and layouts, with sums of gradients arranged for each of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulated_page import CAPPED, SECONDS, page

import roost
from roost.core.cluster import Cluster
from roost.placers.auto import Auto
from roost.placers.toolkit import CopiedStep, sketch_trial, sketches
from roost.search.budget import Budget
from roost.search.evaluate import Evaluation, Search
from roost.search.microbatches import COUNTS, solve_microbatches, unrolled_problem
from roost.search.simulating import Simulating
from roost.search.solve import search
from roost.search.warm_up import warm_up
from roost.transforms.microbatch import Microbatch
from rows import RESULTS, ROOT, Row, measured_with, read

ROWS = RESULTS / "microbatches_simulated_x86_64_2core_202611.jsonl"
GRAPHS = ROOT / "out" / "microbatches"
SMALL = {"layers": 16, "hidden": 2048, "heads": 16, "intermediate": 5632, "vocab": 32000}
EXPERTS = {"layers": 8, "hidden": 1024, "heads": 16, "intermediate": 3584}
MODELS = {  # batch, and settings of a size that fits
    "gpt2": (16, {"length": 1024}),
    "vit": (32, {}),
    "bert": (16, {}),
    "t5": (32, {}),
    "transformer": (64, {}),
    "llama": (16, SMALL),
    "rnnlm": (64, {}),
    "nmt": (64, {}),
    "resnet50": (64, {}),
    "inception_v3": (32, {}),
    "moe": (16, EXPERTS),
}
CLUSTERS = ("a100x4", "rtx4090_rtx3060", "k80x4", "two_hosts_a100x4", "h100x8")
LARGE = ("gpt2", 64, "h100x8")  # a cell of its own, with a goal
FAMILIES = ("pipeline", "data_parallel", "hybrid")


def cells() -> list[tuple[str, int, str, float]]:
    """Model, batch, cluster, and the share of the memory that one device needs, or 0 for all."""
    found = [(model, batch, on, 0.0) for on in CLUSTERS for model, (batch, _) in MODELS.items()]
    found.append((*LARGE, 0.0))
    found.append(("gpt2", MODELS["gpt2"][0], "a100x4", CAPPED))
    return found


def graph_file(model: str, batch: int, count: int) -> Path:
    return GRAPHS / f"{model}_{batch}_{count}.json.gz"


def capture() -> None:
    GRAPHS.mkdir(parents=True, exist_ok=True)
    for model, batch in {(model, batch): 0 for model, batch, *_ in cells()}:
        for count in COUNTS:
            path = graph_file(model, batch, count)
            if not path.exists():
                settings = MODELS[model][1]
                graph = roost.zoo.build(model, train=True, batch=batch // count, **settings)
                graph.save(path)
                print(path.name, graph.num_ops, flush=True)


def problems_of(model: str, batch: int, cluster: Cluster) -> dict[int, roost.Problem]:
    """The step of one microbatch, by the number of microbatches."""
    return {
        count: roost.estimate(roost.load(graph_file(model, batch, count)), cluster)
        for count in COUNTS
    }


def clock() -> Budget:
    return Budget(seconds=SECONDS, clock=time.process_time)


def family_row(problems: dict[int, roost.Problem], family: str) -> Row:
    """The best of a family over all numbers of microbatches, the most promising first."""
    found = [
        each
        for count, problem in problems.items()
        if count > 1
        for each in sketches(CopiedStep.of(problem), count, (family,))
    ]
    budget, best, trials = clock(), None, 0
    for sketch in sorted(found, key=lambda each: each.seconds):
        if budget.is_spent:
            break
        base = problems[sketch.count]
        settings = Microbatch(sketch.count, batch_statistics=True)
        chain = settings.apply(base.graph)
        devices = sketch.devices(unrolled_problem(base, chain))
        made, _ = chain.arranged(roost.Placement(devices))
        problem = unrolled_problem(base, made)
        own = Search(problem, Simulating(problem, 1), Budget(trials=100))
        trial = sketch_trial(problem, sketch, Evaluation(own, family))
        trials += own.budget.num_trials
        if trial.better_than(best and best[0]):
            best = (trial, sketch)
    if best is None:
        return {"feasible": False, "trials": 0}
    trial, sketch = best
    return {
        "step_time": trial.step_time,
        "feasible": trial.feasible,
        "count": sketch.count,
        "schedule": sketch.schedule.name,
        "replicas": len(sketch.layout.replicas),
        "chunks": sketch.layout.num_chunks,
        "trials": trials,
    }


def whole_row(problems: dict[int, roost.Problem], seed: int) -> Row:
    result = search(problems[1], Auto(threads=1), seed=seed, budget=clock(), workers=1)
    return {
        "step_time": result.best.step_time,
        "feasible": result.best.feasible,
        "count": 1,
        "trials": result.num_trials,
    }


def auto_row(problems: dict[int, roost.Problem], seed: int) -> Row:
    result = solve_microbatches(
        problems.__getitem__, COUNTS, seed=seed, threads=1, budget=clock(), batch_statistics=True
    )
    bound = result.result.bound
    return {
        "step_time": result.best.step_time,
        "feasible": result.best.feasible,
        "count": result.count,
        "trials": result.result.num_trials,
        "bound": None if bound is None else bound.step_time,
        "proof": None if bound is None else bound.proof,
    }


def single_row(problems: dict[int, roost.Problem]) -> Row:
    best = search(problems[1], "single", prove=False).best
    return {"step_time": best.step_time, "feasible": best.feasible, "count": 1, "trials": 1}


def capped(cluster: Cluster, share: float, batch: int, model: str) -> Cluster:
    """The cluster with accelerators that have a share of what one of them needs alone."""
    if not share:
        return cluster
    problem = roost.estimate(roost.load(graph_file(model, batch, 1)), cluster)
    most = int(share * search(problem, "single", prove=False).best.peak_memory.max())
    devices = tuple(
        replace(each, memory=min(each.memory, most)) if each.kind != "cpu" else each
        for each in cluster.devices
    )
    return replace(cluster, devices=devices)


def run(seeds: int, only: list[str] | None, part: str) -> None:
    number, of = (int(each) for each in part.split("/"))
    provenance = measured_with()
    key = ("model", "batch", "cluster", "cap", "placer", "seed", "commit")
    done = {tuple(row[name] for name in key) for row in read(ROWS)}
    for busy in (False, True):  # loops are compiled before the first clock runs
        warm_up(Auto(threads=1), prove=True, busy=busy)
    for seed in range(seeds):
        for place, (model, batch, on, cap) in enumerate(cells()):
            if place % of != number - 1 or (only and [model, on] != only):
                continue
            placers = ["auto", "whole"] + (["single", *FAMILIES] if seed == 0 else [])
            cell = (model, batch, on, cap)
            missing = [p for p in placers if (*cell, p, seed, provenance["commit"]) not in done]
            if not missing:
                continue
            problems = problems_of(model, batch, capped(roost.cluster(on), cap, batch, model))
            for placer in missing:
                began = time.process_time()
                if placer == "auto":
                    found = auto_row(problems, seed)
                elif placer == "whole":
                    found = whole_row(problems, seed)
                elif placer == "single":
                    found = single_row(problems)
                else:
                    found = family_row(problems, placer)
                row = {
                    **dict(zip(key, (*cell, placer, seed, provenance["commit"]), strict=True)),
                    **found,
                    "cpu_seconds": round(time.process_time() - began, 2),
                    "devices": sum(d.kind != "cpu" for d in problems[1].cluster.devices),
                    **provenance,
                }
                with ROWS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                shown = f"{1e3 * row['step_time']:.2f} ms" if "step_time" in row else "nothing"
                print(*cell, placer, seed, shown, row["cpu_seconds"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("capture")
    runs = commands.add_parser("run")
    runs.add_argument("--seeds", type=int, default=5)
    runs.add_argument("--only", nargs=2, metavar=("MODEL", "CLUSTER"))
    runs.add_argument("--part", default="1/1")
    commands.add_parser("page")
    given = parser.parse_args()
    if given.command == "capture":
        capture()
    elif given.command == "run":
        run(given.seeds, given.only, given.part)
    else:
        target = ROWS.with_suffix(".md")
        target.write_text(page(ROWS))
        print(target.relative_to(ROOT))


if __name__ == "__main__":
    main()
