"""Pictures of schedules found for gpt2 in microbatches, one for each way to share the work.

    python benchmarks/microbatches/pictures.py run
    python benchmarks/microbatches/pictures.py page

`run` searches on three clusters: four GPUs with fast links, the same GPUs in four hosts with a slow
network, and two hosts of four GPUs. It writes a row with the bars of each timeline, and the step of
each family of placers. `page` draws the bars in `docs/images`. Equal trials give equal pictures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulated import graph_file

import roost
from roost.core.cluster import Cluster
from roost.core.graph import FORWARD, UPDATE
from roost.search.microbatches import COUNTS, MicrobatchResult, solve_microbatches
from roost.simulator.compiled import simulate
from roost.transforms.microbatch import SHARED
from rows import RESULTS, ROOT, measured_with, read

ROWS = RESULTS / "microbatches_pictures_202611.jsonl"
IMAGES = ROOT / "docs" / "images"
BATCH = 16
TRIALS = 20_000
SLOW_NETWORK = 25e9 / 8  # bytes a second
PICTURES = {
    "data_parallel": "four A100 in one host",
    "pipelined": "four hosts with one A100 each, 25 Gb/s between them",
    "mixed": "two hosts with four A100 each, 100 Gb/s between them",
}
WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 960, 64, 16, 46, 28, 20
COLOURS = {"forward": ("#4c78c8", "#7ba0dd"), "backward": ("#e08a3c", "#f0b27a")}
REST = "#5a9e6f"  # sums of gradients and updates
FONT = 'font-family="Helvetica, Arial, sans-serif"'


class Bar(NamedTuple):
    """Ops in a row of one microbatch on one device."""

    row: int
    kind: str  # forward, backward or rest
    copy: int
    begin: float  # share of the step
    end: float


def clusters() -> dict[str, Cluster]:
    """The cluster of each picture."""
    one = roost.cluster("a100x4")
    links = tuple(
        replace(link, bandwidth=SLOW_NETWORK, bus="{source}->{target}")
        if link.source.startswith("cuda")
        else link
        for link in one.links
    )
    return {
        "data_parallel": one,
        "pipelined": replace(one, name="four_hosts_a100", links=links),
        "mixed": roost.cluster("two_hosts_a100x4"),
    }


def run() -> None:
    rows = []
    for name, cluster in clusters().items():
        problems = {
            count: roost.estimate(roost.load(graph_file("gpt2", BATCH, count)), cluster)
            for count in COUNTS
        }
        found = solve_microbatches(problems.__getitem__, COUNTS, trials=TRIALS, threads=1)
        print(name, found, flush=True)
        rows.append(row_of(name, problems[1], found))
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))


def row_of(name: str, whole: roost.Problem, found: MicrobatchResult) -> dict[str, Any]:
    single = roost.solve(whole, "single", trials=100).best.step_time
    best: dict[str, float] = {}
    for row in found.rows:
        if row.feasible:
            best[row.placer] = min(row.step_time, best.get(row.placer, row.step_time))
    families = ("data_parallel", "pipeline", "hybrid")
    bars = list(bars_of(found))
    return {
        "picture": name,
        "cluster": found.problem.cluster.name,
        "model": "gpt2",
        "batch": BATCH,
        "seed": 0,
        "trials": TRIALS,
        "count": found.count,
        "step_time": found.best.step_time,
        "single": single,
        "families": {family: best.get(family) for family in families},
        "whole": min(row.step_time for row in found.rows if row.count == 1 and row.feasible),
        "devices": [d for d in found.problem.cluster.device_names if not d.startswith("cpu")],
        "bars": [
            [bar.row, bar.kind, bar.copy, *map(_rounded, (bar.begin, bar.end))] for bar in bars
        ],
        **measured_with(),
    }


def _rounded(share: float) -> float:
    return round(share, 5)


def bars_of(found: MicrobatchResult) -> Iterator[Bar]:
    """Ops of each GPU, joined where one microbatch goes on."""
    graph = found.problem.graph
    step = simulate(found.problem, found.best.placement, full=True)
    device = found.problem.check(found.best.placement).device
    names = found.problem.cluster.device_names
    gpus = [number for number, name in enumerate(names) if not name.startswith("cpu")]
    for row, gpu in enumerate(gpus):
        ops = [
            op for op in range(graph.num_ops) if device[op] == gpu and graph.phase[op] >= FORWARD
        ]
        ops = [op for op in ops if step.finish[op] > step.start[op]]
        open_bar: Bar | None = None
        for op in sorted(ops, key=lambda op: step.start[op]):
            copy = int(found.microbatched.copy[op])
            kind = "rest" if copy == SHARED or graph.phase[op] == UPDATE else ""
            kind = kind or ("forward" if graph.phase[op] == FORWARD else "backward")
            begin, end = (float(each[op]) / step.step_time for each in (step.start, step.finish))
            same = open_bar is not None and (open_bar.kind, open_bar.copy) == (kind, copy)
            if open_bar is not None and same and begin - open_bar.end < 0.002:
                open_bar = open_bar._replace(end=end)
                continue
            if open_bar is not None:
                yield open_bar
            open_bar = Bar(row, kind, copy, begin, end)
        if open_bar is not None:
            yield open_bar


def page() -> None:
    IMAGES.mkdir(exist_ok=True)
    for row in read(ROWS):
        target = IMAGES / f"microbatches_{row['picture']}.svg"
        target.write_text(drawing(row))
        print(target.relative_to(ROOT))


def drawing(row: dict[str, Any]) -> str:
    """The timeline of a row as an SVG picture."""
    devices = row["devices"]
    height = TOP + ROW * len(devices) + 40
    wide = WIDTH - LEFT - RIGHT
    step = row["step_time"]
    title = (
        f"gpt2, batch {row['batch']}, on {PICTURES[row['picture']]}: {row['count']} microbatches, "
        f"{step * 1e3:.0f} ms, {row['single'] / step:.1f} times one GPU"
    )
    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {FONT}>',
        f'<title>{escape(title)}</title><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
        *_legend(),
    ]
    for number, name in enumerate(devices):
        y = TOP + ROW * number
        found.append(
            f'<rect x="{LEFT}" y="{y}" width="{wide}" height="{BAR}" fill="#f1f1ee"/>'
            f'<text x="{LEFT - 8}" y="{y + 14}" font-size="12" text-anchor="end">{name}</text>'
        )
    for bar in (Bar(*each) for each in row["bars"]):
        found += _bar(bar, wide)
    base = TOP + ROW * len(devices)
    for part in range(5):
        x = LEFT + wide * part / 4
        anchor = "end" if part == 4 else "middle" if part else "start"
        found.append(
            f'<text x="{x:.0f}" y="{base + 14}" font-size="11" text-anchor="{anchor}">'
            f"{step * 1e3 * part / 4:.0f} ms</text>"
        )
    return "\n".join([*found, "</svg>"]) + "\n"


def _legend() -> Iterator[str]:
    kinds = {"forward": COLOURS["forward"][0], "backward": COLOURS["backward"][0]}
    kinds["sums of gradients, updates"] = REST
    x = LEFT
    for text, colour in kinds.items():
        yield f'<rect x="{x}" y="28" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 17}" y="38" font-size="12">{text}</text>'
        x += 40 + 7 * len(text)
    yield f'<text x="{x}" y="38" font-size="12">numbers: the microbatch</text>'


def _bar(bar: Bar, wide: float) -> Iterator[str]:
    x = LEFT + bar.begin * wide
    long = max((bar.end - bar.begin) * wide, 0.3)
    y = TOP + ROW * bar.row
    colour = REST if bar.kind == "rest" else COLOURS[bar.kind][bar.copy % 2]
    yield f'<rect x="{x:.2f}" y="{y}" width="{long:.2f}" height="{BAR}" fill="{colour}"/>'
    if long > 14 and bar.copy >= 0:
        middle = x + long / 2
        text = (
            f'<text x="{middle:.1f}" y="{y + 14}" font-size="11" text-anchor="middle" fill="white">'
        )
        yield f"{text}{bar.copy + 1}</text>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("part", choices=("run", "page"))
    if parser.parse_args().part == "run":
        run()
    else:
        page()


if __name__ == "__main__":
    main()
