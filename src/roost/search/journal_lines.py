"""The lines of `trials.jsonl`: their fields, and trials and states to and from them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from roost.core import rows
from roost.core.arrays import Array, digest
from roost.core.rows import Count, Figure, File, PlacementFile
from roost.core.trial import Trial
from roost.errors import InputError

_STATE_TYPES = ("bool", "int8", "int32", "int64", "uint64", "float64")


class HeadLine(File, tag_field="row", tag="head"):
    """The first line: the search and the code that the journal belongs to."""

    version: int
    problem: str  # digest
    graph: str
    cluster: str
    placer: str
    settings: str
    seed: int
    roost: str
    code: str  # digest of the files that decide on placements and on their costs
    numpy: str
    numba: str


class TrialLine(File, tag_field="row", tag="trial", omit_defaults=True):
    """One finished trial. Its placement is written if it was the best so far."""

    digest: str
    step_time: Figure | None  # null: the run did not come to an end
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
    """One round of a compiled loop, with its trials and the state of the loop."""

    placer: str
    simulations: Count
    elapsed: Figure
    state: dict[str, ArrayRow]
    digest: str  # of the state: compiled loops do not check a damaged one
    trials: list[TrialLine]
    what: str = ""  # kind of round


def trial_line(trial: Trial, elapsed: float, with_placement: bool) -> TrialLine:
    placement = rows.placement_file(trial.placement) if with_placement else None
    return TrialLine(elapsed=elapsed, placement=placement, **rows.trial_fields(trial))


def array_rows(state: Mapping[str, Array]) -> dict[str, ArrayRow]:
    state_rows = {}
    for name, value in state.items():
        array = np.ascontiguousarray(value)
        assert array.dtype.name in _STATE_TYPES, f"state {name!r} is {array.dtype.name}"
        data = base64.b64encode(array.tobytes()).decode()
        state_rows[name] = ArrayRow(dtype=array.dtype.name, shape=list(np.shape(value)), data=data)
    return state_rows


def rows_digest(state: Mapping[str, ArrayRow]) -> str:
    return digest(
        part for name, row in state.items() for part in (name, row.dtype, row.shape, row.data)
    )


def state_of(line: RoundLine) -> dict[str, Any]:
    """The arrays of a round. Raises InputError if they are damaged."""
    if rows_digest(line.state) != line.digest:
        raise InputError(f"state: a round of {line.placer!r} is not as it was written")
    state = {}
    for name, row in line.state.items():
        if row.dtype not in _STATE_TYPES:
            raise InputError(
                f"state.{name}.dtype: {row.dtype!r} is none of {', '.join(_STATE_TYPES)}"
            )
        try:
            flat = np.frombuffer(base64.b64decode(row.data, validate=True), dtype=row.dtype)
            state[name] = flat.reshape(row.shape).copy()
        except ValueError as error:
            raise InputError(f"state.{name}: {error}") from None
    return state
