"""The contract of a placer: `check_placer("their_pkg.module:Class")` tries all of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import Timeline
from roost.core.trial import ENDINGS, Result, Trial
from roost.placers import Placer
from roost.search.evaluate import Progress
from roost.search.simulating import Simulating
from roost.search.solve import named_placer, search
from roost.search.warm_up import warm_up
from roost.simulator.compiled import Outcomes, Simulator, simulate
from roost.testing.tiny_problems import FITTING, tiny_problem, tiny_problems

BUDGETS = (1, 2, 5, 50, 300)  # trials; the last lets a population begin to evolve
_Any = TypeVar("_Any")
_ENOUGH = 2000  # trials, to find what fits
# Simulations that may be left out of the count: a few by hand, or a look at each of some starts.
_UNCOUNTED = 100


def check_placer(
    placer: str | Placer,
    problems: Iterable[str] | None = None,
    searches: bool = False,
    seconds: float = 600.0,
) -> None:
    """Raise AssertionError where a placer breaks the contract on one of the tiny problems.

    Each placement that it tries is valid, groups and allowed kinds included. Equal seeds give equal
    answers. It exceeds no budget, and does not simulate many placements without counting them. The
    best trial costs what the simulator says. Each search ends within so many `seconds`. `searches`:
    it finds something that fits where that exists.
    """
    chosen = named_placer(placer) if isinstance(placer, str) else placer
    # Loops are compiled now: that takes minutes, and simulates small problems.
    _in_time(lambda: warm_up(chosen), seconds, "a problem of three ops")
    for name in tiny_problems() if problems is None else problems:
        problem = tiny_problem(name)
        results = [
            _checked(placer, problem, trials, f"{name}, {trials} trials", seconds)
            for trials in BUDGETS
        ]
        first = _answer(results[-1])
        again = _answer(_checked(placer, problem, BUDGETS[-1], f"{name}, again", seconds))
        assert first == again, f"{name}: the same seed gave {first} and {again}"
        if searches and FITTING[name]:
            best = _checked(placer, problem, _ENOUGH, name, seconds).best
            assert best.feasible, (
                f"{name}: something fits, and the best found lacks {best.missing_bytes} bytes"
            )


def _checked(
    placer: str | Placer, problem: Problem, trials: int, where: str, seconds: float
) -> Result:
    """One search, and a look at every trial of it."""
    seen: list[Trial] = []

    def watch(progress: Progress) -> None:
        seen.append(progress.trial)
        assert progress.num_trials <= trials, f"{where}: {progress.num_trials} trials were spent"

    def run() -> Result:
        return search(problem, placer, trials=trials, seed=3, on_trial=watch, prove=False)

    with _simulations() as uncounted:
        result = _in_time(run, seconds, where)
    assert result.num_trials <= trials, f"{where}: {result.num_trials} trials were spent"
    assert uncounted[0] <= result.num_trials + _UNCOUNTED, (
        f"{where}: {uncounted[0]} placements were simulated beside {result.num_trials} trials that "
        "were counted; call evaluate, or report simulations with evaluate.round"
    )
    assert result.ended in ENDINGS, f"{where}: ended with {result.ended!r}"
    assert seen, f"{where}: nothing was evaluated"
    for trial in seen:
        _check_placement(problem, trial.placement, where)
        assert not trial.better_than(result.best), f"{where}: a trial is better than the best"
    timeline = simulate(problem, result.best.placement)
    found = (result.best.step_time, result.best.peak_memory.tolist(), result.best.feasible)
    truth = (timeline.step_time, timeline.peak_memory.tolist(), timeline.feasible)
    assert found == truth, f"{where}: the best trial says {found}, the simulator {truth}"
    return result


def _in_time(run: Callable[[], _Any], seconds: float, where: str) -> _Any:
    """The result of a call that must end within so many seconds.

    It runs in a thread, which goes on in the background where it does not end.
    """
    results: list[_Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(run())
        except BaseException as error:  # raised again below
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"{where}: the placer did not return within {seconds:g} seconds"
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def _simulations() -> Iterator[list[int]]:
    """Count the placements that are simulated by anyone but `evaluate`."""
    counted = [0]
    inside = threading.local()
    simulate_one = Simulator.simulate
    simulate_batch = Simulator.evaluate
    evaluate = Simulating.trials

    def count(number: int) -> None:
        if not getattr(inside, "evaluate", False):
            counted[0] += number

    def one(self: Simulator, *args: Any, **settings: Any) -> Timeline:
        count(1)
        return simulate_one(self, *args, **settings)

    def batch(self: Simulator, devices: Any, *args: Any, **settings: Any) -> Outcomes:
        count(len(devices))
        return simulate_batch(self, devices, *args, **settings)

    def trials(self: Simulating, placements: Sequence[Placement]) -> list[Trial]:
        inside.evaluate = True
        try:
            return evaluate(self, placements)
        finally:
            inside.evaluate = False

    with (
        patch.object(Simulator, "simulate", one),
        patch.object(Simulator, "evaluate", batch),
        patch.object(Simulating, "trials", trials),
    ):
        yield counted


def _check_placement(problem: Problem, placement: Placement, where: str) -> None:
    """Raise where a placement breaks a rule: `Problem.check` once more, written in another way."""
    graph = problem.graph
    cluster = problem.cluster
    problem.check(placement)
    assert placement.graph == graph.digest, (
        f"{where}: the placement does not say which graph it is for"
    )
    assert placement.devices == cluster.device_names, (
        f"{where}: the placement does not name the devices"
    )
    together: dict[int, int] = {}
    for op, (device, group) in enumerate(
        zip(placement.device.tolist(), graph.group.tolist(), strict=True)
    ):
        kind = cluster.devices[device].kind
        allowed = graph.allowed[op]
        assert not allowed or kind in allowed, (
            f"{where}: op {graph.op_names[op]!r} may not run on a {kind}"
        )
        if group >= 0:
            assert together.setdefault(group, device) == device, f"{where}: a group is split"


def _answer(result: Result) -> tuple[str, float, int]:
    return result.best.placement.digest, result.best.step_time, result.num_trials
