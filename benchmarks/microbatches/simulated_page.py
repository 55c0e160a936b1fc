"""The page of `simulated.py`: a table for each cluster and verdicts, all from the rows."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from pathlib import Path

from rows import Row, mark, provenance, read, verdict

SECONDS = 10.0  # CPU seconds of every search
CAPPED = 0.5  # of the memory that one device needs alone
OF_BEST_MOST = 0.95  # geometric mean of auto over the best other
GAP_MOST = 0.15  # median
SPEED_UPS = (  # model, batch, cluster, cap, least speed-up over one device
    ("gpt2", 16, "a100x4", 0.0, 3.6),
    ("vit", 32, "a100x4", 0.0, 3.7),
    ("gpt2", 16, "a100x4", CAPPED, 3.0),
    ("gpt2", 64, "h100x8", 0.0, 6.0),
)
OTHERS = ("whole", "pipeline", "data_parallel", "hybrid")
_EQUAL = 1e-9

Cell = tuple[str, int, str, float]


def page(file: Path) -> str:
    """The page of these rows; of rows measured again the last count."""
    rows = read(file)
    cells: defaultdict[Cell, dict[tuple[str, int], Row]] = defaultdict(dict)
    for row in rows:
        cell = (row["model"], row["batch"], row["cluster"], row["cap"])
        cells[cell][row["placer"], row["seed"]] = row
    full = {cell: found for cell, found in cells.items() if _is_complete(found)}
    lines = [
        "# Which step do microbatches give, simulated?",
        "",
        provenance(rows),
        "Command: `python benchmarks/microbatches/simulated.py run`. Every search has "
        f"{SECONDS:g} CPU seconds on one thread. A training step is captured at batch B / M and "
        "unrolled into M microbatches. `auto` searches M as well. *Whole batch* is `auto` without "
        "microbatches. The three baselines have every M, order and layout, as far as their seconds go; they "
        "do not depend on the seed. *Times one* is the step of the best single device over that of "
        "`auto`. *Ideal* is the number of accelerators where they are alike. Medians over seeds; "
        "costs by roofline.",
        "",
        f"Versions and machine: {_versions(rows)}.",
        "",
        "## Goals",
        "",
        *_goals(full, len(cells)),
        "",
    ]
    for cluster in dict.fromkeys(cell[2] for cell in cells):
        lines += [f"## {cluster}", "", *_table(cells, cluster), ""]
    return "\n".join(lines).rstrip() + "\n"


def _is_complete(found: dict[tuple[str, int], Row]) -> bool:
    placers = {placer for placer, _ in found}
    return {"auto", "single", *OTHERS} <= placers


def _steps(found: dict[tuple[str, int], Row], placer: str) -> list[float]:
    rows = (row for (name, _), row in sorted(found.items()) if name == placer)
    return [row["step_time"] if row["feasible"] else math.inf for row in rows]


def _median(found: dict[tuple[str, int], Row], placer: str) -> float:
    steps = _steps(found, placer)
    return statistics.median(steps) if steps else math.inf


def _best_other(found: dict[tuple[str, int], Row]) -> tuple[str, float]:
    steps = {placer: _median(found, placer) for placer in OTHERS}
    best = min(steps, key=lambda placer: steps[placer])
    return best, steps[best]


def _gap(found: dict[tuple[str, int], Row]) -> float | None:
    rows = [row for (name, _), row in found.items() if name == "auto" and row.get("bound")]
    gaps = [1 - row["bound"] / row["step_time"] for row in rows if row["feasible"]]
    return statistics.median(gaps) if gaps else None


def _speed_up(found: dict[tuple[str, int], Row]) -> float:
    single, own = _median(found, "single"), _median(found, "auto")
    return math.nan if math.isinf(single) or math.isinf(own) else single / own


def _goals(full: dict[Cell, dict[tuple[str, int], Row]], num_cells: int) -> list[str]:
    lines = ["| what | found | goal | |", "|---|---|---|---|"]
    rows = [row for found in full.values() for row in found.values()]
    ratios, worse, best_possible = [], 0, []
    for found in full.values():
        other = _best_other(found)[1]
        own = _median(found, "auto")
        if math.isinf(other):
            continue
        if math.isinf(own):
            worse += 1
            continue
        ratios.append(own / other)
        worse += own > other * (1 + _EQUAL)
        gap = _gap(found)
        if gap is not None:
            best_possible.append(own * (1 - gap) / other)
    if ratios:
        mean = statistics.geometric_mean(ratios)
        what = "step of `auto` over the best other, geometric mean"
        lines.append(_line(what, f"{mean:.3f}", OF_BEST_MOST, mean, rows))
        floor = statistics.geometric_mean(best_possible)
        lines.append(f"| the same of the bound: no search can go below | {floor:.3f} | | |")
        what = f"cells of {len(full)} where `auto` is worse than the best other"
        lines.append(_line(what, str(worse), 0, worse, rows))
    gaps = [gap for found in full.values() if (gap := _gap(found)) is not None]
    if gaps:
        gap = statistics.median(gaps)
        lines.append(_line("gap to the bound, median", f"{gap:.1%}", GAP_MOST, gap, rows))
    for *cell, least in SPEED_UPS:
        model, batch, cluster, cap = cell
        found = full.get((model, batch, cluster, cap))
        if found is None:
            continue
        name = f"{model}, batch {batch}, {cluster}" + (f", {cap:g} of the memory" if cap else "")
        base = full.get((model, batch, cluster, 0.0), found)
        speed = _median(base, "single") / _median(found, "auto")
        own = [row for (placer, _), row in found.items() if placer in ("auto", "single")]
        said = verdict(speed, least, own, at_most=False)
        lines.append(f"| times one device: {name} | {speed:.2f} | at least {least:g} | {said} |")
    if len(full) < num_cells:
        lines += ["", f"{num_cells - len(full)} of {num_cells} cells are not complete."]
    return lines


def _line(what: str, shown: str, goal: float, figure: float, rows: list[Row]) -> str:
    return f"| {what} | {shown} | at most {goal:g} | {verdict(figure, goal, rows)} |"


def _table(cells: dict[Cell, dict[tuple[str, int], Row]], cluster: str) -> list[str]:
    heads = ["model", "batch", "one device", "whole batch", "pipeline", "data parallel", "hybrid"]
    heads += ["auto", "seeds", "spread", "M", "of the best other", "times one", "ideal", "gap"]
    heads += ["proof"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for (model, batch, on, cap), found in cells.items():
        if on != cluster:
            continue
        rows = list(found.values())
        own = [row for (placer, _), row in sorted(found.items()) if placer == "auto"]
        steps = _steps(found, "auto")
        other, best = _best_other(found)
        figures = [f"{model}" + (f", {cap:g} of the memory" if cap else ""), str(batch)]
        figures += [_show(_median(found, "single"))]
        for placer in OTHERS:
            step = _show(_median(found, placer))
            figures.append(f"**{step}**" if placer == other else step)
        middle = _median(found, "auto")
        figures += [_show(middle), str(len(steps))]
        figures += [f"{(max(steps) - min(steps)) / middle:.1%}" if len(steps) > 1 else ""]
        figures += [", ".join(sorted({str(row["count"]) for row in own}, key=int))]
        ratio = middle / best if not math.isinf(best) else math.nan
        speed = _speed_up(found)
        figures += [_plain(ratio, 3), _plain(speed, 2)]
        figures += [str(own[0]["devices"]) if own and not _unlike(cluster) else ""]
        gap = _gap(found)
        figures += ["" if gap is None else f"{gap:.1%}"]
        figures += [", ".join(sorted({row["proof"] for row in own if row.get("proof")}))]
        lines.append("| " + " | ".join(mark(figure, rows) for figure in figures) + " |")
    return [*lines, "", "Milliseconds a step; the best other in bold."]


def _unlike(cluster: str) -> bool:
    return cluster == "rtx4090_rtx3060"


def _show(seconds: float) -> str:
    return "does not fit" if math.isinf(seconds) else f"{1e3 * seconds:.1f}"


def _plain(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def _versions(rows: list[Row]) -> str:
    found = {
        ", ".join(f"{name} {number}" for name, number in row["versions"].items())
        + f"; {row['machine']}"
        for row in rows
    }
    return " / ".join(sorted(found))
