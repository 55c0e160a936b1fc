"""List scheduling by a linear rule: a unit goes where its first op has the lowest score.

Ops are visited in dispatch order. A score is a weighted sum of the features of a device. The
compiled loop `run_rules` makes a schedule for each of many rules and simulates it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.placers._listing.held_memory import peak_with
from roost.placers._listing.partial_schedule import (
    clear_schedule,
    is_elsewhere,
    is_in,
    measure_transfers,
    new_schedule,
    place_rest,
    place_unit,
    related_devices,
    rival_device,
    run_op,
)
from roost.simulator.kernels.base import Moves, compiled, inlined, new_moves
from roost.simulator.kernels.push import push

# The features of a device, each times a weight. The first ones are in seconds.
FEATURES = (
    "start",  # of the op at hand
    "finish",
    "load",  # seconds of all the ops there, with this unit
    "over_share",  # that load beyond the device's share
    "unit_time",  # seconds of all ops of the unit
    "inbound",  # transfers of inputs that are not there
    "outgoing",  # transfers of the output to consumers already placed
    # Transfer between the output and what it will be combined with, where that is elsewhere.
    "partner",
    "absent",  # share of the input bytes that are not there
    "not_home",  # 1 where the biggest input was not made there
    "not_previous",  # 1 where the unit before was not placed there
    # 1 where the op before of the same module, or of the same call of it, is not there.
    "not_module",
    "not_parent",  # the same for the module that this one is part of
    "not_role",  # the same for the op before of the same module, kind and phase, in any call
    "in_line",  # the number of the device in the line
    "memory",  # share of the device's memory in use, with this unit
    # Bytes of parameters and long-lived outputs beyond what is fair, as a share of its memory.
    "over_fair",
    "unused",  # 1 where nothing has been placed there yet
    "in_way",  # seconds of the op, where a more urgent op that comes soon after is expected there
    "price",  # bytes that last as a share of the device's memory: dear where memory is scarce
)
# fmt: off
(START, FINISH, LOAD, OVER_SHARE, UNIT_TIME, INBOUND, OUTGOING, PARTNER, ABSENT, NOT_HOME,
 NOT_PREVIOUS, NOT_MODULE, NOT_PARENT, NOT_ROLE, IN_LINE, MEMORY, OVER_FAIR, UNUSED, IN_WAY,
 PRICE) = range(len(FEATURES))
# fmt: on
_USABLE, _UNWANTED, _TOO_FULL = range(3)  # devices of a lower rank are taken first


class LinearRules(NamedTuple):
    """Many rules, a row for each."""

    weights: Array  # [rules, features] f8
    usable: Array  # [rules] u8 a bit for each device; others are taken only where nothing else fits
    line: Array  # [rules, devices] f8 position of each device in the line
    share: Array  # [rules, devices] f8 seconds
    fair: Array  # [rules, devices] f8 bytes
    # [rules] bool: count outputs where they were made until their last use anywhere.
    cautious: Array
    # [rules, units] i4 the device of each unit in another placement, or -1; not read where `hold`
    # is 0.
    kept: Array
    hold: Array  # [rules] f8 added to the score of every other device


class _Related(NamedTuple):
    """Devices of one decision that the features of a device compare with, -1 where unknown."""

    home: int  # of the biggest input
    previous: int  # of the unit before
    module: int
    parent: int
    role: int
    partner: int
    rival: int
    kept: int  # of the unit in another placement


@inlined
def choose_device(
    layout, listing, rules, row, capacity, schedule, op, unit, previous, count_memory
):
    """The device with the lowest score among those where the unit fits, or the least overfull."""
    home = measure_transfers(layout, listing, schedule, op)
    module, parent, role, partner = related_devices(listing, schedule, op)
    rival = rival_device(listing, schedule, op)
    kept = np.int64(rules.kept[row, unit]) if rules.hold[row] > 0.0 else np.int64(-1)
    related = _Related(home, previous, module, parent, role, partner, rival, kept)
    best = np.uintp(0)
    best_rank = 9
    best_score = 0.0
    for d in range(np.uintp(layout.num_devices)):
        if not is_in(listing.allowed[unit], d):
            continue
        rank = _USABLE if is_in(rules.usable[row], d) else _UNWANTED
        most = schedule.held.peak[d] + listing.need[unit]
        if count_memory and np.float64(most) > capacity[d]:
            cautious = rules.cautious[row]
            most = peak_with(layout, listing, schedule.held, unit, d, cautious, schedule.extra)
            if np.float64(most) > capacity[d]:
                rank = _TOO_FULL
        if rank == _TOO_FULL:
            score = np.float64(most) - capacity[d]
        else:
            score = score_of(
                layout, listing, rules, row, capacity[d], schedule, op, unit, d, most, related
            )
        if rank < best_rank or (rank == best_rank and score < best_score):
            best = d
            best_rank = rank
            best_score = score
    return best


@inlined
def score_of(layout, listing, rules, row, capacity, schedule, op, unit, d, most, related):
    """The score of a device by a rule; `most` are the bytes it would hold."""
    num_devices = np.uintp(layout.num_devices)
    weights = rules.weights
    here = np.int64(d)
    start = max(schedule.ready[d], schedule.free[d])
    op_time = layout.time[op * num_devices + d]
    unit_time = listing.unit_time[unit * num_devices + d]
    load = schedule.load[d] + unit_time
    score = (
        weights[row, START] * start
        + weights[row, FINISH] * (start + op_time)
        + weights[row, LOAD] * load
        + weights[row, OVER_SHARE] * max(0.0, load - rules.share[row, d])
        + weights[row, UNIT_TIME] * unit_time
        + weights[row, INBOUND] * schedule.inbound[d]
        + weights[row, OUTGOING] * schedule.outgoing[d]
        + weights[row, ABSENT] * schedule.absent[d]
        + weights[row, IN_LINE] * rules.line[row, d]
        + weights[row, MEMORY] * np.float64(most) / capacity
    )
    if is_elsewhere(related.partner, here):
        score += weights[row, PARTNER] * listing.partner_time[op]
    if is_elsewhere(related.home, here):
        score += weights[row, NOT_HOME]
    if is_elsewhere(related.previous, here):
        score += weights[row, NOT_PREVIOUS]
    if is_elsewhere(related.module, here):
        score += weights[row, NOT_MODULE]
    if is_elsewhere(related.parent, here):
        score += weights[row, NOT_PARENT]
    if is_elsewhere(related.role, here):
        score += weights[row, NOT_ROLE]
    beyond = np.float64(schedule.lasting[d] + listing.lasting[unit]) - rules.fair[row, d]
    if beyond > 0.0:
        score += weights[row, OVER_FAIR] * beyond / capacity
    if schedule.load[d] == 0.0:
        score += weights[row, UNUSED]
    if related.rival == here:
        score += weights[row, IN_WAY] * op_time
    score += weights[row, PRICE] * np.float64(listing.lasting[unit]) / capacity
    if is_elsewhere(related.kept, here):
        score += rules.hold[row]
    return score


@compiled
def schedule_by_rule(layout, listing, rules, row, capacity, schedule, count_memory):
    """Write the schedule of one rule."""
    clear_schedule(schedule)
    previous = np.int64(-1)
    for op in range(np.uintp(len(layout.op))):
        unit = np.uintp(listing.unit[op])
        d = np.uintp(max(schedule.unit_device[unit], 0))
        if schedule.unit_device[unit] < 0:
            d = choose_device(
                layout, listing, rules, row, capacity, schedule, op, unit, previous, count_memory
            )
            place_unit(layout, listing, schedule, unit, d, rules.cautious[row], count_memory)
            previous = np.int64(d)
        run_op(layout, schedule, op, d)
    place_rest(layout, listing, schedule, capacity)


class _Simulation(NamedTuple):
    """Arrays that `push` reads and writes."""

    ready: Array  # [ops] f8
    dying: Array  # [ops] i8
    free: Array  # f8
    bus_free: Array  # [buses] f8
    arrives: Array  # f8
    last: Array  # u4
    held: Array  # [devices] i8
    peak: Array  # [devices] i8
    moves: Moves  # empty


@compiled
def _new_simulation(layout):
    num_ops = len(layout.op)
    num_devices = layout.num_devices
    return _Simulation(
        np.zeros(num_ops),
        np.zeros(num_ops, np.int64),
        np.zeros(64),
        np.zeros(len(layout.bus_gap)),
        np.zeros(64),
        np.zeros(64, np.uint32),
        np.zeros(num_devices, np.int64),
        np.zeros(num_devices, np.int64),
        new_moves(0),
    )


@compiled
def _step_time(layout, device, simulation):
    """The step time of some devices [ops]; `peak` is written, `held` has the parameters."""
    step_time, _ = push(
        layout,
        device,
        simulation.ready,
        simulation.dying,
        simulation.free,
        simulation.bus_free,
        simulation.arrives,
        simulation.last,
        simulation.held,
        simulation.peak,
        simulation.moves,
    )
    return step_time


@compiled
def run_rules(layout, listing, rules, memory, scales, count_memory, unit_device, step_time, excess):
    """Make a schedule for each rule, and simulate its placement.

    Memory [devices] bytes is scaled by each of `scales` in turn until the placement fits. Writes
    unit_device [rules, units], the step time [rules] and the bytes over memory [rules]. Returns the
    number of placements simulated, with those that did not fit.
    """
    simulations = 0
    schedule = new_schedule(layout, listing)
    simulation = _new_simulation(layout)
    capacity = np.zeros(layout.num_devices)
    for row in range(len(rules.weights)):
        for number in range(len(scales)):
            for d in range(layout.num_devices):
                capacity[d] = max(1.0, np.float64(memory[d]) * scales[number])
            schedule_by_rule(layout, listing, rules, row, capacity, schedule, count_memory)
            simulation.held[:] = 0
            for unit in range(len(schedule.unit_device)):
                simulation.held[schedule.unit_device[unit]] += listing.resident[unit]
            takes = _step_time(layout, schedule.device, simulation)
            simulations += 1
            over = np.int64(0)
            for d in range(layout.num_devices):
                over += max(0, simulation.peak[d] - memory[d])
            if number == 0 or over < excess[row]:
                unit_device[row] = schedule.unit_device
                step_time[row] = takes
                excess[row] = over
            if over == 0:
                break
    return simulations


@compiled
def peak_on_one_device(layout, listing):
    """The most bytes held where one device runs everything."""
    simulation = _new_simulation(layout)
    simulation.held[0] = listing.resident.sum()
    _step_time(layout, np.zeros(len(layout.op), np.uint32), simulation)
    return simulation.peak[0]
