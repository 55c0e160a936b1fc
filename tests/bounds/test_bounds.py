"""Bounds: what each kind sees, and that none is ever above what some placement reaches."""

import numpy as np
import pytest

from roost import bounds
from roost.bounds import bound, nothing_fits
from roost.bounds._relaxed import Relaxed
from roost.bounds.contradiction import contradiction
from roost.bounds.heads_tails import Ends, heads_tails
from roost.bounds.interval import interval
from roost.bounds.path import critical_path
from roost.bounds.streaming import streaming
from roost.bounds.work import work
from roost.core.cluster import Cluster, Device, Link
from roost.core.graph import GraphBuilder
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.simulator.compiled import Simulator
from roost.testing.problems import training_like
from support.exhaustive import exhaustive, tiny


def alike(num_devices, latency=0.0, memory=1000, gap=0.0):
    devices = tuple(Device(f"d{d}", "cuda", memory, gap=gap) for d in range(num_devices))
    return Cluster("alike", devices, (Link("*", "*", 1e9, latency),))


def graph_of(edges, num_ops, groups=()):
    builder = GraphBuilder("small")
    for op in range(num_ops):
        inputs = [f"op{a}" for a, b in edges if b == op]
        group = next((f"g{number}" for number, members in enumerate(groups) if op in members), None)
        builder.add(f"op{op}", "op", inputs, group=group)
    return builder.freeze()


def same(graph, cluster, times):
    return Problem(
        graph,
        cluster,
        np.repeat(np.array(times, dtype=float)[:, None], cluster.num_devices, axis=1),
    )


def test_critical_path_takes_the_fastest_device_for_each_op():
    graph = graph_of([(0, 1)], 2)
    problem = Problem(graph, alike(2), np.array([[1.0, 5.0], [5.0, 1.0]]))
    assert critical_path(Relaxed.of(problem)) == 2.0


def test_work_is_shared_in_fractions_and_a_group_stays_whole():
    graph = graph_of([], 6)
    assert work(Relaxed.of(same(graph, alike(4), [1.0] * 6))) == pytest.approx(1.5)
    grouped = graph_of([], 6, groups=[(0, 1, 2, 3)])
    assert work(Relaxed.of(same(grouped, alike(4), [1.0] * 6))) == pytest.approx(4.0)


def test_work_of_unlike_devices_is_that_of_the_best_fractions():
    # Half of the ops suit each device: 3 s there, 9 s on the other. None need be on the wrong one.
    times = np.array([[1.0, 3.0]] * 3 + [[3.0, 1.0]] * 3)
    assert work(Relaxed.of(Problem(graph_of([], 6), alike(2), times))) == pytest.approx(3.0)
    # The second device is three times as fast at everything: it takes three quarters.
    times = np.array([[3.0, 1.0]] * 4)
    assert work(Relaxed.of(Problem(graph_of([], 4), alike(2), times))) == pytest.approx(3.0)


def test_work_of_three_types_of_devices_agrees_with_the_linear_programme():
    from scipy.optimize import linprog

    rng = np.random.default_rng(5)
    times = rng.random((20, 3))
    problem = Problem(graph_of([], 20), alike(3), times)
    # Variables: the share of each op on each device, and the step time.
    loads = np.zeros((3, 61))
    shares = np.zeros((20, 61))
    for op in range(20):
        shares[op, 3 * op : 3 * op + 3] = 1
        for d in range(3):
            loads[d, 3 * op + d] = times[op, d]
    loads[:, 60] = -1
    exact = linprog([0] * 60 + [1], loads, [0] * 3, shares, [1] * 20).fun
    found = work(Relaxed.of(problem))
    assert found <= exact * (1 + 1e-9)
    assert found == pytest.approx(exact, rel=1e-3)


def test_heads_and_tails_pay_for_a_transfer_or_run_inputs_one_after_the_other():
    # Three inputs of 2 s each: on one device 6 s, or two at once and then a transfer of 3 s.
    graph = graph_of([(0, 3), (1, 3), (2, 3)], 4)
    problem = same(graph, alike(3, latency=3.0), [2.0, 2.0, 2.0, 1.0])
    assert heads_tails(Relaxed.of(problem)) == pytest.approx(6.0)
    far = same(graph, alike(3, latency=30.0), [2.0, 2.0, 2.0, 1.0])
    assert heads_tails(Relaxed.of(far)) == pytest.approx(7.0)


def test_tails_are_heads_of_the_graph_turned_round():
    graph = graph_of([(0, 1), (0, 2), (0, 3)], 4)
    far = same(graph, alike(3, latency=30.0), [1.0, 2.0, 2.0, 2.0])
    assert heads_tails(Relaxed.of(far)) == pytest.approx(7.0)


def test_a_device_rests_between_ops():
    graph = graph_of([(0, 1)], 2)
    problem = same(graph, alike(1, gap=0.5), [1.0, 1.0])
    assert bound(problem).step_time == pytest.approx(2.5)


def test_interval_adds_up_what_lies_between_late_starts_and_early_ends():
    # One op, then eight that may run at once, then one: on two devices the eight take four times as
    # long.
    graph = graph_of([(0, op) for op in range(1, 9)] + [(op, 9) for op in range(1, 9)], 10)
    relaxed = Relaxed.of(same(graph, alike(2), [1.0] * 10))
    assert heads_tails(relaxed) < 5.0
    assert interval(relaxed, Ends.of(relaxed)) == pytest.approx(6.0)


def test_contradiction_is_never_below_what_it_starts_from_and_may_be_above():
    rose = 0
    for seed in range(30):
        problem = tiny(seed, plain=True)
        relaxed = Relaxed.of(problem)
        low = max(work(relaxed), heads_tails(relaxed))
        found = contradiction(relaxed, low, 3 * low, seconds=10.0)
        assert found >= low
        rose += found > low * 1.01
    assert rose > 0


def test_a_unit_too_large_for_every_device_is_a_proof_that_nothing_fits():
    builder = GraphBuilder("large")
    builder.parameter("small", 10)
    builder.parameter("large", 1500)
    builder.add("op", "op", ["large"])
    problem = Problem(builder.freeze(), alike(3), np.zeros((3, 3)))
    proof = nothing_fits(problem)
    assert proof is not None
    assert proof.missing_bytes == 500
    assert "'large'" in str(proof)


def test_parameters_larger_than_all_devices_together_are_a_proof_that_nothing_fits():
    builder = GraphBuilder("many")
    for number in range(5):
        builder.parameter(f"p{number}", 700)
    problem = Problem(builder.freeze(), alike(3), np.zeros((5, 3)))
    proof = nothing_fits(problem)
    assert proof is not None
    assert proof.missing_bytes == 500
    assert nothing_fits(Problem(problem.graph, alike(4), np.zeros((5, 4)))) is None


def test_what_is_alive_at_one_moment_counts_beside_parameters():
    # Eight outputs that all wait for `turn`, and are read after it.
    builder = GraphBuilder("waiting")
    made = [builder.add(f"made{number}", output_bytes=300) for number in range(8)]
    turn = builder.add("turn", "op", made)
    for number in range(8):
        builder.add(f"used{number}", "op", [made[number], turn])
    graph = builder.freeze()
    proof = nothing_fits(Problem(graph, alike(2, memory=2300), np.ones((17, 2))))
    assert proof is not None  # `turn` alone has 2,400 bytes of inputs
    assert nothing_fits(Problem(graph, alike(2, memory=2400), np.ones((17, 2)))) is None


def streamed(num_parameters):
    """Weights of a byte each, read by a quick op on a device that holds four; sending one takes a
    second."""
    builder = GraphBuilder("streamed")
    for number in range(num_parameters):
        builder.parameter(f"p{number}", 1)
        builder.add(f"op{number}", "op", [f"p{number}"])
    graph = builder.freeze()
    cluster = Cluster(
        "two", (Device("c", "cpu", 1000), Device("g", "cuda", 4)), (Link("*", "*", 1.0),)
    )
    times = np.where(graph.is_parameter[:, None], 0.0, [[100.0, 0.01]])
    return Problem(graph, cluster, times)


def test_streaming_counts_the_bytes_that_fast_devices_cannot_hold():
    problem = streamed(20)
    relaxed = Relaxed.of(problem)
    assert max(work(relaxed), heads_tails(relaxed)) < 1.0
    found = bound(problem)
    assert found.proof == "streaming"
    # Four live there; one may be in the window. The others take a second each.
    device = np.where(problem.graph.is_parameter, 0, 1)
    device[:6:2] = 1
    placement = Placement(device)
    timeline = Simulator.of(problem).simulate(placement)
    assert timeline.feasible
    assert 15.0 <= found.step_time <= timeline.step_time
    assert streaming(Relaxed.of(streamed(4))) == 0.0


def test_a_bound_that_meets_what_is_known_says_that_it_is_the_optimum():
    problem = training_like(30, 2, seed=3)
    found = bound(problem, seconds=20.0)
    assert found.proof == "cp-sat, optimal"
    again = bound(problem, seconds=20.0, upper=found.step_time)
    assert again.step_time == pytest.approx(found.step_time, rel=1e-4)


def test_without_the_exact_solver_the_others_go_on(monkeypatch):
    monkeypatch.setattr(bounds, "installed", lambda: False)
    problem = training_like(30, 2, seed=3)
    assert not bound(problem, seconds=20.0).proof.startswith("cp-sat")


def test_where_nothing_fits_the_bound_is_for_what_does_not():
    problem = streamed(2000)
    assert nothing_fits(problem) is not None
    device = np.ones(problem.graph.num_ops, dtype=np.int32)
    assert (
        bound(problem, seconds=5.0).step_time
        <= Simulator.of(problem).simulate(Placement(device)).step_time
    )


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_graph_of_parameters_only_takes_no_time(num_devices):
    builder = GraphBuilder("resting")
    builder.parameter("p", 5)
    problem = Problem(builder.freeze(), alike(num_devices), np.zeros((1, num_devices)))
    assert bound(problem).step_time == 0.0


def test_no_kind_is_above_what_some_placement_reaches():
    """Shared buses, gaps, broadcast, remote parameters with updates, ties, zeros, little memory."""
    checked, tight = 0, 0
    for seed in range(1600):
        problem = tiny(seed, most_ops=5, crowded=seed % 4 == 0)
        best = exhaustive(problem)
        cases = [(Relaxed.of(problem, memory=False), best.unlimited)]
        if nothing_fits(problem) is None:
            cases.append((Relaxed.of(problem), best.step_time))
        else:
            assert np.isinf(best.step_time)
        for relaxed, optimum in cases:
            ends = Ends.of(relaxed)
            found = [
                critical_path(relaxed),
                work(relaxed),
                heads_tails(relaxed),
                interval(relaxed, ends),
            ]
            if optimum == best.step_time:
                found.append(streaming(relaxed))
            assert max(found) * (1 - 1e-9) <= optimum, seed
            checked += 1
            tight += max(found) >= optimum * (1 - 1e-6)
    assert checked > 2800
    assert tight > 0.8 * checked


def test_no_bound_is_above_the_optimum():
    for seed in range(2000, 2300):
        problem = tiny(seed, most_ops=5)
        best = exhaustive(problem)
        optimum = best.step_time if nothing_fits(problem) is None else best.unlimited
        assert bound(problem).step_time <= optimum, seed
