"""The page of Placeto's results, made from rows of placeto_ablations.py, placeto_unseen.py,
placeto_family.py and curves.py.

python benchmarks/learning/placeto_page.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from placeto_unseen import beside

import rows as results

RESULTS = Path(__file__).parents[1] / "results"
ROWS, PAGE = (RESULTS / f"placeto_x86_64_2core_202611.{kind}" for kind in ("jsonl", "md"))
CURVES = RESULTS / "learning_x86_64_202611.jsonl"
KEYS = [
    (model, cluster) for model in ("rnnlm", "nmt", "inception_v3") for cluster in ("k80x2", "k80x4")
]
CLAIMS = {
    "as it is": "",
    "terminal rewards": "intermediate rewards learn better",
    "reversed order": "the order has little effect",
    "random order": "the order has little effect",
    "no messages": "messages and pools generalise better than plain features",
    "no pools": "messages and pools generalise better than plain features",
    "no messages, no pools": "messages and pools generalise better than plain features",
    "learns nothing": "",
    "with features of devices": "(no part of the paper)",
    "features of devices, no messages, no pools": "(no part of the paper)",
}
PARTS = ("reference", "ablation", "unseen", "family")
EQUAL_TRIALS = 5_000
COMPARED = ("seq2seq", "placeto", "spotlight", "post")
PUBLISHED = {
    ("nmt", "k80x2"): "3.5", ("nmt", "k80x4"): "0.55", ("inception_v3", "k80x2"): "4.8",
    ("inception_v3", "k80x4"): "6.1",
}  # fmt: skip


def spread(values: list[float]) -> str:
    """The median, and the least and the most."""
    return f"{np.median(values):.3f} ({min(values):.3f}-{max(values):.3f})" if values else ""


def ablations(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for reference in (r for r in rows if r["part"] == "reference"):
        mine = [r for r in rows if r["part"] == "ablation" and r["graph"] == reference["graph"]]
        if not mine:
            continue
        lines += [
            f"### {reference['graph']} on {reference['cluster']}, {mine[0]['groups']} groups\n",
            f"{mine[0]['trials']:,} trials, {min(r['updates'] for r in mine)} updates. In seconds, on the same groups "
            "and with as many trials: "
            + ", ".join(
                f"{name} {reference[name]:.3f}" for name in ("single", "random", "annealing")
            )
            + ".\n",
            "| learns | without | seeds | mean at the end of an episode, last updates | best of all trials | "
            "end of an episode over that of the whole, per seed | claim of the paper |",
            "|---|---|---|---|---|---|---|",
        ]
        every = {r["variant"] for r in mine}
        for variant in (f"{base}, {said}" for base in ("faster", "paper") for said in CLAIMS):
            if variant not in every:
                continue
            base, _, said = variant.partition(", ")
            found = [r for r in mine if r["variant"] == variant]
            whole = {r["seed"]: r for r in mine if r["variant"] == f"{base}, as it is"}
            ratio = [
                r["last_ends"] / whole[r["seed"]]["last_ends"] for r in found if r["seed"] in whole
            ]
            cells = [spread([r[figure] for r in found]) for figure in ("last_ends", "best")]
            lines.append(
                f"| {base} | {said} | {len(found)} | {' | '.join(cells)} | {spread(ratio)} | {CLAIMS[said]} |"
            )
        lines.append("")
    return lines


def unseen(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| family | learned on | tested on | graphs | placer | of auto: median | p90 | worst | CPU s: median | most |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    mine = [r for r in rows if r["part"] == "unseen"]
    names = (
        "placeto",
        "placeto_alone",
        "untrained",
        "lister",
        "rules",
        "rules_64",
        "best_of_single_and_expert",
    )
    for key in dict.fromkeys((r["family"], r["learned_on"], r["cluster"]) for r in mine):
        # Of the other placers what generalise.py measured last, not what it had when a row was
        # made.
        known = beside(key[0], [key[2]])
        here = [
            r | known[key[2], r["graph"]]
            for r in mine
            if (r["family"], r["learned_on"], r["cluster"]) == key
        ]
        for name in names:
            ratio = sorted(r[name] / r["auto"] for r in here)
            p90 = ratio[min(len(ratio) - 1, int(0.9 * len(ratio)))]
            cpu = [r[f"{name}_cpu"] for r in here if f"{name}_cpu" in r]
            spent = f"{np.median(cpu):.2f} | {max(cpu):.2f}" if cpu else " | "
            count = len({r["graph"] for r in here})
            lines.append(
                f"| {' | '.join(key)} | {count} | {name} | {np.median(ratio):.3f} | {p90:.3f} | {ratio[-1]:.3f} | "
                f"{spent} |"
            )
    return [*lines, ""]


def family(rows: list[dict[str, Any]]) -> list[str]:
    """Variants that learned over a family, on unseen members of it."""
    mine = [r for r in rows if r["part"] == "family"]
    lines = [
        "| family | on | without | rounds | CPU s of learning | of auto: median | p90 | worst "
        "| over that of the whole: mean over graphs | interval |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((r["family"], r["cluster"], r["variant"]) for r in mine):
        here = [r for r in mine if (r["family"], r["cluster"], r["variant"]) == key]
        whole = [
            r for r in mine if (r["family"], r["cluster"], r["variant"]) == (*key[:2], "as it is")
        ]
        ratio = sorted(r["best"] / r["auto"] for r in here)
        p90 = ratio[min(len(ratio) - 1, int(0.9 * len(ratio)))]
        spent = np.mean([r["learned_cpu"] for r in here])
        lines.append(
            f"| {' | '.join(key)} | {here[0]['rounds']} | {spent:.0f} | {np.median(ratio):.3f} | {p90:.3f} | "
            f"{ratio[-1]:.3f} | {over(here, whole)} |"
        )
    return [*lines, ""]


def over(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
    """The mean ratio of step times over graphs, and 95 % of bootstrap samples of the graphs."""
    graphs = sorted({r["graph"] for r in rows})
    log = np.array(
        [
            np.mean([np.log(r["best"]) for r in rows if r["graph"] == graph])
            - np.mean([np.log(r["best"]) for r in others if r["graph"] == graph])
            for graph in graphs
        ]
    )
    means = log[np.random.default_rng(0).integers(0, len(log), (10_000, len(log)))].mean(axis=1)
    low, high = np.exp(np.quantile(means, [0.025, 0.975]))
    return f"{np.exp(log.mean()):.3f} | {low:.3f} to {high:.3f}"


def first_at(row: dict[str, Any], target: float) -> float:
    """The first checkpoint at which a run was as good as the target."""
    return min(
        (int(count) for count, best in row["curve"].items() if best <= target), default=float("inf")
    )


def reached(rows: list[dict[str, Any]], name: str, key: tuple[str, str], target: float) -> str:
    """The checkpoint by which the median run was there, and how many of the runs were at any."""
    found = [
        first_at(r, target)
        for r in rows
        if r["placer"] == name and (r["model"], r["cluster"]) == key
    ]
    count, median = sum(np.isfinite(found)), np.median(found)
    most = max(int(point) for r in rows if r["placer"] == name for point in r["curve"])
    return (
        f"{median:,.0f}" if np.isfinite(median) else f"> {most:,}"
    ) + f" ({count} of {len(found)})"


def trials(curves: list[dict[str, Any]]) -> list[str]:
    teacher = {
        key: [r for r in curves if r["placer"] == "seq2seq" and (r["model"], r["cluster"]) == key]
        for key in KEYS
    }
    targets = {
        f"after {EQUAL_TRIALS:,} trials": lambda r: r["curve"][str(EQUAL_TRIALS)],
    }
    lines = []
    for said, figure in targets.items():
        lines += [
            f"As good as the median of `seq2seq` {said}:\n",
            "| | seconds | " + " | ".join(COMPARED) + " | published: Placeto, times fewer |",
            "|---|---|---|---|---|---|---|",
        ]
        for key in KEYS:
            target = float(np.median([figure(r) for r in teacher[key] if figure(r) is not None]))
            cells = [reached(curves, name, key, target) for name in COMPARED]
            lines.append(
                f"| {' '.join(key)} | {target:.4f} | {' | '.join(cells)} | {PUBLISHED.get(key, '')} |"
            )
        lines.append("")
    return lines


def page(path: Path) -> str:
    """All parts; the rows of curves.py and generalise.py are beside those of Placeto."""
    rows, curves = results.read(path), results.read(CURVES)
    parts = {name: [row for row in rows if row["part"] == name] for name in PARTS}
    compared = [row for row in curves if row["placer"] in COMPARED]
    text = ["# Placeto: its parts, unseen graphs, trials\n", results.provenance(rows)]
    text += [
        "Simulated on presets, on a shared machine; CPU seconds are those of the process. Made by "
        "`python benchmarks/learning/placeto_page.py` from rows of `placeto_ablations.py`, "
        "`placeto_unseen.py` and `placeto_family.py`.\n",
        "## Which parts matter?\n",
        results.provenance(parts["ablation"] + parts["reference"]), *ablations(rows),
        "## How good is it on graphs it has never seen?\n",
        results.provenance(parts["unseen"]), *unseen(rows),
        "## Which parts matter on graphs it has never seen?\n",
        results.provenance(parts["family"]), *family(rows),
        "## How many trials to be as good as `seq2seq`?\n",
        results.provenance(compared), *trials(compared),
    ]  # fmt: skip
    return "\n".join(text)


if __name__ == "__main__":
    PAGE.write_text(page(ROWS))
