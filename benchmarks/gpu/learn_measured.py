"""Reinforcement learning on the real thing: `seq2seq` with measured steps as its reward, beside
baselines.

    python benchmarks/gpu/learn_measured.py run --model gpt2 --cap 0.75 --trials 2000 --runs 500
    --groups 30 --repeats 1
    python benchmarks/gpu/learn_measured.py run --tiny --devices virtual2 --trials 60 --groups 12
    python benchmarks/gpu/learn_measured.py page

As the first paper did (Mirhoseini et al. 2017): each placement that the policy draws is run, and
how long its step took is what the policy learns from. The last device has a cap, a share of what
the step takes there alone. What was learned is then timed in turn with the baselines, which are
found from profiled costs with the simulator: the best single device, `expert`, the best of the
heuristics, and `annealing`. With `--journal` a search that ran out of its seconds goes on the next
time. A row is written for each placer, and one for the race.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
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
from roost.core.problem import Problem
from roost.core.trial import Trial
from roost.cost_models.profiled import Profiled
from roost.placers._learning.sequence_policy import SequenceNetwork
from roost.placers.annealing import Annealing
from roost.placers.seq2seq import Seq2seq
from roost.search.measured.measuring import Measuring
from roost.search.measured.model_source import ModelSource
from roost.search.measured.race import race
from roost.search.solve import search
from roost.simulator.compiled import simulate

RESULTS = Path(__file__).parents[1] / "results"
HEURISTICS = ("heft", "etf", "topo", "sct", "rules")
TINY: dict[str, dict[str, Any]] = {
    "gpt2": {
        "batch": 2,
        "length": 32,
        "layers": 2,
        "hidden": 128,
        "heads": 4,
        "vocab": 500,
        "positions": 32,
    },
    "cifar10_cnn": {"batch": 8, "channels": 16},
}
# Small enough for 500 placements in five minutes, those with much of the work on the CPU among
# them.
SMALLER = {
    "batch": 4,
    "length": 128,
    "layers": 2,
    "hidden": 512,
    "heads": 8,
    "vocab": 8000,
    "positions": 128,
}
FULL: dict[str, dict[str, Any]] = {"gpt2": SMALLER}


def machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0).split()[-1].lower()
    return f"{platform.machine()}_{os.cpu_count()}core"


def rows_file() -> Path:
    return Path(os.environ.get("ROWS", RESULTS / f"learn_measured_{machine()}_202611.jsonl"))


def rows() -> list[dict[str, Any]]:
    path = rows_file()
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep(row: dict[str, Any]) -> None:
    with rows_file().open("a") as file:
        file.write(json.dumps(row) + "\n")
    print({key: value for key, value in row.items() if key != "curve"}, flush=True)


def runnable(trial: Trial) -> Trial:
    """A run follows one order on each device; whichever op is ready first is no such order."""
    if trial.placement.order != "fifo":
        return trial
    return replace(trial, placement=replace(trial.placement, order="rank"))


def capped_problem(source: ModelSource, given: argparse.Namespace) -> Problem:
    model, args, kwargs = source.build()
    step = source.described(model, args, kwargs, given.model)
    cluster = roost.probe(virtual=2) if given.devices == "virtual2" else roost.probe()
    problem = Problem(step.graph, cluster, Profiled(step).estimate(step.graph, cluster))
    last = cluster.num_devices - 1
    whole = simulate(problem, problem.placement(np.full(step.graph.num_ops, last)))
    less = replace(cluster.devices[last], memory=int(given.cap * int(whole.peak_memory[last])))
    return Problem(
        step.graph, replace(cluster, devices=(*cluster.devices[:last], less)), problem.costs
    )


def baselines(problem: Problem) -> dict[str, Trial]:
    """By name, what the simulator takes for the best of each; those that fit."""
    found = {
        name: search(problem, name, trials=300, prove=False).best for name in ("single", "expert")
    }
    tried = [search(problem, name, trials=300, prove=False).best for name in HEURISTICS]
    fit = [trial for trial in tried if trial.feasible]
    if fit:
        found["best heuristic"] = min(fit, key=lambda trial: trial.step_time)
    found["annealing"] = search(problem, Annealing(threads=1), trials=5_000, prove=False).best
    return {name: runnable(trial) for name, trial in found.items() if trial.feasible}


def run(given: argparse.Namespace) -> None:
    about = {
        "model": given.model,
        "tiny": given.tiny,
        "train": not given.inference,
        "devices": given.devices,
    }
    about |= {
        "cap": given.cap,
        "groups": given.groups,
        "trials_given": given.trials,
        "seed": given.seed,
    }
    if any(
        row["what"] == "race" and all(row[key] == value for key, value in about.items())
        for row in rows()
    ):
        return
    sizes = (TINY if given.tiny else FULL).get(given.model, {})
    source = ModelSource(given.model, sizes, train=not given.inference, optimizer="sgd", seed=0)
    begun = time.perf_counter()
    problem = capped_problem(source, given)
    print(
        f"{problem.graph.num_ops} ops, profiled after {time.perf_counter() - begun:.0f} s",
        flush=True,
    )
    theirs = baselines(problem)
    measuring = Measuring(problem, source, repeats=given.repeats)
    try:
        begun = time.perf_counter()
        result, curve = learned(problem, measuring, given)
        row = {
            **about, **results.measured_with(), "what": "learned", "seconds": time.perf_counter() - begun, "trials": result.num_trials,
            "measured": result.best.step_time, "simulated": simulate(problem, result.best.placement).step_time,
            "feasible": result.best.feasible, "ended": result.ended, **curve,
            "processes": measuring.candidates.num_started,
        }  # fmt: skip
        if result.ended == "stopped" and given.journal:
            print(f"stopped after {result.num_trials} trials; run it again to go on", flush=True)
            return
        keep(row)
        finalists = [replace(runnable(result.best), placer="seq2seq, measured")]
        found = race(measuring, finalists, theirs, rounds=given.rounds, seed=given.seed)
    finally:
        measuring.close()
    for each in found.standings:
        low, high = np.quantile(each.laps, [0.25, 0.75]).tolist()
        simulated = simulate(problem, each.trial.placement).step_time
        standing = {"placer": each.name, "measured": each.trial.step_time, "low": low, "high": high}
        keep(
            {
                **about,
                "what": "standing",
                **standing,
                "simulated": simulated,
                "rounds": len(each.laps),
            }
        )
    keep(
        {
            **about, "what": "race", "recommended": found.recommended.name, "said": found.said, "ratio": found.ratio,
            "low": found.low, "high": found.high, "failed": dict(found.failed), "load": os.getloadavg()[0],
        }
    )  # fmt: skip


def learned(
    problem: Problem, measuring: Measuring, given: argparse.Namespace
) -> tuple[Any, dict[str, Any]]:
    """The search by measured steps, and how it went: the best so far at each trial, and how many
    failed."""
    seen: list[tuple[int, float]] = []
    done = failed = num_run = 0
    reasons: Counter[str] = Counter()

    def watch(progress: Any) -> bool:
        nonlocal done, failed, num_run
        done, failed = progress.num_trials, failed + (not progress.trial.feasible)
        num_run += progress.trial.source == Measuring.source
        reasons[progress.trial.why] += 1
        if progress.best.feasible and (not seen or progress.best.step_time < seen[-1][1]):
            seen.append((progress.num_trials, progress.best.step_time))
        if done % 20 == 0:
            best = (
                f"{progress.best.step_time * 1e3:.2f} ms" if progress.best.feasible else "none fits"
            )
            print(
                f"  {done} trials in {time.perf_counter() - begun:.0f} s, best {best}; {dict(reasons)}",
                flush=True,
            )
        hopeless = num_run >= given.hopeless and not progress.best.feasible
        return hopeless or num_run >= given.runs or time.perf_counter() - begun > given.seconds

    # A policy on the GPU would take memory and time from what is measured there. Without a prior
    # for fast devices: nearly all that is drawn with it is on the GPU, and does not fit.
    network = SequenceNetwork(
        train_on="cpu", speed_prior=0.0, heuristic_prior=2.0 if given.heuristic else 0.0
    )
    placer = Seq2seq(num_groups=given.groups, batch=given.batch, network=network, refine=0.0)
    begun = time.perf_counter()
    journal = rows_file().with_suffix(".trials.jsonl") if given.journal else None
    result = search(
        problem, placer, trials=given.trials, seed=given.seed, on_trial=watch, source=measuring.lent(), journal=journal,
        prove=False,
    )  # fmt: skip
    return result, {"curve": seen, "failed": failed, "run": num_run, "reasons": dict(reasons)}


# ---------------------------------------------------------------------- the page


def page(path: Path) -> str:
    every, there = results.read(path), path.stem.removeprefix("learn_measured_").rpartition("_")[0]
    lines = [
        "# A learned placer with measured rewards\n",
        results.provenance(every),
        f"Machine: {there}. `python benchmarks/gpu/learn_measured.py run` with the settings below, then `page`. "
        "Placements that the policy drew were run in another process; those that do not fit as simulated were not run, "
        "and count as trials that failed. The race times all in turn, in a new order in each round.\n",
    ]
    named = ("model", "tiny", "train", "devices", "cap", "groups", "trials_given", "seed")
    for key in dict.fromkeys(tuple(row[name] for name in named) for row in every):
        some = [row for row in every if tuple(row[name] for name in named) == key]
        lines += [
            f"## {', '.join(f'{name} {value}' for name, value in zip(named, key, strict=True))}\n"
        ]
        for row in (row for row in some if row["what"] == "learned"):
            first = f"{row['curve'][0][1] * 1e3:.2f} ms" if row["curve"] else "nothing"
            lines += [
                f"{row['trials']} trials in {row['seconds']:.0f} s, {row['run']} of them run, {row['failed']} failed; "
                f"the first that ran: {first}, the best at the end: {row['measured'] * 1e3:.2f} ms (simulated "
                f"{row['simulated'] * 1e3:.2f} ms). Best so far by trials: "
                + ", ".join(f"{count}: {step * 1e3:.2f}" for count, step in row["curve"][-12:])
                + " ms.\n"
            ]
        lines += ["| placer | race, ms | quartiles | simulated, ms |", "|---|---|---|---|"]
        for row in (row for row in some if row["what"] == "standing"):
            quartiles = f"{row['low'] * 1e3:.2f} to {row['high'] * 1e3:.2f}"
            lines.append(
                f"| {row['placer']} | {row['measured'] * 1e3:.2f} | {quartiles} | {row['simulated'] * 1e3:.2f} |"
            )
        lines += [
            "",
            *(f"{row['said']}. Load {row['load']:.1f}.\n" for row in some if row["what"] == "race"),
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("run", "page"))
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--inference", action="store_true")
    parser.add_argument("--devices", choices=("here", "virtual2"), default="here")
    parser.add_argument(
        "--cap", type=float, default=0.5, help="of the last device, a share of what the step takes"
    )
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--groups", type=int, default=40)
    # Batches of 10 ended at 15.0 to 17.4 ms after 600 simulated trials of such a problem, batches
    # of 4 at 13.7 to 14.2.
    parser.add_argument(
        "--batch", type=int, default=4, help="placements for each update of the policy"
    )
    parser.add_argument(
        "--runs", type=int, default=10**9, help="placements that were run are enough"
    )
    parser.add_argument("--heuristic", action="store_true", help="begin near the best heuristic")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15, help="of the race")
    parser.add_argument("--seconds", type=float, default=450.0, help="of the search at most")
    parser.add_argument(
        "--hopeless",
        type=int,
        default=50,
        help="placements that were run and failed, all, are enough",
    )
    parser.add_argument(
        "--journal", action="store_true", help="keep trials, and go on from them the next time"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.part == "page":
        rows_file().with_suffix(".md").write_text(page(rows_file()))
        return
    run(given)


if __name__ == "__main__":
    main()
