"""Every placer in the folder, on every tiny problem: the contract of `roost.testing.check_placer`."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import pytest

from roost import catalog
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import InputError, MissingExtra
from roost.placers import Evaluate
from roost.placers.single import Single
from roost.simulator.compiled import Simulator, simulate
from roost.testing import check_placer
from roost.testing.tiny_problems import FITTING, tiny_problem, tiny_problems
from support.exhaustive import all_devices, exhaustive

SEARCHING = ("auto", "annealing")  # what fits, these find
REFUSING = ("published",)  # for models that it does not know


@pytest.mark.parametrize("problem", tiny_problems())
@pytest.mark.parametrize("name", catalog.names("placers"))
def test_the_contract(name: str, problem: str) -> None:
    try:
        check_placer(name, [problem], searches=name in SEARCHING)
    except MissingExtra as error:
        pytest.skip(str(error))
    except InputError as error:
        if name not in REFUSING or "is for" not in str(error):
            raise


@pytest.mark.parametrize(
    "name", ["only_parameters", "kinds", "tight", "nothing_fits", "zeros", "streamed"]
)
def test_what_is_said_to_fit_does_and_nothing_else(name: str) -> None:
    assert np.isfinite(exhaustive(tiny_problem(name)).step_time) == FITTING[name]


def test_only_one_choice_of_devices_is_tight() -> None:
    problem = tiny_problem("tight")
    devices = all_devices(problem)
    fits = Simulator.of(problem).evaluate(devices).feasible
    assert devices[fits].tolist() == [[1, 1, 0, 0, 2, 2]]


def test_nothing_fits_the_streamed_problem_without_a_fetch() -> None:
    problem = tiny_problem("streamed")
    graph, devices = problem.graph, all_devices(problem)
    apart = (devices[:, graph.input_op] != devices[:, graph.edge_target])[
        :, graph.is_parameter[graph.input_op]
    ]
    fits = Simulator.of(problem).evaluate(devices).feasible
    assert fits.any()
    assert apart[fits].any(axis=1).all()


_CALLS = count()


@dataclass(frozen=True)
class _Broken:
    """A placer with a fault."""

    fault: str

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        placement = Single().place(problem, evaluate)
        device = np.array(placement.device)
        if self.fault == "group":
            device[np.flatnonzero(problem.graph.group == 0)[-1]] = 1 - device[0]
        elif self.fault == "kind":
            device[:] = 0
        elif self.fault == "memory":  # of the search before
            evaluate([placement] * (next(_CALLS) % 2))
            return placement
        elif self.fault == "silent":
            return replace(placement, order="rank", graph="")
        return problem.placement(device)


@pytest.mark.parametrize(
    ("fault", "problem", "said"),
    [
        ("group", "two_groups", "share the group"),
        ("kind", "kinds", "may only run on"),
        ("memory", "shared_bus", "the same seed gave"),
        ("silent", "unlike_devices", "which graph"),
    ],
)
def test_the_suite_sees_a_fault(fault: str, problem: str, said: str) -> None:
    with pytest.raises((AssertionError, InputError), match=said):
        check_placer(_Broken(fault), [problem])


def test_the_suite_sees_what_does_not_fit() -> None:
    check_placer(Single(), ["tight"])
    assert not simulate(tiny_problem("tight"), Placement(np.zeros(6, np.int32))).feasible
    with pytest.raises(AssertionError, match="something fits"):
        check_placer(Single(), ["tight"], searches=True)


def test_the_suite_ends_a_placer_that_never_returns() -> None:
    over = threading.Event()

    class Endless:
        def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
            over.wait()
            return Single().place(problem, evaluate)

    with pytest.raises(AssertionError, match=r"did not return within 0\.2 seconds"):
        check_placer(Endless(), ["chain"], seconds=0.2)
    over.set()


def test_the_suite_sees_a_search_that_does_not_count() -> None:
    class Secret:
        def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
            placement = Single().place(problem, evaluate)
            for _ in range(200):
                simulate(problem, placement)
            return placement

    with pytest.raises(AssertionError, match="call evaluate, or report simulations"):
        check_placer(Secret(), ["chain"])
