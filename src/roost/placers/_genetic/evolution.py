"""A genetic algorithm over biased random keys, compiled.

Each individual is a row of keys from 0 to 1: the first are devices of units, the others their
urgency. Children take whole blocks from one of two parents, the better one likelier, so that layers
stay together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.placers._genetic.any_order import order_of, push_in_order
from roost.placers._shared.compiled_random import below, uniform
from roost.simulator.kernels.base import ONE, ZERO, bare, compiled


class Decoding(NamedTuple):
    """The meaning of keys: the devices and urgencies that they stand for."""

    unit_of: Array  # [positions] i4
    home_of: Array  # [parameters] i4 unit
    urgency: Array  # [positions] f8 of the common order, which keys shift
    spread: float  # how far a key shifts an op, either way
    capacity: Array  # [devices] i8 bytes


class Individual(NamedTuple):
    """Room for one individual as the simulator reads it."""

    placed: Array  # [units] i4
    device: Array  # [positions] u4
    urgency: Array  # [positions] f8
    held: Array  # [64] i8 bytes of parameters on each device
    peak: Array  # [64] i8 bytes
    order: Array  # [positions] i8
    turn_of: Array  # [positions] i8 when each is dispatched
    ready: Array  # [positions] f8 zero between uses, as is the next one
    dying: Array  # [positions] i8


class Brood(NamedTuple):
    """All individuals of a generation, sorted by excess of memory and then step time."""

    keys: Array  # [individuals, 2 * units] f8
    steps: Array  # [individuals] f8 seconds
    excesses: Array  # [individuals] f8 memory beyond the capacities, as shares of them
    state: Array  # [1] u8 of the chance


class Breeding(NamedTuple):
    """The rules by which a generation follows from the one before."""

    num_elite: int  # individuals that live on
    num_mutants: int  # individuals that are scrambled anew
    bias: float  # chance of taking a block from the better parent
    mutation: float  # chance of a key of its own


def new_individual(num_units: int, num_positions: int) -> Individual:
    """Empty room for an individual."""
    return Individual(
        placed=np.zeros(num_units, np.int32),
        device=np.zeros(num_positions, np.uint32),
        urgency=np.zeros(num_positions),
        held=np.zeros(64, np.int64),
        peak=np.zeros(64, np.int64),
        order=np.zeros(num_positions, np.int64),
        turn_of=np.zeros(num_positions, np.int64),
        ready=np.zeros(num_positions),
        dying=np.zeros(num_positions, np.int64),
    )


@compiled
def evolve(layout, space, decoding, individual, brood, breeding, generations):
    """Let a brood evolve for so many generations; returns the number of simulations."""
    keys = brood.keys
    state = brood.state
    count = len(keys)
    children = np.empty_like(keys)
    simulations = 0
    for _ in range(generations):
        for number in range(breeding.num_elite, count):
            child = children[number]
            if number >= count - breeding.num_mutants:
                child[:] = keys[below(state, breeding.num_elite)]
                _scramble(space, child, state)
            else:
                better = below(state, breeding.num_elite)
                worse = below(state, count)
                _cross(space, keys[better], keys[worse], child, breeding, state)
        for number in range(breeding.num_elite, count):
            keys[number] = children[number]
            brood.steps[number], brood.excesses[number] = judge(
                layout, space, decoding, individual, keys[number]
            )
            simulations += 1
        _sort(brood, children)
    return simulations


@compiled
def judge(layout, space, decoding, individual, keys):
    """The step time and the excess of memory of one individual."""
    decode(layout, space, decoding, individual, keys)
    order_of(layout, individual.urgency, individual.order)
    for turn in range(len(individual.order)):
        individual.turn_of[individual.order[turn]] = turn
    step = push_in_order(
        layout, individual.order, individual.turn_of, individual.device, individual.ready,
        individual.dying, individual.held, individual.peak,
    )  # fmt: skip
    excess = 0.0
    for d in range(len(decoding.capacity)):
        beyond = individual.peak[d] - decoding.capacity[d]
        if beyond > 0:
            excess += beyond / np.float64(decoding.capacity[d] + 1)
    return step, excess


@compiled
def decode(layout, space, decoding, individual, keys):
    """Write the devices, urgencies and resident bytes of one individual."""
    num_units = space.num_units
    placed = individual.placed
    for unit in range(num_units):
        placed[unit] = device_of(space.allowed[unit], keys[unit], space.num_devices)
    for op in range(len(individual.device)):
        unit = decoding.unit_of[op]
        individual.device[op] = placed[unit]
        shift = decoding.spread * (2.0 * keys[num_units + unit] - 1.0)
        individual.urgency[op] = decoding.urgency[op] + shift
    for d in range(space.num_devices):
        individual.held[d] = 0
    for parameter in range(len(decoding.home_of)):
        home = placed[decoding.home_of[parameter]]
        individual.held[home] += layout.parameter_bytes[parameter]


@bare
def device_of(allowed, key, num_devices):
    """The device that a key stands for, among those allowed."""
    count = 0
    for d in range(num_devices):
        if (allowed >> np.uint64(d)) & ONE != ZERO:
            count += 1
    wanted = min(np.int64(key * count), count - 1)
    for d in range(num_devices):
        if (allowed >> np.uint64(d)) & ONE != ZERO:
            if wanted == 0:
                return d
            wanted -= 1
    return 0


@bare
def _scramble(space, child, state):
    """Put a window of units on one device, each with an urgency of its own."""
    first = below(state, space.num_units)
    length = 1 + below(state, max(2, space.num_units // 8))
    device_key = uniform(state)
    for unit in range(first, min(space.num_units, first + length)):
        child[unit] = device_key
        child[space.num_units + unit] = uniform(state)


@bare
def _cross(space, better, worse, child, breeding, state):
    """Take the blocks of one row from either parent; here and there a key is new."""
    last_row = len(space.row_start) - 2
    row = last_row if uniform(state) < 0.5 else 0
    num_units = space.num_units
    for number in range(space.row_start[row], space.row_start[row + 1]):
        block = space.row_block[number]
        for genes in range(2):
            from_better = uniform(state) < breeding.bias
            for member in range(space.block_start[block], space.block_start[block + 1]):
                gene = space.block_unit[member] + genes * num_units
                child[gene] = better[gene] if from_better else worse[gene]
                if uniform(state) < breeding.mutation:
                    child[gene] = uniform(state)


@compiled
def _sort(brood, room):
    """Sort by excess of memory, then step time."""
    order = np.argsort(brood.steps, kind="mergesort")
    order = order[np.argsort(brood.excesses[order], kind="mergesort")]
    for number in range(len(order)):
        room[number] = brood.keys[order[number]]
    brood.keys[:] = room
    brood.steps[:] = brood.steps[order]
    brood.excesses[:] = brood.excesses[order]
