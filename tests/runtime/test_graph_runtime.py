"""The graph runtime: placed steps have the numbers of eager PyTorch, whatever the placement, and
failures are told."""

import copy
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import nn

import roost
from roost.errors import ExecutionError, InputError
from roost.frontends.tracing.captured_step import captured_step
from roost.frontends.tracing.trace import trace
from roost.runtime.ops.compiled_source import compiled
from roost.runtime.ops.lines import Line
from roost.runtime.ops.run import GraphRuntime
from roost.runtime.step.device_threads import TaskThread
from roost.runtime.step.optimizers import Optimizer
from roost.runtime.step.unplaced import residents_of
from roost.runtime.whole import cpu_beside_gpu
from support.numerics import distance
from support.runs import any_placement, differences, run_steps, virtual_problem


class Small(nn.Module):
    """Tied weights, a buffer that changes, a view that crosses, and dropout where it is wanted."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.inner = nn.Linear(6, 6)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, words, labels):
        hidden = self.norm(self.embed(words).flatten(0, 1))
        left, right = self.dropout(torch.relu(self.inner(hidden))).chunk(2, dim=1)
        hidden = torch.cat([left * right, left + right], dim=1) + hidden
        return nn.functional.cross_entropy(self.out(hidden), labels.flatten())


def made(optimizer="sgd", dropout=0.0):
    torch.manual_seed(0)
    model = Small(dropout).train()
    inputs = (torch.randint(11, (3, 4)), torch.randint(11, (3, 4)))
    return model, inputs, captured_step(trace(model, inputs, train=True), "small", optimizer)


def on_one(step):
    return roost.Placement(np.zeros(step.graph.num_ops, int))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=False),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_in_a_row_are_those_of_eager_pytorch(optimizer):
    model, inputs, step = made(optimizer)
    problem = virtual_problem(step)
    found = run_steps(
        step, problem, any_placement(problem, np.random.default_rng(1)), model, inputs, count=4
    )
    eager = copy.deepcopy(model)
    taken = OPTIMIZERS[optimizer](eager.parameters())
    for returned in found[0]:
        taken.zero_grad()
        loss = eager(*inputs)
        loss.backward()
        taken.step()
        assert distance(returned[0], loss) == 0.0
    values = residents_of(eager)
    assert {
        name: d for name in found[1] if (d := distance(found[1][name], values[name])) > 0.0
    } == {}


@pytest.mark.parametrize("num_devices", [2, 3])
def test_any_placement_has_the_same_numbers(num_devices):
    model, inputs, step = made("adam", dropout=0.5)
    problem = virtual_problem(step, num_devices)
    alone = run_steps(step, problem, on_one(step), model, inputs, count=3)
    assert alone[0][0][0] != alone[0][1][0]  # each step draws anew
    rng = np.random.default_rng(2)
    for _ in range(15):
        placement = any_placement(problem, rng)
        assert not differences(run_steps(step, problem, placement, model, inputs, count=3), alone)


def test_inference_runs_too():
    torch.manual_seed(0)
    model, inputs = (
        nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).eval(),
        (torch.randn(4, 5),),
    )
    step = captured_step(trace(model, inputs), "net")
    problem = virtual_problem(step)
    with GraphRuntime(
        step, problem, any_placement(problem, np.random.default_rng(3)), residents_of(model)
    ) as run:
        for scale in (1.0, 2.0):
            torch.testing.assert_close(
                run.step(inputs[0] * scale)[0], model(inputs[0] * scale), rtol=0, atol=0
            )


def test_the_weights_of_the_model_are_left_alone():
    model, inputs, step = made()
    before = {name: value.clone() for name, value in residents_of(model).items()}
    run_steps(step, virtual_problem(step), on_one(step), model, inputs)
    assert all(torch.equal(value, before[name]) for name, value in residents_of(model).items())


def test_an_op_that_fails_is_named_and_nobody_waits_for_ever():
    model, inputs, step = made()
    problem = virtual_problem(step)
    run = GraphRuntime(
        step, problem, any_placement(problem, np.random.default_rng(4)), residents_of(model)
    )
    with pytest.raises(ExecutionError, match=r"op 'embedding' failed on cpu:\d: ") as found:
        run.step(torch.full((3, 4), 99), inputs[1])
    assert found.value.op == "embedding"
    with pytest.raises(InputError, match="has failed before"):
        run.step(*inputs)
    run.close()


def test_what_cannot_be_run_is_refused():
    model, inputs, step = made()
    problem = virtual_problem(step)
    with (
        pytest.raises(InputError, match=r"takes 2 tensors \(words, labels\), not 1"),
        GraphRuntime(step, problem, on_one(step), residents_of(model)) as run,
    ):
        run.step(inputs[0])
    with pytest.raises(InputError, match="fifo"):
        GraphRuntime(
            step,
            problem,
            roost.Placement(np.zeros(step.graph.num_ops, int), "fifo"),
            residents_of(model),
        )
    some = {name: value for name, value in residents_of(model).items() if name != "inner.bias"}
    with pytest.raises(InputError, match=r"lacks 'inner\.bias'"):
        GraphRuntime(step, problem, on_one(step), some)
    other = virtual_problem(made("adam")[2])
    with pytest.raises(InputError, match="the captured step is"):
        GraphRuntime(
            step, other, roost.Placement(np.zeros(other.graph.num_ops, int)), residents_of(model)
        )


def test_nothing_of_the_program_gets_into_the_source_as_text():
    with pytest.raises(InputError, match="cannot be named"):
        compiled([Line(0, print, (), {"a=1);__import__('os')#": 1})], "<step>")
    function, _ = compiled([Line(0, list, (("'); raise SystemExit",),), {}, "v0")], "<step>")
    assert function() is None


def test_gradients_are_added_up_in_place():
    model, _, step = made()
    problem = virtual_problem(step)
    with GraphRuntime(step, problem, on_one(step), residents_of(model), Optimizer()) as run:
        names = run._running[0].function.__globals__
        called = {str(value) for key, value in names.items() if key.startswith("k")}
        assert any(name.startswith("aten.add_.") for name in called)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_tensors_are_freed_at_their_last_use(num_devices):
    """Of a chain of layers one device holds what an op reads and what it makes, and another what is
    being sent."""
    model = nn.Sequential(
        *(layer for _ in range(10) for layer in (nn.Linear(8, 8), nn.ReLU()))
    ).eval()
    inputs = torch.randn(2, 8)
    step = captured_step(trace(model, (inputs,)), "chain")
    problem = virtual_problem(step, num_devices)
    middle = np.arange(step.graph.num_ops) >= step.graph.num_ops // 2
    placement = problem.placement(middle.astype(int) % num_devices)
    seen, most = [], 0

    def watch(op, value):
        nonlocal most
        seen.append(weakref.ref(value))
        most = max(most, sum(each() is not None for each in seen))

    with GraphRuntime(step, problem, placement, dict(model.named_parameters()), watch=watch) as run:
        for _ in range(2):
            run.step(inputs)
    assert len(seen) > 20
    assert 1 <= most <= 4


def test_threads_that_run_steps_take_turns():
    model, inputs, step = made()
    problem = virtual_problem(step)
    other = (torch.flip(inputs[0], (0,)), inputs[1])
    placement = any_placement(problem, np.random.default_rng(4))
    with GraphRuntime(step, problem, placement, residents_of(model), Optimizer(rate=0.0)) as run:
        expected = [run.step(*given)[0] for given in (inputs, other)]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda n: run.step(*(inputs, other)[n % 2])[0], range(40)))
    assert all(torch.equal(each, expected[n % 2]) for n, each in enumerate(found))


def test_inputs_by_other_names_are_refused():
    model, inputs, step = made()
    with GraphRuntime(step, virtual_problem(step), on_one(step), residents_of(model)) as run:
        with pytest.raises(InputError, match="takes words, labels; missing or unknown: labels, x"):
            run.step(words=inputs[0], x=inputs[1])
        run.step(labels=inputs[1], words=inputs[0])


def test_what_was_learned_is_written_back():
    model, inputs, step = made()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with GraphRuntime(
        step, virtual_problem(step), on_one(step), residents_of(model), Optimizer(rate=0.1)
    ) as run:
        run.step(*inputs)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        run.write_back(model)
        now = run.residents()
        assert not torch.equal(model.embed.weight, before["embed.weight"])
        assert all(
            torch.equal(value, now[name])
            for name, value in model.state_dict().items()
            if name in now
        )
        assert model.out.weight is model.embed.weight
        with pytest.raises(InputError, match="captured from another model"):
            run.write_back(nn.Linear(2, 2))


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adamw"])
def test_a_run_goes_on_where_another_stopped(optimizer):
    """To the last bit, with dropout and a buffer that changes, and under another placement."""
    model, inputs, step = made(optimizer, dropout=0.5)
    problem, rng, rate = virtual_problem(step), np.random.default_rng(4), Optimizer(rate=0.01)
    with GraphRuntime(
        step, problem, any_placement(problem, rng), residents_of(model), rate
    ) as whole:
        losses = [float(whole.step(*inputs)[0]) for _ in range(6)]
    with GraphRuntime(
        step, problem, any_placement(problem, rng), residents_of(model), rate
    ) as first:
        begun = [float(first.step(*inputs)[0]) for _ in range(3)]
        kept = {
            "residents": first.residents(),
            "states": first.states(),
            "num_steps": first.num_steps,
        }
    with GraphRuntime(step, problem, any_placement(problem, rng), optimizer=rate, **kept) as second:
        rest = [float(second.step(*inputs)[0]) for _ in range(3)]
        assert second.num_steps == 6
    assert begun + rest == losses
    for ours, theirs in (
        (second.residents(), whole.residents()),
        (second.states(), whole.states()),
    ):
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_states_of_another_run_are_refused():
    model, _, step = made("adam")
    problem = virtual_problem(step)
    with GraphRuntime(step, problem, on_one(step), residents_of(model)) as run:
        states = run.states()
    name = next(iter(states))
    for wrong, said in (
        ({"states": {**states, "more": torch.ones(1)}}, "states has 'more', which the optimizer"),
        ({"states": {}}, f"states lacks '{name}'; give all"),
        ({"states": {**states, name: states[name][:1]}}, f"state '{name}' is "),
        ({"states": {**states, name: states[name].double()}}, r"of torch.float64; the step has"),
        ({"states": {**states, name: None}}, "is NoneType; it must be a tensor"),
        ({"states": {**states, name: states[name].to("meta")}}, "is on the meta device"),
        ({"states": [1]}, "states is list; give the result of run.states"),
        ({"num_steps": -1}, "num_steps is -1"),
    ):
        with pytest.raises(InputError, match=said):
            GraphRuntime(step, problem, on_one(step), residents_of(model), **wrong)


def test_residents_of_another_model_are_refused():
    """Many an op takes another shape, and gives other numbers."""
    model, _, step = made()
    problem, values = virtual_problem(step), residents_of(model)
    for wrong, said in (
        (
            values["inner.bias"][:1],
            r"resident 'inner.bias' is \[1\] of torch.float32; the step has \[6\]",
        ),
        (values["inner.bias"].double(), "of torch.float64; the step has"),
        (values["inner.bias"].to("meta"), "is on the meta device"),
        ([1.0], "resident 'inner.bias' is list; it must be a tensor"),
    ):
        with pytest.raises(InputError, match=said):
            GraphRuntime(step, problem, on_one(step), {**values, "inner.bias": wrong})


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_the_modes_of_the_caller_change_nothing(mode):
    model, inputs, step = made("adam")
    problem = virtual_problem(step)
    placement = any_placement(problem, np.random.default_rng(4))
    with GraphRuntime(step, problem, placement, residents_of(model)) as run:
        expected = [run.step(*inputs)[0] for _ in range(3)]
    with mode(), GraphRuntime(step, problem, placement, residents_of(model)) as run:
        assert [run.step(*inputs)[0] for _ in range(3)] == expected


def test_cores_that_are_not_there_are_told_and_no_thread_stays():
    model, _, step = made()
    problem = virtual_problem(step)
    placement = any_placement(problem, np.random.default_rng(4))
    before = threading.active_count()
    for cores, said in (
        (
            [set(), {99_999}],
            r"the thread of 'cpu:1' cannot have cores \{99999\}: .*; give cores that this process may",
        ),
        ([set(), {-1}], "negative CPU number"),
        ([set()], "cores: 1 given, but the cluster has 2 devices; give one for each device"),
    ):
        with pytest.raises(InputError, match=said):
            GraphRuntime(step, problem, placement, residents_of(model), cores=cores)
    assert threading.active_count() == before


def test_threads_that_start_others_at_once_keep_their_number_of_threads():
    """New threads begin with what some thread has set last: that must never be what one of ours
    has."""
    before, wanted = torch.get_num_threads(), 5
    seen: Counter[int] = Counter()

    def work(number):
        for _ in range(40):
            ours = TaskThread("ours", lambda error: None, threads=number % 2)
            if number % 2 == 0:  # it has what its caller has
                ours.submit(lambda: seen.update([torch.get_num_threads()]))
            ours.close()
        seen[torch.get_num_threads()] += 1

    try:
        torch.set_num_threads(wanted)
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.get_num_threads() == wanted
        assert set(seen) == {wanted}
    finally:
        torch.set_num_threads(before)


def test_the_thread_beside_a_gpu_changes_no_other(monkeypatch):
    monkeypatch.setattr(cpu_beside_gpu, "stream_wait", lambda: None)
    monkeypatch.setattr(cpu_beside_gpu, "CudaFlags", MagicMock)
    monkeypatch.setattr(cpu_beside_gpu, "num_threads", lambda: 4)
    before, seen = torch.get_num_threads(), []
    try:
        torch.set_num_threads(5)
        assert torch.get_num_threads() == 5
        beside = cpu_beside_gpu.CpuBesideGpu(torch.device("cuda:0"))
        beside._work.put(lambda: seen.append(torch.get_num_threads()))
        beside.join()
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(torch.get_num_threads).result())
        beside.close()
        assert [*seen, torch.get_num_threads()] == [4, 5, 5]
    finally:
        torch.set_num_threads(before)


def test_the_cpu_beside_a_gpu_leaves_cores_to_others(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    for count, threads in ((16, 14), (8, 6), (4, 3), (2, 2)):
        monkeypatch.setattr(
            cpu_beside_gpu.machine, "own_cores", lambda count=count: list(range(count))
        )
        assert cpu_beside_gpu.num_threads() == threads
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # as asked for by whoever runs this
    assert cpu_beside_gpu.num_threads() == 1
