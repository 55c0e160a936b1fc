"""One chain of a population: its state, the order that it is in, and the units that it moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from roost.core.arrays import Array, digest, taken, taken_devices, wrong_array
from roost.core.placement import MOST_BYTES, ORDERS, Placement
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


def unpacked(
    problem: Problem, state: Mapping[str, Array], ties: Sequence[str]
) -> list[OrderedChain]:
    """The chains that `packed` wrote, of these kinds. Raises InputError for wrong ones."""
    taken(state, "chains", (), "i", least=len(ties), most=len(ties))
    return [_unpacked(problem, state, slot, tie) for slot, tie in enumerate(ties)]


def _unpacked(problem: Problem, state: Mapping[str, Array], slot: int, tie: str) -> OrderedChain:
    units, num_devices = units_of(problem, tie), problem.cluster.num_devices
    kind, order = taken(
        state, f"{slot}.kind", (2,), "i", least=0, most=max(len(_KINDS), len(ORDERS)) - 1
    ).tolist()
    if kind != _KINDS.index(tie):
        raise wrong_array(state, f"{slot}.kind", "is not that of the chain before")
    shape = (num_devices,) if np.ndim(state.get(f"{slot}.window", 0)) else ()
    window = taken(state, f"{slot}.window", shape, "i", least=0, most=MOST_BYTES)
    priority = None
    if ORDERS[order] == "priority":
        priority = taken(state, f"{slot}.priority", (problem.graph.num_ops,))
    example = problem.placement(
        np.zeros(problem.graph.num_ops, dtype=np.int32),
        ORDERS[order],
        priority,
        window if window.ndim else int(window),
    )
    figures = {
        name: np.array(taken(state, f"{slot}.{name}", (1,), least=0))
        for name in ("penalty", "best_step", "best_excess", "step")
    }
    own = ChainState(
        placed=taken_devices(state, f"{slot}.placed", units.allowed),
        best=taken_devices(state, f"{slot}.best", units.allowed),
        rng=np.array(taken(state, f"{slot}.rng", (1,), "u")),
        **figures,
    )
    return OrderedChain(tie, units, example, own)
