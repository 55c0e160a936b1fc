"""`trials.jsonl` and `result.json`, field by field, and the nouns to and from them."""

from __future__ import annotations

from math import inf, isinf

import msgspec
import numpy as np

from roost.core.rows.base import Count, Figure, File
from roost.core.rows.placement import PlacementFile, placement_file, placement_from
from roost.core.trial import Bound, Result, Trial
from roost.errors import InputError


class TrialRow(File, tag_field="format", tag="roost.trial"):
    """One trial, with its placement."""

    version: int
    digest: str
    step_time: Figure | None  # null: it did not come to an end
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


def trial_row(trial: Trial) -> TrialRow:
    return TrialRow(
        version=1,
        digest=trial.placement.digest,
        step_time=None if isinf(trial.step_time) else trial.step_time,
        peak_memory=trial.peak_memory.tolist(),
        feasible=trial.feasible,
        placement=placement_file(trial.placement),
        seconds=trial.seconds,
        source=trial.source,
        placer=trial.placer,
        missing_bytes=trial.missing_bytes,
        why=trial.why,
    )


def trial_from(row: TrialRow) -> Trial:
    placement = placement_from(row.placement)
    if placement.digest != row.digest:
        raise InputError(
            f"digest: {row.digest!r} is not that of the placement, {placement.digest!r}; "
            "one of them was changed: run the search again"
        )
    return Trial(
        placement=placement,
        step_time=inf if row.step_time is None else row.step_time,
        peak_memory=np.array(row.peak_memory, dtype=np.int64),
        feasible=row.feasible,
        seconds=row.seconds,
        source=row.source,
        placer=row.placer,
        missing_bytes=row.missing_bytes,
        why=row.why,
    )


def result_file(result: Result) -> ResultFile:
    return ResultFile(
        version=1,
        best=trial_row(result.best),
        placer=result.placer,
        seed=result.seed,
        num_trials=result.num_trials,
        seconds=result.seconds,
        baselines={name: trial_row(trial) for name, trial in result.baselines.items()},
        bound=None
        if result.bound is None
        else BoundRow(step_time=result.bound.step_time, proof=result.bound.proof),
        graph=result.graph,
        cluster=result.cluster,
        problem=result.problem,
        ended=result.ended,
    )


def result_from(file: ResultFile) -> Result:
    return Result(
        best=trial_from(file.best),
        placer=file.placer,
        seed=file.seed,
        num_trials=file.num_trials,
        seconds=file.seconds,
        baselines={name: trial_from(row) for name, row in file.baselines.items()},
        bound=None if file.bound is None else Bound(file.bound.step_time, file.bound.proof),
        graph=file.graph,
        cluster=file.cluster,
        problem=file.problem,
        ended=file.ended,
    )
