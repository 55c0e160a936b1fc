"""What each op holds on a GPU while it runs, beyond what it is given and what it returns:
workspaces of libraries.

They are in no graph: how a library computes is its own choice, by shape and hardware. A convolution
of 16 images took up to 110 MiB on an H200, where 98 MiB came of it. Each unique op is called twice,
and what was found is kept.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from roost.core.arrays import Array
from roost.presets import machine, measurement_cache

if TYPE_CHECKING:
    import torch

    from roost.cost_models.timing.timed_ops import Work
    from roost.frontends.tracing.captured_step import CapturedStep

_log = logging.getLogger(__name__)

_METHOD = 1  # another number where they are measured in another way


def spaces(step: CapturedStep, device: torch.device, cache: bool = True) -> Array:  # [ops] bytes
    """Of each op of a step; none of those that cannot be run by themselves here."""
    from roost.cost_models.timing.timed_ops import forget, tasks

    key = {name: value for name, value in machine.hardware().items() if name != "threads"} | {
        "method": _METHOD
    }
    known = (
        {
            name: size
            for name, size in measurement_cache.read("spaces", key).items()
            if _is_size(size)
        }
        if cache
        else {}
    )
    found = np.zeros(step.graph.num_ops, dtype=np.int64)
    # Another time they may do, with more room: that is not kept.
    before, failed = len(known), set[str]()
    try:
        for task in tasks(step):
            name = task.work.signature
            if name not in known and name not in failed:
                size = _tried(task.work, device)
                failed.add(name) if size is None else known.update({name: size})
            found[task.op] = known.get(name, 0)
    finally:
        forget()
        if cache and len(known) > before:
            measurement_cache.write("spaces", key, known)
    return found


def _tried(work: Work, device: torch.device) -> int | None:
    try:
        return held(work, device)
    except Exception as error:  # of any op: no room for it, no such kernel
        _log.debug("what %s holds is not known: %s", work.signature, error)
        return None


def held(work: Work, device: torch.device) -> int:
    """Bytes that a call holds for itself on a GPU, at most. In the first, libraries take what they
    keep for good."""
    import torch

    call = work.calls(device, 1)[0]
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
