"""The page of `capture_coverage.py`: shares of captured models, refusals, and FLOP against other counts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import rows as results
from rows import Row

# Package -> the share of models to capture, for inference and for training.
GOALS = {
    "timm": (1.0, 1.0),
    "torchvision": (0.75, 0.75),
    "transformers": (0.95, 0.90),
    "diffusers": (1.0, 1.0),
}
PLANNED = {"timm": 40, "torchvision": 12, "transformers": 50, "diffusers": 8}  # models
REAL_LENGTH = 512  # tokens, of the models of real sizes
CLOSE = 0.02  # largest distance from the reference
# Kind of op, as the counter calls it -> why its FLOP are counted by hand.
REASONS = {
    "convolution_backward": "PyTorch's formula counts the backward of a grouped convolution wrong",
    "attention, scores made again": "fused attention makes its scores again in the backward: 5 "
    "products; the counter saw 4, as it ran the attention that keeps them",
    "_grouped_mm": "PyTorch has no formula for grouped products, as experts use them",
    "transformers.grouped_mm_fallback": "PyTorch does not see into the grouped products of "
    "transformers",
    "transformers.grouped_mm_fallback_backward": "PyTorch does not see into the grouped products "
    "of transformers",
    "mv": "PyTorch has no formula for a product with a vector",
    "dot": "PyTorch has no formula for a product of vectors",
    "_fft_r2c": "PyTorch has no formula for Fourier transforms",
    "_fft_c2c": "PyTorch has no formula for Fourier transforms",
    "_fft_c2r": "PyTorch has no formula for Fourier transforms",
}


def page(path: Path) -> str:
    """The page of a file of rows; of each model and step the last row counts."""
    every = {(r["package"], r["model"], r["train"]): r for r in results.read(path)}
    rows = list(every.values())
    parts = [
        "# Which models can be captured, and are their FLOP true?\n",
        results.provenance(rows),
        "Rows are made by `make bench-coverage`. Every model is built on the meta device and "
        "captured in a process of its own, with a time limit. The models of transformers and "
        "diffusers have few and small layers, except those under *real sizes*. CPU seconds are "
        "those of the capture alone, without imports and building.\n",
        _versions(rows),
        _declared(rows),
        _goals(rows),
        _refusals(rows),
        _real_sizes(rows),
        _differences(rows),
        _table(rows),
    ]
    return "\n".join(parts)


def _versions(rows: list[Row]) -> str:
    """Every set of versions and machines that rows name."""
    named = Counter(
        ", ".join(f"{name} {number}" for name, number in row["versions"].items())
        + f"; {row['machine']}"
        for row in rows
    )
    lines = [f"- {text} ({number} rows)" for text, number in named.items()]
    return "\n".join(["Versions and machine:\n", *lines, ""])


def _declared(rows: list[Row]) -> str:
    """A paragraph on ops that were known by name only."""
    rows = [row for row in rows if row.get("ops_declared_by_name")]
    if not rows:
        return ""
    names = ", ".join(f"`{name}`" for name in rows[0]["ops_declared_by_name"])
    return (
        f"torchvision's compiled library did not load beside this PyTorch (in {len(rows)} rows). Its ops "
        f"{names} were declared by name, so that torchvision imports. Capture needs their shapes "
        "only, which the Python part of torchvision gives. These rows do not show that a model of "
        "torchvision with these ops runs.\n"
    )


def _goals(rows: list[Row]) -> str:
    lines = [
        "## Goals\n",
        "| package | step | captured | CPU s, median | most | goal | |",
        "|---|---|---|---|---|---|---|",
    ]
    for package, goals in GOALS.items():
        for train, goal in zip((False, True), goals, strict=True):
            here = [r for r in rows if r["package"] == package and r["train"] == train]
            share = sum(r["captured"] for r in here) / max(len(here), 1)
            seconds = sorted(r["cpu_seconds"] for r in here if "cpu_seconds" in r) or [0.0]
            said = results.verdict(share, goal, here, at_most=False)
            if len(here) < PLANNED[package]:
                said = f"open: {len(here)} of {PLANNED[package]} measured"
            lines.append(
                f"| {package} | {_step(train)} | {sum(r['captured'] for r in here)} of {len(here)}"
                f" | {seconds[len(seconds) // 2]:.1f} | {seconds[-1]:.1f} | {goal:.0%} | {said} |"
            )
    compared = [r for r in rows if ratio(r, "reference_flop") is not None]
    worst = max((abs(_ratio(r, "reference_flop") - 1) for r in compared), default=0.0)
    said = results.verdict(worst, CLOSE, compared)
    off = [r for r in compared if _is_off(r, "counter_flop")]
    reasoned = all(_reasons(r) for r in off)
    planned = 2 * sum(PLANNED.values())
    there = sum(r["package"] in PLANNED for r in rows)
    if there < planned:
        said = f"open: {there} of {planned} steps measured"
    elif not reasoned:
        said = "missed"
    lines += [
        "",
        f"FLOP of products and convolutions, against PyTorch's counter: {len(compared)} steps "
        f"compared, {len(off)} differ by over {CLOSE:.0%}, "
        f"{'all with a reason below' if reasoned else 'some without a reason'}. Once the ops with "
        f"a reason are counted by hand, the largest distance is {worst:.2%} "
        f"(goal: at most {CLOSE:.0%}): {said}.\n",
    ]
    return "\n".join(lines)


def _refusals(rows: list[Row]) -> str:
    refused = [row for row in rows if not row["captured"]]
    lines = [
        "## Refused\n",
        "| package | model | step | Roost says |",
        "|---|---|---|---|",
        *(
            f"| {r['package']} | {r['model']} | {_step(r['train'])} | "
            f"{results.mark(_cell(r['said']), [r])} |"
            for r in refused
        ),
        "",
    ]
    return "\n".join(lines) if refused else "No model was refused.\n"


def _real_sizes(rows: list[Row]) -> str:
    lines = [
        "## Real sizes of mixtures of experts\n",
        f"On one text of {REAL_LENGTH} tokens, in bfloat16. By hand: two FLOP for each weight that a token "
        "meets (router, its experts, projections, head), and the pairs of attention.\n",
        "| model | step | parameters | ops | FLOP, all ops | by hand | ratio | CPU s | "
        f"within {CLOSE:.0%} |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "analytic_flop" not in row or not row["captured"]:
            continue
        share = row["flop"] / row["analytic_flop"]
        said = results.verdict(abs(share - 1), CLOSE, [row])
        lines.append(
            f"| {row['model']} | {_step(row['train'])} | {row['parameters'] / 1e9:.1f} G | "
            f"{row['ops']} | {row['flop'] / 1e12:.2f} T | {row['analytic_flop'] / 1e12:.2f} T | "
            f"{share:.4f} | {row['cpu_seconds']:.1f} | {said} |"
        )
    return "\n".join([*lines, ""])


def _differences(rows: list[Row]) -> str:
    lines = [
        f"## More than {CLOSE:.0%} from PyTorch's counter\n",
        "| package | model | step | Roost / counter | Roost / counter with formulas by hand | why |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if _is_off(row, "counter_flop") or _is_off(row, "reference_flop"):
            why = "; ".join(dict.fromkeys(_reasons(row))) or "**no reason known**"
            lines.append(
                f"| {row['package']} | {row['model']} | {_step(row['train'])} | "
                f"{_text(row, 'counter_flop')} | {_text(row, 'reference_flop')} | {why} |"
            )
    return "\n".join([*lines, ""])


def _table(rows: list[Row]) -> str:
    lines = [
        "## Every model\n",
        "| package | model | step | captured | ops | CPU s | Roost / counter | by hand |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ops, seconds = row.get("ops", ""), row.get("cpu_seconds", "")
        captured = results.mark("yes" if row["captured"] else "no", [row])
        lines.append(
            f"| {row['package']} | {row['model']} | {_step(row['train'])} | {captured} | {ops} | "
            f"{seconds} | {_text(row, 'counter_flop')} | {_text(row, 'reference_flop')} |"
        )
    silent = [row for row in rows if "no_reference" in row and row["captured"]]
    lines += ["", *(_without_reference(row) for row in silent)]
    return "\n".join([*lines, ""])


def _without_reference(row: Row) -> str:
    """Why there is nothing to compare with."""
    return f"- {row['model']}, {_step(row['train'])}: the counter fails: {row['no_reference']}"


def ratio(row: Row, other: str) -> float | None:
    """Roost's FLOP of products over another count of them."""
    if not row.get(other) or "product_flop" not in row:
        return None
    return float(row["product_flop"] / row[other])


def _ratio(row: Row, other: str) -> float:
    found = ratio(row, other)
    assert found is not None
    return found


def _is_off(row: Row, other: str) -> bool:
    found = ratio(row, other)
    return found is not None and abs(found - 1) > CLOSE


def _reasons(row: Row) -> list[str]:
    """Why the counter is off: ops counted by hand that change its total by a percent or more."""
    least = 0.002 * row.get("reference_flop", 0)
    by_hand: dict[str, Any] = row.get("by_hand", {})
    return [REASONS.get(kind, kind) for kind, flop in by_hand.items() if abs(flop) >= least]


def _text(row: Row, other: str) -> str:
    found = ratio(row, other)
    return "" if found is None else results.mark(f"{found:.4f}", [row])


def _step(train: bool) -> str:
    return "training" if train else "inference"


def _cell(text: str) -> str:
    """Text that breaks no table."""
    return text.replace("|", "\\|").replace("<", "&lt;")
