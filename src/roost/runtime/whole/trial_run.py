"""Trial runs: a few steps of a plan on the real model, with their time and memory."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from roost.runtime.step.calls import call_arguments
from roost.runtime.whole.apply import apply, placed_model, remove
from roost.runtime.whole.module_placement import ModulePlacement
from roost.runtime.whole.verify import buffers_kept

# Steps that do not count, and their seconds: the first learns the order of weights, the second
# makes buffers for the CPU, and all of them allocate memory.
_WARM = 3
_WARM_SECONDS = 0.3
# Steps that count, and seconds after which there are enough of them.
_LEAST = 3
_MOST = 9
_ENOUGH = 1.0
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TrialRun:
    """The measured time and memory of a step."""

    seconds: float  # median
    peak: int  # bytes that PyTorch used on the main device; 0 if that is a CPU
    reserved: int  # bytes that PyTorch took from the device, with those it keeps for later
    elsewhere_seconds: float  # of modules that run elsewhere, without their transfers
    num_elsewhere: int  # calls of these modules in a step


def trial_run(model: nn.Module, placement: ModulePlacement, inputs: Any) -> TrialRun:
    """Place the model, call it some times, and leave it as it was; raise any error of a call."""
    main = torch.device(placement.main) if placement.main.startswith("cuda") else None
    with buffers_kept(model):
        apply(model, placement)
        try:
            call_time = placed_model(model).call_time
            if main is not None:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(main)
            with torch.no_grad(), torch.random.fork_rng():
                _steps(model, inputs, main, _WARM, _WARM_SECONDS)
                calls = call_time.num_calls
                busy = call_time.seconds
                seconds = _steps(model, inputs, main, _LEAST, _ENOUGH)
                calls = call_time.num_calls - calls
                busy = call_time.seconds - busy
            # Inputs of the user and their copies are on the device; only one of them counts.
            twice = sum(
                leaf.nbytes
                for leaf in tree_leaves(inputs)
                if isinstance(leaf, Tensor) and leaf.device == main
            )
            peak = 0 if main is None else torch.cuda.max_memory_allocated(main) - twice
            reserved = 0 if main is None else torch.cuda.max_memory_reserved(main) - twice
        finally:
            remove(model)
    return TrialRun(
        statistics.median(seconds), peak, reserved, busy / len(seconds), round(calls / len(seconds))
    )


def _steps(
    model: nn.Module, inputs: Any, main: torch.device | None, least: int, enough: float
) -> list[float]:
    """Time at least so many steps, and up to some more until they have taken long enough.

    Each step has inputs of its own: a model may write into them, or let a cache among them grow. A
    step ends when its outputs are there. Weights that are then on their way for the next step are
    part of the next step's time.
    """
    stream = None if main is None else torch.cuda.current_stream(main)
    seconds: list[float] = []
    while len(seconds) < least or (len(seconds) < _MOST and sum(seconds) < enough):
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: tensor.to(main or _CPU, copy=True), call_arguments(inputs)
        )
        if stream is not None:
            stream.synchronize()
        begun = time.perf_counter()
        model(*args, **kwargs)
        if stream is not None:
            stream.synchronize()
        seconds.append(time.perf_counter() - begun)
        del args, kwargs  # or two of them would be in memory
    return seconds
