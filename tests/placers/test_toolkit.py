"""The public toolkit: a placer from outside needs nothing else of Roost's placers."""

from __future__ import annotations

import doctest
import inspect
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import roost
from roost.placers import toolkit

INCEPTION = Path(__file__).parents[2] / "examples" / "inception_v3.json.gz"


@dataclass(frozen=True)
class Tabu:
    """A tabu search (Glover 1986): the best of a few moves is made, also where it is worse."""

    samples: int = 32  # moves for each step
    tenure: int = 5  # steps for which a unit stays where it was moved to
    width: int = 16  # units in a row, at most

    def place(self, problem: roost.Problem, evaluate: toolkit.Evaluate) -> roost.Placement:
        units, rng = toolkit.Units.of(problem), evaluate.rng
        chain = toolkit.Layers.of(problem.graph).chain(units)
        current, *_ = toolkit.starting_points(problem, evaluate, ("single", "rules"))
        free_from = np.zeros(units.num_units, np.int64)  # the first step that may move each unit
        for step in range(10**6):
            device = units.unit_devices(current.device)
            moves = []
            for _ in range(self.samples):
                first, target = rng.integers(len(chain)), rng.integers(problem.cluster.num_devices)
                window = chain[first : first + 1 + int(self.width ** rng.random())]
                window = window[(free_from[window] <= step) & (device[window] != target)]
                moved = device.copy()
                moved[window] = target
                moves.append((window, toolkit.fastest_allowed(units, moved)))
            trials = evaluate([replace(current, device=units.devices(to)) for _, to in moves])
            best = toolkit.best_of(trials)
            window, _ = moves[trials.index(best)]
            free_from[window] = step + self.tenure
            orders = toolkit.all_orders(problem, best.placement.device)
            current = toolkit.best_of([best, *evaluate(orders)]).placement
        raise AssertionError("the budget ends the search")


def test_a_tabu_search_made_of_it_beats_the_best_start() -> None:
    problem = roost.estimate(roost.load(INCEPTION), "k80x4")
    result = roost.solve(problem, Tabu(), trials=1500)
    best_start = min(trial.step_time for trial in result.baselines.values() if trial.feasible)
    assert result.best.step_time < 0.99 * best_start


def test_the_example_of_the_toolkit_runs() -> None:
    assert doctest.testmod(toolkit) == doctest.TestResults(failed=0, attempted=5)


def test_every_block_of_the_toolkit_is_documented_and_typed() -> None:
    for name in toolkit.__all__:
        block = getattr(toolkit, name)
        if name == "FEATURES":
            continue
        assert inspect.getdoc(block), name
        if inspect.isfunction(block):
            signature = inspect.signature(block)
            types = [each.annotation for each in signature.parameters.values()]
            assert inspect.Signature.empty not in (*types, signature.return_annotation), name
        assert f"`{name}`" in (toolkit.__doc__ or "") or name in ("ListSchedule", "Placer", "Round")


def test_list_placements_places_as_heft_does() -> None:
    problem = roost.estimate(roost.load(INCEPTION), "k80x4")
    placements = toolkit.list_placements(problem)
    best = min(roost.simulate(problem, placement).step_time for placement in placements)
    assert best == roost.solve(problem, "heft", trials=100).best.step_time


def test_downhill_never_ends_worse_than_it_began() -> None:
    problem = roost.estimate(roost.load(INCEPTION), "k80x4")
    start = toolkit.list_placements(problem)[0]

    class Downhill:
        def place(self, problem: roost.Problem, evaluate: toolkit.Evaluate) -> roost.Placement:
            return toolkit.go_downhill(problem, evaluate, start)

    result = roost.solve(problem, Downhill(), trials=300)
    assert result.best.step_time < roost.simulate(problem, start).step_time
    assert result.num_trials <= 300
