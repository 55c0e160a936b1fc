"""The parts of `roost place` for several copies of a step: microbatches, and requests under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roost.cli import _console, _problem, _search
from roost.cli._model import ModelSpec
from roost.errors import InputError

if TYPE_CHECKING:
    from roost.core.graph import Graph
    from roost.core.problem import Problem
    from roost.errors import Infeasible
    from roost.placers import Placer
    from roost.search.microbatches import MicrobatchResult

Count = Annotated[
    str | None,
    typer.Option(
        "--microbatches",
        metavar="M",
        help="Cut the batch into M microbatches, each of which may run anywhere: auto (the best of "
        "1, 2, 4, 8, 16), a number, or a list such as 1,2,4. With -o no trials are kept: such a "
        "search cannot be continued.",
    ),
]
Requests = Annotated[
    int | None,
    typer.Option(
        "--requests",
        metavar="M",
        help="Inference with M requests under way, each a whole batch. Shows the seconds between "
        "two ends and the latency. With -o no trials are kept.",
    ),
]
BatchStatistics = Annotated[
    bool,
    typer.Option(
        "--batch-statistics",
        help="With --microbatches: allow BatchNorm, which then takes its statistics from each "
        "microbatch. The model trains a little differently.",
    ),
]

_SECONDS = 10.0  # for all numbers of copies together


@dataclass(frozen=True)
class Asked:
    """What a command line says on copies, checked before anything is read."""

    microbatches: str | None = None
    requests: int | None = None
    batch_statistics: bool = False

    def __bool__(self) -> bool:
        return self.microbatches is not None or self.requests is not None

    @property
    def option(self) -> str:
        return "--requests" if self.requests is not None else "--microbatches"

    def check(self, measured: bool, train: bool, tensorboard: bool, journal: Path | None) -> None:
        """Raise InputError for options that do not go together."""
        if self.batch_statistics and self.microbatches is None:
            raise InputError("--batch-statistics needs --microbatches; add it, or leave it out")
        if not self:
            return
        if self.microbatches is not None and self.requests is not None:
            raise InputError(
                "--microbatches and --requests: give one. Microbatches are shares of one batch, "
                "requests are whole batches"
            )
        if self.requests is not None and self.requests < 1:
            raise InputError(f"--requests is {self.requests}; give 1 or more")
        if self.requests is not None and train:
            raise InputError("--requests is for inference; with --train use --microbatches")
        if measured:
            raise InputError(
                f"--evaluate measured runs a step that is captured whole; leave out {self.option}"
            )
        if tensorboard:
            raise InputError(f"--tensorboard: is for one problem; leave out {self.option}")
        if journal is not None and journal.exists():
            raise InputError(
                f"{journal}: holds trials of another search, and {self.option} keeps none; name "
                "another folder"
            )


@dataclass(frozen=True)
class Unrolling:
    """The numbers of copies to try, and the problem of one copy for each."""

    asked: Asked
    counts: tuple[int, ...]
    batch: int | None  # of the whole step, where it is known
    make: Callable[[int], Problem]
    made: dict[int, Problem] = field(default_factory=dict)

    def problem_of(self, count: int) -> Problem:
        """The problem of one of so many copies."""
        if count not in self.made:
            self.made[count] = self.make(count)
        return self.made[count]

    def search(
        self,
        name: str,
        placer: str | Placer,
        seconds: float | None,
        trials: int | None,
        seed: int,
    ) -> MicrobatchResult:
        """The best number of copies and placement."""
        from roost.search.microbatches import solve_microbatches

        most = max(self.counts)
        requests = self.asked.requests is not None
        # Requests keep their own statistics.
        allowed = self.asked.batch_statistics or requests
        if most > 1:
            _check_graph(self.problem_of(most).graph, allowed, requests)
        if seconds is None and trials is None:
            seconds = _SECONDS
        with _search.watching(name) as tell:
            found = solve_microbatches(
                self.problem_of,
                self.counts,
                seconds=seconds,
                trials=trials,
                seed=seed,
                placer=placer,
                on_trial=tell,
                batch_statistics=allowed,
            )
        if found.result.ended == "interrupted":
            _console.note("interrupted: this is the best so far")
        return found

    def does_not_fit(self, found: MicrobatchResult) -> Infeasible:
        """The error for a search that found nothing, with a number of microbatches that fits."""
        from roost.search.smaller_microbatches import none_fits

        allowed = self.asked.batch_statistics or self.asked.requests is not None
        seed = found.result.seed
        with _console.working("looking for smaller microbatches that fit"):
            return none_fits(
                found, self.batch, self.problem_of, batch_statistics=allowed, seed=seed
            )


def unrolling(
    asked: Asked,
    source: str,
    on: str | None,
    costs: Path | None,
    train: bool,
    optimizer: str | None,
    settings: list[str] | None,
    shapes: list[str] | None,
    trust: bool,
) -> Unrolling:
    """Read what is to be unrolled. Raises InputError where it cannot be."""
    if asked.requests is not None:
        count = asked.requests
        problem, _ = _problem.read(source, on, costs, train, optimizer, settings, shapes, trust)
        return Unrolling(asked, (count,), None, lambda _: problem)
    assert asked.microbatches is not None
    if _problem.is_our_file(source):
        return _of_file(asked, source, on, costs, train, optimizer, settings, shapes, trust)
    model = ModelSpec.of(source, train, optimizer, settings, shapes, trust)
    if model.batch is None:
        raise InputError(
            f"{source}: its batch is not known, so it cannot be cut into microbatches; add --set "
            "batch=N if the model takes such a setting, or capture it at the size of one "
            "microbatch and unroll the file: roost place graph.json --microbatches M"
        )
    counts = counts_of(asked.microbatches, model.batch)
    if costs is not None and len(counts) > 1:
        raise InputError(
            f"--costs {costs}: holds the costs of one graph, and {source} is captured at "
            f"{len(counts)} sizes; give one number of microbatches, or leave out --costs"
        )
    _problem.check_cluster(source, on, costs)  # before the minutes that capturing may take
    batch = model.batch

    def captured(count: int) -> Problem:
        size = batch // count
        with _console.working(f"capturing {source} at batch {size}"):
            graph = model.with_batch(size).capture()
        return _problem.with_cluster(graph, source, on, costs)

    return Unrolling(asked, counts, batch, captured)


def counts_of(text: str, batch: int) -> tuple[int, ...]:
    """The numbers of microbatches in `auto`, `8` or `1,2,4` for a batch."""
    if batch < 2:
        raise InputError(f"the batch is {batch}: there is nothing to cut; set a larger one")
    from roost.search.microbatches import COUNTS
    from roost.search.smaller_microbatches import divisors

    known = divisors(batch)
    if text == "auto":
        counts = [count for count in COUNTS if count in known]
        if len(counts) == 1:
            raise InputError(
                f"the batch, {batch}, has no divisor among 2, 4, 8 and 16; give one of "
                f"{_listed(known)} as --microbatches, or set another batch"
            )
        return tuple(counts)
    for count in numbers_in(text):
        if count > batch:
            raise InputError(f"--microbatches {count}: is more than the batch, {batch}")
        if count not in known:
            raise InputError(
                f"--microbatches {count}: does not divide the batch, {batch}, and all microbatches "
                f"are of one size; give one of {_listed(known)}"
            )
    return numbers_in(text)


def numbers_in(text: str) -> tuple[int, ...]:
    """The numbers in `8` or `1,2,4`, ascending."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"--microbatches {text!r}: give auto, a number, or a list such as 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def _listed(numbers: list[int]) -> str:
    shown = numbers if len(numbers) <= 12 else [*numbers[:11], numbers[-1]]
    return ", ".join(map(str, shown))


def _of_file(asked: Asked, source: str, *given: Any) -> Unrolling:
    """A graph that was captured at the size of one microbatch."""
    assert asked.microbatches is not None
    numbers = () if asked.microbatches == "auto" else numbers_in(asked.microbatches)
    if len(numbers) != 1:
        raise InputError(
            f"{source}: was captured at one batch, and --microbatches {asked.microbatches} needs a "
            "model to capture at several; name the model. Or give one number: the file is then "
            "the step of one microbatch, and the batch that many times as large"
        )
    problem, _ = _problem.read(source, *given)
    _console.note(
        f"{source} is taken as the step of one microbatch: the batch is {numbers[0]} times as large"
    )
    return Unrolling(asked, numbers, None, lambda _: problem)


def _check_graph(graph: Graph, batch_statistics: bool, requests: bool) -> None:
    """Raise InputError for a graph that cannot be unrolled."""
    import numpy as np

    from roost.core.graph import BACKWARD, UPDATE
    from roost.transforms.microbatch import SHARED, copies_of, refuse_batch_statistics

    if (copies_of(graph) != SHARED).any():
        raise InputError(f"graph {graph.name!r} is unrolled already; name the one it was made of")
    if requests and np.isin(graph.phase, (BACKWARD, UPDATE)).any():
        raise InputError(
            f"--requests is for inference, and graph {graph.name!r} is a training step; use "
            "--microbatches"
        )
    if batch_statistics:
        return
    try:
        refuse_batch_statistics(graph)
    except InputError as error:
        error.args = (str(error).replace("batch_statistics", "--batch-statistics"),)
        raise
