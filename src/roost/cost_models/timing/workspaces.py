"""Workspaces: the memory that libraries hold on a GPU while an op runs, beside inputs and outputs.

They are in no graph: a library chooses its algorithm by shape and hardware. A convolution of 16
images took up to 110 MiB on an H200 for an output of 98 MiB. Each unique op is called twice, and
the result is kept for this hardware.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from roost.core.arrays import Array
from roost.presets import machine, measurement_cache

if TYPE_CHECKING:
    import torch

    from roost.cost_models.timing.timed_ops import TimedCall
    from roost.frontends.tracing.captured_step import CapturedStep

_log = logging.getLogger(__name__)

_METHOD = 1  # another number for another way of measuring


def spaces(step: CapturedStep, device: torch.device, cache: bool = True) -> Array:  # [ops] bytes
    """The workspace of each op of a step; 0 for an op that cannot run by itself here."""
    from roost.cost_models.timing.timed_ops import forget, timed_ops

    key = {name: value for name, value in machine.hardware().items() if name != "threads"}
    key |= {"method": _METHOD}
    kept = measurement_cache.read("spaces", key) if cache else {}
    known = {name: size for name, size in kept.items() if _is_size(size)}
    op_spaces = np.zeros(step.graph.num_ops, dtype=np.int64)
    before, failed = len(known), set[str]()  # a failure is not kept: next time there may be room
    try:
        for op in timed_ops(step):
            name = op.call.signature
            if name not in known and name not in failed:
                size = _held_or_none(op.call, device)
                failed.add(name) if size is None else known.update({name: size})
            op_spaces[op.op] = known.get(name, 0)
    finally:
        forget()
        if cache and len(known) > before:
            measurement_cache.write("spaces", key, known)
    return op_spaces


def _held_or_none(call: TimedCall, device: torch.device) -> int | None:
    try:
        return held(call, device)
    except Exception as error:  # any op may fail: no room for it, no such kernel
        _log.debug("the workspace of %s is unknown: %s", call.signature, error)
        return None


def held(timed: TimedCall, device: torch.device) -> int:
    """The most bytes that a call holds for itself on a GPU.

    In a first call libraries take the memory that they keep for good.
    """
    import torch

    call = timed.calls(device, 1)[0]
    with torch.no_grad(), torch.cuda.device(device):
        call()
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        made = call()
        left = torch.cuda.memory_allocated(device)
        most = torch.cuda.max_memory_allocated(device)
    del made
    return max(0, most - max(before, left))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**50
