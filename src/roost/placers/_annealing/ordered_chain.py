"""One chain of a population: its state, the order that it is in, and the units that it moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from roost.core.arrays import Array, digest
from roost.core.placement import ORDERS, Placement
from roost.core.problem import Problem
from roost.placers._annealing.annealer import Cost
from roost.placers._annealing.state import ChainState
from roost.placers._shared.groups import groups_of
from roost.placers._shared.units import Units

# Kinds of units, by what parameters are joined with; groups are larger than any of them.
TIES = ("readers", "updates", "nothing")
GROUPS = "groups"
_KINDS = (*TIES, GROUPS)


def units_of(problem: Problem, tie: str) -> Units:
    """The units of one kind."""
    return groups_of(problem) if tie == GROUPS else Units.of(problem, tie)


@dataclass(frozen=True, eq=False)
class OrderedChain:
    """A chain, its kind of units, and the order and windows of an example placement."""

    tie: str
    units: Units
    example: Placement  # its devices mean nothing
    state: ChainState

    @property
    def cost(self) -> Cost:
        """The cost of its best placement."""
        return Cost(float(self.state.best_excess[0]), float(self.state.best_step[0]))

    @property
    def best(self) -> Placement:
        """Its best placement."""
        return self.placement(self.state.best)

    @property
    def now(self) -> Placement:
        """The placement that it has come to."""
        return self.placement(self.state.placed)

    def placement(self, unit_device: Array) -> Placement:
        """The placement with these devices [units]."""
        return replace(self.example, device=self.units.devices(unit_device))

    def again(self, seed: int) -> OrderedChain:
        """A chain that begins at the best placement of this one, with other chance."""
        state = ChainState(*(array.copy() for array in self.state))
        state.placed[:] = state.best
        state.step[:] = state.best_step
        state.rng[0] ^= np.uint64(seed * 2_654_435_761 + 1)
        return replace(self, state=state)

    def reordered(self, example: Placement, cost: Cost) -> OrderedChain:
        """A chain that begins at the best placement of this one, in the order of another."""
        state = self.state._replace(
            placed=self.state.best.copy(),
            best_step=np.array([cost.step_time]),
            best_excess=np.array([cost.excess]),
            step=np.array([cost.step_time]),
        )
        return replace(self, example=example, state=state)


def order_digest(placement: Placement) -> str:
    """The order of a placement, as a text that differs where orders differ."""
    return placement.order if placement.priority is None else digest([placement.priority])


def packed(chains: Sequence[OrderedChain]) -> dict[str, Array]:
    """Chains as the state of a round, for the journal."""
    state: dict[str, Array] = {"chains": np.array(len(chains))}
    for slot, chain in enumerate(chains):
        example = chain.example
        parts = chain.state._asdict()
        parts["kind"] = np.array([_KINDS.index(chain.tie), ORDERS.index(example.order)])
        parts["window"] = np.asarray(example.prefetch_bytes, dtype=np.int64)
        if example.priority is not None:
            parts["priority"] = example.priority
        state |= {f"{slot}.{name}": np.array(value) for name, value in parts.items()}
    return state


def unpacked(problem: Problem, state: Mapping[str, Array]) -> list[OrderedChain]:
    """The chains that `packed` wrote."""
    return [_unpacked(problem, state, slot) for slot in range(int(state["chains"]))]


def _unpacked(problem: Problem, state: Mapping[str, Array], slot: int) -> OrderedChain:
    kind, order = state[f"{slot}.kind"].tolist()
    window = state[f"{slot}.window"]
    example = problem.placement(
        np.zeros(problem.graph.num_ops, dtype=np.int32),
        ORDERS[order],
        state.get(f"{slot}.priority"),
        window if window.ndim else int(window),
    )
    own = ChainState(*(np.array(state[f"{slot}.{name}"]) for name in ChainState._fields))
    return OrderedChain(_KINDS[kind], units_of(problem, _KINDS[kind]), example, own)
