"""What the files look like, field by field, and the nouns to and from them.

The classes ending in `File` are the fields of a file; the published JSON Schema is made from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isinf
from typing import Annotated, Any

import msgspec
import numpy as np

from roost.core import units
from roost.core.cluster import Cluster, Device, Link
from roost.core.costs import Costs
from roost.core.graph import PHASES, Graph
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import TRANSFER_KINDS, MemoryTrack, Timeline, Transfers
from roost.core.trial import Bound, Result, Trial
from roost.errors import GraphError, InputError

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Figure = Annotated[float, msgspec.Meta(ge=0)]
Quantity = int | float | str  # a number in base units, or a text such as "12GiB" or "20us"


class File(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What every part of a file has in common: a field nobody knows is an error, not ignored."""


class OpRow(File, gc=False):
    """One op."""

    name: str
    kind: str = "op"
    inputs: list[str] = []
    phase: str = "forward"
    dtype: str = "float32"
    flop: Figure = 0.0
    bytes_read: Count = 0
    bytes_written: Count = 0
    output_bytes: Count = 0
    workspace_bytes: Count = 0
    module: str = ""
    group: str | None = None
    allowed: list[str] = []


class GraphFile(File, tag_field="format", tag="roost.graph"):
    """`graph.json`: ops in the order they run, each with the names of its inputs."""

    version: int
    name: str
    ops: list[OpRow]


class DeviceBlock(File):
    """One device, or several alike under `names`."""

    kind: str
    memory: Quantity
    name: str = ""
    names: list[str] = []
    host: str = "host"
    peak: dict[str, Quantity] = {}
    memory_bandwidth: Quantity = 0.0
    efficiency: dict[str, float] = {}
    launch_overhead: Quantity = 0.0
    gap: Quantity = 0.0
    figures_from: str = ""


class LinkBlock(File):
    """The connections between devices: `between` both ways, or `source` to `target` one way."""

    bandwidth: Quantity
    between: list[str] = []
    source: str = ""
    target: str = ""
    latency: Quantity = 0.0
    send_bandwidth: Quantity = 0.0
    send_latency: Quantity = 0.0
    sender_busy: Quantity = 0.0
    receiver_busy: Quantity = 0.0
    bus: str = "{source}->{target}"
    gap: Quantity = 0.0
    figures_from: str = ""


class ClusterFile(File, tag_field="format", tag="roost.cluster"):
    """`cluster.toml`: devices and the links between them."""

    version: int
    name: str
    devices: list[DeviceBlock]
    links: list[LinkBlock] = []
    description: str = ""
    broadcast: bool = False
    copies_in_memory: bool = True


class PlacementFile(File, tag_field="format", tag="roost.placement"):
    """`placement.json`: for each op, in the order of the graph, its index in `devices`."""

    version: int
    devices: list[str]
    device: list[Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]]
    order: str = "program"
    priority: list[float] | None = None
    prefetch_bytes: list[Count] | Count = 0
    graph: str = ""


class ProblemFile(File, tag_field="format", tag="roost.problem"):
    """`problem.json`: a graph, a cluster, and seconds of each op on each device."""

    version: int
    graph: GraphFile
    cluster: ClusterFile
    op_time: list[list[Figure]]
    costs_from: str = "given"


class OpSpan(File, gc=False):
    """When an op ran, and where."""

    name: str
    device: str
    start: Figure
    finish: Figure


class TransferSpan(File, gc=False):
    """When the output of an op travelled, and between which devices."""

    tensor: str
    source: str
    target: str
    kind: str
    start: Figure
    finish: Figure


class MemoryStep(File, gc=False):
    """Bytes held on a device from this time on."""

    device: str
    time: Figure
    held: Count


class TimelineFile(File, tag_field="format", tag="roost.timeline"):
    """`timeline.json`: one step. The lists are empty where only its time and peaks were asked for."""

    version: int
    step_time: Figure
    devices: list[str]
    peak_memory: list[Count]
    capacity: list[Count]
    num_transfers: Count
    source: str = "simulated"
    ops: list[OpSpan] = []
    transfers: list[TransferSpan] = []
    memory: list[MemoryStep] = []


class TrialRow(File, tag_field="format", tag="roost.trial"):
    """One trial, with its placement."""

    version: int
    digest: str
    step_time: Figure | None  # null: it did not come to an end
    peak_memory: list[Count]
    feasible: bool
    placement: PlacementFile
    seconds: Figure = 0.0
    source: str = "simulated"
    placer: str = ""
    missing_bytes: Count = 0
    why: str = ""


class BoundRow(File):
    """No step is shorter than this."""

    step_time: Figure
    proof: str


class ResultFile(File, tag_field="format", tag="roost.result"):
    """`result.json`: the best trial of a search, beside the baselines."""

    version: int
    best: TrialRow
    placer: str
    seed: int
    num_trials: Count
    seconds: Figure
    baselines: dict[str, TrialRow] = {}
    bound: BoundRow | None = None
    graph: str = ""
    cluster: str = ""
    problem: str = ""
    ended: str = ""


# Graph ------------------------------------------------------------------------------------------------------------


def graph_file(graph: Graph) -> GraphFile:
    names = graph.op_names
    starts, sources = graph.input_start.tolist(), graph.input_op.tolist()
    rows = [
        OpRow(
            name=name,
            kind=kind,
            inputs=[names[source] for source in sources[first:end]],
            phase=PHASES[phase],
            dtype=dtype,
            flop=flop,
            bytes_read=read,
            bytes_written=written,
            output_bytes=output,
            workspace_bytes=workspace,
            module=module,
            group=None if group < 0 else graph.group_names[group],
            allowed=list(allowed),
        )
        for name, kind, dtype, module, allowed, phase, group, flop, read, written, output, workspace, first, end in zip(
            names, graph.kinds, graph.dtypes, graph.modules, graph.allowed, graph.phase.tolist(),
            graph.group.tolist(), graph.flop.tolist(), graph.bytes_read.tolist(), graph.bytes_written.tolist(),
            graph.output_bytes.tolist(), graph.workspace_bytes.tolist(), starts[:-1], starts[1:], strict=True,
        )
    ]  # fmt: skip
    return GraphFile(version=1, name=graph.name, ops=rows)


def graph_from(file: GraphFile) -> Graph:
    _check_version(file.version, "graph")
    rows = file.ops
    index: dict[str, int] = {}
    for op, row in enumerate(rows):
        if index.setdefault(row.name, op) != op:
            raise GraphError(f"ops[{op}].name: two ops are called {row.name!r}; op names must differ")
    inputs = [_input_ops(row, op, index) for op, row in enumerate(rows)]
    phases = {phase: number for number, phase in enumerate(PHASES)}
    for op, row in enumerate(rows):
        if row.phase not in phases:
            raise GraphError(f"ops[{op}].phase: {row.phase!r} is none of {', '.join(PHASES)}")
    groups: dict[str, int] = {}
    return Graph(
        name=file.name,
        op_names=tuple(row.name for row in rows),
        kinds=tuple(row.kind for row in rows),
        dtypes=tuple(row.dtype for row in rows),
        modules=tuple(row.module for row in rows),
        allowed=tuple(tuple(row.allowed) for row in rows),
        phase=np.array([phases[row.phase] for row in rows], dtype=np.int8),
        flop=np.array([row.flop for row in rows]),
        bytes_read=np.array([row.bytes_read for row in rows], dtype=np.int64),
        bytes_written=np.array([row.bytes_written for row in rows], dtype=np.int64),
        output_bytes=np.array([row.output_bytes for row in rows], dtype=np.int64),
        workspace_bytes=np.array([row.workspace_bytes for row in rows], dtype=np.int64),
        group=np.array(
            [-1 if row.group is None else groups.setdefault(row.group, len(groups)) for row in rows],
            dtype=np.int32,
        ),
        group_names=tuple(groups),
        input_start=np.cumsum([0, *map(len, inputs)]),
        input_op=np.array([source for sources in inputs for source in sources], dtype=np.int32),
    )


def _input_ops(row: OpRow, op: int, index: dict[str, int]) -> list[int]:
    try:
        sources = [index[name] for name in row.inputs]
    except KeyError as error:
        raise GraphError(
            f"ops[{op}].inputs: op {row.name!r} takes {error.args[0]!r}, which is no op of this graph"
        ) from None
    return sources if len(sources) < 2 else list(dict.fromkeys(sources))


# Cluster ----------------------------------------------------------------------------------------------------------


def cluster_file(cluster: Cluster) -> ClusterFile:
    devices = [
        DeviceBlock(
            name=device.name,
            kind=device.kind,
            memory=units.write_bytes(device.memory),
            host=device.host,
            peak=dict(device.peak),
            memory_bandwidth=device.memory_bandwidth,
            efficiency=dict(device.efficiency),
            launch_overhead=device.launch_overhead,
            gap=device.gap,
            figures_from=device.figures_from,
        )
        for device in cluster.devices
    ]
    links = [
        LinkBlock(
            between=[link.source, link.target] if link.both_ways else [],
            source="" if link.both_ways else link.source,
            target="" if link.both_ways else link.target,
            latency=link.latency,
            bandwidth=link.bandwidth,
            send_bandwidth=link.send_bandwidth,
            send_latency=link.send_latency,
            sender_busy=link.sender_busy,
            receiver_busy=link.receiver_busy,
            bus=link.bus,
            gap=link.gap,
            figures_from=link.figures_from,
        )
        for link in cluster.links
    ]
    return ClusterFile(
        version=1,
        name=cluster.name,
        devices=devices,
        links=links,
        description=cluster.description,
        broadcast=cluster.broadcast,
        copies_in_memory=cluster.copies_in_memory,
    )


def cluster_from(file: ClusterFile) -> Cluster:
    _check_version(file.version, "cluster")
    devices = [device for i, block in enumerate(file.devices) for device in _devices(block, f"devices[{i}]")]
    return Cluster(
        name=file.name,
        devices=tuple(devices),
        links=tuple(_link(block, f"links[{i}]") for i, block in enumerate(file.links)),
        description=file.description,
        broadcast=file.broadcast,
        copies_in_memory=file.copies_in_memory,
    )


def _devices(block: DeviceBlock, where: str) -> list[Device]:
    if bool(block.name) == bool(block.names):
        raise InputError(f"{where}: give either name, or names for several alike")
    return [
        Device(
            name=name,
            kind=block.kind,
            memory=_size(block.memory, f"{where}.memory"),
            host=block.host,
            peak={
                dtype: _quantity(rate, units.FLOP_RATE, f"{where}.peak.{dtype}") for dtype, rate in block.peak.items()
            },
            memory_bandwidth=_quantity(block.memory_bandwidth, units.RATE, f"{where}.memory_bandwidth"),
            efficiency=block.efficiency,
            launch_overhead=_quantity(block.launch_overhead, units.SECONDS, f"{where}.launch_overhead"),
            gap=_quantity(block.gap, units.SECONDS, f"{where}.gap"),
            figures_from=block.figures_from,
        )
        for name in block.names or [block.name]
    ]


def _link(block: LinkBlock, where: str) -> Link:
    both_ways = bool(block.between)
    if both_ways == bool(block.source or block.target) or (both_ways and len(block.between) != 2):
        raise InputError(f"{where}: give between = [one, other], or source and target")
    source, target = block.between if both_ways else (block.source, block.target)
    return Link(
        source=source,
        target=target,
        bandwidth=_quantity(block.bandwidth, units.RATE, f"{where}.bandwidth"),
        latency=_quantity(block.latency, units.SECONDS, f"{where}.latency"),
        both_ways=both_ways,
        bus=block.bus,
        gap=_quantity(block.gap, units.SECONDS, f"{where}.gap"),
        figures_from=block.figures_from,
        send_bandwidth=_quantity(block.send_bandwidth, units.RATE, f"{where}.send_bandwidth"),
        send_latency=_quantity(block.send_latency, units.SECONDS, f"{where}.send_latency"),
        sender_busy=_quantity(block.sender_busy, units.SECONDS, f"{where}.sender_busy"),
        receiver_busy=_quantity(block.receiver_busy, units.SECONDS, f"{where}.receiver_busy"),
    )


def _size(value: Quantity, where: str) -> int:
    try:
        return units.parse_bytes(value)
    except (InputError, OverflowError) as error:
        raise InputError(f"{where}: {error}") from None


def _quantity(value: Quantity, known: dict[str, float], where: str) -> float:
    try:
        return units.parse(value, known)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _check_version(version: int, what: str) -> None:
    if version != 1:  # inside another file, where the header has not been looked at
        raise InputError(f"{what}.version: {version} is not known; this Roost reads version 1")


# The other nouns --------------------------------------------------------------------------------------------------


def placement_file(placement: Placement) -> PlacementFile:
    window = placement.prefetch_bytes
    return PlacementFile(
        version=1,
        devices=list(placement.devices),
        device=placement.device.tolist(),
        order=placement.order,
        priority=None if placement.priority is None else placement.priority.tolist(),
        prefetch_bytes=window if isinstance(window, int) else window.tolist(),
        graph=placement.graph,
    )


def placement_from(file: PlacementFile) -> Placement:
    window: Any = file.prefetch_bytes
    return Placement(
        device=np.array(file.device, dtype=np.int64),
        order=file.order,
        priority=None if file.priority is None else np.array(file.priority),
        prefetch_bytes=window if isinstance(window, int) else np.array(window, dtype=np.int64),
        devices=tuple(file.devices),
        graph=file.graph,
    )


def problem_file(problem: Problem) -> ProblemFile:
    return ProblemFile(
        version=1,
        graph=graph_file(problem.graph),
        cluster=cluster_file(problem.cluster),
        op_time=problem.op_time.tolist(),
        costs_from=problem.costs.source,
    )


def problem_from(file: ProblemFile) -> Problem:
    lengths = {len(row) for row in file.op_time}
    if not lengths:
        raise InputError("op_time: is empty; it must have a row of seconds for each op")
    if len(lengths) > 1:
        raise InputError(f"op_time: rows have {min(lengths)} to {max(lengths)} entries; all must have the same")
    times = np.array(file.op_time, dtype=np.float64).reshape(len(file.op_time), -1)
    return Problem(graph_from(file.graph), cluster_from(file.cluster), Costs(times, source=file.costs_from))


def timeline_file(timeline: Timeline) -> TimelineFile:
    ops, devices = timeline.op_names, timeline.device_names
    file = TimelineFile(
        version=1,
        step_time=timeline.step_time,
        devices=list(devices),
        peak_memory=timeline.peak_memory.tolist(),
        capacity=timeline.capacity.tolist(),
        num_transfers=timeline.num_transfers,
        source=timeline.source,
    )
    if timeline.device is not None and timeline.start is not None and timeline.finish is not None:
        spans = zip(ops, timeline.device.tolist(), timeline.start.tolist(), timeline.finish.tolist(), strict=True)
        file.ops = [OpSpan(name=n, device=devices[d], start=s, finish=f) for n, d, s, f in spans]
    if (moves := timeline.transfers) is not None:
        columns = (moves.tensor, moves.source, moves.target, moves.kind, moves.start, moves.finish)
        file.transfers = [
            TransferSpan(
                tensor=ops[tensor],
                source=devices[source],
                target=devices[target],
                kind=TRANSFER_KINDS[kind],
                start=start,
                finish=finish,
            )
            for tensor, source, target, kind, start, finish in zip(*(c.tolist() for c in columns), strict=True)
        ]
    if (track := timeline.memory) is not None:
        steps = zip(track.device.tolist(), track.time.tolist(), track.held.tolist(), strict=True)
        file.memory = [MemoryStep(device=devices[d], time=t, held=h) for d, t, h in steps]
    return file


def timeline_from(file: TimelineFile) -> Timeline:
    device = {name: number for number, name in enumerate(file.devices)}
    op = {span.name: number for number, span in enumerate(file.ops)}
    kind = {name: number for number, name in enumerate(TRANSFER_KINDS)}
    if not device or len(device) != len(file.devices):
        raise InputError("devices: must be named, each once")
    if len(op) != len(file.ops):
        raise InputError("ops: two of them have the same name")
    for what in ("peak_memory", "capacity"):
        if len(getattr(file, what)) != len(device):
            raise InputError(f"{what}: must have one entry for each of {len(device)} devices")

    def numbers(rows: Sequence[object], field: str, index: dict[str, int], where: str) -> Any:
        try:
            return np.array([index[getattr(row, field)] for row in rows], dtype=np.int32)
        except KeyError as error:
            raise InputError(f"{where}[].{field}: {error.args[0]!r} is not known in this file") from None

    def seconds(rows: Sequence[object], field: str) -> Any:
        return np.array([getattr(row, field) for row in rows], dtype=np.float64)

    moves, steps = file.transfers, file.memory
    full = bool(file.ops)
    return Timeline(
        step_time=file.step_time,
        peak_memory=np.array(file.peak_memory, dtype=np.int64),
        capacity=np.array(file.capacity, dtype=np.int64),
        num_transfers=file.num_transfers,
        device_names=tuple(file.devices),
        op_names=tuple(op),
        source=file.source,
        device=numbers(file.ops, "device", device, "ops") if full else None,
        start=seconds(file.ops, "start") if full else None,
        finish=seconds(file.ops, "finish") if full else None,
        transfers=Transfers(
            tensor=numbers(moves, "tensor", op, "transfers"),
            source=numbers(moves, "source", device, "transfers"),
            target=numbers(moves, "target", device, "transfers"),
            kind=numbers(moves, "kind", kind, "transfers"),
            start=seconds(moves, "start"),
            finish=seconds(moves, "finish"),
        )
        if full
        else None,
        memory=MemoryTrack(
            device=numbers(steps, "device", device, "memory"),
            time=seconds(steps, "time"),
            held=np.array([step.held for step in steps], dtype=np.int64),
        )
        if full
        else None,
    )


def trial_row(trial: Trial) -> TrialRow:
    return TrialRow(
        version=1,
        digest=trial.placement.digest,
        step_time=None if isinf(trial.step_time) else trial.step_time,
        peak_memory=trial.peak_memory.tolist(),
        feasible=trial.feasible,
        placement=placement_file(trial.placement),
        seconds=trial.seconds,
        source=trial.source,
        placer=trial.placer,
        missing_bytes=trial.missing_bytes,
        why=trial.why,
    )


def trial_from(row: TrialRow) -> Trial:
    placement = placement_from(row.placement)
    if placement.digest != row.digest:
        raise InputError(
            f"digest: {row.digest!r} is not that of the placement, {placement.digest!r}; "
            "one of them was changed: run the search again"
        )
    return Trial(
        placement=placement,
        step_time=inf if row.step_time is None else row.step_time,
        peak_memory=np.array(row.peak_memory, dtype=np.int64),
        feasible=row.feasible,
        seconds=row.seconds,
        source=row.source,
        placer=row.placer,
        missing_bytes=row.missing_bytes,
        why=row.why,
    )


def result_file(result: Result) -> ResultFile:
    return ResultFile(
        version=1,
        best=trial_row(result.best),
        placer=result.placer,
        seed=result.seed,
        num_trials=result.num_trials,
        seconds=result.seconds,
        baselines={name: trial_row(trial) for name, trial in result.baselines.items()},
        bound=None if result.bound is None else BoundRow(step_time=result.bound.step_time, proof=result.bound.proof),
        graph=result.graph,
        cluster=result.cluster,
        problem=result.problem,
        ended=result.ended,
    )


def result_from(file: ResultFile) -> Result:
    return Result(
        best=trial_from(file.best),
        placer=file.placer,
        seed=file.seed,
        num_trials=file.num_trials,
        seconds=file.seconds,
        baselines={name: trial_from(row) for name, row in file.baselines.items()},
        bound=None if file.bound is None else Bound(file.bound.step_time, file.bound.proof),
        graph=file.graph,
        cluster=file.cluster,
        problem=file.problem,
        ended=file.ended,
    )
