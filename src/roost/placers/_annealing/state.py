"""The arrays of annealing: what can be moved, one chain, and the room that its loops work in."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.simulator.kernels.lane_state import new_lanes
from roost.simulator.kernels.vector import LANES


class Space(NamedTuple):
    """The units of a problem, and the blocks of them that are moved together.

    The first blocks are the units themselves, one each.
    """

    num_units: int
    num_devices: int
    unit_start: Array  # [units + 1] i8 ops of unit i are unit_op[unit_start[i]:unit_start[i + 1]]
    unit_op: Array  # [ops] i4 index in the graph
    allowed: Array  # [units] u8 a bit for each device
    near_start: Array  # [units + 1] i8 units that give it a tensor or take one, likewise
    near: Array  # [.] i4
    block_start: Array  # [blocks + 1] i8
    block_unit: Array  # [.] i4
    # [levels + 1] i8 blocks of one level: units, then parts of modules, modules, modules of
    # modules.
    level: Array
    row_start: Array  # [rows + 1] i8 rows are blocks side by side, of which windows are taken
    row_block: Array  # [.] i4
    longest_window: int
    # [.] i4 units that are parameters and their updates, where others read them; these may be
    # fetched.
    home: Array


class Tables(NamedTuple):
    """Ops of the graph and positions of the layout, and the memory of each device."""

    number_of: Array  # [ops] position of an op, or number of a parameter
    is_parameter: Array  # [ops] bool
    unit_of: Array  # [positions] i4
    capacity: Array  # [devices] i8 bytes


class Cooling(NamedTuple):
    """The length of an annealing, and its temperatures as shares of the step time."""

    steps: int  # batches of sixteen, or single moves
    hot: float  # at first
    cold: float  # in the end


class ChainState(NamedTuple):
    """One annealing chain; the loops write into its arrays.

    An excess is memory beyond the capacities, as shares of them; 0 where the placement fits.
    """

    placed: Array  # [units] i4 the devices now
    best: Array  # [units] i4 the best devices so far
    penalty: Array  # [1] f8 the price of an excess, as a factor on the step time
    best_step: Array  # [1] f8 seconds
    best_excess: Array  # [1] f8
    step: Array  # [1] f8 seconds of `placed`
    rng: Array  # [1] u8


class Draft(NamedTuple):
    """Moves of up to sixteen neighbours, as the lanes read them, and the units that they move."""

    start: Array  # [lanes + 1] i8 moves of lane i are start[i]:start[i + 1]
    op: Array  # [room] i4
    device: Array  # [room] i4
    unit_start: Array  # [lanes + 1] i8
    unit: Array  # [room] i4
    unit_device: Array  # [room] i4
    kind: Array  # [lanes] i8 of the move
    tries: Array  # [kinds] f8 how often each kind was tried lately
    gains: Array  # [kinds] f8 how much was gained by it
    odds: Array  # [kinds] f8 of each kind or one before it


class Scratch(NamedTuple):
    """Room to work in: the placement as each simulator reads it, and figures of each lane."""

    lanes: Any  # the state of sixteen simulations side by side
    draft: Draft
    device: Array  # [positions] u4
    home: Array  # [parameters] u4
    held: Array  # [64] i8 bytes of parameters on each device
    devices: Array  # [1, ops] i4 the placement as a batch of one
    step: Array  # [lanes] f8
    excess: Array  # [lanes] f8
    score: Array  # [lanes] f8
    critical: Array  # [units] i4 units that the step waits for
    mark: Array  # [units] bool, false between uses
    retry_start: Array  # [lanes + 1] i8
    retry_unit: Array  # [room] i4
    retry_device: Array  # [room] i4
    fetching: Array  # [lanes] bool, not used
    window: Array  # [devices] i8 bytes
    is_shared: Array  # [1] bool whether a bus has several senders
    one_step: Array  # [1] f8 the outcome of a batch of one, as are the next two
    one_peak: Array  # [1, devices] i8
    one_count: Array  # [1] i8


def new_draft(num_kinds: int, room: int) -> Draft:
    """A draft without moves, with room for so many ops."""
    return Draft(
        start=np.zeros(LANES + 1, np.int64),
        op=np.zeros(room, np.int32),
        device=np.zeros(room, np.int32),
        unit_start=np.zeros(LANES + 1, np.int64),
        unit=np.zeros(room, np.int32),
        unit_device=np.zeros(room, np.int32),
        kind=np.zeros(LANES, np.int64),
        tries=np.zeros(num_kinds),
        gains=np.zeros(num_kinds),
        odds=np.zeros(num_kinds),
    )


def new_scratch(
    layout: Any, tables: Tables, num_units: int, num_kinds: int, window: Array, is_shared: bool
) -> Scratch:
    """Scratch for one layout; it is large, so it is kept from run to run."""
    num_ops = len(tables.number_of)
    num_devices = len(tables.capacity)
    room = 4 * num_ops + 64
    return Scratch(
        lanes=new_lanes(layout, num_ops),
        draft=new_draft(num_kinds, room),
        device=np.zeros(len(layout.op), np.uint32),
        home=np.zeros(len(layout.parameter_op), np.uint32),
        held=np.zeros(64, np.int64),
        devices=np.zeros((1, num_ops), np.int32),
        step=np.zeros(LANES),
        excess=np.zeros(LANES),
        score=np.zeros(LANES),
        critical=np.zeros(num_units, np.int32),
        mark=np.zeros(num_units, np.bool_),
        retry_start=np.zeros(LANES + 1, np.int64),
        retry_unit=np.zeros(room, np.int32),
        retry_device=np.zeros(room, np.int32),
        fetching=np.zeros(LANES, np.bool_),
        window=window,
        is_shared=np.array([is_shared]),
        one_step=np.zeros(1),
        one_peak=np.zeros((1, num_devices), np.int64),
        one_count=np.zeros(1, np.int64),
    )
