"""What `lister` decides about, and how its network is asked: units, schedules to roll, and
decisions to learn from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from roost.core.arrays import Array
from roost.core.problem import Problem
from roost.errors import InputError
from roost.placers._lister.compiled_network import SEEN, Network, Rolls
from roost.placers._lister.portable_rules import COLUMNS, Tried, are_valid, drawn
from roost.placers._lister.problem_view import KNOWN, Framed, Rolled
from roost.placers._listing.list_scheduler import ListScheduler
from roost.placers._shared.groups import merged_units
from roost.placers._shared.units import Units
from roost.policies.lister_weights import new_weights, weight_shapes
from roost.policies.weights import load_weights

if TYPE_CHECKING:
    from roost.policies.lister_network import Decisions

ORDERS = ("program", "rank")
NUM_SEEN, NUM_KNOWN = len(SEEN), len(KNOWN)
# Rules that a file of weights holds, and ways to draw: a tilt, a temperature and an order each.
PORTFOLIO = 64

_FIRST_RULE = {"finish_gap_ticks": -3.0, "outgoing_ticks": -1.0, "slower_in_all": -0.5}

_SHARE = 0.15  # how often a feature is in a tilt
_SCALES = (0.2, 4.0)  # how strong a tilt is, at least and at most
_HEATS = (0.0, 0.0, 0.3, 1.0)

# Beyond memory: the penalty as the logarithm of a factor on the step time, for any excess and for
# all memory once more.
_OVER, _OVER_SHARE, _MOST_OVER = 0.5, 20.0, 3.0
_FAILED = 5.0  # of what has no step time at all


def new_tensors(rng: np.random.Generator) -> dict[str, Array]:
    """A network that begins as a rule of earliest finish, random ways to draw from it, and random
    rules."""
    rule = np.zeros(NUM_SEEN)
    for name, weight in _FIRST_RULE.items():
        rule[SEEN.index(name)] = weight
    ways = {"ways": drawn_ways(rng, PORTFOLIO, len(ORDERS)), "rules": drawn(rng, PORTFOLIO)}
    return {**new_weights(rng, NUM_SEEN, NUM_KNOWN, rule), **ways}


def load(path: str) -> dict[str, Array]:
    """The weights in a file, checked."""
    ways = {"ways": (PORTFOLIO, NUM_SEEN + 2), "rules": (PORTFOLIO, len(COLUMNS))}
    tensors, _ = load_weights(path, "lister", {**weight_shapes(NUM_SEEN, NUM_KNOWN), **ways})
    try:
        checked_ways(tensors["ways"])
        if not are_valid(tensors["rules"]):
            raise InputError("tensor 'rules' has a setting that cannot be")
    except InputError as error:
        raise InputError(f"{path}: {error}; train them again") from None
    return tensors


def checked_ways(ways: Array) -> Array:  # [ways, seen + 2]
    heat, order = ways[:, NUM_SEEN], ways[:, -1]
    if not np.isin(order, np.arange(len(ORDERS))).all() or (heat < 0).any():
        raise InputError("tensor 'ways' has an order or a temperature that cannot be")
    return ways


def units_of(problem: Problem, most: int) -> Units:
    """The groups of a problem with their parameters, or at most about so many sets of them."""
    kept = vars(problem).setdefault("_listed_units", {})
    if most not in kept:
        kept[most] = _units_of(problem, most)
    found: Units = kept[most]
    return found


def _units_of(problem: Problem, most: int) -> Units:
    units = Units.of(problem)
    return units if units.num_units <= most else merged_units(units, most)


def framed(problem: Problem, most: int, orders: tuple[str, ...]) -> list[Framed]:
    """The problem under each of these orders; where memory is tight with updates as early as can
    be."""
    units = units_of(problem, most)
    found = [ListScheduler.of(units, order) for order in orders]
    if any(under.is_tight for under in found):
        found = [ListScheduler.of(units, order, eager=True) for order in orders]
    return [Framed.of(under) for under in found]


def network_of(tensors: Mapping[str, Array], under: Framed) -> Network:
    """The weights as the compiled loop reads them for one problem."""
    return Network(
        base=np.ascontiguousarray(under.known @ tensors["known"] + tensors["bias"]),
        **{name: np.ascontiguousarray(tensors[name]) for name in Network._fields if name != "base"},
    )


def rolls_of(rng: np.random.Generator, under: Framed, tilt: Array, heat: Array) -> Rolls:
    """Schedules to roll freely, one for each row."""
    count, num_units = len(heat), under.units.num_units
    nowhere = np.full((count, num_units), -1, np.int32)
    return Rolls(
        tilt=np.ascontiguousarray(tilt, dtype=np.float32),
        heat=np.ascontiguousarray(heat, dtype=np.float64),
        state=rng.integers(2**63, size=(count, 1)).astype(np.uint64),
        given=nowhere,
        hint=nowhere,
        scale=np.ones(count),
    )


def drawn_ways(rng: np.random.Generator, count: int, num_orders: int) -> Array:
    """[ways, seen + 2] random tilts, temperatures and orders; the first of each order is the
    network alone."""
    ways = np.zeros((count, NUM_SEEN + 2), np.float32)
    scale = np.exp(rng.uniform(np.log(_SCALES[0]), np.log(_SCALES[1]), (count, 1)))
    ways[:, :NUM_SEEN] = (
        (rng.random((count, NUM_SEEN)) < _SHARE) * rng.normal(0.0, 1.0, (count, NUM_SEEN)) * scale
    )
    ways[:, NUM_SEEN] = rng.choice(_HEATS, count)
    ways[:, NUM_SEEN + 1] = np.arange(count) % num_orders
    ways[:num_orders, : NUM_SEEN + 1] = 0.0
    return ways


def free_rolls(rng: np.random.Generator, under: Framed, count: int) -> Rolls:
    """Schedules to learn from: half of them as the network is, the others tilted."""
    tilt = drawn_ways(rng, count, 1)[:, :NUM_SEEN]
    tilt[: count // 2] = 0.0
    return rolls_of(rng, under, tilt, np.ones(count))


def cost_of(rolled: Rolled | Tried, problem: Problem) -> Array:  # [rolls]
    """The logarithm of the step time, and a penalty that grows with the bytes beyond memory."""
    step = np.maximum(rolled.step_time, 1e-12)
    room = max(1.0, float(problem.cluster.memory.sum()))
    over = np.minimum(_MOST_OVER, _OVER + _OVER_SHARE * rolled.excess / room)
    cost = np.log(step) + np.where(rolled.excess > 0, over, 0.0)
    broken = ~np.isfinite(cost)
    if broken.all():
        return np.zeros(len(cost))
    return np.where(broken, cost[~broken].max(initial=0.0) + _FAILED, cost)


def decisions_of(under: Framed, rolled: Rolled, rolls: Rolls, picked: Array) -> Decisions:
    """Recorded decisions as the network in PyTorch takes them: those picked [rolls, units] of
    `choices_in`."""
    import torch

    from roost.policies.lister_network import Decisions

    record, row = rolled.record, np.nonzero(picked)[0]
    heat = np.where(rolls.heat > 0, rolls.heat, 1.0).astype(np.float32)
    return Decisions(
        seen=torch.from_numpy(record.seen[picked]),
        known=torch.from_numpy(under.known[record.unit[picked]]),
        mask=torch.from_numpy(
            masks_of(record.mask[picked], under.units.problem.cluster.num_devices)
        ),
        choice=torch.from_numpy(record.choice[picked].astype(np.int64)),
        tilt=torch.from_numpy(rolls.tilt[row]),
        heat=torch.from_numpy(heat[row]),
        roll=torch.from_numpy(row),
    )


def masks_of(bits: Array, num_devices: int) -> Array:  # [..., devices] bool
    """Bits of devices, spread out."""
    return np.asarray(
        (bits[..., None] >> np.arange(num_devices, dtype=np.uint64)) & np.uint64(1) != 0
    )


def choices_in(rolled: Rolled) -> Array:  # [rolls, units] bool
    """The decisions in which there was a choice."""
    record = rolled.record
    several = (record.mask & (record.mask - np.uint64(1))) != 0
    return np.asarray((record.unit >= 0) & several)
