"""The search engine: what it tells, why it ends, and what it refuses."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from engine import Counting, Told, fork_join, placements, searching

import roost
from roost.core.cluster import Cluster, Device, Link
from roost.core.costs import Costs
from roost.core.graph import GraphBuilder
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Bound, Trial
from roost.errors import Infeasible, InputError, UnknownName
from roost.placers import Evaluate, Round
from roost.placers._shared.orders import list_scheduled
from roost.placers.single import Single
from roost.search import simulating
from roost.search import solve as solving
from roost.search.evaluate import Progress
from roost.search.infeasible import activation_share, nothing_found, roomiest, shrunk
from roost.search.simulating import Simulating
from roost.search.solve import search, solve
from roost.testing.problems import training_like
from roost.testing.tiny_problems import tiny_problem
from support.nasty import nasty


def asks(batches: Sequence[Sequence[Placement]]) -> Told:
    """A placer that evaluates these, and returns the best."""

    def run(problem: Problem, evaluate: Evaluate) -> Placement:
        for batch in batches:
            evaluate(batch)
        assert evaluate.best is not None
        return evaluate.best.placement

    return Told(run)


def test_whoever_watches_is_told_of_each_trial_in_turn() -> None:
    problem = fork_join()
    batch = placements(problem, 6)
    seen: list[Progress] = []
    result = search(
        problem, asks([batch[:4], batch[4:]]), trials=100, on_trial=seen.append, prove=False
    )
    assert [progress.trial.placement for progress in seen] == batch
    assert seen[-1].num_trials == result.num_trials == 6
    for progress in seen:
        assert not progress.trial.better_than(progress.best)
    assert seen[-1].best is result.best
    assert result.ended == "done"


def test_the_placements_of_a_round_are_told_too() -> None:
    problem = fork_join()
    batch = placements(problem, 3)
    seen: list[Progress] = []

    def run(problem: Problem, evaluate: Evaluate) -> Placement:
        state = evaluate.round(lambda: Round(batch, 50, {"where": np.arange(3)}))
        assert state["where"].tolist() == [0, 1, 2]
        return batch[0]

    search(problem, Told(run), trials=100, on_trial=seen.append, prove=False)
    assert [(progress.trial.placement, progress.num_trials) for progress in seen[:3]] == [
        (p, 50) for p in batch
    ]


def test_a_search_stops_where_its_watcher_returns_true() -> None:
    problem = fork_join()
    seen: list[Progress] = []

    def third(progress: Progress) -> bool:
        seen.append(progress)
        return len(seen) == 3

    source = Counting(problem)
    result = search(
        problem,
        asks([[p] for p in placements(problem, 9)]),
        trials=100,
        on_trial=third,
        source=source,
    )
    assert (result.ended, len(seen), len(source.asked)) == ("stopped", 3, 3)
    assert not any(progress.trial.better_than(result.best) for progress in seen)


@pytest.mark.parametrize("placer", ["annealing", "descent", "genetic", "auto"])
def test_a_placer_that_goes_on_after_a_part_of_its_budget_stops_when_it_is_told_to(
    placer: str,
) -> None:
    for stop in (1, 10, 20):
        seen: list[Progress] = []

        def watch(progress: Progress, stop: int = stop, seen: list[Progress] = seen) -> bool:
            seen.append(progress)
            return len(seen) == stop  # once

        result = search(training_like(40, 2), placer, trials=30_000, on_trial=watch, prove=False)
        assert (result.ended, len(seen)) == ("stopped", stop)


def test_what_is_merely_truthy_does_not_stop_it() -> None:
    problem = fork_join()
    result = search(
        problem,
        asks([placements(problem, 9)]),
        trials=100,
        on_trial=lambda progress: 1,
        prove=False,
    )
    assert (result.ended, result.num_trials) == ("done", 9)


def test_an_interrupt_returns_the_best_so_far() -> None:
    problem = fork_join()
    batch = placements(problem, 5)

    def run(problem: Problem, evaluate: Evaluate) -> Placement:
        evaluate(batch)
        raise KeyboardInterrupt

    source = Counting(problem)
    result = search(problem, Told(run), trials=100, source=source, prove=False)
    assert (result.ended, result.num_trials, source.closed) == ("interrupted", 5, True)
    assert result.best.step_time == min(
        roost.simulate(problem, placement).step_time for placement in batch
    )


def test_an_interrupt_before_anything_was_found_is_one() -> None:
    def run(problem: Problem, evaluate: Evaluate) -> Placement:
        raise KeyboardInterrupt

    source = Counting(fork_join())
    with pytest.raises(KeyboardInterrupt):
        search(fork_join(), Told(run), trials=5, source=source, prove=False)
    assert source.closed


def test_an_interrupt_within_a_watcher_is_one_too() -> None:
    problem = fork_join()

    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    result = search(
        problem, asks([placements(problem, 5)]), trials=5, on_trial=interrupt, prove=False
    )
    assert result.ended == "interrupted"


def test_a_search_ends_where_the_bound_is_reached() -> None:
    problem = fork_join()
    batch = placements(problem, 20)
    steps = [roost.simulate(problem, placement).step_time for placement in batch]
    best = int(np.argmin(steps))
    assert best > 0

    def run(problem: Problem, evaluate: Evaluate) -> Placement:
        evaluate.prove(Bound(steps[best], "by hand"))
        for placement in batch:
            evaluate([placement])
        raise AssertionError("it went on")

    result = search(problem, Told(run), trials=100, prove=False)
    assert (result.ended, result.num_trials, result.best.placement) == (
        "optimal",
        best + 1,
        batch[best],
    )
    assert (result.bound, result.gap) == (Bound(steps[best], "by hand"), 0.0)


def test_a_trial_that_does_not_fit_reaches_no_bound_and_the_better_of_two_bounds_is_kept() -> None:
    problem = tiny_problem("nothing_fits")

    def run(problem: Problem, evaluate: Evaluate) -> Placement:
        evaluate.prove(Bound(1.0, "better"))
        evaluate.prove(Bound(0.5, "worse"))
        return evaluate([problem.placement(np.zeros(6, np.int32))])[0].placement

    result = search(problem, Told(run), trials=10, prove=False)
    assert (result.ended, result.bound) == ("done", Bound(1.0, "better"))


def test_solve_proves_a_bound_and_ends_there() -> None:
    result = roost.solve(tiny_problem("one_op"), "auto", trials=5000)
    assert result.bound is not None
    assert (result.ended, result.gap) == ("optimal", pytest.approx(0.0, abs=1e-8))
    assert result.num_trials < 5000
    assert result.best.step_time == pytest.approx(1 / 3)


def test_chance_differs_by_seed_and_by_placer_and_by_nothing_else() -> None:
    problem = fork_join()

    def drawn(seed: int, name: str) -> float:
        state, evaluate = searching(problem)
        state.seed = seed
        return float(evaluate.named(name).rng.random())

    assert drawn(0, "a") == drawn(0, "a")
    assert len({drawn(seed, name) for seed in range(4) for name in ("a", "b", "ab")}) == 12


def test_trials_bear_the_name_of_the_placer_that_found_them() -> None:
    problem = fork_join()
    batch = placements(problem, 6)

    def run(problem: Problem, evaluate: Evaluate) -> Placement:
        for number, placement in enumerate(batch):
            evaluate.named(("left", "right")[number % 2])([placement])
        return evaluate(batch[:1])[0].placement

    result = search(problem, Told(run), trials=100, prove=False)
    assert set(result.baselines) == {"left", "right"}  # not its own
    assert result.placer == "told"
    for number, name in enumerate(("left", "right")):
        best = min(roost.simulate(problem, placement).step_time for placement in batch[number::2])
        assert (result.baselines[name].step_time, result.baselines[name].placer) == (best, name)
    assert result.best.step_time == min(trial.step_time for trial in result.baselines.values())


def test_a_placement_that_was_never_evaluated_is_at_the_end() -> None:
    problem = fork_join()
    batch = placements(problem, 20)
    batch.sort(key=lambda placement: roost.simulate(problem, placement).step_time)

    def run(problem: Problem, evaluate: Evaluate) -> Placement:
        evaluate(batch[5:6])
        return batch[0]

    result = search(problem, Told(run), trials=100, prove=False)
    assert (result.best.placement, result.num_trials) == (batch[0], 2)
    within = search(problem, Told(run), trials=1, prove=False)
    assert (within.best.placement, within.num_trials, within.ended) == (batch[5], 1, "budget")


@pytest.mark.parametrize("seed", [-1, True, False, 1.5, "0", None])
def test_what_is_no_seed_is_quoted(seed: Any) -> None:
    with pytest.raises(InputError, match=rf"seed is {seed!r}; it must be a whole number"):
        solve(fork_join(), "single", trials=5, seed=seed)


def test_what_is_no_placer_no_placement_or_no_problem_is_said() -> None:
    with pytest.raises(InputError, match=r"a placer has a method place.*; int has none"):
        solve(fork_join(), 3, trials=5)  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="no placer called 'anealing'; did you mean 'annealing'"):
        solve(fork_join(), "anealing", trials=5)
    with pytest.raises(InputError, match="cannot load the placer 'no_such_package:Class'"):
        solve(fork_join(), "no_such_package:Class", trials=5)
    with pytest.raises(InputError, match=r"roost\.Placement is needed, not NoneType"):
        solve(fork_join(), Told(lambda problem, evaluate: None), trials=5)
    with pytest.raises(
        InputError, match=r"solve takes a problem, not Graph; roost\.estimate makes one"
    ):
        solve(fork_join().graph, "single", trials=5)  # type: ignore[arg-type]


def test_a_placer_from_elsewhere_is_found_by_its_module_and_class() -> None:
    result = solve(fork_join(), "roost.placers.single:Single", trials=20)
    assert result.placer == "roost.placers.single:Single"
    assert result.best.step_time == solve(fork_join(), "single", trials=20).best.step_time


def test_a_budget_that_ends_before_the_first_trial_is_said() -> None:
    def run(problem: Problem, evaluate: Evaluate) -> Placement:
        return evaluate.named("part", trials=0)(placements(problem, 1))[0].placement

    with pytest.raises(InputError, match="before 'told' had evaluated one placement"):
        search(fork_join(), Told(run), trials=5, prove=False)


@dataclass(frozen=True)
class _Picky:
    """A placer for one graph, which fails on any other."""

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        problem.graph._index["fork"]
        return Single().place(problem, evaluate)


def test_the_problem_of_the_warm_up_is_nobodys_concern() -> None:
    seen: list[Progress] = []
    result = search(fork_join(), _Picky(), trials=50, on_trial=seen.append, prove=False)
    assert result.num_trials == len(seen)
    assert {progress.trial.placement.graph for progress in seen} == {fork_join().graph.digest}


def test_where_nothing_fits_the_error_says_what_is_missing_where() -> None:
    builder = GraphBuilder("big")
    builder.parameter("w", 20)
    builder.add("left", inputs=["w"], output_bytes=60)
    builder.add("right", output_bytes=60)
    builder.add("left end", inputs=["left"])
    builder.add("right end", inputs=["right"])
    cluster = Cluster(
        "small", (Device("a", "cuda", 100), Device("b", "cuda", 80)), (Link("*", "*", 1.0),)
    )
    problem = Problem(builder.freeze(), cluster, Costs(np.array([[0.0, 0.0], *[[1.0, 1.0]] * 4])))
    with pytest.raises(
        Infeasible, match=r"nothing fits: 'big' on 'small'.*40 B more on a"
    ) as caught:
        solve(problem, "single", trials=50)  # both would, but not one
    error = caught.value
    assert (error.device, error.missing_bytes) == ("a", 40)
    assert error.activation_share == pytest.approx(80 / 120)
    assert "67%" in str(error)
    assert error.result.best.placement.device.tolist() == [0] * 5
    assert not error.result.best.feasible
    assert search(problem, "single", trials=50).best.missing_bytes == 40  # `search` returns it
    assert solve(problem, "auto", trials=2000).best.feasible


def test_where_it_is_proved_that_nothing_fits_nothing_is_searched() -> None:
    problem = tiny_problem("nothing_fits")
    with pytest.raises(Infeasible, match="nothing fits") as caught:
        solve(problem, Told(lambda problem, evaluate: pytest.fail("it was asked")), trials=5)
    assert caught.value.device in problem.cluster.device_names
    assert caught.value.missing_bytes > 0


def test_no_batch_is_small_enough_where_parameters_do_not_fit() -> None:
    builder = GraphBuilder("big")
    builder.parameter("w", 140)
    builder.add("f", inputs=["w"], output_bytes=10)
    problem = Problem(
        builder.freeze(),
        Cluster("small", (Device("a", "cuda", 100),)),
        Costs(np.array([[0.0], [1.0]])),
    )
    error = nothing_found(problem, search(problem, "auto", trials=300))
    assert (error.missing_bytes, error.activation_share) == (50, None)
    assert "batch" not in str(error)


def test_the_batch_that_surely_fits_is_that_of_the_roomiest_try() -> None:
    """The best try lacks least, and yet needs the smallest batch: its device is nearly full of
    parameters."""
    builder = GraphBuilder("wide")
    builder.parameter("w", 95)
    builder.add("f", inputs=["w"], output_bytes=20)
    devices = (Device("a", "cuda", 100), Device("b", "cuda", 105))
    problem = Problem(
        builder.freeze(),
        Cluster("two", devices, (Link("*", "*", 1.0),)),
        Costs(np.array([[0.0, 0.0], [1.0, 1.0]])),
    )
    result = search(problem, "single", trials=50, prove=False)
    on_a = Simulating(problem, 1).trials([problem.placement(np.array([0, 0]))])[0]
    worst = replace(result, best=on_a, baselines={})
    assert activation_share(problem, on_a) == pytest.approx(5 / 20)
    share, placement = roomiest(problem, worst)  # type: ignore[misc]
    assert share == pytest.approx(10 / 20)
    assert placement.device.tolist() == [1, 1]
    apart = Simulating(problem, 1).trials([problem.placement(np.array([1, 0]), prefetch_bytes=0)])[
        0
    ]
    assert roomiest(problem, replace(worst, baselines={"other": apart}))[0] >= share  # type: ignore[index]
    assert "surely fits" in str(nothing_found(problem, worst))


def test_a_shrunk_problem_has_smaller_activations_only() -> None:
    problem = updating(10_000)
    small = shrunk(problem, 0.25).graph
    before = dict(zip(problem.graph.op_names, problem.graph.output_bytes.tolist(), strict=True))
    after = dict(zip(small.op_names, small.output_bytes.tolist(), strict=True))
    assert {name for name in after if after[name] != before[name]} == {"forward0", "forward1"}
    assert after["forward0"] == 3


def same(one: Sequence[Trial], other: Sequence[Trial]) -> bool:
    def said(trial: Trial) -> tuple[Any, ...]:
        found = (trial.placement.digest, trial.step_time, trial.peak_memory.tolist())
        return (*found, trial.feasible, trial.missing_bytes, trial.source)

    return list(map(said, one)) == list(map(said, other))


def test_a_pool_of_processes_gives_the_same_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = training_like(60, 3)
    batch = [list_scheduled(problem, placement.device) for placement in placements(problem, 24)]
    batch[5::7] = [problem.placement(placement.device, "rank") for placement in batch[5::7]]
    alone = Simulating(problem, 1)
    expected = alone.trials(batch)
    monkeypatch.setattr(simulating, "_POOL_SECONDS", 0.0)
    monkeypatch.setattr(simulating, "_CHUNK_SECONDS", 0.0)
    pooled = Simulating(problem, 2)
    try:
        assert same(pooled.trials(batch), expected)
        assert pooled._pool is not None
        assert alone._pool is None
        assert same(pooled.trials(batch[::-1]), expected[::-1])
    finally:
        pooled.close()
    assert pooled._pool is None


def test_a_batch_gives_the_trials_that_its_placements_give_one_by_one() -> None:
    for seed in range(60):
        problem, placement = nasty(seed)
        rng = np.random.default_rng(seed)
        others = [
            replace(
                placement,
                device=rng.integers(0, problem.cluster.num_devices, problem.graph.num_ops),
            )
            for _ in range(4)
        ]
        batch = [placement, *others, replace(others[0], order="program", priority=None)]
        source = Simulating(problem, 1)
        assert same(source.trials(batch), [source.trials([one])[0] for one in batch])


def test_devices_are_counted_as_each_placement_names_them() -> None:
    problem = tiny_problem("streamed")
    names = problem.cluster.device_names
    one = Placement(np.array([0, 1, 0, 1, 0, 1]), prefetch_bytes=np.array([0, 50]), devices=names)
    other = Placement(
        np.array([1, 0, 1, 0, 1, 0]), prefetch_bytes=np.array([0, 50]), devices=names[::-1]
    )
    source = Simulating(problem, 1)
    together = source.trials([one, other])
    assert [trial.peak_memory.tolist() for trial in together] == [
        roost.simulate(problem, placement).peak_memory.tolist() for placement in (one, other)
    ]


def test_equal_seeds_give_equal_results_and_other_seeds_others() -> None:
    problem = training_like(60, 3)

    def found(seed: int) -> tuple[str, int]:
        result = search(problem, "random", trials=40, seed=seed, prove=False)
        return result.best.placement.digest, result.num_trials

    assert found(1) == found(1)
    assert len({found(seed) for seed in range(4)}) == 4


def test_ten_seconds_are_given_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[tuple[float, float]] = []

    def run(problem: Problem, evaluate: Evaluate) -> Placement:
        budgets.append((evaluate.trials_left, evaluate.seconds_left))
        return placements(problem, 1)[0]

    solving.search(fork_join(), Told(run), prove=False)
    solving.search(fork_join(), Told(run), trials=7, prove=False)
    assert budgets[0][0] == float("inf")
    assert 0 < budgets[0][1] <= 10
    assert budgets[1] == (7, float("inf"))


def parted(*allowed: list[str]) -> Problem:
    """One group of ops that may run on these kinds of devices."""
    builder = GraphBuilder("parted")
    for number, kinds in enumerate(allowed):
        builder.add(f"op{number}", "matmul", flop=1.0, output_bytes=8, group="pair", allowed=kinds)
    devices = (Device("cpu:0", "cpu", 10_000), Device("cuda:0", "cuda", 10_000))
    return Problem(
        builder.freeze(),
        Cluster("two", devices, (Link("*", "*", 1e9),)),
        Costs(np.ones((len(allowed), 2))),
    )


@pytest.mark.parametrize("find", [solve, search])
def test_a_group_without_a_device_is_refused(find: Any) -> None:
    message = r"group 'pair' has no device of cluster 'two' .*: 'op0' on cpu, 'op1' on cuda only"
    with pytest.raises(InputError, match=message):
        find(parted(["cpu"], ["cuda"]), "single", trials=5)


def test_a_group_with_one_kind_in_common_has_a_device() -> None:
    best = search(parted(["cpu", "cuda"], ["cuda", "tpu"], []), "single", trials=50).best
    assert best.placement.device.tolist() == [1, 1, 1]


@pytest.mark.parametrize("placer", ["expert", "metis", "mincut", "scotch", "contiguous", "heft"])
def test_times_near_the_least_number_there_is(placer: str) -> None:
    problem = fork_join()
    tiny = Problem(
        problem.graph, problem.cluster, Costs(np.where(problem.op_time > 0, 5e-324, 0.0))
    )
    assert search(tiny, placer, trials=50).best.feasible


@dataclass(frozen=True)
class Needy:
    setting: int

    def place(self, problem: Problem, evaluate: Evaluate) -> Placement:
        raise AssertionError


def test_what_is_no_placer_is_refused() -> None:
    here = f"{__name__}:Needy"
    for placer, message in [
        (Needy, "Needy is a class, make an instance of it"),
        (object(), "object has none"),
        (
            "roost.errors:InputError",
            "'roost.errors:InputError' is no placer: it has no method place",
        ),
        (here, f"the placer '{here}' needs settings that have no default: .*setting"),
    ]:
        with pytest.raises(InputError, match=message):
            search(fork_join(), placer, trials=5)  # type: ignore[arg-type]


def test_a_seed_of_numpy_is_a_seed() -> None:
    results = [
        search(fork_join(), "random", trials=20, seed=seed, prove=False)
        for seed in (3, np.int64(3))
    ]
    assert results[0].best.placement.digest == results[1].best.placement.digest
    assert type(results[1].seed) is int


def updating(memory: int) -> Problem:
    """Two layers with updates: early ones need less memory. All may run on either device."""
    builder = GraphBuilder("updating")
    weights = [builder.parameter(f"weight{n}", 100) for n in range(2)]
    last: list[str] = []
    for number, weight in enumerate(weights):
        last = [
            builder.add(f"forward{number}", "matmul", [weight, *last], flop=1.0, output_bytes=10)
        ]
    gradients = []
    for number, weight in reversed(list(enumerate(weights))):
        last = [
            builder.add(
                f"gradient{number}", "matmul", [weight, *last], output_bytes=100, phase="backward"
            )
        ]
        gradients += last
    for weight, gradient in zip(reversed(weights), gradients, strict=True):
        builder.add(f"update of {weight}", "sgd", [weight, gradient], phase="update")
    graph = builder.freeze()
    times = np.where(graph.is_parameter[:, None], 0.0, [[3.0 + 1 / 3, 0.1]])
    devices = (Device("cpu:0", "cpu", memory), Device("cuda:0", "cuda", memory))
    return Problem(graph, Cluster("two", devices, (Link("*", "*", 1e9),)), Costs(times))


def test_on_one_device_the_order_is_a_plain_one_where_it_fits() -> None:
    asked: list[str] = []
    best = search(
        updating(10_000),
        "single",
        trials=50,
        on_trial=lambda p: asked.append(p.trial.placement.order),
    ).best
    assert set(best.placement.device.tolist()) == {1}
    assert set(asked) == {"program", "rank"}


def test_on_one_device_early_updates_are_tried_where_the_plain_orders_do_not_fit() -> None:
    asked: list[str] = []
    search(
        updating(150),
        "single",
        trials=50,
        on_trial=lambda p: asked.append(p.trial.placement.order),
        prove=False,
    )
    assert set(asked) == {"program", "rank", "priority"}


def test_a_try_that_failed_for_another_reason_lacks_no_memory() -> None:
    result = search(fork_join(), "single", trials=1, prove=False)
    failed = replace(result, best=replace(result.best, feasible=False))
    assert str(nothing_found(fork_join(), failed)).endswith(" in 1 trial")


def slow_batch(problem: Problem) -> list[Placement]:
    """Placements that share no layout."""
    rng = np.random.default_rng(1)
    devices = rng.integers(0, problem.cluster.num_devices, (40, problem.graph.num_ops))
    return [list_scheduled(problem, device) for device in devices]


def test_processes_that_die_are_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(simulating, "_POOL_SECONDS", 0.0)
    monkeypatch.setattr(simulating, "_CHUNK_SECONDS", 0.0)
    problem = fork_join()
    batch = slow_batch(problem)
    alone = [trial.step_time for trial in Simulating(problem, 1).trials(batch)]
    source = Simulating(problem, 2)

    class Dead:
        def map(self, *args: Any, **settings: Any) -> Any:
            raise BrokenProcessPool("killed")

        def shutdown(self, **settings: Any) -> None: ...

    monkeypatch.setattr(source, "_pool", Dead())
    assert [trial.step_time for trial in source.trials(batch)] == alone
    assert source.workers == 1
    assert "going on without them" in caplog.text


def test_processes_leave_control_c_to_the_one_that_searches() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        simulating._receive(fork_join())
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
        simulating._received.clear()


def test_a_placer_draws_the_same_however_it_is_named(tmp_path, monkeypatch):
    (tmp_path / "draws_of_mine.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class ByChance:\n"
        "    def place(self, problem, evaluate):\n"
        "        while True:\n"
        "            evaluate([problem.placement(evaluate.rng.integers(0, 2, problem.graph.num_ops))])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from draws_of_mine import ByChance

    problem = training_like(20, 2)
    found = [
        search(problem, placer, trials=5, seed=3)
        for placer in (ByChance(), "draws_of_mine:ByChance")
    ]
    assert found[0].best.placement.digest == found[1].best.placement.digest


@pytest.mark.parametrize("count", range(20, 400, 19))
def test_one_device_is_proved_to_be_optimal_at_once(count):
    """Bounds are shaved; a step that is equal to what was proved has to be near enough, however
    sums are rounded."""
    result = search(training_like(count, 1), "auto", trials=20_000)
    assert result.ended == "optimal"
    assert result.num_trials < 1000
