"""Attention as one op with one backward op, whatever the device: `roost::attention`.

Traced on its own, attention turns into a kernel of one device, or into matrix products that hold all scores. As an op
of ours it stays whole, has a cost of its own, and runs the best kernel of the device it is placed on.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("roost::attention", mutates_args=())
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
    heads_inside: bool,
) -> Tensor:
    """Scaled dot-product attention without dropout; `grouped` lets several query heads share a key head.

    With `heads_inside` the output lies in memory as [batch, length, heads, width], though its shape is [batch, heads,
    length, width]: the views that follow were traced for one layout or the other.
    """
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    # Both do nothing where the kernel has laid it out so already. The output of an op may not be one of its inputs.
    laid = out.transpose(1, 2).contiguous().transpose(1, 2) if heads_inside else out.contiguous()
    return laid.clone() if laid.data_ptr() in (query.data_ptr(), value.data_ptr()) else laid


@attention.register_fake
def _(query, key, value, mask, causal, scale, grouped, heads_inside):  # type: ignore[no-untyped-def]
    shape = (*query.shape[:-1], value.shape[-1])
    if heads_inside:
        return query.new_empty((shape[0], shape[2], shape[1], shape[3])).transpose(1, 2)
    return query.new_empty(shape)


@torch.library.custom_op("roost::attention_backward", mutates_args=())
def attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. Runs the forward again, so that the kernels are those of an unplaced model."""
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        again = F.scaled_dot_product_attention(
            *inputs, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    found = torch.autograd.grad(again, inputs, gradient)
    return found[0].contiguous(), found[1].contiguous(), found[2].contiguous()


@attention_backward.register_fake
def _(gradient, query, key, value, out, mask, causal, scale, grouped):  # type: ignore[no-untyped-def]
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, mask, *ctx.settings, _ = inputs
    ctx.save_for_backward(query, key, value, output, mask)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    query, key, value, output, mask = ctx.saved_tensors
    found = torch.ops.roost.attention_backward(gradient, query, key, value, output, mask, *ctx.settings)
    return (*found, None, None, None, None, None)


attention.register_autograd(_backward, setup_context=_setup)


def flop(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> int:
    """FLOP of attention: two batched matrix products. A causal mask is not taken off, as PyTorch counts it."""
    *batch, length, width = query
    products = 1
    for size in batch:
        products *= size
    return 2 * products * length * key[-2] * (width + value[-1])


def backward_flop(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> int:
    """FLOP of its backward: five products, the scores among them made again."""
    *batch, length, width = query
    products = 1
    for size in batch:
        products *= size
    return 2 * products * length * key[-2] * (3 * width + 2 * value[-1])
