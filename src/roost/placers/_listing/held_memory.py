"""Memory as a list scheduler sees it: bytes that the placed units hold at some moments of a step.

The dispatch order is divided into `MOMENTS` stretches. Each stretch has one moment: the op at which
one device that runs everything would hold most. A tensor counts on a device at each moment from its
making to its last known use there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.simulator.kernels.base import ONE, inlined

MOMENTS = np.uintp(24)


class Listing(NamedTuple):
    """Units of a problem, and related ops: the arrays that list schedulers read beside `Layout`.

    Ops are numbered by their position in the dispatch order, as in the layout.
    """

    unit: Array  # [ops] u4
    unit_start: Array  # [units + 1] u4 ops of unit i are unit_op[unit_start[i]:unit_start[i + 1]]
    unit_op: Array  # [ops] u4 ascending in each unit, parameters left out
    unit_time: Array  # [units * devices] f8 seconds
    allowed: Array  # [units] u8 a bit for each device
    resident: Array  # [units] i8 bytes of its parameters
    lasting: Array  # [units] i8 bytes of its parameters and of those outputs that live long
    need: Array  # [units] i8 the most bytes that it can add to a device at any moment
    first: Array  # [ops] u1 the first moment that is not before it
    beyond: Array  # [ops] u1 the first moment that is after it
    last_beyond: Array  # [ops] u1 the same for its last consumer
    before: Array  # [ops * KINDS] i4 an earlier op that it may want to be with, or -1
    partner: Array  # [ops] i4 an earlier op whose output meets its own in a consumer, or -1
    partner_time: Array  # [ops] f8 seconds to bring the two together
    rival: Array  # [ops] i4 a more urgent op that comes soon after, or -1
    rival_home: Array  # [ops] i4 the biggest input of that op, where it comes before, or -1
    copies_in_memory: bool


class HeldBytes(NamedTuple):
    """Bytes held by the units placed so far."""

    base: Array  # [devices] i8 parameters
    others: Array  # [devices * MOMENTS] i8 the rest
    peak: Array  # [devices] i8 the most of both
    # [ops * devices] u1 the first moment at which a tensor is no longer known to be there.
    until: Array


@inlined
def inputs_of(layout, op):
    """Positions in `layout.previous` of the ops whose outputs an op reads."""
    return range(layout.previous_start[op], layout.previous_start[op + ONE])


@inlined
def consumers_of(layout, op):
    """Positions in `layout.next` of the ops that read the output of an op."""
    return range(layout.next_start[op], layout.next_start[op + ONE])


@inlined
def ops_of(listing, unit):
    """Positions in `listing.unit_op` of the ops of a unit."""
    return range(listing.unit_start[unit], listing.unit_start[unit + ONE])


@inlined
def clear_held(held):
    """Nothing is held."""
    held.base[:] = 0
    held.others[:] = 0
    held.peak[:] = 0
    held.until[:] = 0


@inlined
def peak_with(layout, listing, held, unit, d, cautious, extra):
    """The most bytes held on a device if this unit were there too; `extra` [MOMENTS] is scratch."""
    num_devices = np.uintp(layout.num_devices)
    first = listing.first
    beyond = listing.beyond
    output = layout.output
    until = held.until
    for k in range(MOMENTS):
        extra[k] = 0
    for number in ops_of(listing, unit):
        op = np.uintp(listing.unit_op[number])
        if listing.copies_in_memory:
            for edge in inputs_of(layout, op):
                source = np.uintp(layout.previous[edge])
                since = max(first[source], until[source * num_devices + d])
                for k in range(np.uintp(since), np.uintp(beyond[op])):
                    extra[k] += output[source]
        if cautious:
            since = max(first[op], until[op * num_devices + d])
            for k in range(np.uintp(since), np.uintp(listing.last_beyond[op])):
                extra[k] += output[op]
    most = np.int64(0)
    for k in range(MOMENTS):
        most = max(most, held.others[d * MOMENTS + k] + extra[k])
    return held.base[d] + listing.resident[unit] + most


@inlined
def hold_unit(layout, listing, held, unit, d, cautious):
    """Add the bytes of a unit to those of its device."""
    num_devices = np.uintp(layout.num_devices)
    first = listing.first
    beyond = listing.beyond
    output = layout.output
    until = held.until
    others = held.others
    held.base[d] += listing.resident[unit]
    for number in ops_of(listing, unit):
        op = np.uintp(listing.unit_op[number])
        if listing.copies_in_memory:
            for edge in inputs_of(layout, op):
                source = np.uintp(layout.previous[edge])
                _hold_until(
                    others,
                    until,
                    d,
                    source * num_devices + d,
                    first[source],
                    beyond[op],
                    output[source],
                )
        if cautious:
            _hold_until(
                others,
                until,
                d,
                op * num_devices + d,
                first[op],
                listing.last_beyond[op],
                output[op],
            )
    most = np.int64(0)
    for k in range(MOMENTS):
        most = max(most, others[d * MOMENTS + k])
    held.peak[d] = held.base[d] + most


@inlined
def _hold_until(others, until, d, tensor, first, beyond, nbytes):
    """Hold a tensor on a device up to a moment; it may be there already for some of the time."""
    since = max(first, until[tensor])
    if since < beyond:
        until[tensor] = beyond
        for k in range(np.uintp(since), np.uintp(beyond)):
            others[d * MOMENTS + k] += nbytes
