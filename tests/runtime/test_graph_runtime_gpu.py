"""The graph runtime on a CPU and a CUDA device: the numbers of one device, whatever lives and runs
where."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_graph_runtime import made
from torch import nn

import roost
from roost import zoo
from roost.errors import ExecutionError, InputError
from roost.frontends.tracing.captured_step import captured_step
from roost.frontends.tracing.trace import trace
from roost.runtime.ops.run import GraphRuntime
from roost.runtime.step.unplaced import residents_of
from support.runs import any_placement, differences, mixed_problem, run_steps, streamed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CPU, CUDA = 0, 1


def all_on(problem, device):
    return problem.placement(np.full(problem.graph.num_ops, device))


def close(one, other, share=1e-4):
    """Whether two runs differ by no more than this share of the largest number of each tensor."""
    pairs = [
        (mine, theirs)
        for ours, others in zip(one[0], other[0], strict=True)
        for mine, theirs in zip(ours, others, strict=True)
    ]
    pairs += [(value, other[1][name]) for name, value in one[1].items()]
    for mine, theirs in pairs:
        assert mine.shape == theirs.shape
        largest = float(theirs.double().abs().max())
        assert float((mine.double() - theirs.double()).abs().max()) <= share * max(largest, 1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_any_placement_on_both_is_close_to_the_cpu_alone(optimizer):
    model, inputs, step = made(optimizer)
    problem, rng = mixed_problem(step, "cpu", "cuda:0"), np.random.default_rng(1)
    alone = run_steps(step, problem, all_on(problem, CPU), model, inputs, count=3)
    close(run_steps(step, problem, all_on(problem, CUDA), model, inputs, count=3), alone)
    for _ in range(12):
        close(run_steps(step, problem, any_placement(problem, rng), model, inputs, count=3), alone)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_streaming_changes_no_bit(optimizer):
    model, inputs, step = made(optimizer, dropout=0.5)
    problem, rng = mixed_problem(step, "cpu", "cuda:0"), np.random.default_rng(2)
    alone = run_steps(step, problem, all_on(problem, CUDA), model, inputs, count=4)
    assert alone[0][0][0] != alone[0][1][0]  # each step draws anew
    for number in range(12):
        placement = streamed(problem, rng, CUDA)
        if number % 3 == 0:
            placement = replace(placement, prefetch_bytes=0)
        assert not differences(run_steps(step, problem, placement, model, inputs, count=4), alone)


def test_a_model_whose_layers_are_large_streams_too():
    """Sizes at which copies take a while, so that who does not wait is caught."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(6)]
    model, inputs = nn.Sequential(*layers).train(), (torch.randn(256, 1024),)
    step = captured_step(
        trace(model, inputs, train=True, loss=lambda out: out.square().mean()), "net", "adam"
    )
    problem, rng = mixed_problem(step, "cpu", "cuda:0"), np.random.default_rng(3)
    alone = run_steps(step, problem, all_on(problem, CUDA), model, inputs, count=3)
    for window in (0, 5_000_000, 20_000_000, 2**30):
        placement = replace(streamed(problem, rng, CUDA), prefetch_bytes=window)
        assert not differences(run_steps(step, problem, placement, model, inputs, count=3), alone)


def test_a_llama_in_bf16_streams():
    torch.manual_seed(0)
    settings = zoo.settings("llama").small()
    model, inputs = settings.model().bfloat16().eval(), settings.inputs(False)
    step = captured_step(trace(model, inputs), "llama")
    problem, rng = mixed_problem(step, "cpu", "cuda:0"), np.random.default_rng(4)
    alone = run_steps(step, problem, all_on(problem, CUDA), model, inputs)
    with torch.no_grad():
        eager = model.cuda()(inputs[0].cuda()).cpu()
    torch.testing.assert_close(alone[0][0][0], eager, rtol=0.05, atol=0.05)
    for _ in range(6):
        assert not differences(
            run_steps(step, problem, streamed(problem, rng, CUDA), model, inputs), alone
        )


def test_inputs_may_lie_anywhere_and_results_are_where_they_were_made():
    model, inputs, step = made()
    problem = mixed_problem(step, "cpu", "cuda:0")
    placement = streamed(problem, np.random.default_rng(5), CUDA)
    with GraphRuntime(step, problem, placement, residents_of(model)) as run:
        here = run.step(*inputs)[0]
        assert here.device == torch.device("cuda", 0)
        assert 0 < run.peak_memory()["cuda:0"] < 2**30
    with GraphRuntime(step, problem, placement, residents_of(model)) as run:
        there = run.step(*(value.cuda() for value in inputs))[0]
    assert torch.equal(here, there)


def test_an_op_that_fails_on_the_gpu_is_named():
    model, inputs, step = made()
    problem = mixed_problem(step, "cpu", "cuda:0")

    def fail(op, value):
        if isinstance(value, torch.Tensor) and value.is_cuda:
            raise RuntimeError("as asked")

    placement = streamed(problem, np.random.default_rng(6), CUDA)
    run = GraphRuntime(step, problem, placement, residents_of(model), watch=fail)
    with pytest.raises(ExecutionError, match=r"op '.+' failed on cuda:0: as asked"):
        run.step(*inputs)
    with pytest.raises(InputError, match="has failed before"):
        run.step(*inputs)
    run.close()


class Huge(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (x * self.weight).sum() + torch.zeros(2**42).sum()


def test_out_of_memory_ends_the_step_and_the_next_run_goes_on():
    model, inputs = Huge().eval(), (torch.ones(4),)
    step = captured_step(trace(model, inputs), "huge")
    problem = mixed_problem(step, "cpu", "cuda:0")
    run = GraphRuntime(step, problem, all_on(problem, CUDA), residents_of(model))
    with pytest.raises(ExecutionError, match=r"failed on cuda:0: .*out of memory"):
        run.step(*inputs)
    run.close()
    model, inputs, step = made()
    problem = mixed_problem(step, "cpu", "cuda:0")
    with GraphRuntime(step, problem, all_on(problem, CUDA), residents_of(model)) as run:
        assert torch.isfinite(run.step(*inputs)[0])


def test_a_gpu_that_is_not_there_is_named():
    model, _, step = made()
    problem = mixed_problem(step, "cpu", "cuda:99")
    with pytest.raises(
        InputError, match=r"'cuda:99' is not on this machine; it has cpu \(and cpu:N\), cuda:0"
    ):
        GraphRuntime(
            step, problem, roost.Placement(np.zeros(step.graph.num_ops, int)), residents_of(model)
        )


@pytest.mark.parametrize("away", [False, True])
def test_ops_recorded_as_graphs_have_the_numbers_of_those_that_are_not(away):
    model, inputs, step = made("adam", dropout=0.5)
    problem, rng = mixed_problem(step, "cpu", "cuda:0"), np.random.default_rng(7)
    alone = run_steps(step, problem, all_on(problem, CUDA), model, inputs, count=4)
    placement = streamed(problem, rng, CUDA) if away else all_on(problem, CUDA)
    close(run_steps(step, problem, placement, model, inputs, count=4, graphs=True), alone)


def test_a_llama_recorded_as_graphs_takes_new_inputs():
    torch.manual_seed(0)
    settings = zoo.settings("llama").small()
    model, inputs = settings.model().bfloat16().eval(), settings.inputs(False)
    step = captured_step(trace(model, inputs), "llama")
    problem = mixed_problem(step, "cpu", "cuda:0")
    given = [inputs[0].roll(shift, 1) for shift in range(4)]
    found = {}
    for graphs in (False, True):
        with GraphRuntime(
            step, problem, all_on(problem, CUDA), residents_of(model), graphs=graphs
        ) as run:
            found[graphs] = [run.step(words)[0] for words in given]
    for one, other in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
    assert not torch.equal(found[True][1], found[True][2])
