"""The copies of remote parameters that each device fetches: their order, and what each waits for.

The same plan as `reference.plan_fetches`, on flat arrays: it depends on the order of the uses and
the size of the windows, not on time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.simulator.kernels.base import compiled


class Fetches(NamedTuple):
    """Copies of parameters, numbered in the order in which their first users are dispatched."""

    num_copies: int
    window: Array  # [devices] i8 bytes reserved; 0 where nothing is fetched
    parameter: Array  # [copies] u4
    first: Array  # [devices] i4 the first copy to fetch, or -1
    following: Array  # [copies] i4 the next on the same device, or -1
    first_user: Array  # [copies] i4 index in `user_op` and `next_user`, or -1
    next_user: Array  # [uses] i4 the next user of the same copy, or -1
    user_op: Array  # [uses] u4 the op of each use
    copy_of: Array  # [uses] i4 the copy it reads, or -1 where the parameter lives on its device
    num_users: Array  # [copies] i4
    replaced: Array  # [copies] i4 the first copy whose place it takes, or -1
    next_replaced: Array  # [copies] i4 the next such, or -1


@compiled
def fetches_anything(layout, device, home):
    """True where an op reads a parameter that lives elsewhere."""
    use_start = layout.use_start
    use = layout.use
    first = np.uintp(use_start[0])
    for op in range(np.uintp(len(device))):
        beyond = np.uintp(use_start[op + np.uintp(1)])
        for number in range(first, beyond):
            if home[use[number]] != device[op]:
                return True
        first = beyond
    return False


@compiled
def plan_fetches(layout, device, home, prefetch):
    """The plan for ops on `device` [ops], parameters at `home` [parameters], windows of `prefetch`
    [devices] bytes."""
    num_devices = layout.num_devices
    num_uses = len(layout.use)
    sizes = layout.parameter_bytes
    use_start = layout.use_start
    use = layout.use
    window = np.zeros(num_devices, np.int64)
    for op in range(len(device)):
        needs = 0
        any_remote = False
        for number in range(use_start[op], use_start[op + 1]):
            if home[use[number]] != device[op]:
                needs += sizes[use[number]]
                any_remote = True
        if any_remote:
            window[device[op]] = max(window[device[op]], needs, prefetch[device[op]])

    parameter = np.empty(num_uses, np.uint32)
    first = np.full(num_devices, -1, np.int32)
    latest_copy = np.full(num_devices, -1, np.int32)
    following = np.full(num_uses, -1, np.int32)
    first_user = np.full(num_uses, -1, np.int32)
    next_user = np.full(num_uses, -1, np.int32)
    last_user = np.full(num_uses, -1, np.int32)
    user_op = np.zeros(num_uses, np.uint32)
    copy_of = np.full(num_uses, -1, np.int32)
    num_users = np.zeros(num_uses, np.int32)
    replaced = np.full(num_uses, -1, np.int32)
    next_replaced = np.full(num_uses, -1, np.int32)
    # The copy of a parameter in a device's window, or -1.
    held = np.full(len(sizes) * num_devices, -1, np.int32)
    # Uses of each device in order. The copy used longest ago is the first whose last use this is.
    oldest_use = np.full(num_devices, -1, np.int32)
    newest_use = np.full(num_devices, -1, np.int32)
    next_use = np.full(num_uses, -1, np.int32)
    room = window.copy()
    count = 0
    for op in range(len(device)):
        here = device[op]
        # First the copies that are still there, so that none makes room for another of the same op.
        for number in range(use_start[op], use_start[op + 1]):
            copy = held[use[number] * num_devices + here]
            if copy >= 0:
                copy_of[number] = copy
                next_user[last_user[copy]] = number
                last_user[copy] = number
                num_users[copy] += 1
                user_op[number] = op
                next_use[newest_use[here]] = number
                newest_use[here] = number
        for number in range(use_start[op], use_start[op + 1]):
            wanted = use[number]
            if home[wanted] == here or copy_of[number] >= 0:
                continue
            copy = count
            count += 1
            parameter[copy] = wanted
            last_replaced = -1
            while room[here] < sizes[wanted]:
                old_use = oldest_use[here]
                oldest_use[here] = next_use[old_use]
                old = copy_of[old_use]
                if last_user[old] != old_use:
                    continue  # used again since
                room[here] += sizes[parameter[old]]
                held[parameter[old] * num_devices + here] = -1
                if last_replaced < 0:
                    replaced[copy] = old
                else:
                    next_replaced[last_replaced] = old
                last_replaced = old
            room[here] -= sizes[wanted]
            held[wanted * num_devices + here] = copy
            if latest_copy[here] < 0:
                first[here] = copy
            else:
                following[latest_copy[here]] = copy
            latest_copy[here] = copy
            copy_of[number] = copy
            first_user[copy] = last_user[copy] = number
            num_users[copy] = 1
            user_op[number] = op
            if oldest_use[here] < 0:
                oldest_use[here] = number
            else:
                next_use[newest_use[here]] = number
            newest_use[here] = number
    return Fetches(
        count,
        window,
        parameter,
        first,
        following,
        first_user,
        next_user,
        user_op,
        copy_of,
        num_users,
        replaced,
        next_replaced,
    )
