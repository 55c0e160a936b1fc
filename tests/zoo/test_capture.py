"""Every model of the zoo is captured whole: same numbers, same FLOP, at small size."""

import copy

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import roost
from roost import zoo
from roost.core.graph import PHASES
from roost.frontends.tracing.captured_step import captured_step
from roost.frontends.tracing.trace import trace
from support.numerics import compare_with_eager
from support.runs import any_placement, differences, run_steps, virtual_problem

# Where the captured step does not run the very kernels of the model, and by how much they then
# differ.
CLOSE = {
    # Several query heads share a key head: their gradients are summed in another order.
    "llama": 1e-6,
    "moe": 1e-6,
}
# PyTorch's counter forgets the groups of grouped convolutions in the backward pass.
GROUPED = ("nasnet",)
COUNTED = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "attention")


def small(name, train):
    settings = zoo.settings(name).small()
    torch.manual_seed(0)
    return settings.model().train(train), settings.inputs(train)


@pytest.fixture(scope="module", params=zoo.names())
def step(request):
    """A model, its inputs, and its training step, traced once for all tests."""
    model, inputs = small(request.param, train=True)
    program = trace(model, inputs, train=True)
    return request.param, model, inputs, program, captured_step(program, request.param, "adam")


def test_a_training_step_gives_loss_gradients_and_buffers_of_the_model(step):
    name, model, inputs, program, _ = step
    differences = compare_with_eager(model, inputs, train=True, program=program)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(key.startswith("gradient of") for key in differences) == len(learning)
    wrong = {
        key: difference
        for key, difference in differences.items()
        if difference > CLOSE.get(name, 0.0)
    }
    assert not wrong


@pytest.mark.filterwarnings("ignore:TF32")
def test_flop_are_those_that_pytorch_counts(step):
    name, model, inputs, _, found = step
    graph = found.graph
    train = name not in GROUPED
    # On the meta device attention is counted as the two products it is, forward and backward.
    with torch.device("meta"):
        model, inputs = (
            copy.deepcopy(model).to("meta"),
            tuple(tensor.to("meta") for tensor in inputs),
        )
    with FlopCounterMode(display=False) as counter, torch.backends.mkldnn.flags(enabled=False):
        result = model(*inputs)
        if train:
            result.backward()
    phases = ("forward", "backward") if train else ("forward",)
    rows = [
        (kind, flop)
        for kind, flop, phase in zip(graph.kinds, graph.flop, graph.phase, strict=True)
        if PHASES[phase] in phases
    ]
    flop = sum(flop for kind, flop in rows if kind in COUNTED)
    # The counter multiplies scores out and keeps them: four products backward. A kernel makes them
    # again: five.
    flop += sum(flop * 4 / 5 for kind, flop in rows if kind == "attention_backward")
    assert flop == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_a_step_can_be_placed_and_simulated(step):
    graph = step[-1].graph
    problem = roost.estimate(graph, roost.cluster("a100x4"))
    timeline = roost.simulate(problem, roost.Placement(np.full(graph.num_ops, 1)))
    assert timeline.feasible
    assert timeline.step_time > 0
    assert timeline.num_transfers == 0


def test_a_step_runs_on_two_devices_with_the_numbers_of_one(step):
    _, model, inputs, _, found = step
    problem = virtual_problem(found)
    alone = run_steps(
        found, problem, roost.Placement(np.zeros(found.graph.num_ops, int)), model, inputs
    )
    rng = np.random.default_rng(0)
    for _ in range(2):
        assert not differences(
            run_steps(found, problem, any_placement(problem, rng), model, inputs), alone
        )


@pytest.mark.parametrize("name", zoo.names())
def test_inference_gives_the_output_of_the_model(name):
    model, inputs = small(name, train=False)
    differences = compare_with_eager(model, inputs, train=False)
    assert differences
    assert all(difference <= CLOSE.get(name, 0.0) for difference in differences.values()), (
        differences
    )
