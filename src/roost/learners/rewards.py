"""Costs of trials as a learner sees them: penalties and advantages."""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array

# A placement that does not fit counts as slower than any that fits: by the first factor, plus the
# second times the missing share of memory.
_FAILED = 2.0
_MISSING = 10.0


def penalised(step_time: Array, excess: Array, worst: float) -> Array:  # [batch] seconds
    """Step times [batch], with a penalty where a placement does not fit or has no step time.

    `excess` [batch] is the missing memory as a share of the memory. `worst` is the step time of a
    slow placement that fits, in seconds.
    """
    broken = ~np.isfinite(step_time)
    failed = (excess > 0) | broken
    at_least = np.maximum(np.where(broken, worst, step_time), worst)
    factor = _FAILED + _MISSING * np.where(broken, 1.0, excess)
    return np.where(failed, at_least * factor, step_time)


def standardised(rewards: Array, least_spread: float | None = None, most: float = 3.0) -> Array:
    """Rewards less their mean, over their deviation, clipped to between -most and most.

    All zeros if the deviation is not above `least_spread`, by default a trillionth of the largest
    reward.
    """
    spread = float(rewards.std())
    if least_spread is None:
        least_spread = 1e-12 * max(1e-30, float(np.abs(rewards).max()))
    if not spread > least_spread:
        return np.zeros_like(rewards)
    return np.asarray(np.clip((rewards - rewards.mean()) / spread, -most, most))
