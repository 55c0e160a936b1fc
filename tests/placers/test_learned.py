"""The placers that learn on one problem: they learn, stay within their budget, and go on exactly
where they were."""

import os
from dataclasses import replace

import numpy as np
import pytest

from roost.core.cluster import Cluster, Device, Link
from roost.core.costs import Costs
from roost.core.graph import GraphBuilder
from roost.core.problem import Problem
from roost.core.trial import Trial
from roost.errors import InputError
from roost.placers._learning.group_choices import named_by_use
from roost.placers._learning.sequence_policy import SequenceNetwork
from roost.placers._shared.groups import groups_of
from roost.placers.post import Post
from roost.placers.seq2seq import Seq2seq
from roost.placers.spotlight import Spotlight
from roost.search import evaluate
from roost.search.budget import Budget
from roost.search.simulating import Simulating
from roost.search.solve import search
from roost.testing.problems import training_like
from support.nasty import nasty

SMALL = SequenceNetwork(hidden=8)
PLACERS = {
    "seq2seq": Seq2seq(network=SMALL, rate=1e-2, refine=0.0),
    "spotlight": Spotlight(network=SMALL, batch=16, refine=0.0),
    "post": Post(refine=0.0),
    "seq2seq_refined": Seq2seq(network=SMALL),
    "spotlight_paper": Spotlight.paper(),
    "post_paper": Post.paper(),
    "spotlight_heuristic": Spotlight(
        network=SequenceNetwork(hidden=8, heuristic_prior=4.0), refine=0.0
    ),
    "spotlight_tries_first": Spotlight(
        network=SequenceNetwork(hidden=8, heuristic_first=True), refine=0.0
    ),
    "post_heuristic": Post(heuristic_prior=4.0, refine=0.0),
}


def branches(num_branches=6, length=3, num_devices=3, memory=10_000, send=0.1):
    """Equal chains side by side: one device for each is best."""
    builder = GraphBuilder("branches")
    for branch in range(num_branches):
        last = builder.parameter(f"b{branch}.w", 50)
        for op in range(length):
            last = builder.add(
                f"b{branch}.{op}", "matmul", [last], output_bytes=100, module=f"b{branch}.{op}"
            )
    graph = builder.freeze()
    devices = tuple(Device(f"cuda:{number}", "cuda", memory) for number in range(num_devices))
    cluster = Cluster("alike", devices, (Link("*", "*", 100 / send),))
    return Problem(
        graph,
        cluster,
        Costs(np.where(graph.is_parameter, 0.0, 1.0)[:, None].repeat(num_devices, axis=1)),
    )


def answer(result):
    return (result.best.step_time, result.best.placement.digest, result.num_trials)


@pytest.mark.parametrize("name", ["seq2seq", "spotlight", "post"])
def test_it_learns_what_random_does_not_find(name):
    problem = branches()
    random_step = search(problem, "random", trials=600, prove=False).best.step_time
    learned = search(problem, PLACERS[name], trials=600, prove=False).best.step_time
    assert learned < random_step
    assert learned <= 6.5  # 18 ops on three devices: 6 is the least


@pytest.mark.parametrize(
    "placer",
    [
        Spotlight(network=SequenceNetwork(hidden=8, heuristic_prior=30.0)),
        Post(heuristic_prior=30.0),
    ],
)
def test_a_strong_prior_begins_at_the_best_heuristic(placer):
    problem = training_like(40, 3)
    heuristics = [search(problem, name, prove=False).best for name in ("single", "expert", "etf")]
    trials_seen = []

    def watch(progress):
        trials_seen.append(progress.trial)

    search(problem, placer, trials=300, prove=False, on_trial=watch)
    names = [trial.placer for trial in trials_seen]
    first = names.index("spotlight" if "spotlight" in names else "post")
    assert {"single", "expert", "etf", "rules"} <= set(names[:first])
    assert min(t.step_time for t in trials_seen[:first]) <= min(
        t.step_time for t in heuristics if t.feasible
    )
    drawn = {trial.placement.device.tobytes() for trial in trials_seen[first : first + 4]}
    assert len(drawn) == 1  # all the same devices, in several orders


@pytest.mark.parametrize(
    "placer", [Spotlight(network=SMALL, order="rank", refine=0.0), Post(order="rank", refine=0.0)]
)
def test_the_best_heuristic_can_be_tried_first_without_being_a_prior(placer):
    problem, name = training_like(40, 3), type(placer).__name__.lower()
    first = (
        {"heuristic_first": True}
        if name == "post"
        else {"network": replace(SMALL, heuristic_first=True)}
    )

    def drawn(placer):
        trials_seen = []
        search(
            problem,
            placer,
            trials=300,
            prove=False,
            on_trial=lambda progress: trials_seen.append(progress.trial),
        )
        begin = [trial.placer for trial in trials_seen].index(name)
        return {t.placer for t in trials_seen[:begin]}, [
            t.placement.device.tolist() for t in trials_seen[begin : begin + 8]
        ]

    nothing, plain = drawn(placer)
    tried, same = drawn(replace(placer, **first))
    assert not nothing
    assert {"single", "expert", "etf", "rules"} <= tried
    assert same == plain


def test_names_of_like_devices_follow_their_first_use():
    problem = branches(num_devices=3)
    assert named_by_use(problem, np.array([2, 2, 0, 1, 0])).tolist() == [0, 0, 1, 2, 1]
    assert named_by_use(problem, np.array([1, 1])).tolist() == [0, 0]


@pytest.mark.parametrize("name", PLACERS)
def test_equal_seeds_give_equal_results_within_the_budget(name):
    problem = training_like(40, 3)
    first = search(problem, PLACERS[name], trials=150, seed=3, prove=False)
    assert answer(search(problem, PLACERS[name], trials=150, seed=3, prove=False)) == answer(first)
    assert 100 <= first.num_trials <= 150


@pytest.mark.parametrize("name", ["seq2seq", "spotlight", "post", "post_heuristic"])
@pytest.mark.parametrize("keep", [0.0, 1e9], ids=["state kept", "trials only"])
def test_a_run_that_was_cut_goes_on_to_the_same_curve(name, keep, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "_SAVE_SECONDS", keep)
    problem, placer = branches(), PLACERS[name]

    def run(journal, stop=10**9):
        curve = []

        def watch(progress):
            curve.append((progress.num_trials, progress.best.step_time))
            return progress.num_trials >= stop

        result = search(
            problem, placer, trials=300, seed=1, journal=journal, on_trial=watch, prove=False
        )
        return answer(result), [step for count, step in dict(curve).items()]

    whole, curve = run(None)
    simulated, source = [], Simulating.trials
    monkeypatch.setattr(
        Simulating, "trials", lambda self, some: simulated.extend(some) or source(self, some)
    )
    for stop in (1, 70, 190):
        path = tmp_path / f"{stop}.jsonl"
        run(path, stop)
        kept = path.with_name(f"{path.name}.{name.partition('_')[0]}.npz")
        assert kept.exists() == (keep == 0.0 and stop > (150 if "heuristic" in name else 1))
        simulated.clear()
        again, goes_on = run(path)
        assert again == whole
        assert goes_on[-1] == curve[-1]
        assert len(simulated) <= 300 - min(stop, 60)
        assert np.minimum.accumulate(goes_on).tolist() == goes_on


def test_a_state_of_something_else_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "_SAVE_SECONDS", 0.0)
    problem, path = branches(), tmp_path / "trials.jsonl"
    whole = search(problem, PLACERS["post"], trials=200, seed=1, prove=False)
    for damage in (b"", b"PK\x03\x04 no such thing", None):
        path.unlink(missing_ok=True)
        search(problem, PLACERS["post"], trials=100, seed=1, journal=path, prove=False)
        kept = path.with_name("trials.jsonl.post.npz")
        kept.write_bytes(kept.read_bytes()[:-9] if damage is None else damage)
        assert answer(
            search(problem, PLACERS["post"], trials=200, seed=1, journal=path, prove=False)
        ) == answer(whole)


@pytest.mark.parametrize("name", ["spotlight", "post"])
def test_a_state_that_was_changed_is_not_used(name, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "_SAVE_SECONDS", 0.0)
    problem, path = branches(), tmp_path / "trials.jsonl"
    whole = search(problem, PLACERS[name], trials=150, seed=1, prove=False)
    search(problem, PLACERS[name], trials=100, seed=1, journal=path, prove=False)
    journal, kept = path.read_bytes(), path.with_name(f"trials.jsonl.{name}.npz")
    with np.load(kept) as file:
        state = dict(file)
    one = "state.logits" if name == "post" else "state.weight.leave.weight"
    for key, value in [
        (one, np.full_like(state[one], np.nan)),
        ("state.known", np.zeros(7)),
        ("state.stale", None),
    ]:
        path.write_bytes(journal)
        np.savez(
            kept,
            **{each: array for each, array in (state | {key: value}).items() if array is not None},
        )
        assert answer(
            search(problem, PLACERS[name], trials=150, seed=1, journal=path, prove=False)
        ) == answer(whole)


def test_a_pipe_in_place_of_a_state_is_not_waited_for(tmp_path):
    problem, path = branches(), tmp_path / "trials.jsonl"
    search(problem, PLACERS["post"], trials=60, seed=1, journal=path, prove=False)
    os.mkfifo(tmp_path / "trials.jsonl.post.npz")
    again = search(problem, PLACERS["post"], trials=90, seed=1, journal=path, prove=False)
    assert answer(again) == answer(search(problem, PLACERS["post"], trials=90, seed=1, prove=False))


@pytest.mark.parametrize("name", ["seq2seq", "spotlight", "post"])
def test_one_device_and_one_group_are_no_trouble(name):
    one = search(branches(num_devices=1), PLACERS[name], trials=50, prove=False)
    assert one.best.step_time == pytest.approx(18.0)
    builder = GraphBuilder("one")
    builder.add("only", "matmul", [], output_bytes=1)
    problem = Problem(builder.freeze(), branches().cluster, Costs(np.ones((1, 3))))
    assert search(problem, PLACERS[name], trials=50, prove=False).best.step_time == 1.0


@pytest.mark.parametrize("name", ["seq2seq", "spotlight", "post"])
def test_where_little_fits_it_learns_to_fit(name):
    problem = branches(num_branches=6, length=4, num_devices=3, memory=500)
    shares = [trial.feasible for trial in _random(problem, 300)]
    assert np.mean(shares) < 0.05
    result = search(problem, PLACERS[name], trials=1500, prove=False)
    assert result.best.feasible


def _random(problem, count):
    groups, rng = groups_of(problem), np.random.default_rng(0)
    devices = rng.integers(0, problem.cluster.num_devices, (count, groups.num_units))
    return Simulating(problem, 1).trials(
        [problem_placement(problem, groups.devices(row)) for row in devices]
    )


def problem_placement(problem, device):
    return problem.placement(device, "rank")


NUMBERS = {
    "num_groups": (0, 1.5),
    "batch": (0, 1, True),
    "rate": (-1.0, 0.0, np.nan, np.inf),
    "refine": (-0.1, 1, 2, np.nan),
}
WRONG = [
    *(
        (placer_class, name, value)
        for placer_class in (Seq2seq, Spotlight, Post)
        for name, some in NUMBERS.items()
        for value in some
    ),
    *(
        (placer_class, "order", value)
        for placer_class in (Seq2seq, Spotlight, Post)
        for value in ("foo", "priority", None)
    ),
    *((SequenceNetwork, "hidden", value) for value in (0, -1, 2.5, "8")),
    *((SequenceNetwork, "attention", value) for value in ("foo", None)),
    *((SequenceNetwork, "temperature", value) for value in (0.0, -1.0, np.nan, np.inf, "1")),
    *(
        (SequenceNetwork, name, np.nan)
        for name in ("tanh", "spread", "speed_prior", "heuristic_prior")
    ),
    *(
        (SequenceNetwork, name, -1.0)
        for name in ("tanh", "spread", "speed_prior", "heuristic_prior")
    ),
    *((SequenceNetwork, "train_on", value) for value in ("foo", "cpu:x", "", None, 3)),
    (SequenceNetwork, "twins", "no"),
    *((Spotlight, name, value) for name in ("epochs", "target_kl") for value in (0, -1, np.nan)),
    *((Spotlight, "network", value) for value in (None, "dot")),
    *((Spotlight, "entropy", value) for value in (-1.0, np.inf)),
    *((Seq2seq, "failing_seconds", value) for value in (0.0, -1.0, np.nan)),
    *(
        (Seq2seq, name, value)
        for name in ("decay", "drop_failures_after")
        for value in (-1, np.nan)
    ),
    *(
        (Post, name, value)
        for name in ("elite", "refit_step", "mix")
        for value in (-0.1, 1.1, np.nan)
    ),
    *(
        (Post, name, value)
        for name in ("refit_every", "steps", "clip", "heuristic_prior")
        for value in (-1, np.nan)
    ),
]


@pytest.mark.parametrize(("placer_class", "name", "value"), WRONG)
def test_settings_that_make_no_sense_are_refused_when_they_are_made(placer_class, name, value):
    with pytest.raises(InputError, match=f"^{name} is .*must be"):
        placer_class(**{name: value})


def test_a_gpu_that_is_not_there_is_refused():
    placer = Spotlight(network=SequenceNetwork(hidden=8, train_on="cuda:99"))
    with pytest.raises(
        InputError, match=r"train_on is 'cuda:99', but PyTorch sees \d+ GPUs here; try auto"
    ):
        search(branches(), placer, trials=50, prove=False)


@pytest.mark.parametrize("name", ["seq2seq_refined", "spotlight", "post"])
@pytest.mark.parametrize("slow", [2, 5, 8])
def test_however_late_it_is_there_is_one_placement(name, slow):
    """The clock jumps past the end of the budget at one of its first readings: building a network
    may take so long."""
    readings = iter(range(10**9))
    budget = Budget(seconds=10.0, clock=lambda: 0.0 if next(readings) < slow else 20.0)
    placer = PLACERS[name] if name != "post" else Post()
    assert search(branches(), placer, budget=budget, prove=False).best.feasible


class Broken(Simulating):
    """A machine on which every third placement gives no time."""

    count = 0

    def trials(self, placements):
        broken = []
        for trial in super().trials(placements):
            self.count += 1
            bad = self.count % 3 == 0
            broken.append(
                Trial(
                    trial.placement,
                    np.nan if bad else trial.step_time,
                    trial.peak_memory,
                    not bad and trial.feasible,
                )
            )
        return broken


@pytest.mark.parametrize("name", ["seq2seq", "spotlight", "post"])
def test_steps_that_are_no_number_are_failures(name):
    problem = branches()
    result = search(problem, PLACERS[name], trials=400, source=Broken(problem, 1), prove=False)
    assert result.best.feasible
    assert result.best.step_time < 12


@pytest.mark.parametrize("name", ["seq2seq", "spotlight", "post"])
def test_it_tells_how_it_learns(name):
    notes = []
    search(branches(), PLACERS[name], trials=100, on_note=notes.append, prove=False)
    assert [note["trials"] for note in notes] == sorted(note["trials"] for note in notes)
    assert {"best", "mean", "failed", "entropy", "seconds"} <= notes[0].keys()
    assert notes[0]["entropy"] > notes[-1]["entropy"] * 0.9
    if name == "spotlight":
        assert {"kl", "kl_of_worst_stage", "surrogate_less_penalty", "guaranteed"} <= notes[
            0
        ].keys()


@pytest.mark.parametrize("seed", range(60))
def test_groups_keep_together_what_must_be_together(seed):
    problem = nasty(seed)[0]
    for most in (300, 8):
        groups = groups_of(problem, most)
        assert groups.allowed.any(axis=1).all()
        device = groups.devices(groups.allowed.argmax(axis=1))
        problem.check(problem_placement(problem, device))
