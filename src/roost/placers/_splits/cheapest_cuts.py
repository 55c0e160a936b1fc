"""The dynamic programme of `contiguous`: the cheapest way to cut a chain and place its parts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.simulator.kernels.base import compiled


class SectionSeconds(NamedTuple):
    """Seconds of all sections before each, on each kind of device: [sections + 1, kinds]."""

    awaited: Array  # ops that other layers wait for
    backward: Array  # of these, ops after the backward pass of later layers
    unawaited: Array  # ops that no other layer waits for
    unawaited_late: Array  # of these, ops after the backward pass of later layers


class SectionBytes(NamedTuple):
    """Bytes of sections."""

    held: Array  # [sections + 1] of all sections before each
    passing: Array  # [sections] held for a while
    # [4, sections + 1, sections + 1] for a part from i to j: tensors and bytes it gets from
    # earlier parts, and sends back.
    traffic: Array


class DeviceKinds(NamedTuple):
    """Kinds of devices that are alike."""

    num_devices: Array  # [kinds]
    latency: Array  # [kinds, kinds] of the link from one to another
    seconds_per_byte: Array  # [kinds, kinds]


@compiled
def cheapest_parts(pipelined, seconds, nbytes, kinds, memory, penalty):
    """The cheapest parts as rows of (end, kind), the last part first.

    The cost is the seconds of all parts, or of the slowest part if `pipelined`, and of all only
    between equals. `memory` [kinds] bytes; `penalty` in seconds for each byte beyond.
    """
    awaited, backward, unawaited, unawaited_late = seconds
    held, passing, traffic = nbytes
    counts, latency, rate = kinds
    num_sections = len(held) - 1
    num_kinds = len(counts)
    stride = np.ones(num_kinds + 1, np.int64)
    for kind in range(num_kinds):
        stride[kind + 1] = stride[kind] * (counts[kind] + 1)
    states = stride[num_kinds]
    # The state after a part: how many devices of each kind are taken, and the kind of the last.
    cost = np.full((num_sections + 1, states, num_kinds), np.inf)
    # Seconds from the start of a part's backward pass to the end of the step, in the cheapest way
    # to get there; where parts are pipelined, the seconds of all parts.
    rest = np.zeros((num_sections + 1, states, num_kinds))
    before = np.full((num_sections + 1, states, num_kinds, 2), -1, np.int32)
    for i in range(num_sections):
        for state in range(states if i > 0 else 1):
            for last in range(num_kinds if i > 0 else 1):
                so_far = cost[i, state, last] if i > 0 else 0.0
                if so_far == np.inf:
                    continue
                for kind in range(num_kinds):
                    if state // stride[kind] % (counts[kind] + 1) == counts[kind]:
                        continue
                    after = state + stride[kind]
                    peak = 0.0
                    for j in range(i + 1, num_sections + 1):
                        peak = max(peak, passing[j - 1])
                        own = awaited[j, kind] - awaited[i, kind]
                        aside = unawaited[j, kind] - unawaited[i, kind]
                        # Work that need not come last is done while the other parts run.
                        if i == 0 and j < num_sections:
                            aside = unawaited_late[j, kind]
                        got = 0.0
                        back = 0.0
                        ending = 0.0
                        if i > 0:
                            tensors = traffic[0, i, j]
                            size = traffic[1, i, j]
                            got = tensors * latency[last, kind] + size * rate[last, kind]
                            tensors = traffic[2, i, j]
                            size = traffic[3, i, j]
                            back = tensors * latency[kind, last] + size * rate[kind, last]
                            ending = rest[i, state, last]
                        over = penalty * max(0.0, held[j] - held[i] + peak - memory[kind])
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
                            cost[j, after, kind] = total
                            rest[j, after, kind] = ending
                            before[j, after, kind, 0] = i
                            before[j, after, kind, 1] = last
    return _read_back(cost[num_sections], before, stride)


@compiled
def _read_back(cost, before, stride):
    """The parts that lead to the cheapest state at the end."""
    best = np.inf
    state = 0
    kind = 0
    for s in range(cost.shape[0]):
        for k in range(cost.shape[1]):
            if cost[s, k] < best:
                best = cost[s, k]
                state = s
                kind = k
    num_sections = len(before) - 1
    parts = np.empty((num_sections, 2), np.int64)
    number = 0
    end = num_sections
    while end > 0:
        parts[number, 0] = end
        parts[number, 1] = kind
        number += 1
        start = before[end, state, kind, 0]
        previous = before[end, state, kind, 1]
        state -= stride[kind]
        end = start
        kind = previous
    return parts[:number]
