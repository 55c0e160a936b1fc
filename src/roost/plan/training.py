"""A model in training: steps, learning rate, saving and loading.

`roost.trainer` in `start_training.py` makes a `Trainer`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from roost.errors import InputError
from roost.plan.batches import bound_call, call_of, check_values, named_inputs
from roost.plan.training_check import verified
from roost.plan.training_plan import TrainingPlan
from roost.plan.training_run import TrainingRun, parameter_order
from roost.plan.training_search import (
    PlacedTraining,
)
from roost.plan.training_settings import TrainerSettings
from roost.plan.training_state import TrainingState, fitted
from roost.runtime.step.differences import Verification
from roost.runtime.step.unplaced import residents_of

Schedule = Callable[[int], float]


class Trainer:
    """A model in training: call `step` with batches; close it, or use it in a `with`."""

    def __init__(
        self,
        model: nn.Module,
        placed: PlacedTraining,
        settings: TrainerSettings,
        lr: float,
        schedule: Schedule | None = None,
    ) -> None:
        """Copy the weights of the model, and start the run."""
        if schedule is not None and not callable(schedule):
            raise InputError(
                f"schedule is {schedule!r}; give a function of the number of updates taken"
            )
        self.model = model
        self.lr = lr
        self.schedule = schedule
        self._placed = placed
        self._settings = settings
        self._lock = threading.RLock()
        self._order = parameter_order(model, placed)
        self._run: TrainingRun | None = self._start(residents_of(model))

    def _start(self, weights: Mapping[str, Tensor], *more: Any) -> TrainingRun:
        return TrainingRun(self._placed, self._settings, self._order, weights, *more)

    # ------------------------------------------------------------------ steps

    def step(self, *batch: Any, **named: Any) -> float:
        """Train on a batch, in the form of the example; give its mean loss before the update."""
        with self._lock:
            run = self._sound()
            feed = self._feed(batch, named)
            return run.step(feed, self.rate)

    @property
    def rate(self) -> float:
        """The learning rate of the next update: `lr` times the factor of the schedule."""
        factor = 1.0 if self.schedule is None else self.schedule(self.num_steps)
        for name, value in (("lr", self.lr), ("the factor of the schedule", factor)):
            if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
                raise InputError(
                    f"{name} is {value!r} at update {self.num_steps + 1}; it must be a number"
                )
        rate = self.lr * factor
        if not math.isfinite(rate) or rate < 0:
            raise InputError(
                f"the learning rate of update {self.num_steps + 1} is {rate!r}; lr times the "
                "factor of the schedule must be finite and not negative"
            )
        return float(rate)

    @property
    def num_steps(self) -> int:
        """Updates taken, with those of the run that was loaded."""
        return self._open().steps

    def _feed(self, batch: tuple[Any, ...], named: Mapping[str, Any]) -> list[Tensor]:
        """The inputs of the placed step."""
        args, kwargs = call_of(batch, named)
        bound = bound_call(self.model, args, kwargs)
        check_values(self._placed.steps.bound, bound)
        inputs = named_inputs(bound)
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        return self._placed.feed(self._placed.steps.split.parts(tensors, self._placed.found.count))

    def verify(self, *batch: Any, steps: int = 1, tolerance: float | None = None) -> Verification:
        """Compare steps on a batch with PyTorch's own, from the weights of the model.

        The trainer stays as it is. Not for `clip_norm` and `accumulate`.
        """
        with self._lock:
            self._open()
            return verified(
                self._placed, self._settings, self.model, self._feed(batch, {}), steps, tolerance
            )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Copies of weights, optimizer states and the number of updates, for `load_state_dict`."""
        return self._state().as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, which may be of another placement or number of microbatches."""
        self._load(TrainingState.of_dict(state))

    def save(self, path: str | Path) -> None:
        """Write the state to a safetensors file, whole or not at all."""
        self._state().save(Path(path))

    def load(self, path: str | Path) -> None:
        """Go on from a file of `save`; raises InputError if it does not fit the model."""
        with self._lock:
            self._open()
            self._load(TrainingState.load(Path(path)), f"{path}: ")

    def write_back(self, model: nn.Module | None = None) -> None:
        """Copy weights and buffers into the model, or into another of the same kind."""
        with self._lock:
            self._sound().write_back(self.model if model is None else model)

    def _state(self) -> TrainingState:
        with self._lock:
            run = self._sound()
            if run.taken:
                raise InputError(
                    f"{run.taken} of {self._settings.accumulate} batches of an update are taken, "
                    "and their gradients are no part of a state; save after the update"
                )
            return run.state()

    def _load(self, state: TrainingState, where: str = "") -> None:
        with self._lock:
            run = self._open()
            try:
                weights, states = fitted(state, self._placed.step, self._settings.optimizer)
            except InputError as error:
                error.args = (f"{where}{error}",)
                raise
            run.close()  # if Ctrl-C stops it, another load may follow
            self._run = None
            self._run = self._start(weights, states, state.steps)

    # ------------------------------------------------------------------ the rest

    @property
    def plan(self) -> TrainingPlan:
        """The placement in words, with expected and measured times; print it."""
        placed = self._placed
        return TrainingPlan(
            placed.found,
            placed.step.graph.name,
            placed.steps.split.size,
            placed.one_device,
            placed.later_updates,
            *(self._run.measured if self._run is not None else (None, 0)),
            notes=placed.notes + self._later_updates(),
        )

    def _later_updates(self) -> tuple[str, ...]:
        if not self._settings.keeps_gradients:
            return ()
        return ("updates follow the step, when all gradients are there",)

    def close(self) -> None:
        """End the threads and free the weights; save, or write back, before."""
        with self._lock:
            if self._run is not None:
                self._run.close()
            self._run = None

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _open(self) -> TrainingRun:
        if self._run is None:
            raise InputError(
                "the trainer is closed; make another with roost.trainer, and load what was saved"
            )
        return self._run

    def _sound(self) -> TrainingRun:
        run = self._open()
        if run.broken:
            raise InputError(run.broken)
        return run
