"""How good the placers are, on the zoo's training graphs.

    python benchmarks/placers.py PART ...     PART: auto, ten, starts, bounds, proof, exact, large,
    page

Each part appends to benchmarks/results/placers_*.jsonl what it finds, one row for each search, and
leaves out what is there already, so it can be stopped and go on; `page` makes the page from the
rows. Budgets are CPU seconds of the whole process, or trials. Nothing is asserted about time.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # for `support`

import roost
import rows as results
from roost.bounds import bound, nothing_fits
from roost.bounds.exact import solve_exactly
from roost.placers._annealing.population import Heat
from roost.placers.annealing import Annealing
from roost.placers.cpsat import Cpsat
from roost.search.budget import Budget
from roost.search.solve import search
from roost.testing.problems import training_like
from support.exhaustive import exhaustive, tiny

HERE = Path(__file__).parent
GRAPHS = HERE.parent / "out" / "zoo"
NAME = f"placers_{platform.machine()}_{os.cpu_count()}core_202611"
ROWS = HERE / "results" / f"{NAME}.jsonl"
MODELS = [
    "cifar10_cnn", "gpt2", "vit", "bert", "transformer", "resnet50", "t5", "inception_v3", "rnnlm", "llama", "nmt",
    "nasnet", "moe",
]  # fmt: skip
CLUSTERS = ("k80x2", "k80x4", "a100x4", "rtx4090_rtx3060", "two_hosts_a100x4")
SEEDS = range(5)
OPS_A_SECOND = 1_000  # of CPU time, for `auto`
WORTH = 0.02  # of the step: what a better placement must still be able to save
WIDE = 0.05  # a spread over seeds that is named
TEN_SECONDS = 10  # on two cores
LOOSE = 0.55  # bound over best: such bounds are counted
TINY_OPS, TINY_DEVICES, ANNEALED = 7, 3, 3_000
LARGE_OPS, LARGE_SECONDS = 100_000, 60
PROOF_GROUPS, PROOF_SECONDS = 100, 60
WORST_RATIO = 10.0  # what does not fit counts as this
CLASSIC = ("single", "expert", "scotch", "metis", "heft", "etf", "sct")
HEURISTICS = ("single", "expert", "contiguous", "metis", "heft", "etf", "sct")
EVALUATIONS = (1_000, 5_000, 25_000)


def graph_of(model: str) -> roost.Graph:
    """The training graph, captured once."""
    path = GRAPHS / f"{model}.json.gz"
    if not path.exists():
        GRAPHS.mkdir(parents=True, exist_ok=True)
        roost.zoo.build(model, train=True).save(path)
    return roost.load(path)


def problems(
    models: list[str], clusters: tuple[str, ...] = CLUSTERS
) -> Iterator[tuple[str, str, roost.Problem]]:
    for model in models:
        graph = graph_of(model)
        for cluster in clusters:
            yield model, cluster, roost.estimate(graph, cluster)


def rows(part: str, path: Path = ROWS) -> list[dict[str, Any]]:
    return [row for row in results.read(path) if row["part"] == part]


def add(row: dict[str, Any]) -> None:
    row |= results.measured_with()
    with ROWS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row)[:200], flush=True)


def missing(part: str, *keys: object) -> bool:
    return not any((row["model"], row["cluster"], *row["key"]) == keys for row in rows(part))


def cpu_budget(seconds: float) -> Budget:
    return Budget(seconds=seconds, clock=time.process_time)


def warm_up() -> None:
    search(training_like(200, 3), "auto", trials=20_000)


def run_auto(
    part: str, models: list[str], seconds_of: Any, clusters: tuple[str, ...] = CLUSTERS
) -> None:
    warm_up()
    for model, cluster, problem in problems(models, clusters):
        if (proof := nothing_fits(problem)) is not None:
            if missing(part, model, cluster, 0):
                add(
                    {"part": part, "model": model, "cluster": cluster, "key": [0], "ops": problem.graph.num_ops,
                     "feasible": False, "proof": str(proof)}
                )  # fmt: skip
            continue
        if part == "ten" and spread_of(model, cluster) <= 1.02:
            continue
        for seed in SEEDS:
            if not missing(part, model, cluster, seed):
                continue
            seconds = seconds_of(problem)
            result = search(problem, "auto", budget=cpu_budget(seconds), seed=seed)
            found = {
                name: trial.step_time for name, trial in result.baselines.items() if trial.feasible
            }
            add(
                {
                    "part": part, "model": model, "cluster": cluster, "key": [seed], "ops": problem.graph.num_ops,
                    "best": result.best.step_time, "feasible": result.best.feasible,
                    "order": result.best.placement.order, "trials": result.num_trials, "seconds": result.seconds,
                    "asked": seconds, "bound": result.bound.step_time, "proof": result.bound.proof,
                    "ended": result.ended, "baselines": found,
                }
            )  # fmt: skip


def spread_of(model: str, cluster: str) -> float:
    """Worst over best seed of the part `auto`, which has fewer seconds; infinite where there are
    none."""
    best = [
        r["best"]
        for r in rows("auto")
        if (r["model"], r["cluster"]) == (model, cluster) and r["feasible"]
    ]
    return max(best) / min(best) if len(best) == len(SEEDS) else float("inf")


def run_starts(models: list[str]) -> None:
    """Annealing from the best heuristic, and from random rules, by number of evaluations."""
    warm_up()
    for model, cluster, problem in problems(models, ("k80x4", "a100x4")):
        for seed in SEEDS:
            for name, starts in (("heuristics", HEURISTICS), ("rules", ("rules",))):
                if not missing("starts", model, cluster, seed, name):
                    continue
                curve: dict[int, float] = {}
                for evaluations in EVALUATIONS:
                    placer = Annealing(starts=starts, heat=Heat(members=1, groups=False))
                    result = search(problem, placer, trials=evaluations, seed=seed, prove=False)
                    curve[evaluations] = (
                        result.best.step_time if result.best.feasible else float("inf")
                    )
                add(
                    {
                        "part": "starts",
                        "model": model,
                        "cluster": cluster,
                        "key": [seed, name],
                        "curve": curve,
                    }
                )


def run_proof(models: list[str]) -> None:
    """Small graphs with sixty seconds for a proof."""
    warm_up()
    for model, cluster, problem in problems(models):
        if problem.graph.num_ops > 150 or not missing("proof", model, cluster, 0):
            continue
        begin = time.perf_counter()
        found = search(problem, Cpsat(), seconds=58.0)
        add(
            {"part": "proof", "model": model, "cluster": cluster, "key": [0], "best": found.best.step_time,
             "bound": found.bound.step_time, "proof": found.bound.proof, "seconds": time.perf_counter() - begin}
        )  # fmt: skip


def run_bounds(models: list[str]) -> None:
    """What can be proved within a second."""
    bound(training_like(200, 3))
    for model, cluster, problem in problems(models):
        if nothing_fits(problem) is not None or not missing("bounds", model, cluster, 0):
            continue
        begin = time.process_time()
        found = bound(problem, seconds=1.0)
        spent = time.process_time() - begin
        add(
            {"part": "bounds", "model": model, "cluster": cluster, "key": [0], "bound": found.step_time,
             "proof": found.proof, "seconds": spent}
        )  # fmt: skip


def run_large() -> None:
    """A graph of 100,000 ops: all baselines and a first improved placement."""
    problem = training_like(100_000, 4)
    search(training_like(200, 3), "auto", trials=20_000)
    result = search(problem, "auto", budget=cpu_budget(60), prove=True)
    baselines = {
        name: trial.step_time for name, trial in result.baselines.items() if trial.feasible
    }
    add(
        {"part": "large", "model": "training_like", "cluster": "alike", "key": [0], "best": result.best.step_time,
         "baselines": baselines, "bound": result.bound.step_time, "seconds": result.seconds,
         "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    )  # fmt: skip


def run_exact() -> None:
    """`cpsat` and `annealing` against every placement in every order, on problems of up to seven
    ops."""
    for kind, plain in (("plain", True), ("all", False)):
        if not missing("exact", kind, "tiny", 0):
            continue
        count = proved = wrong = unbounded = reached = 0
        for seed in range(200):
            problem = tiny(seed, most_ops=7, plain=plain)
            best = exhaustive(problem)
            if not np.isfinite(best.step_time):
                continue
            count += 1
            found = solve_exactly(problem, seconds=20.0)
            proved += found.optimal
            wrong += found.optimal and abs(found.step_time - best.step_time) > 1e-6 * best.step_time
            unbounded += found.bound > best.step_time * (1 + 1e-9)
            annealed = search(problem, "annealing", trials=3000, prove=False).best
            reached += annealed.feasible and annealed.step_time <= best.step_time * (1 + 1e-9)
        add(
            {"part": "exact", "model": kind, "cluster": "tiny", "key": [0], "count": count, "proved": int(proved),
             "wrong": int(wrong), "unbounded": int(unbounded), "reached": int(reached)}
        )  # fmt: skip


def main() -> None:
    ROWS.parent.mkdir(exist_ok=True)
    models = [name for name in sys.argv[2:] if name in MODELS] or MODELS
    part = sys.argv[1] if len(sys.argv) > 1 else "page"
    if part == "auto":
        run_auto("auto", models, lambda problem: problem.graph.num_ops / OPS_A_SECOND)
    elif part == "ten":
        run_auto("ten", models, lambda problem: 20.0)  # ten seconds of two cores
    elif part == "starts":
        run_starts(models)
    elif part == "proof":
        run_proof(models)
    elif part == "bounds":
        run_bounds(models)
    elif part == "large":
        run_large()
    elif part == "exact":
        run_exact()
    elif part == "page":
        (HERE / "results" / f"{NAME}.md").write_text(page(ROWS))
    else:
        sys.exit(f"no part called {part!r}")


def geometric(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values)))) if values else float("nan")


def page(path: Path) -> str:
    """All parts, from the rows of one file."""
    every = results.read(path)
    machine = path.stem.removeprefix("placers_").rpartition("_")[0]
    lines = [
        "# Placers on the zoo's training graphs\n",
        results.provenance(every),
        f"Simulated on presets; {machine}, shared with other work. CPU seconds are those of the whole process.\n",
    ]
    for part in (_page_auto, _page_spread, _page_starts, _page_gaps, _page_exact, _page_large):
        lines += part(path)
    return "\n".join(lines)


def _by_problem(path: Path, part: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows(part, path):
        found.setdefault((row["model"], row["cluster"]), []).append(row)
    return found


def _page_auto(path: Path) -> list[str]:
    lines = [
        f"## `auto` against the classic placers, a CPU second for {OPS_A_SECOND:,} ops\n",
        "`python benchmarks/placers.py auto`\n",
        f"Classic: the best feasible of {', '.join(CLASSIC)}, each with orders of its own choice; `auto`: the "
        f"median of {len(SEEDS)} seeds. Where the bound is less than {WORTH:.0%} below it, no placement can "
        "help any more.\n",
        "| model | cluster | classic | `auto` | auto / classic | bound / classic | worst seed | next best placer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    everywhere, helped, possible = [], [], []
    for (model, cluster), found in _by_problem(path, "auto").items():
        classic = [
            min((v for k, v in r.get("baselines", {}).items() if k in CLASSIC), default=np.inf)
            for r in found
        ]
        best = [row["best"] for row in found if row["feasible"]]
        if not best:
            lines.append(f"| {model} | {cluster} | nothing fits | nothing fits, proved | | | | |")
            continue
        base = float(np.median(classic))
        lowest = max(row["bound"] for row in found)
        others = {k: v for row in found for k, v in row["baselines"].items()}
        other = min(others, key=others.__getitem__) if others else "-"
        if not np.isfinite(base):
            lines.append(
                f"| {model} | {cluster} | nothing fits | {np.median(best):.4g} s | | | | |"
            )
            continue
        ratio = float(np.median(best)) / base
        everywhere.append(ratio)
        if lowest < (1 - WORTH) * base:
            helped.append(ratio)
            possible.append(lowest / base)
        lines.append(
            f"| {model} | {cluster} | {base:.4g} s | {np.median(best):.4g} s | {ratio:.3f} | {lowest / base:.3f} | "
            f"{max(best) / base:.3f} | {other} |"
        )
    lines.append(
        f"\nGeometric mean of auto / classic: **{geometric(helped):.3f}** over the {len(helped)} problems where the "
        f"bound leaves {WORTH:.0%} or more ({geometric(everywhere):.3f} over all {len(everywhere)}). The bound itself is at "
        f"{geometric(possible):.3f} of the classic placers there: nothing can be better than that.\n"
    )
    return lines


def _page_spread(path: Path) -> list[str]:
    lines = [
        f"## Spread over {len(SEEDS)} seeds after {TEN_SECONDS} seconds of two cores\n",
        "`python benchmarks/placers.py ten`\n",
        f"Of the problems whose seeds differ by more than {WORTH:.0%} in the table above, with less time.\n",
        "| model | cluster | best seed | worst / best | median / best |", "|---|---|---|---|---|",
    ]  # fmt: skip
    found = []
    for (model, cluster), group in _by_problem(path, "ten").items():
        best = [row["best"] for row in group if row["feasible"]]
        if len(best) == len(group) and best:
            found.append(
                (
                    max(best) / min(best),
                    model,
                    cluster,
                    min(best),
                    float(np.median(best)) / min(best),
                )
            )
    for spread, model, cluster, best, median in sorted(found, reverse=True):
        lines.append(f"| {model} | {cluster} | {best:.4g} s | {spread:.3f} | {median:.3f} |")
    over = sum(spread > 1 + WIDE for spread, *_ in found)
    lines.append(f"\n{over} of {len(found)} problems spread by more than {WIDE:.0%}.\n")
    return lines


def _page_starts(path: Path) -> list[str]:
    found = rows("starts", path)
    curves: dict[str, dict[int, list[float]]] = {}
    best: dict[tuple[str, str], float] = {}
    for row in found:
        key = (row["model"], row["cluster"])
        best[key] = min(best.get(key, np.inf), *row["curve"].values())
    for row in found:
        reference = best[row["model"], row["cluster"]]
        if np.isfinite(reference):
            for evaluations, value in row["curve"].items():
                curves.setdefault(row["key"][1], {}).setdefault(int(evaluations), []).append(
                    min(value / reference, WORST_RATIO)
                )
    lines = [
        "## Annealing from the best heuristic, and from random rules (`python benchmarks/placers.py starts`)\n",
        "One chain; evaluations include those of the starts; geometric mean of step time over the best ever seen here, "
        f"all models on k80x4 and a100x4, {len(SEEDS)} seeds; what does not fit counts {WORST_RATIO:g}. Heuristics: "
        f"{', '.join(HEURISTICS)}.\n",
        "| evaluations | " + " | ".join(f"{n:,}" for n in EVALUATIONS) + " |",
        "|---|" + "---|" * len(EVALUATIONS),
    ]
    for name, curve in curves.items():
        lines.append(
            f"| from {name} | "
            + " | ".join(f"{geometric(curve.get(n, [])):.3f}" for n in EVALUATIONS)
            + " |"
        )
    return [*lines, ""]


def _page_gaps(path: Path) -> list[str]:
    lines = [
        "## Bound over best, worst first (`python benchmarks/placers.py bounds`; best of all runs above)\n",
        "| model | cluster | best | bound | bound / best | proof | CPU s |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for part in ("auto", "ten"):
        for key, group in _by_problem(path, part).items():
            found.setdefault(key, []).extend(group)
    table = []
    for row in rows("bounds", path):
        key = (row["model"], row["cluster"])
        fits = [r["best"] for r in found.get(key, []) if r["feasible"]]
        if fits:
            table.append(
                (
                    row["bound"] / min(fits),
                    *key,
                    min(fits),
                    row["bound"],
                    row["proof"],
                    row["seconds"],
                )
            )
    for ratio, model, cluster, best, low, proof, spent in sorted(table):
        lines.append(
            f"| {model} | {cluster} | {best:.4g} s | {low:.4g} s | {ratio:.3f} | {proof} | {spent:.2f} |"
        )
    lines.append(f"\n{sum(row[0] < LOOSE for row in table)} of {len(table)} are below {LOOSE}.\n")
    lines += [
        f"### Up to {PROOF_GROUPS} groups, {PROOF_SECONDS} seconds\n",
        "`python benchmarks/placers.py proof`\n",
        "| model | cluster | best | bound / best | proof |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for row in sorted(rows("proof", path), key=lambda r: r["bound"] / r["best"]):
        share = row["bound"] / row["best"]
        lines.append(
            f"| {row['model']} | {row['cluster']} | {row['best']:.4g} s | {share:.4f} | {row['proof']} |"
        )
    return [*lines, ""]


def _page_exact(path: Path) -> list[str]:
    lines = [
        f"## Against every placement in every order, up to {TINY_OPS} ops on {TINY_DEVICES} devices\n",
        "`python benchmarks/placers.py exact`\n",
        "Plain: no shared buses, broadcast or fetched parameters. What `cpsat` does not prove it says is only a bound. "
        f"`annealing` has {ANNEALED:,} trials.\n",
        "| problems | fit | proved by `cpsat` | of these wrong | bounds too high | optimum reached by `annealing` |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['model']} | {r['count']} | {r['proved']} | {r['wrong']} | {r['unbounded']} | {r['reached']} |"
        for r in rows("exact", path)
    ]
    return [*lines, ""]


def _page_large(path: Path) -> list[str]:
    lines = [
        f"## {LARGE_OPS:,} ops on four devices, {LARGE_SECONDS} CPU seconds\n",
        "`python benchmarks/placers.py large`\n",
    ]
    for row in rows("large", path):
        others = ", ".join(
            f"{name} {value / row['best']:.3f}" for name, value in row["baselines"].items()
        )
        lines.append(
            f"{row['seconds']:.0f} CPU s, {row['memory'] / 2**30:.1f} GiB; best {row['best']:.4g} s, bound "
            f"{row['bound'] / row['best']:.3f} of it; baselines over best: {others}.\n"
        )
    return lines


if __name__ == "__main__":
    main()
