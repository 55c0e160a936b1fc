"""Several annealing chains at once: many short ones, then the best for longer, then reheated.

Each chain has devices and an order. A chain whose groups (`groups_of`) are whole moves groups until
it is among the last two: on deep models that leads further in a short time. After every round the
devices are tried in other orders too, some of them made for these devices, and the chain goes on in
the best. The lengths of rounds do not depend on the clock, so equal seeds give equal searches; the
budget only says where they end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from math import isinf

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers import Evaluate, Round
from roost.placers._annealing.annealer import Annealer, cost_of
from roost.placers._annealing.ordered_chain import (
    GROUPS,
    TIES,
    OrderedChain,
    order_digest,
    packed,
    units_of,
    unpacked,
)
from roost.placers._shared.groups import may_group
from roost.placers._shared.orders import all_orders

_MOST_SECONDS = 1.6  # that all chains together may take in one round, about
_FEW = 64  # trials: not worth another round
# Simulations at most, beside its batches, for a chain in a round: five orders, four windows, the
# start.
_REORDERS = 10
_NEAR = 32  # placements near the best that are looked at, where that was run before
_WINDOWS = (0.5, 0.8, 1.3, 2.0)  # other sizes of the windows, as shares of theirs


@dataclass(frozen=True)
class Heat:
    """The temperatures and lengths of a population's rounds."""

    members: int = 8  # chains in the first round; half as many in each round after it, down to two
    batches: int = 400  # for each chain of the first round; twice as many in each round after it
    hot: float = 0.001  # temperature of the first rounds, as a share of the step time
    warm: float = 0.0003  # of the rounds after them
    cold: float = 0.00003  # at the end of a round
    reorder: bool = True
    groups: bool = True  # whether chains whose groups are together move groups


class Population:
    """Chains that share a problem."""

    def __init__(
        self, problem: Problem, evaluate: Evaluate, heat: Heat, threads: int | None = None
    ) -> None:
        self.problem = problem
        self.evaluate = evaluate
        self.heat = heat
        self.threads = threads or len(os.sched_getaffinity(0))
        self._cost = partial(cost_of, problem)
        self._annealers: dict[int, tuple[str, Annealer]] = {}  # by slot, with what it is for
        self._seed = int(evaluate.rng.integers(2**31))

    def run(self, starts: Sequence[Placement]) -> None:
        """Anneal until the budget is spent, from these starts, the most promising first."""
        chains = self._begun(self._alternating(starts))
        number = 0
        left = self.evaluate
        while True:
            chains = self._round(chains, number)
            chains.sort(key=lambda chain: chain.cost)
            number += 1
            if len(chains) > 2:
                chains = chains[: max(2, len(chains) // 2)]
            else:
                chains = [chains[0], self._again(chains[0], number)]
            if left.simulations_left < _FEW or left.trials_left < 1 or left.seconds_left <= 0:
                return

    def _begun(self, starts: Sequence[Placement]) -> list[OrderedChain]:
        """The chains of the first round."""
        both = len({self._tie_of(start) == GROUPS for start in starts[:2]}) == 2
        count = max(self._affordable(self.heat.members), min(self.heat.members, 1 + both))
        places = self._spread(starts[:count]) + list(starts[count:])
        return [self._chain(slot, place, 0) for slot, place in enumerate(places[:count])]

    def _alternating(self, starts: Sequence[Placement]) -> list[Placement]:
        """Starts with whole groups and without in turn, each the best that is left."""
        kinds: tuple[list[Placement], list[Placement]] = ([], [])
        for start in starts:
            kinds[self._tie_of(start) == GROUPS].append(start)
        turn = int(bool(kinds[1]) and starts[0] is kinds[1][0])
        pairs = zip_longest(kinds[turn], kinds[1 - turn])
        return [start for pair in pairs for start in pair if start is not None]

    def _again(self, best: OrderedChain, number: int) -> OrderedChain:
        """The best chain once more, hotter, and every other time in another order.

        A chain that moved groups goes on op by op.
        """
        if best.tie == GROUPS:
            return self._chain(1, best.best, number, TIES[0])
        if number % 2 == 0 or not self.heat.reorder:
            return best.again(self._seed + number)
        others = self._in_other_orders(best.best)
        return self._chain(1, others[number // 2 % min(3, len(others))], number)

    def _spread(self, starts: Sequence[Placement]) -> list[Placement]:
        """The starts, then each in its best other order, then each in its second best."""
        if not self.heat.reorder:
            return list(starts)
        rows = [[start, *self._in_other_orders(start)[:2]] for start in starts]
        return [row[turn] for turn in range(3) for row in rows if turn < len(row)]

    def _in_other_orders(self, placement: Placement) -> list[Placement]:
        """A placement's devices and windows in every other order, the best first."""
        own = order_digest(placement)
        others = [each for each in self._in_all_orders(placement) if order_digest(each) != own]
        return sorted(others, key=self._cost)

    def _in_all_orders(self, placement: Placement) -> list[Placement]:
        """A placement's devices and windows in every order there is."""
        orders = all_orders(self.problem, self.problem.check(placement).device)
        return [replace(other, prefetch_bytes=placement.prefetch_bytes) for other in orders]

    def _affordable(self, chains: int) -> int:
        """The most chains for which the budget lasts a few rounds."""
        batches = self.heat.batches
        trials = self.evaluate.simulations_left
        if not isinf(trials):
            chains = min(chains, int(trials / (16 * 2 * batches)))
        if not isinf(self.evaluate.seconds_left):
            each = 45e-9 * self.problem.graph.num_ops * batches / self.threads
            chains = min(chains, int(self.evaluate.seconds_left / (3 * each)))
        return max(1, chains)

    def _chain(self, slot: int, start: Placement, number: int, tie: str = "") -> OrderedChain:
        """A new chain for a slot, which begins with the devices and the order of a placement."""
        tie = tie or self._tie_of(start)
        units = units_of(self.problem, tie)
        annealer = self._annealer(slot, tie, start)
        seed = (self._seed * 1_000_003 + slot * 1009 + number) & (2**63 - 1)
        state = annealer.chain(units.unit_devices(start.device), seed)
        return OrderedChain(tie, units, annealer.example, state)

    def _tie_of(self, placement: Placement) -> str:
        """The largest units that the placement keeps together."""
        for tie in (GROUPS, *TIES) if self.heat.groups and may_group(self.problem) else TIES:
            units = units_of(self.problem, tie)
            if (units.devices(units.unit_devices(placement.device)) == placement.device).all():
                return tie
        raise AssertionError("a placement keeps groups together")

    def _annealer(self, slot: int, tie: str, example: Placement) -> Annealer:
        """The annealer of a slot, made anew where the units or the order changed."""
        key = f"{tie} {replace(example, device=np.zeros_like(example.device)).digest}"
        kept = self._annealers.get(slot)
        if kept is None or kept[0] != key:
            names = self.problem.cluster.device_names
            graph = self.problem.graph.digest
            example = replace(example, devices=names, graph=graph)
            annealer = Annealer(self.problem, units_of(self.problem, tie), example)
            kept = self._annealers[slot] = (key, annealer)
        return kept[1]

    def _round(self, chains: list[OrderedChain], number: int) -> list[OrderedChain]:
        """Anneal every chain for one round; returns them as they stand after it."""
        state = self.evaluate.round(lambda: self._anneal(chains, number))
        return unpacked(self.problem, state, [chain.tie for chain in chains])

    def _anneal(self, chains: list[OrderedChain], number: int) -> Round:
        """Anneal the chains in threads, then look for better orders."""
        annealers = [
            self._annealer(slot, chain.tie, chain.example) for slot, chain in enumerate(chains)
        ]
        lengths = [self._length(annealer, number, len(chains)) for annealer in annealers]

        def run(slot: int) -> int:
            hot = self.heat.hot if number < 2 or (slot > 0 and number % 2) else self.heat.warm
            if lengths[slot] == 0:
                return 0
            return annealers[slot].run(chains[slot].state, lengths[slot], hot, self.heat.cold)

        with ThreadPoolExecutor(self.threads) as pool:
            spent = sum(pool.map(run, range(len(chains))))
        done = []
        for chain in chains:
            better, simulations = self._reorder(chain, len(chains))
            done.append(better)
            spent += simulations
        best = min(done, key=lambda chain: chain.cost)
        others = partial(self._others, done, number)
        return Round([best.best], max(1, spent), packed(done), others)

    def _others(self, chains: list[OrderedChain], number: int) -> Iterator[Placement]:
        """Placements about as good as the best, for searches that run them.

        The best of each chain, where each is now, that in other orders, and what is near the best.
        """
        ranked = sorted(chains, key=lambda chain: chain.cost)
        yield from (chain.best for chain in ranked)
        yield from (chain.now for chain in ranked)
        for chain in ranked:
            yield from sorted(self._in_all_orders(chain.now), key=self._cost)
        yield from sorted(self._near(ranked[0], number), key=self._cost)

    def _near(self, chain: OrderedChain, number: int) -> Iterator[Placement]:
        """The best of a chain with some units in a row moved; other draws in every round."""
        units = chain.units
        rng = np.random.default_rng([self._seed, number])
        best = np.array(chain.state.best)
        for _ in range(_NEAR):
            moved = best.copy()
            first = int(rng.integers(len(best)))
            device = int(rng.choice(np.flatnonzero(units.allowed[first])))
            row = np.arange(first, min(len(best), first + 2 ** int(rng.integers(6))))
            row = row[units.allowed[row, device]]
            moved[row] = device
            yield chain.placement(moved)

    def _length(self, annealer: Annealer, number: int, count: int) -> int:
        """Batches of one chain in this round."""
        planned = self.heat.batches * 2 ** min(number, 4)
        if annealer.batch == 1:
            planned *= 2
        most = max(8, int(_MOST_SECONDS / (count * annealer.seconds_per_batch)))
        if not isinf(self.evaluate.seconds_left):
            share = self.evaluate.seconds_left * min(self.threads, count) / count
            each = max(annealer.measured, annealer.seconds_per_batch)
            most = min(most, max(1, int(share / each)))
        if not isinf(self.evaluate.simulations_left):
            left = self.evaluate.simulations_left / count - _REORDERS
            most = min(most, int(left / annealer.batch))
        return int(max(0, min(planned, most)))

    def _reorder(self, chain: OrderedChain, count: int) -> tuple[OrderedChain, int]:
        """One of so many chains in the best order for its best devices; and simulations spent."""
        if not self.heat.reorder or self.evaluate.simulations_left < _REORDERS * count:
            return chain, 0
        now = chain.best
        candidates = self._in_all_orders(now)
        # Memory for fetched parameters is missing elsewhere, or the other way round.
        if np.any(now.prefetch_bytes):
            sizes = [_scaled(now.prefetch_bytes, share) for share in _WINDOWS]
            candidates += [replace(now, prefetch_bytes=size) for size in sizes]
        for placement in candidates:
            cost = self._cost(placement)
            if cost < chain.cost:
                chain = chain.reordered(placement, cost)
        return chain, len(candidates)


def _scaled(window: Array | int, share: float) -> Array:
    return np.asarray(np.asarray(window) * share).astype(np.int64)
