"""Trial runs of plans: each run corrects the search for the next plan; the fastest plan wins."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from roost.core.costs import Costs
from roost.core.problem import Problem
from roost.core.units import show_bytes, show_seconds
from roost.errors import Infeasible
from roost.plan.module_search import Correction, PlanSearch
from roost.plan.plan import Plan, simulated
from roost.runtime.whole.module_placement import ModulePlacement
from roost.runtime.whole.trial_run import TrialRun

log = logging.getLogger(__name__)

_RUNS = 5  # of plans at most
_WORTH = 0.98  # a plan is run if it is expected to take this share of the best one's time, or less
_SLOWEST = 20.0  # times: of a CPU beside a GPU, compared with its profile


def fastest_of_runs(
    search: PlanSearch, plan: Plan, known: Correction, run: Callable[[Plan], TrialRun | None]
) -> Plan:
    """Run the plan, correct the simulation by the run, search again; give the fastest of all."""
    best: Plan | None = None
    seen: list[ModulePlacement] = []
    peak, ended = 0, True  # bytes in use in the last run; it came to its end
    while plan.modules not in seen and len(seen) < _RUNS:
        seen.append(plan.modules)
        trial = run(plan)
        if trial is None:
            if best is None and search.spare(known) < search.spare(Correction()):
                # No run shows that less spare memory than by rule is enough.
                return search.first_plan(may_run=False)[0]
            return plan if best is None else best
        log.info(
            "trial run: %s a step (%s expected), %s in use; modules on the CPU took %s in %d "
            "calls, %s were streamed",
            show_seconds(trial.seconds), show_seconds(plan.step_time), show_bytes(trial.peak),
            show_seconds(trial.elsewhere_seconds), trial.num_elsewhere,
            show_bytes(plan.streamed_bytes),
        )  # fmt: skip
        peak = trial.peak
        ended = math.isfinite(trial.seconds)
        faster = best is None or best.measured is None or trial.seconds < best.measured
        if peak <= search.room and faster:
            best = replace(plan, measured=trial.seconds)
        known = corrected(search, plan, known, trial)
        try:
            plan = search.fastest(known)
        except Infeasible:
            break
        if best is not None and plan.step_time > _WORTH * _expected(best, plan.problem):
            break
    if best is not None:
        return best
    room = show_bytes(search.room)
    main = search.main
    if not ended:  # nobody knows how much memory it would have taken
        raise Infeasible(
            f"found no plan that fits: every trial run ran out of the {room} of {main!r}; give it "
            f"more memory",
            main,
        )
    raise Infeasible(
        f"found no plan that fits: the last trial run used {show_bytes(peak)} on {main!r}, which "
        f"has {room}; give it more memory",
        main,
        peak - search.room,
    )


def _expected(plan: Plan, problem: Problem) -> float:
    """Seconds that a plan takes: measured, or simulated with corrected costs if that is more."""
    assert plan.measured is not None
    return max(plan.measured, simulated(problem, plan.placement, plan.modules).step_time)


def corrected(search: PlanSearch, plan: Plan, known: Correction, trial: TrialRun) -> Correction:
    """Correct the simulation by a run of a plan."""
    spare, too_little = _next_spare(search, plan, known, trial)
    if not trial.num_elsewhere:
        return Correction(spare, too_little, known.slowdown, known.hop)
    problem = plan.problem
    device = plan.placement.device
    is_cpu = np.array([one.kind == "cpu" for one in problem.cluster.devices])
    ops = np.flatnonzero(is_cpu[device] & ~problem.graph.is_parameter)
    expected = float(problem.op_time[ops, device[ops]].sum())
    ratio = trial.elsewhere_seconds / expected if expected > 0 else 1.0
    slowdown = min(max(known.slowdown * ratio, 1 / _SLOWEST), _SLOWEST)
    op_time = problem.op_time.copy()
    op_time[:, is_cpu] *= slowdown / known.slowdown
    slower = Problem(problem.graph, problem.cluster, Costs(op_time))
    step_time = simulated(slower, plan.placement, plan.modules).step_time
    hop = max(0.0, known.hop + (trial.seconds - step_time) / trial.num_elsewhere)
    return Correction(spare, too_little, slowdown, hop)


def _next_spare(
    search: PlanSearch, plan: Plan, known: Correction, trial: TrialRun
) -> tuple[int, int]:
    """Give the bytes to leave free next, after a run; and the most that are known to be too few.

    A run uses some memory beyond the simulated peak. That much is enough, but may be more than is
    needed: libraries take much for some ops, and the peak may be at others. So half of it is tried
    as well, down to what was too little.
    """
    spare = search.spare(known)
    main = search.cluster.index_of(search.main)
    if trial.peak > search.room:
        largest = int(search.cluster.memory[main]) // 5
        more = min(trial.peak - search.room + search.margin, largest)
        return spare + more, max(spare, known.too_little)
    if search.will_grow:
        return spare, known.too_little
    # Without a cap the device itself is the limit: memory that PyTorch keeps for later counts too.
    in_use = trial.peak if search.capped else trial.reserved
    beyond = max(0, in_use - int(plan.timeline.peak_memory[main])) + search.margin
    half = (spare + known.too_little) // 2
    return max(known.too_little + search.margin, min(beyond, half)), known.too_little
