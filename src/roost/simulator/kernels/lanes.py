"""Sixteen neighbours of one placement at a time: the inner loop of a search.

Neighbours differ from the base placement in a few ops. An op is *odd* in a lane where it, or one of
its consumers, is on another device than in the base; nearly all ops are odd in no lane. Those are
run once for all lanes: their times as vectors, and their memory as plain numbers, since it is the
same in every lane up to a shift that only odd ops change. An op that is odd somewhere is run for
all lanes as if it were not; then its odd lanes are put back, and run alone.

For placements that `push` can run: a fixed order, one sender to each bus, nothing fetched.
"""

from __future__ import annotations

import numpy as np

from roost.simulator.kernels.base import ONE, ZERO, bare, compiled, inlined, lowest_bit
from roost.simulator.kernels.busy import sending
from roost.simulator.kernels.lane_state import NOTHING, WIDE, clear_lanes, set_lanes
from roost.simulator.kernels.odd_lanes import run_odd, save
from roost.simulator.kernels.vector import (
    LANES,
    run_busy_op,
    run_op,
    run_transfer,
    take_peak,
    wait_for,
)


@inlined
def _flush(lanes, most, held, num_devices):
    """Take the peaks of the base since the last flush into those of each lane."""
    peak = lanes.peak
    shift = lanes.shift
    for d in range(num_devices):
        take_peak(peak, shift, d * WIDE, most[d])
        most[d] = held[d]


@bare
def run_lanes(layout, lanes, device, always_held):
    """Simulate sixteen neighbours; the lanes then hold their step times and peaks. Returns
    transfers of the base."""
    ready = lanes.ready
    free = lanes.free
    step = lanes.step
    bus_free = lanes.bus_free
    arrives = lanes.arrives
    shift = lanes.shift
    dying = lanes.dying
    is_dying = lanes.is_dying
    odd_in = lanes.odd
    time = layout.time
    device_gap = layout.device_gap
    workspace = layout.workspace
    copies_count = layout.copies_in_memory
    next_start = layout.next_start
    next_op = layout.next
    output = layout.output
    num_devices = np.uintp(layout.num_devices)
    held = lanes.held
    before = lanes.before
    most = lanes.most
    last = lanes.base_last
    gone_at = lanes.gone
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
            save(layout, lanes, device, op, here, remote, odd)
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
                run_odd(layout, lanes, device, held, op, here, targets, last, gone, lane, number)
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
    extra = lanes.extra
    pair = here * np.uintp(layout.num_devices)
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
    arrives = lanes.arrives
    bus_free = lanes.bus_free
    latency = layout.sent_latency
    seconds_per_byte = layout.sent_seconds_per_byte
    bus_of = layout.bus
    bus_gap = layout.bus_gap
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


@compiled
def most_moves(start):
    """The most moves that sixteen neighbours in a row make between them."""
    most = 0
    count = len(start) - 1
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
