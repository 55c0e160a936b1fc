"""A placed training step that runs: its runtime, its optimizer, and the thread that takes steps.

Steps are taken in a thread of their own. So Ctrl-C, which only reaches the main thread, never stops
one half way: the step ends first. A step that fails, or that a second Ctrl-C gives up, may have
updated some weights. Then the run refuses to go on, and says so.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor, nn

from roost.errors import InputError
from roost.frontends.tracing.optimizers import KEPT
from roost.plan.training_search import PlacedTraining
from roost.plan.training_settings import TrainerSettings
from roost.plan.training_state import TrainingState, state_names, weight_names
from roost.runtime.ops.kept_gradients import KeptGradients
from roost.runtime.ops.run import GraphRuntime
from roost.runtime.step.optimizers import AdjustableOptimizer
from roost.search.measured.served_model import cores_of

log = logging.getLogger(__name__)

_WARM = 2  # steps that are slower: memory is taken for the first time
_MOST_TIMES = 1000  # steps of which the median is taken
_MEND = "load the last save with trainer.load(path), or a state with trainer.load_state_dict"


def parameter_order(model: nn.Module, placed: PlacedTraining) -> list[str]:
    """The parameters in the order of the model, tied ones by their first name."""
    tied = placed.step.program.tied
    return [tied.get(name, name) for name, _ in model.named_parameters()]


class TrainingRun:
    """Steps in a row on the devices of a placement."""

    def __init__(
        self,
        placed: PlacedTraining,
        settings: TrainerSettings,
        order: Sequence[str],
        weights: Mapping[str, Tensor],
        states: Mapping[str, Tensor] | None = None,
        steps: int = 0,
    ) -> None:
        """`order`: the parameters in the order of the model; `states`: by op, None for zeros."""
        self.placed = placed
        self.settings = settings
        self.steps = steps  # updates taken
        self.taken = 0  # batches since the last update
        self.broken = ""  # the reason why the weights are no longer sound
        self._seconds: deque[float] = deque(maxlen=_MOST_TIMES)
        self._cycle = 0.0  # seconds since the last update
        self._num_cycles = 0
        self._optimizer = AdjustableOptimizer(settings.update, steps)
        problem = placed.found.problem
        self._runtime = GraphRuntime(
            placed.step,
            problem,
            placed.found.result.best.placement,
            weights,
            self._optimizer,
            cores_of(problem.cluster),
            settings.seed,
            states=None if states is None else {**_no_gradients(placed), **states},
            num_steps=steps * settings.accumulate,
        )
        self._kept: KeptGradients | None = None
        if settings.keeps_gradients:
            kind = settings.optimizer
            self._kept = KeptGradients(self._runtime, placed.step, self._optimizer, kind, order)
        self._thread = ThreadPoolExecutor(1, "training steps")

    def step(self, feed: list[Tensor], rate: float) -> float:
        """Take a step at a learning rate; give the mean loss."""
        for gpu in {value.device for value in feed if value.is_cuda}:
            torch.cuda.current_stream(gpu).synchronize()  # of this thread; it may compute inputs
        return self._finished(self._thread.submit(self._take, feed, rate))

    def _take(self, feed: list[Tensor], rate: float) -> float:
        begin = time.perf_counter()
        self._optimizer.settings = replace(self.settings.update, rate=rate)
        self._optimizer.number = self.steps + 1
        losses = self._runtime.step(*feed)
        self.taken += 1
        if self.taken == self.settings.accumulate:
            if self._kept is not None:
                self._kept.update(self.settings.clip_norm)
            self.steps += 1
            self.taken = 0
        total = _on_cpu(losses[0])
        for loss in losses[1:]:
            total = total + _on_cpu(loss)
        self._cycle += time.perf_counter() - begin
        if self.taken == 0:  # an update was taken: with it the batches before
            self._note(self._cycle / self.settings.accumulate)
            self._cycle = 0.0
        return float(total) * self.settings.accumulate

    def _note(self, seconds: float) -> None:
        """Keep the seconds of a step, the first ones only until others are there."""
        self._num_cycles += 1
        if self._num_cycles > _WARM or not self._seconds:
            if self._num_cycles == _WARM + 1:
                self._seconds.clear()
            self._seconds.append(seconds)

    def _finished(self, step: Future[float]) -> float:
        """Wait for a step, whatever Ctrl-C says, unless it says it twice."""
        stopped = False
        while True:
            try:
                loss = step.result()
                break
            except KeyboardInterrupt:
                if stopped:
                    self.broken = (
                        f"step {self.steps + 1} was given up by a second Ctrl-C, and some of its "
                        f"weights may be new and others old; {_MEND}"
                    )
                    raise KeyboardInterrupt(self.broken) from None
                stopped = True
                log.warning("finishing this step first; Ctrl-C again gives it up, with its weights")
            except InputError:
                raise
            except Exception as error:
                self.broken = (
                    f"step {self.steps + 1} failed ({error}), and some weights may be updated and "
                    f"others not; {_MEND}"
                )
                raise
        if stopped:
            raise KeyboardInterrupt(
                f"stopped after step {self.steps}, which was finished; the weights are sound"
            )
        return loss

    @property
    def measured(self) -> tuple[float | None, int]:
        """The median of the seconds of steps, and their number; updates are shared out."""
        times = list(self._seconds)
        return (statistics.median(times), len(times)) if times else (None, 0)

    def state(self) -> TrainingState:
        """Copies of all weights and optimizer states on the CPU."""
        step = self.placed.step
        weights = self._runtime.residents()
        states = self._runtime.states()
        return TrainingState(
            {name: _copy(weights[name]) for name in weight_names(step)},
            {name: _copy(states[op]) for op, name, _ in state_names(step)},
            self.steps,
            self.settings.optimizer,
        )

    def write_back(self, model: torch.nn.Module) -> None:
        """Copy the weights into a model."""
        self._runtime.write_back(model)

    def close(self) -> None:
        """End all threads, after the step that is running."""
        self._thread.shutdown()
        self._runtime.close()


def _on_cpu(loss: Tensor) -> Tensor:
    """A loss that can be added up without losing digits of half precision."""
    loss = loss.to("cpu")
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


def _no_gradients(placed: PlacedTraining) -> dict[str, Tensor]:
    """A kept gradient of zero for each parameter, by op; empty if the step keeps none."""
    step = placed.step
    zeros: dict[str, Tensor] = {}
    for update in step.updates.values():
        like = step.maker[update.resident].meta["val"]  # a fake tensor
        for state in update.states:
            if state.rpartition(":")[2].partition("#")[0] == KEPT:
                zeros[state] = torch.zeros(like.shape, dtype=like.dtype)
    return zeros
