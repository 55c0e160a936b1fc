"""List scheduling by the network of `lister` (compiled): a unit goes where the network draws it.

Ops are visited in dispatch order, as by linear rules. The loop records what each decision was made
from, so gradients of many schedules need no second pass over the graph.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.placers._lister.device_features import (
    DEVICE_FEATURES,
    possible_devices,
    write_features,
)
from roost.placers._listing.held_memory import consumers_of, inputs_of
from roost.placers._listing.partial_schedule import (
    clear_schedule,
    is_in,
    new_schedule,
    place_rest,
    place_unit,
    run_op,
)
from roost.placers._shared.compiled_random import uniform
from roost.simulator.kernels.base import ONE, ZERO, compiled, inlined
from roost.simulator.kernels.batch import run_batch

_NUM_FEATURES = np.uintp(len(DEVICE_FEATURES))


class NetworkWeights(NamedTuple):
    """Weights of the network for one problem, float32."""

    base: Array  # [units, hidden] the first layer's sums of unit features
    seen: Array  # [features, hidden]
    context: Array  # [hidden, hidden]
    inner: Array  # [hidden, hidden]
    inner_bias: Array  # [hidden]
    out: Array  # [hidden]
    skip: Array  # [features] a linear rule beside the network


class SamplingSettings(NamedTuple):
    """Settings of many schedules, a row for each."""

    tilt: Array  # [schedules, features] f4 added to the linear rule of the whole schedule
    heat: Array  # [schedules] f8 temperature; 0: always the highest score
    state: Array  # [schedules, 1] u8 of the random numbers
    given: Array  # [schedules, units] i4 device of each unit, or -1 where the network decides


class DecisionRecord(NamedTuple):
    """Decisions of schedules, in order; all arrays are empty where nothing is recorded."""

    seen: Array  # [schedules, units, devices, features] f4
    mask: Array  # [schedules, units] u8 a bit for each device it could go to
    unit: Array  # [schedules, units] i4 in the order of the decisions, or -1
    choice: Array  # [schedules, units] i4
    log_prob: Array  # [schedules, units] f8


class _Scratch(NamedTuple):
    """Arrays of one decision."""

    seen: Array  # [devices, features] f4
    first: Array  # [devices, hidden] f4
    middle: Array  # [hidden] f4
    context: Array  # [hidden] f4
    scores: Array  # [devices] f8
    placed: Array  # [devices] i8 units placed so far


@inlined
def add_row(sums, factor, row):
    """Add a multiple of a row of weights, unless the factor is 0."""
    if factor != np.float32(0.0):
        for h in range(np.uintp(len(sums))):
            sums[h] += factor * row[h]


@inlined
def score_devices(network, unit, mask, tilt, scratch):
    """Write the score of each device of the mask."""
    seen = scratch.seen
    first = scratch.first
    middle = scratch.middle
    context = scratch.context
    num_devices = np.uintp(len(scratch.scores))
    hidden = np.uintp(len(network.out))
    count = np.float32(0.0)
    middle[:] = np.float32(0.0)
    for d in range(num_devices):
        if not is_in(mask, d):
            continue
        count += np.float32(1.0)
        for h in range(hidden):
            first[d, h] = network.base[unit, h]
        for f in range(_NUM_FEATURES):
            add_row(first[d], seen[d, f], network.seen[f])
        for h in range(hidden):
            first[d, h] = max(first[d, h], np.float32(0.0))
            middle[h] += first[d, h]
    for h in range(hidden):
        context[h] = network.inner_bias[h]
    for k in range(hidden):
        add_row(context, middle[k] / count, network.context[k])
    for d in range(num_devices):
        if not is_in(mask, d):
            continue
        for h in range(hidden):
            middle[h] = context[h]
        for k in range(hidden):
            add_row(middle, first[d, k], network.inner[k])
        score = np.float32(0.0)
        for h in range(hidden):
            score += max(middle[h], np.float32(0.0)) * network.out[h]
        for f in range(_NUM_FEATURES):
            score += seen[d, f] * (network.skip[f] + tilt[f])
        scratch.scores[d] = np.float64(score)


@inlined
def draw_device(mask, scores, heat, state):
    """A device of the mask, drawn by its score."""
    num_devices = np.uintp(len(scores))
    best = np.uintp(0)
    highest = -np.inf
    for d in range(num_devices):
        if is_in(mask, d) and scores[d] > highest:
            best = d
            highest = scores[d]
    if heat <= 0.0:
        return best
    total = sum_of_odds(mask, scores, heat, highest)
    left = uniform(state) * total
    for d in range(num_devices):
        if is_in(mask, d):
            left -= np.exp((scores[d] - highest) / heat)
            if left < 0.0:
                return d
    return best


@inlined
def sum_of_odds(mask, scores, heat, reference):
    """The sum over the devices of the mask of how much likelier each is than a score."""
    total = 0.0
    for d in range(np.uintp(len(scores))):
        if is_in(mask, d):
            total += np.exp((scores[d] - reference) / heat)
    return total


@inlined
def log_prob_of(mask, scores, heat, choice):
    """The logarithm of the probability of a device at a temperature; 0 if it is certain."""
    if heat <= 0.0:
        return 0.0
    return -np.log(sum_of_odds(mask, scores, heat, scores[choice]))


@inlined
def given_device(constants, mask, given):
    """The given device if it is in the mask, or else a twin of it that is; -1 if there is none."""
    if given < 0:
        return np.int64(-1)
    if is_in(mask, given):
        return np.int64(given)
    for d in range(np.uintp(len(constants.alike))):
        if constants.alike[d] == constants.alike[given] and is_in(mask, d):
            return np.int64(d)
    return np.int64(-1)


@compiled
def schedule_by_network(
    layout,
    listing,
    constants,
    network,
    settings,
    row,
    capacity,
    schedule,
    count_memory,
    scratch,
    record,
):
    """Write one schedule."""
    clear_schedule(schedule)
    seen = scratch.seen
    scores = scratch.scores
    placed = scratch.placed
    heat = settings.heat[row]
    placed[:] = 0
    previous = np.int64(-1)
    number = np.uintp(0)
    recording = len(record.unit) > 0
    for op in range(np.uintp(len(layout.op))):
        unit = np.uintp(listing.unit[op])
        d = np.uintp(max(schedule.unit_device[unit], 0))
        if schedule.unit_device[unit] < 0:
            mask = possible_devices(
                layout, listing, constants, capacity, schedule, unit, count_memory, placed, seen
            )
            write_features(
                layout,
                listing,
                constants,
                capacity,
                schedule,
                op,
                unit,
                previous,
                placed,
                mask,
                seen,
            )
            score_devices(network, unit, mask, settings.tilt[row], scratch)
            fixed = given_device(constants, mask, settings.given[row, unit])
            if fixed >= 0:
                d = np.uintp(fixed)
            else:
                d = draw_device(mask, scores, heat, settings.state[row])
            if recording:
                record.seen[row, number] = seen
                record.mask[row, number] = mask
                record.unit[row, number] = unit
                record.choice[row, number] = d
                record.log_prob[row, number] = log_prob_of(mask, scores, heat, d)
                number += np.uintp(1)
            place_unit(layout, listing, schedule, unit, d, True, count_memory)
            placed[d] += 1
            previous = np.int64(d)
        run_op(layout, schedule, op, d)
    place_rest(layout, listing, schedule, capacity)


@compiled
def longest_paths(layout, time, transfer, head, tail):
    """Write the longest paths from the start to each op, and from each op, with it, to the end."""
    num_ops = np.uintp(len(time))
    for op in range(num_ops):
        head[op] = 0.0
        for edge in inputs_of(layout, op):
            source = layout.previous[edge]
            head[op] = max(head[op], head[source] + time[source] + transfer[source])
    for number in range(num_ops):
        op = num_ops - ONE - number
        tail[op] = time[op]
        for edge in consumers_of(layout, op):
            tail[op] = max(tail[op], time[op] + transfer[op] + tail[layout.next[edge]])


@compiled
def write_windows(constants, device, window):
    """Write the bytes of parameters that each device fetches from elsewhere, each counted once."""
    window[:] = 0
    last = np.int64(-1)
    fetched = ZERO
    for number in range(len(constants.reads)):
        parameter = constants.reads[number, 0]
        reader = constants.reads[number, 1]
        if parameter != last:
            fetched = ZERO
            last = parameter
        d = device[reader]
        if d != device[parameter] and not is_in(fetched, d):
            fetched |= ONE << np.uint64(d)
            window[d] += constants.size[parameter]


@compiled
def run_network(
    layout,
    listing,
    constants,
    network,
    settings,
    memory,
    scales,
    count_memory,
    record,
    unit_device,
    step_time,
    excess,
):
    """Make a schedule for each row of the settings, and simulate its placement.

    Memory [devices] bytes is scaled by each of `scales` in turn until the placement fits. Writes
    unit_device [schedules, units], the step time [schedules] and the bytes over memory [schedules].
    Returns the number of placements simulated. The last attempt is recorded.
    """
    num_devices = layout.num_devices
    hidden = len(network.out)
    simulations = 0
    schedule = new_schedule(layout, listing)
    scratch = _Scratch(
        np.zeros((num_devices, len(DEVICE_FEATURES)), np.float32),
        np.zeros((num_devices, hidden), np.float32),
        np.zeros(hidden, np.float32),
        np.zeros(hidden, np.float32),
        np.zeros(num_devices),
        np.zeros(num_devices, np.int64),
    )
    capacity = np.zeros(num_devices)
    window = np.zeros(num_devices, np.int64)
    device = np.zeros((1, len(constants.op_unit)), np.int32)
    step = np.zeros(1)
    peak = np.zeros((1, num_devices), np.int64)
    moved = np.zeros(1, np.int64)
    for row in range(len(settings.heat)):
        for number in range(len(scales)):
            for d in range(num_devices):
                capacity[d] = max(1.0, np.float64(memory[d]) * scales[number])
            schedule_by_network(
                layout,
                listing,
                constants,
                network,
                settings,
                row,
                capacity,
                schedule,
                count_memory,
                scratch,
                record,
            )
            for op in range(len(constants.op_unit)):
                device[0, op] = schedule.unit_device[constants.op_unit[op]]
            write_windows(constants, device[0], window)
            run_batch(layout, device, window, False, constants.shared, True, step, peak, moved)
            simulations += 1
            over = 0.0
            for d in range(num_devices):
                over += max(0.0, np.float64(peak[0, d] - memory[d]))
            if number == 0 or over < excess[row]:
                unit_device[row] = schedule.unit_device
                step_time[row] = step[0]
                excess[row] = over
            if over == 0.0:
                break
    return simulations
