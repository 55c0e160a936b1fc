"""CUDA devices without a GPU: where each copy lies in the window, and what the runtime waits
for."""

import gc
import logging
import weakref
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_graph_runtime import made, on_one
from torch import nn

from roost.errors import ExecutionError, InputError
from roost.frontends.tracing.captured_step import captured_step
from roost.frontends.tracing.trace import trace
from roost.runtime.ops.cuda import PinnedMemory, device_named
from roost.runtime.ops.fetch_window import ALIGNMENT, lifetimes, packed
from roost.runtime.ops.lines import Line, Ref
from roost.runtime.ops.run import GraphRuntime
from roost.runtime.ops.segments import Segment, segmented
from roost.runtime.step.devices import CpuDevice
from roost.runtime.step.optimizers import Optimizer
from roost.runtime.step.unplaced import residents_of
from roost.simulator.order import dispatch_order
from roost.simulator.reference import plan_fetches
from support.late import late_place
from support.runs import any_placement, differences, mixed_problem, run_steps, streamed


@st.composite
def intervals(draw):
    count = draw(st.integers(0, 12))
    return [(begin, draw(st.integers(begin + 1, count))) for begin in range(count)]


@given(intervals(), st.data())
def test_copies_there_at_the_same_time_share_no_byte(alive, data):
    sizes = [data.draw(st.integers(0, 5 * ALIGNMENT)) for _ in alive]
    offsets, total = packed(sizes, alive)
    for one, (begin, end) in enumerate(alive):
        assert offsets[one] % ALIGNMENT == 0
        assert 0 <= offsets[one] <= offsets[one] + sizes[one] <= total
        for other, (later, last) in enumerate(alive[:one]):
            if later < end and begin < last and sizes[one] and sizes[other]:
                assert (
                    offsets[one] + sizes[one] <= offsets[other]
                    or offsets[other] + sizes[other] <= offsets[one]
                )


def test_a_window_of_equal_copies_is_no_larger_than_what_is_there_at_once():
    offsets, total = packed([ALIGNMENT] * 6, [(0, 3), (1, 4), (2, 5), (3, 6), (4, 6), (5, 6)])
    assert total == 3 * ALIGNMENT
    assert offsets[3] == offsets[0]


def test_bytes_are_taken_over_after_all_who_used_them():
    """A fetch waits for what its device was told before it asked: that has to have all users of its
    bytes in it."""
    _, _, step = made("adam")
    problem, rng = mixed_problem(step, "cpu", "cuda:0"), np.random.default_rng(5)
    taken = 0
    for _ in range(8):
        placement = any_placement(problem, rng)
        order = dispatch_order(problem, placement).tolist()
        place = {op: number for number, op in enumerate(order)}
        for copies in plan_fetches(problem, placement, order)[0]:
            sizes = [int(problem.graph.output_bytes[copy.parameter]) for copy in copies]
            offsets, _ = packed(sizes, lifetimes(copies))
            asked = -1
            for number, copy in enumerate(copies):
                asked = max([asked, *(place[user] for old in copy.replaces for user in old.users)])
                for before in range(number):
                    apart = max(offsets[before], offsets[number]) >= min(
                        offsets[before] + sizes[before], offsets[number] + sizes[number]
                    )
                    if not apart:
                        assert max(place[user] for user in copies[before].users) <= asked
                        taken += 1
    assert taken > 0


@pytest.mark.parametrize("kinds", ["cg", "gc", "gg", "cgg", "g"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_copies_that_come_late_change_no_number(kinds, optimizer):
    model, inputs, step = made(optimizer, dropout=0.5)
    names = [f"{'cpu' if kind == 'c' else 'cuda'}:{number}" for number, kind in enumerate(kinds)]
    problem, rng = mixed_problem(step, *names), np.random.default_rng(6)
    alone = run_steps(
        step, problem, on_one(step), model, inputs, count=3, devices=[CpuDevice() for _ in kinds]
    )
    for seed, make in enumerate([any_placement, streamed, any_placement, streamed]):
        placement = (
            make(problem, rng) if make is any_placement else streamed(problem, rng, len(kinds) - 1)
        )
        for together in (False, True):
            devices = [CpuDevice() if kind == "c" else late_place(seed) for kind in kinds]
            found = run_steps(
                step, problem, placement, model, inputs, 3, devices=devices, one_thread=together
            )
            assert not differences(found, alone)


@pytest.mark.parametrize("kinds", ["g", "cg"])
def test_ops_that_are_recorded_change_no_number(kinds):
    model, inputs, step = made("adam", dropout=0.5)
    problem, rng = (
        mixed_problem(step, *("cpu" if kind == "c" else "cuda:0" for kind in kinds)),
        np.random.default_rng(8),
    )
    on = len(kinds) - 1
    alone = run_steps(
        step, problem, on_one(step), model, inputs, count=4, devices=[CpuDevice() for _ in kinds]
    )
    for seed in range(4):
        placement = streamed(problem, rng, on) if seed % 2 else any_placement(problem, rng)
        for together in (False, True):
            devices = [CpuDevice() if kind == "c" else late_place(seed) for kind in kinds]
            found = run_steps(
                step,
                problem,
                placement,
                model,
                inputs,
                4,
                devices=devices,
                graphs=True,
                one_thread=together,
            )
            assert not differences(found, alone)


def test_inputs_and_results_of_a_recorded_run_are_the_callers():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4))).eval()
    step = captured_step(trace(model, (torch.zeros(2, 5),)), "net")
    problem = mixed_problem(step, "cuda:0")
    given = [torch.randn(2, 5) for _ in range(4)]
    kept = [value.clone() for value in given]
    with GraphRuntime(
        step, problem, on_one(step), residents_of(model), devices=[late_place()], graphs=True
    ) as run:
        assert any(
            isinstance(value, Segment) for value in run._running[0].function.__globals__.values()
        )
        found = [run.step(value)[0] for value in given]
    for before, value, result in zip(kept, given, found, strict=True):
        assert torch.equal(before, value)
        assert torch.equal(result, model(before))


def test_a_failure_in_a_recorded_run_is_named():
    model, inputs, step = made()
    problem = mixed_problem(step, "cuda:0")
    with GraphRuntime(
        step, problem, on_one(step), residents_of(model), devices=[late_place()], graphs=True
    ) as run:
        run.step(*inputs)
        run.step(*inputs)
        with pytest.raises(ExecutionError, match=r"op 'embedding' failed on cuda:0: "):
            run.step(torch.full((3, 4), 99), inputs[1])


class Beside(nn.Module):
    """A loss, and something made of the same weight that the loss knows nothing of."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))

    def forward(self, x):
        return (x * self.weight).sum(), (x + self.weight).detach()


@pytest.mark.parametrize("home", [0, 1])
def test_a_new_value_is_not_written_before_a_late_copy_of_the_old_one_is_made(home):
    model, inputs = Beside(), (torch.ones(4),)
    step = captured_step(trace(model, inputs, train=True), "beside", "sgd")
    problem = mixed_problem(step, "cpu", "cuda:0")
    device = np.full(step.graph.num_ops, home)
    device[step.graph.op_names.index(step.op_of[step.program.results[1]])] = 1 - home
    devices, settings = [CpuDevice(), late_place(most=0.05)], Optimizer(rate=1.0)
    with GraphRuntime(
        step, problem, problem.placement(device), residents_of(model), settings, devices=devices
    ) as run:
        for number in range(3):
            assert run.step(*inputs)[1].tolist() == [
                1.0 - number,
                2.0 - number,
                3.0 - number,
                4.0 - number,
            ]


def test_new_values_on_their_way_home_are_no_more_than_the_window():
    place, waited = late_place(), []
    place.window_bytes = 100

    class Arrival:
        def __init__(self, number):
            self.number = number

        def synchronize(self):
            waited.append(self.number)

    for number, expected in enumerate([[], [], [0], [0, 1]]):
        new = place.leaving(torch.zeros(10))
        assert waited == expected
        place.left(Arrival(number), new.nbytes)


def test_a_failure_on_a_device_that_is_launched_ahead_ends_the_step():
    model, inputs, step = made()
    problem = mixed_problem(step, "cpu", "cuda:0")
    placement = streamed(problem, np.random.default_rng(7))
    run = GraphRuntime(
        step, problem, placement, residents_of(model), devices=[CpuDevice(), late_place()]
    )
    with pytest.raises(ExecutionError, match=r"op 'embedding' failed on cuda:0: "):
        run.step(torch.full((3, 4), 99), inputs[1])
    run.close()


@pytest.mark.parametrize("fails", [False, True])
def test_memory_goes_back_with_the_run(fails):
    """Not when Python next looks for cycles: by then the next run may have found no room."""
    model, inputs, step = made("adam")
    problem = mixed_problem(step, "cpu", "cuda:0")
    placement = any_placement(problem, np.random.default_rng(9))
    run = GraphRuntime(
        step, problem, placement, residents_of(model), devices=[CpuDevice(), late_place()]
    )
    held = weakref.ref(run)
    gc.disable()
    try:
        with suppress(ExecutionError):
            run.step(torch.full((3, 4), 99 if fails else 1), inputs[1])
        assert (run._error is not None) == fails
        run.close()
        del run
        assert held() is None
    finally:
        gc.enable()


def test_a_run_that_is_closed_says_so():
    model, inputs, step = made()
    run = GraphRuntime(step, mixed_problem(step, "cpu"), on_one(step), residents_of(model))
    run.close()
    with pytest.raises(InputError, match="is closed"):
        run.step(*inputs)


def test_a_device_that_does_not_exist_is_named_with_those_that_do():
    model, _, step = made()
    for name in ("cuda:99", "gpu", "cpu:x"):
        problem = mixed_problem(step, "cpu", name)
        with pytest.raises(InputError, match=f"device '{name}' is not on this machine; it has cpu"):
            GraphRuntime(step, problem, on_one(step), residents_of(model))
    assert device_named("cpu:7") == torch.device("cpu")


def test_what_cannot_be_pinned_is_told_once(caplog):
    pins, value = PinnedMemory(limit=8), torch.arange(2.0)
    with caplog.at_level(logging.WARNING):
        found = [pins.pinned_copy(value, torch.empty_like) for _ in range(3)]
    assert len(caplog.records) == 1
    assert all(torch.equal(one, value) and one is not value for one in found)

    def refuse(like):
        raise RuntimeError("CUDA error: out of memory")

    assert torch.equal(PinnedMemory().pinned_copy(value, refuse), value)


def test_looks_alone_are_no_graph():
    program = torch.fx.symbolic_trace(lambda x: x.t())
    node = next(node for node in program.graph.nodes if node.op == "call_method")
    looks = [
        Line(0, torch.ops.aten.t.default, (Ref("c0"),), name=f"v{n}", node=node) for n in range(8)
    ]
    sums = [
        Line(0, torch.ops.aten.neg.default, (Ref("c0"),), name=f"w{n}", node=node) for n in range(4)
    ]
    assert segmented(looks, "looks", lambda function, static: None) == (looks, {})
    found, parts = segmented([*looks, *sums], "sums", lambda function, static: None)
    assert len(parts) == 1
    assert isinstance(found[0].call, Segment)
