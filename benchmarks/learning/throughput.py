"""How many trials each learner makes in a second, at 100, 300 and 1,000 groups, and what part of
that is simulating.

    python benchmarks/learning/throughput.py run MACHINE [cpu] [cuda]    rows: on one core, and with
    the policy on a GPU
    python benchmarks/learning/throughput.py page                        the page made from the last
    row of each cell

In the environment: ONLY="placeto;post" and WITHOUT="seq2seq, paper" name the placers to measure or
to leave out, separated by ;, ONLY_GROUPS=1000 the numbers of groups, separated likewise, and ROWS
another file of rows. A run needs PyTorch, NumPy and Numba, and none of the packages that only read
and write files.

A synthetic training graph of 3,000 ops on four devices, placements in rank order and in orders made
for their devices. Learning only: nothing is refined. `lister` decides about finer units than
groups; its row is for all of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import rows as results
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial
from roost.placers._learning.sequence_policy import SequenceNetwork
from roost.placers._placeto.settings import SETTINGS
from roost.placers._shared.groups import groups_of
from roost.placers.lister import Lister
from roost.placers.placeto import Placeto
from roost.placers.post import Post
from roost.placers.seq2seq import Seq2seq
from roost.placers.spotlight import Spotlight
from roost.search.simulating import Simulating
from roost.search.solve import search
from roost.testing.problems import training_like
from rows import commit, machine

NUM_OPS, NUM_DEVICES, GROUPS = 3_000, 4, (100, 300, 1_000)
TRIALS = {100: 960, 300: 480, 1_000: 256}
PAPER_TRIALS = {100: 96, 300: 48, 1_000: 24}


ONLY, WITHOUT, ONLY_GROUPS = (
    [name.strip() for name in os.environ.get(given, "").split(";") if name.strip()]
    for given in ("ONLY", "WITHOUT", "ONLY_GROUPS")
)
ROWS = Path(
    os.environ.get(
        "ROWS", Path(__file__).parents[1] / "results" / "learning_throughput_202611.jsonl"
    )
)


class Timed(Simulating):
    """Counts the seconds of simulating."""

    spent = 0.0

    def trials(self, placements: Sequence[Placement]) -> list[Trial]:
        began = time.process_time()
        found = super().trials(placements)
        self.spent += time.process_time() - began
        return found


def placers(groups: int, device: str) -> dict[str, tuple[Any, int]]:
    """Learners for so many groups, with their policy on a device, and their trials."""
    few, many = PAPER_TRIALS[groups], TRIALS[groups]
    network = SequenceNetwork(train_on=device)
    paper = replace(Seq2seq.paper(), num_groups=groups)
    found: dict[str, tuple[Any, int]] = {
        "seq2seq": (Seq2seq(num_groups=groups, order="rank", network=network, refine=0.0), many),
        "seq2seq, orders made": (
            Seq2seq(num_groups=groups, order="listed", network=network, refine=0.0),
            many,
        ),
        "seq2seq, paper": (replace(paper, network=replace(paper.network, train_on=device)), few),
        "spotlight": (
            Spotlight(num_groups=groups, order="rank", network=network, refine=0.0),
            many,
        ),
        "spotlight, orders made": (
            Spotlight(num_groups=groups, order="listed", network=network, refine=0.0),
            many,
        ),
    }
    tuned = replace(SETTINGS["tuned"], most_groups=groups, refine=None, train_on=device)
    found["placeto"] = (Placeto(setting=tuned), many // 2)
    if device == "cpu":
        found["post"] = (Post(num_groups=groups, order="rank", refine=0.0), many)
        found["post, orders made"] = (Post(num_groups=groups, order="listed", refine=0.0), many)
        if groups == max(GROUPS):
            found["lister"] = (Lister(), many)
    return found


def measured(problem: Problem, placer: Any, trials: int) -> dict[str, float]:
    """Seconds of the second run: the first one compiles and captures."""
    search(problem, placer, trials=min(trials, 64), prove=False)
    source = Timed(problem, workers=1)
    cpu, wall = time.process_time(), time.perf_counter()
    result = search(problem, placer, trials=trials, prove=False, source=source)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {"trials": result.num_trials, "cpu": cpu, "wall": wall, "simulating": source.spent}


def run(named: str, devices: list[str]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0] if devices == ["cuda"] else cores[-1]})
    problem = training_like(NUM_OPS, NUM_DEVICES)
    for device in devices:
        for groups in (
            number for number in GROUPS if not ONLY_GROUPS or str(number) in ONLY_GROUPS
        ):
            for name, (placer, trials) in placers(groups, device).items():
                if name in WITHOUT or (ONLY and name not in ONLY):
                    continue
                row = {
                    "machine": named,
                    "placer": name,
                    "groups": groups_of(problem, groups).num_units,
                }
                row |= {"policy": device, **measured(problem, placer, trials)}
                row |= {"commit": commit(), "processor": machine()}
                print(json.dumps(row), flush=True)
                with ROWS.open("a") as file:
                    file.write(json.dumps(row) + "\n")


MOST_SIMULATING = 0.1  # goal: the share of the time of learning that simulating may take


def _goal(rows: list[dict[str, Any]]) -> list[str]:
    """Which learners meet the goal, at each number of groups: the last row of each counts."""
    lines = [
        f"Goal: simulating takes at most {MOST_SIMULATING:.0%} of the time.\n",
        "| machine | placer | policy on | groups | share | |",
        "|---|---|---|---|---|---|",
    ]
    last = {(r["machine"], r["placer"], r["policy"], r["groups"]): r for r in rows}
    for key, row in last.items():
        share = row["simulating"] / row["cpu"]
        said = results.verdict(share, MOST_SIMULATING, [row])
        lines.append(f"| {' | '.join(map(str, key))} | {share:.1%} | {said} |")
    return [*lines, ""]


def page(path: Path) -> str:
    """Rates and shares of each learner, by machine."""
    rows = results.read(path)
    lines = [
        "# Throughput of the learners\n",
        results.provenance(rows),
        "Trials in a second of one core and, in brackets, the share of it in the simulator; a graph of "
        f"{NUM_OPS:,} ops made up to look like training, on {NUM_DEVICES} devices, "
        "`python benchmarks/learning/throughput.py run MACHINE cpu cuda`. With the policy on a GPU a core waits, "
        "so that its seconds are those of the clock. `orders made`: each placement is tried in an order made for its "
        "devices, as the defaults do where that is better; making the order counts as learning, laying it out as "
        "simulating.\n",
        *_goal(rows),
    ]
    for named in dict.fromkeys(row["machine"] for row in rows):
        here = [row for row in rows if row["machine"] == named]
        processors = ", ".join(
            dict.fromkeys(row["processor"] for row in here if row.get("processor"))
        )
        lines += [
            f"## {named}\n",
            *([f"{processors}, shared with other work.\n"] if processors else []),
        ]
        lines.append(
            "| placer | policy on | " + " | ".join(f"{g:,} groups" for g in GROUPS) + " | commit |"
        )
        lines.append("|---|---|" + "---|" * len(GROUPS) + "---|")
        for name, policy in dict.fromkeys((row["placer"], row["policy"]) for row in here):
            cells, commits = [], []
            for groups in GROUPS:
                found = [
                    r
                    for r in here
                    if (r["placer"], r["policy"], r["groups"]) == (name, policy, groups)
                ]
                cells.append(_cell(found[-1]) if found else "")
                commits += [found[-1].get("commit", "")] if found else []
            lines.append(
                f"| {name} | {policy} | {' | '.join(cells)} | {', '.join(dict.fromkeys(commits))} |"
            )
        lines.append("")
    return "\n".join(lines)


def _cell(row: dict[str, float]) -> str:
    rate = row["trials"] / row["cpu"]
    return f"{rate:,.{0 if rate >= 10 else 1}f} ({row['simulating'] / row['cpu']:.0%})"


def main() -> None:
    if sys.argv[1:2] == ["page"]:
        ROWS.with_suffix(".md").write_text(page(ROWS))
    elif sys.argv[1:2] == ["run"] and len(sys.argv) > 2:
        run(sys.argv[2], sys.argv[3:] or ["cpu"])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
