"""A trace says what its timeline says, and Perfetto reads it that way."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from roost.core import formats
from roost.core.cluster import Cluster, Device, Link
from roost.core.graph import Graph, GraphBuilder
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import FETCH, HOME, SEND, TRANSFER_KINDS, Timeline
from roost.errors import InputError
from roost.report.trace import DEVICES, LINKS, MEMORY, encode, write_trace
from roost.simulator import reference
from roost.testing.problems import scattered, training_like
from support.nasty import nasty

Event = dict[str, Any]


def chain() -> tuple[Problem, Placement]:
    """a, b, c one after the other for 1, 2 and 3 s; b's 200 bytes go to the other device in 1 +
    200/100 s."""
    builder = GraphBuilder("chain")
    builder.add("a", output_bytes=100)
    builder.add("b", inputs=["a"], output_bytes=200)
    builder.add("c", inputs=["b"])
    cluster = Cluster(
        "pair",
        (Device("d0", "cuda", 1000), Device("d1", "cuda", 1000)),
        (Link("*", "*", 100.0, 1.0),),
    )
    return Problem(builder.freeze(), cluster, np.array([[1, 1], [2, 2], [3, 3]])), Placement(
        np.array([0, 0, 1])
    )


@cache
def case(name: str) -> tuple[Graph, Timeline]:
    """A problem's graph and the full timeline of one placement of it."""
    if name.startswith("nasty"):
        problem, placement = nasty(int(name.removeprefix("nasty")))
    elif name.startswith("training"):
        # Seconds that no nanosecond divides, one op after the other: rounding could make slices
        # overlap.
        problem = training_like(400, 4, seed=3)
        placement = Placement(
            scattered(problem, seed=1, run=5), order=name.removeprefix("training_")
        )
    else:
        problem, placement = chain()
    return problem.graph, reference.simulate(problem, placement)


CASES = [
    *(f"nasty{seed}" for seed in range(60)),
    "training_program",
    "training_fifo",
    "training_rank",
    "chain",
]


def events_of(timeline: Timeline, graph: Graph | None = None) -> list[Event]:
    events: list[Event] = json.loads(encode(timeline, graph))["traceEvents"]
    return events


def only(events: list[Event], phase: str, pid: int | None = None) -> list[Event]:
    return [event for event in events if event["ph"] == phase and pid in (None, event["pid"])]


def nanoseconds(microseconds: float) -> int:
    """As Perfetto reads a time."""
    return round(microseconds * 1000)


def thread_names(events: list[Event], pid: int) -> dict[int, str]:
    return {
        e["tid"]: e["args"]["name"] for e in only(events, "M", pid) if e["name"] == "thread_name"
    }


def as_perfetto(events: list[Event]) -> list[tuple[str, Event, Event]]:
    """The arrows as Perfetto's importer binds them: SliceTracker and FlowTracker of its trace
    processor, in short.

    Events in order of time, then of the file. A slice closes those before it that have ended, and
    is dropped where it overlaps one that has not. An arrow's end belongs to the slice last opened
    on its thread.
    """
    stacks: dict[int, list[Event]] = defaultdict(list)
    starts: dict[tuple[str, str, int], Event] = {}
    arrows = []
    for event in sorted(
        (e for e in events if e["ph"] in "Xsf"), key=lambda e: nanoseconds(e["ts"])
    ):
        stack, now = stacks[event["tid"]], nanoseconds(event["ts"])
        if event["ph"] == "X":
            while stack and nanoseconds(stack[-1]["ts"]) + nanoseconds(stack[-1]["dur"]) <= now:
                stack.pop()
            assert not stack, f"{event} starts inside {stack[-1]}: it would be nested or dropped"
            stack.append(event)
            continue
        assert stack, f"{event} is in no slice"
        slice_end = nanoseconds(stack[-1]["ts"]) + nanoseconds(stack[-1]["dur"])
        assert nanoseconds(stack[-1]["ts"]) <= now < slice_end, f"{event} is outside {stack[-1]}"
        key = (event["cat"], event["name"], event["id"])
        if event["ph"] == "s":
            assert key not in starts, "an arrow's id is used twice"
            starts[key] = stack[-1]
        else:
            assert event["bp"] == "e"
            arrows.append((event["name"], starts.pop(key), stack[-1]))
    assert not starts, "an arrow has no end"
    return arrows


@pytest.mark.parametrize("name", CASES)
def test_each_op_that_takes_time_is_a_slice_on_the_thread_of_its_device(name: str) -> None:
    graph, timeline = case(name)
    events = events_of(timeline)
    thread = thread_names(events, DEVICES)
    assert tuple(thread[tid] for tid in sorted(thread)) == timeline.device_names
    assert timeline.device is not None
    assert timeline.start is not None
    assert timeline.finish is not None
    slices = {event["name"]: event for event in only(events, "X", DEVICES)}
    assert len(slices) == len(only(events, "X", DEVICES))
    drawn = (timeline.finish > timeline.start).nonzero()[0].tolist()
    assert set(slices) == {graph.op_names[op] for op in drawn}
    for op in drawn:
        event = slices[graph.op_names[op]]
        assert thread[event["tid"]] == timeline.device_names[timeline.device[op]]
        assert event["args"] == {"start": timeline.start[op], "finish": timeline.finish[op]}
        assert event["ts"] == pytest.approx(timeline.start[op] * 1e6, abs=0.5e-3 + 1e-6)
        assert event["ts"] + event["dur"] == pytest.approx(
            timeline.finish[op] * 1e6, abs=0.5e-3 + 1e-6
        )


@pytest.mark.parametrize("name", CASES)
def test_each_transfer_is_a_slice_on_the_thread_of_its_link(name: str) -> None:
    graph, timeline = case(name)
    events = events_of(timeline, graph)
    thread = thread_names(events, LINKS)
    moves, names = timeline.transfers, timeline.device_names
    assert moves is not None
    expected = Counter(
        (
            f"{TRANSFER_KINDS[moves.kind[row]]} {graph.op_names[moves.tensor[row]]}",
            f"{names[moves.source[row]]} -> {names[moves.target[row]]}",
            float(moves.start[row]),
            float(moves.finish[row]),
            int(graph.output_bytes[moves.tensor[row]]),
        )
        for row in range(len(moves))
        if moves.finish[row] > moves.start[row]
    )
    found = Counter(
        (e["name"], thread[e["tid"]], e["args"]["start"], e["args"]["finish"], e["args"]["bytes"])
        for e in only(events, "X", LINKS)
    )
    assert found == expected
    assert set(thread.values()) == {link for _, link, *_ in expected}


@pytest.mark.parametrize("name", CASES)
def test_slices_of_a_thread_do_not_overlap_to_the_nanosecond(name: str) -> None:
    _, timeline = case(name)
    threads: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in only(events_of(timeline), "X"):
        begins = nanoseconds(event["ts"])
        threads[event["tid"]].append((begins, begins + nanoseconds(event["dur"])))
    for spans in threads.values():
        assert all(first[1] <= second[0] for first, second in pairwise(sorted(spans)))


@pytest.mark.parametrize("name", CASES)
def test_counters_are_the_memory_of_the_timeline(name: str) -> None:
    _, timeline = case(name)
    track = timeline.memory
    assert track is not None
    counters = only(events_of(timeline), "C")
    assert {event["pid"] for event in counters} <= {MEMORY}
    for number, device in enumerate(timeline.device_names):
        mine = track.device == number
        held = [event["args"]["held"] for event in counters if event["name"] == device]
        times = [event["ts"] for event in counters if event["name"] == device]
        assert held == track.held[mine].tolist()
        assert max(held) == timeline.peak_memory[number]
        assert times == pytest.approx((track.time[mine] * 1e6).tolist(), abs=0.5e-3 + 1e-6)
        assert times == sorted(times)


@pytest.mark.parametrize("name", CASES)
def test_arrows_go_from_the_op_that_made_a_tensor_to_its_transfer_and_on_to_the_first_op_that_takes_it(
    name: str,
) -> None:
    graph, timeline = case(name)
    moves, device, start, finish = (
        timeline.transfers,
        timeline.device,
        timeline.start,
        timeline.finish,
    )
    assert moves is not None
    assert device is not None
    assert start is not None
    assert finish is not None
    expected = Counter()
    for row in range(len(moves)):
        if moves.finish[row] == moves.start[row]:
            continue
        tensor, kind = int(moves.tensor[row]), moves.kind[row]
        takers = [int(op) for op in graph.consumers_of(tensor) if finish[op] > start[op]]
        slice_name = f"{TRANSFER_KINDS[kind]} {graph.op_names[tensor]}"
        if kind == SEND and finish[tensor] > start[tensor]:
            expected["made", graph.op_names[tensor], slice_name] += 1
        if kind in (SEND, FETCH):
            there = [
                op
                for op in takers
                if device[op] == moves.target[row] and start[op] >= moves.finish[row]
            ]
            if there:
                first = min(there, key=lambda op: (start[op], op))
                expected["taken", slice_name, graph.op_names[first]] += 1
    arrows = as_perfetto(events_of(timeline, graph))
    found = Counter((kind, out["name"], into["name"]) for kind, out, into in arrows)
    assert (
        +Counter({arrow: n for arrow, n in found.items() if not arrow[2].startswith("home ")})
        == expected
    )


@pytest.mark.parametrize("name", CASES)
def test_without_the_graph_arrows_end_at_the_first_op_that_starts_once_the_tensor_is_there(
    name: str,
) -> None:
    _, timeline = case(name)
    moves, device, start, finish = (
        timeline.transfers,
        timeline.device,
        timeline.start,
        timeline.finish,
    )
    assert moves is not None
    assert device is not None
    assert start is not None
    assert finish is not None
    events = events_of(timeline)
    arrows = as_perfetto(events)
    assert {kind for kind, _, _ in arrows} <= {"made", "arrived"}
    ends = {
        (out["name"], out["tid"], out["ts"]): into["name"]
        for kind, out, into in arrows
        if kind == "arrived"
    }
    expected = 0
    threads = {link: tid for tid, link in thread_names(events, LINKS).items()}
    for row in range(len(moves)):
        if moves.finish[row] == moves.start[row]:
            continue
        link = f"{timeline.device_names[moves.source[row]]} -> {timeline.device_names[moves.target[row]]}"
        what = f"{TRANSFER_KINDS[moves.kind[row]]} {timeline.op_names[moves.tensor[row]]}"
        later = np.flatnonzero(
            (device == moves.target[row]) & (start >= moves.finish[row]) & (finish > start)
        )
        first = min(later, key=lambda op: (start[op], op), default=None)
        if moves.kind[row] == HOME or first is None:
            continue
        expected += 1
        key = (what, threads[link], round(moves.start[row] * 1e9) / 1e3)
        assert ends[key] == timeline.op_names[first]
    assert len(ends) == expected


def test_without_the_graph_an_arrow_may_end_at_the_first_op_of_all() -> None:
    builder = GraphBuilder()
    for name in ("late", "busy"):
        builder.add(name)
    builder.add("made", output_bytes=10)
    builder.add("taken", inputs=["made"])
    devices = (Device("cpu", "cpu", 1000), Device("gpu", "cuda", 1000))
    cluster = Cluster("pair", devices, (Link("cpu", "gpu", 100.0, 1.0),))
    seconds = np.array([1.0, 10.0, 1.0, 1.0])[:, None].repeat(2, axis=1)
    problem = Problem(builder.freeze(), cluster, seconds)
    priority = np.array([2.0, 3.0, 0.0, 1.0])  # of the GPU: busy, late, taken
    placement = Placement(np.array([1, 1, 0, 1]), "priority", priority)
    arrows = as_perfetto(events_of(reference.simulate(problem, placement)))
    ends = [into["name"] for kind, _, into in arrows if kind == "arrived"]
    assert ends == ["late"]


def test_a_value_sent_home_comes_from_the_update_that_made_it() -> None:
    builder = GraphBuilder()
    builder.parameter("weight", 100)
    builder.add("forward", inputs=["weight"], output_bytes=10)
    builder.add("update", inputs=["forward", "weight"], phase="update")
    builder.add("again", inputs=["forward", "weight"], phase="update")
    devices = (Device("cpu", "cpu", 1000), Device("gpu", "cuda", 1000))
    cluster = Cluster("pair", devices, (Link("cpu", "gpu", 100.0, 1.0),))
    problem = Problem(builder.freeze(), cluster, np.array([[0, 0], [1, 1], [1, 1], [1, 1]]))
    timeline = reference.simulate(problem, Placement(np.array([0, 1, 1, 1])))
    arrows = as_perfetto(events_of(timeline, problem.graph))
    assert [(kind, out["name"], into["name"]) for kind, out, into in arrows] == [
        ("taken", "fetch weight", "forward"),
        ("made", "update", "home weight"),
        ("made", "again", "home weight"),
    ]


def test_the_chain_worked_out_by_hand() -> None:
    graph, timeline = case("chain")
    events = events_of(timeline, graph)
    slices = [(e["name"], e["pid"], e["ts"], e["dur"]) for e in only(events, "X")]
    assert slices == [
        ("a", DEVICES, 0.0, 1e6),
        ("b", DEVICES, 1e6, 2e6),
        ("c", DEVICES, 6e6, 3e6),
        ("send b", LINKS, 3e6, 3e6),
    ]
    arrows = [(kind, out["name"], into["name"]) for kind, out, into in as_perfetto(events)]
    assert arrows == [("made", "b", "send b"), ("taken", "send b", "c")]
    assert [e["ts"] for e in events if e["ph"] == "s"] == [3e6 - 1e-3, 6e6 - 1e-3]
    assert [e["ts"] for e in events if e["ph"] == "f"] == [3e6, 6e6]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {DEVICES: "devices", LINKS: "links", MEMORY: "memory"}


def test_no_two_threads_share_a_number_and_devices_keep_their_order() -> None:
    _, timeline = case("training_program")
    labels = only(events_of(timeline), "M")
    tids = [event["tid"] for event in labels if event["name"] == "thread_name"]
    assert len(tids) == len(set(tids))
    assert not set(tids) & {event["pid"] for event in labels}
    order = {e["tid"]: e["args"]["sort_index"] for e in labels if e["name"] == "thread_sort_index"}
    names = thread_names(labels, DEVICES)
    assert [names[tid] for tid in sorted(names, key=order.__getitem__)] == [
        "cuda:0",
        "cuda:1",
        "cuda:2",
        "cuda:3",
    ]


def test_a_trace_file_is_gzip_by_suffix_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    graph, timeline = case("training_program")
    write_trace(timeline, tmp_path / "trace.json", graph)
    write_trace(timeline, tmp_path / "trace.json.gz", graph)
    write_trace(timeline, str(tmp_path / "again.json.gz"), graph)
    plain, packed = (
        (tmp_path / "trace.json").read_bytes(),
        (tmp_path / "trace.json.gz").read_bytes(),
    )
    assert plain == gzip.decompress(packed) == encode(timeline, graph)
    assert packed == (tmp_path / "again.json.gz").read_bytes()
    assert json.loads(plain)["otherData"]["step_time"] == timeline.step_time


def test_a_timeline_from_a_file_gives_the_same_trace(tmp_path: Path) -> None:
    _, timeline = case("training_fifo")
    timeline.save(tmp_path / "timeline.json.gz")
    assert encode(formats.load(tmp_path / "timeline.json.gz")) == encode(timeline)


def test_with_the_graph_slices_tell_the_kind_of_op() -> None:
    graph, timeline = case("training_program")
    assert {event["args"]["kind"] for event in only(events_of(timeline, graph), "X", DEVICES)} == {
        "matmul"
    }


def test_names_of_any_kind_survive() -> None:
    builder = GraphBuilder()
    name = 'a "quoted" \\ \n\t\x01 ö 層'
    builder.add(name)
    cluster = Cluster("one", (Device("d", "cpu", 10),))
    problem = Problem(builder.freeze(), cluster, np.array([[1.0]]))
    timeline = reference.simulate(problem, Placement(np.array([0])))
    assert [event["name"] for event in only(events_of(timeline), "X")] == [name]


@pytest.mark.parametrize("lost", ["device", "start", "finish", "transfers", "memory"])
def test_a_timeline_that_is_not_full_is_refused(lost: str, tmp_path: Path) -> None:
    _, timeline = case("chain")
    with pytest.raises(InputError, match="full=True"):
        write_trace(replace(timeline, **{lost: None}), tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())


def test_a_graph_of_other_ops_is_refused() -> None:
    _, timeline = case("chain")
    with pytest.raises(InputError, match="not of graph"):
        encode(timeline, case("nasty0")[0])


def test_a_trace_into_no_folder_is_refused(tmp_path: Path) -> None:
    _, timeline = case("chain")
    with pytest.raises(InputError, match="does not exist"):
        write_trace(timeline, tmp_path / "none" / "trace.json")


def test_events_are_strict_json_with_finite_numbers() -> None:
    _, timeline = case("nasty7")
    data = encode(timeline)
    assert msgspec.json.decode(data) == json.loads(data)
    assert b"NaN" not in data
    assert b"Infinity" not in data
