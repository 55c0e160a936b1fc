"""Period: no placement ends requests closer to each other than this, for ever.

Requests of one graph come without end, and at most `count` are under way at once. Each may be
placed in a way of its own. The period is the seconds between two ends, on average over all of them.

- **Work.** In N requests, a unit runs in some share of them on each device. The shares of a unit
  add up to 1. In T seconds a device is busy for at most T seconds and one gap. So T / N is, as N
  grows, no less than the load of any device under these shares; and no less than the greatest load
  under the best shares, which is a linear programme. Its dual gives the bound.
- **Critical path.** A request is under way for no less than its critical path. With at most
  `count` of them at once, N requests take no less than N / `count` critical paths (Little's law).

Links add nothing that holds in general: whole requests side by side send nothing, and a weight that
was fetched once may serve any number of requests. Memory closes a device to the units that are too
large for it.
"""

from __future__ import annotations

from roost.bounds._relaxed import Relaxed
from roost.bounds.memory import nothing_fits
from roost.bounds.path import critical_path
from roost.bounds.work import best_weights, shared
from roost.core.problem import Problem
from roost.core.trial import Bound
from roost.errors import InputError

_SHAVED = 1e-9  # sums are rounded here in another order than in the simulator


def period_bound(problem: Problem, count: int) -> Bound:
    """The least seconds between the ends of requests, of which `count` are under way.

    `problem` is that of one request. The `step_time` of the bound is the period.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(f"count is {count!r}; it must be a whole number, 1 or more")
    relaxed = Relaxed.of(problem, memory=nothing_fits(problem) is None)
    loads = {
        "load": shared(relaxed.unit_busy, best_weights(relaxed.unit_busy)),
        "critical path": critical_path(relaxed) / count,
    }
    proof = max(loads, key=lambda kind: loads[kind])
    return Bound(loads[proof] * (1 - _SHAVED), proof)
