"""`trials.jsonl`: every finished trial of a search, so that a search that was killed can go on.

`solve` opens a journal if it is given a path. To go on, it runs the placer again with the same
seed. The placer asks for the same placements, and the journal answers for those that it has.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import numba
import numpy as np

from roost import __version__, catalog
from roost.core import rows
from roost.core.arrays import Array, FileArrays, digest
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.states import read_state, write_state
from roost.core.trial import Trial
from roost.errors import InputError
from roost.placers import Round
from roost.search.journal_lines import (
    HeadLine,
    RoundLine,
    TrialLine,
    array_rows,
    rows_digest,
    state_of,
    trial_line,
)
from roost.search.past import Past, PastEvaluation, SavedState

log = logging.getLogger(__name__)

_CODE = ("core", "transforms", "simulator", "bounds", "policies", "learners", "placers", "search")
# Fields of the head that must be equal. Other software may choose other placements.
_SEARCH_FIELDS = ("version", "problem", "placer", "settings", "seed")
_SOFTWARE = {"roost": "Roost", "code": "Roost", "numpy": "NumPy", "numba": "Numba"}
_NEW_FILE = "begin a new file, in another folder, or remove this one"

_Line = TypeVar("_Line", TrialLine, RoundLine)
_Key = TypeVar("_Key")


class Journal(Past):
    """An open journal. It gives the trials of the file once each, and appends new ones."""

    def __init__(self, path: Path, problem: Problem, file: BinaryIO, head: HeadLine) -> None:
        self.path = path
        self.problem = problem
        self._file = file
        self._head = head
        self._trials: list[TrialLine] = []  # all that the file had, in order
        # The lines that no placer has asked for yet: by digest, and by placer and kind of round.
        self._trials_left: dict[str, deque[TrialLine]] = {}
        self._rounds_left: dict[tuple[str, str], deque[RoundLine]] = {}

    @property
    def is_replaying(self) -> bool:
        return bool(self._trials_left or self._rounds_left)

    def take_trial(self, placement: Placement) -> PastEvaluation | None:
        if not self._trials_left:
            return None
        line = _take(self._trials_left, placement.digest)
        if line is None:
            return None
        return _past_trial(line, [rows.trial_of(line, placement)])

    def take_round(self, placer: str, what: str) -> PastEvaluation | None:
        line = _take(self._rounds_left, (placer, what))
        return None if line is None else self._past_round(line, line.trials, with_state=True)

    def take_rest(self) -> list[PastEvaluation]:
        """The lines that no placer asked for, by time. Trials without a placement are left out."""
        lines: list[TrialLine | RoundLine] = []
        for trials in self._trials_left.values():
            lines += trials
        for rounds in self._rounds_left.values():
            lines += rounds
        self._trials_left = {}
        self._rounds_left = {}
        rest = []
        for line in sorted(lines, key=lambda line: line.elapsed):
            if isinstance(line, RoundLine):
                known = [trial for trial in line.trials if trial.placement is not None]
                rest.append(self._past_round(line, known))
            else:
                rest.append(self._past_trial(line))
        return rest

    def _past_trial(self, line: TrialLine) -> PastEvaluation:
        return _past_trial(line, [] if line.placement is None else [self._trial(line)])

    def _past_round(
        self, line: RoundLine, trials: Sequence[TrialLine], with_state: bool = False
    ) -> PastEvaluation:
        digests = tuple(trial.digest for trial in line.trials)
        try:
            state = state_of(line) if with_state else {}
        except InputError as error:
            raise InputError(f"{self.path}: {error}; begin a new file") from None
        known = [self._trial(trial) for trial in trials]
        where = f"{self.path}: state of a round of {line.placer!r}"
        arrays = FileArrays(state, where)
        return PastEvaluation(known, line.simulations, line.elapsed, digests, arrays)

    def _trial(self, line: TrialLine) -> Trial:
        """The trial of a line, with the placement that is written there."""
        where = f"{self.path}: trial {line.digest}"
        if line.placement is None:
            raise InputError(f"{where} has no placement; begin a new file")
        try:
            placement = self.problem.check(rows.placement_from(line.placement))
        except InputError as error:
            raise InputError(f"{where}: {error}; begin a new file") from None
        return rows.trial_of(line, placement)

    def add_trials(self, trials: Sequence[Trial], elapsed: float, best: Trial | None) -> None:
        """Append trials, with their placements if they are better than the best before them."""
        lines: list[TrialLine] = []
        for trial in trials:
            better = trial.better_than(best)
            best = trial if better else best
            lines.append(trial_line(trial, elapsed, with_placement=better))
        self._write(lines)

    def add_round(
        self, placer: str, what: str, done: Round, trials: Sequence[Trial], elapsed: float
    ) -> None:
        state = array_rows(done.state)
        line = RoundLine(
            placer=placer,
            simulations=done.simulations,
            elapsed=elapsed,
            state=state,
            digest=rows_digest(state),
            trials=[trial_line(trial, elapsed, with_placement=True) for trial in trials],
            what=what,
        )
        self._write([line])

    @property
    def keeps_states(self) -> bool:
        return True

    def save_state(self, placer: str, count: int, state: Mapping[str, Array]) -> None:
        named = {f"state.{name}": value for name, value in state.items()}
        write_state(self._state_path(placer), {"head": self._head_digest, "count": count} | named)

    def take_state(self, placer: str, most: float) -> SavedState | None:
        """The last saved state, and the trials up to there, which the journal then gives no more.

        A state that is damaged, or is of another search, is not used: the trials of the journal
        lead to the same place.
        """
        path = self._state_path(placer)
        try:
            state = read_state(path)
            head = str(state.pop("head"))
            count = int(state.pop("count"))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            log.warning("%s: cannot be read, and is not used: %s", path, error)
            return None
        own = [line for line in self._trials if line.placer == placer][:count]
        if head != self._head_digest or not 0 <= count <= min(len(own), most):
            return None
        for line in own:
            waiting = self._trials_left[line.digest]
            waiting.remove(line)
            if not waiting:
                del self._trials_left[line.digest]
        arrays = {name.removeprefix("state."): value for name, value in state.items()}
        return SavedState([self._past_trial(line) for line in own], FileArrays(arrays, str(path)))

    def _state_path(self, placer: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{placer}.npz")

    @property
    def _head_digest(self) -> str:
        return digest([msgspec.json.encode(self._head).decode()])

    def close(self) -> None:
        self._file.close()

    def _write(self, lines: Sequence[TrialLine | RoundLine | HeadLine]) -> None:
        """Append lines in one piece. The system has them when this returns."""
        encoder = msgspec.json.Encoder()
        data = b"".join(encoder.encode(line) + b"\n" for line in lines)
        try:
            end = self._file.seek(0, os.SEEK_END)
            try:
                left = memoryview(data)
                while left:  # a full disk takes a part, and returns the number of bytes
                    left = left[self._file.write(left) :]
            except OSError:
                self._file.truncate(end)
                raise
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"{self.path}: cannot be written: {reason}") from error

    def _read(self) -> None:
        """Read the file. An incomplete last line is dropped; any other bad line is an error."""
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        lines = data[:whole].splitlines()
        if not lines:
            if not msgspec.json.encode(self._head).startswith(data):
                _check_head(self.path, None, self._head)
            self._file.truncate(0)
            self._write([self._head])
            return
        decoder = msgspec.json.Decoder(HeadLine | TrialLine | RoundLine)
        for number, text in enumerate(lines, 1):
            try:
                line = decoder.decode(text)
                if number > 1:
                    self._add(line)
            except RecursionError:
                raise InputError(f"{self.path}: line {number}: is nested too deep") from None
            except (msgspec.DecodeError, UnicodeDecodeError, InputError) as error:
                where = f"{self.path}: line {number}"
                raise InputError(f"{where}: {error}; mend it, or begin a new file") from None
            if number == 1:
                _check_head(self.path, line, self._head)
        self._file.truncate(whole)  # only now: a file of another kind stays as it is

    def _add(self, line: HeadLine | TrialLine | RoundLine) -> None:
        """Take over a line of the file."""
        if isinstance(line, HeadLine):
            raise InputError("is a second head")
        cluster = self.problem.cluster
        for trial in line.trials if isinstance(line, RoundLine) else [line]:
            if (count := len(trial.peak_memory)) != cluster.num_devices:
                devices = f"cluster {cluster.name!r} {cluster.num_devices} devices"
                raise InputError(f"peak_memory: has {count} entries, {devices}")
        if isinstance(line, RoundLine):
            self._rounds_left.setdefault((line.placer, line.what), deque()).append(line)
        else:
            self._trials.append(line)
            self._trials_left.setdefault(line.digest, deque()).append(line)


def _take(waiting: dict[_Key, deque[_Line]], key: _Key) -> _Line | None:
    """Remove and return the first of the lines with this key."""
    if key not in waiting:
        return None
    line = waiting[key].popleft()
    if not waiting[key]:
        del waiting[key]
    return line


def _past_trial(line: TrialLine, trials: list[Trial]) -> PastEvaluation:
    return PastEvaluation(trials, 1, line.elapsed, (line.digest,))


def open_journal(
    path: str | Path, problem: Problem, placer: str, settings: str, seed: int
) -> Journal:
    """A new journal, or the one that is there, which must be of the same search."""
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
    journal = Journal(path, problem, _opened(path), head)
    try:
        journal._read()
    except BaseException:
        journal.close()
        raise
    return journal


def _opened(path: Path) -> BinaryIO:
    """The file, locked against other searches."""
    file: BinaryIO | None = None
    try:
        file = path.open("a+b", buffering=0)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no file, and reading it may never end")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except (OSError, ValueError) as error:
        if file is not None:
            file.close()
        if isinstance(error, BlockingIOError):
            wait = "wait for it, or name another file"
            raise InputError(f"{path}: another search is writing to it; {wait}") from None
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{str(path)!r}: cannot be written: {reason}") from error


def _check_head(path: Path, head: object, wanted: HeadLine) -> None:
    """Raise InputError if the first line of a file is not the head of this search."""
    if not isinstance(head, HeadLine):
        raise InputError(
            f"{path}: line 1: is no head; this is not a journal of trials: name another file"
        )
    for name in (*_SEARCH_FIELDS, *_SOFTWARE):
        was = getattr(head, name)
        now = getattr(wanted, name)
        if was == now:
            continue
        differs = f"{name}: this search has {now!r}, the file {was!r}"
        if name == "settings":
            differs = f"settings: this search has other ones, the file {_other_settings(was, now)}"
        holds = f"it holds a search of {head.graph!r} on {head.cluster!r}"
        if name in _SOFTWARE:
            writer = f"another version of {_SOFTWARE[name]} wrote this journal"
            raise InputError(f"{path}: {writer} ({differs}); {holds}: {_NEW_FILE}")
        raise InputError(f"{path}: {differs}; {holds}: {_NEW_FILE}")


@cache
def _code() -> str:
    """The digest of our sources: a version may stay the same while these change."""
    files = sorted(path for folder in _CODE for path in (catalog.ROOT / folder).rglob("*.py"))
    return digest(
        part
        for path in files
        for part in (path.relative_to(catalog.ROOT).as_posix(), path.read_bytes())
    )


def _other_settings(was: str, now: str) -> str:
    """The settings in `was` that differ from those in `now`, such as `order='rank', batch=8`."""
    theirs, ours = (re.findall(r"\w+=[^=]*(?=, \w+=|\)+$)", text) for text in (was, now))
    return ", ".join(part.rstrip(")") for part in theirs if part not in ours) or was[:100]
