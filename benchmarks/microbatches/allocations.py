"""The most memory that each device of a step on CPU devices takes from the allocator.

A small library, preloaded into the process (`allocations.c`), notes each allocation with its
thread. The memory that a device's thread takes is the device's; the memory that a copying thread
takes is that of the device it copies to.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SOURCE = Path(__file__).with_suffix(".c")
MOST_EVENTS = 4_000_000
_EVENT = np.dtype([("address", "u8"), ("bytes", "i8"), ("thread", "i8")])


def library(folder: Path) -> Path | None:
    """The library, compiled into a folder; None without a C compiler."""
    target = folder / "allocations.so"
    words = ["cc", "-O2", "-shared", "-fPIC", "-o", str(target), str(SOURCE)]
    try:
        subprocess.run(words, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return target


def noted(call: Callable[[], Any]) -> np.ndarray | None:
    """The allocations and frees while something is called; None if the library is not loaded."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    if not preloaded:
        return None
    watch = ctypes.CDLL(preloaded)
    watch.watch_stop.restype = ctypes.c_size_t
    watch.watch_start.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    events = np.zeros(MOST_EVENTS, _EVENT)
    watch.watch_start(events.ctypes.data, MOST_EVENTS)
    try:
        call()
    finally:
        count = watch.watch_stop()
    if count > MOST_EVENTS:
        raise RuntimeError(f"{count} allocations; there is room for {MOST_EVENTS}")
    return events[:count]


def threads_of(names: Sequence[str]) -> dict[int, int]:
    """Thread of this process -> the number of the device that its memory belongs to."""
    owner = {}
    for thread in threading.enumerate():
        target = thread.name.rpartition(" to ")[2]  # "values from cpu:0 to cpu:1"
        if target in names and thread.native_id is not None:
            owner[thread.native_id] = names.index(target)
    return owner


def peaks(events: np.ndarray, owner: Mapping[int, int], count: int) -> list[int]:
    """The most bytes that each device held at once, of what was allocated meanwhile."""
    held = [0] * count
    most = [0] * count
    blocks: dict[int, tuple[int, int]] = {}  # address -> device and bytes
    for address, size, thread in events.tolist():
        if size < 0:
            device, freed = blocks.pop(address, (0, 0))
            held[device] -= freed
        elif thread in owner:
            device = owner[thread]
            blocks[address] = device, size
            held[device] += size
            most[device] = max(most[device], held[device])
    return most


def memory(plan: Any, step: Callable[[], Any]) -> dict[str, dict[str, float]] | None:
    """Peak memory of each device in a step of a trainer: simulated, and allocated.

    What stays from step to step was allocated before, so its exact bytes are added.
    """
    found = plan.found
    graph = found.problem.graph
    names = found.problem.cluster.device_names
    device = found.problem.check(found.result.best.placement).device
    events = noted(step)
    if events is None:
        return None
    taken = peaks(events, threads_of(names), len(names))
    own = graph.is_parameter
    residents = np.bincount(device[own], graph.output_bytes[own], minlength=len(names))
    return {
        name: {
            "measured": float(residents[number] + taken[number]),
            "simulated": float(plan.peak_memory[name]),
            "residents": float(residents[number]),
        }
        for number, name in enumerate(names)
    }
