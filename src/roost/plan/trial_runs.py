"""Plans that are run, and corrected by what that shows: of several the fastest."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from roost.core.costs import Costs
from roost.core.problem import Problem
from roost.core.units import show_bytes, show_seconds
from roost.errors import Infeasible
from roost.plan.module_search import Correction, PlanSearch
from roost.plan.plan import Plan, simulated

if TYPE_CHECKING:
    from roost.runtime.whole.module_placement import ModulePlacement
    from roost.runtime.whole.trial_run import TrialRun

log = logging.getLogger(__name__)

_TRIES = 5  # of plans, each after the last has shown something
# What is expected of another plan, over what was measured of the best, for it to be worth a try.
_BETTER = 0.98
_SLOWEST = 20.0  # times: of a CPU beside a GPU, than profiled


def tuned(
    course: PlanSearch, plan: Plan, known: Correction, tries: Callable[[Plan], TrialRun | None]
) -> Plan:
    """Run the plan, correct what was thought by what that shows, search again: the fastest that was
    run."""
    best: Plan | None = None
    seen: list[ModulePlacement] = []
    least, ended = 0, True  # bytes in use that are too many; whether the run came to its end
    while plan.modules not in seen and len(seen) < _TRIES:
        seen.append(plan.modules)
        found = tries(plan)
        if found is None:
            if best is None and course.held(known) < course.held(Correction()):
                # No run says that less than by rule is enough.
                return course.fitting(tries=False)[0]
            return plan if best is None else best
        log.info(
            "tried: %s a step, %s expected, %s in use; the CPU took %s in %d calls, %s were "
            "streamed",
            show_seconds(found.seconds), show_seconds(plan.step_time), show_bytes(found.peak),
            show_seconds(found.elsewhere_seconds), found.num_elsewhere,
            show_bytes(plan.streamed_bytes),
        )  # fmt: skip
        least, ended = found.peak, math.isfinite(found.seconds)
        if found.peak <= course.room and (
            best is None or best.measured is None or found.seconds < best.measured
        ):
            best = replace(plan, measured=found.seconds)
        known = corrected(course, plan, known, found)
        try:
            plan = course.roomy(known)
        except Infeasible:
            break
        if best is not None and plan.step_time > _BETTER * _expected(best, plan.problem):
            break
    if best is None and not ended:  # how much it would have been, nobody knows
        raise Infeasible(
            f"nothing was found that fits: no plan could be run in the {show_bytes(course.room)} "
            f"of {course.main!r}; "
            "give it more",
            course.main,
        )
    if best is None:
        raise Infeasible(
            f"nothing was found that fits: on {course.main!r} {show_bytes(least)} were in use "
            f"where there are "
            f"{show_bytes(course.room)}; give it more",
            course.main,
            least - course.room,
        )
    return best


def _expected(plan: Plan, problem: Problem) -> float:
    """What a plan that was run takes, measured or by costs of now, whichever is more."""
    assert plan.measured is not None
    return max(plan.measured, simulated(problem, plan.placement, plan.modules).step_time)


def corrected(course: PlanSearch, plan: Plan, known: Correction, found: TrialRun) -> Correction:
    """What a run of a plan says of what was thought when it was made."""
    held, too_few = _held_next(course, plan, known, found)
    slower, hop = known.slower, known.hop
    if found.num_elsewhere:
        cpus = [
            number for number, one in enumerate(plan.problem.cluster.devices) if one.kind == "cpu"
        ]
        there = np.flatnonzero(
            np.isin(plan.placement.device, cpus) & ~plan.problem.graph.is_parameter
        )
        thought = float(plan.problem.op_time[there, plan.placement.device[there]].sum())
        ratio = found.elsewhere_seconds / thought if thought > 0 else 1.0
        slower = min(max(known.slower * ratio, 1 / _SLOWEST), _SLOWEST)
        scaled = plan.problem.op_time.copy()
        scaled[:, cpus] *= slower / known.slower
        other = Problem(plan.problem.graph, plan.problem.cluster, Costs(scaled))
        again = simulated(other, plan.placement, plan.modules).step_time
        hop = max(0.0, known.hop + (found.seconds - again) / found.num_elsewhere)
    return Correction(held, too_few, slower, hop)


def _held_next(
    course: PlanSearch, plan: Plan, known: Correction, found: TrialRun
) -> tuple[int, int]:
    """How many bytes to leave free, after a run that held some; and with how many it is known to be
    too few.

    What a run holds beyond the simulated peak is as much as is needed, or more: libraries take much
    for some ops, and the peak may be at others. So half of what was enough is tried as well, down
    to what was too few.
    """
    held, main = course.held(known), course.cluster.index_of(course.main)
    if found.peak > course.room:
        more = min(found.peak - course.room + course.margin, int(course.cluster.memory[main]) // 5)
        return held + more, max(held, known.too_few)
    if course.grows:
        return held, known.too_few
    # Without a cap the device itself is the limit, and there what PyTorch keeps for later counts
    # too.
    in_use = found.peak if course.capped else found.reserved
    beyond = max(0, in_use - int(plan.timeline.peak_memory[main])) + course.margin
    return max(
        known.too_few + course.margin, min(beyond, (held + known.too_few) // 2)
    ), known.too_few
