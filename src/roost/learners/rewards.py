"""What a trial is worth to a learner."""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array

# A placement that does not fit counts as slower than any that does, and the more so the more is
# missing.
_FAILED, _MISSING = 2.0, 10.0


def penalised(step_time: Array, excess: Array, worst: float) -> Array:  # [batch] seconds
    """Step times [batch], those with an excess [batch] of bytes over memory above 0 set beyond the
    worst that fits.

    `excess` is relative to the memory there is. A step time that is no number counts as failed too.
    """
    broken = ~np.isfinite(step_time)
    failed = (excess > 0) | broken
    at_least = np.maximum(np.where(broken, worst, step_time), worst)
    return np.where(
        failed, at_least * (_FAILED + _MISSING * np.where(broken, 1.0, excess)), step_time
    )


def standardised(rewards: Array, most: float = 3.0) -> Array:  # [batch]
    """Rewards less their mean, over their deviation, between -most and most; zeros where all are
    equal."""
    spread = float(rewards.std())
    if spread <= 1e-12 * max(1e-30, float(np.abs(rewards).max())):
        return np.zeros_like(rewards)
    return np.asarray(np.clip((rewards - rewards.mean()) / spread, -most, most))
