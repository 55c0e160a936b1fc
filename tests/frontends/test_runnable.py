"""Ops that run on real tensors whose strides are not those of the fake ones."""

from __future__ import annotations

import pytest
import torch

from roost.frontends.tracing.runnable import runnable

aten = torch.ops.aten


def channels_last_of_one() -> torch.Tensor:
    """As attention in a UNet returns it at batch 1: the stride of the batch is anything."""
    rows = torch.randn(1, 64, 32)  # batch, pixels, channels
    return rows.transpose(1, 2).as_strided((1, 32, 8, 8), (32, 1, 256, 32))


def test_pytorch_refuses_the_strides_that_a_batch_of_one_may_have():
    with pytest.raises(RuntimeError, match="is_contiguous"):
        aten.native_group_norm.default(channels_last_of_one(), None, None, 1, 32, 64, 4, 1e-5)


def test_group_norm_takes_any_stride_of_a_dimension_of_size_one():
    x = channels_last_of_one()
    weight, bias = torch.randn(32), torch.randn(32)
    rest = (weight, bias, 1, 32, 64, 4, 1e-5)
    expected = aten.native_group_norm.default(x.contiguous(), *rest)
    found = runnable(aten.native_group_norm.default)(x, *rest)
    torch.testing.assert_close(found, expected)
    gradient, (_, mean, rstd) = channels_last_of_one(), expected
    statistics = (mean, rstd, weight, 1, 32, 64, 4, [True, True, True])
    backward = aten.native_group_norm_backward.default
    torch.testing.assert_close(
        runnable(backward)(gradient, x, *statistics),
        backward(gradient.contiguous(), x.contiguous(), *statistics),
    )


def test_other_ops_run_as_they_were_traced():
    assert runnable(aten.mm.default) is aten.mm.default
    assert runnable(aten.view.default) is aten.reshape.default
