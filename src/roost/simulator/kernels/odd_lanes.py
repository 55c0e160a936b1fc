"""One op in one lane, where it or a consumer is on another device than in the base."""

from __future__ import annotations

import numpy as np

from roost.simulator.kernels.base import ONE, ZERO, inlined, lowest_bit
from roost.simulator.kernels.busy import sending
from roost.simulator.kernels.lane_state import WIDE, place_in


@inlined
def save_extra(busy, layout, lanes, op, lane, at):
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
def num_extra(busy, num_consumers):
    """The number of entries that `save_extra` writes."""
    return np.uintp(0) if busy is None else num_consumers + np.uintp(1)


@inlined
def put_back_extra(busy, layout, lanes, op, lane, at, takes):
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
def cross_alone(busy, layout, lanes, device, op, here, remote, lane):
    """The output of an op goes to the devices whose bit is set, in one lane: both ends are kept
    busy."""
    if busy is not None:
        pair = here * np.uintp(layout.num_devices)
        lanes.free[here * WIDE + lane] += sending(busy, pair, remote)
        for edge in range(
            np.uintp(layout.next_start[op]), np.uintp(layout.next_start[op + np.uintp(1)])
        ):
            reader = np.uintp(layout.next[edge])
            there = place_in(device, lanes.slot, lanes.device, reader, lane)
            if (remote >> there) & ONE != ZERO:
                remote &= ~(ONE << there)
                lanes.extra[reader * WIDE + lane] += busy.receiver[pair + there]


@inlined
def save(layout, lanes, device, op, here, remote, odd):
    """Keep what running the op as in the base will change, in its odd lanes."""
    ready = lanes.ready
    free = lanes.free
    step = lanes.step
    bus_free = lanes.bus_free
    saved = lanes.saved
    bus = layout.bus
    next_start = layout.next_start
    next_op = layout.next
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
        at = save_extra(layout.busy, layout, lanes, op, lane, at)


@inlined
def run_odd(
    layout, lanes, device, held, op, base_here, base_targets, base_last, base_gone, lane, number
):
    """Put one lane back to where it was before the op, and run the op there as that lane has it."""
    ready = lanes.ready
    free = lanes.free
    step = lanes.step
    bus_free = lanes.bus_free
    arrives = lanes.arrives
    saved = lanes.saved
    transfers = lanes.transfers
    last = lanes.last
    shift = lanes.shift
    peak = lanes.peak
    dying = lanes.dying
    is_dying = lanes.is_dying
    slot_of = lanes.slot
    moved = lanes.device
    next_start = layout.next_start
    next_op = layout.next
    output = layout.output
    workspace = layout.workspace
    time = layout.time
    device_gap = layout.device_gap
    bus = layout.bus
    bus_gap = layout.bus_gap
    latency = layout.sent_latency
    seconds_per_byte = layout.sent_seconds_per_byte
    broadcast = layout.broadcast
    copies_count = layout.copies_in_memory
    num_devices = np.uintp(layout.num_devices)
    first = np.uintp(next_start[op])
    beyond = np.uintp(next_start[op + np.uintp(1)])
    base_remote = base_targets & ~(ONE << base_here)
    num_remote = np.uintp(0)
    left = base_remote
    while left != ZERO:
        left &= left - ONE
        num_remote += np.uintp(1)
    at = np.uintp(number) * (
        np.uintp(3) + num_remote + beyond - first + num_extra(layout.busy, beyond - first)
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

    here = place_in(device, slot_of, moved, op, lane)
    idle = free[here * WIDE + lane]
    takes = put_back_extra(layout.busy, layout, lanes, op, lane, at, time[op * num_devices + here])
    end = (came if came > idle else idle) + takes
    free[here * WIDE + lane] = end + device_gap[here] if takes > 0.0 else end
    if end > step[lane]:
        step[lane] = end
    targets = ZERO
    for edge in range(first, beyond):
        there = place_in(device, slot_of, moved, np.uintp(next_op[edge]), lane)
        targets |= ONE << there
        last[there] = next_op[edge]
    remote = targets & ~(ONE << here)
    cross_alone(layout.busy, layout, lanes, device, op, here, remote, lane)

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
        arrival = arrives[place_in(device, slot_of, moved, consumer, lane) * WIDE + lane]
        if arrival > ready[consumer * WIDE + lane]:
            ready[consumer * WIDE + lane] = arrival
