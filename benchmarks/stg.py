"""Standard Task Graphs: `auto` against the best schedules known on equal processors.

    python benchmarks/stg.py run FOLDER [--trials 20000] [--every N]
    python benchmarks/stg.py page

FOLDER holds `50/rand0000.stg`, `100/...` and `best_known.csv` with the columns tasks, processors,
graph, lower and upper. `run` writes one row for each graph and number of processors; where it is
stopped it goes on. `page` renders the rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

import roost
from roost.core.cluster import Cluster, Device, Link
from rows import RESULTS, ROOT, Row, mark, measured_with, read

ROWS = RESULTS / "stg_x86_64_2core_202611.jsonl"


def graph_of(file: Path) -> tuple[roost.Graph, np.ndarray]:
    """The graph of an .stg file, and the time of each task."""
    lines = [line.split() for line in file.read_text().splitlines()]
    count = int(lines[0][0]) + 2  # a dummy task before the first and one after the last
    builder = roost.GraphBuilder(file.stem)
    times = np.zeros(count)
    for task in range(count):
        number, seconds, _, *before = map(int, lines[1 + task])
        assert number == task, f"{file}: task {number} is on the line of {task}"
        times[task] = seconds
        builder.add(str(task), "task", [str(each) for each in before])
    return builder.freeze(), times


def problem_of(folder: Path, tasks: int, graph: int, processors: int) -> roost.Problem:
    """A graph on so many equal processors, whose results are free everywhere."""
    made, times = graph_of(folder / str(tasks) / f"rand{graph:04d}.stg")
    devices = tuple(Device(f"cpu:{number}", "cpu", 2**40) for number in range(processors))
    cluster = Cluster(f"{processors} equal processors", devices, (Link("*", "*", 1e12),))
    return roost.Problem(made, cluster, np.repeat(times[:, None], processors, axis=1))


def run(folder: Path, trials: int, every: int, seed: int) -> None:
    with (folder / "best_known.csv").open() as file:
        known = list(csv.DictReader(file))[::every]
    provenance = measured_with()
    done = {
        (row["tasks"], row["processors"], row["graph"], row["trials"], row["commit"])
        for row in read(ROWS)
    }
    with ROWS.open("a") as out:
        for number, line in enumerate(known):
            tasks, processors, graph = (int(line[key]) for key in ("tasks", "processors", "graph"))
            if (tasks, processors, graph, trials, provenance["commit"]) in done:
                continue
            problem = problem_of(folder, tasks, graph, processors)
            began = time.process_time()
            result = roost.solve(problem, "auto", seconds=None, trials=trials, seed=seed)
            row: Row = {
                "tasks": tasks,
                "processors": processors,
                "graph": graph,
                "lower": int(line["lower"]),
                "upper": int(line["upper"]),
                "trials": trials,
                "seed": seed,
                "step_time": result.best.step_time,
                "bound": result.bound.step_time if result.bound else 0.0,
                "proof": result.bound.proof if result.bound else "",
                "cpu_seconds": round(time.process_time() - began, 3),
                **provenance,
            }
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(
                f"{number + 1}/{len(known)} {tasks} tasks, {processors} processors, graph {graph}"
            )


def page(file: Path = ROWS) -> str:
    """The page of these rows: one table, a line for each set and budget."""
    sets: defaultdict[tuple[int, int, int], list[Row]] = defaultdict(list)
    for row in read(file):
        sets[row["trials"], row["tasks"], row["processors"]].append(row)
        sets[row["trials"], 0, 0].append(row)
    lines = [
        "# Standard Task Graphs",
        "",
        "`auto` against the best schedules known on equal processors: Kasahara's random graphs, "
        "those with even numbers. A result is free everywhere. *Proved*: the bound is "
        "within a millionth of the step.",
        "",
        "| trials | tasks | processors | graphs | as good as known | better | proved | "
        "mean above known | worst | CPU seconds, mean |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (trials, tasks, processors), rows in sorted(sets.items()):
        above = np.array([row["step_time"] / row["upper"] - 1 for row in rows])
        proved = sum(row["bound"] >= row["step_time"] * (1 - 1e-6) for row in rows)
        figures = [
            str(trials),
            str(tasks or "all"),
            str(processors or "all"),
            str(len(rows)),
            mark(str(int((above < 1e-9).sum())), rows),
            mark(str(int((above < -1e-9).sum())), rows),
            mark(str(proved), rows),
            mark(f"{100 * above.mean():.3f} %", rows),
            mark(f"{100 * above.max():.2f} %", rows),
            mark(f"{np.mean([row['cpu_seconds'] for row in rows]):.2f}", rows),
        ]
        lines.append("| " + " | ".join(figures) + " |")
    commands = sorted({row["command"] for row in read(file)})
    lines += ["", "Commands:", "", *(f"- `{command}`" for command in commands), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["run", "page"])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--trials", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=1, help="every so many lines of the set")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.what == "run":
        if given.folder is None:
            parser.error("run needs the folder of the set")
        run(given.folder, given.trials, given.every, given.seed)
    else:
        target = ROWS.with_suffix(".md")
        target.write_text(page())
        print(target.relative_to(ROOT))


if __name__ == "__main__":
    main()
