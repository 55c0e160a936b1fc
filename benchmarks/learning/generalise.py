"""A learned placer on graphs it has never seen, beside `auto` on each of them and `rules` at equal CPU seconds.

    roost learn --family cifar10 --placer lister --on k80x4 --seconds 150 -o out/lister_cifar10
    python benchmarks/learning/generalise.py --family cifar10 --on k80x4 --weights out/lister_cifar10/policy.safetensors

Members 24 to 31 of a family are never learned on. Each row has step times: of `auto` with a fixed number of trials, of
the best of single and expert, of the placer's first 64 schedules (no learning on the graph), the same with the rules
beside them, and of as many random rules as fit into the CPU seconds of the 64 schedules.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import roost
from roost import zoo
from roost.core.problem import Problem
from roost.placers.lister import Lister
from roost.placers.rules import Rules
from roost.search.solve import search

TESTED = range(24, 32)
AUTO_TRIALS = 200_000
SEEDS = 3


def graph_of(family: str, number: int, folder: Path) -> Any:
    """A member, captured once."""
    path = folder / f"{family}_0_{number:03d}.json.gz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        zoo.member(family, number, 0).save(path)
    return roost.load(path)


def timed(problem: Problem, placer: Any, trials: int, seed: int) -> tuple[float, float]:
    """The step time of what it finds, infinite where that does not fit, and the CPU seconds of a second run.

    The first run makes what is made once for a problem, for every placer alike.
    """
    search(problem, placer, trials=trials, seed=seed, prove=False)
    began = time.process_time()
    best = search(problem, placer, trials=trials, seed=seed, prove=False).best
    return best.step_time if best.feasible else float("inf"), time.process_time() - began


def measured(problem: Problem, weights: Path, seed: int) -> dict[str, float]:
    """One graph, one seed."""
    few = 100_000  # trials: more than any of these needs
    row: dict[str, float] = {}
    alone = Lister(weights=str(weights), tune=False, baselines=("single", "expert"))
    beside = Lister(weights=str(weights), tune=False, baselines=("single", "expert", "rules"))
    row["lister"], row["lister_cpu"] = timed(problem, alone, few, seed)
    row["with_rules"], row["with_rules_cpu"] = timed(problem, beside, few, seed)
    row["rules_64"], row["rules_64_cpu"] = timed(problem, "rules", few, seed)
    _, more = timed(problem, Rules(num_rules=576), few, seed)  # part of the time does not grow with the rules
    each = max(1e-5, (more - row["rules_64_cpu"]) / 512)
    count = max(64, int(64 + (row["lister_cpu"] - row["rules_64_cpu"]) / each))
    row["rules"], row["rules_cpu"] = timed(problem, Rules(num_rules=count), few, seed)
    row["num_rules"] = count
    return row


def baselines(problem: Problem) -> dict[str, float]:
    found = {}
    for name in ("single", "expert"):
        best = search(problem, name, trials=10_000, prove=False).best
        found[name] = best.step_time if best.feasible else float("inf")
    began = time.process_time()
    found["auto"] = search(problem, "auto", trials=AUTO_TRIALS, prove=False).best.step_time
    found["auto_cpu"] = time.process_time() - began
    return found


def shown(rows: list[dict[str, Any]]) -> str:
    """A table of the distributions, over graphs and seeds."""
    lines = [
        "| family | learned on | tested on | graphs | placer | of auto: median | p90 | worst | CPU s: median | most |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key in sorted({(r["family"], r["learned_on"], r["cluster"]) for r in rows}):
        mine = [r for r in rows if (r["family"], r["learned_on"], r["cluster"]) == key]
        count = len({r["graph"] for r in mine})
        for name in ("lister", "with_rules", "rules", "rules_64", "best_of_single_and_expert"):
            ratio = sorted(r[name] / r["auto"] for r in mine)
            cpu = [r.get(f"{name}_cpu", float("nan")) for r in mine]
            p90 = ratio[min(len(ratio) - 1, int(0.9 * len(ratio)))]
            figures = f"{statistics.median(ratio):.3f} | {p90:.3f} | {ratio[-1]:.3f}"
            spent = f"{statistics.median(cpu):.2f} | {max(cpu):.2f}"
            lines.append(f"| {' | '.join(key)} | {count} | {name} | {figures} | {spent} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", required=True)
    parser.add_argument("--on", required=True, help="clusters to test on, with commas")
    parser.add_argument("--weights", required=True, type=Path)
    parser.add_argument("--graphs", type=Path, default=Path("out/families"), help="where captured graphs are kept")
    parser.add_argument("-o", "--output", type=Path, default=Path("out/generalise.jsonl"))
    given = parser.parse_args()
    learned_on = ",".join(json.loads((given.weights.parent / "card.json").read_text())["clusters"])
    with given.output.open("a") as out:
        for cluster in given.on.split(","):
            for number in TESTED:
                problem = roost.estimate(graph_of(given.family, number, given.graphs), cluster)
                fixed = baselines(problem)
                for seed in range(SEEDS):
                    row = {
                        "family": given.family,
                        "graph": problem.graph.name,
                        "num_ops": problem.graph.num_ops,
                        "cluster": cluster,
                        "learned_on": learned_on,
                        "seed": seed,
                        **fixed,
                        "best_of_single_and_expert": min(fixed["single"], fixed["expert"]),
                        **measured(problem, given.weights, seed),
                        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                    }
                    out.write(json.dumps(row) + "\n")
                    out.flush()
                print(
                    row["graph"], cluster, {k: round(row[k] / row["auto"], 3) for k in ("lister", "rules")}, flush=True
                )
    print(shown([json.loads(line) for line in given.output.read_text().splitlines()]))


if __name__ == "__main__":
    main()
