"""Inception-V3 on one CPU and four K80s: what one training step costs under four placements and two orders.

`make demo` runs this. It prints the comparison and writes to out/: the timeline of the best placement, a trace of it
for ui.perfetto.dev, and the placement itself.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from inception_v3 import contiguous, published_placement
from rich.console import Console
from rich.table import Table

import roost
from roost.core.units import show_bytes, show_seconds
from roost.report.trace import write_trace

HERE = Path(__file__).parent
OUT = HERE.parent / "out"


def main() -> None:
    console = Console()
    graph = roost.load(HERE / "inception_v3.json.gz")
    cluster = roost.cluster("k80x4")
    problem = roost.estimate(graph, cluster)
    first_gpu = cluster.index_of("cuda:0")
    devices = {
        "1 CPU": np.full(graph.num_ops, cluster.index_of("cpu:0")),
        "1 GPU": np.full(graph.num_ops, first_gpu),
        "4 GPUs, contiguous": first_gpu + contiguous(graph, 4),
        "4 GPUs, published 2017": first_gpu + published_placement(graph),
    }
    placements = {
        (name, order): roost.Placement(device, order, devices=cluster.device_names, graph=graph.digest)
        for name, device in devices.items()
        for order in ("program", "rank")
    }
    with console.status("simulating (the first run compiles, which takes a while)"):
        timelines = {key: roost.simulate(problem, placement) for key, placement in placements.items()}
    single = timelines["1 GPU", "program"].step_time

    table = Table(
        title=f"One training step of Inception-V3 (batch 32, {graph.num_ops} ops) on {cluster.name}, simulated"
    )
    for heading in ("placement", "order"):
        table.add_column(heading)
    for heading in ("step", "of 1 GPU", "transfers", "GPU peak"):
        table.add_column(heading, justify="right")
    for (name, order), timeline in timelines.items():
        table.add_row(
            name,
            order,
            show_seconds(timeline.step_time),
            f"{timeline.step_time / single:.2f}",
            str(timeline.num_transfers),
            show_bytes(timeline.peak_memory[first_gpu:].max()),
        )
    console.print(table)

    best = min(timelines, key=lambda key: timelines[key].step_time)
    timeline = roost.simulate(problem, placements[best], full=True)
    OUT.mkdir(exist_ok=True)
    replace(placements[best], graph=graph.digest).save(OUT / "placement.json")
    timeline.save(OUT / "timeline.json.gz")
    write_trace(timeline, OUT / "trace.json.gz", graph)
    busy = ", ".join(
        f"{name} {share:.0%}"
        for name, share in zip(timeline.device_names, timeline.busy / timeline.step_time, strict=True)
    )
    console.print(f"Best: {best[0]}, {best[1]} order. Busy: {busy}.")
    console.print(
        f"Wrote placement.json, timeline.json.gz and trace.json.gz to {OUT.relative_to(HERE.parent)}/; ", end=""
    )
    console.print("open the trace in ui.perfetto.dev to see what runs when.")


if __name__ == "__main__":
    main()
