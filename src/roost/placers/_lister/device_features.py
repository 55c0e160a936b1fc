"""Features of a device that the network of `lister` sees when it places a unit (compiled).

Gaps are to the best device. Times are log(1 + 20 t / T), where T is the time of a step with perfect
balance, or log(1 + t / tick), where a tick is the mean time of a unit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.placers._listing.held_memory import inputs_of, peak_with
from roost.placers._listing.partial_schedule import (
    is_elsewhere,
    is_in,
    measure_transfers,
    related_devices,
    rival_device,
)
from roost.simulator.kernels.base import ONE, ZERO, inlined

DEVICE_FEATURES = (
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
    "partner",  # 1 where the op is whose output its own will meet
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
    # Always 0. They are columns of the weights in a file.
    "hint",
    "hint_inputs",
)
# fmt: off
(START_GAP, START_GAP_TICKS, FINISH_GAP, FINISH_GAP_TICKS, FREE_GAP, LOAD_GAP, LOAD, INBOUND,
 INBOUND_TICKS, OUTGOING_TICKS, ABSENT, HOME, PREVIOUS, MODULE, PARENT, ROLE, PARTNER,
 PARTNER_TICKS, RIVAL, MEMORY, LASTING, UNIT_MEMORY, SLOWER, SLOWER_IN_ALL, USED, UNITS, INPUTS,
 READERS, HINT, HINT_INPUTS) = range(len(DEVICE_FEATURES))
# fmt: on
_MOST_READERS = np.uint32(16)  # of a tensor, that are counted


class ProblemConstants(NamedTuple):
    """Figures of a problem that are the same for all its schedules."""

    total: Array  # [devices] f8 seconds of everything
    least_total: float
    balance: float  # T, seconds
    tick: float  # seconds
    alike: Array  # [devices] i8 the first device that is just like it
    first_op: Array  # [units] i8 position of its first op, or -1
    shared: bool  # True if devices share a bus to send
    op_unit: Array  # [ops of the graph] i8
    # [reads, 2] i8 parameter and reader, as ops of the graph, where their units differ.
    reads: Array
    size: Array  # [ops of the graph] i8 bytes


@inlined
def possible_devices(
    layout, listing, constants, capacity, schedule, unit, count_memory, placed, seen
):
    """The devices that a unit may go to, as bits; writes the share of their memory in use.

    Those with room for it, or else the least overfull. Of empty devices that are alike only the
    first is possible.
    """
    mask = ZERO
    least_over = np.inf
    nearest = np.uintp(0)
    taken = ZERO  # devices of which an empty twin is possible
    for d in range(np.uintp(layout.num_devices)):
        if not is_in(listing.allowed[unit], d):
            continue
        most = schedule.held.peak[d] + listing.need[unit]
        if count_memory and np.float64(most) > capacity[d]:
            most = peak_with(layout, listing, schedule.held, unit, d, True, schedule.extra)
        seen[d, MEMORY] = np.float32(min(4.0, np.float64(most) / capacity[d]))
        if count_memory and np.float64(most) > capacity[d]:
            over = np.float64(most) - capacity[d]
            if over < least_over:
                least_over = over
                nearest = d
        else:
            twin = ONE << np.uint64(constants.alike[d])
            if placed[d] > 0 or (taken & twin) == ZERO:
                mask |= ONE << np.uint64(d)
                if placed[d] == 0:
                    taken |= twin
    if mask == ZERO:
        mask = ONE << np.uint64(nearest)
    return mask


@inlined
def write_features(
    layout, listing, constants, capacity, schedule, op, unit, previous, placed, mask, seen
):
    """Write the features `seen` [devices, features] of each device of a mask, 0 for others.

    The share of memory in use is there already.
    """
    num_devices = np.uintp(layout.num_devices)
    home = measure_transfers(layout, listing, schedule, op)
    module, parent, role, partner = related_devices(listing, schedule, op)
    rival = rival_device(listing, schedule, op)
    start_min = np.inf
    finish_min = np.inf
    free_min = np.inf
    load_min = np.inf
    time_min = np.inf
    decided = 0
    for d in range(num_devices):
        decided += placed[d]
        if not is_in(mask, d):
            continue
        start = max(schedule.ready[d], schedule.free[d])
        unit_time = listing.unit_time[unit * num_devices + d]
        start_min = min(start_min, start)
        finish_min = min(finish_min, start + layout.time[op * num_devices + d])
        free_min = min(free_min, schedule.free[d])
        load_min = min(load_min, schedule.load[d] + unit_time)
        time_min = min(time_min, unit_time)
    long = 20.0 / constants.balance
    tick = 1.0 / constants.tick
    for d in range(num_devices):
        row = seen[d]
        if not is_in(mask, d):
            row[:] = np.float32(0.0)
            continue
        here = np.int64(d)
        start = max(schedule.ready[d], schedule.free[d])
        finish = start + layout.time[op * num_devices + d]
        unit_time = listing.unit_time[unit * num_devices + d]
        load = schedule.load[d] + unit_time
        row[START_GAP] = np.log1p((start - start_min) * long)
        row[START_GAP_TICKS] = np.log1p((start - start_min) * tick)
        row[FINISH_GAP] = np.log1p((finish - finish_min) * long)
        row[FINISH_GAP_TICKS] = np.log1p((finish - finish_min) * tick)
        row[FREE_GAP] = np.log1p((schedule.free[d] - free_min) * long)
        row[LOAD_GAP] = np.log1p((load - load_min) * long)
        row[LOAD] = min(8.0, load / constants.balance)
        row[INBOUND] = np.log1p(schedule.inbound[d] * long)
        row[INBOUND_TICKS] = np.log1p(schedule.inbound[d] * tick)
        row[OUTGOING_TICKS] = np.log1p(schedule.outgoing[d] * tick)
        row[ABSENT] = schedule.absent[d]
        row[HOME] = home == here
        row[PREVIOUS] = previous == here
        row[MODULE] = module == here
        row[PARENT] = parent == here
        row[ROLE] = role == here
        row[PARTNER] = partner == here
        is_apart = is_elsewhere(partner, here)
        row[PARTNER_TICKS] = np.log1p(listing.partner_time[op] * tick) if is_apart else 0.0
        row[RIVAL] = rival == here
        lasting = np.float64(schedule.lasting[d] + listing.lasting[unit])
        row[LASTING] = min(4.0, lasting / capacity[d])
        row[UNIT_MEMORY] = min(4.0, np.float64(listing.resident[unit]) / capacity[d])
        least = 1e-3 * constants.tick
        row[SLOWER] = np.log((unit_time + least) / (time_min + least))
        row[SLOWER_IN_ALL] = np.log(constants.total[d] / constants.least_total)
        row[USED] = placed[d] > 0
        row[UNITS] = np.float64(placed[d]) / max(1, decided)
        row[INPUTS] = 0.0
        row[READERS] = 0.0
    _write_neighbours(layout, listing, schedule, op, seen)


@inlined
def _write_neighbours(layout, listing, schedule, op, seen):
    """Write the shares of the inputs, and of the readers of these, that are on each device."""
    share = np.float32(1.0 / max(1, np.int64(layout.num_inputs[op])))
    readers = 0
    for edge in inputs_of(layout, op):
        source = np.uintp(layout.previous[edge])
        seen[schedule.device[source], INPUTS] += share
        start = layout.next_start[source]
        end = min(layout.next_start[source + ONE], start + _MOST_READERS)
        for number in range(start, end):
            there = schedule.unit_device[listing.unit[layout.next[number]]]
            if there >= 0:
                seen[there, READERS] += np.float32(1.0)
                readers += 1
    if readers > 0:
        for d in range(np.uintp(layout.num_devices)):
            seen[d, READERS] /= np.float32(readers)
