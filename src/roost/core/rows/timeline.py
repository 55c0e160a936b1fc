"""The fields of `timeline.json`, and timelines to and from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from roost.core.arrays import Array
from roost.core.rows.base import Count, Figure, File, file_of
from roost.core.timeline import TRANSFER_KINDS, MemoryTrack, Timeline, Transfers
from roost.errors import InputError


class OpSpan(File, gc=False):
    """The device, start and finish of an op."""

    name: str
    device: str
    start: Figure
    finish: Figure


class TransferSpan(File, gc=False):
    """The devices, start and finish of a transfer."""

    tensor: str
    source: str
    target: str
    kind: str
    start: Figure
    finish: Figure


class MemoryStep(File, gc=False):
    """The bytes that a device holds from this time on."""

    device: str
    time: Figure
    held: Count


class TimelineFile(File, tag_field="format", tag="roost.timeline"):
    """`timeline.json`: one step. Its lists are empty unless the timeline is full."""

    version: int
    step_time: Figure
    devices: list[str]
    peak_memory: list[Count]
    capacity: list[Count]
    num_transfers: Count
    source: str = "simulated"
    ops: list[OpSpan] = msgspec.field(default_factory=list)
    transfers: list[TransferSpan] = msgspec.field(default_factory=list)
    memory: list[MemoryStep] = msgspec.field(default_factory=list)


def timeline_file(timeline: Timeline) -> TimelineFile:
    ops = timeline.op_names
    devices = timeline.device_names
    file = file_of(
        TimelineFile,
        timeline,
        version=1,
        devices=list(devices),
        peak_memory=timeline.peak_memory.tolist(),
        capacity=timeline.capacity.tolist(),
        transfers=[],
        memory=[],
    )
    if timeline.device is not None and timeline.start is not None and timeline.finish is not None:
        spans = _rows(timeline, "device", "start", "finish")
        file.ops = [
            OpSpan(name=name, device=devices[device], start=start, finish=finish)
            for name, (device, start, finish) in zip(ops, spans, strict=True)
        ]
    if timeline.transfers is not None:
        columns = ("tensor", "source", "target", "kind", "start", "finish")
        file.transfers = [
            TransferSpan(
                tensor=ops[tensor],
                source=devices[source],
                target=devices[target],
                kind=TRANSFER_KINDS[kind],
                start=start,
                finish=finish,
            )
            for tensor, source, target, kind, start, finish in _rows(timeline.transfers, *columns)
        ]
    if timeline.memory is not None:
        file.memory = [
            MemoryStep(device=devices[device], time=time, held=held)
            for device, time, held in _rows(timeline.memory, "device", "time", "held")
        ]
    return file


def _rows(noun: object, *columns: str) -> Iterator[tuple[Any, ...]]:
    """The rows of a noun whose fields are arrays."""
    return zip(*(getattr(noun, column).tolist() for column in columns), strict=True)


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

    def numbers(part: str, field: str, index: dict[str, int]) -> Array:
        try:
            values = [index[getattr(row, field)] for row in getattr(file, part)]
        except KeyError as error:
            unknown = f"{error.args[0]!r} is not known in this file"
            raise InputError(f"{part}[].{field}: {unknown}") from None
        return np.array(values, dtype=np.int32)

    def seconds(part: str, field: str) -> Array:
        return np.array([getattr(row, field) for row in getattr(file, part)], dtype=np.float64)

    timeline = Timeline(
        step_time=file.step_time,
        peak_memory=np.array(file.peak_memory, dtype=np.int64),
        capacity=np.array(file.capacity, dtype=np.int64),
        num_transfers=file.num_transfers,
        device_names=tuple(file.devices),
        op_names=tuple(op),
        source=file.source,
    )
    if not file.ops:
        return timeline
    transfers = Transfers(
        tensor=numbers("transfers", "tensor", op),
        source=numbers("transfers", "source", device),
        target=numbers("transfers", "target", device),
        kind=numbers("transfers", "kind", kind),
        start=seconds("transfers", "start"),
        finish=seconds("transfers", "finish"),
    )
    memory = MemoryTrack(
        device=numbers("memory", "device", device),
        time=seconds("memory", "time"),
        held=np.array([step.held for step in file.memory], dtype=np.int64),
    )
    return replace(
        timeline,
        device=numbers("ops", "device", device),
        start=seconds("ops", "start"),
        finish=seconds("ops", "finish"),
        transfers=transfers,
        memory=memory,
    )
