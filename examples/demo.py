"""One training step of Inception-V3 on a CPU and four K80s: every placer, the best placement, and
why it is the best.

`make demo` runs this. It prints the comparison and writes to out/demo/: the placement, the result
of the search, its timeline, and a trace of it for ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import roost
from roost import catalog
from roost.core.units import show_bytes, show_seconds
from roost.report.trace import write_trace
from roost.search.solve import search

ROOT = Path(__file__).parents[1]
NOTES = {  # Mirhoseini et al. 2017 is the paper that began it
    "auto": "the default",
    "published": "answer of 2017",
    "seq2seq": "policy of 2017",
    "single": "baseline of 2017",
    "scotch": "baseline of 2017",
    "mincut": "baseline of 2017",
    "expert": "baseline of 2017",
}


def main(seconds: float, out: Path) -> None:
    console = Console(highlight=False)
    console.print("Capturing a training step of Inception-V3, batch 32: ten seconds or so.")
    problem = roost.estimate(roost.zoo.build("inception_v3", train=True), roost.cluster("k80x4"))
    console.print(
        f"{problem.graph.num_ops:,} ops to place on {problem.cluster.name}. Every placer may take {seconds:g} s. "
        "In its first run on a machine Roost compiles its simulator and its searches: up to a minute more."
    )
    results = {
        name: found
        for name in catalog.names("placers")
        if (found := solve(console, problem, name, seconds))
    }
    bound = roost.bound(problem)
    console.print(comparison(problem, results, bound))
    best = replace(min(results.values(), key=longest_last), bound=bound)
    timeline = roost.simulate(problem, best.best.placement, full=True)
    console.print(explanation(problem, results, best, timeline, bound))
    out.mkdir(parents=True, exist_ok=True)
    best.best.placement.save(out / "placement.json")
    best.save(out / "result.json")
    timeline.save(out / "timeline.json.gz")
    write_trace(timeline, out / "trace.json.gz", problem.graph)
    console.print(
        f"\nWrote placement.json, result.json, timeline.json.gz and trace.json.gz to {out}/. Open ui.perfetto.dev and "
        "drop trace.json.gz on it to see what runs when.",
        soft_wrap=True,
    )


def solve(
    console: Console, problem: roost.Problem, name: str, seconds: float
) -> roost.Result | None:
    """What a placer finds in the time given; None where it cannot be asked."""
    try:
        with console.status(
            f"{name} (the first run compiles, up to a minute for all placers together)"
        ):
            # As roost.solve, but one bound serves all.
            return search(problem, name, seconds=seconds, prove=False)
    except (roost.InputError, ImportError) as error:  # for another model, or not installed
        console.print(f"Without {name}: {error}")
        return None


def longest_last(result: roost.Result) -> tuple[bool, float]:
    return not result.best.feasible, result.best.step_time


def comparison(
    problem: roost.Problem, results: dict[str, roost.Result], bound: roost.Bound
) -> Table:
    single = results["single"].best.step_time
    where, least = problem.cluster.name, show_seconds(bound.step_time)
    table = Table(
        title=f"\nOne training step on {where}, simulated; none can be below {least}",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
    )
    table.add_column("placer")
    for heading in ("step", "of single", "peak", "seconds", "gap"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for name, result in sorted(results.items(), key=lambda item: longest_last(item[1])):
        table.add_row(
            name,
            show_seconds(result.best.step_time) if result.best.feasible else "does not fit",
            f"{result.best.step_time / single:.2f}",
            show_bytes(result.best.peak_memory.max()),
            f"{result.seconds:.2f}",
            f"{1 - bound.step_time / result.best.step_time:.1%}",
            NOTES.get(name, ""),
        )
    return table


def explanation(
    problem: roost.Problem,
    results: dict[str, roost.Result],
    best: roost.Result,
    timeline: roost.Timeline,
    bound: roost.Bound,
) -> str:
    """Why four GPUs beat one, and by how much they could, from the timeline."""
    assert timeline.transfers is not None
    single = results["single"].best.step_time
    gpus = [d for d, device in enumerate(problem.cluster.devices) if device.kind == "cuda"]
    busy = ", ".join(
        f"{timeline.device_names[d]} {timeline.busy[d] / timeline.step_time:.0%}" for d in gpus
    )
    moved = problem.graph.output_bytes[timeline.transfers.tensor].sum()
    gap = 1 - bound.step_time / timeline.step_time
    return (
        f"\nOne GPU works through the step alone, in {show_seconds(single)}. The best placement, by {best.placer} in "
        f"{best.best.placement.order} order, takes {show_seconds(timeline.step_time)}: branches and gradients that do "
        f"not wait for each other run side by side (busy: {busy}), while {timeline.num_transfers} transfers carry "
        f"{show_bytes(moved)} between devices.\n"
        f"Shared out evenly, four GPUs would need {show_seconds(single / len(gpus))}, but most ops wait for one "
        f"another: no placement can be faster than {show_seconds(bound.step_time)} (proof: {bound.proof}), so at most "
        f"{gap:.1%} of the step is left to gain."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each placer")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "demo", help="where to write")
    arguments = parser.parse_args()
    main(arguments.seconds, arguments.out)
