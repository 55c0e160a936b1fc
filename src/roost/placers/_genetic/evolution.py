"""A genetic algorithm over biased random keys, compiled: each individual is a row of keys from 0 to
1.

The first keys are devices of units, the others their urgency. Children take whole blocks from one
of two parents, the better one likelier, so that layers stay together.
"""

from __future__ import annotations

import numpy as np

from roost.placers._genetic.any_order import order_of, push_in_order
from roost.placers._shared.compiled_random import below, uniform
from roost.simulator.kernels.base import ONE, ZERO, bare, compiled


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


@compiled
def decode(layout, space, keys, unit_of, home_of, base, spread, placed, device, urgency, held):
    """Devices, urgencies and resident bytes of one individual.

    `unit_of` [positions] and `home_of` [parameters] are units. An op's urgency is that of `base`
    [positions], moved by its unit's key by up to `spread` either way.
    """
    num_units = space.num_units
    for unit in range(num_units):
        placed[unit] = device_of(space.allowed[unit], keys[unit], space.num_devices)
    for op in range(len(device)):
        unit = unit_of[op]
        device[op] = placed[unit]
        urgency[op] = base[op] + spread * (2.0 * keys[num_units + unit] - 1.0)
    for d in range(space.num_devices):
        held[d] = 0
    for parameter in range(len(home_of)):
        held[placed[home_of[parameter]]] += layout.parameter_bytes[parameter]


@compiled
def judge(layout, space, keys, unit_of, home_of, base, spread, capacity, room):
    """The step time and the excess of memory of one individual."""
    placed, device, urgency, held, peak, order, turn_of, ready, dying = room
    decode(layout, space, keys, unit_of, home_of, base, spread, placed, device, urgency, held)
    order_of(layout, urgency, order)
    for turn in range(len(order)):
        turn_of[order[turn]] = turn
    step = push_in_order(layout, order, turn_of, device, ready, dying, held, peak)
    excess = 0.0
    for d in range(len(capacity)):
        if peak[d] > capacity[d]:
            excess += (peak[d] - capacity[d]) / np.float64(capacity[d] + 1)
    return step, excess


@bare
def _cross(space, better, worse, child, bias, mutation, state):
    """Blocks of one line from either parent; here and there a key is new."""
    last_row = len(space.row_start) - 2
    row = last_row if uniform(state) < 0.5 else 0
    num_units = space.num_units
    for number in range(space.row_start[row], space.row_start[row + 1]):
        block = space.row_block[number]
        for genes in range(2):
            from_better = uniform(state) < bias
            for member in range(space.block_start[block], space.block_start[block + 1]):
                gene = space.block_unit[member] + genes * num_units
                child[gene] = better[gene] if from_better else worse[gene]
                if uniform(state) < mutation:
                    child[gene] = uniform(state)


@compiled
def evolve(
    layout, space, keys, steps, excesses, unit_of, home_of, base, spread, capacity, room,
    generations, num_elite, num_mutants, bias, mutation, state
):  # fmt: skip
    """Let a population [individuals, keys] evolve, sorted by merit; `steps` and `excesses`
    [individuals] are theirs.

    Returns simulations.
    """
    count = len(keys)
    children = np.empty_like(keys)
    simulations = 0
    for _ in range(generations):
        for number in range(num_elite, count):
            child = children[number]
            if number >= count - num_mutants:  # a window of an elite individual, scrambled
                child[:] = keys[below(state, num_elite)]
                first = below(state, space.num_units)
                length = 1 + below(state, max(2, space.num_units // 8))
                device_key = uniform(state)
                for unit in range(first, min(space.num_units, first + length)):
                    child[unit] = device_key
                    child[space.num_units + unit] = uniform(state)
            else:
                better, worse = below(state, num_elite), below(state, count)
                _cross(space, keys[better], keys[worse], child, bias, mutation, state)
        for number in range(num_elite, count):
            keys[number] = children[number]
            steps[number], excesses[number] = judge(
                layout, space, keys[number], unit_of, home_of, base, spread, capacity, room
            )
            simulations += 1
        _sort(keys, steps, excesses, children)
    return simulations


@compiled
def _sort(keys, steps, excesses, room):
    """By excess of memory, then step time."""
    order = np.argsort(steps, kind="mergesort")
    order = order[np.argsort(excesses[order], kind="mergesort")]
    for number in range(len(keys)):
        room[number] = keys[order[number]]
    keys[:] = room
    steps[:] = steps[order]
    excesses[:] = excesses[order]
