"""Timeline -> `trace.json.gz` in the Trace Event format, for Perfetto and chrome://tracing.

The process `devices` has a thread for each device. The process `links` has a thread for each
directed pair in use. The process `memory` has a counter for each device. Arrows lead from the op
that made a tensor to its transfer, and on to the op that takes it. Perfetto (ui.perfetto.dev) has
three traps:

- It rounds the start and the duration of a slice separately, and drops a slice that then overlaps
  the one before. So this file rounds both ends and takes the duration between them. The arguments
  of the slice have the exact seconds.
- It binds an arrow to the slice opened last on its thread. So an arrow leaves one nanosecond before
  its slice ends, and slices come before arrows, which breaks ties.
- It gives a thread's name to the thread with that number in any process. So no two threads share a
  number.

In an unrolled step the arguments of an op have its microbatch, and chrome://tracing shows forward,
backward and update in three colours.

Ops that take no time, such as parameters, are not drawn: a model has thousands of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from roost.core import files
from roost.core.arrays import Array
from roost.core.graph import BACKWARD, FORWARD, UPDATE, Graph
from roost.core.timeline import HOME, TRANSFER_KINDS, MemoryTrack, Timeline, Transfers
from roost.errors import InputError
from roost.transforms.microbatch import SHARED, copies_of

# Processes; a counter belongs to no thread, so it carries its process's number.
DEVICES = 1
LINKS = 2
MEMORY = 3
# Of the ops of an unrolled step; Perfetto colours by name.
_COLOURS = {FORWARD: "good", BACKWARD: "rail_load", UPDATE: "rail_animation"}
_FIRST_DEVICE, _FIRST_LINK = 100, 1000  # threads: 100 + device, 1000 + source * devices + target


class _Label(msgspec.Struct, tag_field="ph", tag="M", gc=False):
    name: str
    pid: int
    tid: int
    args: dict[str, str | int]


class _Arguments(msgspec.Struct, omit_defaults=True, gc=False):
    start: float  # seconds
    finish: float  # seconds
    kind: str = ""
    bytes: int | None = None
    microbatch: int | None = None


class _Slice(msgspec.Struct, tag_field="ph", tag="X", omit_defaults=True, gc=False):
    name: str
    cat: str
    pid: int
    tid: int
    ts: float  # microseconds
    dur: float  # microseconds
    args: _Arguments
    cname: str = ""  # colour in chrome://tracing


class _Counter(msgspec.Struct, tag_field="ph", tag="C", gc=False):
    name: str
    pid: int
    tid: int
    ts: float
    args: dict[str, int]


class _ArrowStart(msgspec.Struct, tag_field="ph", tag="s", gc=False):
    name: str
    id: int
    pid: int
    tid: int
    ts: float
    cat: str = "tensor"


class _ArrowEnd(_ArrowStart, tag="f"):
    bp: str = "e"  # bind to the enclosing slice, not to the next one


class _Slices:
    """The slices on the threads of one process, rounded to nanoseconds."""

    def __init__(self, pid: int, tid: Array, start: Array, finish: Array) -> None:
        self.pid = pid
        self.tid: list[int] = tid.tolist()
        begins = np.rint(start * 1e9)
        ends = np.rint(finish * 1e9)
        self.start, self.finish = start, finish  # [slices] seconds
        self.shown = ends > begins  # [slices]
        self.seconds = list(zip(start.tolist(), finish.tolist(), strict=True))
        self.ts: list[float] = (begins / 1e3).tolist()
        self.dur: list[float] = ((ends - begins) / 1e3).tolist()
        self.last: list[float] = ((ends - 1) / 1e3).tolist()  # the last nanosecond inside


def write_trace(timeline: Timeline, path: str | Path, graph: Graph | None = None) -> None:
    """Write a full timeline as a trace, compressed if the name ends in `.gz`.

    With the graph, slices have the kind of op and the bytes sent, and an arrow from a transfer
    (`taken`) ends at the first op that takes the tensor. Without it the arrow (`arrived`) ends at
    the first op that starts on the device after the transfer. The bytes are the same each time.
    Raises InputError unless the timeline is full.
    """
    files.write_bytes(Path(path), encode(timeline, graph))


def encode(timeline: Timeline, graph: Graph | None = None) -> bytes:
    """The bytes of a trace, an event a line."""
    device = timeline.device
    moves = timeline.transfers
    track = timeline.memory
    start = timeline.start
    finish = timeline.finish
    if device is None or start is None or finish is None or moves is None or track is None:
        raise InputError("a trace needs the full timeline: simulate(problem, placement, full=True)")
    if graph is not None and graph.op_names != timeline.op_names:
        raise InputError(f"the timeline is not of graph {graph.name!r}: its ops are others")
    num_devices = len(timeline.device_names)
    ops = _Slices(DEVICES, _FIRST_DEVICE + device, start, finish)
    link = _FIRST_LINK + moves.source.astype(np.int64) * num_devices + moves.target
    sent = _Slices(LINKS, link, moves.start, moves.finish)
    links = sorted({sent.tid[row] for row in np.flatnonzero(sent.shown).tolist()})
    events = [
        *_labels(timeline.device_names, links),
        *_op_slices(timeline.op_names, ops, graph),
        *_transfer_slices(timeline.op_names, moves, sent, graph),
        *_counters(timeline.device_names, track),
        *_arrows(device, moves, ops, sent, graph),
    ]
    encoder = msgspec.json.Encoder()
    lines = b",\n".join(map(encoder.encode, events))
    other = encoder.encode({"from": f"roost, {timeline.source}", "step_time": timeline.step_time})
    middle = b'\n],\n"displayTimeUnit": "ms",\n"otherData": '
    return b'{"traceEvents": [\n' + lines + middle + other + b"}\n"


def _labels(device_names: tuple[str, ...], links: list[int]) -> Iterator[_Label]:
    for pid, name in ((DEVICES, "devices"), (LINKS, "links"), (MEMORY, "memory")):
        if links or pid != LINKS:
            yield _Label("process_name", pid, pid, {"name": name})
            yield _Label("process_sort_index", pid, pid, {"sort_index": pid})
    threads = [(DEVICES, _FIRST_DEVICE + number, name) for number, name in enumerate(device_names)]
    for tid in links:
        source, target = divmod(tid - _FIRST_LINK, len(device_names))
        threads.append((LINKS, tid, f"{device_names[source]} -> {device_names[target]}"))
    for pid, tid, name in threads:
        yield _Label("thread_name", pid, tid, {"name": name})
        yield _Label("thread_sort_index", pid, tid, {"sort_index": tid})


def _op_slices(names: tuple[str, ...], ops: _Slices, graph: Graph | None) -> Iterator[_Slice]:
    copies = [SHARED] * len(names) if graph is None else copies_of(graph).tolist()
    unrolled = max(copies) > SHARED
    for op in np.flatnonzero(ops.shown).tolist():
        arguments = _Arguments(*ops.seconds[op], kind="" if graph is None else graph.kinds[op])
        colour = ""
        if unrolled and graph is not None:
            arguments.microbatch = None if copies[op] == SHARED else copies[op]
            colour = _COLOURS.get(int(graph.phase[op]), "")
        times = ops.ts[op], ops.dur[op]
        yield _Slice(names[op], "op", ops.pid, ops.tid[op], *times, arguments, colour)


def _transfer_slices(
    names: tuple[str, ...], moves: Transfers, sent: _Slices, graph: Graph | None
) -> Iterator[_Slice]:
    tensor = moves.tensor.tolist()
    kind = moves.kind.tolist()
    size = None if graph is None else graph.output_bytes[moves.tensor].tolist()
    for row in np.flatnonzero(sent.shown).tolist():
        transfer_kind = TRANSFER_KINDS[kind[row]]
        num_bytes = None if size is None else size[row]
        arguments = _Arguments(*sent.seconds[row], transfer_kind, num_bytes)
        name = f"{transfer_kind} {names[tensor[row]]}"
        times = sent.ts[row], sent.dur[row]
        yield _Slice(name, "transfer", sent.pid, sent.tid[row], *times, arguments)


def _counters(device_names: tuple[str, ...], track: MemoryTrack) -> Iterator[_Counter]:
    ts = (np.rint(track.time * 1e9) / 1e3).tolist()
    for device, time, held in zip(track.device.tolist(), ts, track.held.tolist(), strict=True):
        yield _Counter(device_names[device], MEMORY, MEMORY, time, {"held": held})


def _arrows(
    device: Array, moves: Transfers, ops: _Slices, sent: _Slices, graph: Graph | None
) -> Iterator[_ArrowStart | _ArrowEnd]:
    makers = _makers(device, moves, ops, graph)
    takers = _arriving(device, moves, ops) if graph is None else _takers(device, moves, ops, graph)
    arrived = "arrived" if graph is None else "taken"
    number = 0
    for row in np.flatnonzero(sent.shown).tolist():
        if (op := makers[row]) >= 0 and ops.shown[op]:
            number += 1
            yield _ArrowStart("made", number, ops.pid, ops.tid[op], ops.last[op])
            yield _ArrowEnd("made", number, sent.pid, sent.tid[row], sent.ts[row])
        if (op := takers[row]) >= 0:
            number += 1
            yield _ArrowStart(arrived, number, sent.pid, sent.tid[row], sent.last[row])
            yield _ArrowEnd(arrived, number, ops.pid, ops.tid[op], ops.ts[op])


def _makers(device: Array, moves: Transfers, ops: _Slices, graph: Graph | None) -> list[int]:
    """[transfers] the op that made the tensor: its own, or a parameter's update; -1 for none."""
    made: list[int] = moves.tensor.tolist()
    for row in np.flatnonzero(moves.kind == HOME).tolist():
        made[row] = -1
        if graph is not None:
            users = graph.consumers_of(int(moves.tensor[row]))
            updates = users[(graph.phase[users] == UPDATE) & (device[users] == moves.source[row])]
            updates = updates[ops.finish[updates] <= moves.start[row]]
            made[row] = int(updates[np.argmax(ops.finish[updates])]) if len(updates) else -1
    return made


def _takers(device: Array, moves: Transfers, ops: _Slices, graph: Graph) -> list[int]:
    """[transfers] the first drawn op that takes the tensor on the target, or -1."""
    on = device.tolist()
    start = ops.start.tolist()
    shown = ops.shown.tolist()
    consumers = graph.consumer_lists()
    columns = (moves.tensor, moves.target, moves.kind, moves.finish)
    first = []
    for tensor, target, kind, finish in zip(*(column.tolist() for column in columns), strict=True):
        users = [] if kind == HOME else consumers[tensor]
        takers = [op for op in users if on[op] == target and start[op] >= finish and shown[op]]
        first.append(min(takers, key=start.__getitem__, default=-1))
    return first


def _arriving(device: Array, moves: Transfers, ops: _Slices) -> list[int]:
    """[transfers] the first drawn op that starts on the target after the transfer, or -1."""
    arriving = np.full(len(moves), -1)
    for target in np.unique(moves.target):
        here = np.flatnonzero(ops.shown & (device == target))
        here = here[np.argsort(ops.start[here], kind="stable")]
        rows = np.flatnonzero((moves.target == target) & (moves.kind != HOME))
        first = np.searchsorted(ops.start[here], moves.finish[rows])
        in_time = first < len(here)
        arriving[rows[in_time]] = here[first[in_time]]
    return arriving.tolist()
