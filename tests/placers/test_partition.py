"""Scotch and METIS get the graph and the devices as they are, and what they make of them is made to
fit."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from layered import machine, model, nastier, searching, timed

from roost import catalog
from roost.core.cluster import Cluster, Device, Link
from roost.core.graph import Graph, GraphBuilder
from roost.core.problem import Problem
from roost.errors import MissingExtra
from roost.placers._shared.fitting import fitted
from roost.placers._shared.units import Units
from roost.placers._splits.unit_graph import accelerators, mean_seconds, speeds, unit_graph, whole
from roost.placers.metis import partition
from roost.placers.scotch import mapping
from roost.simulator.compiled import simulate

MAPPINGS = (mapping, partition)


def cliques(count: int, size: int = 12, thin: int = 1, thick: int = 10_000) -> Graph:
    """Sets of ops with thick tensors among themselves, and a thin one from each set to the next."""
    builder = GraphBuilder("cliques")
    for clique in range(count):
        for number in range(size):
            inputs = [f"{clique}.{other}" for other in range(number)]
            inputs += [f"{clique - 1}.thin"] * (clique > 0 and number == 0)
            builder.add(f"{clique}.{number}", inputs=inputs, output_bytes=thick)
        builder.add(f"{clique}.thin", inputs=[f"{clique}.{size - 1}"], output_bytes=thin)
    return builder.freeze()


def devices_of(graph: Graph, device: np.ndarray) -> list[set[int]]:
    """The devices of each clique."""
    number = np.array([int(name.partition(".")[0]) for name in graph.op_names])
    return [set(device[number == clique].tolist()) for clique in range(int(number.max()) + 1)]


def test_the_graph_of_units_goes_both_ways_and_has_no_loops() -> None:
    for seed in range(60):
        units = Units.of(nastier(seed))
        graph = unit_graph(units)
        row = np.repeat(np.arange(units.num_units), np.diff(graph.start))
        size = np.zeros((units.num_units, units.num_units))
        size[row, graph.neighbour] = graph.size
        expected = np.zeros_like(size)
        source, target, between = units.edges
        np.add.at(expected, (source, target), between)
        assert not (row == graph.neighbour).any()
        assert len(set(zip(row.tolist(), graph.neighbour.tolist(), strict=True))) == len(row)
        assert (size == expected + expected.T).all()


def test_whole_weights_keep_proportions_and_stay_in_range() -> None:
    weights = whole(np.array([0.0, 1e-9, 2e-9, 7e-9]), 1000)
    assert weights.tolist() == [1, 100, 200, 700]
    assert whole(np.zeros(3)).tolist() == [1, 1, 1]
    assert whole(np.full(10, 1e300)).sum() <= 2**30 + 10


def test_speeds_are_those_of_ops_that_run_everywhere() -> None:
    graph = model(["a", "b"])
    allowed = tuple(("cpu",) if "a/" in name else () for name in graph.op_names)
    cluster = machine(*[10_000] * 3, kinds=("cpu", "cuda", "cuda"))
    units = Units.of(timed(replace(graph, allowed=allowed), cluster, speed=(1.0, 4.0, 3.0)))
    assert speeds(units, [0, 1, 2]) == pytest.approx([1 / 8, 4 / 8, 3 / 8])
    assert accelerators(units.problem) == [1, 2]
    assert mean_seconds(units, [1, 2]).max() == pytest.approx(4 * (1 / 4 + 1 / 3) / 2)


@pytest.mark.parametrize("place", MAPPINGS)
def test_what_is_tied_together_stays_together(place) -> None:  # type: ignore[no-untyped-def]
    graph = cliques(4)
    device = place(Units.of(timed(graph, machine(*[10**9] * 4))), [0, 1, 2, 3])
    assert sorted(map(sorted, devices_of(graph, device))) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("place", MAPPINGS)
def test_a_faster_device_gets_more(place) -> None:  # type: ignore[no-untyped-def]
    problem = timed(cliques(40, size=3, thick=2), machine(*[10**9] * 3), speed=(1.0, 2.0, 5.0))
    device = place(Units.of(problem), [0, 1, 2])
    share = np.bincount(device, minlength=3) / problem.graph.num_ops
    assert share == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.06)


def test_scotch_knows_which_devices_are_near() -> None:
    # Two pairs of cliques, tied more within a pair; two hosts with two devices each, numbered
    # crosswise.
    graph = cliques(4, thin=100)
    sizes = graph.output_bytes.copy()
    sizes[graph.index_of("1.thin")] = 1
    graph = replace(graph, output_bytes=sizes)
    devices = tuple(
        Device(f"{host}{number}", "cuda", 10**9, host=host) for number in "01" for host in "ab"
    )
    links = (Link("*", "*", 1e3), Link("a*", "a*", 1e6), Link("b*", "b*", 1e6))
    problem = timed(graph, Cluster("hosts", devices, links))
    placed = devices_of(graph, mapping(Units.of(problem), [0, 1, 2, 3]))
    assert all(len(found) == 1 for found in placed)
    host = [devices[found.pop()].host for found in placed]
    assert host[0] == host[1] != host[2] == host[3]


def test_scotch_uses_the_cpu_and_mincut_does_not() -> None:
    cluster = machine(*[10**9] * 3, kinds=("cpu", "cuda", "cuda"))
    problem = timed(cliques(6), cluster, seconds=1e6)
    for name, expected in (("scotch", {0, 1, 2}), ("mincut", {1, 2}), ("metis", {1, 2})):
        placement = catalog.find("placers", name)().place(problem, searching(problem)[1])
        assert set(placement.device.tolist()) == expected


def test_equal_calls_give_equal_mappings() -> None:
    units = Units.of(timed(cliques(100, size=6, thick=7), machine(*[10**9] * 5)))
    for place in MAPPINGS:
        assert (place(units, [0, 1, 2, 3, 4]) == place(units, [0, 1, 2, 3, 4])).all()


def test_the_libraries_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for seed in range(150):
        units = Units.of(nastier(seed))
        for place in MAPPINGS:
            place(units, list(range(units.problem.cluster.num_devices)))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("place", "package"), [(mapping, "pyscotch"), (partition, "pymetis")])
def test_a_missing_library_is_named(place, package: str, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=r"roost\[partition\]"):
        place(Units.of(timed(cliques(2), machine(1000, 1000))), [0, 1])


def test_units_move_from_a_device_that_overflows_until_all_fits() -> None:
    problem = timed(model([f"layers.{number}" for number in range(10)]), machine(1500, 600, 10_000))
    units = Units.of(problem)
    trial = fitted(units, searching(problem)[1], np.zeros(units.num_units, np.int32))
    assert trial.feasible
    assert (trial.placement.device == 0).any()
    assert simulate(problem, trial.placement).step_time == trial.step_time


def test_what_fits_is_left_alone() -> None:
    problem = timed(model([f"layers.{number}" for number in range(10)]), machine(10_000, 10_000))
    units = Units.of(problem)
    wish = np.arange(units.num_units) % 2
    assert (
        fitted(units, searching(problem)[1], wish).placement.device == units.devices(wish)
    ).all()


def test_where_nothing_fits_the_nearest_is_returned() -> None:
    problem = timed(model([f"layers.{number}" for number in range(10)]), machine(300, 200))
    units = Units.of(problem)
    search, evaluate = searching(problem)
    seen = []
    search.on_trial = lambda progress: seen.append(progress.trial)
    trial = fitted(units, evaluate, np.zeros(units.num_units, np.int32))
    assert not trial.feasible
    assert trial.missing_bytes == min(other.missing_bytes for other in seen)
    assert trial.missing_bytes < seen[0].missing_bytes


def test_units_that_may_not_run_where_they_are_mapped_go_where_they_may() -> None:
    graph = cliques(4)
    allowed = tuple(("cpu",) if name.startswith("2.") else () for name in graph.op_names)
    cluster = machine(*[10**9] * 3, kinds=("cpu", "cuda", "cuda"))
    problem = Problem(replace(graph, allowed=allowed), cluster, np.full((graph.num_ops, 3), 1e6))  # type: ignore[arg-type]
    for name in ("mincut", "metis"):
        placement = catalog.find("placers", name)().place(problem, searching(problem)[1])
        assert devices_of(graph, placement.device)[2] == {0}
