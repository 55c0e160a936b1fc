"""Shared by all kernels: how they are compiled, the arrays they read, and machine instructions."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from roost.core.arrays import Array


class Busy(NamedTuple):
    """Seconds for which a transfer keeps its sender and its receiver from computing."""

    sender: Array  # [devices * devices] f8 seconds
    receiver: Array  # [devices * devices] f8 seconds


class Layout(NamedTuple):
    """A problem under one dispatch order, as kernels read it: an op's number is its position there.

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
    # [ops + 1] u4 parameters that op i reads are use[use_start[i]:use_start[i + 1]].
    use_start: Array
    use: Array  # [uses] u4
    # [parameters + 1] u4 ops that read parameter i are user[user_start[i]:user_start[i + 1]].
    user_start: Array
    user: Array  # [uses] u4 ascending
    parameter_op: Array  # [parameters] u4 index in the graph
    parameter_bytes: Array  # [parameters] i8
    latency: Array  # [devices * devices] f8 seconds
    sent_latency: Array  # [devices * devices] f8 seconds of what ops have made and others read
    seconds_per_byte: Array  # [devices * devices] f8 of residents that are fetched
    sent_seconds_per_byte: Array  # [devices * devices] f8 of what ops have made
    bus: Array  # [devices * devices] u4
    bus_gap: Array  # [buses] f8 seconds
    device_gap: Array  # [devices] f8 seconds
    # Of another type where there is none: then Numba leaves out what has to do with it.
    busy: Busy | None


# `make test-bounds` sets it: an index out of range is then an IndexError, at half the speed.
CHECKS_BOUNDS = os.environ.get("ROOST_BOUNDS_CHECK", "") not in ("", "0")
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": CHECKS_BOUNDS}
_BARE: dict[str, Any] = {} if CHECKS_BOUNDS else {"_nrt": False}  # an error needs the counts


def compiled(function: Callable[..., Any]) -> Any:
    """Compile without the GIL, and keep the machine code on disk for the next start."""
    return _compile(function, _OPTIONS)


def bare(function: Callable[..., Any]) -> Any:
    """Compile without reference counts: for loops that allocate nothing and own no array.

    Numba counts references to arrays it takes out of tuples, with atomic instructions, even inside
    loops.
    """
    return _compile(function, _OPTIONS | _BARE)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile into the callers: passing forty arrays costs more than most loops here."""
    return _compile(function, _OPTIONS | _BARE | {"forceinline": True})


def _compile(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    place = _cache_folder()
    if place is None:
        return numba.njit(**options)(function)
    settings: Any = numba.config
    before = settings.CACHE_DIR
    try:
        settings.CACHE_DIR = str(place)
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # the folder cannot be written to after all: compile at every start
        return numba.njit(**options)(function)
    finally:
        settings.CACHE_DIR = before


@cache
def _cache_folder() -> Path | None:
    """A folder of its own for every state of the text of the compiled loops.

    Numba looks only at the file of the function it has cached, not at those of the functions
    compiled into it; a change to one of those would go unnoticed, and the old code would run.
    """
    text = sha256()
    for content in compiled_sources().values():
        text.update(content)
    user = os.getuid() if hasattr(os, "getuid") else 0
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not Path(base).is_absolute():
        base = "~/.cache"  # its standard: ignore a relative one
    given = [os.environ.get("NUMBA_CACHE_DIR"), base, "~/.cache", ""]
    for root in (root for root in given if root is not None):
        try:
            mine = Path(root or tempfile.gettempdir()).expanduser() / f"roost-{user}"
            kind = "checked-kernels" if CHECKS_BOUNDS else "kernels"
            folder = mine / f"{kind}-{text.hexdigest()[:16]}"
            folder.mkdir(parents=True, exist_ok=True)
            # Machine code is run as it is found, so in a folder that others share it must be nobody
            # else's.
            mine.chmod(0o700)
            if os.access(folder, os.W_OK) and mine.stat().st_uid == folder.stat().st_uid == user:
                for file in folder.rglob("*.nb?"):
                    # Left by a full disk: Numba would stumble over it at every start.
                    if file.stat().st_size == 0:
                        file.unlink()
                return folder
        except (OSError, RuntimeError):  # RuntimeError: there is no home
            continue
    return None


def compiled_sources() -> dict[Path, bytes]:
    """Every file with compiled loops or their constants, and its text."""
    here = Path(__file__).parent
    constants = here.parents[1] / "core" / "timeline.py"
    found = {file: file.read_bytes() for file in [constants, *sorted(here.glob("*.py"))]}
    for folder in ("bounds", "placers"):
        for file in sorted((here.parents[1] / folder).rglob("*.py")):
            content = file.read_bytes()
            if b"roost.simulator.kernels" in content:
                found[file] = content
    return found


@intrinsic
def lowest_bit(typing_context: Any, word: Any) -> Any:
    """The index of the lowest bit set in a u8 that is not zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


ONE = np.uint64(1)
ZERO = np.uint64(0)


class Moves(NamedTuple):
    """Transfers as kernels write them: room for all, or for none where nobody asked."""

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
    """Send the output of an op, finished at `end`, to the devices whose bit is set; write when it
    arrives there."""
    latency = layout.sent_latency
    seconds_per_byte = layout.sent_seconds_per_byte
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
