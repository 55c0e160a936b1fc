"""What the kernels share: how they are compiled, the arrays they read, and a few machine instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from roost.core.arrays import Array


class Layout(NamedTuple):
    """A problem under one dispatch order, as the kernels read it: ops are numbered by their position in it.

    Parameters are not among the ops; `use` says which of them each op reads.
    """

    num_devices: int
    broadcast: bool
    copies_in_memory: bool
    op: Array  # [ops] u4 index in the graph
    time: Array  # [ops * devices] f8 seconds
    output: Array  # [ops] i8 bytes
    workspace: Array  # [ops] i8 bytes
    is_update: Array  # [ops] bool
    num_inputs: Array  # [ops] i4 without parameters
    next_start: Array  # [ops + 1] u4 consumers of op i are next[next_start[i]:next_start[i + 1]]
    next: Array  # [edges] u4 ascending
    previous_start: Array  # [ops + 1] u4
    previous: Array  # [edges] u4
    use_start: Array  # [ops + 1] u4 parameters that op i reads are use[use_start[i]:use_start[i + 1]]
    use: Array  # [uses] u4
    user_start: Array  # [parameters + 1] u4 ops that read parameter i are user[user_start[i]:user_start[i + 1]]
    user: Array  # [uses] u4 ascending
    parameter_op: Array  # [parameters] u4 index in the graph
    parameter_bytes: Array  # [parameters] i8
    latency: Array  # [devices * devices] f8 seconds
    seconds_per_byte: Array  # [devices * devices] f8
    bus: Array  # [devices * devices] u4
    bus_gap: Array  # [buses] f8 seconds
    device_gap: Array  # [devices] f8 seconds


def compiled(function: Callable[..., Any]) -> Any:
    """Compile without the GIL, and keep the machine code on disk for the next start where there is a place for it."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    return _compile(function, options)


def bare(function: Callable[..., Any]) -> Any:
    """Compile without reference counts: for loops that allocate nothing, all of whose arrays the caller holds.

    Numba counts references to arrays it takes out of tuples, with atomic instructions, even inside loops.
    """
    return _compile(function, {"nogil": True, "error_model": "numpy", "boundscheck": False, "_nrt": False})


def inlined(function: Callable[..., Any]) -> Any:
    """Compile into the body of its callers: a call that hands over forty arrays costs more than most loops here."""
    return _compile(
        function, {"nogil": True, "error_model": "numpy", "boundscheck": False, "forceinline": True, "_nrt": False}
    )


def _compile(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder that can be written to: compile at every start
        return numba.njit(**options)(function)


@intrinsic
def lowest_bit(typing_context: Any, word: Any) -> Any:
    """The index of the lowest bit set in a u8 that is not zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


ONE = np.uint64(1)
ZERO = np.uint64(0)


class Moves(NamedTuple):
    """Transfers, as the kernels write them: room for all there can be, or for none where nobody asked."""

    tensor: Array  # u4 position of the op, or number of the parameter
    source: Array  # u4 device
    target: Array  # u4 device
    kind: Array  # u4 index in TRANSFER_KINDS
    start: Array  # f8 seconds
    finish: Array  # f8 seconds


@compiled
def new_moves(room):
    """Room for so many transfers."""
    return Moves(
        np.empty(room, np.uint32),
        np.empty(room, np.uint32),
        np.empty(room, np.uint32),
        np.empty(room, np.uint32),
        np.empty(room),
        np.empty(room),
    )


@compiled
def note(moves, number, tensor, source, target, kind, start, finish):
    """Write one transfer."""
    moves.tensor[number] = tensor
    moves.source[number] = source
    moves.target[number] = target
    moves.kind[number] = kind
    moves.start[number] = start
    moves.finish[number] = finish


@compiled
def send(layout, op, here, remote, end, bus_free, arrives, moves, number, record):
    """Send the output of an op, finished at `end`, to the devices whose bit is set; write when it arrives there."""
    latency, seconds_per_byte = layout.latency, layout.seconds_per_byte
    nbytes = np.float64(layout.output[op])
    pair = here * np.uintp(layout.num_devices)
    slowest = 0.0
    if layout.broadcast:
        left = remote
        while left != ZERO:
            there = lowest_bit(left)
            left &= left - ONE
            needs = latency[pair + there] + nbytes * seconds_per_byte[pair + there]
            slowest = needs if needs > slowest else slowest
    begin = 0.0
    left = remote
    while left != ZERO:
        there = lowest_bit(left)
        line = np.uintp(layout.bus[pair + there])
        takes = slowest
        if not layout.broadcast:
            takes = latency[pair + there] + nbytes * seconds_per_byte[pair + there]
        if not layout.broadcast or left == remote:
            begin = end if end > bus_free[line] else bus_free[line]
            bus_free[line] = begin + takes + layout.bus_gap[line]
        left &= left - ONE
        arrives[there] = begin + takes
        if record:
            note(moves, number, op, here, there, 0, begin, begin + takes)
        number += 1
    return number
