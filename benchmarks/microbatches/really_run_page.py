"""The page of `really_run.py`: tables and verdicts, all of them from the rows.

For each model and case the last run counts. Figures of a round are compared within it; a table has
the median over the rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rows as results
from rows import Row

OF_BEST_MOST = 1.0  # Roost's step over that of the better of DDP and 1F1B
CEILING_LEAST = 0.95  # Roost's speed-up over the ceiling's
SLOW_LEAST = 1.25  # the step of the better of DDP and 1F1B over Roost's, with a slowed core
PREDICTED_MOST = 0.10  # median relative error of the expected step
LOSSES_MOST = 1e-4  # largest relative difference of a loss: float32, other orders of summing
MEMORY_MOST = 0.15  # relative error of the simulated peak of a device

ONE = ("one M=1", "one M=4")
PARALLEL = ("ddp", "1f1b M=4", "1f1b M=8")
UNEVEN = ("1f1b cut 2:1 M=4", "1f1b cut 2:1 M=8")
CEILING = "ceiling"
ROOST = "roost"
KINDS_OF_ROWS = ("setup", "round", "losses", "memory")
CASES = {"equal": "Two cores alike", "slow": "The second core slowed"}


@dataclass(frozen=True)
class Found:
    """The rows of one model in one case."""

    model: str
    case: str
    setup: Row
    rounds: list[Row]
    losses: Row | None
    memory: Row | None

    def has(self, *columns: str) -> bool:
        return all(any(column in row["seconds"] for row in self.rounds) for column in columns)

    def median(self, column: str) -> float:
        """Seconds of a step; infinite for a competitor that was left out."""
        seconds = [row["seconds"][column] for row in self.rounds if column in row["seconds"]]
        return statistics.median(seconds) if seconds else math.inf

    def fastest(self, columns: Iterable[str]) -> str:
        return min(columns, key=self.median)

    def ratio(self, over: str, under: str) -> float | None:
        """Seconds of one over those of another, within rounds."""
        both = [row["seconds"] for row in self.rounds if {over, under} <= row["seconds"].keys()]
        return statistics.median(each[over] / each[under] for each in both) if both else None

    @property
    def roost(self) -> Row:
        facts: Row = self.setup["facts"].get(ROOST, {})
        return facts

    def slower(self) -> float | None:
        """How much slower a row of the batch is on the second core, from the ceiling's two
        processes."""
        facts = self.setup["facts"].get(CEILING, {})
        sizes = [facts.get(f"rows of process {rank}") for rank in (0, 1)]
        members = [row["members"][CEILING] for row in self.rounds if CEILING in row["members"]]
        if not members or None in sizes:
            return None
        return statistics.median(two / sizes[1] / (one / sizes[0]) for one, two in members)


def found(rows: list[Row]) -> list[Found]:
    """The last run of each model and case that took a round."""
    every: dict[tuple[str, str], str] = {}
    for row in rows:
        if row["what"] == "round":
            every[row["model"], row["case"]] = row["run"]
    chosen = []
    for (model, case), began in every.items():
        here = [row for row in rows if (row["run"], row["model"]) == (began, model)]
        mine = [row for row in here if row["case"] == case]
        of = {what: [row for row in mine if row["what"] == what] for what in KINDS_OF_ROWS}
        once = {what: next(iter(of[what]), None) for what in ("losses", "memory")}
        chosen.append(Found(model, case, of["setup"][-1], of["round"], **once))
    return chosen


def page(rows_file: Path) -> str:
    rows = results.read(rows_file)
    every = found(rows)
    lines = ["# Training steps on two cores: Roost beside DDP and 1F1B\n", results.provenance(rows)]
    if not every:
        return "\n".join(lines)
    machine = every[0].rounds[0]["machine"]
    versions = every[0].rounds[0]["versions"]
    lines += [
        f"Machine: {machine}; torch {versions['torch']}. Every device is one core with one thread. "
        "The columns:\n",
        "| column | is |",
        "|---|---|",
        "| one | one device, PyTorch with gradients accumulated; the faster of its numbers of "
        "microbatches |",
        "| ddp | DistributedDataParallel over gloo, two processes, each with half of the batch |",
        "| 1f1b | `torch.distributed.pipelining`, Schedule1F1B, two stages cut by hand |",
        "| ceiling | two processes that never talk, each with its share of the batch |",
        "| Roost | `roost.trainer`, which chooses the placement and the microbatches |",
        "",
        "Competitors take turns in rounds. Ratios are medians of ratios within a round. AdamW has "
        "PyTorch's default settings. All processes keep freed memory, as Roost's runtime does. "
        "`others` is the share of the busier core that other programs took before a round: where "
        "it is not near zero, the figures say little. The two stages of t5 are its encoder and "
        "its decoder; tied weights add up their gradients across stages.\n",
        *_goals(every),
    ]
    for case, title in CASES.items():
        here = [each for each in every if each.case == case]
        if here:
            lines += _case(title, here)
    lines += _plans(every)
    return "\n".join(lines).rstrip("\n") + "\n"


def _case(title: str, here: list[Found]) -> list[str]:
    uneven = any(each.has(*UNEVEN) for each in here)
    names = [*PARALLEL, *(UNEVEN if uneven else ()), CEILING, ROOST]
    lines = [f"## {title}: speed-up over one device\n"]
    if here[0].case == "slow":
        lines.append(
            "A process at equal priority keeps the second core busy, which slows every competitor "
            "alike. One device is the fast core. The ceiling's two shares of the batch fit the "
            "speeds. Roost's cluster says how much slower the second device is. Columns with `cut` are 1F1B with stages cut by hand for these speeds; they do "
            "not count in the goal.\n"
        )
    head = ["model", "one, ms", *names, "Roost / better of ddp, 1f1b", "Roost / ceiling"]
    head += ["second core slower by", "others"]
    lines += [_row(head), _row(["---"] * len(head))]
    for each in here:
        one = each.fastest(ONE)
        best = each.fastest(PARALLEL)
        cells = [each.model, f"{each.median(one) * 1e3:.0f} ({one.removeprefix('one ')})"]
        cells += [_figure(each.ratio(one, name)) for name in names]
        cells += [_figure(each.ratio(ROOST, best)), _figure(each.ratio(CEILING, ROOST))]
        others = statistics.median(max(row["busy"]) for row in each.rounds)
        cells += [_figure(each.slower()), f"{others:.0%}"]
        marked = [cells[0], *(results.mark(cell, each.rounds) for cell in cells[1:])]
        lines.append(_row(marked))
    return [*lines, ""]


def _plans(every: list[Found]) -> list[str]:
    """What ran: sizes, cuts, and Roost's plans, expected and measured."""
    head = ["model", "case", "parameters", "batch", "stages of 1f1b", "Roost's microbatches"]
    head += ["Roost expected, ms", "measured, ms", "losses differ by", "set-up, s"]
    lines = ["## What ran\n", _row(head), _row(["---"] * len(head))]
    for each in every:
        facts = each.setup["facts"]
        expected = each.roost.get("expected")
        measured = each.median(ROOST)
        differ = difference(each.losses)
        cells = [
            each.model,
            each.case,
            f"{facts['one']['parameters'] / 1e6:.1f} M" if "one" in facts else "",
            str(each.setup["settings"]["batch"]),
            str(facts.get("1f1b", {}).get("cut", "")),
            str(each.roost.get("copies", "")),
            f"{expected * 1e3:.0f}" if expected else "",
            f"{measured * 1e3:.0f}" if measured < math.inf else each.roost.get("skipped", ""),
            f"{differ:.1e}" if differ is not None else "",
            str(each.setup["took"].get(ROOST, "")),
        ]
        lines.append(_row(cells))
    return [*lines, ""]


def difference(row: Row | None) -> float | None:
    """The largest relative difference of a loss."""
    if row is None:
        return None
    pairs = zip(row["one"], row["roost"], strict=True)
    return max(abs(ours - theirs) / abs(theirs) for theirs, ours in pairs)


Figures = list[tuple[float, list[Row]]]  # with the rows that they rest on


def _goals(every: list[Found]) -> list[str]:
    """Each goal against the worst model, or the median where the goal is one."""
    equal = [each for each in every if each.case == "equal"]
    slow = [each for each in every if each.case == "slow"]
    errors = predicted(every)
    median = [(statistics.median(e for e, _ in errors), _all_rows(errors))] if errors else []
    lines = ["| goal | found | asked | |", "|---|---|---|---|"]
    said: list[tuple[str, Figures, float, bool, str]] = [
        ("Roost's step / the better of ddp and 1f1b, worst model", of_best(equal), OF_BEST_MOST, True, ".3f"),
        ("Roost's speed-up / the ceiling's, worst model", of_ceiling(equal), CEILING_LEAST, False, ".3f"),
        ("second core slowed: the better of ddp and 1f1b / Roost, worst model", slow_gain(slow), SLOW_LEAST, False, ".3f"),
        ("expected against measured step, median error", median, PREDICTED_MOST, True, ".1%"),
        ("losses against one device, largest relative difference", losses(every), LOSSES_MOST, True, ".1e"),
        ("peak memory of a device, simulated against allocated, worst", memory(every), MEMORY_MOST, True, ".1%"),
    ]  # fmt: skip
    for name, figures, goal, at_most, form in said:
        worst = (max if at_most else min)((each for each, _ in figures), default=math.nan)
        rows = _all_rows(figures)
        text = format(worst, form) if figures else ""
        asked = f"at {'most' if at_most else 'least'} {goal:g}"
        verdict = results.verdict(worst, goal, rows, at_most)
        lines.append(_row([name, results.mark(text, rows), asked, verdict]))
    return [*lines, ""]


def of_best(here: list[Found]) -> Figures:
    ratios = [(each.ratio(ROOST, each.fastest(PARALLEL)), each.rounds) for each in here]
    return [(ratio, rows) for ratio, rows in ratios if ratio is not None]


def of_ceiling(here: list[Found]) -> Figures:
    ratios = [(each.ratio(CEILING, ROOST), each.rounds) for each in here]
    return [(ratio, rows) for ratio, rows in ratios if ratio is not None]


def slow_gain(here: list[Found]) -> Figures:
    ratios = [(each.ratio(each.fastest(PARALLEL), ROOST), each.rounds) for each in here]
    return [(ratio, rows) for ratio, rows in ratios if ratio is not None]


def predicted(every: list[Found]) -> Figures:
    """The relative error of the expected step of each model and case."""
    errors: Figures = []
    for each in every:
        expected = each.roost.get("expected")
        if expected and each.has(ROOST):
            measured = each.median(ROOST)
            errors.append((abs(expected - measured) / measured, [each.setup, *each.rounds]))
    return errors


def losses(every: list[Found]) -> Figures:
    known = [(difference(each.losses), each.losses) for each in every]
    return [(figure, [row]) for figure, row in known if figure is not None and row is not None]


def memory(every: list[Found]) -> Figures:
    """The relative error of the simulated peak of each device."""
    errors: Figures = []
    for each in every:
        devices: dict[str, Any] = each.memory["devices"] if each.memory else {}
        for peak in devices.values():
            error = abs(peak["simulated"] - peak["measured"]) / peak["measured"]
            errors.append((error, [each.memory or {}]))
    return errors


def _all_rows(figures: Figures) -> list[Row]:
    return [row for _, rows in figures for row in rows]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
