"""Any placement, event by event: shared buses, fetched parameters, every order, and the full
timeline.

The same events in the same order as `reference.simulate`. Everything that is ever put on a bus is
put there when an op finishes, or at the start; so finished ops taken in order of time issue the
transfers of every bus in order of time.
"""

from __future__ import annotations

import numpy as np

from roost.core.timeline import FETCH, HOME
from roost.simulator.kernels.base import ONE, ZERO, compiled, note, send
from roost.simulator.kernels.busy import add_fetches, busy_after, crossings, longer
from roost.simulator.kernels.heap import heap_pop, heap_push


@compiled
def events(layout, device, home, fetches, fifo, begun, start, finish, moves, record):
    """The step time and the number of transfers.

    Writes the ops in the order they were `begun` [ops], their `start` and `finish` [ops], and where
    `record` is set each of the `moves`.
    """
    num_ops = len(device)
    num_devices = np.uintp(layout.num_devices)
    # Taken out of their tuples once: inside a loop Numba would count references each time.
    next_start = layout.next_start
    next_op = layout.next
    sizes = layout.parameter_bytes
    time = layout.time
    bus = layout.bus
    bus_gap = layout.bus_gap
    device_gap = layout.device_gap
    is_update = layout.is_update
    latency, seconds_per_byte, sent_seconds_per_byte = (
        layout.latency, layout.seconds_per_byte, layout.sent_seconds_per_byte
    )  # fmt: skip
    use_start = layout.use_start
    use = layout.use
    first_user = fetches.first_user
    next_user = fetches.next_user
    user_op = fetches.user_op
    copy_of = fetches.copy_of
    next_replaced = fetches.next_replaced
    following = fetches.following
    fetched = fetches.parameter
    free = np.zeros(64)
    bus_free = np.zeros(len(bus_gap))
    arrives = np.zeros(64)
    ready = np.zeros(num_ops)
    waiting = layout.num_inputs.copy()
    extra, busy_for = crossings(layout.busy, layout, device)
    add_fetches(layout.busy, layout, device, home, fetches, extra, busy_for)
    for copy in range(fetches.num_copies):
        user = first_user[copy]
        while user >= 0:
            waiting[user_op[user]] += 1
            user = next_user[user]
    unfinished = fetches.num_users.copy()  # [copies] users that have yet to finish
    replaced = fetches.replaced.copy()  # [copies] the next copy whose users must finish first
    fetch = fetches.first.copy()  # [devices] the next copy to ask for
    # Ops of each device in dispatch order: the next to take, and the one after each.
    head = np.full(64, num_ops)
    after = np.full(num_ops, num_ops)
    for op in range(num_ops - 1, -1, -1):
        after[op] = head[device[op]]
        head[device[op]] = op
    # Tags below num_ops are ops that finish (in turn with fifo, else by position); from there on,
    # ops that get ready.
    times = np.empty(num_ops)
    tags = np.empty(num_ops, np.uint32)
    size = 0
    turn = 0
    step_time = 0.0
    number = 0
    left_to_run = num_ops
    if fifo:
        for op in range(num_ops):
            if waiting[op] == 0:
                heap_push(times, tags, size, 0.0, np.uint32(num_ops + op))
                size += 1

    # `touched` devices may have something new to do: fetch, then (with a fixed order) begin ops.
    now = 0.0
    asking = np.uintp(0)
    starting = True
    while left_to_run > 0:
        touched = ZERO
        if starting:
            touched = (ONE << num_devices) - ONE if num_devices < np.uintp(64) else ~ZERO
        else:
            now = times[0]
            tag = np.int64(tags[0])
            heap_pop(times, tags, size)
            size -= 1
            if tag >= num_ops:  # ready: begin it as soon as its device is free
                op = tag - num_ops
                here = np.uintp(device[op])
                start[op] = now if now > free[here] else free[here]
                takes = longer(time[np.uintp(op) * num_devices + here], extra, op)
                finish[op] = start[op] + takes
                rested = finish[op] + device_gap[here] if takes > 0.0 else finish[op]
                free[here] = busy_after(rested, busy_for, op)
                heap_push(times, tags, size, finish[op], np.uint32(turn))
                size += 1
                begun[turn] = op
                turn += 1
                continue
            op = np.int64(begun[tag]) if fifo else tag
            here = np.uintp(device[op])
            left_to_run -= 1
            step_time = now if now > step_time else step_time
            first = np.uintp(next_start[op])
            beyond = np.uintp(next_start[op + 1])
            targets = ZERO
            for edge in range(first, beyond):
                targets |= ONE << np.uint64(device[next_op[edge]])
            arrives[here] = now
            remote = targets & ~(ONE << here)
            if remote != ZERO:
                number = send(
                    layout,
                    np.uintp(op),
                    here,
                    remote,
                    now,
                    bus_free,
                    arrives,
                    moves,
                    number,
                    record,
                )
            for edge in range(first, beyond):
                consumer = next_op[edge]
                arrival = arrives[device[consumer]]
                ready[consumer] = arrival if arrival > ready[consumer] else ready[consumer]
                waiting[consumer] -= 1
                if waiting[consumer] == 0:
                    if fifo:
                        heap_push(times, tags, size, ready[consumer], np.uint32(num_ops + consumer))
                        size += 1
                    else:
                        touched |= ONE << np.uint64(device[consumer])
            for number_of_use in range(use_start[op], use_start[op + 1]):
                copy = copy_of[number_of_use]
                parameter = use[number_of_use]
                if copy >= 0:
                    unfinished[copy] -= 1
                    if is_update[op]:
                        there = np.uintp(home[parameter])
                        pair = here * num_devices + there
                        line = bus[pair]
                        begin = now if now > bus_free[line] else bus_free[line]
                        takes = (
                            latency[pair]
                            + np.float64(sizes[parameter]) * sent_seconds_per_byte[pair]
                        )
                        bus_free[line] = begin + takes + bus_gap[line]
                        step_time = begin + takes if begin + takes > step_time else step_time
                        if record:
                            note(moves, number, parameter, here, there, HOME, begin, begin + takes)
                        number += 1
            asking = here

        # At the start every copy is tried once, in dispatch order of the first users, which is how
        # they are numbered.
        for attempt in range(fetches.num_copies if starting else 1):
            here = np.uintp(device[user_op[first_user[attempt]]]) if starting else asking
            while fetch[here] >= 0:
                copy = fetch[here]
                if starting and copy != attempt:
                    break
                while replaced[copy] >= 0 and unfinished[replaced[copy]] == 0:
                    replaced[copy] = next_replaced[replaced[copy]]
                if replaced[copy] >= 0:
                    break
                fetch[here] = following[copy]
                parameter = fetched[copy]
                there = np.uintp(home[parameter])
                pair = there * num_devices + here
                line = bus[pair]
                begin = now if now > bus_free[line] else bus_free[line]
                takes = latency[pair] + np.float64(sizes[parameter]) * seconds_per_byte[pair]
                bus_free[line] = begin + takes + bus_gap[line]
                if record:
                    note(moves, number, parameter, there, here, FETCH, begin, begin + takes)
                number += 1
                user = first_user[copy]
                while user >= 0:
                    op = np.int64(user_op[user])
                    ready[op] = begin + takes if begin + takes > ready[op] else ready[op]
                    waiting[op] -= 1
                    if waiting[op] == 0:
                        if fifo:
                            heap_push(times, tags, size, ready[op], np.uint32(num_ops + op))
                            size += 1
                        else:
                            touched |= ONE << here
                    user = next_user[user]
        starting = False

        if not fifo:
            for d in range(num_devices):
                if not (touched >> d) & ONE:
                    continue
                while head[d] < num_ops and waiting[head[d]] == 0:
                    op = head[d]
                    head[d] = after[op]
                    start[op] = ready[op] if ready[op] > free[d] else free[d]
                    takes = longer(time[np.uintp(op) * num_devices + np.uintp(d)], extra, op)
                    finish[op] = start[op] + takes
                    rested = finish[op] + device_gap[d] if takes > 0.0 else finish[op]
                    free[d] = busy_after(rested, busy_for, op)
                    heap_push(times, tags, size, finish[op], np.uint32(op))
                    size += 1
                    begun[turn] = op
                    turn += 1
    return step_time, number
