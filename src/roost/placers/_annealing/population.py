"""Several annealing chains at once: many short ones first, the best of them for longer, then
reheated to the end.

Each chain has devices and an order. One that begins with whole groups in one place (`_groups.py`)
moves groups, until it is among the last two: on deep models that leads further in a short time.
After every round the devices are tried in other orders too, some of them made for these devices by
list scheduling, and the chain goes on in the best. Rounds have lengths that do not depend on the
clock, so the same seed takes the same way; the budget only says where it ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import isinf

import numpy as np

from roost.core.arrays import Array, digest
from roost.core.placement import ORDERS, Placement
from roost.core.problem import Problem
from roost.placers import Evaluate, Round
from roost.placers._annealing.annealer import Annealer, Chain
from roost.placers._annealing.move_space import space_of
from roost.placers._annealing.proposals import Space
from roost.placers._annealing.sixteen_moves import BEST_EXCESS, BEST_STEP, STEP
from roost.placers._shared.groups import groups_of, may_group
from roost.placers._shared.orders import all_orders
from roost.placers._shared.units import Units
from roost.simulator.compiled import Simulator

_MOST_SECONDS = 1.6  # that all chains together may take in one round, about
_FEW = 64  # trials: not worth another round
# Simulations at most, beside its batches, for a chain in a round: five orders, four windows, the
# start.
_REORDERS = 10
_NEAR = 32  # placements near the best that are looked at, where that was run before
_TIES = ("readers", "updates", "nothing")
_GROUPS = "groups"
_NAMES = (*_TIES, _GROUPS)


@dataclass(frozen=True)
class Heat:
    """How a population is annealed."""

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
        self.problem, self.evaluate, self.heat = problem, evaluate, heat
        self.threads = threads or len(os.sched_getaffinity(0))
        self._units: dict[str, tuple[Units, Space]] = {}
        self._annealers: dict[int, tuple[str, Annealer]] = {}
        self._seed = int(evaluate.rng.integers(2**31))

    def units(self, tie: str) -> tuple[Units, Space]:
        if tie not in self._units:
            units = groups_of(self.problem) if tie == _GROUPS else Units.of(self.problem, tie)
            self._units[tie] = (units, space_of(units))
        return self._units[tie]

    def run(self, starts: Sequence[Placement]) -> None:
        """Anneal until the budget is spent, from these starts, the most promising first."""
        starts = self._mixed(starts)
        both = len({self._tie_of(start) == _GROUPS for start in starts[:2]}) == 2
        count = max(self._affordable(self.heat.members), min(self.heat.members, 1 + both))
        waiting = self._spread(starts[:count]) + list(starts[count:])
        members = [
            self._member(slot, waiting.pop(0), 0) for slot in range(min(count, len(waiting)))
        ]
        number = 0
        while True:
            members = self._round(members, number)
            members.sort(key=_merit)
            number += 1
            if len(members) > 2:
                members = members[: max(2, len(members) // 2)]
            else:
                members = [members[0], self._again(members[0], number)]
            left = self.evaluate
            if left.simulations_left < _FEW or left.trials_left < 1 or left.seconds_left <= 0:
                return

    def _mixed(self, starts: Sequence[Placement]) -> list[Placement]:
        """In turn one that keeps groups together and one that does not, each the best that is
        left."""
        kinds: tuple[list[Placement], list[Placement]] = ([], [])
        for start in starts:
            kinds[self._tie_of(start) == _GROUPS].append(start)
        turn = int(bool(kinds[1]) and starts[0] is kinds[1][0])
        pairs = zip_longest(kinds[turn], kinds[1 - turn])
        return [start for pair in pairs for start in pair if start is not None]

    def _again(self, best: Member, number: int) -> Member:
        """The best once more, from where it is best: hotter, and in turn in one of the orders that
        it is not in.

        One that moves groups goes on op by op.
        """
        chain = _copy(best.chain, self._seed + number)
        if best.tie == _GROUPS:
            device = self.units(_GROUPS)[0].devices(chain.best)
            return self._member(1, replace(best.example, device=device), number, _TIES[0])
        if number % 2 == 0 or not self.heat.reorder:
            return replace(best, chain=chain)
        units, _ = self.units(best.tie)
        now = replace(best.example, device=units.devices(chain.best))
        others = [p for p in self._in_all_orders(now) if _order_of(p) != _order_of(now)]
        others.sort(key=self._cost)
        return self._member(1, others[number // 2 % min(3, len(others))], number)

    def _spread(self, starts: Sequence[Placement]) -> list[Placement]:
        """The starts, then each of them in the best of the orders that it is not in, then in the
        next best."""
        if not self.heat.reorder:
            return list(starts)
        rows: list[list[Placement]] = []
        for start in starts:
            others = [p for p in self._in_all_orders(start) if _order_of(p) != _order_of(start)]
            costs = [self._cost(placement) for placement in others]
            rows.append(
                [start, *(others[n] for n in sorted(range(len(others)), key=costs.__getitem__)[:2])]
            )
        return [row[turn] for turn in range(3) for row in rows if turn < len(row)]

    def _in_all_orders(self, placement: Placement) -> list[Placement]:
        """The same devices and windows in every order there is."""
        device = self.problem.check(placement).device
        orders = all_orders(self.problem, device)
        return [replace(other, prefetch_bytes=placement.prefetch_bytes) for other in orders]

    def _cost(self, placement: Placement) -> tuple[float, float]:
        """Memory beyond the capacities, as shares of them, and step time."""
        timeline = Simulator.of(self.problem).simulate(placement)
        beyond = np.maximum(timeline.peak_memory - timeline.capacity, 0)
        return float((beyond / (timeline.capacity + 1.0)).sum()), timeline.step_time

    def _affordable(self, members: int) -> int:
        """So many members that the budget lasts for a few rounds."""
        batches, trials = self.heat.batches, self.evaluate.simulations_left
        if not isinf(trials):
            members = min(members, int(trials / (16 * 2 * batches)))
        if not isinf(self.evaluate.seconds_left):
            each = 45e-9 * self.problem.graph.num_ops * batches / self.threads
            members = min(members, int(self.evaluate.seconds_left / (3 * each)))
        return max(1, members)

    def _member(self, slot: int, start: Placement, number: int, tie: str = "") -> Member:
        tie = tie or self._tie_of(start)
        units, _ = self.units(tie)
        annealer = self._annealer(slot, tie, start)
        seed = (self._seed * 1_000_003 + slot * 1009 + number) & (2**63 - 1)
        return Member(tie, annealer.example, annealer.chain(units.unit_devices(start.device), seed))

    def _tie_of(self, placement: Placement) -> str:
        """The largest units that the placement keeps together."""
        for tie in (_GROUPS, *_TIES) if self.heat.groups and may_group(self.problem) else _TIES:
            units, _ = self.units(tie)
            if (units.devices(units.unit_devices(placement.device)) == placement.device).all():
                return tie
        raise AssertionError("a placement keeps groups together")

    def _annealer(self, slot: int, tie: str, example: Placement) -> Annealer:
        key = f"{tie} {replace(example, device=np.zeros_like(example.device)).digest}"
        kept = self._annealers.get(slot)
        if kept is None or kept[0] != key:
            units, space = self.units(tie)
            example = replace(
                example, devices=self.problem.cluster.device_names, graph=self.problem.graph.digest
            )
            kept = self._annealers[slot] = (key, Annealer(self.problem, units, example, space))
        return kept[1]

    def _round(self, members: list[Member], number: int) -> list[Member]:
        """One round of every member, in threads; the members as they stand after it."""
        state = self.evaluate.round(lambda: self._anneal(members, number))
        return [_unpacked(self.problem, state, slot) for slot in range(int(state["members"]))]

    def _anneal(self, members: list[Member], number: int) -> Round:
        annealers = [
            self._annealer(slot, member.tie, member.example) for slot, member in enumerate(members)
        ]
        lengths = [self._length(annealer, number, len(members)) for annealer in annealers]

        def run(slot: int) -> int:
            hot = self.heat.hot if number < 2 or (slot > 0 and number % 2) else self.heat.warm
            if lengths[slot] == 0:
                return 0
            return annealers[slot].run(members[slot].chain, lengths[slot], hot, self.heat.cold)

        with ThreadPoolExecutor(self.threads) as pool:
            spent = sum(pool.map(run, range(len(members))))
        done = []
        for member in members:
            found, more = self._reorder(member, len(members))
            done.append(found)
            spent += more
        best = min(done, key=_merit)
        return Round(
            [self._best_of(best)], max(1, spent), _packed(done), lambda: self._others(done, number)
        )

    def _best_of(self, member: Member) -> Placement:
        units, _ = self.units(member.tie)
        return replace(member.example, device=units.devices(member.chain.best))

    def _others(self, members: list[Member], number: int) -> Iterator[Placement]:
        """What is about as good as the best: where each chain was best, where it is now, other
        orders, and near it."""
        ranked = sorted(members, key=_merit)
        yield from (self._best_of(member) for member in ranked)
        now = [
            replace(member.example, device=self.units(member.tie)[0].devices(member.chain.placed))
            for member in ranked
        ]
        yield from now
        for placement in now:
            yield from sorted(self._in_all_orders(placement), key=self._cost)
        yield from sorted(self._near(ranked[0], number), key=self._cost)

    def _near(self, member: Member, number: int) -> Iterator[Placement]:
        """Where a chain was best, with some units in a row on another device: another draw in every
        round."""
        units, rng = self.units(member.tie)[0], np.random.default_rng([self._seed, number])
        best = np.array(member.chain.best)
        for _ in range(_NEAR):
            moved, first = best.copy(), int(rng.integers(len(best)))
            device = int(rng.choice(np.flatnonzero(units.allowed[first])))
            row = np.arange(first, min(len(best), first + 2 ** int(rng.integers(6))))
            row = row[units.allowed[row, device]]
            moved[row] = device
            yield replace(member.example, device=units.devices(moved))

    def _length(self, annealer: Annealer, number: int, count: int) -> int:
        """Batches of one chain in this round."""
        planned = self.heat.batches * 2 ** min(number, 4)
        if annealer.batch == 1:
            planned *= 2
        most = max(8, int(_MOST_SECONDS / (count * annealer.seconds_per_batch)))
        if not isinf(self.evaluate.seconds_left):
            share = self.evaluate.seconds_left * min(self.threads, count) / count
            most = min(
                most, max(1, int(share / max(annealer.measured, annealer.seconds_per_batch)))
            )
        if not isinf(self.evaluate.simulations_left):
            most = min(
                most, int((self.evaluate.simulations_left / count - _REORDERS) / annealer.batch)
            )
        return int(max(0, min(planned, most)))

    def _reorder(self, member: Member, count: int) -> tuple[Member, int]:
        """One of so many members in the best order for its best devices, and simulations spent on
        finding it."""
        if not self.heat.reorder or self.evaluate.simulations_left < _REORDERS * count:
            return member, 0
        units, _ = self.units(member.tie)
        now = replace(member.example, device=units.devices(member.chain.best))
        tried = self._in_all_orders(now)
        # Memory for fetched parameters is missing elsewhere, or the other way round.
        if np.any(now.prefetch_bytes):
            tried += [
                replace(now, prefetch_bytes=_scaled(now.prefetch_bytes, by))
                for by in (0.5, 0.8, 1.3, 2.0)
            ]
        figures = member.chain.figures
        best = (figures[BEST_EXCESS], figures[BEST_STEP])
        for placement in tried:
            cost = self._cost(placement)
            if cost < best:
                best = cost
                chain = replace(
                    member.chain, placed=member.chain.best.copy(), figures=figures.copy()
                )
                chain.figures[[BEST_EXCESS, BEST_STEP]] = cost
                chain.figures[STEP] = cost[1]
                member = Member(member.tie, placement, chain)
        return member, len(tried)


@dataclass(frozen=True, eq=False)
class Member:
    """One chain with the order it is in."""

    tie: str
    example: Placement  # its order and windows; the devices mean nothing
    chain: Chain


def _order_of(placement: Placement) -> str:
    """What tells orders apart."""
    return placement.order if placement.priority is None else digest([placement.priority])


def _scaled(window: Array | int, by: float) -> Array:
    return np.asarray(np.asarray(window) * by).astype(np.int64)


def _merit(member: Member) -> tuple[float, float]:
    return (member.chain.figures[BEST_EXCESS], member.chain.figures[BEST_STEP])


def _copy(chain: Chain, seed: int) -> Chain:
    """A chain that begins again at the best of another."""
    figures = chain.figures.copy()
    figures[STEP] = figures[BEST_STEP]
    state = np.array([chain.state[0] ^ np.uint64(seed * 2_654_435_761 + 1)], dtype=np.uint64)
    return Chain(chain.best.copy(), chain.best.copy(), figures, state)


def _packed(members: Sequence[Member]) -> dict[str, Array]:
    state: dict[str, Array] = {"members": np.array(len(members))}
    for slot, member in enumerate(members):
        chain, example = member.chain, member.example
        parts = {
            "placed": chain.placed,
            "best": chain.best,
            "figures": chain.figures,
            "state": chain.state,
            "kind": np.array([_NAMES.index(member.tie), ORDERS.index(example.order)]),
            "window": np.asarray(example.prefetch_bytes, dtype=np.int64),
        }
        if example.priority is not None:
            parts["priority"] = example.priority
        state |= {f"{slot}.{name}": np.array(value) for name, value in parts.items()}
    return state


def _unpacked(problem: Problem, state: Mapping[str, Array], slot: int) -> Member:
    tie, order = state[f"{slot}.kind"].tolist()
    window = state[f"{slot}.window"]
    example = Placement(
        np.zeros(problem.graph.num_ops, dtype=np.int32),
        ORDERS[order],
        priority=state.get(f"{slot}.priority"),
        prefetch_bytes=window if window.ndim else int(window),
        devices=problem.cluster.device_names,
        graph=problem.graph.digest,
    )
    chain = Chain(
        *(np.array(state[f"{slot}.{name}"]) for name in ("placed", "best", "figures", "state"))
    )
    return Member(_NAMES[tie], example, chain)
