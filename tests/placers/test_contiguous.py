"""The dynamic programme finds the best contiguous split, by an estimate of seconds and bytes that
is right."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest
from layered import machine, model, nastier, searching, timed

from roost.core.graph import FORWARD, GraphBuilder
from roost.core.placement import Placement
from roost.errors import InputError
from roost.placers._shared.units import Units
from roost.placers._splits.cheapest_cuts import (
    DeviceKinds,
    SectionBytes,
    SectionSeconds,
    cheapest_parts,
)
from roost.placers._splits.section_chain import SectionChain
from roost.placers.contiguous import Contiguous
from roost.simulator.compiled import simulate


def traffic_by_hand(chain: SectionChain, first: int, beyond: int) -> list[int]:
    """Tensors and bytes that a part gets from sections before it, and sends back to them."""
    graph = chain.units.problem.graph
    section = chain.section[chain.units.unit]
    got, sent = set(), set()
    for op in range(graph.num_ops):
        for source in graph.inputs_of(op).tolist():
            if not graph.is_parameter[source]:
                if first <= section[op] < beyond and section[source] < first:
                    got.add(source)
                if first <= section[source] < beyond and section[op] < first:
                    sent.add(source)
    return [
        len(got),
        int(graph.output_bytes[list(got)].sum()),
        len(sent),
        int(graph.output_bytes[list(sent)].sum()),
    ]


def test_traffic_of_every_part_is_what_crosses_its_start() -> None:
    for seed in range(60):
        chain = SectionChain.of(Units.of(nastier(seed)), 7)
        traffic = chain.traffic()
        for first in range(chain.num_sections):
            for beyond in range(first + 1, chain.num_sections + 1):
                assert traffic[:, first, beyond].tolist() == traffic_by_hand(chain, first, beyond)


def random_chain(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    sections, kinds = int(rng.integers(1, 6)), int(rng.integers(1, 4))

    def before() -> np.ndarray:
        return np.concatenate(
            [np.zeros((1, kinds)), np.cumsum(rng.integers(0, 9, (sections, kinds)), axis=0)]
        )

    backward, late = before(), before() * float(rng.random() < 0.7)
    return {
        "awaited": backward + before(),
        "backward": backward,
        "unawaited": late + before() * float(rng.random() < 0.5),
        "unawaited_late": late,
        "held": np.concatenate([[0.0], np.cumsum(rng.integers(0, 9, sections))]),
        "passing": rng.integers(0, 5, sections).astype(float),
        "most": rng.integers(5, 40, kinds).astype(float),
        "counts": rng.integers(0, 3, kinds) + (np.arange(kinds) == 0),
        "latency": rng.random((kinds, kinds)),
        "rate": rng.random((kinds, kinds)),
        "traffic": rng.integers(0, 4, (4, sections + 1, sections + 1)).astype(float),
    }


PENALTY = 1000.0


def cost(c: dict[str, np.ndarray], ends: list[int], kinds: list[int], pipelined: bool) -> float:
    """Seconds of a split, as the kernel defines them."""
    total, ending, slowest, start = 0.0, 0.0, 0.0, 0
    for number, (end, kind) in enumerate(zip(ends, kinds, strict=True)):
        own, aside, back_time = (
            c[x][end, kind] - c[x][start, kind] for x in ("awaited", "unawaited", "backward")
        )
        got = back = 0.0
        if start == 0 and end < len(c["held"]) - 1:
            aside = c["unawaited_late"][end, kind]
        if number:
            t, last = c["traffic"][:, start, end], kinds[number - 1]
            got = t[0] * c["latency"][last, kind] + t[1] * c["rate"][last, kind]
            back = t[2] * c["latency"][kind, last] + t[3] * c["rate"][kind, last]
        over = (
            max(
                0.0,
                c["held"][end] - c["held"][start] + c["passing"][start:end].max() - c["most"][kind],
            )
            * PENALTY
        )
        slowest = max(slowest, own + aside + got + back + over)
        total += own + got + back + max(0.0, aside - back - ending) + over
        ending = back_time + max(aside, back + ending)
        start = end
    return slowest if pipelined else total


def cheapest(c: dict[str, np.ndarray], pipelined: bool) -> np.ndarray:
    seconds = SectionSeconds(*(c[name] for name in SectionSeconds._fields))
    nbytes = SectionBytes(c["held"], c["passing"], c["traffic"])
    kinds = DeviceKinds(c["counts"], c["latency"], c["rate"])
    return cheapest_parts(pipelined, seconds, nbytes, kinds, c["most"], PENALTY)[::-1]


def all_splits(c: dict[str, np.ndarray]):  # type: ignore[no-untyped-def]
    sections = len(c["held"]) - 1
    devices = [kind for kind, count in enumerate(c["counts"].tolist()) for _ in range(count)]
    for parts in range(1, min(sections, len(devices)) + 1):
        for cuts in combinations(range(1, sections), parts - 1):
            for kinds in set(permutations(devices, parts)):
                yield [*cuts, sections], list(kinds)


@pytest.mark.parametrize("pipelined", [False, True])
def test_the_programme_finds_the_best_of_all_splits(pipelined: bool) -> None:
    for seed in range(150):
        c = random_chain(seed)
        if not pipelined:  # with work beside, what is best so far need not be best in the end
            c["unawaited"] = c["unawaited_late"] = np.zeros_like(c["unawaited"])
        parts = cheapest(c, pipelined)
        found = cost(c, parts[:, 0].tolist(), parts[:, 1].tolist(), pipelined)
        best = min(cost(c, ends, kinds, pipelined) for ends, kinds in all_splits(c))
        assert found == pytest.approx(best)


def test_work_beside_is_near_the_best_of_all_splits() -> None:
    ratios = []
    for seed in range(150):
        c = random_chain(seed)
        parts = cheapest(c, False)
        best = min(cost(c, ends, kinds, False) for ends, kinds in all_splits(c))
        ratios.append((cost(c, parts[:, 0].tolist(), parts[:, 1].tolist(), False) + 1) / (best + 1))
    assert min(ratios) > 1 - 1e-12
    assert np.mean(np.array(ratios) < 1 + 1e-9) > 0.95
    assert max(ratios) < 1.2


def test_gradients_of_weights_and_updates_run_beside() -> None:
    graph = model([f"layers.{number}" for number in range(5)])
    aside = SectionChain.of(Units.of(timed(graph, machine(10_000))), 100).unawaited()
    names = {name for name, found in zip(graph.op_names, aside, strict=True) if found}
    first = {"0:layers.0/backward"}  # no layer comes before it
    assert names == first | {
        f"{n}:layers.{n}/{role}" for n in range(5) for role in ("gradient", "update")
    }


def test_the_backward_ops_of_all_layers_but_the_last_come_late() -> None:
    graph = model([f"layers.{number}" for number in range(5)])
    late = SectionChain.of(Units.of(timed(graph, machine(10_000))), 100).late()
    names = {name for name, found in zip(graph.op_names, late, strict=True) if found}
    assert names == {
        f"{n}:layers.{n}/{role}" for n in range(4) for role in ("backward", "gradient", "update")
    }


def test_all_on_one_device_where_that_is_best() -> None:
    problem = timed(
        model([f"layers.{n}" for n in range(8)], updates=False),
        machine(*[10_000] * 4, bandwidth=0.1),
    )
    assert len(set(Contiguous().place(problem, searching(problem)[1]).device.tolist())) == 1


def test_the_fast_device_gets_what_fits_and_parts_are_contiguous() -> None:
    graph = model([f"layers.{number}" for number in range(10)], updates=False)
    problem = timed(graph, machine(10_000, 800), speed=(1.0, 10.0))
    placement = Contiguous().place(problem, searching(problem)[1])
    timeline = simulate(problem, placement)
    assert timeline.feasible
    on_fast = placement.device[graph.phase == FORWARD]
    assert np.count_nonzero(np.diff(on_fast)) == 1
    # A layer is 100 bytes of weight and 10 kept; six fit with what passes through.
    assert on_fast.sum() >= 6
    device = {name: int(d) for name, d in zip(graph.op_names, placement.device, strict=True)}
    assert all(
        device[f"{n}:layers.{n}/backward"] == device[f"{n}:layers.{n}/forward"] for n in range(10)
    )


def test_layers_that_need_all_devices_are_spread_over_them() -> None:
    graph = model([f"layers.{number}" for number in range(12)])
    problem = timed(graph, machine(*[480] * 4))
    placement = Contiguous().place(problem, searching(problem)[1])
    assert simulate(problem, placement).feasible
    assert set(placement.device.tolist()) == {0, 1, 2, 3}
    assert np.count_nonzero(np.diff(placement.device[graph.phase == FORWARD])) == 3


def test_work_that_nothing_waits_for_runs_beside_the_backward_pass() -> None:
    problem = timed(
        model([f"layers.{number}" for number in range(16)], size=1), machine(*[10_000] * 4)
    )
    alone = simulate(problem, Placement(np.zeros(problem.graph.num_ops)))
    found = simulate(problem, Contiguous().place(problem, searching(problem)[1]))
    # Of 64 s on one device, half is gradients of weights and updates; all but the first part's are
    # hidden.
    assert alone.step_time == 1 + 4 * 16
    assert found.step_time < 1 + 2 * 16 + 7


def test_large_graphs_are_cut_where_the_fewest_bytes_cross() -> None:
    builder = GraphBuilder("waist")
    before = builder.add("start", output_bytes=1000)
    for number in range(200):
        before = builder.add(
            f"op{number}", inputs=[before], output_bytes=1 if number % 10 == 9 else 1000
        )
    units = Units.of(timed(builder.freeze(), machine(10**6, 10**6)))
    chain = SectionChain.of(units, 11)
    ends = np.flatnonzero(np.diff(chain.section[np.argsort(units.leader)]))
    names = [units.problem.graph.op_names[units.leader[end]] for end in ends]
    assert 8 <= len(names) <= 10
    assert all(name.endswith("9") for name in names)


def test_more_devices_than_states_are_no_trouble() -> None:
    graph = model([f"layers.{number}" for number in range(6)], updates=False)
    problem = timed(
        graph, machine(*[10_000] * 20, bandwidth=0.1), speed=[1.0 + number for number in range(20)]
    )
    assert set(Contiguous().place(problem, searching(problem)[1]).device.tolist()) == {19}


def test_it_needs_a_cut() -> None:
    with pytest.raises(InputError, match="at least 1"):
        Contiguous(most_cuts=0)
