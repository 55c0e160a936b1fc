"""`timeline.json`, field by field, and timelines to and from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from roost.core.rows.base import Count, Figure, File
from roost.core.timeline import TRANSFER_KINDS, MemoryTrack, Timeline, Transfers
from roost.errors import InputError


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
    """`timeline.json`: one step. The lists are empty where only its time and peaks were asked
    for."""

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
        spans = zip(
            ops,
            timeline.device.tolist(),
            timeline.start.tolist(),
            timeline.finish.tolist(),
            strict=True,
        )
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
            for tensor, source, target, kind, start, finish in zip(
                *(c.tolist() for c in columns), strict=True
            )
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
            raise InputError(
                f"{where}[].{field}: {error.args[0]!r} is not known in this file"
            ) from None

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
