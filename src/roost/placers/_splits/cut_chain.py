"""The dynamic programme of `contiguous`: the cheapest way to cut a chain into parts and give each a
device."""

from __future__ import annotations

import numpy as np

from roost.simulator.kernels.base import compiled


@compiled
def cheapest_parts(
    pipelined,
    waited,
    backward,
    beside,
    beside_late,
    held,
    passing,
    most,
    penalty,
    counts,
    latency,
    rate,
    traffic,
):
    """Parts as rows of (end, kind), the last part first: with the fewest seconds in all, or in the
    slowest part.

    pipelined: whether it is the slowest part that counts, and all of them only where that is equal
    waited: [pieces + 1, kinds] seconds of all pieces before, of ops that other layers wait for;
    backward: of those among them that come after the backward pass of later layers; beside,
    beside_late: the same of ops that no other layer waits for held: [pieces + 1] bytes of all
    pieces before; passing: [pieces] bytes held for a while most: [kinds] bytes a device holds;
    penalty: seconds for each byte beyond counts: [kinds] devices of each; latency, rate: [kinds,
    kinds] of the link from one to another traffic: [4, pieces + 1, pieces + 1] for a part from i to
    j: tensors and bytes it gets from before, and sends back
    """
    pieces, kinds = len(held) - 1, len(counts)
    stride = np.ones(kinds + 1, np.int64)
    for kind in range(kinds):
        stride[kind + 1] = stride[kind] * (counts[kind] + 1)
    states = stride[kinds]
    # The state after a part: how many devices of each kind are taken, and the kind of the last.
    cost = np.full((pieces + 1, states, kinds), np.inf)
    # Seconds from the start of a part's backward pass to the end of the step, in the cheapest way
    # to get there; where parts are pipelined, the seconds of all parts.
    rest = np.zeros((pieces + 1, states, kinds))
    before = np.full((pieces + 1, states, kinds, 2), -1, np.int32)
    for i in range(pieces):
        for state in range(states if i > 0 else 1):
            for last in range(kinds if i > 0 else 1):
                so_far = cost[i, state, last] if i > 0 else 0.0
                if so_far == np.inf:
                    continue
                for kind in range(kinds):
                    if state // stride[kind] % (counts[kind] + 1) == counts[kind]:
                        continue
                    after, peak = state + stride[kind], 0.0
                    for j in range(i + 1, pieces + 1):
                        peak = max(peak, passing[j - 1])
                        own = waited[j, kind] - waited[i, kind]
                        aside = beside[j, kind] - beside[i, kind]
                        # What need not come last is done while the other parts run.
                        if i == 0 and j < pieces:
                            aside = beside_late[j, kind]
                        got, back, ending = 0.0, 0.0, 0.0
                        if i > 0:
                            got = (
                                traffic[0, i, j] * latency[last, kind]
                                + traffic[1, i, j] * rate[last, kind]
                            )
                            back = (
                                traffic[2, i, j] * latency[kind, last]
                                + traffic[3, i, j] * rate[kind, last]
                            )
                            ending = rest[i, state, last]
                        over = penalty * max(0.0, held[j] - held[i] + peak - most[kind])
                        if pipelined:
                            total = max(so_far, own + aside + got + back + over)
                            ending += own + aside + got + back
                        else:
                            ending += back
                            total = so_far + own + got + back + max(0.0, aside - ending) + over
                            ending = backward[j, kind] - backward[i, kind] + max(aside, ending)
                        known = cost[j, after, kind]
                        if total < known or (
                            pipelined and total == known and ending < rest[j, after, kind]
                        ):
                            cost[j, after, kind], rest[j, after, kind] = total, ending
                            before[j, after, kind, 0], before[j, after, kind, 1] = i, last
    return _read_back(cost[pieces], before, stride)


@compiled
def _read_back(cost, before, stride):
    """The parts that lead to the cheapest state at the end."""
    best, state, kind = np.inf, 0, 0
    for s in range(cost.shape[0]):
        for k in range(cost.shape[1]):
            if cost[s, k] < best:
                best, state, kind = cost[s, k], s, k
    pieces = len(before) - 1
    parts = np.empty((pieces, 2), np.int64)
    number, end = 0, pieces
    while end > 0:
        parts[number, 0], parts[number, 1] = end, kind
        number += 1
        start, previous = before[end, state, kind, 0], before[end, state, kind, 1]
        state -= stride[kind]
        end, kind = start, previous
    return parts[:number]
