"""Many placements in one call: each takes the fastest loop that is exact for it."""

from __future__ import annotations

import numpy as np

from roost.simulator.kernels.base import ONE, ZERO, compiled, new_moves
from roost.simulator.kernels.events import events
from roost.simulator.kernels.fetches import fetches_anything, plan_fetches
from roost.simulator.kernels.fifo import fifo
from roost.simulator.kernels.held import peak_in_time
from roost.simulator.kernels.push import push, push_times


@compiled
def first_wrong(devices, allowed, leader, num_devices):
    """The first row of `devices` [batch, ops] that leaves the cluster or breaks a rule, or -1.

    `allowed` [ops] has a bit for each device the op may run on; `leader` [ops] is an op it shares a
    device with.
    """
    for row in range(len(devices)):
        for op in range(devices.shape[1]):
            d = devices[row, op]
            if d < 0 or d >= num_devices:
                return row
            if (allowed[op] >> np.uint64(d)) & ONE == ZERO or d != devices[row, leader[op]]:
                return row
    return -1


@compiled
def first_wrong_neighbour(
    device, start, move_op, move_device, allowed, leader, member_start, member, num_devices
):
    """The first neighbour of a placement that leaves the cluster or breaks a rule, or -1.

    `member[member_start[op]:member_start[op + 1]]` are the ops that op leads.
    """
    placed = device.copy()
    for number in range(len(start) - 1):
        for move in range(start[number], start[number + 1]):
            op = move_op[move]
            there = move_device[move]
            if op < 0 or op >= len(device) or there < 0 or there >= num_devices:
                return number
            placed[op] = there
        for move in range(start[number], start[number + 1]):
            op = move_op[move]
            if (allowed[op] >> np.uint64(placed[op])) & ONE == ZERO or placed[op] != placed[
                leader[op]
            ]:
                return number
            for other in range(member_start[op], member_start[op + 1]):
                if placed[member[other]] != placed[op]:
                    return number
        for move in range(start[number], start[number + 1]):
            placed[move_op[move]] = device[move_op[move]]
    return -1


@compiled
def run_batch(layout, devices, prefetch, in_fifo, shared, memory, step_time, peak, num_transfers):
    """Simulate each row of `devices` [batch, ops of the graph]; write a step time, peaks and
    transfers for each.

    `shared`: whether a bus has several senders. `memory`: whether peaks are wanted.
    """
    num_ops = len(layout.op)
    num_devices = layout.num_devices
    device = np.empty(num_ops, np.uint32)
    home = np.empty(len(layout.parameter_op), np.uint32)
    ready = np.zeros(num_ops)
    dying = np.zeros(num_ops, np.int64)
    free = np.zeros(64)
    bus_free = np.zeros(len(layout.bus_gap))
    arrives = np.zeros(64)
    last = np.zeros(64, np.uint32)
    held = np.zeros(64, np.int64)
    begun = np.empty(0, np.uint32)
    start = np.empty(0)
    finish = np.empty(0)
    moves = new_moves(0)
    no_moves = new_moves(0)
    for row in range(len(devices)):
        for op in range(np.uintp(num_ops)):
            device[op] = devices[row, layout.op[op]]
        for d in range(num_devices):
            held[d] = 0
        for parameter in range(np.uintp(len(home))):
            home[parameter] = devices[row, layout.parameter_op[parameter]]
            held[home[parameter]] += layout.parameter_bytes[parameter]
        fetching = fetches_anything(layout, device, home)
        if fetching or shared or in_fifo:
            if len(begun) < num_ops:
                begun = np.empty(num_ops, np.uint32)
                start = np.empty(num_ops)
                finish = np.empty(num_ops)
                if memory and in_fifo:
                    moves = new_moves(len(layout.next) + 2 * len(layout.use))
            record = memory and in_fifo
            if fetching or shared:
                fetches = plan_fetches(layout, device, home, prefetch)
                for d in range(num_devices):
                    held[d] += fetches.window[d]
                step_time[row], num_transfers[row] = events(
                    layout, device, home, fetches, in_fifo, begun, start, finish, moves, record
                )
            else:
                step_time[row], num_transfers[row] = fifo(
                    layout, device, begun, start, finish, moves, record
                )
            if record:
                peak_in_time(
                    layout, device, begun, start, finish, moves, num_transfers[row], held, peak[row]
                )
            if memory and not in_fifo:  # peaks with a fixed order do not depend on times
                push(
                    layout,
                    device,
                    ready,
                    dying,
                    free,
                    bus_free,
                    arrives,
                    last,
                    held,
                    peak[row],
                    no_moves,
                )
        elif memory:
            step_time[row], num_transfers[row] = push(
                layout,
                device,
                ready,
                dying,
                free,
                bus_free,
                arrives,
                last,
                held,
                peak[row],
                no_moves,
            )
        else:
            step_time[row], num_transfers[row] = push_times(
                layout,
                device,
                ready,
                dying,
                free,
                bus_free,
                arrives,
                last,
                held,
                peak[row],
                no_moves,
            )


@compiled
def run_full(layout, device, home, prefetch, in_fifo):
    """One placement in full: times of every op and transfer, and the windows."""
    num_ops = len(device)
    begun = np.empty(num_ops, np.uint32)
    start = np.empty(num_ops)
    finish = np.empty(num_ops)
    moves = new_moves(len(layout.next) + 2 * len(layout.use))
    fetches = plan_fetches(layout, device, home, prefetch)
    step_time, count = events(
        layout, device, home, fetches, in_fifo, begun, start, finish, moves, True
    )
    return step_time, count, start, finish, moves, fetches.window
