"""`trials.jsonl`: every finished trial of a search, one line each, so that a search that was killed
can go on.

The first line says what is searched and how. A trial is a line with what was found; its placement
is written where it was the best so far, and its digest always. A round of a compiled loop is a line
with the loop's state. Going on means running the placer again with the same seed: it asks for the
same placements, and what the journal has is not evaluated again.
"""

from __future__ import annotations

import base64
import fcntl
import io
import logging
import os
import re
import stat
import zipfile
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf, isinf
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import numba
import numpy as np

from roost import __version__, catalog
from roost.core import rows
from roost.core.arrays import Array, digest, state_digest
from roost.core.files import is_special, write_bytes
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.rows import Count, Figure, File, PlacementFile
from roost.core.trial import Trial
from roost.errors import InputError
from roost.placers import Round

log = logging.getLogger(__name__)

_CODE = ("core", "transforms", "simulator", "bounds", "policies", "learners", "placers", "search")
# What reading a file of arrays may raise that is damaged, or is something else.
_UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    EOFError,
    MemoryError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
_STATE_TYPES = ("bool", "int8", "int32", "int64", "uint64", "float64")


class HeadLine(File, tag_field="row", tag="head"):
    """What is searched, and how."""

    version: int
    problem: str  # digest
    graph: str
    cluster: str
    placer: str
    settings: str
    seed: int
    roost: str
    code: str  # digest of what decides which placements are asked for, and what they cost
    numpy: str
    numba: str


class TrialLine(File, tag_field="row", tag="trial", omit_defaults=True):
    """One finished trial."""

    digest: str
    step_time: Figure | None  # null: it did not come to an end
    peak_memory: list[Count]
    feasible: bool
    elapsed: Figure  # seconds since the search began
    seconds: Figure = 0.0
    source: str = "simulated"
    placer: str = ""
    missing_bytes: Count = 0
    why: str = ""
    placement: PlacementFile | None = None


class ArrayRow(File):
    """An array, in base 64."""

    dtype: str
    shape: list[Count]
    data: str


class RoundLine(File, tag_field="row", tag="round"):
    """One round of a compiled loop, with the trials it reports."""

    placer: str
    simulations: Count
    elapsed: Figure
    state: dict[str, ArrayRow]
    digest: str  # of the state: a loop that goes on from a damaged one would go anywhere
    trials: list[TrialLine]
    what: str = ""  # of the rounds of this placer


@dataclass(frozen=True, eq=False)
class Past:
    """A trial, or a round of a compiled loop, that the journal has."""

    trials: list[Trial]
    simulations: int
    elapsed: float
    digests: tuple[str, ...]  # of the placements, also where these are not known any more
    state: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Kept:
    """Where a placer was, and the trials up to there."""

    trials: list[Past]
    state: Mapping[str, Array]


@dataclass
class Journal:
    """An open journal: what it had when it was opened, and room for more."""

    path: Path
    problem: Problem
    # By digest, those not asked for yet.
    trials: dict[str, deque[TrialLine]] = field(default_factory=dict)
    # By placer and what, likewise.
    rounds: dict[tuple[str, str], deque[RoundLine]] = field(default_factory=dict)
    _file: BinaryIO | None = None
    _head: str = ""  # digest
    _lines: list[TrialLine] = field(default_factory=list)  # those it had, in their order

    @property
    def is_replaying(self) -> bool:
        """Whether it has anything that was not asked for yet."""
        return bool(self.trials or self.rounds)

    def take_trial(self, placement: Placement) -> Past | None:
        """What a placement was found to cost before, once for each time it was evaluated."""
        line = _take(self.trials, placement.digest)
        return (
            None
            if line is None
            else Past([_trial_from(line, placement)], 1, line.elapsed, (line.digest,))
        )

    def take_round(self, placer: str, what: str = "") -> Past | None:
        """The next round of a placer that is of this kind."""
        line = _take(self.rounds, (placer, what))
        if line is None:
            return None
        state = _state_from(self.path, line)
        digests = tuple(trial.digest for trial in line.trials)
        return Past(
            [self._recall(trial) for trial in line.trials],
            line.simulations,
            line.elapsed,
            digests,
            state,
        )

    def take_rest(self) -> list[Past]:
        """All that was not asked for, in the order in which it was found; of trials those with
        their placements."""
        parts: list[deque[Any]] = [*self.trials.values(), *self.rounds.values()]
        self.trials, self.rounds = {}, {}
        rest: list[Past] = []
        for line in sorted(
            (line for lines in parts for line in lines), key=lambda line: line.elapsed
        ):
            trials = line.trials if isinstance(line, RoundLine) else [line]
            count = line.simulations if isinstance(line, RoundLine) else 1
            found = [self._recall(trial) for trial in trials if trial.placement is not None]
            rest.append(Past(found, count, line.elapsed, tuple(trial.digest for trial in trials)))
        return rest

    def _recall(self, line: TrialLine) -> Trial:
        """A trial with the placement that is written there."""
        if line.placement is None:
            raise InputError(f"{self.path}: trial {line.digest} has no placement; begin a new file")
        try:
            placement = self.problem.check(rows.placement_from(line.placement))
        except InputError as error:
            raise InputError(
                f"{self.path}: trial {line.digest}: {error}; begin a new file"
            ) from None
        return _trial_from(line, placement)

    def add_trials(self, trials: Sequence[Trial], elapsed: float, best: Trial | None) -> None:
        """Write trials, with their placements where they are better than the best before them."""
        lines: list[TrialLine] = []
        for trial in trials:
            better = trial.better_than(best)
            best = trial if better else best
            lines.append(_trial_line(trial, elapsed, with_placement=better))
        self.write(lines)

    def add_round(
        self, placer: str, what: str, done: Round, trials: Sequence[Trial], elapsed: float
    ) -> None:
        """Write a round with its trials, placements and all."""
        state = _state_rows(done.state)
        lines = [_trial_line(trial, elapsed, with_placement=True) for trial in trials]
        line = RoundLine(
            placer=placer,
            simulations=done.simulations,
            elapsed=elapsed,
            state=state,
            digest=_state_digest(state),
            trials=lines,
            what=what,
        )
        self.write([line])

    def keep(self, placer: str, count: int, state: Mapping[str, Array]) -> None:
        """Write the state that a placer is in after so many trials, beside the journal."""
        arrays = {f"state.{name}": np.asarray(value) for name, value in state.items()}
        whole = {"head": np.array(self._head), "count": np.array(count), **arrays}
        buffer = io.BytesIO()
        np.savez(buffer, digest=np.array(state_digest(whole)), **whole)  # type: ignore[arg-type]
        write_bytes(self._beside(placer), buffer.getvalue())

    def kept(self, placer: str, most: float) -> Kept | None:
        """What `keep` wrote last, and those trials, which it then has no more.

        A state that cannot be read, or belongs to something else, is left alone: going through the
        trials of the journal leads to the same.
        """
        try:
            if is_special(self._beside(placer)):
                # A pipe that nobody writes to would be waited for.
                raise ValueError("it is no plain file")
            with (
                self._beside(placer).open("rb") as opened,
                np.load(opened, allow_pickle=False) as file,
            ):
                found = {name: file[name] for name in file.files}
            if str(found.pop("digest")) != state_digest(found):
                raise ValueError("it is not as it was written")
            head, count = str(found.pop("head")), int(found.pop("count"))
        except FileNotFoundError:
            return None
        except _UNREADABLE as error:
            log.warning("%s: cannot be read, and is not used: %s", self._beside(placer), error)
            return None
        own = [line for line in self._lines if line.placer == placer][:count]
        if head != self._head or not 0 <= count <= min(len(own), most):
            return None
        for line in own:
            self.trials[line.digest].remove(line)
            if not self.trials[line.digest]:
                del self.trials[line.digest]
        past = [
            Past(
                [] if line.placement is None else [self._recall(line)],
                1,
                line.elapsed,
                (line.digest,),
            )
            for line in own
        ]
        return Kept(past, {name.removeprefix("state."): value for name, value in found.items()})

    def _beside(self, placer: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{placer}.npz")

    def write(self, lines: Sequence[TrialLine | RoundLine | HeadLine]) -> None:
        """Add lines, in one piece: they are with the system when this returns."""
        assert self._file is not None
        encoder = msgspec.json.Encoder()
        data = b"".join(encoder.encode(line) + b"\n" for line in lines)
        try:
            end = self._file.seek(0, os.SEEK_END)
            try:
                _write_all(self._file, data)
            except OSError:
                self._file.truncate(end)
                raise
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot be written: {error.strerror or error}"
            ) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


_Line = TypeVar("_Line")
_Key = TypeVar("_Key")


def _take(lines: dict[_Key, deque[_Line]], key: _Key) -> _Line | None:
    """The first of the lines with this key, which it then has no more."""
    if key not in lines:
        return None
    line = lines[key].popleft()
    if not lines[key]:
        del lines[key]
    return line


def _write_all(file: BinaryIO, data: bytes) -> None:
    """A system that has room for a part writes that, and says so only by the number of bytes."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def open_journal(
    path: str | Path, problem: Problem, placer: str, settings: str, seed: int
) -> Journal:
    """A new journal, or one that goes on; it must be of the same search."""
    path = Path(path)
    head = HeadLine(
        version=1,
        problem=problem.digest,
        graph=problem.graph.name,
        cluster=problem.cluster.name,
        placer=placer,
        settings=settings,
        seed=seed,
        roost=__version__,
        code=_code(),
        numpy=np.__version__,
        numba=numba.__version__,
    )
    journal = Journal(path, problem, _head=digest([msgspec.json.encode(head).decode()]))
    try:
        journal._file = file = path.open("a+b", buffering=0)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no file, and what it gives may have no end")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        journal.close()
        raise InputError(
            f"{path}: another search is writing to it; wait for it, or name another file"
        ) from None
    except (OSError, ValueError) as error:
        journal.close()
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{str(path)!r}: cannot be written: {reason}") from error
    try:
        _read(journal, head)
    except BaseException:
        journal.close()
        raise
    return journal


def _read(journal: Journal, head: HeadLine) -> None:
    """Take over what is there. A last line that was cut off is dropped; any other bad line is an
    error."""
    file = journal._file
    assert file is not None
    file.seek(0)
    data = file.read()
    whole = data.rfind(b"\n") + 1
    lines = data[:whole].splitlines()
    if not lines:
        if not msgspec.json.encode(head).startswith(data):
            _check_head(journal.path, None, head)
        file.truncate(0)
        journal.write([head])
        return
    decoder = msgspec.json.Decoder(HeadLine | TrialLine | RoundLine)
    for number, text in enumerate(lines, 1):
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(
                f"{journal.path}: line {number}: {error}; mend it, or begin a new file"
            ) from None
        if number == 1:
            _check_head(journal.path, line, head)
        elif isinstance(line, TrialLine):
            _check_trial(journal, line, number)
            journal.trials.setdefault(line.digest, deque()).append(line)
            journal._lines.append(line)
        elif isinstance(line, RoundLine):
            for trial in line.trials:
                _check_trial(journal, trial, number)
            journal.rounds.setdefault((line.placer, line.what), deque()).append(line)
        else:
            raise InputError(
                f"{journal.path}: line {number}: is a second head; mend it, or begin a new file"
            )
    file.truncate(whole)  # only now: the file of something else is left as it is


def _check_trial(journal: Journal, line: TrialLine, number: int) -> None:
    cluster = journal.problem.cluster
    if len(line.peak_memory) != cluster.num_devices:
        raise InputError(
            f"{journal.path}: line {number}: peak_memory: has {len(line.peak_memory)} entries, "
            f"cluster "
            f"{cluster.name!r} {cluster.num_devices} devices; mend it, or begin a new file"
        )


def _check_head(path: Path, found: object, wanted: HeadLine) -> None:
    if not isinstance(found, HeadLine):
        raise InputError(
            f"{path}: line 1: is no head; this is not a journal of trials: name another file"
        )
    for name in (
        "version",
        "problem",
        "placer",
        "settings",
        "seed",
        "roost",
        "code",
        "numpy",
        "numba",
    ):
        was, now = getattr(found, name), getattr(wanted, name)
        if was != now:
            told = f"this search has {now!r}, the file {was!r}"
            if name == "settings":
                told = f"this search has other ones, the file {_other(was, now)}"
            of = f"it holds a search of {found.graph!r} on {found.cluster!r}"
            raise InputError(
                f"{path}: {name}: {told}; {of}: begin a new file, in another folder, or remove it"
            )


@cache
def _code() -> str:
    """Digest of our own sources: a version may stay the same while these change."""
    files = sorted(path for folder in _CODE for path in (catalog.ROOT / folder).rglob("*.py"))
    return digest(
        part
        for path in files
        for part in (path.relative_to(catalog.ROOT).as_posix(), path.read_bytes())
    )


def _trial_line(trial: Trial, elapsed: float, with_placement: bool) -> TrialLine:
    return TrialLine(
        digest=trial.placement.digest,
        step_time=None if isinf(trial.step_time) else trial.step_time,
        peak_memory=trial.peak_memory.tolist(),
        feasible=trial.feasible,
        elapsed=elapsed,
        seconds=trial.seconds,
        source=trial.source,
        placer=trial.placer,
        missing_bytes=trial.missing_bytes,
        why=trial.why,
        placement=rows.placement_file(trial.placement) if with_placement else None,
    )


def _trial_from(line: TrialLine, placement: Placement) -> Trial:
    return Trial(
        placement=placement,
        step_time=inf if line.step_time is None else line.step_time,
        peak_memory=np.array(line.peak_memory, dtype=np.int64),
        feasible=line.feasible,
        seconds=line.seconds,
        source=line.source,
        placer=line.placer,
        missing_bytes=line.missing_bytes,
        why=line.why,
    )


def _state_rows(state: Mapping[str, Array]) -> dict[str, ArrayRow]:
    found = {}
    for name, value in state.items():
        array = np.ascontiguousarray(value)
        assert array.dtype.name in _STATE_TYPES, f"state {name!r} is {array.dtype.name}"
        data = base64.b64encode(array.tobytes()).decode()
        found[name] = ArrayRow(dtype=array.dtype.name, shape=list(np.shape(value)), data=data)
    return found


def _state_digest(state: Mapping[str, ArrayRow]) -> str:
    return digest(
        part for name, row in state.items() for part in (name, row.dtype, row.shape, row.data)
    )


def _state_from(path: Path, line: RoundLine) -> dict[str, Any]:
    found = {}
    if _state_digest(line.state) != line.digest:
        raise InputError(
            f"{path}: state: a round of {line.placer!r} is not as it was written; begin a new file"
        )
    for name, row in line.state.items():
        if row.dtype not in _STATE_TYPES:
            raise InputError(
                f"{path}: state.{name}.dtype: {row.dtype!r} is none of {', '.join(_STATE_TYPES)}"
            )
        try:
            flat = np.frombuffer(base64.b64decode(row.data, validate=True), dtype=row.dtype)
            found[name] = flat.reshape(row.shape).copy()
        except ValueError as error:
            raise InputError(f"{path}: state.{name}: {error}; begin a new file") from None
    return found


def _other(was: str, now: str) -> str:
    """The settings that differ between two texts of a placer: `order='rank', batch=8`, as the first
    has them."""
    theirs, ours = (re.findall(r"\w+=[^=]*(?=, \w+=|\)+$)", text) for text in (was, now))
    return ", ".join(part.rstrip(")") for part in theirs if part not in ours) or was[:100]
