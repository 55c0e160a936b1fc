"""Measured trials: what fails is a trial that says why, the search finds the best of the rest, no
process stays."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_net
import torch
from engine import Counting, Told
from small_net import Faulty, standing_for

import roost
from roost.core.cluster import Cluster, Device
from roost.core.trial import Trial, best_of
from roost.errors import ExecutionError, Infeasible, InputError
from roost.placers import Round
from roost.search.measured.candidates import Limits, check_devices
from roost.search.measured.measuring import Measuring, surely_below
from roost.search.measured.model_source import ModelSource
from roost.search.measured.race import race
from roost.search.measured.served_model import (
    ReadyPlacement,
    ServedModel,
    WrongResult,
    cores_of,
    difference,
    kind_and_text,
)
from roost.search.measured.worker import WorkerFailed, descendants
from roost.search.solve import search, solve
from roost.search.source import Source
from support.runs import any_placement

# Far more than a loaded machine needs for a few steps of a tenth of a second.
LIMITS = Limits(floor=8.0, spare_bytes=2**28)
TOLERANCE = {torch.float32: 1e-4}


def measuring(problem: Any, **more: Any) -> Measuring:
    settings = {"repeats": 2, "limits": LIMITS, "runtime": Faulty, **more}
    return Measuring(
        problem, ModelSource(small_net.made, train=settings.pop("train", False)), **settings
    )


@pytest.fixture(scope="module")
def problem():
    return small_net.problem()


@pytest.fixture(scope="module")
def source(problem):
    """One process for the tests in which nothing fails."""
    found = measuring(problem)
    yield found
    found.close()


def measured(source: Measuring, fault: str, more: int = 0) -> Trial:
    [trial] = source.trials([standing_for(source.problem, fault, more)])
    return trial


def processes() -> set[int]:
    """Those of ours; Python's own, which tidies up after them, stays to the end."""
    found = set()
    for pid in descendants(os.getpid()):
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def test_a_search_among_faults_finishes_with_the_best(problem):
    """Each fault says what it was, and costs a process; the best is compared with again in the new
    one."""
    faults = ["slow", "allocates", "fine", "killed", "nan", "child"]
    asked = [standing_for(problem, fault) for fault in faults] + [standing_for(problem, "slow", 1)]
    before = processes()
    source = measuring(problem)
    seen: list[Trial] = []
    placer = Told(lambda problem, evaluate: best_of(evaluate(asked)).placement)
    result = search(
        problem, placer, trials=20, source=source, on_trial=lambda told: seen.append(told.trial)
    )
    assert processes() == before  # also of the one that started another, which left its group
    assert result.best.placement == standing_for(problem, "fine")
    assert result.ended == "done"
    assert result.bound is None  # one on simulated steps says nothing of these
    found = dict(zip([*faults, "slow again"], seen, strict=True))
    assert {name for name, trial in found.items() if trial.feasible} == {
        "slow",
        "fine",
        "slow again",
    }
    assert all(trial.source == "measured" for trial in seen)
    assert "its limit is" in found["allocates"].why
    assert "SIGKILL" in found["killed"].why
    assert "not a number" in found["nan"].why
    assert "did not end within" in found["child"].why
    assert all(trial.step_time == inf for trial in seen if not trial.feasible)
    assert source.candidates.num_started == 5


def test_wrong_numbers_and_errors_are_found(problem):
    """What happens in the process, in this one."""
    served = ServedModel(ModelSource(small_net.made), problem, Faulty)
    with pytest.raises(
        WrongResult, match="step 1 gives other numbers than the unplaced model: result 0 differs by"
    ):
        served.build("wrong", standing_for(problem, "wrong"), 1)
    with pytest.raises(RuntimeError, match="not for this device") as raised:
        served.build("raises", standing_for(problem, "raises"), 1)
    assert kind_and_text(raised.value) == ("failed", "RuntimeError: this op is not for this device")
    with pytest.raises(InputError, match="fifo") as refused:
        served.build("fifo", replace(standing_for(problem, "fine"), order="fifo"), 1)
    assert kind_and_text(refused.value)[0] == "refused"
    assert served.build("fine", standing_for(problem, "fine"), 1).seconds >= Faulty.fast
    assert served.time("fine", 2) >= Faulty.fast
    for key in list(served.running):
        served.drop(key)


def test_no_memory_left_is_told_from_other_errors():
    outer = ExecutionError("op 'mm' failed")
    outer.__cause__ = RuntimeError(
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
    )
    assert kind_and_text(outer) == ("memory", "op 'mm' failed")
    assert kind_and_text(MemoryError()) == ("memory", "MemoryError")
    assert kind_and_text(KeyError("x"))[0] == "failed"


def test_training_steps_under_any_placement_have_the_numbers_of_the_unplaced_model():
    problem = small_net.problem(train=True)
    served = ServedModel(ModelSource(small_net.made, train=True), problem)
    assert len(served.expected) == 2  # the second shows what the first has written
    rng = np.random.default_rng(0)
    for number in range(3):
        assert served.build(str(number), any_placement(problem, rng), 1).seconds > 0
        served.drop(str(number))


def test_step_times_are_those_of_the_best_times_a_ratio(source):
    """So that a drift of the machine decides nothing."""
    slow = measured(source, "slow", 2)
    source.remember([replace(slow, step_time=1e-6)])
    faster = measured(source, "fine", 2)
    assert 1e-8 < faster.step_time < 1e-6  # in the seconds of the best, whatever those are


class Noisy:
    """Stands for a process in which every step takes a second, more or less."""

    limits, best_seconds, is_ready, has_room = Limits(), inf, lambda *_: True, lambda *_: True

    def __init__(self, seconds: float = 1.0) -> None:
        self.rng, self.seconds = np.random.default_rng(1), seconds
        self.first = ""

    def begin_trial(self) -> None:
        pass

    def drop(self, placement: roost.Placement) -> None:
        pass

    def make_ready(self, placement: roost.Placement) -> ReadyPlacement:
        self.first = self.first or placement.digest
        return ReadyPlacement(1.0, {})

    def time_step(self, placement: roost.Placement) -> float:
        return (1.0 if placement.digest == self.first else self.seconds) * float(
            self.rng.lognormal(0.0, 0.1)
        )


def test_luck_does_not_make_step_times_shrink(problem):
    """A hundred that are all as fast as the first: none may count as much faster."""
    source = Measuring(problem, ModelSource(small_net.made))
    source.candidates = Noisy()  # type: ignore[assignment]
    rng = np.random.default_rng(2)
    found = source.trials([any_placement(problem, rng) for _ in range(100)])
    assert min(trial.step_time for trial in found) > 0.7
    faster = Measuring(problem, ModelSource(small_net.made))
    faster.candidates = Noisy(0.5)  # type: ignore[assignment]
    first, other = faster.trials([any_placement(problem, rng) for _ in range(2)])
    assert 0.4 < other.step_time / first.step_time < 0.7


def test_a_sign_test_says_what_is_below():
    assert [surely_below(range(1, n + 1)) for n in (1, 2, 4, 5, 10, 20)] == [1, 2, 4, 5, 8, 14]


def test_what_was_measured_is_not_measured_again(source):
    first, again = measured(source, "fine"), measured(source, "fine")
    assert (again.step_time, again.seconds) == (first.step_time, 0.0)


def test_devices_may_be_counted_in_another_order(source):
    placement = standing_for(source.problem, "fine")
    other = roost.Placement(1 - placement.device, devices=("cpu:1", "cpu:0"))
    [trial] = source.trials([other])
    assert trial.placement is other
    assert trial.step_time == measured(source, "fine").step_time


def test_an_order_that_cannot_be_run_is_refused_without_a_new_process(source):
    placement = replace(standing_for(source.problem, "fine"), order="fifo")
    measured(source, "fine")
    before = source.candidates.num_started
    [trial] = source.trials([placement])
    assert not trial.feasible
    assert "fifo" in trial.why
    assert measured(source, "slow", 3).feasible
    assert source.candidates.num_started == before


def test_where_there_is_no_room_for_both_one_is_timed_after_the_other(source, monkeypatch):
    best = measured(source, "fine")
    monkeypatch.setattr(source.candidates, "has_room", lambda placement: False)
    laps: list[str] = []
    own = source.candidates.time_step
    monkeypatch.setattr(
        source.candidates, "time_step", lambda p: (laps.append(small_net.fault_of(p)), own(p))[1]
    )
    assert best.better_than(measured(source, "slow", 6))
    assert laps == ["slow", "fine"]  # so slow that it was timed once
    source.remember([replace(measured(source, "slow", 7), step_time=1e-8)])
    laps.clear()
    source.trials([standing_for(source.problem, "fine", 7)])
    # Once, for it seems slow beside what the other is said to take; and as it is to be the best, as
    # often as it should.
    assert laps == ["fine", "slow", "fine", "fine", "slow", "slow"]


def test_a_best_that_fails_later_is_done_without(source, monkeypatch):
    best = source.problem.check(source._best.placement)
    own = source.candidates.time_step

    def lap(placement):
        if placement.digest == best.digest:
            raise WorkerFailed("died", "it died")
        return own(placement)

    monkeypatch.setattr(source.candidates, "time_step", lap)
    trial = measured(source, "fine", 8)
    assert trial.feasible
    assert trial.step_time >= Faulty.fast  # in seconds of its own


def test_out_of_memory_beside_another_is_tried_again_alone(source, monkeypatch):
    placement, tried = standing_for(source.problem, "fine", 9), []
    own = source.candidates._build

    def build(placement):
        tried.append(source.candidates.is_ready(best))
        if tried[0] and len(tried) == 1:
            source.candidates.close()  # as a process that failed is
            raise WorkerFailed("memory", "none left")
        return own(placement)

    best = source.problem.check(measured(source, "fine").placement)
    source.candidates.make_ready(best)
    monkeypatch.setattr(source.candidates, "_build", build)
    assert source.candidates.make_ready(placement).seconds > 0
    assert tried == [True, False]
    monkeypatch.undo()


def test_compiled_loops_propose_and_what_is_run_decides(source):
    """Simulations of a loop are not counted as trials: what it proposes is, and that once."""
    fine, slow = (standing_for(source.problem, fault) for fault in ("fine", "slow"))

    def place(problem, evaluate):
        for _ in range(3):
            evaluate.round(lambda: Round([slow, fine], simulations=10_000))
        evaluate.round(lambda: Round([], simulations=10_000))
        return slow

    result = search(source.problem, Told(place), trials=100, source=source.lent())
    assert result.best.placement == fine
    assert result.num_trials == 2


class Pretended(Counting):
    """Says that it runs what it simulates."""

    simulated = False


@pytest.mark.parametrize("placer", ["auto", "annealing", "descent", "genetic", "random"])
def test_all_trials_are_used_for_placements_that_were_not_run_before(problem, placer):
    """Few trials, for whoever simulates; and loops that find the same best again propose others."""
    source = Pretended(problem)
    result = search(problem, placer, trials=30, source=source)
    assert (result.num_trials, result.ended) == (30, "budget")
    assert len(set(source.asked)) == 30


def test_a_search_that_proposes_nothing_new_ends_and_says_so(problem, tmp_path):
    fine, slow = (standing_for(problem, fault) for fault in ("fine", "slow"))

    def asks(problem, evaluate):
        while True:
            evaluate([slow, fine])

    def loops(problem, evaluate):
        while True:
            evaluate.round(lambda: Round([slow, fine], simulations=10_000))

    for place in (asks, loops):
        result = search(problem, Told(place), trials=30, source=Pretended(problem))
        assert (result.num_trials, result.ended) == (2, "exhausted")
    path = tmp_path / "trials.jsonl"
    for _ in range(2):  # what a journal has is counted as it was
        source = Pretended(problem)
        result = search(problem, Told(asks), trials=30, source=source, journal=path)
        assert (result.num_trials, result.ended) == (2, "exhausted")
    assert not source.asked


def test_a_round_that_proposes_more_than_is_left_is_cut(problem):
    rng = np.random.default_rng(0)
    several = list(dict.fromkeys(any_placement(problem, rng) for _ in range(9)))

    def place(problem, evaluate):
        while True:
            evaluate.round(lambda: Round(several, simulations=1))

    source = Pretended(problem)
    assert search(problem, Told(place), trials=4, source=source).num_trials == 4
    assert len(source.asked) == 4


def test_a_placer_searches_as_with_the_simulator(source, tmp_path):
    """`random` cannot tell: it ends with one that is not slow, and the journal has every trial."""
    path = tmp_path / "trials.jsonl"
    quick = Told(
        lambda problem, evaluate: (
            evaluate([standing_for(problem, "slow"), standing_for(problem, "fine")])[0].placement
        )
    )
    first = solve(source.problem, quick, trials=5, source=source.lent(), journal=path)
    assert first.best.placement == standing_for(source.problem, "fine")
    before = path.read_text().count('"row":"trial"')
    again = solve(source.problem, quick, trials=5, source=source.lent(), journal=path)
    assert again.best.step_time == first.best.step_time
    assert path.read_text().count('"row":"trial"') == before  # all of it was known
    with pytest.raises(InputError, match="settings"):
        solve(source.problem, quick, trials=5, journal=path)  # as simulated


def test_failed_trials_are_kept_in_a_journal(problem, tmp_path):
    """With why, and a step that has no end: a search goes on from them."""
    path = tmp_path / "trials.jsonl"

    class Failing(Source):
        simulated = False

        def trials(self, placements):
            peak = np.zeros(2, np.int64)
            return [
                Trial(p, inf, peak, False, source="measured", why="it burnt") for p in placements
            ]

    for _ in range(2):
        with pytest.raises(
            Infeasible, match="nothing runs: the best try of 1 failed: it burnt"
        ) as raised:
            solve(
                problem,
                Told(lambda p, e: standing_for(p, "fine")),
                trials=1,
                source=Failing(),
                journal=path,
            )
        best = raised.value.result.best
        assert (best.step_time, best.why) == (inf, "it burnt")
    assert path.read_text().count('"row":"trial"') == 1
    raised.value.result.save(tmp_path / "result.json")
    read = roost.load(tmp_path / "result.json").best
    assert (read.step_time, read.why, read.feasible) == (inf, "it burnt", False)


def test_what_does_not_fit_as_simulated_is_not_run():
    tight = small_net.problem(memory=600)
    source = measuring(tight)
    [trial] = source.trials([standing_for(tight, "fine")])
    assert not trial.feasible
    assert trial.missing_bytes > 0
    assert source.candidates.num_started == 0


def test_a_model_of_another_graph_is_refused(problem):
    other = small_net.problem(train=True)
    source = measuring(other)  # whose model is not trained
    with pytest.raises(
        InputError, match=rf"has graph {problem.graph.digest}, the problem has {other.graph.digest}"
    ):
        source.open()
    assert not source.candidates.num_started


def test_a_model_that_cannot_be_sent_is_told():
    model, inputs = small_net.made()
    model.hook = lambda: None
    with pytest.raises(
        InputError,
        match=r"cannot be given to another process: .*name it as package\.module:callable",
    ):
        ModelSource((model, inputs)).packed()


def test_a_module_is_sent_by_value():
    model, inputs = small_net.made()
    built, args, _ = ModelSource((model, inputs)).build()
    assert built is model
    assert not any(tensor.is_shared() for tensor in model.parameters())
    assert torch.equal(args[0], inputs[0])
    with pytest.raises(InputError, match="meta device"):
        ModelSource((model.to("meta"), inputs)).build()


def test_zoo_models_and_callables_are_built_by_name():
    model, args, _ = ModelSource(
        "rnnlm", {"layers": 1, "hidden": 8, "vocab": 20, "length": 3}
    ).build()
    assert not model.training
    assert args
    assert ModelSource("small_net:made", train=True).build()[0].training


# ---------------------------------------------------------------------- the race


class Laps:
    """A source whose placements take a set time, by the device of the first op, or fail."""

    def __init__(self, problem: Any, seconds: dict[str, float]) -> None:
        self.problem, self.candidates, self.seconds = problem, self, seconds
        self.rng = np.random.default_rng(0)
        self.drift = 1.0

    def begin_trial(self) -> None:
        pass

    def time_step(self, placement: roost.Placement) -> float:
        self.drift *= 1.01  # the machine grows slower
        fault = small_net.fault_of(placement)
        if fault not in self.seconds:
            raise WorkerFailed("died", "it died")
        return self.seconds[fault] * self.drift * float(self.rng.uniform(0.95, 1.05))


def raced(problem: Any, seconds: dict[str, float], finalist: str = "fine", rounds: int = 15) -> Any:
    peak = np.zeros(2, np.int64)
    ours, theirs, other = (
        Trial(standing_for(problem, fault), 1.0, peak, True, placer="search")
        for fault in (finalist, "slow", "raises")
    )
    return race(Laps(problem, seconds), [ours], {"single": theirs, "heft": other}, rounds=rounds)  # type: ignore[arg-type]


def test_a_race_recommends_what_is_faster(problem):
    found = raced(problem, {"fine": 0.8, "slow": 1.0, "raises": 2.0})
    assert found.faster
    assert found.recommended.name == "search"
    assert found.low < found.ratio < found.high < 1.0
    assert [each.name for each in found.standings] == ["search", "single", "heft"]
    assert found.recommended.trial.step_time == np.median(found.standings[0].laps)
    assert "search takes 0." in found.said


@pytest.mark.parametrize("seconds", [1.0, 1.2, 0.999])
def test_a_race_refuses_what_is_not_faster_beyond_the_noise(problem, seconds):
    found = raced(problem, {"fine": seconds, "slow": 1.0, "raises": 2.0})
    assert not found.faster
    assert found.recommended.name == "single"
    assert "single is recommended" in found.said


def test_a_finalist_that_is_a_baseline_gives_the_baseline(problem):
    found = raced(problem, {"slow": 1.0, "raises": 2.0}, finalist="slow")
    assert (found.recommended.name, found.ratio, len(found.standings)) == ("single", None, 2)


def test_a_finalist_of_a_baselines_placer_is_told_from_it(problem):
    """Everything on one device, and everything on another."""
    peak = np.zeros(2, np.int64)
    ours, theirs = (
        Trial(standing_for(problem, f), 1.0, peak, True, placer="single") for f in ("fine", "slow")
    )
    found = race(Laps(problem, {"fine": 0.8, "slow": 1.0}), [ours], {"single": theirs})  # type: ignore[arg-type]
    assert found.said.startswith("another of single takes 0.")
    assert found.recommended.trial.placer == "single"


def test_what_fails_in_a_race_is_out_of_it(problem):
    found = raced(problem, {"slow": 1.0, "raises": 2.0})
    assert (found.recommended.name, found.failed) == ("single", {"search": "it died"})
    found = raced(problem, {"fine": 1.0})
    assert (found.recommended.name, found.said) == ("search", "none of the baselines runs")
    with pytest.raises(Infeasible, match="none of 3 placements runs: it died"):
        raced(problem, {})
    with pytest.raises(InputError, match="at least 3"):
        raced(problem, {}, rounds=2)


# ---------------------------------------------------------------------- parts


def test_results_are_compared_by_their_size():
    right = torch.tensor([1.0, -2.0, 0.0, float("inf")])
    assert difference([right], [right.clone()], TOLERANCE) == ""
    assert difference([right + 1e-5], [right], TOLERANCE) == ""
    assert "differs by 0.01" in difference([right + 0.01], [right], TOLERANCE)
    assert "not a number" in difference([right * float("nan")], [right], TOLERANCE)
    # A number where there should be none.
    assert "differs" in difference([torch.ones(4)], [right], TOLERANCE)
    assert (
        difference([torch.tensor([float("nan")])], [torch.tensor([float("nan")])], TOLERANCE) == ""
    )
    assert "shape or type" in difference([right[:2]], [right], TOLERANCE)
    assert "1 results instead of 2" in difference([right], [right, right], TOLERANCE)
    assert "differs" in difference([torch.tensor([1])], [torch.tensor([2])], TOLERANCE)


def test_devices_that_are_not_here_are_named():
    def of(name: str, kind: str) -> Cluster:
        return Cluster("other", (Device(name, kind, 1),))

    for name, kind in (("cuda:99", "cuda"), ("tpu:0", "tpu"), ("cpu:0", "cuda"), ("gpu", "cuda")):
        with pytest.raises(InputError, match=f"device '{name}' of cluster 'other'"):
            check_devices(of(name, kind))
    check_devices(of("cpu", "cpu"))
    check_devices(small_net.cluster(3))


def test_cpu_devices_share_the_cores():
    own = os.sched_getaffinity(0)
    parts = cores_of(small_net.cluster(2))
    assert all(part and part <= own for part in parts)
    if len(own) > 1:
        assert not parts[0] & parts[1]
    assert all(cores_of(small_net.cluster(len(own) + 1)))


def test_ctrl_c_is_not_for_the_process_that_measures(source):
    """Not even before it has begun to say so itself: it would write a traceback between what is
    told."""
    [line] = [
        x
        for x in Path(f"/proc/{source.candidates.open().pid}/status").read_text().splitlines()
        if x.startswith("SigBlk")
    ]
    assert int(line.split()[1], 16) & (1 << (signal.SIGINT - 1))
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
