"""The profiler: it times the ops of a captured step, keeps the times, and adds them up.

`profiled` holds its settings and calls it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import Cluster
from roost.core.costs import Costs
from roost.core.graph import INPUT, UPDATE
from roost.cost_models.roofline import Roofline
from roost.cost_models.timing import timers, whole_step
from roost.cost_models.timing.profile import FallBack, Profile
from roost.cost_models.timing.timed_ops import TimedCall, TimedOp, timed_inputs, timed_ops
from roost.frontends.tracing.captured_step import CapturedStep
from roost.presets import machine, measurement_cache

if TYPE_CHECKING:
    from roost.cost_models.profiled import Profiled

_log = logging.getLogger(__name__)

_METHOD = 5  # another number for another way of timing, which makes the kept times useless
_BESIDE = "beside copies: "
_BOTH_WAYS = "beside copies both ways: "
_BIG_WEIGHT = 2**20  # bytes
# A whole step of a tenth of a second gets the time of so many ops; a longer step gets more.
_REPLAYS = 30
_LONG_STEP, _LONGEST_STEP = 2.0, 20.0  # seconds: replayed twice, and not at all
# The cost of a call among others is measured on so many ops of at most so many bytes.
_SMALL = 2**16
_FEW = 20
_MANY = 200


class _Times(NamedTuple):
    """The seconds of one call."""

    device: float
    host: float  # to launch it; 0 on a CPU, where the device's time includes it

    def slowed(self, device: timers.TimedDevice, seconds: float) -> _Times:
        """The times with a Python call that takes longer."""
        if device.is_cpu:
            return _Times(self.device + seconds, self.host)
        return _Times(self.device, self.host + seconds)


class _Measurement(NamedTuple):
    """A call to be timed on a device, alone or beside copies."""

    device: timers.TimedDevice
    call: TimedCall
    beside: bool


class Profiler:
    """Times the ops whose times are not kept, and puts all times together."""

    def __init__(self, settings: Profiled, step: CapturedStep, cluster: Cluster) -> None:
        self.settings = settings
        self.step = step
        self.graph = step.graph
        self.cluster = cluster
        self.devices = timers.timed_devices(cluster)
        # Devices of the same hardware are timed once.
        self.unique_devices = list({each.hardware: each for each in self.devices}.values())
        self.ops: list[TimedOp] = list(timed_ops(step))
        self.inputs: list[TimedOp] = list(timed_inputs(step))  # take time on GPUs only
        calls = (call for op in self.ops for call in (op.call, *op.views))
        self.calls = {call.signature: call for call in calls}
        # New values of parameters go back to the host while others come from there.
        self.copies = _BOTH_WAYS if (step.graph.phase == UPDATE).any() else _BESIDE
        self.gpu = next((each.device for each in self.devices if not each.is_cpu), None)
        self.rough = Roofline().estimate(step.graph, cluster).op_time
        self.key = {name: value for name, value in machine.hardware().items() if name != "threads"}
        self.key |= {"method": _METHOD}
        self.times: dict[str, _Times] = {}
        self.failed: dict[str, str] = {}

    def profile(self) -> Profile:
        self.times = {} if self.settings.refresh else self._kept()
        before = dict(self.times)
        wanted = list(self._wanted())
        missing = [each for each in wanted if self._key(*each) not in self.times]
        try:
            self._time(missing)
            self._time_rows()
        finally:
            if self.settings.cache and self.times != before:
                measurement_cache.write("profile", self.key, {**self._kept(), **self.times})
        replays = self._replays()
        alone = self._op_times(False, replays)
        beside = self._op_times(True, replays)
        fallen = self._fallen_back()
        op_time = beside if self.settings.beside_copies else alone
        count = sum(each.num_ops for each in fallen)
        source = f"profiled; {count} of {op_time.size} by roofline" if count else "profiled"
        return Profile(Costs(op_time, source), alone, beside, len(wanted), len(missing), fallen)

    # ------------------------------------------------------------------ what to time

    def _wanted(self) -> Iterator[_Measurement]:
        """Each call once for each kind of device, those beside copies at the end."""
        inputs = {op.call.signature: op.call for op in self.inputs}
        for device in self.unique_devices:
            calls = [*self.calls.values(), *(() if device.is_cpu else inputs.values())]
            yield from (_Measurement(device, call, False) for call in calls)
        if self.gpu is None:
            return
        heavy = (op.call for op in self.ops if op.call.weight_bytes >= _BIG_WEIGHT)
        signatures = dict.fromkeys(call.signature for call in heavy)
        for device in self.unique_devices:
            if device.is_cpu:
                yield from (_Measurement(device, self.calls[each], True) for each in signatures)

    def _key(self, device: timers.TimedDevice, call: TimedCall, beside: bool) -> str:
        return f"{self.copies if beside else ''}{device.hardware}: {call.signature}"

    def _kept(self) -> dict[str, _Times]:
        """The times kept for this hardware; damaged entries of the file are ignored."""
        if not self.settings.cache:
            return {}
        entries = measurement_cache.read("profile", self.key).items()
        return {name: _Times(*pair) for name, pair in entries if _is_pair(pair)}

    # ------------------------------------------------------------------ timing

    def _time(self, missing: Sequence[_Measurement]) -> None:
        done = 0
        for device, beside in dict.fromkeys((each.device, each.beside) for each in missing):
            calls = [
                each.call for each in missing if (each.device, each.beside) == (device, beside)
            ]
            # Beside copies the times of a call vary, and a step takes the average.
            with timers.Timer(device, self.settings.seconds_each, 0.5 if beside else 0.25) as timer:
                if not beside:
                    done = self._time_calls(timer, calls, beside, done, len(missing))
                    continue
                assert self.gpu is not None
                try:
                    with timers.CopiesBeside(self.gpu, self.copies == _BOTH_WAYS):
                        done = self._time_calls(timer, calls, beside, done, len(missing))
                except RuntimeError as error:  # no pinned memory
                    keys = (self._key(device, call, beside) for call in calls)
                    self.failed |= dict.fromkeys(keys, _line(error))

    def _time_calls(
        self, timer: timers.Timer, calls: Sequence[TimedCall], beside: bool, done: int, total: int
    ) -> int:
        """Time calls one by one; return the number of those done so far."""
        column = self.devices.index(timer.timed)
        guesses = {op.call.signature: float(self.rough[op.op, column]) for op in self.ops}
        for call in calls:
            key = self._key(timer.timed, call, beside)
            guess = guesses.get(call.signature, 0.0)
            try:
                if guess > self.settings.most_seconds:
                    raise TimeoutError(f"would take {guess:.0f} s by the roofline")
                self.times[key] = _Times(*timer.time(call))
            except Exception as error:  # any op may fail on any device; the roofline replaces it
                self.failed[key] = _line(error)
            done += 1
            if self.settings.progress is not None:
                self.settings.progress(done, total)
        return done

    def _time_rows(self) -> None:
        """Time the extra seconds of a call among others, whose code is in no cache."""
        calls = self.calls.values()
        small = [call for call in calls if call.num_bytes + call.made_bytes <= _SMALL][:_MANY]
        for device in self.unique_devices:
            timed = [call for call in small if self._key(device, call, False) in self.times]
            if _row(device) in self.times or len(timed) < _FEW:
                continue
            times = [self.times[self._key(device, call, False)] for call in timed]
            alone = sum(each.device if device.is_cpu else each.host for each in times)
            with timers.Timer(device, self.settings.seconds_each) as timer:
                more = (timer.in_a_row(timed) - alone) / len(timed)
            self.times[_row(device)] = _Times(max(more, 1e-9), 0.0)

    def _replays(self) -> dict[str, list[float]]:
        """Hardware -> host seconds of each op in a whole step, if memory and time allow."""
        if not self.settings.in_step and (self.gpu is None or not self.settings.launches):
            return {}
        kept = measurement_cache.read("steps", self.key) if self.settings.cache else {}
        replays: dict[str, list[float]] = {}
        for device in self.unique_devices:
            if not (self.settings.in_step if device.is_cpu else self.settings.launches):
                continue
            name = f"{device.hardware}: {self.graph.digest}"
            known = not self.settings.refresh and _is_row(kept.get(name), self.graph.num_ops)
            times = kept[name] if known else self._replay(device)
            if times is not None:
                replays[device.hardware] = kept[name] = times
        if self.settings.cache and replays:
            measurement_cache.write("steps", self.key, kept)
        return replays

    def _replay(self, device: timers.TimedDevice) -> list[float] | None:
        """Host seconds of each op in a whole step; None if the step is too large or fails."""
        times = [self._times_of(device, op.call, False) for op in self.ops]
        guess = sum(each.device for each in times if each is not None)
        room = machine.available_memory()
        if not device.is_cpu:
            room = machine.gpu_memory(device.device.index)
        too_large = self.graph.output_bytes.sum(dtype=float) > room // 2
        if None in times or guess > _LONGEST_STEP or too_large:
            return None
        least = 1
        seconds = 0.0
        if guess < _LONG_STEP:
            least = 3
            seconds = _REPLAYS * self.settings.seconds_each * max(1.0, guess / 0.1)
        with timers.Timer(device, self.settings.seconds_each) as timer:
            try:
                op_seconds: list[float] = timer.alone(
                    lambda: whole_step.replayed(
                        self.step, min(seconds, _LONGEST_STEP), least, device=device.device
                    )
                )
                return op_seconds
            except Exception as error:  # any op may fail; each has a time of its own
                _log.debug("a step cannot be replayed on %s: %s", device.hardware, _line(error))
                return None

    # ------------------------------------------------------------------ putting together

    def _op_times(self, beside: bool, replays: Mapping[str, list[float]]) -> Array:
        op_time = np.zeros((self.graph.num_ops, len(self.devices)))
        behind = _behind(self.cluster, self.devices)
        for column, device in enumerate(self.devices):
            replay = replays.get(device.hardware)
            host_time = np.zeros(self.graph.num_ops)  # of launches
            for op in (*self.ops, *(() if device.is_cpu else self.inputs)):
                times = self._times_of(device, op.call, beside)
                if times is None:
                    op_time[op.op, column] = self.rough[op.op, column] / behind[column]
                elif replay is not None and device.is_cpu:
                    slower = times.device / (self._times_of(device, op.call, False) or times).device
                    op_time[op.op, column] = replay[op.op] * slower
                else:
                    views = (self._times_of(device, view, beside) for view in op.views)
                    whole = self._with_views(device, times, list(views))
                    op_time[op.op, column], host_time[op.op] = whole
                    if replay is not None and self.graph.phase[op.op] != INPUT:
                        host_time[op.op] = replay[op.op]
            if self.settings.launches and host_time.any():
                op_time[:, column] = launched(op_time[:, column], host_time)
        return op_time * behind

    def _with_views(
        self, device: timers.TimedDevice, times: _Times, views: Sequence[_Times | None]
    ) -> _Times:
        """The times of an op with its views, each called among others."""
        known = [times, *(view or _Times(0.0, 0.0) for view in views)]
        whole = _Times(sum(each.device for each in known), sum(each.host for each in known))
        extra = self.times.get(_row(device), _Times(0.0, 0.0)).device
        return whole.slowed(device, len(known) * extra)

    def _times_of(self, device: timers.TimedDevice, call: TimedCall, beside: bool) -> _Times | None:
        """The times beside copies if they were measured, else alone."""
        alone = self.times.get(self._key(device, call, False))
        return self.times.get(self._key(device, call, True), alone) if beside else alone

    def _fallen_back(self) -> tuple[FallBack, ...]:
        count: Counter[tuple[str, str, str]] = Counter()
        for name, device in zip(self.cluster.device_names, self.devices, strict=True):
            for op in self.ops:
                key = self._key(device, op.call, False)
                if key not in self.times:
                    count[self.graph.kinds[op.op], name, self.failed.get(key, "")] += 1
        return tuple(
            FallBack(kind, device, number, why) for (kind, device, why), number in count.items()
        )


def launched(device_time: Array, host_time: Array) -> Array:
    """The time that each op adds to a step whose ops the host launches ahead of the device."""
    added = np.empty_like(device_time)
    done = launch_end = 0.0
    for op, (device, host) in enumerate(zip(device_time.tolist(), host_time.tolist(), strict=True)):
        launch_end += host
        end = max(done, launch_end) + device if device or host else done
        added[op] = end - done
        done = end
    return added


def _behind(cluster: Cluster, devices: Sequence[timers.TimedDevice]) -> list[float]:
    """How much slower each device is than the fastest of its hardware, by the cluster's peaks.

    Such a device has only a part of its cores, since other programs run there too. Timing cannot
    tell: the shortest calls are those that no other program held up.
    """
    peaks = [device.peak.get("float32", 0.0) for device in cluster.devices]
    best: dict[str, float] = {}
    for timed, peak in zip(devices, peaks, strict=True):
        best[timed.hardware] = max(peak, best.get(timed.hardware, 0.0))
    pairs = zip(devices, peaks, strict=True)
    return [best[timed.hardware] / peak if peak else 1.0 for timed, peak in pairs]


def _row(device: timers.TimedDevice) -> str:
    return f"{device.hardware}: a call in a row"


def _is_row(row: Any, length: int) -> bool:
    return isinstance(row, list) and len(row) == length and all(map(_is_seconds, row))


def _is_pair(pair: Any) -> bool:
    return _is_row(pair, 2) and max(pair) > 0


def _is_seconds(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value < 1e6


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".strip(": ")
