"""A long short-term memory (LSTM) over many steps, as one function to autograd.

On one core it is several times faster than a layer of PyTorch if steps are many and small: autograd
has no node for each step. The gradient of the weights is one product at the end. Every factor that
does not depend on later steps is computed for all steps at once.

The four gates of a step are new, in, forget and out, in this order.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor


def lstm_states(inputs: Tensor, weight: Tensor) -> Tensor:
    """Hidden states [steps, batch, hidden] of inputs [steps, batch, 4 hidden].

    The inputs are gates: multiplied by their weights, bias added. `weight` is [hidden, 4 hidden].
    """
    if inputs.is_cuda:
        return _states_on_gpu(inputs, weight)
    return _Lstm.apply(inputs, weight)  # type: ignore[no-any-return, no-untyped-call]


def _states_on_gpu(inputs: Tensor, weight: Tensor) -> Tensor:
    """The same by PyTorch's GPU kernel for all steps.

    That kernel multiplies the inputs itself, here by one, and has the gates in another order.
    """
    size = len(weight)
    columns = torch.arange(4 * size, device=weight.device).view(4, size)
    order = columns[[1, 2, 0, 3]].flatten()
    start = inputs.new_zeros(1, inputs.shape[1], size)
    identity = torch.eye(4 * size, device=weight.device, dtype=weight.dtype)
    weights = [identity, weight.t()[order].contiguous()]
    options = (False, 1, 0.0, True, False, False)  # no biases, one layer, no dropout, training
    with warnings.catch_warnings():
        # The weights are small and new in each call, so copying them together costs little.
        warnings.filterwarnings("ignore", message="RNN module weights are not part")
        return torch.lstm(inputs[..., order], (start, start), weights, *options)[0]


def lstm_step(
    inputs: Tensor, weight: Tensor, hidden: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor]:
    """The next hidden state and cell [batch, hidden] after one step, without gradients."""
    size = len(weight)
    gates = torch.addmm(inputs, hidden, weight)
    new = torch.tanh(gates[:, :size])
    into, forget, out = torch.sigmoid(gates[:, size:]).chunk(3, dim=1)
    cell = torch.addcmul(forget * cell, into, new)
    return out * torch.tanh(cell), cell


class _Lstm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        steps, batch, width = inputs.shape
        size = width // 4
        gates = inputs.clone()
        hidden = inputs.new_empty(steps + 1, batch, size)
        cell = inputs.new_empty(steps + 1, batch, size)
        squashed = inputs.new_empty(steps, batch, size)  # tanh of the cell
        hidden[0] = cell[0] = 0.0
        for step in range(steps):
            now = gates[step]
            next_cell = cell[step + 1]
            torch.addmm(now, hidden[step], weight, out=now)
            now[:, :size].tanh_()
            now[:, size:].sigmoid_()
            new, into, forget, out = now.chunk(4, dim=1)
            torch.mul(forget, cell[step], out=next_cell)
            next_cell.addcmul_(into, new)
            torch.tanh(next_cell, out=squashed[step])
            torch.mul(out, squashed[step], out=hidden[step + 1])
        ctx.save_for_backward(weight, gates, hidden, cell, squashed)
        return hidden[1:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        weight, gates, hidden, cell, squashed = ctx.saved_tensors
        given = gradients[0]
        size = len(weight)
        new, into, forget, out = gates.split(size, dim=-1)
        slopes_by_cell = [
            into * (1 - new * new),
            new * into * (1 - into),
            cell[:-1] * forget * (1 - forget),
        ]
        by_cell = torch.stack(slopes_by_cell, dim=-2)  # slopes of new, in and forget by the cell
        by_hidden = squashed * out * (1 - out)  # of out by the hidden state
        through = out * (1 - squashed * squashed)  # of the cell by the hidden state
        slope = torch.empty_like(gates)
        back = weight.t()
        on_hidden = torch.zeros_like(given[0])
        on_cell = torch.zeros_like(given[0])
        for step in range(len(given) - 1, -1, -1):
            on_gates = slope[step]
            on_hidden = on_hidden + given[step]
            on_cell = torch.addcmul(on_cell, on_hidden, through[step])
            first_three = on_gates.view(-1, 4, size)[:, :3]
            torch.mul(by_cell[step], on_cell.unsqueeze(-2), out=first_three)
            torch.mul(on_hidden, by_hidden[step], out=on_gates[:, 3 * size :])
            on_cell = on_cell * forget[step]
            on_hidden = on_gates @ back
        return slope, hidden[:-1].flatten(0, 1).t() @ slope.flatten(0, 1)
