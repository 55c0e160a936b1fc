"""List scheduling by a small network: ops in dispatch order; a unit goes where the network says, or
where it is drawn.

The same desk as the linear rules have. What a decision was made from is written down, so that
gradients can be had for many schedules in one batch, without another pass over the graph.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.placers._listing.linear_rules import (
    KINDS,
    book,
    clear_desk,
    device_of,
    look,
    new_desk,
    rival_device,
    settle,
    settle_rest,
)
from roost.placers._listing.memory_room import peak_with
from roost.placers._shared.compiled_random import uniform
from roost.simulator.kernels.base import ONE, ZERO, compiled, inlined
from roost.simulator.kernels.batch import run_batch

# What the network sees of a device. Gaps are to the best device. Times are log(1 + 20 t / T), where
# T is the time of a step with perfect balance, or log(1 + t / tick), where a tick is the mean time
# of a unit.
SEEN = (
    "start_gap",
    "start_gap_ticks",
    "finish_gap",
    "finish_gap_ticks",
    "free_gap",
    "load_gap",
    "load",  # as a share of T, with this unit
    "inbound",
    "inbound_ticks",
    "outgoing_ticks",
    "absent",  # share of the input bytes that are not there
    "home",  # 1 where the biggest input was made
    "previous",  # 1 where the unit before went
    "module",  # 1 where the op before of the same module is
    "parent",  # the same for the module that this one is part of
    "role",  # the same for the op before of the same module, kind and phase
    "partner",  # 1 where what its output will meet is
    "partner_ticks",  # the transfer to it, elsewhere
    "rival",  # 1 where a more urgent op that comes soon is expected
    "memory",  # share in use, with this unit
    "lasting",  # share that is in use for long, with this unit
    "unit_memory",  # share that the parameters of this unit would take
    "slower",  # log of its seconds for the unit, over those of the fastest device
    "slower_in_all",  # the same for everything
    "used",  # 1 where something has been placed
    "units",  # share of the units placed so far
    "inputs",  # share of the inputs made there
    "readers",  # share of the readers of its inputs that are there
    "hint",  # 1 where a placement that is to be improved has it
    "hint_inputs",  # share of its neighbours that this placement has there
)
NUM_SEEN = np.uintp(len(SEEN))


class Frame(NamedTuple):
    """What does not change from one schedule of a problem to the next."""

    total: Array  # [devices] f8 seconds of everything
    least_total: float
    balance: float  # T, seconds
    tick: float  # seconds
    alike: Array  # [devices] i8 the first device that is just like it
    first_op: Array  # [units] i8 position of its first op, or -1
    shared: bool  # whether devices share a bus to send
    op_unit: Array  # [ops of the graph] i8
    # [reads, 2] i8 parameter and reader, as ops of the graph, where their units differ.
    reads: Array
    size: Array  # [ops of the graph] i8 bytes


class Network(NamedTuple):
    """Weights, float32. `base` is what the first layer makes of each unit without looking at
    devices."""

    base: Array  # [units, hidden]
    seen: Array  # [seen, hidden]
    context: Array  # [hidden, hidden]
    inner: Array  # [hidden, hidden]
    inner_bias: Array  # [hidden]
    out: Array  # [hidden]
    skip: Array  # [seen] a linear rule beside the network


class Rolls(NamedTuple):
    """How each schedule is to be made."""

    tilt: Array  # [rolls, seen] f4 added to the linear rule of the whole schedule
    heat: Array  # [rolls] f8 temperature; 0: always the highest score
    state: Array  # [rolls, 1] u8 of the chance
    given: Array  # [rolls, units] i4 where each unit goes, or -1 where the network decides
    hint: Array  # [rolls, units] i4 a placement to improve, or -1
    scale: Array  # [rolls] f8 of the memories


class Record(NamedTuple):
    """What was decided, a row for each decision; empty where nobody asked."""

    seen: Array  # [rolls, units, devices, seen] f4
    mask: Array  # [rolls, units] u8 a bit for each device it could go to
    unit: Array  # [rolls, units] i4 in the order of the decisions, or -1
    choice: Array  # [rolls, units] i4
    log_prob: Array  # [rolls, units] f8


@inlined
def see(
    layout, listing, frame, capacity, desk, op, unit, previous, count_memory, placed, hint, seen
):
    """Write what there is to see of each device; gives a bit for each that it may go to."""
    num_devices = np.uintp(layout.num_devices)
    home = look(layout, listing, desk, op)
    module = device_of(desk, listing.before[op * KINDS])
    parent = device_of(desk, listing.before[op * KINDS + np.uintp(1)])
    role = device_of(desk, listing.before[op * KINDS + np.uintp(2)])
    partner = device_of(desk, listing.partner[op])
    rival = rival_device(listing, desk, op)
    allowed = listing.allowed[unit]
    mask, best_over, nearest = ZERO, np.inf, np.uintp(0)
    start_min, finish_min, free_min, load_min, time_min = np.inf, np.inf, np.inf, np.inf, np.inf
    taken = ZERO  # devices of which an empty twin may be chosen
    for d in range(num_devices):
        if (allowed >> np.uint64(d)) & ONE == ZERO:
            continue
        most = room_with(layout, listing, desk, unit, d, capacity, count_memory)
        seen[d, 19] = np.float32(min(4.0, np.float64(most) / capacity[d]))
        if count_memory and np.float64(most) > capacity[d]:
            over = np.float64(most) - capacity[d]
            if over < best_over:
                best_over, nearest = over, d
        else:
            twin = ONE << np.uint64(frame.alike[d])
            if placed[d] > 0 or (taken & twin) == ZERO:
                mask |= ONE << np.uint64(d)
                if placed[d] == 0:
                    taken |= twin
    if mask == ZERO:
        mask = ONE << np.uint64(nearest)
    for d in range(num_devices):
        if (mask >> np.uint64(d)) & ONE == ZERO:
            continue
        start = max(desk.ready[d], desk.free[d])
        unit_time = listing.unit_time[unit * num_devices + d]
        start_min = min(start_min, start)
        finish_min = min(finish_min, start + layout.time[op * num_devices + d])
        free_min = min(free_min, desk.free[d])
        load_min = min(load_min, desk.load[d] + unit_time)
        time_min = min(time_min, unit_time)
    long, tick, decided = 20.0 / frame.balance, 1.0 / frame.tick, 0
    for d in range(num_devices):
        decided += placed[d]
    for d in range(num_devices):
        if (mask >> np.uint64(d)) & ONE == ZERO:
            seen[d, :] = np.float32(0.0)
            continue
        here = np.int64(d)
        start = max(desk.ready[d], desk.free[d])
        finish = start + layout.time[op * num_devices + d]
        unit_time = listing.unit_time[unit * num_devices + d]
        load = desk.load[d] + unit_time
        row = seen[d]
        row[0] = np.log1p((start - start_min) * long)
        row[1] = np.log1p((start - start_min) * tick)
        row[2] = np.log1p((finish - finish_min) * long)
        row[3] = np.log1p((finish - finish_min) * tick)
        row[4] = np.log1p((desk.free[d] - free_min) * long)
        row[5] = np.log1p((load - load_min) * long)
        row[6] = min(8.0, load / frame.balance)
        row[7] = np.log1p(desk.inbound[d] * long)
        row[8] = np.log1p(desk.inbound[d] * tick)
        row[9] = np.log1p(desk.outgoing[d] * tick)
        row[10] = desk.absent[d]
        row[11] = 1.0 if home == here else 0.0
        row[12] = 1.0 if previous == here else 0.0
        row[13] = 1.0 if module == here else 0.0
        row[14] = 1.0 if parent == here else 0.0
        row[15] = 1.0 if role == here else 0.0
        row[16] = 1.0 if partner == here else 0.0
        row[17] = (
            np.log1p(listing.partner_time[op] * tick) if partner >= 0 and partner != here else 0.0
        )
        row[18] = 1.0 if rival == here else 0.0
        row[20] = min(4.0, np.float64(desk.filled[d] + listing.lasting[unit]) / capacity[d])
        row[21] = min(4.0, np.float64(listing.resident[unit]) / capacity[d])
        row[22] = np.log((unit_time + 1e-3 * frame.tick) / (time_min + 1e-3 * frame.tick))
        row[23] = np.log(frame.total[d] / frame.least_total)
        row[24] = 1.0 if placed[d] > 0 else 0.0
        row[25] = np.float64(placed[d]) / max(1, decided)
        row[26] = 0.0
        row[27] = 0.0
        row[28] = 1.0 if hint[unit] == here else 0.0
        row[29] = 0.0
    neighbours(layout, listing, desk, op, hint, seen)
    return mask


@inlined
def room_with(layout, listing, desk, unit, d, capacity, count_memory):
    """The most bytes on a device with this unit; worked out only where a simple sum is too much."""
    most = desk.room.peak[d] + listing.need[unit]
    if count_memory and np.float64(most) > capacity[d]:
        most = peak_with(layout, listing, desk.room, unit, d, True, desk.extra)
    return most


@inlined
def neighbours(layout, listing, desk, op, hint, seen):
    """Write which shares of the inputs, of the readers of these, and of all neighbours in the hint
    are on a device."""
    first, beyond = layout.previous_start[op], layout.previous_start[op + np.uintp(1)]
    inputs = np.float32(1.0 / max(1, np.int64(beyond) - np.int64(first)))
    readers = 0
    for edge in range(first, beyond):
        source = np.uintp(layout.previous[edge])
        seen[desk.device[source], 26] += inputs
        there = hint[listing.unit[source]]
        if there >= 0:
            seen[there, 29] += inputs
        last = min(
            layout.next_start[source + np.uintp(1)], layout.next_start[source] + np.uint32(16)
        )
        for number in range(layout.next_start[source], last):
            there = desk.unit_device[listing.unit[layout.next[number]]]
            if there >= 0:
                seen[there, 27] += np.float32(1.0)
                readers += 1
    if readers > 0:
        for d in range(np.uintp(layout.num_devices)):
            seen[d, 27] /= np.float32(readers)


@inlined
def score(network, unit, mask, seen, tilt, first, middle, context, scores):
    """Write the score of each device of the mask."""
    num_devices, hidden = np.uintp(len(scores)), np.uintp(len(network.out))
    inner, outer, from_seen = network.inner, network.context, network.seen
    count = np.float32(0.0)
    for h in range(hidden):
        middle[h] = np.float32(0.0)
    for d in range(num_devices):
        if (mask >> np.uint64(d)) & ONE == ZERO:
            continue
        count += np.float32(1.0)
        for h in range(hidden):
            first[d, h] = network.base[unit, h]
        for f in range(NUM_SEEN):
            value = seen[d, f]
            if value != np.float32(0.0):
                for h in range(hidden):
                    first[d, h] += value * from_seen[f, h]
        for h in range(hidden):
            first[d, h] = max(first[d, h], np.float32(0.0))
            middle[h] += first[d, h]
    for h in range(hidden):
        context[h] = network.inner_bias[h]
    for k in range(hidden):
        value = middle[k] / count
        if value != np.float32(0.0):
            for h in range(hidden):
                context[h] += value * outer[k, h]
    for d in range(num_devices):
        if (mask >> np.uint64(d)) & ONE == ZERO:
            continue
        for h in range(hidden):
            middle[h] = context[h]
        for k in range(hidden):
            value = first[d, k]
            if value != np.float32(0.0):
                for h in range(hidden):
                    middle[h] += value * inner[k, h]
        found = np.float32(0.0)
        for h in range(hidden):
            found += max(middle[h], np.float32(0.0)) * network.out[h]
        for f in range(NUM_SEEN):
            found += seen[d, f] * (network.skip[f] + tilt[f])
        scores[d] = np.float64(found)


@inlined
def draw(mask, scores, heat, state):
    """A device of the mask, drawn by its score."""
    num_devices = np.uintp(len(scores))
    best, highest = np.uintp(0), -np.inf
    for d in range(num_devices):
        if (mask >> np.uint64(d)) & ONE != ZERO and scores[d] > highest:
            best, highest = d, scores[d]
    if heat <= 0.0:
        return best
    total = 0.0
    for d in range(num_devices):
        if (mask >> np.uint64(d)) & ONE != ZERO:
            total += np.exp((scores[d] - highest) / heat)
    left = uniform(state) * total
    for d in range(num_devices):
        if (mask >> np.uint64(d)) & ONE != ZERO:
            left -= np.exp((scores[d] - highest) / heat)
            if left < 0.0:
                return d
    return best


@inlined
def log_prob_of(mask, scores, heat, choice):
    """How likely a device of the mask is at a temperature, as a logarithm; 0 where it is taken for
    certain."""
    if heat <= 0.0:
        return 0.0
    total = 0.0
    for d in range(np.uintp(len(scores))):
        if (mask >> np.uint64(d)) & ONE != ZERO:
            total += np.exp((scores[d] - scores[choice]) / heat)
    return -np.log(total)


@inlined
def told(frame, mask, given):
    """The device that was told, or a twin of it where that is empty and not the first of its kind;
    -1 if neither."""
    if given < 0:
        return np.int64(-1)
    if (mask >> np.uint64(given)) & ONE != ZERO:
        return np.int64(given)
    for d in range(np.uintp(len(frame.alike))):
        if frame.alike[d] == frame.alike[given] and (mask >> np.uint64(d)) & ONE != ZERO:
            return np.int64(d)
    return np.int64(-1)


@compiled
def roll_network(
    layout, listing, frame, network, rolls, row, capacity, desk, count_memory, scratch, record
):
    """One schedule, left on the desk."""
    clear_desk(desk)
    seen, first, middle, context, scores, placed = scratch
    placed[:] = 0
    previous, number = np.int64(-1), np.uintp(0)
    recording = len(record.unit) > 0
    for op in range(np.uintp(len(layout.op))):
        unit = np.uintp(listing.unit[op])
        d = np.uintp(max(desk.unit_device[unit], 0))
        if desk.unit_device[unit] < 0:
            mask = see(
                layout,
                listing,
                frame,
                capacity,
                desk,
                op,
                unit,
                previous,
                count_memory,
                placed,
                rolls.hint[row],
                seen,
            )
            score(network, unit, mask, seen, rolls.tilt[row], first, middle, context, scores)
            fixed = told(frame, mask, rolls.given[row, unit])
            d = (
                np.uintp(fixed)
                if fixed >= 0
                else draw(mask, scores, rolls.heat[row], rolls.state[row])
            )
            if recording:
                record.seen[row, number] = seen
                record.mask[row, number] = mask
                record.unit[row, number] = unit
                record.choice[row, number] = d
                record.log_prob[row, number] = log_prob_of(mask, scores, rolls.heat[row], d)
                number += np.uintp(1)
            settle(layout, listing, desk, unit, d, True, count_memory)
            placed[d] += 1
            previous = np.int64(d)
        book(layout, desk, op, d)
    settle_rest(layout, listing, desk, capacity)


@compiled
def paths(layout, time, transfer, head, tail):
    """Write the longest way from the start to each op, and from each op to the end, that op
    included in the latter."""
    for op in range(len(time)):
        head[op] = 0.0
        for edge in range(layout.previous_start[op], layout.previous_start[op + 1]):
            source = layout.previous[edge]
            head[op] = max(head[op], head[source] + time[source] + transfer[source])
    for op in range(len(time) - 1, -1, -1):
        tail[op] = time[op]
        for edge in range(layout.next_start[op], layout.next_start[op + 1]):
            tail[op] = max(tail[op], time[op] + transfer[op] + tail[layout.next[edge]])


@compiled
def windows(frame, device, needs):
    """Write how many bytes each device fetches of parameters that live elsewhere, each counted
    once."""
    needs[:] = 0
    last = np.int64(-1)
    fetched = ZERO
    for number in range(len(frame.reads)):
        parameter, reader = frame.reads[number, 0], frame.reads[number, 1]
        if parameter != last:
            fetched, last = ZERO, parameter
        d = device[reader]
        bit = ONE << np.uint64(d)
        if d != device[parameter] and fetched & bit == ZERO:
            fetched |= bit
            needs[d] += frame.size[parameter]


@compiled
def run_network(
    layout, listing, frame, network, rolls, memory, scales, count_memory, record, unit_device, costs
):
    """A schedule for each roll, with memory [devices] bytes scaled by each of `scales` until the
    placement fits.

    Writes unit_device [rolls, units], and in costs [rolls, 2] the step time and the bytes over
    memory of each. Gives the number of placements simulated. What is recorded is the last attempt.
    """
    num_devices, simulations = layout.num_devices, 0
    desk = new_desk(layout, listing)
    hidden = len(network.out)
    scratch = (
        np.zeros((num_devices, len(SEEN)), np.float32),
        np.zeros((num_devices, hidden), np.float32),
        np.zeros(hidden, np.float32),
        np.zeros(hidden, np.float32),
        np.zeros(num_devices),
        np.zeros(num_devices, np.int64),
    )
    capacity, window = np.zeros(num_devices), np.zeros(num_devices, np.int64)
    device = np.zeros((1, len(frame.op_unit)), np.int32)
    step, peak, moved = np.zeros(1), np.zeros((1, num_devices), np.int64), np.zeros(1, np.int64)
    for row in range(len(rolls.heat)):
        for number in range(len(scales)):
            for d in range(num_devices):
                capacity[d] = max(1.0, np.float64(memory[d]) * scales[number] * rolls.scale[row])
            roll_network(
                layout,
                listing,
                frame,
                network,
                rolls,
                row,
                capacity,
                desk,
                count_memory,
                scratch,
                record,
            )
            for op in range(len(frame.op_unit)):
                device[0, op] = desk.unit_device[frame.op_unit[op]]
            windows(frame, device[0], window)
            run_batch(layout, device, window, False, frame.shared, True, step, peak, moved)
            simulations += 1
            over = 0.0
            for d in range(num_devices):
                over += max(0.0, np.float64(peak[0, d] - memory[d]))
            if number == 0 or over < costs[row, 1]:
                unit_device[row] = desk.unit_device
                costs[row, 0], costs[row, 1] = step[0], over
            if over == 0.0:
                break
    return simulations
