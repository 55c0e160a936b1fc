"""Attention as one op with one backward op on any device: `roost::attention`.

PyTorch traces attention as a kernel of one device, or as matrix products that hold all scores. An
op of Roost's own stays whole, has a cost of its own, and runs the best kernel of its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
_FLASH = 1  # torch.nn.attention.SDPBackend.FLASH_ATTENTION


@torch.library.custom_op("roost::attention", mutates_args=())
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
    layout: Sequence[int],
) -> Tensor:
    """Scaled dot-product attention without dropout.

    `grouped` lets several query heads share a key head. `layout` has the dimensions of the output
    from the outermost in memory to the innermost: kernels differ in it, but the views that follow
    were traced for one layout.
    """
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    laid = laid_out(out, layout)
    # An op must not return its own input.
    return laid.clone() if laid.data_ptr() in (query.data_ptr(), value.data_ptr()) else laid


def layout_of(stride: Sequence[int]) -> list[int]:
    """The dimensions of a tensor from the outermost in memory to the innermost."""
    return sorted(range(len(stride)), key=lambda dimension: -stride[dimension])


def laid_out(tensor: Tensor, layout: Sequence[int]) -> Tensor:
    """The tensor with its dimensions in this order in memory; no copy if they are already."""
    back = [list(layout).index(dimension) for dimension in range(tensor.dim())]
    return tensor.permute(list(layout)).contiguous().permute(back)


@attention.register_fake
def _(query, key, value, mask, causal, scale, grouped, layout):  # type: ignore[no-untyped-def]
    return laid_out(query.new_empty((*query.shape[:-1], value.shape[-1])), layout)


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
    """Gradients of query, key and value.

    Runs the forward again, because forward and backward may be placed apart, and kernels of two
    devices keep different values. Autograd is off inside an op, so this calls kernels by name.
    """
    if grouped:
        key_heads = key.shape[-3]
        value_heads = value.shape[-3]
        key, value = (
            tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3)
            for tensor in (key, value)
        )
    if mask is not None and mask.dtype == torch.bool:
        # Minus infinity for masked scores, as PyTorch passes it to its kernels.
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    choice = torch._fused_sdp_choice(query, key, value, mask, 0.0, causal, scale=scale)
    if query.device.type == "cpu" and choice == _FLASH:
        again, kept = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, again, kept, 0.0, causal, attn_mask=mask, scale=scale
        )
    elif query.device.type == "cuda" and choice == _FLASH:
        again, kept, *ragged, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        tensors = (gradient, query, key, value, again, kept, *ragged)
        gradients = aten._scaled_dot_product_flash_attention_backward(
            *tensors, 0.0, causal, seed, offset, scale=scale
        )
    else:
        gradients = _backward_by_products(gradient, query, key, value, mask, causal, scale)
    of_query, of_key, of_value = gradients[:3]
    if grouped:
        of_key = _summed(of_key, key_heads)
        of_value = _summed(of_value, value_heads)
    return of_query.contiguous(), of_key.contiguous(), of_value.contiguous()


def _backward_by_products(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by matrix products that hold all scores."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query @ key.transpose(-2, -1)) * factor
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    if mask is not None:
        scores = scores + mask
    share = scores.softmax(-1)
    of_share = gradient @ value.transpose(-2, -1)
    of_scores = share * (of_share - (of_share * share).sum(-1, keepdim=True)) * factor
    return of_scores @ key, of_scores.transpose(-2, -1) @ query, share.transpose(-2, -1) @ gradient


def _summed(gradient: Tensor, heads: int) -> Tensor:
    """The gradient of heads that were repeated: the sum over the repeats of each."""
    *batch, repeated, length, width = gradient.shape
    return gradient.view(*batch, heads, repeated // heads, length, width).sum(-3)


@attention_backward.register_fake
def _(gradient, query, key, value, out, mask, causal, scale, grouped):  # type: ignore[no-untyped-def]
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, mask, *ctx.settings, _ = inputs
    ctx.save_for_backward(query, key, value, output, mask)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    query, key, value, output, mask = ctx.saved_tensors
    gradients = torch.ops.roost.attention_backward(
        gradient, query, key, value, output, mask, *ctx.settings
    )
    return (*gradients, None, None, None, None, None)


attention.register_autograd(_backward, setup_context=_setup)
