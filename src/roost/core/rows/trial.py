"""The fields of trials and of `result.json`, and the nouns to and from them."""

from __future__ import annotations

from math import inf, isinf
from typing import Any

import msgspec
import numpy as np

from roost.core.placement import Placement
from roost.core.rows.base import Count, Figure, File, fields_of, file_of
from roost.core.rows.placement import PlacementFile, placement_file, placement_from
from roost.core.trial import Bound, Result, Trial
from roost.errors import InputError

# Fields that a trial and its row share.
_SAME = ("feasible", "seconds", "source", "placer", "missing_bytes", "why")


class TrialRow(File, tag_field="format", tag="roost.trial"):
    """One trial, with its placement."""

    version: int
    digest: str
    step_time: Figure | None  # null: the run did not end
    peak_memory: list[Count]
    feasible: bool
    placement: PlacementFile
    seconds: Figure = 0.0
    source: str = "simulated"
    placer: str = ""
    missing_bytes: Count = 0
    why: str = ""


class BoundRow(File):
    """No step is shorter than this."""

    step_time: Figure
    proof: str


class ResultFile(File, tag_field="format", tag="roost.result"):
    """`result.json`: the best trial of a search, beside the baselines."""

    version: int
    best: TrialRow
    placer: str
    seed: int
    num_trials: Count
    seconds: Figure
    baselines: dict[str, TrialRow] = msgspec.field(default_factory=dict)
    bound: BoundRow | None = None
    graph: str = ""
    cluster: str = ""
    problem: str = ""
    ended: str = ""


def trial_fields(trial: Trial) -> dict[str, Any]:
    """The fields of a trial in a file, without its placement."""
    return {name: getattr(trial, name) for name in _SAME} | {
        "digest": trial.placement.digest,
        "step_time": None if isinf(trial.step_time) else trial.step_time,
        "peak_memory": trial.peak_memory.tolist(),
    }


def trial_of(row: Any, placement: Placement) -> Trial:
    """The trial of a row that has these fields."""
    return Trial(
        placement=placement,
        step_time=inf if row.step_time is None else row.step_time,
        peak_memory=np.array(row.peak_memory, dtype=np.int64),
        **{name: getattr(row, name) for name in _SAME},
    )


def trial_row(trial: Trial) -> TrialRow:
    return TrialRow(version=1, placement=placement_file(trial.placement), **trial_fields(trial))


def trial_from(row: TrialRow) -> Trial:
    placement = placement_from(row.placement)
    if placement.digest != row.digest:
        raise InputError(
            f"digest: {row.digest!r} is not that of the placement, {placement.digest!r}; "
            "one of them was changed: run the search again"
        )
    return trial_of(row, placement)


def result_file(result: Result) -> ResultFile:
    bound = result.bound
    return file_of(
        ResultFile,
        result,
        version=1,
        best=trial_row(result.best),
        baselines={name: trial_row(trial) for name, trial in result.baselines.items()},
        bound=None if bound is None else file_of(BoundRow, bound),
    )


def result_from(file: ResultFile) -> Result:
    bound = file.bound
    fields = fields_of(file, without=("version",)) | {
        "best": trial_from(file.best),
        "baselines": {name: trial_from(row) for name, row in file.baselines.items()},
        "bound": None if bound is None else Bound(bound.step_time, bound.proof),
    }
    return Result(**fields)
