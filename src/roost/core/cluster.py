"""The cluster: devices and the links between them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property

import numpy as np

from roost.core.arrays import Array
from roost.core.saved import Saved
from roost.errors import InputError, UnknownName

MOST_DEVICES = 64  # the compiled simulator has one bit for each target of a send
# Larger than any machine. Sums of larger numbers would overflow.
MOST_BYTES = 2**60
MOST_SECONDS = 1e15
MEMORY = "memory"  # kind of a device that holds and never computes


@dataclass(frozen=True)
class Device:
    """A processor with its own memory."""

    name: str
    kind: str  # "cpu", "cuda": what an op's `allowed` speaks of
    memory: int  # bytes
    host: str = "host"
    peak: Mapping[str, float] = field(default_factory=dict)  # dtype -> FLOP/s
    memory_bandwidth: float = 0.0  # bytes/s
    # Class of op -> share of the peak it reaches.
    efficiency: Mapping[str, float] = field(default_factory=dict)
    launch_overhead: float = 0.0  # seconds added to each op by the cost model
    gap: float = 0.0  # seconds the device stays busy after an op that took any time
    figures_from: str = ""  # where they were found or measured

    def __post_init__(self) -> None:
        if not self.name or not self.kind:
            raise InputError(f"device {self.name!r} of kind {self.kind!r} needs a name and a kind")
        where = f"device {self.name!r}"
        for what in ("memory", "memory_bandwidth"):
            _check(getattr(self, what), f"{what} of {where}")
        for what in ("launch_overhead", "gap"):
            _check_seconds(getattr(self, what), f"{what} of {where}")
        if not isinstance(self.memory, int) or self.memory > MOST_BYTES:
            raise InputError(
                f"memory of {where} is {self.memory}; it must be whole bytes, at most 2**60"
            )
        for dtype, rate in self.peak.items():
            _check(rate, f"peak.{dtype} of {where}")
        for kind, share in self.efficiency.items():
            if not 0 < share <= 1:
                raise InputError(
                    f"efficiency.{kind} of {where} is {share}; it must be above 0, at most 1"
                )


@dataclass(frozen=True)
class Link:
    """A rule for the connections from some devices to others. The last rule for a pair counts.

    `source` and `target` are device names, or patterns such as `cuda:*` and `cuda:[0-3]`. All links
    with the same bus carry one transfer at a time. The name of a bus may contain `{source}`,
    `{target}`, `{source_host}` and `{target_host}`. By default each directed pair has its own bus.
    """

    source: str
    target: str
    bandwidth: float  # bytes/s
    latency: float = 0.0  # seconds
    both_ways: bool = True
    bus: str = "{source}->{target}"
    gap: float = 0.0  # seconds the bus stays busy after a transfer
    figures_from: str = ""  # where they were found or measured
    # Bytes/s of a new tensor (one that is sent, or goes home), if it is slower than a fetch: it may
    # be copied on the way, or still lie in caches. 0: as fast.
    send_bandwidth: float = 0.0
    # Seconds before the first byte of a tensor that is sent, if that is more than the latency: the
    # other side may wait for it. 0: the latency.
    send_latency: float = 0.0
    # Seconds of one transfer during which the sender or receiver cannot compute (the overhead of
    # LogP): the sender after the op that made the tensor, the receiver before the op that reads it.
    sender_busy: float = 0.0
    receiver_busy: float = 0.0

    def __post_init__(self) -> None:
        where = f"link {self.source!r} to {self.target!r}"
        for what in ("bandwidth", "send_bandwidth"):
            _check(getattr(self, what), f"{what} of {where}")
        for what in ("latency", "gap", "send_latency", "sender_busy", "receiver_busy"):
            _check_seconds(getattr(self, what), f"{what} of {where}")
        if self.bandwidth == 0:
            raise InputError(f"bandwidth of {where} must be above zero")
        for rate, verb in ((self.bandwidth, "a byte"), (self.send_bandwidth, "a byte sent")):
            if rate:
                _check_seconds(1.0 / max(rate, 1e-300), f"{verb} over {where}")
        if self.send_bandwidth > self.bandwidth:
            rates = f"{self.send_bandwidth:g} B/s, is above its bandwidth, {self.bandwidth:g} B/s"
            raise InputError(
                f"send_bandwidth of {where}, {rates}; give the higher of them as bandwidth"
            )
        if 0.0 < self.send_latency < self.latency:
            both = f"{self.send_latency:g} s, is below its latency, {self.latency:g} s"
            raise InputError(f"send_latency of {where}, {both}; give the lower of them as latency")

    def joins(self, source: str, target: str) -> bool:
        forward = _matches(source, self.source) and _matches(target, self.target)
        return forward or (
            self.both_ways and _matches(source, self.target) and _matches(target, self.source)
        )


@dataclass(frozen=True, eq=False)
class Cluster(Saved):
    """Devices, the links between them, and how tensors travel."""

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    description: str = ""
    broadcast: bool = False  # one copy of a tensor serves every device that needs it
    copies_in_memory: bool = True  # received copies of tensors take memory

    def __post_init__(self) -> None:
        if not self.devices:
            raise InputError(f"cluster {self.name!r} has no devices; add at least one")
        if len(self.devices) > MOST_DEVICES:
            count = len(self.devices)
            raise InputError(
                f"cluster {self.name!r} has {count} devices; the limit is {MOST_DEVICES}"
            )
        names = self.device_names
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"two devices of cluster {self.name!r} are called {twice!r}")
        for link in self.links:
            for end in (link.source, link.target):
                if not any(_matches(name, end) for name in names):
                    raise UnknownName(f"device (for a link of cluster {self.name!r})", end, names)
        _ = self._rules  # every pair is joined
        if self.broadcast:
            self._check_broadcast()

    def _check_broadcast(self) -> None:
        for row in range(self.num_devices):
            pairs = [column for column in range(self.num_devices) if column != row]
            if len({int(self.bus[row, column]) for column in pairs}) > 1:
                raise InputError(
                    f"cluster {self.name!r} has broadcast = true, so all links from "
                    f"{self.device_names[row]!r} must share a bus; set bus = '{{source}}'"
                )

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.devices)

    def index_of(self, device_name: str) -> int:
        """The index of a device; raises UnknownName with the nearest."""
        try:
            return self.device_names.index(device_name)
        except ValueError:
            raise UnknownName(
                f"device of cluster {self.name!r}", device_name, self.device_names
            ) from None

    @cached_property
    def _rules(self) -> dict[tuple[int, int], Link]:
        rules = {}
        for i, source in enumerate(self.device_names):
            for j, target in enumerate(self.device_names):
                if i == j:
                    continue
                joining = [link for link in self.links if link.joins(source, target)]
                if not joining:
                    missing = f"no link from {source!r} to {target!r}"
                    raise InputError(f"cluster {self.name!r} has {missing}; add one to links")
                rules[i, j] = joining[-1]
        return rules

    def _matrix(self, attribute: str) -> Array:
        matrix = np.zeros((self.num_devices, self.num_devices))
        for pair, link in self._rules.items():
            matrix[pair] = getattr(link, attribute)
        return _fixed(matrix)

    @cached_property
    def memory(self) -> Array:  # [devices] bytes
        return _fixed(np.array([device.memory for device in self.devices], dtype=np.int64))

    @cached_property
    def latency(self) -> Array:  # [devices, devices] seconds
        return self._matrix("latency")

    @cached_property
    def sent_latency(self) -> Array:  # [devices, devices] seconds, of tensors that are sent
        return _fixed(np.maximum(self.latency, self._matrix("send_latency")))

    @cached_property
    def seconds_per_byte(self) -> Array:  # [devices, devices] 0 on the diagonal
        bandwidth = self._matrix("bandwidth")
        return _fixed(np.divide(1.0, bandwidth, out=np.zeros_like(bandwidth), where=bandwidth > 0))

    @cached_property
    def sent_seconds_per_byte(self) -> Array:  # [devices, devices] of new tensors
        bandwidth = self._matrix("send_bandwidth")
        return _fixed(
            np.divide(1.0, bandwidth, out=self.seconds_per_byte.copy(), where=bandwidth > 0)
        )

    @cached_property
    def sender_busy(self) -> Array:  # [devices, devices] seconds of the sender for each tensor
        return self._matrix("sender_busy")

    @cached_property
    def receiver_busy(self) -> Array:  # [devices, devices] seconds of the receiver for each tensor
        return self._matrix("receiver_busy")

    @cached_property
    def keeps_busy(self) -> bool:
        """True if a transfer keeps any device from computing."""
        return bool(self.sender_busy.any() or self.receiver_busy.any())

    @cached_property
    def bus_names(self) -> tuple[str, ...]:  # [buses]
        return tuple(dict.fromkeys(self._bus_name(pair) for pair in self._rules))

    @cached_property
    def bus(self) -> Array:  # [devices, devices] index in bus_names; 0 on the diagonal
        matrix = np.zeros((self.num_devices, self.num_devices), dtype=np.int32)
        number = {name: index for index, name in enumerate(self.bus_names)}
        for pair in self._rules:
            matrix[pair] = number[self._bus_name(pair)]
        return _fixed(matrix)

    @cached_property
    def bus_gap(self) -> Array:  # [buses] seconds; the longest among the links on it
        gap = np.zeros(max(1, len(self.bus_names)))
        for pair, link in self._rules.items():
            gap[self.bus[pair]] = max(gap[self.bus[pair]], link.gap)
        return _fixed(gap)

    @cached_property
    def device_gap(self) -> Array:  # [devices] seconds
        return _fixed(np.array([device.gap for device in self.devices]))

    @cached_property
    def has_shared_buses(self) -> bool:
        """True if two devices send over one bus: then the order of sending depends on time."""
        senders: dict[int, set[int]] = {}
        for source, target in self._rules:
            senders.setdefault(int(self.bus[source, target]), set()).add(source)
        return any(len(sources) > 1 for sources in senders.values())

    def _bus_name(self, pair: tuple[int, int]) -> str:
        source = self.devices[pair[0]]
        target = self.devices[pair[1]]
        filled = {
            "{source}": source.name,
            "{target}": target.name,
            "{source_host}": source.host,
            "{target_host}": target.host,
        }
        # Not str.format: it would give a text from a file access to attributes.
        return re.sub(
            "|".join(map(re.escape, filled)), lambda found: filled[found[0]], self._rules[pair].bus
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cluster) and self._key == other._key

    def __hash__(self) -> int:
        return hash((self.name, self.device_names))

    @property
    def _key(self) -> tuple[object, ...]:
        return (
            self.name,
            self.description,
            self.devices,
            self.links,
            self.broadcast,
            self.copies_in_memory,
        )

    def __repr__(self) -> str:
        return f"Cluster({self.name!r}, {', '.join(self.device_names)})"


def _fixed(array: Array) -> Array:
    array.flags.writeable = False
    return array


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def _check_seconds(value: float, what: str) -> None:
    _check(value, what)
    if value > MOST_SECONDS:
        raise InputError(f"{what} takes {value} s; the limit is {MOST_SECONDS:.0e} s")


def _check(value: float, what: str) -> None:
    if not math.isfinite(value) or value < 0:
        raise InputError(f"{what} is {value}; it must be finite and not negative")
