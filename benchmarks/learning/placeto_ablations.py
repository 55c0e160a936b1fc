"""Placeto without some of its parts: best step time after so many trials, one row of JSON for each run.

    python benchmarks/learning/placeto_ablations.py rnnlm.json.gz --on k80x4 --trials 2000 --seeds 2 -o rows.jsonl

Variants beginning with "paper" are as published, apart from what they leave out; the others change the tuned setting.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import roost
from roost.core.problem import Problem
from roost.placers.placeto import SETTINGS, Placeto, Settings
from roost.search.evaluate import Progress
from roost.search.solve import search

PAPER, TUNED = SETTINGS["paper"], SETTINGS["tuned"]


def _both(**changes: object) -> Settings:
    """The tuned setting with the same change in its second policy."""
    assert TUNED.refine is not None
    return replace(TUNED, refine=replace(TUNED.refine, **changes), **changes)  # type: ignore[arg-type]


VARIANTS: dict[str, Settings] = {
    "paper": PAPER,
    "paper, terminal rewards": replace(PAPER, rewards="terminal"),
    "paper, random order": replace(PAPER, order="random"),
    "paper, no messages": replace(PAPER, messages=False),
    "paper, no pools": replace(PAPER, pools=False),
    "paper, neither": replace(PAPER, messages=False, pools=False),
    "tuned": TUNED,
    "tuned, random order": _both(order="random"),
    "tuned, no messages": _both(messages=False),
    "tuned, no pools": _both(pools=False),
    "tuned, neither": _both(messages=False, pools=False),
    "tuned, one pass": _both(passes=1),
    "tuned, raw advantages": _both(normalise=False),
    "tuned, rank order": _both(judged="rank"),
    "tuned, no refining": replace(TUNED, refine=None),
    "tuned, only single moves": TUNED.refine or TUNED,
    "tuned, learns nothing": _both(rate=(0.0, 0.0)),
}


def row(problem: Problem, name: str, trials: int, seed: int) -> dict[str, object]:
    """One search: the best after each doubling of trials, and the CPU seconds of all."""
    curve: dict[int, float] = {}

    def watch(progress: Progress) -> None:
        for count in (100, 200, 500, 1000, 2000, 5000, 10_000, 20_000):
            if progress.num_trials <= count:
                curve[count] = progress.best.step_time

    began = time.process_time()
    result = search(problem, Placeto(VARIANTS[name]), trials=trials, seed=seed, on_trial=watch, prove=False)
    reached = {str(count): curve[count] for count in sorted(curve) if count <= trials}
    return {
        "graph": problem.graph.name, "cluster": problem.cluster.name, "variant": name, "seed": seed, "trials": trials,
        "step_time": result.best.step_time, "feasible": result.best.feasible, "spent": result.num_trials,
        "cpu_seconds": round(time.process_time() - began, 2), "curve": reached,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", type=Path, help="a graph file, such as roost capture writes")
    parser.add_argument("--on", default="k80x4", metavar="CLUSTER")
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--variants", default="", help="names, separated by ; (all, where none is given)")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    problem = roost.estimate(roost.load(given.graph), given.on)
    wanted = [v.strip() for v in given.variants.split(";") if v.strip()]
    search(problem, Placeto(), trials=40, prove=False)  # compiling is no part of any row
    with given.output.open("a") as out:
        for name in VARIANTS:
            if wanted and name not in wanted:
                continue
            for seed in range(given.seeds):
                found = row(problem, name, given.trials, seed)
                out.write(json.dumps(found) + "\n")
                out.flush()
                print(f"{name:28} seed {seed}  {found['step_time']:.4f} s  {found['cpu_seconds']} CPU s")


if __name__ == "__main__":
    main()
