"""A learned placer on graphs it has never seen, beside `auto` on each of them and `rules` at equal
CPU seconds.

    roost learn --family cifar10 --placer lister --on k80x2,k80x4 --seconds 180 -o
    out/lister_cifar10
    python benchmarks/learning/generalise.py --family cifar10 --on k80x4 --weights
    out/lister_cifar10/policy.safetensors

Members 24 to 31 of a family are never learned on. Rows, none of which learns on the graph; all but
`rules` ask `single` and `expert` first:

    lister_64        64 rules: the first 24 of those learned, 8 that are drawn, 32 varied from the
    best so far; for
                     accelerators of unlike speeds 16, 24 (which place whole groups) and 24 lister
                     these, then 192 more: the other learned ones, and rules varied from the best
                     lister_refined   these, then annealing; 5,000 trials in all untrained...
                     the same three with random rules in place of the learned ones rules...
                     as many rules of the placer `rules` as fit into the CPU seconds of each of
                     these three only_64_rules    64 of them network, both    64 schedules drawn
                     from the network; what lister_64 tries and then those (--all, one seed)

With --brief only the first three, for weights of a second training seed. `roost learn --made-up N`
adds machines of other speeds to those that are learned on; rows say so. What `auto` finds is kept
in out/generalise_auto.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import roost
import rows as results
from roost import zoo
from roost.core.problem import Problem
from roost.placers._lister.weights import new_tensors
from roost.placers.lister import Lister
from roost.placers.rules import Rules
from roost.policies.weights import save_weights
from roost.search.solve import search
from rows import measured_with

TESTED = range(24, 32)
AUTO_TRIALS = 200_000
SEEDS = 3
PLENTY = 100_000  # trials: more than any of these needs
REFINED = 5_000  # trials
EQUAL = {
    "rules_like_64": "lister_64",
    "rules_like_lister": "lister",
    "rules_like_refined": "lister_refined",
}
OTHERS = ("only_64_rules", "network", "both", "best_of_single_and_expert")
NAMES = (
    "lister_64", "untrained_64", "rules_like_64", "lister", "untrained", "rules_like_lister", "lister_refined",
    "untrained_refined", "rules_like_refined", "only_64_rules", "network", "both", "best_of_single_and_expert",
)  # fmt: skip


def graph_of(family: str, number: int, folder: Path) -> Any:
    """A member, captured once."""
    path = folder / f"{family}_0_{number:03d}.json.gz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        zoo.member(family, number, 0).save(path)
    return roost.load(path)


def timed(problem: Problem, placer: Any, trials: int, seed: int) -> tuple[float, float]:
    """The step time of what it finds, infinite where that does not fit, and the CPU seconds."""
    began = time.process_time()
    best = search(problem, placer, trials=trials, seed=seed, prove=False).best
    return best.step_time if best.feasible else float("inf"), time.process_time() - began


def placers(weights: Path, seed: int, everything: bool, brief: bool) -> dict[str, tuple[Any, int]]:
    """Placers by the name of their row, and how many trials each has."""
    random = weights.parent / f"untrained_{seed}.safetensors"
    save_weights(random, "lister", new_tensors(np.random.default_rng(seed)), {})
    kinds = {
        "lister": {"weights": str(weights), "tune": False},
        "untrained": {"weights": str(random), "tune": False},
    }
    found = {}
    for name, given in list(kinds.items())[: 1 if brief else None]:
        found[f"{name}_64"] = Lister(**given, varied=0), PLENTY
        found[name] = Lister(**given), PLENTY
        found[f"{name}_refined"] = Lister(**given, refine=1.0), REFINED
    if everything:
        found["network"] = Lister(**kinds["lister"], samples=0, varied=0, drawn=64), PLENTY
        found["both"] = Lister(**kinds["lister"], varied=0, drawn=64), PLENTY
    return found


def measured(
    problem: Problem, weights: Path, seed: int, everything: bool, brief: bool = False
) -> dict[str, float]:
    """One graph, one seed."""
    row: dict[str, float] = {}
    for name, (placer, trials) in placers(weights, seed, everything, brief).items():
        row[name], row[f"{name}_cpu"] = timed(problem, placer, trials, seed)
    if brief:
        return row
    row["only_64_rules"], fewest = timed(problem, "rules", PLENTY, seed)
    row["only_64_rules_cpu"] = fewest
    # Part of the time does not grow with the rules.
    _, more = timed(problem, Rules(num_rules=320), PLENTY, seed)
    each = max(1e-5, (more - fewest) / 256)
    for name, like in EQUAL.items():
        count = max(64, int(64 + (row[f"{like}_cpu"] - fewest) / each))
        row[name], row[f"{name}_cpu"] = timed(problem, Rules(num_rules=count), PLENTY, seed)
        row[f"{name}_count"] = count
    return row


def references(problem: Problem, cluster: str, kept: Path) -> dict[str, float]:
    """Step times of single, expert and auto, looked up where they are known."""
    key = f"{problem.graph.name} {cluster} {problem.digest} {AUTO_TRIALS}"
    known = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    for row in known:
        if row.pop("key") == key:
            return dict(row)
    found = {}
    for name in ("single", "expert"):
        best = search(problem, name, trials=10_000, prove=False).best
        found[name] = best.step_time if best.feasible else float("inf")
    found["auto"], found["auto_cpu"] = timed(problem, "auto", AUTO_TRIALS, 0)
    with kept.open("a") as out:
        out.write(json.dumps({"key": key, **found}) + "\n")
    return found


def page(path: Path) -> str:
    """Settings in words, then the tables."""
    rows = results.read(path)
    seeds = sorted({row["learned_seed"] for row in rows})
    lines = [
        "# `lister` on graphs it has never seen\n",
        results.provenance(rows),
        f"Learned on members of a family for {rows[0]['learned_seconds']:.0f} s each with seeds {seeds}; tested "
        f"on members {TESTED[0]} to {TESTED[-1]}. Step times are multiples of what `auto` finds with "
        f"{AUTO_TRIALS:,} trials on the same graph (one seed): median, ninth decile and worst over graphs and "
        "seeds. CPU seconds are those of the process; what is worked out once for a problem is there before.\n",
        "```text\n"
        "roost learn --family FAMILY --placer lister --on k80x2,k80x4 --seed SEED -o out/lister\n"
        "python benchmarks/learning/generalise.py --family FAMILY --on CLUSTER "
        "--weights out/lister/policy.safetensors\n"
        "```\n",
        "Nothing learns on the graph that is placed. `lister_64`: `single` and `expert`, then as many rules as "
        "its name says. `lister` (the default) tries more learned and varied rules. `lister_refined`: these, "
        f"then annealing, {REFINED:,} trials in all. `untrained` has random rules; `rules_like` has random rules "
        "and as many CPU seconds as the row it is named after.\n",
        shown(rows),
    ]
    return "\n".join(lines)


def shown(rows: list[dict[str, Any]]) -> str:
    """Tables of the distributions over graphs and seeds, and of pairs."""
    cells = sorted({(r["family"], r["cluster"], r["learned_on"], r["learned_seed"]) for r in rows})
    goal = [
        "| family | tested on | learned on | training seed | `lister_64` | `lister` | `lister_refined` "
        "| CPU s of these, medians | worse than single and expert |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    first = [
        "| family | tested on | row | learned | untrained | `rules`, equal CPU s | CPU s: median, most |",
        "|---|---|---|---|---|---|---|",
    ]
    other = [
        "| family | tested on | " + " | ".join(OTHERS) + " |",
        "|---|---|" + "---|" * len(OTHERS),
    ]
    pairs = ["| family | tested on | ratio | geometric mean | interval |", "|---|---|---|---|---|"]
    for key in cells:
        mine = [
            r
            for r in rows
            if (r["family"], r["cluster"], r["learned_on"], r["learned_seed"]) == key
        ]
        learned = list(EQUAL.values())
        spent = ", ".join(
            f"{statistics.median(r[f'{name}_cpu'] for r in mine):.2f}" for name in learned
        )
        worse = sum(
            r[name] > r["best_of_single_and_expert"] * (1 + 1e-9) for r in mine for name in learned
        )
        figures = " | ".join(spread(mine, name) for name in learned)
        goal.append(
            f"| {' | '.join(map(str, key))} | {figures} | {spent} | {worse} of {len(mine) * len(learned)} |"
        )
        if not all("untrained" in r for r in mine):
            continue
        for equal, name in EQUAL.items():
            cpu = [r[f"{name}_cpu"] for r in mine]
            random = name.replace("lister", "untrained")
            figures = " | ".join(spread(mine, each) for each in (name, random, equal))
            spent = f"{statistics.median(cpu):.2f}, {max(cpu):.2f}"
            first.append(f"| {' | '.join(key[:2])} | {name} | {figures} | {spent} |")
            for than in (equal, random):
                pairs.append(
                    f"| {key[0]} | {key[1]} | {name} / {than} | {compared(mine, name, than)} |"
                )
        other.append(
            f"| {key[0]} | {key[1]} | " + " | ".join(spread(mine, name) for name in OTHERS) + " |"
        )
    return "\n\n".join("\n".join(lines) for lines in (goal, first, pairs, other)) + "\n"


def spread(rows: list[dict[str, Any]], name: str) -> str:
    """Median, ninth decile and worst, as multiples of what auto found."""
    ratio = sorted(r[name] / r["auto"] for r in rows if name in r)
    if not ratio:
        return "-"
    p90 = ratio[min(len(ratio) - 1, int(0.9 * len(ratio)))]
    return f"{statistics.median(ratio):.3f}, {p90:.3f}, {ratio[-1]:.3f}"


def compared(rows: list[dict[str, Any]], one: str, other: str) -> str:
    """The mean ratio of the two, and how sure that is: 95 % of bootstrap samples of the graphs."""
    rng, graphs = np.random.default_rng(0), sorted({r["graph"] for r in rows})
    log = np.array(
        [
            np.mean([np.log(r[one] / r[other]) for r in rows if r["graph"] == graph])
            for graph in graphs
        ]
    )
    means = log[rng.integers(0, len(log), (10_000, len(log)))].mean(axis=1)
    low, high = np.exp(np.quantile(means, [0.025, 0.975]))
    return f"{np.exp(log.mean()):.3f} | {low:.3f} to {high:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--show", type=Path, help="print tables of the rows in this file, and do nothing else"
    )
    parser.add_argument("--family")
    parser.add_argument("--on", default="", help="clusters to test on, with commas")
    parser.add_argument("--weights", type=Path, help="without them only the references are made")
    parser.add_argument("--all", action="store_true", help="the network too")
    parser.add_argument("--brief", action="store_true", help="nothing but what was learned")
    parser.add_argument(
        "--seeds", type=int, default=SEEDS, help="of placing: of what is varied or drawn"
    )
    parser.add_argument(
        "--graphs", type=Path, default=Path("out/families"), help="where captured graphs are kept"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("out/generalise.jsonl"))
    given = parser.parse_args()
    if given.show:
        print(shown([json.loads(line) for line in given.show.read_text().splitlines()]))
        return
    card = json.loads((given.weights.parent / "card.json").read_text()) if given.weights else {}
    for cluster in filter(None, given.on.split(",")):
        for number in TESTED:
            problem = roost.estimate(graph_of(given.family, number, given.graphs), cluster)
            fixed = references(problem, cluster, given.output.with_name("generalise_auto.jsonl"))
            if not given.weights:
                continue
            # What is made once for a problem, or compiled once, is made now.
            if number == TESTED[0]:
                measured(problem, given.weights, 99, given.all, given.brief)
            search(
                problem, Lister(weights=str(given.weights), tune=False), trials=PLENTY, prove=False
            )
            rows = []
            for seed in range(given.seeds):
                row = {
                    "family": given.family,
                    "graph": problem.graph.name,
                    "num_ops": problem.graph.num_ops,
                    "cluster": cluster,
                    "learned_on": ",".join(
                        [*card["clusters"], *["made-up"] * (card.get("made_up", 0) > 0)]
                    ),
                    "learned_seed": card["seed"],
                    "learned_seconds": card["seconds"],
                    "seed": seed,
                    **fixed,
                    "best_of_single_and_expert": min(fixed["single"], fixed["expert"]),
                    **measured(problem, given.weights, seed, given.all and seed == 0, given.brief),
                    **measured_with(),
                }
                rows.append(row)
            with given.output.open("a") as out:
                out.writelines(json.dumps(row) + "\n" for row in rows)
            row = rows[0]
            print(
                cluster,
                {name: round(row[name] / row["auto"], 3) for name in NAMES if name in row},
                flush=True,
            )
    if given.weights:
        print(shown([json.loads(line) for line in given.output.read_text().splitlines()]))


if __name__ == "__main__":
    main()
