"""Gradients that a step keeps: the norm of all of them, and the updates that follow the step.

A step with `keep_gradients` adds each gradient to a state of its parameter. So gradients of several
steps can be added up, and all of them can be clipped by one norm before any parameter changes. The
cost: memory for a gradient of each parameter, which the simulator counts, and updates that begin
only when the step is done. The updates of a device run in its own thread, where the parameters
live.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from roost.frontends.tracing.captured_step import CapturedStep
from roost.runtime.ops.run import GraphRuntime
from roost.runtime.step.optimizers import Updates

_TINY = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class _Kept(NamedTuple):
    """A parameter at home, and what belongs to it."""

    parameter: Tensor
    states: list[Tensor]  # of the optimizer
    gradient: Tensor


class KeptGradients:
    """The gradients that the steps of a run have added up."""

    def __init__(
        self,
        run: GraphRuntime,
        step: CapturedStep,
        optimizer: Updates,
        kind: str,
        order: Sequence[str],
    ) -> None:
        """`order`: the parameters as the model has them, by which PyTorch sums their norms."""
        self.run = run
        self._update = optimizer.update(kind)
        residents = run.home_residents
        index = step.graph.index_of
        owner = {op: name for name, op in step.resident_ops.items()}
        kept = {}
        home = {}
        for update in step.updates.values():
            if update.states:  # no buffer
                *states, gradient = (residents.tensor[index(state)] for state in update.states)
                op = index(update.resident)
                name = owner[update.resident]
                kept[name] = _Kept(residents.tensor[op], states, gradient)
                home[name] = residents.device[op]
        names = [name for name in dict.fromkeys((*order, *kept)) if name in kept]
        self._kept = [kept[name] for name in names]
        self._of_device: defaultdict[int, list[int]] = defaultdict(list)
        for number, name in enumerate(names):
            self._of_device[home[name]].append(number)

    def norm(self) -> Tensor:
        """The norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` computes it."""
        norms = [torch.zeros(())] * len(self._kept)

        def task(device: int) -> None:
            for number in self._of_device[device]:
                norms[number] = torch.linalg.vector_norm(self._kept[number].gradient).cpu()

        self.run.between_steps(task)
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def update(self, clip_norm: float | None = None) -> None:
        """Update the parameters by the gradients, clipped to a norm, and begin at zero again."""
        factor: Tensor | None = None
        if clip_norm is not None:
            factor = torch.clamp(clip_norm / (self.norm() + _TINY), max=1.0)

        def task(device: int) -> None:
            for number in self._of_device[device]:
                self._update_one(self._kept[number], factor)

        self.run.between_steps(task)

    def _update_one(self, kept: _Kept, factor: Tensor | None) -> None:
        parameter = kept.parameter
        gradient = kept.gradient.to(parameter.device)
        if factor is not None:
            gradient.mul_(factor.to(parameter.device))
        there = [state.to(parameter.device) for state in kept.states]
        self._update(0, parameter, gradient, *there)
        for state, new in zip(kept.states, there, strict=True):
            if new is not state:
                state.copy_(new)
        kept.gradient.zero_()
