"""Placements of layouts: the device of every op, an order that follows a schedule, and windows.

A parameter lives on one of the devices that read it, and its update runs there. With several
replicas the homes are spread, so each device holds a share of the weights and states. The other
devices fetch the weights into a window, once if all of them fit: that is the volume of ZeRO-3
(Rajbhandari et al., SC 2020) or less.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import BACKWARD, UPDATE
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.placers._microbatches.copied_step import (
    BACKWARD_WORK,
    NUM_KINDS,
    ONCE,
    WEIGHT_WORK,
    CopiedStep,
)
from roost.placers._microbatches.layouts import CopyLayout
from roost.placers._microbatches.task_schedule import TaskSchedule
from roost.placers._shared.orders import list_scheduled
from roost.placers._shared.units import Units
from roost.transforms.microbatch import SHARED

_SLACK = 1.2  # of the time that a gradient is expected to be on its way


def realised(step: CopiedStep, schedule: TaskSchedule) -> Placement:
    """The placement of a schedule, with windows that hold all that a device fetches."""
    device = devices_of(step, schedule.layout)
    start = _starts(step, schedule, device)
    return step.problem.placement(device, "priority", -start, windows(step, device))


def realised_again(problem: Problem, placement: Placement) -> Placement:
    """The same devices and windows; a free device begins the most urgent op that is ready."""
    listed = list_scheduled(problem, placement.device)
    return replace(listed, prefetch_bytes=placement.prefetch_bytes)


def with_smaller_windows(placement: Placement, missing: Array) -> Placement:
    """The placement with so many bytes less in the window of each device."""
    window = np.maximum(np.asarray(placement.prefetch_bytes) - missing, 0)
    return replace(placement, prefetch_bytes=window)


def devices_of(step: CopiedStep, layout: CopyLayout) -> Array:  # [ops]
    """The device of every op in a layout."""
    problem = step.problem
    graph = problem.graph
    rows = layout.device_rows(step)
    by_replica = rows[:, step.element]  # [replicas, bases]
    for tied in step.tied_weights if layout.readers_together else ():
        by_replica[:, tied.bases] = rows[:, [tied.heavy]]
    copied = step.copy != SHARED
    device = np.zeros(graph.num_ops, dtype=np.int64)
    replica = np.array(layout.replica_of_copy)[step.copy[copied]]
    device[copied] = by_replica[replica, step.base[copied]]
    home = _homes(step, layout.home_rows(by_replica))
    rest = ~copied & ~step.is_sum
    device[rest] = home[step.base[rest]]
    home_of_value = np.full(step.num_bases, -1)
    inputs = graph.input_lists()
    for op in np.flatnonzero(rest).tolist():
        for source in inputs[op]:
            if step.is_sum[source]:
                home_of_value[step.base[source]] = device[op]
    for op in np.flatnonzero(step.is_sum).tolist():
        places = {int(device[source]) for source in inputs[op]}
        at_home = home_of_value[step.base[op]]
        if layout.sums_at_host and at_home >= 0:
            places = {at_home}
        device[op] = places.pop() if len(places) == 1 or at_home < 0 else at_home
    return _allowed(step, device)


def _homes(step: CopiedStep, by_replica: Array) -> Array:  # [bases]
    """The device of each op that exists once: on a device that reads it, spread by bytes."""
    graph = step.problem.graph
    home = by_replica[0].copy()
    source, target = step.edges
    once = step.kind == ONCE
    parameter = graph.is_parameter[step.first]
    update = graph.phase[step.first] == UPDATE
    readers: dict[int, set[int]] = {}
    first_reader: dict[int, int] = {}
    updated_by: dict[int, list[int]] = {}
    for maker, reader in zip(source.tolist(), target.tolist(), strict=True):
        if once[maker] and not once[reader]:
            first_reader.setdefault(maker, reader)
        if parameter[maker] and update[reader]:
            updated_by.setdefault(reader, []).append(maker)
    held = np.zeros(step.problem.cluster.num_devices)
    size = graph.output_bytes[step.first]
    together: dict[int, int] = {}
    for reader, parameters in updated_by.items():
        together |= dict.fromkeys([*parameters, reader], min(parameters))
    total: dict[int, float] = {}
    for base, root in together.items():
        total[root] = total.get(root, 0.0) + float(size[base])
    for maker, reader in zip(source[::-1].tolist(), target[::-1].tolist(), strict=True):
        if once[maker] and once[reader] and reader in together:  # a sum of gradients goes along
            together.setdefault(maker, together[reader])
    for base in np.flatnonzero(once).tolist():
        root = together.get(base, base)
        lead = first_reader.get(root, first_reader.get(base, root))
        readers.setdefault(root, set()).update(by_replica[:, lead].tolist())
    for root in sorted(readers):
        places = sorted(readers[root])
        found = min(places, key=lambda place: (held[place], place))
        held[found] += total.get(root, float(size[root]))
        home[root] = found
    for base in np.flatnonzero(once).tolist():
        home[base] = home[together.get(base, base)]
    return np.asarray(home)


def _allowed(step: CopiedStep, device: Array) -> Array:
    """The devices, with ops that may not run there moved, and groups kept together."""
    units = Units.of(step.problem, "nothing")
    wish = units.unit_devices(device)
    may = units.allowed[np.arange(units.num_units), wish]
    fastest = np.where(units.allowed, units.time, np.inf).argmin(axis=1)
    return np.asarray(units.devices(np.where(may, wish, fastest)))


def windows(step: CopiedStep, device: Array) -> Array:  # [devices] bytes
    """Windows as large as all parameters that a device fetches."""
    graph = step.problem.graph
    source = graph.input_op
    target = graph.edge_target
    away = graph.is_parameter[source] & (device[source] != device[target])
    pairs = np.unique(np.stack([source[away], device[target[away]]]), axis=1)
    found = np.zeros(step.problem.cluster.num_devices, dtype=np.int64)
    np.add.at(found, pairs[1], graph.output_bytes[pairs[0]])
    return found


def _starts(step: CopiedStep, schedule: TaskSchedule, device: Array) -> Array:  # [ops] seconds
    """When each op is expected to begin."""
    problem = step.problem
    graph = problem.graph
    layout = schedule.layout
    start = np.zeros(graph.num_ops)
    own = problem.op_time[np.arange(graph.num_ops), device]
    copied = np.flatnonzero((step.copy != SHARED) & (step.kind[step.base] != ONCE))
    base = step.base[copied]
    replica = np.array(layout.replica_of_copy)[step.copy[copied]]
    chunks = np.stack(
        [
            layout.chunk_of_element(number, step.num_elements)[step.element]
            for number in range(len(layout.replicas))
        ]
    )
    chunk = chunks[replica, base]
    kind = step.kind[base]
    if not schedule.splits_backward:
        kind = np.where(kind == WEIGHT_WORK, BACKWARD_WORK, kind)
    task = (step.copy[copied] * layout.num_chunks + chunk) * NUM_KINDS + kind
    order = np.lexsort((copied, task))
    seconds = own[copied][order]
    upto = np.cumsum(seconds) - seconds
    ordered = task[order]
    begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    if len(ordered):
        offset = upto - np.repeat(upto[begins], np.diff([*begins, len(ordered)]))
        start[copied[order]] = schedule.start.ravel()[ordered] + offset
    cluster = problem.cluster
    latency = cluster.sent_latency
    rate = cluster.sent_seconds_per_byte
    inputs = graph.input_lists()
    is_late = step.is_sum | ((step.copy == SHARED) & (graph.phase >= BACKWARD))
    late = np.flatnonzero(is_late)
    is_parameter = graph.is_parameter
    for op in late.tolist():
        here = device[op]
        begin = 0.0
        for source in inputs[op]:
            if is_parameter[source]:
                continue
            arrives = start[source] + own[source]
            there = device[source]
            if there != here:
                size = graph.output_bytes[source]
                arrives += _SLACK * (latency[there, here] + size * rate[there, here])
            begin = max(begin, arrives)
        start[op] = begin
    return start
