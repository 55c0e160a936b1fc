"""Placeto without some of its parts, on graphs merged to so few groups that each run makes 60
updates.

    python benchmarks/learning/placeto_ablations.py out/families/cifar10_0_008.json.gz
    out/zoo/rnnlm.json.gz

Every step of an episode is a trial, so an update takes as many trials as groups times episodes.
Rows are appended, one for each run; those that are there already are not run again.
`placeto_page.py` makes the page of them.

Variants beginning with "paper" are the paper as far as known, apart from what they leave out. Those beginning
with "faster" learn with the rate and the entropy weight of the tuned setting: the published ones
hardly leave the uniform policy in as few updates, so that what is left out can make no difference.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import roost
from roost.core.problem import Problem
from roost.placers._placeto.settings import SETTINGS, PlacetoSettings
from roost.placers._shared.groups import groups_of, merged_units
from roost.placers.placeto import Placeto
from roost.search.solve import search
from rows import measured_with

ROWS = Path(__file__).parents[1] / "results" / "placeto_x86_64_2core_202611.jsonl"
NUM_GROUPS, UPDATES, LAST = 32, 60, 10
PAPER = replace(SETTINGS["paper"], episodes=4)  # of 4 to 8 that the released code has side by side
FASTER = replace(PAPER, rate=SETTINGS["tuned"].rate, entropy=SETTINGS["tuned"].entropy)
WITHOUT: dict[str, dict[str, Any]] = {
    "as it is": {},
    "terminal rewards": {"rewards": "terminal"},
    "reversed order": {"order": "reversed"},
    "random order": {"order": "random"},
    "no messages": {"messages": False},
    "no pools": {"pools": False},
    "no messages, no pools": {"messages": False, "pools": False},
    "learns nothing": {"rate": (0.0, 0.0)},
    "with features of devices": {"device_features": True},
    "features of devices, no messages, no pools": {
        "device_features": True,
        "messages": False,
        "pools": False,
    },
}
VARIANTS: dict[str, PlacetoSettings] = {
    f"{name}, {said}": replace(base, **changes)
    for name, base in (("faster", FASTER), ("paper", PAPER))
    for said, changes in WITHOUT.items()
    if (name, said) != ("paper", "learns nothing")  # the same as the other
}


def merged(problem: Problem, most: int) -> Problem:
    """The problem with so few groups."""
    units = merged_units(groups_of(problem), most)
    names = tuple(str(number) for number in range(units.num_units))
    group = units.unit.astype(np.int32)
    graph = replace(
        problem.graph, group=group, group_names=names, modules=("",) * problem.graph.num_ops
    )
    return Problem(graph, problem.cluster, problem.costs)


def row(problem: Problem, name: str, seed: int) -> dict[str, Any]:
    """One run: the best of all trials, and the mean at the ends of the last episodes, which is what
    was learned."""
    groups = groups_of(problem).num_units
    trials = (UPDATES * groups + 1) * PAPER.episodes
    told: list[Any] = []
    began = time.process_time()
    result = search(
        problem, Placeto(VARIANTS[name]), trials=trials, seed=seed, on_note=told.append, prove=False
    )
    return {
        "part": "ablation", "graph": problem.graph.name, "cluster": problem.cluster.name, "groups": groups,
        "variant": name, "seed": seed, "trials": result.num_trials, "updates": len(told),
        "best": result.best.step_time, "feasible": result.best.feasible,
        "first_ends": float(np.mean([figures["mean"] for figures in told[:1]])),
        "last_ends": float(np.mean([figures["mean"] for figures in told[-LAST:]])),
        "entropy": told[-1]["entropy"], "cpu": round(time.process_time() - began, 2),
        **measured_with(),
    }  # fmt: skip


def references(problem: Problem) -> dict[str, Any]:
    """What else finds on these groups, with as many trials."""
    trials = (UPDATES * groups_of(problem).num_units + 1) * PAPER.episodes
    found: dict[str, Any] = {
        "part": "reference",
        "graph": problem.graph.name,
        "cluster": problem.cluster.name,
    }
    for placer in ("single", "random", "annealing"):
        found[placer] = search(problem, placer, trials=trials, prove=False).best.step_time
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "graphs", type=Path, nargs="+", help="graph files, such as roost capture writes"
    )
    parser.add_argument("--on", default="k80x4", metavar="CLUSTER")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--only", default="", help="how names of variants begin, separated by ;")
    parser.add_argument("-o", "--output", type=Path, default=ROWS)
    given = parser.parse_args()
    problems = [
        merged(roost.estimate(roost.load(path), given.on), NUM_GROUPS) for path in given.graphs
    ]
    search(problems[0], Placeto("paper"), trials=40, prove=False)  # compiling is no part of any row
    rows = (
        [json.loads(line) for line in given.output.read_text().splitlines()]
        if given.output.exists()
        else []
    )
    done = {(r["graph"], r["cluster"], r.get("variant"), r.get("seed")) for r in rows}
    with given.output.open("a") as out:

        def write(found: dict[str, Any]) -> None:
            out.write(json.dumps(found) + "\n")
            out.flush()

        for problem in problems:
            if (problem.graph.name, problem.cluster.name, None, None) not in done:
                write(references(problem))
        for seed in given.seeds:
            for problem in problems:
                for name in VARIANTS:
                    key = (problem.graph.name, problem.cluster.name, name, seed)
                    if name.startswith(tuple(given.only.split(";"))) and key not in done:
                        found = row(problem, name, seed)
                        write(found)
                        print(
                            *key,
                            *(round(found[k], 4) for k in ("best", "last_ends", "cpu")),
                            flush=True,
                        )


if __name__ == "__main__":
    main()
