"""Estimates of layouts: buses, tied weights, and cuts that keep weights whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from layered_step import layered_step, machine, step_problem

from roost.core.cluster import Cluster, Device, Link
from roost.core.graph import UPDATE, Graph, GraphBuilder
from roost.core.problem import Problem
from roost.placers._microbatches.bus_load import with_buses
from roost.placers._microbatches.copied_step import CopiedStep
from roost.placers._microbatches.layouts import CopyLayout, Replica, balanced, whole
from roost.placers._microbatches.realised import devices_of
from roost.placers._microbatches.sketches import OFFLOAD, sketches
from roost.search.microbatches import single_device, solve_microbatches, unrolled_problem
from roost.transforms.microbatch import SHARED, Microbatch, copies_of

WEIGHT = 1000


def one_bus(bandwidth: float) -> Cluster:
    """Two devices that share one bus."""
    return replace(machine(2), links=(Link("*", "*", bandwidth, bus="net"),))


def tied_step() -> Graph:
    """Four layers of which the first and the last read one weight."""
    builder = GraphBuilder("tied")
    builder.parameter("w", WEIGHT)
    last = builder.add("x", "input", phase="input", output_bytes=10)
    inputs = []
    for number in range(4):
        shared = number in (0, 3)
        if not shared:
            builder.parameter(f"w{number}", WEIGHT, module=f"layers.{number}")
        inputs.append(last)
        kind = "embedding" if number == 0 else "mm"
        last = builder.add(f"y{number}", kind, [last, "w" if shared else f"w{number}"], flop=1.0,
                           output_bytes=10, module=f"layers.{number}")  # fmt: skip
    gradients = []
    for number in reversed(range(4)):
        traits = {"phase": "backward", "module": f"layers.{number}", "flop": 1.0}
        made = builder.add(f"gw{number}", "mm_weight", [last, inputs[number]],
                           output_bytes=WEIGHT, **traits)  # fmt: skip
        if number in (0, 3):
            gradients.append(made)
        else:
            builder.add(f"w{number}:update", "sgd", [f"w{number}", made], phase="update")
        if number:
            last = builder.add(f"gx{number}", "mm_input", [last, "w" if number == 3 else f"w{number}"],
                               output_bytes=10, **traits)  # fmt: skip
    total = builder.add("gw", "add", gradients, output_bytes=WEIGHT, phase="backward")
    builder.add("w:update", "sgd", ["w", total], phase="update")
    return builder.freeze()


# Two chunks of two layers each.
HALVES = CopyLayout((Replica((0, 1), (4, 7)),), (0, 0))


def test_replicas_wait_for_weights_and_gradients_on_a_slow_bus() -> None:
    fast, slow = (
        CopiedStep.of(step_problem(layered_step(), one_bus(rate))) for rate in (1e9, 100.0)
    )
    layout = CopyLayout((whole(fast, 0), whole(fast, 1)), (0, 1))
    assert with_buses(fast, layout, 12.0) == 12.0
    # Half of each weight is fetched by the other device, over one bus both ways; the forward pass
    # takes 4 s, the backward pass 8 s.
    moved = 4 * WEIGHT / 100.0
    assert with_buses(slow, layout, 12.0) == pytest.approx(12.0 + (moved - 4) + (moved - 8))


def test_one_chain_in_one_place_waits_for_nothing() -> None:
    step = CopiedStep.of(step_problem(layered_step(), one_bus(1e-3)))
    assert with_buses(step, CopyLayout((whole(step, 0),), (0, 0)), 12.0) == 12.0


def test_a_tied_weight_is_found_with_its_light_reader() -> None:
    step = CopiedStep.of(step_problem(tied_step(), machine(2)))
    (tied,) = step.tied_weights
    element = dict(zip(step.problem.graph.op_names, step.element[step.base].tolist(), strict=True))
    assert (tied.light, tied.heavy) == (element["y0"], element["y3"])
    assert tied.nbytes == WEIGHT


def test_readers_of_a_tied_weight_run_together_and_its_bytes_do_not_cross() -> None:
    base = step_problem(tied_step(), machine(2))
    problem = unrolled_problem(base, Microbatch(2).apply(base.graph))
    step = CopiedStep.of(problem)
    together = replace(HALVES, readers_together=True)
    assert crossing(problem, devices_of(step, HALVES)) >= WEIGHT
    assert crossing(problem, devices_of(step, together)) < WEIGHT
    device = devices_of(step, together)
    at = dict(zip(problem.graph.op_names, device.tolist(), strict=True))
    assert at["y0#0"] == at["y3#0"] == at["gw0#1"] == at["w"] == at["gw"] == 1
    assert at["y1#0"] == at["w1"] == 0


def crossing(problem: Problem, device: np.ndarray) -> int:
    """The largest tensor that is read on another device than its own."""
    graph = problem.graph
    away = device[graph.input_op] != device[graph.edge_target]
    return int(graph.output_bytes[graph.input_op[away]].max(initial=0))


def test_estimates_see_a_tied_weight_that_crosses() -> None:
    step = CopiedStep.of(step_problem(tied_step(), one_bus(100.0)))
    together = replace(HALVES, readers_together=True)
    assert with_buses(step, HALVES, 1.0) > with_buses(step, together, 1.0)


def test_a_gathered_layout_has_all_weights_in_one_place() -> None:
    base = step_problem(layered_step(), machine(2))
    problem = unrolled_problem(base, Microbatch(3).apply(base.graph))
    step = CopiedStep.of(problem)
    layout = CopyLayout((whole(step, 0), whole(step, 1)), (0, 1, 1))
    weights = problem.graph.is_parameter
    assert set(devices_of(step, layout)[weights].tolist()) == {0, 1}
    assert set(devices_of(step, replace(layout, gathered=True))[weights].tolist()) == {1}


def test_weights_read_twice_are_not_parted_by_a_cut() -> None:
    graph = layered_step(weight=10**6)
    step = CopiedStep.of(step_problem(graph, machine(2, memory=10**9)))
    inside = step.straddling_bytes
    chain = balanced(step, [0, 1])
    assert isinstance(chain, Replica)
    assert inside[chain.ends[0] - 1] == 0


def with_host(memory: int, share: int) -> Problem:
    """One accelerator with little memory beside a slow CPU with much; `share` samples."""
    host = Device("cpu:0", "cpu", 10**9, peak={"float32": 1e12}, memory_bandwidth=1e12)
    fast = machine(1, memory).devices[0]
    cluster = Cluster("host", (host, fast), (Link("*", "*", 1e6),))
    base = step_problem(layered_step(activation=100 * share), cluster, (0.01, 1.0))
    update = base.graph.phase == UPDATE
    return Problem(base.graph, cluster, np.where(update[:, None], 1e-3, base.op_time * share))


def test_offloading_keeps_all_state_on_the_host() -> None:
    base = with_host(3000, 2)
    problem = unrolled_problem(base, Microbatch(4).apply(base.graph))
    graph = problem.graph
    once = graph.is_parameter | (graph.phase == UPDATE)
    copied = copies_of(graph) != SHARED
    there, here = sketches(CopiedStep.of(base), 4, (OFFLOAD,))
    for sketch, sums in ((there, 1), (here, 0)):
        device = sketch.devices(problem)
        assert set(device[once].tolist()) == {0}
        assert set(device[copied].tolist()) == {1}
        assert set(device[~once & ~copied].tolist()) == {sums}


def test_what_does_not_fit_an_accelerator_is_offloaded() -> None:
    found = solve_microbatches(
        lambda count: with_host(3500, 8 // count), (1, 2, 4, 8), trials=500, threads=1
    )
    offloaded = [row for row in found.rows if row.placer == "offload" and row.feasible]
    assert found.best.feasible
    assert offloaded
    on_cpu = single_device(with_host(3500, 8)).step_time
    assert found.best.step_time < on_cpu / 10
