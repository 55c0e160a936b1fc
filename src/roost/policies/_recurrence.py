"""A long short-term memory over many steps, as one function to autograd: no node for each step.

Several times faster than a layer of PyTorch on one core where steps are many and small: the
gradient of the weights is one product at the end, and every factor that does not depend on later
steps is worked out for all steps at once.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor


def recurrence(inputs: Tensor, weight: Tensor) -> Tensor:
    """Hidden states [steps, batch, hidden] for inputs [steps, batch, 4 hidden] and weights [hidden,
    4 hidden].

    Inputs are already multiplied by their weights, bias added; gates are new, in, forget, out.
    """
    if inputs.is_cuda:
        return _on_gpu(inputs, weight)
    return _Recurrence.apply(inputs, weight)  # type: ignore[no-any-return, no-untyped-call]


def _on_gpu(inputs: Tensor, weight: Tensor) -> Tensor:
    """By the GPU's own kernel for all steps: it wants to multiply inputs itself, and has the gates
    in another order."""
    size = len(weight)
    order = torch.arange(4 * size, device=weight.device).view(4, size)[[1, 2, 0, 3]].flatten()
    start = inputs.new_zeros(1, inputs.shape[1], size)
    once = torch.eye(4 * size, device=weight.device, dtype=weight.dtype)
    weights = [once, weight.t()[order].contiguous()]
    # That these are copied together at each call: they are small, and new each time.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part")
        return torch.lstm(
            inputs[..., order], (start, start), weights, False, 1, 0.0, True, False, False
        )[0]


def step(inputs: Tensor, weight: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """One step for [batch, ...], without gradients: the next hidden and cell."""
    size = len(weight)
    gates = torch.addmm(inputs, hidden, weight)
    new, opened = torch.tanh(gates[:, :size]), torch.sigmoid(gates[:, size:])
    cell = torch.addcmul(opened[:, size : 2 * size] * cell, opened[:, :size], new)
    return opened[:, 2 * size :] * torch.tanh(cell), cell


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        steps, batch, width = inputs.shape
        size = width // 4
        gates = inputs.clone()
        hidden = inputs.new_empty(steps + 1, batch, size)
        cell = inputs.new_empty(steps + 1, batch, size)
        squashed = inputs.new_empty(steps, batch, size)
        hidden[0], cell[0] = 0.0, 0.0
        for number in range(steps):
            now, after = gates[number], cell[number + 1]
            torch.addmm(now, hidden[number], weight, out=now)
            now[:, :size].tanh_()
            now[:, size:].sigmoid_()
            torch.mul(now[:, 2 * size : 3 * size], cell[number], out=after)
            after.addcmul_(now[:, size : 2 * size], now[:, :size])
            torch.tanh(after, out=squashed[number])
            torch.mul(now[:, 3 * size :], squashed[number], out=hidden[number + 1])
        ctx.save_for_backward(weight, gates, hidden, cell, squashed)
        return hidden[1:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        weight, gates, hidden, cell, squashed = ctx.saved_tensors
        given, size = gradients[0], len(weight)
        new, into, forget, out = gates.split(size, dim=-1)
        by_cell = torch.stack(  # slopes of new, in and forget by the cell
            [into * (1 - new * new), new * into * (1 - into), cell[:-1] * forget * (1 - forget)],
            dim=-2,
        )
        by_hidden = squashed * out * (1 - out)  # of out by the hidden state
        through = out * (1 - squashed * squashed)  # of the cell by the hidden state
        slope = torch.empty_like(gates)
        back = weight.t()
        later, on_cell = torch.zeros_like(given[0]), torch.zeros_like(given[0])
        for number in range(len(given) - 1, -1, -1):
            now = slope[number]
            later = later + given[number]
            on_cell = torch.addcmul(on_cell, later, through[number])
            torch.mul(by_cell[number], on_cell.unsqueeze(-2), out=now.view(-1, 4, size)[:, :3])
            torch.mul(later, by_hidden[number], out=now[:, 3 * size :])
            on_cell = on_cell * forget[number]
            later = now @ back
        return slope, hidden[:-1].flatten(0, 1).t() @ slope.flatten(0, 1)
