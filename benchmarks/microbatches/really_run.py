"""Training steps run for real on two cores: Roost's trainer beside what PyTorch offers.

    python benchmarks/microbatches/really_run.py run [MODEL ...] [--rounds 5] [--slow] [--small]
    python benchmarks/microbatches/really_run.py page

Competitors (`competitors.py`) take turns in rounds, in an order drawn anew in each round: one
device with gradient accumulation, DDP over gloo, 1F1B of `torch.distributed.pipelining`, the
ceiling of two processes that never talk, and `roost.trainer`. In its turn a competitor takes one
step that is not timed and then `--steps`, while the processes of all others sleep. Figures are
compared within a round only.

`--slow` runs a second case after the first. A process at equal priority keeps the second core
busy, so that it is half as fast. This slows every competitor alike, its waiting and copying too,
and none of their code changes; doing work twice would have to be built into each of them. One
device is then the fast core. Roost is told of it by the peak of the second device. Rows are
appended after each round. Four models with `--slow` take about a quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import allocations
import really_run_page
import stages
from competitors import Job
from teams import Slowdown, Team, TeamFailed

import rows as results

FAST, SLOW = 0, 1  # the cores
SLOWER = 2.0  # how much slower the second core is with a process of equal priority on it
SHARE = SLOWER / (1 + SLOWER)  # of the work for the fast core then
STEPS_OF_LOSSES = 20
IDLE_SECONDS = 0.5  # for a look at what else keeps the cores busy


class Column(NamedTuple):
    """What a table has a column for: a competitor, and its number of microbatches."""

    team: str
    copies: int

    @property
    def name(self) -> str:
        return f"{self.team} M={self.copies}" if self.copies else self.team


COLUMNS = [
    Column("one", 1),
    Column("one", 4),
    Column("ddp", 0),
    Column("1f1b", 4),
    Column("1f1b", 8),
    Column("ceiling", 0),
    Column("roost", 0),
]
# Cut by hand for the slow core, which neither the goal nor the library asks for.
UNEVEN = "1f1b cut 2:1"
UNEVEN_COLUMNS = [Column(UNEVEN, 4), Column(UNEVEN, 8)]


@dataclass
class Recording:
    """One run of the benchmark: what was asked for, and where rows and measurements go."""

    given: argparse.Namespace
    cache: Path
    library: Path | None  # notes the allocations of Roost's process
    began: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    # What the competitors said of themselves, by model and competitor.
    facts: dict[str, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))

    def write(self, row: dict[str, Any]) -> None:
        common = {"run": self.began, "seed": self.given.seed, "small": self.given.small}
        with rows_file(self.given).open("a") as file:
            file.write(json.dumps(common | row | results.measured_with()) + "\n")

    def jobs(self, team: str, model: str, case: str) -> list[Job]:
        """The processes of a competitor."""
        kind = team.partition(" ")[0]
        pair = kind not in ("one", "roost")
        unequal = team == UNEVEN or (team == "ceiling" and case == "slow")
        cores = [(FAST,), (SLOW,)] if pair else [(FAST, SLOW) if kind == "roost" else (FAST,)]
        return [
            Job(
                kind,
                model,
                self.given.small,
                rank,
                own,
                share=SHARE if unequal else 0.5,
                options={
                    "seconds": self.given.seconds,
                    "slower": SLOWER if case == "slow" else 1.0,
                },
            )
            for rank, own in enumerate(cores)
        ]


def rows_file(given: argparse.Namespace) -> Path:
    name = f"really_run_{platform.machine()}_{os.cpu_count()}core_202611.jsonl"
    return Path(given.rows) if given.rows else results.RESULTS / name


def run(recording: Recording) -> None:
    for model in recording.given.models or list(stages.SIZES):
        with ExitStack() as stack:
            equal = set_up(recording, stack, model, "equal", {column.team for column in COLUMNS})
            losses(recording, model, equal)
            rounds(recording, model, "equal", equal, COLUMNS, None)
            memory(recording, model, equal)
            if recording.given.slow:
                slow_case(recording, stack, model, equal)


def slow_case(recording: Recording, stack: ExitStack, model: str, equal: dict[str, Team]) -> None:
    """The same with a second core that is half as fast; what depends on that is set up anew."""
    anew = {"ceiling", "roost"}
    columns = COLUMNS
    if model in stages.CUTS_LAYERS:
        anew.add(UNEVEN)
        columns = COLUMNS + UNEVEN_COLUMNS
    for team in anew & equal.keys():
        equal.pop(team).close()
    # Roost tries placements as it is set up, so the core is slow by then. Ops it times by the
    # shortest calls, which tell nothing of other programs: its cluster tells it of the slow core.
    slowdown = Slowdown(SLOW)
    stack.callback(slowdown.close)
    teams = equal | set_up(recording, stack, model, "slow", anew)
    rounds(recording, model, "slow", teams, columns, slowdown)


def set_up(
    recording: Recording, stack: ExitStack, model: str, case: str, names: set[str]
) -> dict[str, Team]:
    """The competitors that are ready. Roost comes last and alone, since it measures the machine."""
    teams: dict[str, Team] = {}
    facts = recording.facts[model]
    took: dict[str, float] = {}
    for batch in (sorted(names - {"roost"}), ["roost"]):
        begun = {
            name: Team(
                name,
                recording.jobs(name, model, case),
                recording.cache,
                recording.library if name == "roost" else None,
            )
            for name in batch
        }
        for team in begun.values():
            stack.callback(team.close)
        start = time.perf_counter()
        for name, team in begun.items():
            try:
                facts[name] = team.ready(recording.given.patience)
                teams[name] = team
                took[name] = round(time.perf_counter() - start, 1)
            except TeamFailed as error:
                say_skipped(model, case, name, error)
                facts[name] = {"skipped": str(error).splitlines()[-1]}
                team.close()
    settings = stages.example(model, recording.given.small)
    recording.write(
        {
            "what": "setup",
            "model": model,
            "case": case,
            "settings": {name: getattr(settings, name) for name in settings.__dataclass_fields__},
            "facts": facts,
            "took": took,
        }
    )
    return teams


def say_skipped(model: str, case: str, name: str, error: Exception) -> None:
    print(f"{model}, {case}: {name} is left out: {error}", file=sys.stderr, flush=True)


def losses(recording: Recording, model: str, teams: dict[str, Team]) -> None:
    """The losses of the first steps of Roost and of one device, from the same weights."""
    if not {"one", "roost"} <= teams.keys():
        return
    found: dict[str, list[float]] = {}
    copies = recording.facts[model]["roost"].get("copies") or 1
    for name in ("one", "roost"):
        try:
            found[name] = teams[name].lap(STEPS_OF_LOSSES, copies).losses
        except TeamFailed as error:
            say_skipped(model, "equal", name, error)
            teams.pop(name).close()
            return
    recording.write({"what": "losses", "model": model, "case": "equal", "copies": copies} | found)


def memory(recording: Recording, model: str, teams: dict[str, Team]) -> None:
    """Peak memory of Roost's devices, simulated and allocated."""
    if "roost" not in teams or recording.library is None:
        return
    try:
        devices = teams["roost"].memory()
    except TeamFailed as error:
        say_skipped(model, "equal", "roost", error)
        teams.pop("roost").close()
        return
    recording.write({"what": "memory", "model": model, "case": "equal", "devices": devices})


def rounds(
    recording: Recording,
    model: str,
    case: str,
    teams: dict[str, Team],
    columns: list[Column],
    slowdown: Slowdown | None,
) -> None:
    chance = random.Random(f"{recording.given.seed} {model} {case}")
    for number in range(recording.given.rounds):
        order = [column for column in columns if column.team in teams]
        chance.shuffle(order)
        with resting(slowdown):
            busy = busy_cores(IDLE_SECONDS)
        seconds: dict[str, float] = {}
        members: dict[str, list[float]] = {}
        for column in order:
            if column.team not in teams:
                continue
            try:
                teams[column.team].lap(1, max(column.copies, 1))
                lap = teams[column.team].lap(recording.given.steps, max(column.copies, 1))
                seconds[column.name] = lap.seconds
                members[column.name] = lap.members
            except TeamFailed as error:
                say_skipped(model, case, column.team, error)
                teams.pop(column.team).close()
        recording.write(
            {
                "what": "round",
                "model": model,
                "case": case,
                "round": number,
                "steps": recording.given.steps,
                "order": [column.name for column in order],
                "seconds": seconds,
                "members": members,
                "busy": busy,
                "load": os.getloadavg()[0],
            }
        )
        said = ", ".join(f"{name} {seconds[name] * 1e3:.0f}" for name in sorted(seconds))
        print(f"{model}, {case}, round {number}: {said} ms; others {busy}", flush=True)


@contextmanager
def resting(slowdown: Slowdown | None) -> Iterator[None]:
    """Let the process that slows a core rest meanwhile."""
    if slowdown is not None:
        slowdown.rest()
    try:
        yield
    finally:
        if slowdown is not None:
            slowdown.go_on()


def busy_cores(seconds: float) -> list[float]:
    """The share of a while that each core is busy; near 0 if all competitors sleep, and others."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    shares = []
    for (old_all, old_idle), (new_all, new_idle) in zip(before, after, strict=True):
        shares.append(round(1 - (new_idle - old_idle) / max(1, new_all - old_all), 2))
    return shares


def _ticks() -> list[tuple[int, int]]:
    """For each core the clock ticks so far, and those when it was idle."""
    ticks = []
    for line in Path("/proc/stat").read_text().splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name != "cpu":
            counts = [int(number) for number in numbers]
            ticks.append((sum(counts[:8]), counts[3] + counts[4]))
    return ticks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("part", choices=("run", "page"))
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(stages.SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="that are timed in a turn")
    parser.add_argument("--slow", action="store_true", help="also with a slowed second core")
    parser.add_argument("--small", action="store_true", help="tiny models, to try it out")
    parser.add_argument("--seconds", type=float, default=10.0, help="that Roost may search")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds for a set-up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", default="", help="another file of rows")
    given = parser.parse_args()
    if given.part == "page":
        path = rows_file(given)
        path.with_suffix(".md").write_text(really_run_page.page(path))
        return 0
    if unknown := set(given.models) - stages.SIZES.keys():
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(stages.SIZES)}")
    if given.small and not given.rows:
        parser.error("--small tries the benchmark out: name a file of its own with --rows FILE")
    if {FAST, SLOW} - os.sched_getaffinity(0):
        parser.error(f"this process may not use cores {FAST} and {SLOW}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as cache:
        try:
            run(Recording(given, Path(cache), allocations.library(Path(cache))))
        except KeyboardInterrupt:
            print("stopped; the rounds so far are kept", file=sys.stderr)
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
