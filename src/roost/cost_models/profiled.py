"""Time of an op: what it takes here, with tensors of its shapes. Ops that are alike are timed once,
and that is kept.

A device runs an op as the runtime would: a CPU with its threads in a thread of its own, on its own
cores where it is several devices; a GPU with a full queue. What an op takes includes the Python
call and the views it looks through. What cannot run is taken from the roofline, and counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import Cluster
from roost.core.costs import Costs
from roost.core.graph import INPUT, UPDATE, Graph
from roost.cost_models.roofline import Roofline
from roost.cost_models.timing.progress_log import Logged
from roost.errors import InputError
from roost.presets import machine, measurement_cache

if TYPE_CHECKING:
    from roost.cost_models.timing.timed_ops import Task, Work
    from roost.cost_models.timing.timers import Lane, Timer
    from roost.frontends.tracing.captured_step import CapturedStep

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # how many are timed, of how many
# Another number where times are taken in another way: what was kept before is no use then.
_METHOD = 5
_BESIDE, _BOTH_WAYS = "beside copies: ", "beside copies both ways: "
_BIG_WEIGHT = 2**20  # bytes
# Times what a unique op gets, for a step of a tenth of a second; more for longer ones.
_REPLAYS = 30
_LONG_STEP, _LONGEST_STEP = 2.0, 20.0  # seconds: replayed twice, and not at all
# Bytes of an op, and ops, that tell what a call costs in a row of others.
_SMALL, _FEW, _MANY = 2**16, 20, 200


def profile(
    step: CapturedStep,
    cluster: Cluster,
    *,
    cache: bool = True,
    seconds_each: float = 0.03,
    beside_copies: bool = True,
    launches: bool = True,
    progress: Progress | None = None,
) -> Costs:
    """The costs of a captured step on devices of this machine, timed there; see `Profiled`."""
    told = progress or Logged()
    settings = Profiled(
        step, beside_copies, launches, seconds_each=seconds_each, cache=cache, progress=told
    )
    return settings.estimate(step.graph, cluster)


def alone_on(cluster: Cluster, device: int, call: Callable[[Any], Any]) -> Any:
    """Call with the PyTorch device that a device of a cluster is here, in a thread as ops are timed
    in there."""
    from roost.cost_models.timing.timers import lanes

    lane = lanes(cluster)[device]
    if lane.device.type != "cpu":
        return call(lane.device)
    with machine.OwnThread(lane.threads, set(lane.cores or ()) or None) as thread:
        return thread(lambda: call(lane.device))


@dataclass(frozen=True)
class FallBack:
    """Ops that could not be timed on a device, and got the time of a roofline."""

    kind: str
    device: str
    num_ops: int
    why: str


@dataclass(frozen=True, eq=False)
class Profile:
    """What was found of a step, op by op."""

    costs: Costs
    alone: Array  # [ops, devices] seconds with nothing beside
    # [ops, devices] seconds; on CPUs of ops that read big weights, while a copy to a GPU runs.
    beside: Array
    num_signatures: int  # unique ops on unique devices
    num_timed: int  # of these now, the others before
    fallen_back: tuple[FallBack, ...]


@dataclass(frozen=True)
class Profiled:
    """Times the ops of a captured step on the devices of this machine."""

    step: CapturedStep | None = None
    # A copy from the host's memory to a GPU takes bandwidth from ops of the CPU that read big
    # weights: for one token linear layers in bfloat16 were seen to read 70 GB/s alone and 39 GB/s
    # beside a copy, which lost nothing. A placement that computes on the CPU while it streams to
    # the GPU has copies running nearly all the time.
    beside_copies: bool = True
    # One Python thread launches the ops of a GPU ahead of it. In a queue that is full an op takes
    # its time on the GPU; where ops are shorter than their launches the queue runs dry, and they
    # take the host's time. Which of the two depends on what comes before, so an op takes what it
    # adds to a step that is all on the GPU, in the order of the program (the longer of the two for
    # each op was 22 % too much for a GPT-2 of 1.6 billion weights). Set to False where the host has
    # time enough, or launches are captured (CUDA graphs): the GPU's time alone.
    launches: bool = True
    # What an op takes on a CPU among the others of its step: of small ops much is missed by timing
    # each of them again and again, with its code and operands in a cache. Off: it was right for one
    # CPU, not shown to be better for two devices (benchmarks/fidelity.py), and a step of a large
    # model on a CPU is long. Launches on GPUs are always timed in their step, where there is room
    # for it: with both timed so, predictions were nearer on all three models that were tried beside
    # a GPU.
    in_step: bool = False
    seconds_each: float = 0.03  # for each unique op; at least three calls
    most_seconds: float = 20.0  # what takes longer by the roofline is not tried
    cache: bool = True  # use what is kept of before, and keep what is found
    refresh: bool = False  # use nothing of before
    progress: Progress | None = field(default=None, repr=False)

    def estimate(self, graph: Graph, cluster: Cluster) -> Costs:
        return self.profile(graph, cluster).costs

    def profile(self, graph: Graph, cluster: Cluster) -> Profile:
        """The costs, and what there is to say of them."""
        if self.step is None:
            raise InputError(
                "profiled costs need the captured step, not its graph alone: roost.profile(step, "
                "cluster)"
            )
        if graph.digest != self.step.graph.digest:
            raise InputError(
                f"the graph is {graph.digest}, the captured step is {self.step.graph.digest}"
            )
        return _Run(self, self.step, cluster).found()


class _Run:
    """Times what is not known yet, and puts together what is."""

    def __init__(self, settings: Profiled, step: CapturedStep, cluster: Cluster) -> None:
        from roost.cost_models.timing import timed_ops, timers

        self.settings, self.step, self.graph, self.cluster = settings, step, step.graph, cluster
        self.lanes = timers.lanes(cluster)
        self.tasks: list[Task] = list(timed_ops.tasks(step))
        self.inputs: list[Task] = list(timed_ops.inputs(step))  # which take time on GPUs
        # New values of parameters go back to the host, while others come from there.
        self.copies = _BOTH_WAYS if (step.graph.phase == UPDATE).any() else _BESIDE
        self.gpu = next((lane.device for lane in self.lanes if lane.device.type == "cuda"), None)
        self.rough = Roofline().estimate(step.graph, cluster).op_time
        self.key = {name: value for name, value in machine.hardware().items() if name != "threads"}
        self.key |= {"method": _METHOD}
        self.times: dict[str, tuple[float, float]] = {}
        self.failed: dict[str, str] = {}

    def found(self) -> Profile:
        self.times = {} if self.settings.refresh else self._kept()
        before, wanted = dict(self.times), list(self._wanted())
        missing = [
            (lane, work, beside)
            for lane, work, beside in wanted
            if self._key(lane, work, beside) not in self.times
        ]
        try:
            self._time(missing)
            self._time_rows()
        finally:
            if self.settings.cache and self.times != before:
                measurement_cache.write("profile", self.key, {**self._kept(), **self.times})
        replays = self._replays()
        alone, beside = self._op_times(False, replays), self._op_times(True, replays)
        fallen = self._fallen_back()
        op_time = beside if self.settings.beside_copies else alone
        count = sum(each.num_ops for each in fallen)
        source = f"profiled; {count} of {op_time.size} by roofline" if count else "profiled"
        return Profile(Costs(op_time, source), alone, beside, len(wanted), len(missing), fallen)

    # ------------------------------------------------------------------ what to time

    def _wanted(self) -> Iterator[tuple[Lane, Work, bool]]:
        """Each work once for each kind of device, those beside copies at the end."""
        lanes = {lane.hardware: lane for lane in self.lanes}
        works = {work.signature: work for task in self.tasks for work in (task.work, *task.views)}
        heavy = dict.fromkeys(
            task.work.signature for task in self.tasks if task.work.weight_bytes >= _BIG_WEIGHT
        )
        for beside in (False, True):
            for lane in lanes.values():
                if not beside:
                    yield from ((lane, work, beside) for work in works.values())
                    if lane.device.type == "cuda":
                        given = {task.work.signature: task.work for task in self.inputs}
                        yield from ((lane, work, beside) for work in given.values())
                elif self.gpu is not None and lane.device.type == "cpu":
                    yield from ((lane, works[signature], beside) for signature in heavy)

    def _key(self, lane: Lane, work: Work, beside: bool) -> str:
        return f"{self.copies if beside else ''}{lane.hardware}: {work.signature}"

    def _kept(self) -> dict[str, tuple[float, float]]:
        """What was timed before, on this hardware; whatever in the file is no pair of times is
        passed over."""
        if not self.settings.cache:
            return {}
        return {
            name: (pair[0], pair[1])
            for name, pair in measurement_cache.read("profile", self.key).items()
            if _is_pair(pair)
        }

    # ------------------------------------------------------------------ timing

    def _time(self, missing: Sequence[tuple[Lane, Work, bool]]) -> None:
        from roost.cost_models.timing.timers import CopiesBeside, Timer

        done = 0
        for lane, beside in dict.fromkeys((lane, beside) for lane, _, beside in missing):
            mine = [
                work
                for each, work, with_copies in missing
                if each == lane and with_copies == beside
            ]
            guess = self._guesses(lane)
            # Beside copies calls take now more and now less, and in a step they take what they take
            # on average.
            with Timer(lane, self.settings.seconds_each, 0.5 if beside else 0.25) as timer:
                if beside:
                    assert self.gpu is not None
                    try:
                        with CopiesBeside(self.gpu, self.copies == _BOTH_WAYS):
                            done = self._each(timer, mine, beside, guess, done, len(missing))
                    except RuntimeError as error:  # no pinned memory to be had
                        self.failed |= {
                            self._key(lane, work, beside): _line(error) for work in mine
                        }
                else:
                    done = self._each(timer, mine, beside, guess, done, len(missing))

    def _each(
        self,
        timer: Timer,
        works: Sequence[Work],
        beside: bool,
        guess: Mapping[str, float],
        done: int,
        total: int,
    ) -> int:
        for work in works:
            key = self._key(timer.lane, work, beside)
            try:
                if guess.get(work.signature, 0.0) > self.settings.most_seconds:
                    raise TimeoutError(f"would take {guess[work.signature]:.0f} s by the roofline")
                self.times[key] = timer.time(work)
            except Exception as error:  # of any op, on any device: there is the roofline
                self.failed[key] = _line(error)
            done += 1
            if self.settings.progress is not None:
                self.settings.progress(done, total)
        return done

    def _time_rows(self) -> None:
        """What a call takes more among others than by itself, again and again: its code comes from
        no cache then."""
        from roost.cost_models.timing.timers import Timer

        works = {work.signature: work for task in self.tasks for work in (task.work, *task.views)}
        small = [work for work in works.values() if work.num_bytes + work.made_bytes <= _SMALL][
            :_MANY
        ]
        for lane in {lane.hardware: lane for lane in self.lanes}.values():
            mine = [work for work in small if self._key(lane, work, False) in self.times]
            if _row(lane) in self.times or len(mine) < _FEW:
                continue
            alone = sum(self.times[self._key(lane, work, False)][_host(lane)] for work in mine)
            with Timer(lane, self.settings.seconds_each) as timer:
                more = (timer.in_a_row(mine) - alone) / len(mine)
            self.times[_row(lane)] = (max(more, 1e-9), 0.0)

    def _replays(self) -> dict[str, list[float]]:
        """By hardware, the seconds of the host for each op in a whole step, where there is room and
        time for that."""
        if not self.settings.in_step and (self.gpu is None or not self.settings.launches):
            return {}
        kept = measurement_cache.read("steps", self.key) if self.settings.cache else {}
        found: dict[str, list[float]] = {}
        for lane in {lane.hardware: lane for lane in self.lanes}.values():
            if not (self.settings.in_step if lane.device.type == "cpu" else self.settings.launches):
                continue
            name = f"{lane.hardware}: {self.graph.digest}"
            known = not self.settings.refresh and _is_row(kept.get(name), self.graph.num_ops)
            times = kept[name] if known else self._replay(lane)
            if times is not None:
                found[lane.hardware] = kept[name] = times
        if self.settings.cache and found:
            measurement_cache.write("steps", self.key, kept)
        return found

    def _replay(self, lane: Lane) -> list[float] | None:
        from roost.cost_models.timing.timers import Timer
        from roost.cost_models.timing.whole_step import replayed

        pairs = [self._of(lane, task.work, False) for task in self.tasks]
        about = sum(pair[0] for pair in pairs if pair is not None)
        room = machine.available_memory() // 2
        if lane.device.type == "cuda":
            room = machine.gpu_memory(lane.device.index) // 2
        if (
            None in pairs
            or about > _LONGEST_STEP
            or self.graph.output_bytes.sum(dtype=float) > room
        ):
            return None
        seconds = (
            _REPLAYS * self.settings.seconds_each * max(1.0, about / 0.1)
            if about < _LONG_STEP
            else 0.0
        )
        with Timer(lane, self.settings.seconds_each) as timer:
            try:
                least = 3 if about < _LONG_STEP else 1
                times: list[float] = timer.alone(
                    lambda: replayed(
                        self.step, min(seconds, _LONGEST_STEP), least, device=lane.device
                    )
                )
                return times
            except Exception as error:  # of any op: there are the times of each by itself
                _log.debug("a step cannot be replayed on %s: %s", lane.hardware, _line(error))
                return None

    def _guesses(self, lane: Lane) -> dict[str, float]:
        column = self.lanes.index(lane)
        return {task.work.signature: float(self.rough[task.op, column]) for task in self.tasks}

    # ------------------------------------------------------------------ putting together

    def _op_times(self, beside: bool, replays: Mapping[str, list[float]]) -> Array:
        op_time = np.zeros((self.graph.num_ops, len(self.lanes)))
        for column, lane in enumerate(self.lanes):
            # Where that is apart from the time of the device.
            host_time = np.zeros(self.graph.num_ops)
            for task in (*self.tasks, *(self.inputs if lane.device.type == "cuda" else ())):
                found = self._of(lane, task.work, beside)
                if found is None:
                    op_time[task.op, column] = self.rough[task.op, column]
                    continue
                pairs = [
                    found,
                    *(self._of(lane, view, beside) or (0.0, 0.0) for view in task.views),
                ]
                if lane.hardware in replays and lane.device.type == "cpu":
                    # Beside copies.
                    slower = found[0] / (self._of(lane, task.work, False) or found)[0]
                    op_time[task.op, column] = replays[lane.hardware][task.op] * slower
                    continue
                # Of the device, of the host.
                seconds = [sum(times) for times in zip(*pairs, strict=True)]
                seconds[_host(lane)] += len(pairs) * self.times.get(_row(lane), (0.0, 0.0))[0]
                op_time[task.op, column], host_time[task.op] = seconds
                # Which were there when replayed.
                if lane.hardware in replays and self.graph.phase[task.op] != INPUT:
                    host_time[task.op] = replays[lane.hardware][task.op]
            if self.settings.launches and host_time.any():
                op_time[:, column] = launched(op_time[:, column], host_time)
        return op_time

    def _of(self, lane: Lane, work: Work, beside: bool) -> tuple[float, float] | None:
        """Beside copies where that was timed, else alone."""
        alone = self.times.get(self._key(lane, work, False))
        return self.times.get(self._key(lane, work, True), alone) if beside else alone

    def _fallen_back(self) -> tuple[FallBack, ...]:
        count: Counter[tuple[str, str, str]] = Counter()
        for name, lane in zip(self.cluster.device_names, self.lanes, strict=True):
            for task in self.tasks:
                key = self._key(lane, task.work, False)
                if key not in self.times:
                    count[self.graph.kinds[task.op], name, self.failed.get(key, "")] += 1
        return tuple(
            FallBack(kind, device, number, why) for (kind, device, why), number in count.items()
        )


def launched(device_time: Array, host_time: Array) -> Array:
    """What each op adds to a step in which the host launches them one by one, ahead of the device
    where it can."""
    added = np.empty_like(device_time)
    done = told = 0.0
    for op, (device, host) in enumerate(zip(device_time.tolist(), host_time.tolist(), strict=True)):
        told += host
        end = max(done, told) + device if device or host else done
        added[op], done = end - done, end
    return added


def _row(lane: Lane) -> str:
    return f"{lane.hardware}: a call in a row"


def _host(lane: Lane) -> int:
    """Which of the two times a call of Python is part of: on a CPU there is one time for both."""
    return 0 if lane.device.type == "cpu" else 1


def _is_row(row: Any, length: int) -> bool:
    return (
        isinstance(row, list)
        and len(row) == length
        and all(isinstance(x, float) and 0 <= x < 1e6 for x in row)
    )


def _is_pair(pair: Any) -> bool:
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    return all(isinstance(each, float) and 0 <= each < 1e6 for each in pair) and max(pair) > 0


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".strip(": ")
