"""The part of the report of `roost place` of microbatches, and of requests under way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from roost.cli import _console, _search
from roost.cli._microbatches import Unrolling
from roost.cli._text import assembled, plural, show_seconds, styled

if TYPE_CHECKING:
    from rich.console import RenderableType

    from roost.core.placement import Placement
    from roost.search.microbatches import MicrobatchResult, MicrobatchRow


def facts_of(unrolling: Unrolling, found: MicrobatchResult, placement: Placement) -> dict[str, Any]:
    """The numbers of copies, and of throughput, as --json prints them."""
    if unrolling.asked.requests is not None:
        from roost.search.requests import throughput

        flow = throughput(found.microbatched, found.problem, placement)
        requests = {
            "count": flow.count,
            "period": flow.period,
            "per_second": flow.per_second,
            "latency": flow.latency,
            "longest_latency": flow.longest_latency,
            "bound": {"period": flow.bound.step_time, "proof": flow.bound.proof},
            "gap": flow.gap,
        }
        return {"requests": requests}
    rows = _best_rows(found)
    alone = [row for row in rows if row["placer"] == "single" and row["feasible"]]
    single = min(alone, key=lambda row: float(row["step_time"]), default=None)
    best = found.result.best
    faster = single["step_time"] / best.step_time if single and best.feasible else None
    microbatches = {
        "count": found.count,
        "batch": unrolling.batch,
        "rows": rows,
        "single": single,
        "speed_up": faster,
    }
    return {"microbatches": microbatches}


def _best_rows(found: MicrobatchResult) -> list[dict[str, Any]]:
    """The best step of each placer at each number of microbatches."""
    best: dict[tuple[int, str], MicrobatchRow] = {}
    for row in found.rows:
        known = best.get((row.count, row.placer))
        if known is None or (not row.feasible, row.step_time) < (
            not known.feasible,
            known.step_time,
        ):
            best[row.count, row.placer] = row
    names = ("count", "placer", "step_time", "feasible")
    return [{name: getattr(row, name) for name in names} for row in best.values()]


def copies_in(facts: dict[str, Any]) -> str:
    """The requests that a step is for, where there are several."""
    flow = facts.get("requests")
    return "" if flow is None else f" of {plural(flow['count'], 'request')}"


def summary_of(facts: dict[str, Any]) -> Iterator[RenderableType]:
    """The lines on copies, below the step time."""
    if "requests" in facts:
        flow = facts["requests"]
        yield assembled(
            (f"{show_seconds(flow['period'])} between the ends of two requests", "bold"),
            f" ({flow['per_second']:.3g} a second), with {plural(flow['count'], 'request')} under "
            "way",
        )
        yield (
            f"A request takes {show_seconds(flow['latency'])} (median; "
            f"{show_seconds(flow['longest_latency'])} at most)"
        )
        bound = flow["bound"]
        yield (
            f"No placement ends requests closer than {show_seconds(bound['period'])} (proof: "
            f"{bound['proof']}): gap {_search.show_gap(flow['gap'])}"
        )
    elif "microbatches" in facts:
        chosen = facts["microbatches"]
        words = plural(chosen["count"], "microbatch").replace("batchs", "batches")
        if chosen["batch"] is not None:
            words += f" of {chosen['batch'] // chosen['count']}"
        if chosen["speed_up"] is not None:
            single = chosen["single"]
            words += (
                f": {chosen['speed_up']:.2f} times as fast as one device alone at its best, "
                f"{show_seconds(single['step_time'])} with {single['count']}"
            )
        yield words


def table_of(facts: dict[str, Any]) -> Iterator[RenderableType]:
    """A table of placers and numbers of microbatches, the best placer first."""
    rows = facts.get("microbatches", {}).get("rows", [])
    if not rows:
        return
    counts = sorted({row["count"] for row in rows})
    by_placer: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        by_placer.setdefault(row["placer"], {})[row["count"]] = row

    def best(placer: str) -> float:
        steps = [row["step_time"] for row in by_placer[placer].values() if row["feasible"]]
        return min(steps, default=float("inf"))

    yield ""
    yield styled("best step with so many microbatches:", "dim")
    names = [str(count) for count in counts]
    table = _console.table(["placer", *names], names)
    for placer in sorted(by_placer, key=best):
        cells = [_cell(by_placer[placer].get(count)) for count in counts]
        table.add_row(_search.show_name(placer, by_placer), *cells)
    yield table


def _cell(row: dict[str, Any] | None) -> RenderableType:
    if row is None:
        return ""
    return show_seconds(row["step_time"]) if row["feasible"] else styled("too large", "red")
