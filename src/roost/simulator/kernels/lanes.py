"""Sixteen neighbours of one placement at a time: the inner loop of a search.

Neighbours differ from the base placement in a few ops. An op is *odd* in a lane where it, or one of
its consumers, is on another device than in the base; nearly all ops are odd in no lane. Those are
run once for all lanes: their times as vectors, and their memory as plain numbers, since it is the
same in every lane up to a shift that only odd ops change. An op that is odd somewhere is run for
all lanes as if it were not; then its odd lanes are put back, and run alone.

For placements that `push` can run: a fixed order, one sender to each bus, nothing fetched.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.simulator.kernels.base import ONE, ZERO, bare, compiled, inlined, lowest_bit
from roost.simulator.kernels.busy import sending
from roost.simulator.kernels.vector import (
    LANES,
    run_busy_op,
    run_op,
    run_transfer,
    take_peak,
    wait_for,
)

WIDE = np.uintp(LANES)
NOTHING = np.int64(2**62)  # more than all sizes of a graph together


class Lanes(NamedTuple):
    """The state of sixteen simulations; lane l of row i is at i * 16 + l."""

    ready: Array  # [ops * lanes] f8, zero between runs
    free: Array  # [devices * lanes] f8
    bus_free: Array  # [buses * lanes] f8
    arrives: Array  # [devices * lanes] f8
    step: Array  # [lanes] f8
    transfers: Array  # [lanes] i8 more than in the base
    shift: Array  # [devices * lanes] i8 bytes held beyond the base
    peak: Array  # [devices * lanes] i8
    # [ops * lanes] i8 bytes given back at an op beyond those of the base, zero between runs.
    dying: Array
    is_dying: Array  # [ops] bool, false between runs
    odd: Array  # [ops] u8 a bit for each odd lane, zero between runs
    slot: Array  # [ops] i4 row in `device` of an op that some lane moves, or -1, -1 between runs
    device: Array  # [slots * lanes] u4
    home_slot: Array  # [parameters] i4 the same for parameters
    home: Array  # [slots * lanes] u4
    saved: Array  # [lanes * most] f8
    last: Array  # [devices] u4 the last consumer on each device in one odd lane
    base_last: Array  # [devices] u4 the same in the base
    held: Array  # [devices] i8 bytes, in the base
    before: Array  # [devices] i8 the same before the op at hand
    most: Array  # [devices] i8 the most since the lanes last took it over
    gone: Array  # [ops] i8 bytes given back at an op, in the base, zero between runs
    # [ops * lanes] f8 seconds that it takes longer, zero between runs; empty where nothing keeps
    # busy.
    extra: Array


@compiled
def new_lanes(layout, most_moves):
    """Room for lanes that move at most so many ops between them."""
    num_ops, num_devices, num_parameters = (
        len(layout.op),
        layout.num_devices,
        len(layout.parameter_op),
    )
    most_consumers = 0
    for op in range(num_ops):
        most_consumers = max(
            most_consumers, np.int64(layout.next_start[op + 1]) - np.int64(layout.next_start[op])
        )
    return Lanes(
        np.zeros(num_ops * LANES),
        np.zeros(num_devices * LANES),
        np.zeros(len(layout.bus_gap) * LANES),
        np.zeros(num_devices * LANES),
        np.zeros(LANES),
        np.zeros(LANES, np.int64),
        np.zeros(num_devices * LANES, np.int64),
        np.zeros(num_devices * LANES, np.int64),
        np.zeros(num_ops * LANES, np.int64),
        np.zeros(num_ops, np.bool_),
        np.zeros(num_ops, np.uint64),
        np.full(num_ops, -1, np.int32),
        np.zeros(most_moves * LANES, np.uint32),
        np.full(num_parameters, -1, np.int32),
        np.zeros(most_moves * LANES, np.uint32),
        np.zeros(LANES * (4 + num_devices + 2 * most_consumers)),
        np.zeros(64, np.uint32),
        np.zeros(64, np.uint32),
        np.zeros(64, np.int64),
        np.zeros(64, np.int64),
        np.zeros(64, np.int64),
        np.zeros(num_ops, np.int64),
        np.zeros(num_ops * LANES if layout.busy is not None else 0),
    )


@inlined
def _place_in(base, slot_of, moved, number, lane):
    """The device of an op or parameter in one lane."""
    slot = slot_of[number]
    return np.uintp(base[number]) if slot < 0 else np.uintp(moved[np.uintp(slot) * WIDE + lane])


@inlined
def _move(slot_of, devices, base, number, num_slots, lane, device):
    """Put op or parameter `number` on `device` in one lane; returns the number of slots in use."""
    slot = slot_of[number]
    if slot < 0:
        slot = slot_of[number] = num_slots
        num_slots += 1
        for other in range(LANES):
            devices[slot * LANES + other] = base[number]
    devices[slot * LANES + lane] = device
    return num_slots


@bare
def set_lanes(layout, lanes, device, home, number_of, is_parameter, moves, first, count, fetching):
    """Move the ops of so many neighbours, from the first on; mark the odd ops, and the lanes that
    would fetch.

    `moves` are the neighbours' starts in, and the columns of, ops of the graph and devices.
    """
    start, move_op, move_device = moves
    num_slots, num_home_slots = 0, 0
    lanes.shift[:] = 0
    for lane in range(count):
        for move in range(start[first + lane], start[first + lane + 1]):
            number, there = number_of[move_op[move]], move_device[move]
            if is_parameter[move_op[move]]:
                num_home_slots = _move(
                    lanes.home_slot, lanes.home, home, number, num_home_slots, lane, there
                )
            else:
                num_slots = _move(lanes.slot, lanes.device, device, number, num_slots, lane, there)
    for lane in range(count):
        wide = np.uintp(lane)
        fetching[first + lane] = False
        bit = ONE << wide
        for move in range(start[first + lane], start[first + lane + 1]):
            number = np.uintp(number_of[move_op[move]])
            if is_parameter[move_op[move]]:
                there = _place_in(home, lanes.home_slot, lanes.home, number, wide)
                # A parameter that is moved twice in one lane must be counted once: set, do not add.
                for user in range(
                    layout.user_start[number], layout.user_start[number + np.uintp(1)]
                ):
                    if (
                        _place_in(
                            device, lanes.slot, lanes.device, np.uintp(layout.user[user]), wide
                        )
                        != there
                    ):
                        fetching[first + lane] = True
            else:
                there = _place_in(device, lanes.slot, lanes.device, number, wide)
                lanes.odd[number] |= bit
                for edge in range(
                    layout.previous_start[number], layout.previous_start[number + np.uintp(1)]
                ):
                    lanes.odd[layout.previous[edge]] |= bit
                for use in range(layout.use_start[number], layout.use_start[number + np.uintp(1)]):
                    if (
                        _place_in(
                            home, lanes.home_slot, lanes.home, np.uintp(layout.use[use]), wide
                        )
                        != there
                    ):
                        fetching[first + lane] = True
    for lane in range(count):
        for move in range(start[first + lane], start[first + lane + 1]):
            if is_parameter[move_op[move]]:
                number = number_of[move_op[move]]
                slot = lanes.home_slot[number]
                there = lanes.home[slot * LANES + lane]
                size = layout.parameter_bytes[number]
                lanes.shift[home[number] * np.uint32(LANES) + np.uint32(lane)] -= size
                lanes.shift[there * np.uint32(LANES) + np.uint32(lane)] += size
                # Counted: a second mention moves nothing.
                lanes.home[slot * LANES + lane] = home[number]


@bare
def clear_lanes(layout, lanes, number_of, is_parameter, moves, first, count):
    """Forget what `set_lanes` set."""
    start, move_op, _ = moves
    for lane in range(count):
        for move in range(start[first + lane], start[first + lane + 1]):
            number = number_of[move_op[move]]
            if is_parameter[move_op[move]]:
                lanes.home_slot[number] = -1
            else:
                lanes.slot[number] = -1
                lanes.odd[number] = ZERO
                for edge in range(layout.previous_start[number], layout.previous_start[number + 1]):
                    lanes.odd[layout.previous[edge]] = ZERO


@inlined
def _flush(lanes, most, held, num_devices):
    """Take the peaks of the base since the last flush into those of each lane."""
    peak, shift = lanes.peak, lanes.shift
    for d in range(num_devices):
        take_peak(peak, shift, d * WIDE, most[d])
        most[d] = held[d]


@bare
def run_lanes(layout, lanes, device, always_held):
    """Simulate sixteen neighbours; the lanes then hold their step times and peaks. Returns
    transfers of the base."""
    ready, free, step, bus_free, arrives = (
        lanes.ready,
        lanes.free,
        lanes.step,
        lanes.bus_free,
        lanes.arrives,
    )
    shift, dying, is_dying, odd_in = lanes.shift, lanes.dying, lanes.is_dying, lanes.odd
    time, device_gap, workspace, copies_count = (
        layout.time,
        layout.device_gap,
        layout.workspace,
        layout.copies_in_memory,
    )
    next_start, next_op, output = layout.next_start, layout.next, layout.output
    num_devices = np.uintp(layout.num_devices)
    held, before, most, last, gone_at = (
        lanes.held,
        lanes.before,
        lanes.most,
        lanes.base_last,
        lanes.gone,
    )
    num_transfers = 0
    free[:] = 0.0
    bus_free[:] = 0.0
    step[:] = 0.0
    lanes.transfers[:] = 0
    lanes.peak[:] = 0
    for d in range(num_devices):
        held[d] = most[d] = always_held[d]
    first = np.uintp(next_start[0])
    for op in range(np.uintp(len(device))):
        here = np.uintp(device[op])
        beyond = np.uintp(next_start[op + np.uintp(1)])
        takes = time[op * num_devices + here]
        targets = ZERO
        for edge in range(first, beyond):
            there = np.uintp(device[next_op[edge]])
            targets |= ONE << there
            last[there] = next_op[edge]
        remote = targets & ~(ONE << here)
        odd = odd_in[op]
        if odd != ZERO:
            _save(layout, lanes, device, op, here, remote, odd)
            _flush(lanes, most, held, num_devices)
            for d in range(num_devices):
                before[d] = held[d]

        if not _run_busy(layout.busy, layout, lanes, device, op, here, remote, takes):
            rest = device_gap[here] if takes > 0.0 else 0.0
            run_op(ready, op * WIDE, free, here * WIDE, arrives, here * WIDE, step, takes, rest)
        size = output[op]
        gone = gone_at[op]
        gone_at[op] = 0
        held[here] += size
        filled = held[here] + workspace[op]
        most[here] = filled if filled > most[here] else most[here]
        if targets & (ONE << here):
            gone_at[last[here]] += size
            held[here] -= gone
        else:
            held[here] -= gone + size
        if remote != ZERO:
            num_transfers += _send(layout, lanes, op, here, remote)
            if copies_count:
                left = remote
                while left != ZERO:
                    there = lowest_bit(left)
                    left &= left - ONE
                    held[there] += size
                    most[there] = held[there] if held[there] > most[there] else most[there]
                    gone_at[last[there]] += size
        for edge in range(first, beyond):
            consumer = np.uintp(next_op[edge])
            wait_for(ready, consumer * WIDE, arrives, np.uintp(device[consumer]) * WIDE)

        if odd != ZERO or is_dying[op]:
            _hide(shift, odd, num_devices, NOTHING)
            _flush(lanes, most, held, num_devices)
            _hide(shift, odd, num_devices, -NOTHING)
            if is_dying[op]:
                for lane in range(WIDE):
                    if not (odd >> lane) & ONE:
                        shift[here * WIDE + lane] -= dying[op * WIDE + lane]
                        dying[op * WIDE + lane] = 0
            left = odd
            number = 0
            while left != ZERO:
                lane = lowest_bit(left)
                left &= left - ONE
                for d in range(num_devices):
                    shift[d * WIDE + lane] -= held[d] - before[d]
                _run_odd(layout, lanes, device, held, op, here, targets, last, gone, lane, number)
                number += 1
            is_dying[op] = False
        first = beyond
    _flush(lanes, most, held, num_devices)
    return num_transfers


@inlined
def _run_busy(busy, layout, lanes, device, op, here, remote, takes):
    """Run an op as in the base in every lane, where what crosses keeps both ends busy; whether it
    does."""
    if busy is None:
        return False
    extra, pair = lanes.extra, here * np.uintp(layout.num_devices)
    run_busy_op(
        lanes.ready,
        op * WIDE,
        lanes.free,
        here * WIDE,
        lanes.arrives,
        here * WIDE,
        lanes.step,
        takes,
        layout.device_gap[here],
        extra,
        sending(busy, pair, remote),
    )
    if remote != ZERO:
        for edge in range(
            np.uintp(layout.next_start[op]), np.uintp(layout.next_start[op + np.uintp(1)])
        ):
            reader = np.uintp(layout.next[edge])
            there = np.uintp(device[reader])
            if (remote >> there) & ONE != ZERO:
                remote &= ~(ONE << there)
                for lane in range(WIDE):
                    extra[reader * WIDE + lane] += busy.receiver[pair + there]
    return True


@inlined
def _save_extra(busy, layout, lanes, op, lane, at):
    """Keep what an op and its consumers take longer in one lane; where in `saved` to go on."""
    if busy is None:
        return at
    lanes.saved[at] = lanes.extra[op * WIDE + lane]
    at += np.uintp(1)
    for edge in range(
        np.uintp(layout.next_start[op]), np.uintp(layout.next_start[op + np.uintp(1)])
    ):
        lanes.saved[at] = lanes.extra[np.uintp(layout.next[edge]) * WIDE + lane]
        at += np.uintp(1)
    return at


@inlined
def _num_extra(busy, num_consumers):
    """The number of entries that `_save_extra` writes."""
    return np.uintp(0) if busy is None else num_consumers + np.uintp(1)


@inlined
def _put_back_extra(busy, layout, lanes, op, lane, at, takes):
    """Put back what the consumers of an op take longer; gives what the op itself takes with what it
    receives."""
    if busy is None:
        return takes
    takes += lanes.saved[at]
    for edge in range(
        np.uintp(layout.next_start[op]), np.uintp(layout.next_start[op + np.uintp(1)])
    ):
        at += np.uintp(1)
        lanes.extra[np.uintp(layout.next[edge]) * WIDE + lane] = lanes.saved[at]
    return takes


@inlined
def _cross_alone(busy, layout, lanes, device, op, here, remote, lane):
    """The output of an op goes to the devices whose bit is set, in one lane: both ends are kept
    busy."""
    if busy is not None:
        pair = here * np.uintp(layout.num_devices)
        lanes.free[here * WIDE + lane] += sending(busy, pair, remote)
        for edge in range(
            np.uintp(layout.next_start[op]), np.uintp(layout.next_start[op + np.uintp(1)])
        ):
            reader = np.uintp(layout.next[edge])
            there = _place_in(device, lanes.slot, lanes.device, reader, lane)
            if (remote >> there) & ONE != ZERO:
                remote &= ~(ONE << there)
                lanes.extra[reader * WIDE + lane] += busy.receiver[pair + there]


@inlined
def _hide(shift, odd, num_devices, amount):
    """Shift the odd lanes so far down that nothing is their peak, or back up."""
    while odd != ZERO:
        lane = lowest_bit(odd)
        odd &= odd - ONE
        for d in range(num_devices):
            shift[d * WIDE + lane] -= amount


@inlined
def _send(layout, lanes, op, here, remote):
    """Send the output of an op from its place in the base to the devices whose bit is set, in every
    lane."""
    arrives, bus_free = lanes.arrives, lanes.bus_free
    latency, seconds_per_byte = layout.sent_latency, layout.sent_seconds_per_byte
    bus_of, bus_gap = layout.bus, layout.bus_gap
    broadcast = layout.broadcast
    num_devices = np.uintp(layout.num_devices)
    nbytes = np.float64(layout.output[op])
    pair = here * num_devices
    count = 0
    slowest = 0.0
    if broadcast:
        left = remote
        while left != ZERO:
            there = lowest_bit(left)
            left &= left - ONE
            needs = latency[pair + there] + nbytes * seconds_per_byte[pair + there]
            slowest = needs if needs > slowest else slowest
    left = remote
    while left != ZERO:
        there = lowest_bit(left)
        bus = np.uintp(bus_of[pair + there])
        if not broadcast:
            takes = latency[pair + there] + nbytes * seconds_per_byte[pair + there]
            run_transfer(
                arrives, here * WIDE, there * WIDE, bus_free, bus * WIDE, takes, bus_gap[bus]
            )
        elif left == remote:
            run_transfer(
                arrives, here * WIDE, there * WIDE, bus_free, bus * WIDE, slowest, bus_gap[bus]
            )
        else:
            for lane in range(WIDE):
                arrives[there * WIDE + lane] = arrives[lowest_bit(remote) * WIDE + lane]
        left &= left - ONE
        count += 1
    return count


@inlined
def _save(layout, lanes, device, op, here, remote, odd):
    """Keep what running the op as in the base will change, in its odd lanes."""
    ready, free, step, bus_free, saved = (
        lanes.ready,
        lanes.free,
        lanes.step,
        lanes.bus_free,
        lanes.saved,
    )
    bus, next_start, next_op = layout.bus, layout.next_start, layout.next
    num_devices = np.uintp(layout.num_devices)
    at = np.uintp(0)
    while odd != ZERO:
        lane = lowest_bit(odd)
        odd &= odd - ONE
        saved[at] = ready[op * WIDE + lane]
        saved[at + np.uintp(1)] = free[here * WIDE + lane]
        saved[at + np.uintp(2)] = step[lane]
        at += np.uintp(3)
        left = remote
        while left != ZERO:
            line = np.uintp(bus[here * num_devices + lowest_bit(left)])
            left &= left - ONE
            saved[at] = bus_free[line * WIDE + lane]
            at += np.uintp(1)
        for edge in range(np.uintp(next_start[op]), np.uintp(next_start[op + np.uintp(1)])):
            saved[at] = ready[np.uintp(next_op[edge]) * WIDE + lane]
            at += np.uintp(1)
        at = _save_extra(layout.busy, layout, lanes, op, lane, at)


@inlined
def _run_odd(
    layout, lanes, device, held, op, base_here, base_targets, base_last, base_gone, lane, number
):
    """Put one lane back to where it was before the op, and run the op there as that lane has it."""
    ready, free, step, bus_free = lanes.ready, lanes.free, lanes.step, lanes.bus_free
    arrives, saved, transfers, last = lanes.arrives, lanes.saved, lanes.transfers, lanes.last
    shift, peak, dying, is_dying = lanes.shift, lanes.peak, lanes.dying, lanes.is_dying
    slot_of, moved = lanes.slot, lanes.device
    next_start, next_op, output, workspace = (
        layout.next_start,
        layout.next,
        layout.output,
        layout.workspace,
    )
    time, device_gap, bus, bus_gap = layout.time, layout.device_gap, layout.bus, layout.bus_gap
    latency, seconds_per_byte = layout.sent_latency, layout.sent_seconds_per_byte
    broadcast, copies_count = layout.broadcast, layout.copies_in_memory
    num_devices = np.uintp(layout.num_devices)
    first, beyond = np.uintp(next_start[op]), np.uintp(next_start[op + np.uintp(1)])
    base_remote = base_targets & ~(ONE << base_here)
    num_remote = np.uintp(0)
    left = base_remote
    while left != ZERO:
        left &= left - ONE
        num_remote += np.uintp(1)
    at = np.uintp(number) * (
        np.uintp(3) + num_remote + beyond - first + _num_extra(layout.busy, beyond - first)
    )
    came = saved[at]
    free[base_here * WIDE + lane] = saved[at + np.uintp(1)]
    step[lane] = saved[at + np.uintp(2)]
    at += np.uintp(3)
    left = base_remote
    while left != ZERO:
        line = np.uintp(bus[base_here * num_devices + lowest_bit(left)])
        left &= left - ONE
        bus_free[line * WIDE + lane] = saved[at]
        at += np.uintp(1)
    for edge in range(first, beyond):
        ready[np.uintp(next_op[edge]) * WIDE + lane] = saved[at]
        at += np.uintp(1)
    # What the base will give back of this output, this lane will not.
    size = output[op]
    left = base_targets
    while left != ZERO:
        there = lowest_bit(left)
        left &= left - ONE
        if there == base_here or copies_count:
            dying[np.uintp(base_last[there]) * WIDE + lane] -= size
            is_dying[base_last[there]] = True

    here = _place_in(device, slot_of, moved, op, lane)
    idle = free[here * WIDE + lane]
    takes = _put_back_extra(layout.busy, layout, lanes, op, lane, at, time[op * num_devices + here])
    end = (came if came > idle else idle) + takes
    free[here * WIDE + lane] = end + device_gap[here] if takes > 0.0 else end
    if end > step[lane]:
        step[lane] = end
    targets = ZERO
    for edge in range(first, beyond):
        there = _place_in(device, slot_of, moved, np.uintp(next_op[edge]), lane)
        targets |= ONE << there
        last[there] = next_op[edge]
    remote = targets & ~(ONE << here)
    _cross_alone(layout.busy, layout, lanes, device, op, here, remote, lane)

    spot = here * WIDE + lane
    shift[spot] += size
    filled = held[here] + shift[spot] + workspace[op]
    if filled > peak[spot]:
        peak[spot] = filled
    gone = base_gone + dying[op * WIDE + lane]
    dying[op * WIDE + lane] = 0
    if targets & (ONE << here):
        dying[np.uintp(last[here]) * WIDE + lane] += size
        is_dying[last[here]] = True
    else:
        gone += size
    shift[spot] -= gone

    arrives[spot] = end
    nbytes = np.float64(size)
    pair = here * num_devices
    slowest = 0.0
    if broadcast:
        left = remote
        while left != ZERO:
            there = lowest_bit(left)
            left &= left - ONE
            needs = latency[pair + there] + nbytes * seconds_per_byte[pair + there]
            slowest = needs if needs > slowest else slowest
    begin = 0.0
    left = remote
    while left != ZERO:
        there = lowest_bit(left)
        line = np.uintp(bus[pair + there]) * WIDE + lane
        takes = slowest
        if not broadcast:
            takes = latency[pair + there] + nbytes * seconds_per_byte[pair + there]
        if not broadcast or left == remote:
            begin = end if end > bus_free[line] else bus_free[line]
            bus_free[line] = begin + takes + bus_gap[bus[pair + there]]
        left &= left - ONE
        spot = there * WIDE + lane
        arrives[spot] = begin + takes
        transfers[lane] += 1
        if copies_count:
            shift[spot] += size
            filled = held[there] + shift[spot]
            if filled > peak[spot]:
                peak[spot] = filled
            dying[np.uintp(last[there]) * WIDE + lane] += size
            is_dying[last[there]] = True
    transfers[lane] -= np.int64(num_remote)
    for edge in range(first, beyond):
        consumer = np.uintp(next_op[edge])
        arrival = arrives[_place_in(device, slot_of, moved, consumer, lane) * WIDE + lane]
        if arrival > ready[consumer * WIDE + lane]:
            ready[consumer * WIDE + lane] = arrival


@compiled
def most_moves(start):
    """The most moves that sixteen neighbours in a row make between them."""
    most, count = 0, len(start) - 1
    for first in range(0, count, LANES):
        most = max(most, start[min(first + LANES, count)] - start[first])
    return most


@compiled
def run_neighbours(
    layout,
    lanes,
    device,
    home,
    number_of,
    is_parameter,
    moves,
    fetching,
    step_time,
    peak,
    num_transfers,
):
    """Simulate neighbours of a placement; `fetching` [neighbours] marks those that must be run
    another way."""
    count = len(moves[0]) - 1
    held = np.zeros(64, np.int64)
    for parameter in range(len(home)):
        held[home[parameter]] += layout.parameter_bytes[parameter]
    for first in range(0, count, LANES):
        filled = min(LANES, count - first)
        set_lanes(
            layout, lanes, device, home, number_of, is_parameter, moves, first, filled, fetching
        )
        base = run_lanes(layout, lanes, device, held)
        for lane in range(filled):
            step_time[first + lane] = lanes.step[lane]
            num_transfers[first + lane] = base + lanes.transfers[lane]
            for d in range(layout.num_devices):
                peak[first + lane, d] = lanes.peak[d * LANES + lane]
        clear_lanes(layout, lanes, number_of, is_parameter, moves, first, filled)
