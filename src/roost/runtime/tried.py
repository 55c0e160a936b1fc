"""A model run as a plan has it: how long a step takes, what it holds, and what the CPU takes beside a GPU."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from roost.runtime.modules import ModulePlacement, apply, named_tensors, placed, remove
from roost.runtime.verify_modules import buffers_of, call_of, restore

_WARM = 3  # steps that do not count: in the first the order of weights is learned, in the second what comes of the CPU
_LEAST, _MOST, _ENOUGH = 3, 9, 1.0  # steps that count, and seconds after which there are enough of them


@dataclass(frozen=True)
class Tried:
    """What was measured."""

    seconds: float  # of a step, the median
    peak: int  # bytes that PyTorch had in use on the main device, for this model; 0 where that is a CPU
    reserved: int  # bytes that it had taken from the device, those included that it keeps for later
    aside_seconds: float  # of a step, that modules took on the CPU beside a GPU, from input there to output there
    num_aside: int  # calls of these in a step


def tried(model: nn.Module, placement: ModulePlacement, inputs: Any) -> Tried:
    """Place the model, call it some times, and leave it as it was. Raises whatever a call raises."""
    args, kwargs = call_of(inputs)
    before, main = buffers_of(model), torch.device(placement.main) if placement.main.startswith("cuda") else None
    others = 0 if main is None else torch.cuda.memory_allocated(main) - _bytes_on(model, main)
    seconds: list[float] = []
    apply(model, placement)
    try:
        aside = placed(model).aside
        if main is not None:
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(main), (args, kwargs))
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(main)
        with torch.no_grad(), torch.random.fork_rng():
            for _ in range(_WARM):
                _step(model, args, kwargs, main)
            calls, busy = (0, 0.0) if aside is None else (aside.num_calls, aside.busy)
            while len(seconds) < _LEAST or (len(seconds) < _MOST and sum(seconds) < _ENOUGH):
                seconds.append(_step(model, args, kwargs, main))
        calls, busy = (0, 0.0) if aside is None else (aside.num_calls - calls, aside.busy - busy)
        peak = 0 if main is None else torch.cuda.max_memory_allocated(main) - others
        reserved = 0 if main is None else torch.cuda.max_memory_reserved(main) - others
    finally:
        remove(model)
        restore(model, before)
    return Tried(statistics.median(seconds), peak, reserved, busy / len(seconds), round(calls / len(seconds)))


def _step(model: nn.Module, args: Any, kwargs: Any, main: torch.device | None) -> float:
    begun = time.perf_counter()
    model(*args, **kwargs)
    if main is not None:
        torch.cuda.synchronize(main)
    return time.perf_counter() - begun


def _bytes_on(model: nn.Module, device: torch.device) -> int:
    there = {id(tensor): tensor for tensor in named_tensors(model).values() if tensor.device == device}
    return sum(tensor.nbytes for tensor in there.values())
