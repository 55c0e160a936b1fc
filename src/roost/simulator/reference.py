"""The definition of what a placement does: plain Python, no tricks. `compiled.py` must equal it.

1. A device runs one op at a time, in its order. With `fifo` it takes whichever op became ready
first. After an op that took any time it rests for its gap. 2. A tensor needed on another device is
sent there once, when it is produced. A bus carries one transfer at a time, in the order of issue,
and rests for its gap after each. Transfers overlap compute. With broadcast one transfer, as long as
to the farthest device, serves every device. What an op has made goes with the `send_bandwidth` of
its link where that has one, and with its `send_latency` where others read it; parameters are
fetched, and their new values go home, with its `latency`. What crosses keeps both ends busy. After
an op, and after the rest that its gap asks for, its device is busy for the `sender_busy` of the
link to each device that its output is sent to, then of that to each home that it sends a new value
to; the transfers do not wait for that. For each tensor that a device receives, the first op there
that reads it, in dispatch order, takes the `receiver_busy` of the link longer, and so does the
first that uses a copy which was fetched. A device that others fetch from, or send new values home
to, is not busy with that. 3. A parameter needed on a device where it does not live is fetched for
each use, in dispatch order, into a window of `prefetch_bytes` on that device (or of the most that
one op needs, if that is more). When the window is full the copy used longest ago, counted in
dispatch order, makes room, once the ops that used it have finished; a copy still there is used
again. An update sends the new value of each parameter it reads home; what it sends from is not
counted as memory. Nothing else orders the uses of a parameter: where one must follow an update, the
graph has an edge. 4. Memory: see `memory.py`. 5. At the start fetches are issued, in dispatch
order. Then everything is issued when an op finishes: its sends in the order of the devices, then
what goes home, then what its device fetches next. Ops that finish at the same time do so in
dispatch order, or with `fifo` in the order they were begun; ops that become ready at the same time
are begun in dispatch order, after all that finish then. Times are seconds, added in the order
written here, what an op receives in the dispatch order of what made it, and then what is fetched
for it; such sums are made first, and added as one. The step ends with the last op or transfer; a
rest after it does not count.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from roost.core.graph import UPDATE
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import FETCH, HOME, SEND, Timeline, Transfers
from roost.simulator import memory
from roost.simulator.order import dispatch_order

_FINISHED, _READY = 0, 1  # at the same time, first what finishes, then what becomes ready


@dataclass
class Copy:
    """One fetch of a parameter into a device's window, and the ops that use it from there."""

    parameter: int
    users: list[int] = field(default_factory=list)
    # Their users must have finished before this is fetched.
    replaces: list[Copy] = field(default_factory=list)


def plan_fetches(
    problem: Problem, placement: Placement, order: list[int]
) -> tuple[list[list[Copy]], list[int]]:
    """The copies each device fetches, in the order it asks for them, and the bytes of its
    window."""
    graph = problem.graph
    device = placement.device.tolist()
    size = graph.output_bytes.tolist()
    num_devices = problem.cluster.num_devices
    inputs = graph.input_lists()
    is_parameter = graph.is_parameter.tolist()
    needs = [
        (op, [p for p in inputs[op] if is_parameter[p] and device[p] != device[op]]) for op in order
    ]
    window = [0] * num_devices
    prefetch = np.broadcast_to(placement.prefetch_bytes, num_devices).tolist()
    for op, parameters in needs:
        if parameters:
            d = device[op]
            window[d] = max(window[d], prefetch[d], sum(size[p] for p in parameters))
    room = list(window)
    # Used longest ago first.
    held: list[OrderedDict[int, Copy]] = [OrderedDict() for _ in range(num_devices)]
    copies: list[list[Copy]] = [[] for _ in range(num_devices)]
    for op, parameters in needs:
        d = device[op]
        there = [parameter for parameter in parameters if parameter in held[d]]
        for parameter in there:
            held[d].move_to_end(parameter)
            held[d][parameter].users.append(op)
        for parameter in (parameter for parameter in parameters if parameter not in there):
            copy = Copy(parameter, users=[op])
            while room[d] < size[parameter]:
                old, replaced = held[d].popitem(last=False)
                copy.replaces.append(replaced)
                room[d] += size[old]
            room[d] -= size[parameter]
            held[d][parameter] = copy
            copies[d].append(copy)
    return copies, window


def crossings(
    problem: Problem, placement: Placement, order: list[int], copies: list[list[Copy]]
) -> tuple[list[float], list[float]]:
    """[ops] seconds that each op takes longer for what it receives, and that its device is busy
    after it."""
    graph = problem.graph
    device = placement.device.tolist()
    inputs = graph.input_lists()
    consumers = graph.consumer_lists()
    is_parameter = graph.is_parameter.tolist()
    is_update = (graph.phase == UPDATE).tolist()
    sender_busy = problem.cluster.sender_busy.tolist()
    receiver_busy = problem.cluster.receiver_busy.tolist()
    position = {op: number for number, op in enumerate(order)}
    longer = [0.0] * graph.num_ops
    after = [0.0] * graph.num_ops
    for op in order:
        d = device[op]
        for target in sorted({device[consumer] for consumer in consumers[op]} - {d}):
            first = min(
                (one for one in consumers[op] if device[one] == target), key=position.__getitem__
            )
            longer[first] += receiver_busy[d][target]
            after[op] += sender_busy[d][target]
        if is_update[op]:
            for source in inputs[op]:
                if is_parameter[source] and device[source] != d:
                    after[op] += sender_busy[d][device[source]]
    for d, row in enumerate(copies):
        for copy in row:
            longer[copy.users[0]] += receiver_busy[device[copy.parameter]][d]
    return longer, after


def simulate(problem: Problem, placement: Placement) -> Timeline:
    """The full timeline of one step."""
    placement = problem.check(placement)
    graph = problem.graph
    cluster = problem.cluster
    num_devices = cluster.num_devices
    device = placement.device.tolist()
    inputs = graph.input_lists()
    consumers = graph.consumer_lists()
    is_parameter = graph.is_parameter.tolist()
    is_update = (graph.phase == UPDATE).tolist()
    output_bytes = graph.output_bytes.tolist()
    op_time = problem.op_time.tolist()
    latency = cluster.latency.tolist()
    seconds_per_byte = cluster.seconds_per_byte.tolist()
    sent_latency = cluster.sent_latency.tolist()
    sent_seconds_per_byte = cluster.sent_seconds_per_byte.tolist()
    bus = cluster.bus.tolist()
    bus_gap = cluster.bus_gap.tolist()
    device_gap = cluster.device_gap.tolist()

    order = dispatch_order(problem, placement).tolist()
    position = {op: number for number, op in enumerate(order)}
    queue: list[list[int]] = [[] for _ in range(num_devices)]
    for op in order:
        queue[device[op]].append(op)
    copies, window = plan_fetches(problem, placement, order)
    longer, after = crossings(problem, placement, order, copies)
    fetched = [0] * num_devices  # how many of each device's copies have been asked for
    fifo = placement.order == "fifo"

    ready = [0.0] * graph.num_ops
    waiting = [
        sum(not is_parameter[source] for source in inputs[op]) for op in range(graph.num_ops)
    ]
    for copy in (copy for row in copies for copy in row):
        for op in copy.users:
            waiting[op] += 1
    start = [0.0] * graph.num_ops
    finish = [0.0] * graph.num_ops
    finished = [False] * graph.num_ops
    device_free = [0.0] * num_devices
    bus_free = [0.0] * len(bus_gap)
    taken = [0] * num_devices  # how many of its queue each device has taken
    transfers: list[tuple[int, int, int, int, float, float]] = []
    events: list[tuple[float, int, int, int]] = []
    started = 0

    def begin(op: int) -> None:
        nonlocal started
        d = device[op]
        start[op] = max(ready[op], device_free[d])
        takes = op_time[op][d] + longer[op]
        finish[op] = start[op] + takes
        device_free[d] = (finish[op] + device_gap[d] if takes > 0 else finish[op]) + after[op]
        heapq.heappush(events, (finish[op], _FINISHED, started if fifo else position[op], op))
        started += 1

    def begin_next(d: int) -> None:
        while taken[d] < len(queue[d]) and waiting[queue[d][taken[d]]] == 0:
            taken[d] += 1
            begin(queue[d][taken[d] - 1])

    def provide(op: int, time: float) -> None:
        """One of the inputs an op waits for will be there at this time."""
        ready[op] = max(ready[op], time)
        waiting[op] -= 1
        if waiting[op] == 0:
            if fifo:
                heapq.heappush(events, (ready[op], _READY, position[op], op))
            else:
                begin_next(device[op])

    def transfer(tensor: int, source: int, targets: list[int], kind: int, now: float) -> float:
        line = bus[source][targets[0]]
        begins = max(now, bus_free[line])
        size = output_bytes[tensor]
        per_byte = (seconds_per_byte if kind == FETCH else sent_seconds_per_byte)[source]
        before = (sent_latency if kind == SEND else latency)[source]
        takes = max(before[target] + size * per_byte[target] for target in targets)
        bus_free[line] = begins + takes + bus_gap[line]
        transfers.extend(
            (tensor, source, target, kind, begins, begins + takes) for target in targets
        )
        return float(begins + takes)

    def fetch_ahead(d: int, now: float, only_for: int | None = None) -> None:
        while fetched[d] < len(copies[d]):
            copy = copies[d][fetched[d]]
            if only_for is not None and copy.users[0] != only_for:
                return
            if not all(finished[op] for old in copy.replaces for op in old.users):
                return
            fetched[d] += 1
            arrives = transfer(copy.parameter, device[copy.parameter], [d], FETCH, now)
            for op in copy.users:
                provide(op, arrives)

    if fifo:
        events = [(0.0, _READY, position[op], op) for op in order if waiting[op] == 0]
    for op in order:
        fetch_ahead(device[op], 0.0, only_for=op)
    if not fifo:
        for d in range(num_devices):
            begin_next(d)

    while events:
        now, event, _, op = heapq.heappop(events)
        if event == _READY:
            begin(op)
            continue
        finished[op] = True
        d = device[op]
        targets = sorted({device[consumer] for consumer in consumers[op]} - {d})
        arrives = {d: now}
        for group in (
            [targets] if cluster.broadcast and targets else [[target] for target in targets]
        ):
            arrives |= dict.fromkeys(group, transfer(op, d, group, SEND, now))
        for consumer in consumers[op]:
            provide(consumer, arrives[device[consumer]])
        if is_update[op]:
            for source in inputs[op]:
                if is_parameter[source] and device[source] != d:
                    transfer(source, d, [device[source]], HOME, now)
        fetch_ahead(d, now)

    assert all(finished[op] for op in order), (
        "every op runs: waits only ever point back in the dispatch order"
    )
    moves = [np.array(column) for column in zip(*transfers, strict=True)] or [np.zeros(0)] * 6
    found = Transfers(
        *(column.astype(np.int32) for column in moves[:4]), *(c.astype(float) for c in moves[4:])
    )
    starts = np.array(start)
    finishes = np.array(finish)
    account = memory.in_time_order if fifo else memory.in_dispatch_order
    track, peak = account(problem, placement, order, window, starts, finishes, found)
    return Timeline(
        step_time=max([*finish, *found.finish.tolist()]),
        peak_memory=peak,
        capacity=cluster.memory,
        num_transfers=len(found),
        device_names=cluster.device_names,
        op_names=graph.op_names,
        device=placement.device,
        start=starts,
        finish=finishes,
        transfers=found,
        memory=track,
    )
