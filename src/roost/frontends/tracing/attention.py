"""Attention as one op with one backward op, whatever the device: `roost::attention`.

Traced on its own, attention turns into a kernel of one device, or into matrix products that hold
all scores. As an op of ours it stays whole, has a cost of its own, and runs the best kernel of the
device it is placed on.
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
    """Scaled dot-product attention without dropout; `grouped` lets several query heads share a key
    head.

    `layout` has the dimensions of the output from the outermost in memory to the innermost: the
    views that follow were traced for one layout, and kernels differ in theirs.
    """
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    laid = laid_out(out, layout)  # does nothing where the kernel has laid it out so already
    # Never an input itself.
    return laid.clone() if laid.data_ptr() in (query.data_ptr(), value.data_ptr()) else laid


def layout_of(stride: Sequence[int]) -> list[int]:
    """The dimensions of a tensor from the outermost in memory to the innermost."""
    return sorted(range(len(stride)), key=lambda dimension: -stride[dimension])


def laid_out(tensor: Tensor, layout: Sequence[int]) -> Tensor:
    """The tensor with its dimensions in this order in memory; itself where they are."""
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

    Runs the forward again: what a kernel keeps for its backward differs from device to device, and
    the two may be placed apart. Inside an op autograd is off, so the kernels are called by name.
    """
    heads = (key.shape[-3], value.shape[-3]) if grouped else ()
    if grouped:
        key, value = (
            tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3)
            for tensor in (key, value)
        )
    if mask is not None and mask.dtype == torch.bool:
        # As PyTorch does before it calls a kernel: what is not looked at is infinitely far below.
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    choice = torch._fused_sdp_choice(query, key, value, mask, 0.0, causal, scale=scale)
    if query.device.type == "cpu" and choice == _FLASH:
        again, kept = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, again, kept, 0.0, causal, attn_mask=mask, scale=scale
        )
    elif query.device.type == "cuda" and choice == _FLASH:
        again, kept, *ragged, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        found = aten._scaled_dot_product_flash_attention_backward(
            gradient,
            query,
            key,
            value,
            again,
            kept,
            *ragged,
            0.0,
            causal,
            seed,
            offset,
            scale=scale,
        )
    else:
        found = _by_hand(gradient, query, key, value, mask, causal, scale)
    if grouped:
        found = (
            found[0],
            *(_summed(repeated, count) for repeated, count in zip(found[1:3], heads, strict=True)),
        )
    return found[0].contiguous(), found[1].contiguous(), found[2].contiguous()


def _by_hand(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
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
    """The gradient of heads that were repeated: the sum over each one's repeats."""
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
    found = torch.ops.roost.attention_backward(
        gradient, query, key, value, output, mask, *ctx.settings
    )
    return (*found, None, None, None, None, None)


attention.register_autograd(_backward, setup_context=_setup)


def flop(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> int:
    """FLOP of attention: two batched matrix products. A causal mask is not taken off, as PyTorch
    counts it."""
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
