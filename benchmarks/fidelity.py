"""Predicted step time against measured: profiled costs and the simulator beside the graph runtime,
on this machine.

    python benchmarks/fidelity.py run --on virtual2 --small [--models cifar10_cnn,gpt2,rnnlm]
    [--placements 30]
    python benchmarks/fidelity.py run --on here [--models cifar10_cnn,gpt2,rnnlm] [--held 8]
    python benchmarks/fidelity.py run --on here_graphs ...
    python benchmarks/fidelity.py page

`virtual2` is two devices that are threads with half of the cores each, `here` the CPU and the GPUs,
`here_graphs` the same with runs of ops without transfers launched as CUDA graphs (and predicted
without launches). For each model, for training and for inference, placements are drawn, made by
rules and found by searches, some with parameters that are streamed. Each is predicted first. Then
`--held` of them at a time are held ready and timed in turn, in an order drawn anew in each round,
so that a machine that grows slower makes none of them look worse. What ops and links cost is timed
before, op by op, with none of the placements. Rows that are there already are not run again; a
model is profiled anew in each run, unless `--kept`. The scatter needs the `plots` extra.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # for `support`

import roost
import rows as results
from roost import zoo
from roost.core.graph import Graph
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.cost_models.profiled import Profiled
from roost.frontends.tracing.captured_step import CapturedStep, captured_step
from roost.frontends.tracing.trace import trace
from roost.placers.annealing import Annealing
from roost.runtime.ops.calibrate import calibrated
from roost.runtime.ops.run import GraphRuntime
from roost.runtime.step.optimizers import Optimizer
from roost.runtime.step.unplaced import residents_of
from roost.search.measured.served_model import cores_of
from roost.search.solve import search
from roost.simulator.reference import simulate
from rows import measured_with
from support.runs import any_placement, streamed

RESULTS = Path(__file__).parent / "results"
# Steps of tens of milliseconds on one core.
SMALL: dict[str, dict[str, Any]] = {
    "cifar10_cnn": {"batch": 16},
    "gpt2": {
        "batch": 2,
        "length": 64,
        "layers": 4,
        "hidden": 256,
        "heads": 4,
        "vocab": 2000,
        "positions": 64,
    },
    "rnnlm": {"batch": 16, "length": 8, "hidden": 256, "vocab": 2000},
    "inception_v3": {"batch": 2, "image": 96},
    "vit": {"batch": 2, "image": 64, "layers": 4, "hidden": 192, "heads": 3},
}
# For a GPU beside a CPU: steps of milliseconds on the one, of a tenth of a second on the other.
FULL: dict[str, dict[str, Any]] = {
    "cifar10_cnn": {"batch": 128},
    "gpt2": {
        "batch": 4,
        "length": 128,
        "layers": 6,
        "hidden": 512,
        "heads": 8,
        "vocab": 8000,
        "positions": 128,
    },
    "rnnlm": {"batch": 64, "length": 10, "hidden": 1024, "vocab": 8000},
    "inception_v3": {"batch": 16},
}
RULES = ("expert", "heft", "etf", "topo", "rules")
HOW = {True: "training", False: "inference"}
QUIET = 0.02  # share of a lap that threads may wait for a core
GOALS = ((0.10, 0.95), (0.05, 0.98))  # median error, rank correlation


def machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0).split()[-1].lower()
    return f"{platform.machine()}_{os.cpu_count()}core"


def rows_file() -> Path:
    return Path(os.environ.get("ROWS", RESULTS / f"fidelity_{machine()}_202611.jsonl"))


def measured_on() -> str:
    return rows_file().stem.removeprefix("fidelity_").rpartition("_")[0]


def rows() -> list[dict[str, Any]]:
    path = rows_file()
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ---------------------------------------------------------------------- placements


def placements(problem: Problem, count: int, seed: int) -> dict[str, Placement]:
    """By name: rules, found, and drawn until there are so many."""
    found: dict[str, Placement] = {}
    seen: set[str] = set()
    for name, placement in _all(problem, np.random.default_rng(seed)):
        if len(found) == count:
            break
        if placement.digest not in seen and simulate(problem, placement).feasible:
            seen.add(placement.digest)
            found[name] = placement
    return found


def _all(problem: Problem, rng: np.random.Generator) -> Iterator[tuple[str, Placement]]:
    graph, cluster = problem.graph, problem.cluster
    for device, name in enumerate(cluster.device_names):
        yield f"all on {name}", problem.placement(np.full(graph.num_ops, device))
    for name in RULES:
        yield name, _found(problem, name, 200, 0)
    for trials, seed in ((50, 0), (200, 1), (1000, 2)):
        yield f"auto, {trials} trials", _found(problem, "auto", trials, seed)
    for trials, seed in ((300, 0), (2000, 1)):
        yield f"annealing, {trials} trials", _found(problem, Annealing(threads=1), trials, seed)
    tight = capped(problem, 0.6)
    for name, trials in (("auto", 300), ("annealing", 1000)):
        yield (
            f"{name}, 0.6 of the memory",
            _found(tight, Annealing(threads=1) if name != "auto" else name, trials, 0),
        )
    best = _found(problem, "auto", 200, 1)
    for number in range(1000):
        yield f"streamed {number}", streamed(problem, rng, on=cluster.num_devices - 1 - number % 2)
        yield f"pieces {number}", _pieces(problem, rng, int(rng.integers(2, 12)))
        share = float(rng.choice([0.01, 0.03, 0.1]))
        yield f"found, {share:.0%} moved, {number}", _moved(problem, best, rng, share)
        yield (
            f"pieces and streamed {number}",
            _pieces(problem, rng, int(rng.integers(2, 6)), away=0.3),
        )
        if number % 2 == 0:
            yield f"any {number}", any_placement(problem, rng)


def _found(problem: Problem, placer: Any, trials: int, seed: int) -> Placement:
    best = search(problem, placer, trials=trials, seed=seed, prove=False, workers=1).best.placement
    # A run follows one order on each device; whichever op is ready first is no such order.
    return replace(best, order="rank", priority=None) if best.order == "fifo" else best


def capped(problem: Problem, share: float) -> Problem:
    """The last device has so much of the memory that a step takes all on one device."""
    whole = simulate(
        problem, problem.placement(np.full(problem.graph.num_ops, problem.cluster.num_devices - 1))
    )
    *others, last = problem.cluster.devices
    less = replace(last, memory=int(share * whole.peak_memory[-1]))
    return Problem(problem.graph, replace(problem.cluster, devices=(*others, less)), problem.costs)


def _grouped(problem: Problem, device: Any, **more: Any) -> Placement:
    members = np.flatnonzero(problem.graph.group >= 0)
    device[members] = device[problem.group_leader[problem.graph.group[members]]]
    return problem.placement(device, **more)


def _pieces(
    problem: Problem, rng: np.random.Generator, pieces: int, away: float = 0.0
) -> Placement:
    """The program cut into pieces, each on another device than the last; parameters where they are
    first read."""
    graph = problem.graph
    cuts = np.sort(rng.choice(graph.num_ops, pieces - 1, replace=False))
    device = (np.searchsorted(cuts, np.arange(graph.num_ops), side="right") + rng.integers(2)) % 2
    device = (
        device
        if problem.cluster.num_devices == 2
        else device * rng.integers(1, problem.cluster.num_devices)
    )
    for op in np.flatnonzero(graph.is_parameter).tolist():
        readers = _readers(graph, op)
        if readers:
            device[op] = device[readers[0]]
    away_now = graph.is_parameter & (rng.random(graph.num_ops) < away)
    device[away_now] = (device[away_now] + 1) % problem.cluster.num_devices
    window = int(rng.integers(0, 1 + int(graph.output_bytes[graph.is_parameter].sum())))
    return _grouped(problem, device, prefetch_bytes=window)


def _readers(graph: Graph, op: int) -> list[int]:
    return graph.consumer_lists()[op]


def _moved(
    problem: Problem, placement: Placement, rng: np.random.Generator, share: float
) -> Placement:
    device = placement.device.copy()
    chosen = ~problem.graph.is_parameter & (rng.random(len(device)) < share)
    device[chosen] = rng.integers(0, problem.cluster.num_devices, int(chosen.sum()))
    same = {
        "order": placement.order,
        "priority": placement.priority,
        "prefetch_bytes": placement.prefetch_bytes,
    }
    return _grouped(problem, device, **same)


# ---------------------------------------------------------------------- one model


def captured(
    name: str, train: bool, small: bool
) -> tuple[torch.nn.Module, tuple[Any, ...], CapturedStep]:
    torch.manual_seed(0)
    model, inputs = zoo.model(name, train, **(SMALL if small else FULL).get(name, {}))
    program = trace(model, inputs, train=train)
    return model, inputs, captured_step(program, name, "sgd" if train else None)


def run_model(name: str, train: bool, given: argparse.Namespace) -> None:
    what = {"on": given.on, "model": name, "train": train, "small": given.small}
    done = {
        row["placement"] for row in rows() if all(row[key] == value for key, value in what.items())
    }
    if len(done) >= given.placements:
        return
    begun = time.perf_counter()
    model, inputs, step = captured(name, train, given.small)
    cluster = roost.probe(virtual=2) if given.on == "virtual2" else roost.probe()
    graphs = given.on == "here_graphs"
    launched = {"launches": not graphs, "seconds_each": given.seconds_each}
    costs = Profiled(step, in_step=True, refresh=not given.kept, **launched).profile(
        step.graph, cluster
    )
    problem = Problem(step.graph, cluster, costs.costs)
    each_alone = Profiled(step, in_step=False, **launched).profile(step.graph, cluster)
    by_itself = Problem(step.graph, cluster, each_alone.costs)
    whole = calibrated(step, problem, residents_of(model), inputs, cores_of(cluster))
    print(whole.slower, whole.crossings, flush=True)
    took = time.perf_counter() - begun
    every = placements(problem, given.placements, given.seed)
    missing = [each for each in every if each not in done]
    print(
        f"{name} train={train}: {step.graph.num_ops} ops, profiled in {took:.0f} s, {len(missing)} to time",
        flush=True,
    )
    chance = np.random.default_rng(given.seed)
    chance.shuffle(missing)
    for at in range(0, len(missing), given.held):
        chunk = {each: every[each] for each in missing[at : at + given.held]}
        alone = {f"all on {each}": every[f"all on {each}"] for each in cluster.device_names}
        laps = timed(step, problem, alone | chunk, model, inputs, given, chance)
        loaded = as_loaded(problem, alone, laps)
        for each, placement in chunk.items():
            row = what | {"placement": each} | _row(problem, placement, laps[each])
            row["predicted_by_itself"] = simulate(by_itself, placement).step_time
            row["predicted_loaded"] = simulate(loaded, placement).step_time
            row["predicted_calibrated"] = simulate(whole.problem, placement).step_time
            row |= {
                "load": round(os.getloadavg()[0], 2),
                "costs": problem.costs.source,
                "profiled_s": round(took, 1),
            }
            with rows_file().open("a") as file:
                file.write(json.dumps(row | measured_with()) + "\n")
            said = (
                f"{row['predicted'] * 1e3:8.2f} ms predicted {row['measured'] * 1e3:8.2f} measured"
            )
            print(f"  {said} {row['predicted'] / row['measured']:6.3f}  {each}", flush=True)


def as_loaded(
    problem: Problem, alone: dict[str, Placement], laps: dict[str, list[tuple[float, float]]]
) -> Problem:
    """The problem with devices as much slower as the steps on each of them alone were, in the same
    rounds."""
    slower = [
        undisturbed(laps[name])[1] / simulate(problem, placement).step_time
        for name, placement in alone.items()
    ]
    return Problem(problem.graph, problem.cluster, problem.op_time * np.array(slower))


def undisturbed(laps: list[tuple[float, float]]) -> tuple[float, float, float, float]:
    """Quartiles of the laps that count, and the share of them that threads waited for a core.

    Laps where other programs had the cores are not steps of this one. Where all are like that, a
    third counts: those that were disturbed least.
    """
    quiet = [lap for lap in laps if lap[1] <= QUIET]
    if len(quiet) < 3:
        quiet = sorted(laps, key=lambda lap: lap[1])[: max(3, len(laps) // 3)]
    low, middle, high = np.quantile([seconds for seconds, _ in quiet], [0.25, 0.5, 0.75]).tolist()
    return low, middle, high, statistics.median(share for _, share in quiet)


def waited() -> float:
    """Seconds that threads of this process were ready to run and had no core, so far."""
    total = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, IndexError, ValueError):
            total += int(task.read_text().split()[1])
    return total * 1e-9


def _row(problem: Problem, placement: Placement, laps: list[tuple[float, float]]) -> dict[str, Any]:
    timeline = simulate(problem, placement)
    busy = np.zeros(problem.cluster.num_devices)
    np.add.at(
        busy, placement.device, problem.op_time[np.arange(len(placement.device)), placement.device]
    )
    low, middle, high, share = undisturbed(laps)
    return {
        "predicted": timeline.step_time, "measured": middle, "low": low, "high": high, "waited": round(share, 4),
        "fastest": min(laps)[0],
        "laps": len(laps), "order": placement.order, "transfers": timeline.num_transfers,
        "bytes": int(problem.graph.output_bytes[timeline.transfers.tensor].sum()), "busy": busy.tolist(),
    }  # fmt: skip


def timed(
    step: CapturedStep,
    problem: Problem,
    chunk: dict[str, Placement],
    model: torch.nn.Module,
    inputs: tuple[Any, ...],
    given: argparse.Namespace,
    chance: np.random.Generator,
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of single steps of each, in turn, and the share of them that threads waited for a
    core."""
    cores, residents = cores_of(problem.cluster), residents_of(model)
    laps: dict[str, list[tuple[float, float]]] = {each: [] for each in chunk}
    running: dict[str, GraphRuntime] = {}
    try:
        for each, placement in chunk.items():
            graphs = given.on == "here_graphs"
            run = GraphRuntime(
                step, problem, placement, residents, Optimizer(rate=1e-4), cores, graphs=graphs
            )
            running[each] = run
            for _ in range(2 + graphs):  # they are recorded in the second
                run.step(*inputs)
        gc.collect()
        gc.disable()
        for _ in range(given.rounds):
            for each in chance.permutation(sorted(chunk)).tolist():
                # Read once for all of them: to read what each thread waited takes as long as a
                # short step.
                before, begun, took = waited(), time.perf_counter(), []
                for _ in range(given.settle):  # what ran before has left the caches full of its own
                    running[each].step(*inputs)
                for _ in range(given.steps):
                    start = time.perf_counter()
                    running[each].step(*inputs)
                    took.append(time.perf_counter() - start)
                whole = time.perf_counter() - begun
                share = (waited() - before) / whole
                laps[each] += [(seconds, share) for seconds in took]
    finally:
        gc.enable()
        for run in running.values():
            run.close()
        running.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return laps


# ---------------------------------------------------------------------- the page


OURS = "predicted_by_itself"  # with costs as they are by default: each op timed by itself
CALIBRATED = "predicted_calibrated"  # rings in the scatter


def figures(found: list[dict[str, Any]], predicted: str = OURS) -> tuple[float, float, float]:
    """Median relative error, 90th percentile of it, and rank correlation."""
    from scipy.stats import spearmanr

    if not found:
        return math.inf, math.inf, 0.0
    ours, theirs = (np.array([row[key] for row in found]) for key in (predicted, "measured"))
    error = np.abs(ours - theirs) / theirs
    return (
        float(np.median(error)),
        float(np.quantile(error, 0.9)),
        float(spearmanr(ours, theirs).statistic),
    )


def _kinds(found: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    return list(dict.fromkeys((row["model"], row["train"]) for row in found))


def page(path: Path) -> str:
    every = results.read(path)
    machine = path.stem.removeprefix("fidelity_").rpartition("_")[0]
    lines = [
        "# Predicted against measured step time\n",
        results.provenance(every),
        f"Machine: {machine}. Costs are profiled op by op, and links by `roost.probe`; step times are those of "
        "the simulator and of the graph runtime, medians of steps in turn. Rank correlation is Spearman's.\n",
        "`waited` is the share of the step, summed over threads, that threads were ready and had no core, which other "
        "programs had: where it is not near zero the machine was not ours, and errors say little. Laps with least of "
        "it count. Predictions are with the default costs, each op timed by itself. The last columns have the same "
        "steps predicted from ops timed in their step; with these and devices and crossings as whole steps before it "
        "had them (`roost profile --calibrate`), for all but steps on one device; and with devices as much slower as "
        "in the same rounds.\n",
    ]
    for on in dict.fromkeys(row["on"] for row in every):
        here = [row for row in every if row["on"] == on]
        small = " --small" if here[0]["small"] else ""
        names = ",".join(dict.fromkeys(row["model"] for row in here))
        lines += [
            f"## {on}\n",
            f"`python benchmarks/fidelity.py run --on {on}{small} --models {names}`, load of the machine "
            f"{statistics.median(row['load'] for row in here):.1f} (median).\n",
            "| model | step | placements | measured, ms | median error | ninth decile | rank correlation | mean bias "
            "| waited | ops timed in their step: error, rank | calibrated: error, rank "
            "| devices as loaded: error, rank |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        parts = [
            (
                model,
                "training" if train else "inference",
                [r for r in here if (r["model"], r["train"]) == (model, train)],
            )
            for model, train in _kinds(here)
        ]
        for model, how, some in [*parts, ("all", "", here)]:
            error, most, rank = figures(some)
            bias = float(np.exp(np.mean([np.log(row[OURS] / row["measured"]) for row in some]))) - 1
            span = f"{min(r['measured'] for r in some) * 1e3:.1f} to {max(r['measured'] for r in some) * 1e3:.1f}"
            others = [figures(*each) for each in _others(some)]
            lines.append(
                f"| {model} | {how} | {len(some)} | {span} | {error:.1%} | {most:.1%} | {rank:.3f} | {bias:+.1%} | "
                f"{statistics.median(row['waited'] for row in some):.0%} | "
                + " | ".join(
                    f"{other[0]:.1%}, {other[2]:.3f}" if other[0] < math.inf else ""
                    for other in others
                )
                + " |"
            )
        lines += ["", *_goals(here), *_by_kind(here), ""]
    lines.append(f"![predicted against measured]({path.with_suffix('.svg').name})")
    return "\n".join(lines) + "\n"


def _others(some: list[dict[str, Any]]) -> Iterator[tuple[list[dict[str, Any]], str]]:
    """Rows and the prediction of them that is held against what was measured."""
    yield some, "predicted"
    # Whole steps on one device are what it was calibrated with, or nearly.
    yield [row for row in some if CALIBRATED in row and _kind(row) != "one device"], CALIBRATED
    yield some, "predicted_loaded"


def _goals(here: list[dict[str, Any]]) -> list[str]:
    """Both goals held against all rows of one kind of devices."""
    lines = ["| figure | found | goal | |", "|---|---|---|---|"]
    error, _, rank = figures(here)
    for most, least in GOALS:
        said = results.verdict(error, most, here)
        lines.append(f"| median error | {error:.1%} | at most {most:.0%} | {said} |")
        said = results.verdict(rank, least, here, at_most=False)
        lines.append(f"| rank correlation | {rank:.3f} | at least {least:.2f} | {said} |")
    return [*lines, ""]


def _by_kind(found: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| kind of placement | placements | median error | predicted over measured |",
        "|---|---|---|---|",
    ]
    for kind in dict.fromkeys(_kind(row) for row in found):
        some = [row for row in found if _kind(row) == kind]
        ratio = statistics.median(row[OURS] / row["measured"] for row in some)
        lines.append(f"| {kind} | {len(some)} | {figures(some)[0]:.1%} | {ratio:.3f} |")
    return lines


def _kind(row: dict[str, Any]) -> str:
    first = row["placement"].split(",")[0].rstrip(" 0123456789")
    return "one device" if first.startswith("all on") else "rules" if first in RULES else first


def plot(path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "roost"  # the same rows, the same file
    import matplotlib.pyplot as plt

    every = rows()
    places = list(dict.fromkeys(row["on"] for row in every))
    figure, panels = plt.subplots(1, len(places), figsize=(6 * len(places), 5.5), squeeze=False)
    for panel, on in zip(panels[0], places, strict=True):
        here = [row for row in every if row["on"] == on]
        for model, train in _kinds(here):
            some = [row for row in here if (row["model"], row["train"]) == (model, train)]
            x, y = ([row[key] * 1e3 for row in some] for key in ("measured", OURS))
            dots = panel.scatter(
                x, y, s=14, marker="o" if train else "x", label=f"{model}, {HOW[train]}"
            )
            held = [
                (r["measured"] * 1e3, r[CALIBRATED] * 1e3)
                for r in some
                if CALIBRATED in r and train
            ]
            if held:
                colour = dots.get_facecolor()
                panel.scatter(
                    *zip(*held, strict=True), s=22, marker="o", facecolors="none", edgecolors=colour
                )
        ends = [f(row[key] * 1e3 for row in here for key in ("measured", OURS)) for f in (min, max)]
        panel.plot(ends, ends, "k-", linewidth=0.8)
        for factor in (0.9, 1.1):
            panel.plot(ends, [end * factor for end in ends], "k:", linewidth=0.6)
        rings = " (rings: calibrated)" if any(CALIBRATED in row for row in here) else ""
        panel.set(
            xscale="log",
            yscale="log",
            xlabel="measured, ms",
            ylabel=f"predicted, ms{rings}",
            title=on,
        )
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("run", "page"))
    parser.add_argument("--on", choices=("virtual2", "here", "here_graphs"), default="virtual2")
    parser.add_argument("--models", default="cifar10_cnn,gpt2,rnnlm")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps-of", choices=("both", "training", "inference"), default="both")
    parser.add_argument("--placements", type=int, default=30)
    parser.add_argument(
        "--held", type=int, default=10, help="placements that are held ready at a time"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="that are timed in each round")
    parser.add_argument(
        "--settle", type=int, default=1, help="steps of each round that are not timed"
    )
    parser.add_argument("--seconds-each", type=float, default=0.03, help="for each unique op")
    parser.add_argument("--kept", action="store_true", help="use op times of before")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.part == "page":
        rows_file().with_suffix(".md").write_text(page(rows_file()))
        plot(rows_file().with_suffix(".svg"))
        return
    for name in given.models.split(","):
        for train in {"both": (True, False), "training": (True,), "inference": (False,)}[
            given.steps_of
        ]:
            run_model(name, train, given)


if __name__ == "__main__":
    main()
