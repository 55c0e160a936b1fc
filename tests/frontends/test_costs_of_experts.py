"""Products of groups of rows, as mixtures of experts compute them, and ops with their own FLOP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roost.cost_models.roofline import known_share
from roost.frontends.torch import capture, step_of

transformers = pytest.importorskip("transformers", reason="needs the hf extra")

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
EXPERTS, USED, INSIDE, TOKENS = 8, 2, 128, 128
# For each token: three products of each expert it uses, in both layers, two FLOP a weight.
EXPERT_FLOP = TOKENS * USED * 3 * 64 * INSIDE * 2 * 2


def mixtral(dtype: torch.dtype, train: bool) -> Any:
    config = transformers.MixtralConfig(
        **SIZES, intermediate_size=INSIDE, num_local_experts=EXPERTS, num_experts_per_tok=USED
    )
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config).to(dtype).train(train)
        ids = torch.zeros(2, TOKENS // 2, dtype=torch.int64)
    return step_of(model, {"input_ids": ids} | ({"labels": ids} if train else {}), train=train)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("train", "times"), [(False, 1), (True, 3)])
def test_experts_cost_what_the_tokens_they_get_cost(dtype, train, times):
    step = mixtral(dtype, train)
    grouped = ["grouped" in kind for kind in step.graph.kinds]
    assert step.graph.flop[grouped].sum() == times * EXPERT_FLOP
    assert step.coverage.flop_by_formula > 0.98
    assert known_share(step.graph)[0] > 0.98


def test_one_token_reads_the_weights_of_the_experts_it_meets():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(EXPERTS, 64, 32, dtype=torch.bfloat16))

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            return torch._grouped_mm(x, self.weight, offs=ends)

    ends = torch.zeros(EXPERTS, dtype=torch.int32)
    read = {}
    for rows in (2, 64):
        graph = capture(Experts(), (torch.zeros(rows, 64, dtype=torch.bfloat16), ends))
        op = graph.kinds.index("_grouped_mm")
        read[rows] = graph.bytes_read[op] - 2 * rows * 64 - 4 * EXPERTS
    assert read[2] * EXPERTS == read[64] * 2
    assert read[64] == 2 * EXPERTS * 64 * 32


@torch.library.custom_op("roost_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda context, gradient: gradient * 3)  # not the true one: it is kept


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return twice(self.linear(x)).sum()


def test_a_custom_op_with_a_derivative_is_captured_for_training():
    from roost.core.placement import Placement
    from roost.core.problem import Problem
    from roost.cost_models import estimate
    from roost.presets import cluster
    from roost.runtime.graph import GraphRuntime
    from roost.runtime.optimizers import Optimizer

    torch.manual_seed(0)
    model, x = Doubled(), torch.randn(3, 4)
    before = model.linear.weight.detach().clone()
    step = step_of(model, (x,), train=True, optimizer="sgd")
    assert step.graph.counted[step.graph.kinds.index("twice")]  # whatever its name says
    problem = estimate(step.graph, cluster("cpu"))
    assert isinstance(problem, Problem)
    placement = Placement([0] * step.graph.num_ops)
    weights = dict(model.named_parameters())
    with GraphRuntime(step, problem, placement, weights, Optimizer(rate=0.1)) as run:
        run.step(x)
        run.write_back(model)
    change = (before - model.linear.weight.detach()) / 0.1
    torch.testing.assert_close(change, 3 * x.sum(dim=0).expand(4, 4))


CASES = {
    "_fft_r2c": (lambda x, v: torch.fft.rfft(x), 5 * 8 * 16 * 4 / 2),
    "_fft_c2c": (lambda x, v: torch.fft.fft(torch.complex(x, x)), 5 * 8 * 16 * 4),
    "mv": (lambda x, v: x @ v, 2 * 8 * 16),
    "dot": (lambda x, v: v.dot(v), 2 * 16),
    "_cdist_forward": (lambda x, v: torch.cdist(x, x, p=1.0), 3 * 8 * 8 * 16),
    "linalg_inv_ex": (lambda x, v: torch.linalg.inv(x @ x.T), 2 * 8**3),
}


@pytest.mark.parametrize("kind", CASES)
def test_ops_that_multiply_are_costed_by_a_formula(kind):
    function, flop = CASES[kind]

    class Module(nn.Module):
        def forward(self, x: Tensor, v: Tensor) -> Any:
            return function(x, v)

    graph = capture(Module(), (torch.randn(8, 16), torch.randn(16)))
    assert graph.flop[graph.kinds.index(kind)] == flop
