"""A genetic algorithm with biased random keys (Gonçalves, Resende 2011) over devices and orders
together.

REGAL (Paliwal et al. 2020) places graphs with one like it.

Differs in: the first individuals are what other placers find; urgencies are shifts of a known
order, not an order from nothing; parents exchange whole modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import isinf

import numpy as np

from roost.core.arrays import Array, taken, wrong_array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers import Evaluate, Round
from roost.placers._annealing.move_space import space_of
from roost.placers._genetic.evolution import (
    Breeding,
    Brood,
    Decoding,
    decode,
    evolve,
    judge,
    new_individual,
)
from roost.placers._shared.units import Units
from roost.placers._starts.starting_points import starting_points
from roost.simulator.compiled import Simulator
from roost.simulator.order import dispatch_order

_ROUND_OPS = 4_000_000  # simulated between two looks at the clock, about half a second


@dataclass(frozen=True)
class Genetic:
    """Lets placements and orders evolve until the budget is spent."""

    starts: tuple[str, ...] = ("single", "rules")
    individuals: int = 64
    elite: float = 0.2  # share that lives on
    mutants: float = 0.2  # share that is scrambled anew in each generation
    bias: float = 0.7  # chance of taking a block from the better parent
    mutation: float = 0.002  # chance of a key of its own
    spread: float = 0.05  # how far an urgency moves an op, as a share of the order

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        starts = starting_points(problem, evaluate, self.starts)
        keyed = KeyedProblem(problem, starts[0], self.spread)
        seed = int(evaluate.rng.integers(2**62))
        count = int(max(1, min(self.individuals, evaluate.simulations_left)))
        state = evaluate.round(lambda: self._first(keyed, starts, seed, count))
        while evaluate.trials_left >= 1 and evaluate.seconds_left > 0:
            generations = self._generations(problem, evaluate)
            if generations == 0:
                break
            brood = self._brood(keyed, state)
            state = evaluate.round(partial(self._evolve, keyed, brood, generations))
        assert evaluate.best is not None
        return evaluate.best.placement

    def _brood(self, keyed: KeyedProblem, state: Mapping[str, Array]) -> Brood:
        """The brood in the state of a round; raises InputError if it is not one of this search."""
        keys = taken(state, "keys", (None, 2 * keyed.units.num_units), least=0, most=1)
        if not 1 <= len(keys) <= self.individuals:
            raise wrong_array(state, "keys", f"has {len(keys)} rows, not 1 to {self.individuals}")
        return Brood(
            keys=np.array(keys),
            steps=np.array(taken(state, "steps", (len(keys),), least=0)),
            excesses=np.array(taken(state, "excesses", (len(keys),), least=0)),
            state=np.array(taken(state, "state", (1,), "u")),
        )

    def _generations(self, problem: Problem, evaluate: Evaluate) -> int:
        """Generations of the next round."""
        each = max(1, self.individuals - self._num_elite)
        planned = max(1, _ROUND_OPS // (problem.graph.num_ops * each))
        if isinf(evaluate.simulations_left):
            return planned
        return min(planned, int(evaluate.simulations_left) // each)

    @property
    def _num_elite(self) -> int:
        return max(1, int(self.elite * self.individuals))

    def _first(self, keyed: KeyedProblem, starts: list[Placement], seed: int, count: int) -> Round:
        """The first so many individuals: the starts, and the best of them disturbed."""
        rng = np.random.default_rng(seed)
        num_units = keyed.units.num_units
        keys = np.empty((count, 2 * num_units))
        for number in range(count):
            keys[number] = keyed.keys_of(starts[number % len(starts)])
            if number >= len(starts):
                changed = rng.random(num_units) < 0.02
                keys[number, :num_units][changed] = rng.random(int(changed.sum()))
                keys[number, num_units:] += rng.normal(0, 0.1, num_units)
        keys = np.clip(keys, 0.0, 1.0)
        costs = np.array([keyed.judge(row) for row in keys])
        steps, excesses = costs.T
        order = np.lexsort((steps, excesses))
        state = np.array([rng.integers(2**62)], dtype=np.uint64)
        brood = Brood(keys[order], steps[order], excesses[order], state)
        return Round([keyed.placement(brood.keys[0])], count, brood._asdict())

    def _evolve(self, keyed: KeyedProblem, brood: Brood, generations: int) -> Round:
        """One round, which changes the brood."""
        num_mutants = int(self.mutants * self.individuals)
        breeding = Breeding(self._num_elite, num_mutants, self.bias, self.mutation)
        spent = evolve(*keyed.compiled, brood, breeding, generations)
        best = [keyed.placement(keys) for keys in brood.keys[:2]]
        others = partial(map, keyed.placement, brood.keys[2:])
        return Round(best, max(1, int(spent)), brood._asdict(), others)


class KeyedProblem:
    """A problem as the compiled loops read it, with the order that urgencies shift."""

    def __init__(self, problem: Problem, start: Placement, spread: float) -> None:
        self.problem = problem
        self.units = Units.of(problem)
        layout = Simulator.of(problem).layout(problem.placement(start.device))
        position = np.zeros(problem.graph.num_ops)
        order = dispatch_order(problem, start)
        position[order] = np.linspace(0.0, 1.0, len(order)) if len(order) else 0.0
        decoding = Decoding(
            unit_of=self.units.unit[layout.op].astype(np.int32),
            home_of=self.units.unit[layout.parameter_op].astype(np.int32),
            urgency=-position[layout.op],
            spread=spread,
            capacity=problem.cluster.memory,
        )
        individual = new_individual(self.units.num_units, len(layout.op))
        self.compiled = (layout, space_of(self.units), decoding, individual)

    def keys_of(self, placement: Placement) -> Array:
        """Keys of a placement's devices, in the common order."""
        device = self.units.unit_devices(self.problem.check(placement).device)
        allowed = self.units.allowed
        place = (np.cumsum(allowed, axis=1) - 1)[np.arange(len(device)), device]
        return np.concatenate([(place + 0.5) / allowed.sum(axis=1), np.full(len(device), 0.5)])

    def judge(self, keys: Array) -> tuple[float, float]:
        """The step time and the excess of memory of an individual."""
        step, excess = judge(*self.compiled, keys)
        return float(step), float(excess)

    def placement(self, keys: Array) -> Placement:
        """The placement that an individual stands for."""
        layout, _, _, individual = self.compiled
        decode(*self.compiled, keys)
        priority = np.zeros(self.problem.graph.num_ops)
        priority[layout.op] = individual.urgency
        device = self.units.devices(individual.placed)
        return self.problem.placement(device, "priority", priority)
