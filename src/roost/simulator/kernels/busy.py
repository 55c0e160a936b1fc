"""Transfers that keep both ends busy: ops take longer, and devices are busy after them.

Every function is given `layout.busy`, or what was made of it. Where that is None it does nothing,
and nothing of it is left in the machine code: Numba leaves out branches on an argument that is
None. So clusters without such figures do not pay for them.
"""

from __future__ import annotations

import numpy as np

from roost.simulator.kernels.base import ONE, ZERO, compiled, inlined, lowest_bit


@compiled
def nothing_yet(busy, num_ops):
    """[ops] seconds that each op takes longer, before anything was sent."""
    if busy is None:
        return None
    return np.zeros(num_ops)


@inlined
def longer(takes, extra, op):
    """Seconds of an op, with the tensors it receives."""
    if extra is None:
        return takes
    return takes + extra[op]


@inlined
def busy_after(free, after, op):
    """The moment when a device is free again, after all the sends of an op."""
    if after is None:
        return free
    return free + after[op]


@inlined
def sending(busy, pair, remote):
    """Seconds of a sender for one tensor to the devices whose bit is set; `pair` is where its row
    begins."""
    total = 0.0
    while remote != ZERO:
        total += busy.sender[pair + lowest_bit(remote)]
        remote &= remote - ONE
    return total


@inlined
def cross(busy, layout, device, op, here, remote, extra, after, at):
    """The output of an op goes to the devices whose bit is set: add to `extra` of who receives it
    and to `after[at]`.

    Called for one op after the other, in dispatch order.
    """
    if busy is not None:
        pair = here * np.uintp(layout.num_devices)
        after[at] += sending(busy, pair, remote)
        left = remote
        for edge in range(
            np.uintp(layout.next_start[op]), np.uintp(layout.next_start[op + np.uintp(1)])
        ):
            reader = np.uintp(layout.next[edge])
            there = np.uintp(device[reader])
            if (left >> there) & ONE != ZERO:
                left &= ~(ONE << there)
                extra[reader] += busy.receiver[pair + there]


@inlined
def cross_in_turn(busy, layout, turn_of, device, op, here, remote, extra, after, at):
    """The same where ops are dispatched in the order of `turn_of` [ops]: called in that order."""
    if busy is not None:
        pair = here * np.uintp(layout.num_devices)
        after[at] += sending(busy, pair, remote)
        while remote != ZERO:
            there = lowest_bit(remote)
            remote &= remote - ONE
            first = np.int64(-1)
            for edge in range(
                np.uintp(layout.next_start[op]), np.uintp(layout.next_start[op + np.uintp(1)])
            ):
                reader = np.int64(layout.next[edge])
                if np.uintp(device[reader]) == there and (
                    first < 0 or turn_of[reader] < turn_of[first]
                ):
                    first = reader
            extra[first] += busy.receiver[pair + there]


@inlined
def with_ends(busy, takes, pair):
    """Seconds of a transfer and of both of its ends together: what placers expect it to cost."""
    if busy is None:
        return takes
    return takes + busy.sender[pair] + busy.receiver[pair]


@inlined
def with_receiver(busy, takes, pair):
    """Seconds of an op, with one tensor that it receives."""
    if busy is None:
        return takes
    return takes + busy.receiver[pair]


@inlined
def keep_sender(busy, free, source, pair):
    """The sender is free later, for one tensor."""
    if busy is not None:
        free[source] += busy.sender[pair]


@compiled
def crossings(busy, layout, device):
    """[ops] seconds that each op takes longer for what it is sent, and that its device is busy
    after it with sends."""
    if busy is None:
        return None, None
    extra = np.zeros(len(device))
    after = np.zeros(len(device))
    _all_sends(busy, layout, device, extra, after)
    return extra, after


@inlined
def _all_sends(busy, layout, device, extra, after):
    for op in range(np.uintp(len(device))):
        here = np.uintp(device[op])
        targets = ZERO
        for edge in range(
            np.uintp(layout.next_start[op]), np.uintp(layout.next_start[op + np.uintp(1)])
        ):
            targets |= ONE << np.uint64(device[layout.next[edge]])
        remote = targets & ~(ONE << here)
        if remote != ZERO:
            cross(busy, layout, device, op, here, remote, extra, after, op)


@inlined
def add_fetches(busy, layout, device, home, fetches, extra, after):
    """Add what is fetched, to the first user of each copy, and what goes home, after each
    update."""
    if busy is not None:
        num_devices = np.uintp(layout.num_devices)
        for op in range(np.uintp(len(device))):
            if layout.is_update[op]:
                here = np.uintp(device[op])
                for number in range(layout.use_start[op], layout.use_start[op + np.uintp(1)]):
                    there = np.uintp(home[layout.use[number]])
                    if there != here:
                        after[op] += busy.sender[here * num_devices + there]
        for copy in range(fetches.num_copies):
            first = fetches.user_op[fetches.first_user[copy]]
            there = np.uintp(home[fetches.parameter[copy]])
            extra[first] += busy.receiver[there * num_devices + np.uintp(device[first])]
