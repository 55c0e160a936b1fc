"""Schedules drawn from the network of `lister`: settings, costs, and decisions to learn from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from roost.core.arrays import Array
from roost.core.problem import Problem
from roost.placers._lister.compiled_network import SamplingSettings
from roost.placers._lister.network_scheduler import NetworkScheduler, NetworkSchedules
from roost.placers._lister.weights import NUM_FEATURES, random_samplers
from roost.placers._listing.list_scheduler import Schedules

if TYPE_CHECKING:
    from roost.policies.lister_network import Decisions

# Beyond memory: the penalty as the logarithm of a factor on the step time, for any excess and for
# all memory once more.
_OVER = 0.5
_OVER_SHARE = 20.0
_MOST_OVER = 3.0
_FAILED = 5.0  # of a schedule that has no step time


def cost_of(schedules: Schedules, problem: Problem) -> Array:  # [schedules]
    """The logarithm of the step time, and a penalty that grows with the bytes beyond memory."""
    step = np.maximum(schedules.step_time, 1e-12)
    memory = max(1.0, float(problem.cluster.memory.sum()))
    penalty = np.minimum(_MOST_OVER, _OVER + _OVER_SHARE * schedules.excess / memory)
    cost = np.log(step) + np.where(schedules.excess > 0, penalty, 0.0)
    broken = ~np.isfinite(cost)
    if broken.all():
        return np.zeros(len(cost))
    return np.where(broken, cost[~broken].max(initial=0.0) + _FAILED, cost)


def sampling_settings(
    rng: np.random.Generator, scheduler: NetworkScheduler, tilt: Array, heat: Array
) -> SamplingSettings:
    """Settings of schedules in which the network decides about every unit, one for each row."""
    count = len(heat)
    return SamplingSettings(
        tilt=np.ascontiguousarray(tilt, dtype=np.float32),
        heat=np.ascontiguousarray(heat, dtype=np.float64),
        state=rng.integers(2**63, size=(count, 1)).astype(np.uint64),
        given=np.full((count, scheduler.units.num_units), -1, np.int32),
    )


def sampled_by(
    rng: np.random.Generator, scheduler: NetworkScheduler, samplers: Array
) -> SamplingSettings:
    """Settings of one schedule for each sampler; their orders are not read."""
    heat = samplers[:, NUM_FEATURES]
    return sampling_settings(rng, scheduler, samplers[:, :NUM_FEATURES], heat)


def exploring(
    rng: np.random.Generator, scheduler: NetworkScheduler, count: int
) -> SamplingSettings:
    """Settings of schedules to learn from: half are as the network is, the others are tilted."""
    tilt = random_samplers(rng, count, 1)[:, :NUM_FEATURES]
    tilt[: count // 2] = 0.0
    return sampling_settings(rng, scheduler, tilt, np.ones(count))


def decisions_of(
    scheduler: NetworkScheduler,
    schedules: NetworkSchedules,
    settings: SamplingSettings,
    picked: Array,
) -> Decisions:
    """The picked [schedules, units] decisions, as the network in PyTorch takes them."""
    import torch

    from roost.policies.lister_network import Decisions

    record = schedules.record
    row = np.nonzero(picked)[0]
    heat = np.where(settings.heat > 0, settings.heat, 1.0).astype(np.float32)
    mask = masks_of(record.mask[picked], scheduler.problem.cluster.num_devices)
    return Decisions(
        seen=torch.from_numpy(record.seen[picked]),
        known=torch.from_numpy(scheduler.features[record.unit[picked]]),
        mask=torch.from_numpy(mask),
        choice=torch.from_numpy(record.choice[picked].astype(np.int64)),
        tilt=torch.from_numpy(settings.tilt[row]),
        heat=torch.from_numpy(heat[row]),
        roll=torch.from_numpy(row),
    )


def masks_of(bits: Array, num_devices: int) -> Array:  # [..., devices] bool
    """Bits of devices, spread out."""
    device = np.arange(num_devices, dtype=np.uint64)
    return np.asarray((bits[..., None] >> device) & np.uint64(1) != 0)


def choices_in(schedules: NetworkSchedules) -> Array:  # [schedules, units] bool
    """The decisions between two or more devices."""
    record = schedules.record
    several = (record.mask & (record.mask - np.uint64(1))) != 0
    return np.asarray((record.unit >= 0) & several)


def some_choices(
    schedules: NetworkSchedules, most: int, rng: np.random.Generator
) -> Array:  # [schedules, units] bool
    """About `most` decisions of each schedule, drawn from those between two or more devices."""
    several = choices_in(schedules)
    share = most * len(several) / max(1, int(several.sum()))
    return np.asarray(several & (rng.random(several.shape) < share))
