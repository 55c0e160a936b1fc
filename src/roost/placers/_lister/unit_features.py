"""Features of units that the network of `lister` reads before anything is placed."""

from __future__ import annotations

import numpy as np

from roost.core.arrays import Array
from roost.core.graph import BACKWARD, UPDATE
from roost.placers._lister.device_features import ProblemConstants
from roost.placers._lister.visiting_orders import path_times
from roost.placers._listing.list_scheduler import ListScheduler
from roost.placers._shared.links import mean_link

NUM_UNIT_FEATURES = 30


def unit_features(scheduler: ListScheduler, constants: ProblemConstants) -> Array:
    """[units, features] f4: 20 features of each unit, then 10 of the whole problem."""
    num_ops = len(scheduler.layout.op)
    num_units = scheduler.units.num_units
    link = mean_link(scheduler.units.problem.cluster)
    transfer = link.seconds(scheduler.layout.output)
    times = path_times(scheduler.units, scheduler.layout, 0.5)
    longest = max(1e-12, float((times.head + times.tail).max(initial=0.0)))
    is_there = (constants.first_op >= 0) & (num_ops > 0)
    op = np.maximum(constants.first_op, 0)

    def first(values: Array) -> Array:
        """Values of the first op of each unit, 0 for units without ops."""
        return np.where(is_there, values[op] if num_ops else 0.0, 0.0)

    layout = scheduler.layout
    listing = scheduler.listing
    units = scheduler.units
    graph = units.problem.graph
    cluster = units.problem.cluster
    tick = constants.tick
    inputs = np.zeros(num_ops)
    reader = np.repeat(np.arange(num_ops), layout.num_inputs)
    np.add.at(inputs, reader, transfer[layout.previous.astype(np.int64)])
    memory = max(1.0, float(cluster.memory.mean()))
    time = units.time.min(axis=1)
    phase = graph.phase[layout.op]
    least = 1e-3 * tick
    of_units = {
        "position": first(np.arange(num_ops) / max(1, num_ops)),
        "head": first(times.head / longest),
        "tail": first(times.tail / longest),
        "slack": first(1.0 - (times.head + times.tail) / longest),
        "time": np.log1p(time / tick),
        "op_time": first(np.log1p(times.op_time / tick)),
        "output": first(np.log1p(transfer / tick)),
        "inputs": first(np.log1p(inputs / tick)),
        "memory": np.log1p(20.0 * units.resident_bytes / memory),
        "lasting": np.log1p(20.0 * listing.lasting / memory),
        "ops": np.log1p(np.bincount(units.unit, minlength=num_units)) / 4,
        "previous": first(np.log1p(layout.num_inputs)),
        "next": first(np.log1p(np.diff(layout.next_start.astype(np.int64)))),
        "is_source": first(layout.num_inputs == 0),
        "has_partner": first(listing.partner >= 0),
        "has_rival": first(listing.rival >= 0),
        "ratio": first(np.log((transfer + least) / (times.op_time + least)) / 4),
        "backward": first(phase == BACKWARD),
        "update": first(phase == UPDATE),
        "slower": np.log((units.time.max(axis=1) + least) / (time + least)) / 4,
    }
    total = constants.total
    balance = constants.balance
    lasting = float(listing.lasting.sum())
    most = float(cluster.memory.sum())
    of_problem = {
        "path": np.log(longest / balance + 1e-3) / 2,
        "traffic": np.log1p(float(transfer.sum()) / balance) / 4,
        "devices": np.log2(cluster.num_devices) / 3,
        "fast_devices": np.log2(max(1, int((total < 1.5 * total.min()).sum()))) / 3,
        "units": np.log(num_units) / 6,
        "tight": min(4.0, lasting / max(1.0, float(cluster.memory.max()))),
        "tight_in_all": min(4.0, 2 * lasting / max(1.0, most)),
        "spread": np.log(total.max() / total.min()) / 3,
        "latency": np.log1p(20.0 * link.latency / tick) / 4,
        "by_rank": float(scheduler.example.order != "program"),
    }
    columns = [*of_units.values(), *(np.full(num_units, value) for value in of_problem.values())]
    features = np.stack(columns, axis=1).astype(np.float32)
    assert features.shape == (num_units, NUM_UNIT_FEATURES)
    return np.ascontiguousarray(np.nan_to_num(features, posinf=10.0, neginf=-10.0))
