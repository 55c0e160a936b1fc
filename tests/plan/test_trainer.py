"""The trainer: steps equal to PyTorch's own, saved and loaded, and refusals in words."""

import copy
import math
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import roost
from roost.core.cluster import Cluster, Device, Link
from roost.errors import ExecutionError, InputError
from support.numerics import distance

FIGURES = {"peak": {"float32": 1e10}, "memory_bandwidth": 1e10}


def threads(number=2, memory=2**34):
    devices = tuple(Device(f"cpu:{n}", "cpu", memory, **FIGURES) for n in range(number))
    return Cluster("threads", devices, (Link("*", "*", 1e10),))


class Apart:
    """Whole copies on devices in turn; parameters and updates on either."""

    def place(self, problem, evaluate):
        names = problem.graph.op_names
        device = np.array([_device(name) for name in names])
        return evaluate([problem.placement(device, "rank")])[0].placement


class OneDevice:
    def place(self, problem, evaluate):
        return evaluate([problem.placement(np.zeros(problem.graph.num_ops, int))])[0].placement


def _device(name):
    base, _, copy_number = name.partition("#")
    if copy_number.isdecimal():
        return int(copy_number) % 2
    return len(base.partition(":")[0]) % 2


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.outer = nn.Linear(7, 3, bias=False)
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)

    def forward(self, x, labels):
        hidden = torch.tanh(self.inner(x)) * self.frozen
        return nn.functional.cross_entropy(self.outer(hidden), labels)


def batches(count, size=8):
    torch.manual_seed(1)
    return [(torch.randn(size, 5), torch.randint(3, (size,))) for _ in range(count)]


def made(placer=None, microbatches=4, **settings):
    torch.manual_seed(0)
    model = settings.pop("model", None) or Small()
    return roost.trainer(
        model,
        batches(1)[0],
        cluster=threads(),
        costs="estimated",
        microbatches=microbatches,
        placer=placer or Apart(),
        trials=50,
        lr=settings.pop("lr", 0.1),
        **settings,
    )


def weights(trainer):
    return trainer.state_dict()["model"]


def eager(every, optimizer="adamw", count=4, clip_norm=None, accumulate=1, factor=None, lr=0.1):
    """Losses and weights of gradient accumulation in plain PyTorch."""
    torch.manual_seed(0)
    model = Small()
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    taken = kinds[optimizer](learning, lr=lr, foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(taken, factor or (lambda step: 1.0))
    losses = []
    for number, batch in enumerate(every, 1):
        total = 0.0
        for part in zip(*(value.chunk(count) for value in batch), strict=True):
            loss = model(*part) / (count * accumulate)
            loss.backward()
            total = total + loss.detach()
        losses.append(float(total) * accumulate)
        if number % accumulate == 0:
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            taken.step()
            schedule.step()
            taken.zero_grad()
    return losses, dict(model.named_parameters())


def check(trainer, every, expected):
    losses = [trainer.step(*batch) for batch in every]
    assert losses == expected[0]
    found = weights(trainer)
    assert {n: d for n in found if (d := distance(found[n], expected[1][n])) > 0.0} == {}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_steps_are_those_of_gradient_accumulation(optimizer):
    every = batches(4)
    with made(optimizer=optimizer) as trainer:
        check(trainer, every, eager(every, optimizer))
        assert trainer.num_steps == 4


def test_gradients_are_clipped_by_their_norm_as_in_pytorch():
    every = batches(4)
    with made(clip_norm=0.2) as trainer:
        check(trainer, every, eager(every, clip_norm=0.2))
    assert eager(every, clip_norm=0.2)[0] != eager(every)[0]


def test_a_step_is_compared_with_pytorch():
    batch = batches(1)[0]
    for count in (1, 4):
        with made(OneDevice() if count == 1 else Apart(), count) as trainer:
            assert trainer.verify(*batch, steps=2).same
            assert trainer.num_steps == 0
    with made(clip_norm=1.0) as trainer, pytest.raises(InputError, match="without clip_norm"):
        trainer.verify(*batch)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 9, bias=False)
        self.embed = nn.Embedding(9, 4)
        self.embed.weight = self.out.weight
        self.middle = nn.Linear(4, 4)

    def forward(self, words):
        return self.out(self.middle(self.embed(words))).square().mean()


def test_tied_weights_are_clipped_once_and_saved_once(tmp_path):
    torch.manual_seed(0)
    model = Tied()
    words = torch.randint(9, (4, 3))
    taken = torch.optim.SGD((plain := copy.deepcopy(model)).parameters(), lr=0.5, foreach=False)
    plain(words).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    taken.step()
    settings = {"optimizer": "sgd", "lr": 0.5, "clip_norm": 0.01, "microbatches": 1}
    with roost.trainer(
        model, words, cluster=threads(), costs="estimated", placer=OneDevice(), **settings
    ) as trainer:
        trainer.step(words)
        assert len(weights(trainer)) == 3
        trainer.write_back()
    for name, value in plain.named_parameters():
        assert torch.equal(model.get_parameter(name), value), name
    assert model.embed.weight is model.out.weight


def test_the_expected_time_has_the_updates_that_follow_the_step():
    with made(clip_norm=1.0) as clipped:
        plan = clipped.plan
        assert plan.step_time > plan.found.result.best.step_time
        assert "updates follow the step" in str(plan)


def test_an_update_after_several_batches_is_a_share_of_the_expected_time_of_each():
    with made(accumulate=1, clip_norm=1.0) as every, made(accumulate=4) as fourth:
        assert every.plan.later_updates == pytest.approx(4 * fourth.plan.later_updates)


def test_several_batches_are_added_up_before_an_update():
    every = batches(4)
    with made(OneDevice(), 1, accumulate=2, optimizer="sgd") as trainer:
        check(trainer, every, eager(every, "sgd", 1, accumulate=2))
    with made(accumulate=2, microbatches=2, optimizer="sgd") as trainer:
        # Each batch is added up first, in another order than a chain over all microbatches.
        losses, last = eager(every, "sgd", 2, accumulate=2)
        assert [trainer.step(*batch) for batch in every] == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(weights(trainer)["inner.weight"], last["inner.weight"].detach())
        assert trainer.num_steps == 2
        trainer.step(*every[0])
        with pytest.raises(InputError, match="1 of 2 batches of an update"):
            trainer.state_dict()


def test_the_rate_is_set_or_follows_a_schedule():
    every = batches(3)
    with made(schedule=lambda step: 0.5**step) as trainer:
        check(trainer, every, eager(every, factor=lambda step: 0.5**step))
        trainer.schedule = None
        trainer.lr = 0.0
        before = weights(trainer)
        trainer.step(*every[0])
        assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())
        trainer.lr = math.nan
        with pytest.raises(InputError, match="rate of update 5 is nan"):
            trainer.step(*every[0])


def test_a_saved_run_goes_on_under_another_placement_and_number_of_microbatches(tmp_path):
    every = batches(5)
    with made() as trainer:
        for batch in every[:2]:
            trainer.step(*batch)
        trainer.save(tmp_path / "run.safetensors")
        rest = [trainer.step(*batch) for batch in every[2:]]
        last = weights(trainer)
    with made(OneDevice()) as other:
        other.load(tmp_path / "run.safetensors")
        assert other.num_steps == 2
        assert [other.step(*batch) for batch in every[2:]] == rest
        assert all(torch.equal(value, last[name]) for name, value in weights(other).items())
    with made(microbatches=2, clip_norm=100.0) as third:
        third.load(tmp_path / "run.safetensors")
        assert [third.step(*batch) for batch in every[2:]] == pytest.approx(rest, rel=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["run.safetensors"]


def test_a_state_that_does_not_fit_is_refused_by_name_and_nothing_changes(tmp_path):
    with made() as trainer:
        trainer.step(*batches(1)[0])
        before = weights(trainer)
        state = trainer.state_dict()
        wrong = [
            (
                {"model": {**state["model"], "outer.weight": torch.ones(2, 7)}},
                r"'outer.weight' of the state is \[2, 7\] of torch.float32; the model has \[3, 7\]",
            ),
            (
                {"model": {k: v for k, v in state["model"].items() if k != "inner.bias"}},
                r"lacks the weight 'inner.bias', \[7\]",
            ),
            (
                {"optimizer": {**state["optimizer"], "odd:exp_avg": torch.ones(1)}},
                "has the optimizer state 'odd:exp_avg'",
            ),
            ({"kind": "sgd"}, "run with 'sgd', the trainer has 'adamw'"),
            ({"steps": -1}, "steps of the state is -1"),
        ]
        for change, said in wrong:
            with pytest.raises(InputError, match=said):
                trainer.load_state_dict({**state, **change})
        with pytest.raises(InputError, match="not the result of"):
            trainer.load_state_dict({"model": {}})
        (tmp_path / "no.safetensors").write_bytes(b"no")
        with pytest.raises(InputError, match="is no safetensors file"):
            trainer.load(tmp_path / "no.safetensors")
        with pytest.raises(InputError, match="no such file"):
            trainer.load(tmp_path / "nothing.safetensors")
        with pytest.raises(InputError, match=r"folder .* does not exist"):
            trainer.save(tmp_path / "nowhere" / "run.safetensors")
        assert all(torch.equal(value, before[name]) for name, value in weights(trainer).items())


def test_a_safetensors_file_of_something_else_is_refused(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "weights.safetensors"
    save_file({"outer.weight": torch.ones(3, 7)}, path)
    with made() as trainer, pytest.raises(InputError, match="says nothing of a training run"):
        trainer.load(path)


def test_the_model_stays_as_it_is_until_weights_are_written_back():
    torch.manual_seed(0)
    model = Small()
    before = copy.deepcopy(model.state_dict())
    with made(model=model) as trainer:
        trainer.step(*batches(1)[0])
        assert all(torch.equal(value, before[n]) for n, value in model.state_dict().items())
        trainer.write_back()
        found = weights(trainer)
    assert all(torch.equal(value, found[n]) for n, value in model.state_dict().items())
    assert not torch.equal(model.outer.weight, before["outer.weight"])


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 3)

    def forward(self, x, scale=1.0, mask=None):
        return (self.inner(x) * scale).square().mean()


def test_inputs_that_are_no_tensors_keep_their_values():
    x = torch.randn(8, 5)
    settings = {"cluster": threads(), "costs": "estimated", "placer": Apart(), "microbatches": 2}
    with roost.trainer(Scaled(), (x, 2.0), **settings) as trainer:
        trainer.step(x, 2.0)
        trainer.step(x, scale=2.0)
        for wrong in ((x,), (x, 3.0), (x, 2.0, True)):
            with pytest.raises(InputError, match="the captured step holds that value"):
                trainer.step(*wrong)
    with roost.trainer(Scaled(), x, **settings) as trainer:
        trainer.step(x, 1.0)  # the default, said
        with pytest.raises(InputError, match="'scale' is 3"):
            trainer.step(x, scale=3.0)


def test_a_batch_without_values_is_refused_and_nothing_changes():
    (x, labels) = batches(1)[0]
    with made() as trainer:
        for odd in (x.to("meta"), x.to_sparse()):
            with pytest.raises(InputError, match="'x' must be a dense tensor"):
                trainer.step(odd, labels)
        assert trainer.num_steps == 0
        trainer.step(x, labels)


def test_weights_of_another_model_are_not_overwritten_in_part():
    other = Small()
    other.outer = nn.Linear(7, 4, bias=False)
    before = copy.deepcopy(other.state_dict())
    with made() as trainer, pytest.raises(InputError, match=r"'outer.weight' is \[3, 7\]"):
        trainer.write_back(other)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


def test_a_run_is_saved_to_a_plain_file_only(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with made() as trainer, pytest.raises(InputError, match="is no plain file"):
        trainer.save(pipe)
    assert pipe.is_fifo()


def test_buffers_that_calls_change_need_permission():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 1)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            with torch.no_grad():
                self.seen.add_(1)
            return (self.inner(x) * self.seen).square().mean()

    settings = {"cluster": threads(), "costs": "estimated", "placer": Apart()}
    with pytest.raises(InputError, match="each call of the model changes seen"):
        roost.trainer(Counts(), torch.randn(8, 5), microbatches=2, **settings)
    with roost.trainer(Counts(), torch.randn(8, 5), **settings) as trainer:
        assert trainer.plan.microbatches == 1


def test_placements_are_tried_on_the_example_batch():
    model = Small()
    before = copy.deepcopy(model.state_dict())
    alike = roost.trainer(model, batches(1)[0], cluster="here", trials=50, microbatches=(1, 2))
    with alike as trainer:
        assert "tried on the example batch: " in str(trainer.plan)
        assert str(trainer.plan).count("(this one)") == 1
        assert trainer.num_steps == 0
        found = weights(trainer)
    assert all(torch.equal(before[name], value) for name, value in found.items())


def test_batches_come_in_order_by_name_or_whole():
    every = batches(1)[0]
    with made(lr=0.0) as trainer:
        expected = trainer.step(*every)
        assert trainer.step(every) == expected
        assert trainer.step(labels=every[1], x=every[0]) == expected
        assert trainer.step({"x": every[0], "labels": every[1]}) == expected
        with pytest.raises(InputError, match="missing a required argument: 'labels'"):
            trainer.step(every[0])
        with pytest.raises(InputError, match="has 3 samples; the trainer was made for"):
            trainer.step(every[0][:3], every[1][:3])
        with pytest.raises(InputError, match=r"'x' is of torch.float64"):
            trainer.step(every[0].double(), every[1])
        assert trainer.step(*every) == expected  # refused batches do no harm


def test_a_closed_trainer_says_so():
    trainer = made()
    trainer.close()
    trainer.close()
    for call in (lambda: trainer.step(*batches(1)[0]), trainer.state_dict, trainer.write_back):
        with pytest.raises(InputError, match="the trainer is closed; make another"):
            call()
    assert "microbatches" in str(trainer.plan)


def test_after_a_failed_step_only_a_saved_state_helps():
    every = batches(2)
    with made() as trainer:
        trainer.step(*every[0])
        state = trainer.state_dict()
        expected = trainer.step(*every[1])
        trainer.load_state_dict(state)
        with pytest.raises(ExecutionError):
            trainer.step(every[0][0], torch.full((8,), 99))
        for call in (lambda: trainer.step(*every[1]), trainer.state_dict, trainer.write_back):
            with pytest.raises(InputError, match=r"step 2 failed .*trainer.load"):
                call()
        trainer.load_state_dict(state)
        assert trainer.step(*every[1]) == expected


class Future:
    """A step that is interrupted so many times while it runs."""

    def __init__(self, run, times):
        self.run, self.times = run, times

    def result(self):
        if self.times:
            self.times -= 1
            raise KeyboardInterrupt
        return self.run()


def test_ctrl_c_ends_a_step_first_and_a_second_one_gives_it_up():
    batch = batches(1)[0]
    with made() as trainer:
        state = trainer.state_dict()
        run = trainer._run
        thread = run._thread
        times = iter([1, 2])

        def submit(call, *args):
            inner = thread.submit(call, *args)
            return Future(inner.result, next(times))

        run._thread = SimpleNamespace(submit=submit, shutdown=thread.shutdown)
        with pytest.raises(KeyboardInterrupt, match="stopped after step 1, which was finished"):
            trainer.step(*batch)
        assert trainer.num_steps == 1
        assert trainer.state_dict()["steps"] == 1
        with pytest.raises(KeyboardInterrupt, match="given up by a second Ctrl-C"):
            trainer.step(*batch)
        with pytest.raises(InputError, match="given up by a second Ctrl-C"):
            trainer.step(*batch)
        trainer.load_state_dict(state)
        assert isinstance(trainer.step(*batch), float)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": "adamm"}, "did you mean 'adam'"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": "fast"}, "lr is 'fast'"),
        ({"clip_norm": 0}, "clip_norm is 0"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0"),
        ({"betas": 0.9}, "betas is 0.9"),
        ({"optimizer": "sgd", "weight_decay": 0.1}, "sgd has none"),
        ({"microbatches": 3}, "Give one of 1, 2, 4, 8"),
        ({"microbatches": 16}, "but the batch has 8 samples"),
        ({"microbatches": "many"}, "microbatches is 'many'"),
        ({"microbatches": ()}, r"microbatches is \(\)"),
        ({"batch_dims": {"labelz": 0}}, "labels"),
        ({"memory": {"cpu:7": "1GiB"}}, "cpu:7"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_captured(settings, said):
    with pytest.raises(InputError, match=said):
        made(**settings)


def test_what_is_no_model_and_a_cluster_of_elsewhere_are_refused():
    with pytest.raises(InputError, match="Module is needed, not function"):
        roost.trainer(lambda x: x, torch.ones(2))
    cluster = Cluster("far", (Device("tpu:0", "tpu", 2**30, **FIGURES),), ())
    with pytest.raises(InputError, match="tpu:0"):
        roost.trainer(Small(), batches(1)[0], cluster=cluster)
    with pytest.raises(InputError, match="kind of costs"):
        roost.trainer(Small(), batches(1)[0], cluster=threads(), costs="guessed")


def test_models_with_batch_norm_train_whole_unless_microbatches_are_allowed():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))

    def train(**settings):
        return roost.trainer(
            model,
            torch.randn(8, 5),
            loss=lambda out: out.square().mean(),
            cluster=threads(),
            costs="estimated",
            placer=OneDevice(),
            trials=5,
            **settings,
        )

    with train() as trainer:
        assert trainer.plan.microbatches == 1
        assert "one microbatch only: 1 takes its values" in str(trainer.plan)
    with pytest.raises(InputError, match="BatchNorm in 1"):
        train(microbatches=2)
    with train(microbatches=2, batch_statistics=True) as trainer:
        trainer.step(torch.randn(8, 5))
        assert trainer.state_dict()["model"]["1.num_batches_tracked"] == 1
        with pytest.raises(InputError, match="verify cannot compare"):
            trainer.verify(torch.randn(8, 5))


def test_the_plan_says_what_each_device_does_and_how_long_it_takes():
    with made() as trainer:
        text = str(trainer.plan)
        assert "Small: a batch of 8 in 4 microbatches of 2, on cpu:0, cpu:1" in text
        assert "cpu:0: 50% of the busy time: microbatches 1, 3 whole" in text
        assert "measured" not in text
        for batch in batches(3):
            trainer.step(*batch)
        assert "median of 1 step" in str(trainer.plan)
        assert trainer.plan.measured > 0
    with made(OneDevice()) as trainer:
        assert trainer.plan.one_device_is_best
        assert "one device is best (cpu:0)" in str(trainer.plan)
        assert "cpu:1: idle" in str(trainer.plan)


def test_memory_that_does_not_suffice_is_refused():
    with pytest.raises(roost.Infeasible):
        made(memory={"cpu:0": 200, "cpu:1": 200})


def test_smaller_microbatches_are_a_fix_where_nothing_fits():
    batch = batches(1, size=64)[0]
    settings = {"cluster": threads(), "costs": "estimated", "trials": 300, "optimizer": "sgd"}
    caps = {"cpu:0": 3000, "cpu:1": 3000}
    with pytest.raises(roost.Infeasible, match=r"It fits in \d+ microbatches of") as error:
        roost.trainer(Small(), batch, microbatches=1, memory=caps, **settings)
    fix = error.value.microbatches
    with roost.trainer(Small(), batch, microbatches=fix, memory=caps, **settings) as trainer:
        assert math.isfinite(trainer.step(*batch))
    with pytest.raises(roost.Infeasible, match="of one sample do not fit either"):
        roost.trainer(
            Small(), batch, microbatches=64, memory={"cpu:0": 300, "cpu:1": 300}, **settings
        )


def test_threads_that_train_take_turns():
    every = batches(4)
    with made(lr=0.0) as trainer:
        expected = [trainer.step(*batch) for batch in every]
        found = [0.0] * 4

        def train(number):
            found[number] = trainer.step(*every[number])

        workers = [threading.Thread(target=train, args=(number,)) for number in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert found == expected
