"""The op to run for a traced op, where real tensors may be laid out in another way than fake ones.

The graph runtime calls these, and so does the timing of ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def runnable(target: Any) -> Any:
    """The function that takes real tensors in place of a traced op."""
    return _RUNNABLE.get(target, target)


def group_norm(x: Tensor, *rest: Any) -> Any:
    """Group norm of a tensor whose strides of dimensions of size 1 may be any."""
    return aten.native_group_norm.default(_plain(x), *rest)


def group_norm_backward(gradient: Tensor, x: Tensor, *rest: Any) -> Any:
    """The gradients of `group_norm`."""
    return aten.native_group_norm_backward.default(_plain(gradient), _plain(x), *rest)


def _plain(x: Tensor) -> Tensor:
    """The same memory with the strides of a new tensor of that layout.

    A dimension of size 1 may have any stride; with some, PyTorch misjudges the layout.
    """
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    for layout in (torch.contiguous_format, layouts.get(x.dim(), torch.contiguous_format)):
        if x.is_contiguous(memory_format=layout):
            shape = torch.empty(x.shape, device="meta", memory_format=layout)
            return x.as_strided(x.shape, shape.stride())
    return x


_RUNNABLE = {
    # Kernels of another device may lay out their outputs in another way.
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
}
