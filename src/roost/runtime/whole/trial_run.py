"""A model run as a plan has it: how long a step takes, what it holds, and what the CPU takes beside
a GPU."""

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

# Steps that do not count, and their seconds: in the first the order of weights is learned, in the
# second what comes of the CPU, and memory is new in all of them.
_WARM, _WARM_SECONDS = 3, 0.3
# Steps that count, and seconds after which there are enough of them.
_LEAST, _MOST, _ENOUGH = 3, 9, 1.0
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TrialRun:
    """What was measured."""

    seconds: float  # of a step, the median
    peak: int  # bytes that PyTorch had in use on the main device, in all; 0 where that is a CPU
    reserved: int  # bytes that it had taken from the device, those included that it keeps for later
    # Of a step, that modules took which run elsewhere, from input there to output there.
    elsewhere_seconds: float
    num_elsewhere: int  # calls of these in a step


def trial_run(model: nn.Module, placement: ModulePlacement, inputs: Any) -> TrialRun:
    """Place the model, call it some times, and leave it as it was. Raises whatever a call
    raises."""
    main = torch.device(placement.main) if placement.main.startswith("cuda") else None
    with buffers_kept(model):
        apply(model, placement)
        try:
            spent = placed_model(model).call_time
            if main is not None:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(main)
            with torch.no_grad(), torch.random.fork_rng():
                _steps(model, inputs, main, _WARM, _WARM_SECONDS)
                calls, busy = spent.num_calls, spent.seconds
                seconds = _steps(model, inputs, main, _LEAST, _ENOUGH)
                calls, busy = spent.num_calls - calls, spent.seconds - busy
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
    """Seconds of at least so many steps, up to some more until they have taken long enough.

    Each is given inputs of its own: a model may write into them, or let a cache among them grow. A
    step lasts until what it returns is there. Weights that are on their way for the next one by
    then are part of the next one's time.
    """
    stream = None if main is None else torch.cuda.current_stream(main)
    found: list[float] = []
    while len(found) < least or (len(found) < _MOST and sum(found) < enough):
        args, kwargs = tree_map_only(
            Tensor, lambda tensor: tensor.to(main or _CPU, copy=True), call_arguments(inputs)
        )
        if stream is not None:
            stream.synchronize()
        begun = time.perf_counter()
        model(*args, **kwargs)
        if stream is not None:
            stream.synchronize()
        found.append(time.perf_counter() - begun)
        del args, kwargs  # or there would be two of them
    return found
