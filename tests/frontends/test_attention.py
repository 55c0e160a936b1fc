"""roost::attention gives the numbers of PyTorch's attention, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from roost.frontends.tracing import flop

CASES = {
    "plain": {},
    "causal": {"causal": True},
    "scaled": {"scale": 0.3},
    "masked": {"mask": "float"},
    "masked by truth": {"mask": "bool"},
    "grouped": {"grouped": True},
    "grouped and causal": {"grouped": True, "causal": True},
    "laid out by length": {"layout": [2, 0, 1, 3]},
    "longer keys": {"keys": 24},
}


def tensors(device, dtype, case, width=32):
    torch.manual_seed(0)
    heads = 2 if case.get("grouped") else 4
    keys = case.get("keys", 16)
    q = torch.randn(2, 4, 16, width, device=device, dtype=dtype)
    k, v = (torch.randn(2, heads, keys, width, device=device, dtype=dtype) for _ in range(2))
    kind = case.get("mask")
    mask = None
    if kind is not None:
        mask = torch.randn(16, keys, device=device, dtype=dtype)
        mask = mask > -1 if kind == "bool" else mask
    return q, k, v, mask


def compare(device, dtype, case):
    """The largest difference between ours and PyTorch's, in the output and in each gradient."""
    q, k, v, mask = tensors(device, dtype, case)
    causal, scale, grouped = (
        case.get("causal", False),
        case.get("scale"),
        case.get("grouped", False),
    )
    found = []
    for ours in (True, False):
        inputs = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
        if ours:
            out = torch.ops.roost.attention(
                *inputs, mask, causal, scale, grouped, case.get("layout", [0, 1, 2, 3])
            )
        else:
            out = F.scaled_dot_product_attention(
                *inputs, mask, 0.0, causal, scale=scale, enable_gqa=grouped
            )
        torch.manual_seed(1)
        out.backward(torch.randn(out.shape, device=device, dtype=dtype))
        found.append([out.detach(), *(tensor.grad for tensor in inputs)])
    return [
        float((one.double() - other.double()).abs().max())
        for one, other in zip(*found, strict=True)
    ]


@pytest.mark.parametrize("case", CASES)
def test_on_a_cpu(case):
    differences = compare("cpu", torch.float32, CASES[case])
    exact = "grouped" not in case  # shared heads: gradients are summed in another order
    assert max(differences) <= (0 if exact else 1e-5), differences


@pytest.mark.parametrize("case", CASES)
def test_in_bfloat16_on_a_cpu(case):
    assert max(compare("cpu", torch.bfloat16, CASES[case])) < 0.1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case, dtype):
    limit = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    assert max(compare("cuda", dtype, CASES[case])) < limit


def test_the_layout_is_the_one_asked_for():
    q, k, v, _ = tensors("cpu", torch.float32, {})
    for inside in (True, False):
        out = torch.ops.roost.attention(
            q, k, v, None, False, None, False, [0, 2, 1, 3] if inside else [0, 1, 2, 3]
        )
        assert (out.stride()[1] < out.stride()[2]) == inside
        assert out.transpose(1, 2).is_contiguous() == inside


def test_the_op_passes_pytorchs_own_check_of_custom_ops():
    q, k, v, _ = (
        t.requires_grad_() if t is not None else None for t in tensors("cpu", torch.float32, {})
    )
    torch.library.opcheck(
        torch.ops.roost.attention.default, (q, k, v, None, True, None, False, [0, 1, 2, 3])
    )


def test_flop_of_forward_and_backward():
    x = torch.empty(2, 4, 16, 32, device="meta")
    assert flop.attention_flop(x, x, x, out_val=x) == 4 * 2 * 4 * 16 * 16 * 32
    assert flop.attention_backward_flop(x, x, x, x, out_val=x) == 10 * 2 * 4 * 16 * 16 * 32
