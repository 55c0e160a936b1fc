"""Peak memory in time, for placements without a fixed order. Same spans as `memory.in_time_order`.

The ops of a device start and finish in order, so only what comes from elsewhere has to be sorted:
received copies, and outputs that leave later than their last use at home.
"""

from __future__ import annotations

import numpy as np

from roost.simulator.kernels.base import ONE, ZERO, compiled


@compiled
def peak_in_time(layout, device, begun, start, finish, moves, num_moves, held, peak):
    """Write the `peak` [devices], given what is always `held` [devices], which is overwritten."""
    num_ops = len(device)
    num_devices = layout.num_devices
    # Taken out of their tuples once: inside a loop Numba would count references each time.
    output = layout.output
    workspace = layout.workspace
    next_start = layout.next_start
    next_op = layout.next
    copies_count = layout.copies_in_memory
    kind = moves.kind
    tensor = moves.tensor
    target = moves.target
    sent_from = moves.start
    sent_until = moves.finish
    sent = np.zeros(num_ops)  # when the output of an op has left for the last time
    num_sends = 0
    for move in range(num_moves):
        if kind[move] == 0:
            num_sends += 1
            op = tensor[move]
            sent[op] = max(sent[op], sent_until[move])

    given_back = np.zeros(num_ops, np.int64)  # bytes given back on its device when an op finishes
    late_start = np.zeros(num_devices + 1, np.int64)
    late_count = np.zeros(num_devices, np.int64)
    is_late = np.zeros(num_ops, np.bool_)
    last = np.zeros(64, np.uint32)
    for op in range(num_ops):
        here = device[op]
        size = output[op]
        given_back[op] += workspace[op]
        seen = ONE << np.uint64(here)
        last[here] = op
        for edge in range(next_start[op], next_start[op + 1]):
            consumer = next_op[edge]
            there = device[consumer]
            bit = ONE << np.uint64(there)
            if not seen & bit or finish[consumer] > finish[last[there]]:
                last[there] = consumer
            seen |= bit
        if sent[op] > finish[last[here]]:
            is_late[op] = True
            late_start[here + 1] += 1
        else:
            given_back[last[here]] += size
        if copies_count:
            for there in range(num_devices):
                if there != here and seen & (ONE << np.uint64(there)) != ZERO:
                    given_back[last[there]] += size

    # What comes from elsewhere, by device: copies that begin, outputs that have left.
    copy_start = np.zeros(num_devices + 1, np.int64)
    copy_count = np.zeros(num_devices, np.int64)
    if copies_count:
        for move in range(num_moves):
            if kind[move] == 0:
                copy_start[target[move] + 1] += 1
    own_start = np.zeros(num_devices + 1, np.int64)
    own_count = np.zeros(num_devices, np.int64)
    for op in range(num_ops):
        own_start[device[op] + 1] += 1
    for d in range(num_devices):
        copy_start[d + 1] += copy_start[d]
        late_start[d + 1] += late_start[d]
        own_start[d + 1] += own_start[d]
    copy_time = np.empty(num_sends)
    copy_size = np.empty(num_sends, np.int64)
    late_time = np.empty(num_ops)
    late_size = np.empty(num_ops, np.int64)
    own = np.empty(num_ops, np.int64)
    if copies_count:
        for move in range(num_moves):
            if kind[move] == 0:
                d = target[move]
                slot = copy_start[d] + copy_count[d]
                copy_count[d] += 1
                copy_time[slot] = sent_from[move]
                copy_size[slot] = output[tensor[move]]
    for turn in range(num_ops):
        op = begun[turn]
        d = device[op]
        own[own_start[d] + own_count[d]] = op
        own_count[d] += 1
        if is_late[op]:
            slot = late_start[d] + late_count[d]
            late_count[d] += 1
            late_time[slot] = sent[op]
            late_size[slot] = output[op]

    never = np.inf
    for d in range(num_devices):
        now_held = held[d]
        most = now_held
        copies = np.argsort(copy_time[copy_start[d] : copy_start[d + 1]]) + copy_start[d]
        lates = np.argsort(late_time[late_start[d] : late_start[d + 1]]) + late_start[d]
        begin = own_start[d]
        end = own_start[d]
        copy = 0
        late = 0
        beyond = own_start[d + 1]
        while begin < beyond or copy < len(copies):
            begins = start[own[begin]] if begin < beyond else never
            copied = copy_time[copies[copy]] if copy < len(copies) else never
            taken = begins if begins < copied else copied
            # What is given back up to this moment is gone before anything is taken.
            while end < beyond and finish[own[end]] <= taken:
                now_held -= given_back[own[end]]
                end += 1
            while late < len(lates) and late_time[lates[late]] <= taken:
                now_held -= late_size[lates[late]]
                late += 1
            if begin < beyond and (copy >= len(copies) or begins <= copied):
                now_held += output[own[begin]] + workspace[own[begin]]
                begin += 1
            else:
                now_held += copy_size[copies[copy]]
                copy += 1
            most = now_held if now_held > most else most
        peak[d] = most
