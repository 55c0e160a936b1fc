"""Placements for inference with weights that do not fit: kept, streamed, or used by the host.

A link that brings weights and a host that computes beside it work at the same time when both always
have something to do. So each placement is made in one pass through the program with a clock. Where
the link is ahead, a weight is streamed. Where the main device would have to wait for it, the host
computes, and meanwhile the link gets ahead. Kept are the weights that take the host longest for
their size. Many settings are tried: a pass takes as long as a simulation, and random settings
make better patterns than even ones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from roost.core.arrays import Array, taken, taken_devices
from roost.core.cluster import MEMORY
from roost.core.graph import FORWARD
from roost.core.placement import MOST_BYTES, Placement
from roost.core.problem import Problem
from roost.core.trial import Trial
from roost.placers import Evaluate, Round
from roost.placers._shared.units import Units
from roost.simulator.compiled import Simulator

# Value of having a weight on the device, as a share of the time it takes to bring it.
_WORTH = (0.2, 0.4, 0.6, 0.8, 1.0)
_WINDOW = (0.02, 0.04, 0.08, 0.16)  # of the memory
# And as many of the largest weight, and of the size that most bytes are in.
_WEIGHTS = (1, 1.5, 2, 2.5, 3, 4)
_MOST_WINDOW = 0.75  # of the memory
_SIZES = 3  # of weights, beside the largest, up to which weights are streamed
_RETRIES = 3
_DRAWN, _OPS = 1000, 2_000_000  # passes with random settings, at most, and ops in all of them
_SHARE = 0.2  # of the simulations and of the seconds that are left, at most
_FIRST_SHARE = 0.5  # of the seconds, for passes with settings of all kinds
_ALIKE = 0.3  # of random settings, in which parts leave however long the host would take
_KEPT = 8  # placements that become trials


class _Devices(NamedTuple):
    """The devices of such a placement, by number."""

    main: int  # the accelerator
    store: int  # weights are streamed from here
    host: int  # computes with weights where they lie


@dataclass(frozen=True)
class _Settings:
    """Settings of a pass."""

    window: int  # bytes
    worth: float | None  # of being ahead; None: the host computes nothing
    # Parts leave so much earlier or later than evenly, in sizes of the largest part.
    shift: float = 0.0
    uneven: float = 0.0  # the same by chance, in sizes of their own
    alike: bool = False  # parts leave however long the host would take for them
    # Bytes of a weight that is streamed: many small ones wait less for each other than a few large.
    most: int = 2**62


@dataclass(frozen=True)
class _WeightedPart:
    """Ops that run together, and the weights that they alone read."""

    ops: list[int]
    weights: list[int]
    size: int  # bytes of weights
    movable: bool  # the host may run it
    home: int  # device that its weights are streamed from


class _Simulated(NamedTuple):
    """A simulated placement; the least is the best."""

    missing_bytes: int
    step_time: float
    number: int
    settings: _Settings
    placement: Placement


def streamed_placements(problem: Problem, evaluate: Evaluate) -> list[Trial]:
    """Trials for one accelerator and a host; none for training steps and other clusters."""
    graph = problem.graph
    cluster = problem.cluster
    devices = _devices(problem)
    if devices is None or graph.phase.max() > FORWARD or not graph.is_parameter.any():
        return []
    main, _, host = devices
    units = Units.of(problem, "nothing")
    allowed = units.allowed[units.unit]  # [ops, devices] of a group where all of it may be
    somewhere = np.where(allowed[:, host], host, allowed.argmax(axis=1))
    start = np.where(allowed[:, main], main, somewhere).astype(np.int32)
    parts = _parts(problem, start, devices)
    if not parts:
        return []
    whole = evaluate([problem.placement(start)])[0]
    excess = int(whole.peak_memory[main]) - int(cluster.memory[main])
    if whole.feasible or excess <= 0:
        return [whole]
    program = _Program(problem, start, parts, devices)
    # Drawn even if a journal has the round: later random numbers must be the same.
    rng = np.random.default_rng(int(evaluate.rng.integers(2**62)))
    state = evaluate.round(lambda: _SettingsSearch(program, excess, rng, evaluate).run(), "walks")
    rows = taken_devices(state, "devices", problem.allowed, (None,))
    windows = taken(state, "windows", (len(rows),), "i", least=0, most=MOST_BYTES)
    pairs = zip(rows, windows.tolist(), strict=True)
    placements = [program.as_placement(row, window) for row, window in pairs]
    return [whole, *evaluate(placements)]


def _devices(problem: Problem) -> _Devices | None:
    """The largest device of each kind; the host is the store where there is no other."""
    memory = problem.cluster.memory
    kinds = [device.kind for device in problem.cluster.devices]
    hosts = [number for number, kind in enumerate(kinds) if kind == "cpu"]
    mains = [number for number, kind in enumerate(kinds) if kind not in ("cpu", MEMORY)]
    if not hosts or not mains:
        return None
    main, host = (max(numbers, key=lambda d: int(memory[d])) for numbers in (mains, hosts))
    stores = [number for number, kind in enumerate(kinds) if kind == MEMORY] or [host]
    return _Devices(main, max(stores, key=lambda d: int(memory[d])), host)


@dataclass
class _SettingsSearch:
    """A search for good settings of a pass, in a share of the simulations and seconds left."""

    program: _Program
    excess: int  # bytes that must leave the main device
    rng: np.random.Generator
    evaluate: Evaluate
    done: list[_Simulated] = field(default_factory=list)

    def run(self) -> Round:
        """The best placements, with settings of all kinds, then random ones.

        Half of the random settings are near the best so far.
        """
        problem = self.program.problem
        evaluate = self.evaluate
        most_simulations = evaluate.simulations_left
        memory = int(problem.cluster.memory[self.program.devices.main])
        grid = _settings_of_all_kinds(problem, self.program.parts, memory)
        until = (1 - _FIRST_SHARE) * evaluate.seconds_left
        for settings in grid:
            self._try(settings, most_simulations)
            if evaluate.seconds_left < until:
                break
        windows = sorted({settings.window for settings in grid})
        left = max(0.0, most_simulations - len(self.done))
        drawn = int(min(_DRAWN, _OPS // problem.graph.num_ops, _SHARE * left))
        until = (1 - _SHARE) * evaluate.seconds_left
        for number in range(drawn):
            if evaluate.seconds_left < until:
                break
            if number < drawn // 2:
                settings = _random(windows, self.rng)
            else:
                settings = _near(min(self.done).settings, self.rng)
            self._try(settings, most_simulations)
        return self._round()

    def _try(self, settings: _Settings, most_simulations: float) -> None:
        """Simulate a pass; while the main device overflows, again with fewer bytes there."""
        main = self.program.devices.main
        problem = self.program.problem
        less = self.excess + settings.window
        for _ in range(int(min(_RETRIES, most_simulations - len(self.done)))):
            placement = self.program.place(less, settings, self.rng)
            timeline = Simulator.of(problem).simulate(placement)
            missing = timeline.missing
            number = len(self.done)
            self.done.append(
                _Simulated(int(missing.sum()), timeline.step_time, number, settings, placement)
            )
            if missing[main] == 0:
                break
            less += int(missing[main])

    def _round(self) -> Round:
        distinct: dict[str, Placement] = {}
        for simulated in sorted(self.done):
            if len(distinct) < _KEPT:
                distinct.setdefault(simulated.placement.digest, simulated.placement)
        placements = list(distinct.values())
        state = {
            "devices": np.stack([placement.device for placement in placements]),
            "windows": np.array([np.max(placement.prefetch_bytes) for placement in placements]),
        }
        return Round(placements[:1], len(self.done), state)


def _random(windows: list[int], rng: np.random.Generator) -> _Settings:
    return _Settings(
        int(rng.choice(windows)),
        worth=float(rng.uniform(0, 1.1)),
        shift=float(rng.uniform(-1, 1)),
        uneven=float(rng.choice([0.0, 0.3, 1.0])),
        alike=bool(rng.random() < _ALIKE),
    )


def _near(best: _Settings, rng: np.random.Generator) -> _Settings:
    worth = None if best.worth is None else max(0.0, best.worth + float(rng.normal(0, 0.05)))
    shift = best.shift + float(rng.normal(0, 0.2))
    uneven = float(rng.choice([best.uneven, 0.3]))
    return replace(best, worth=worth, shift=shift, uneven=uneven)


def _settings_of_all_kinds(
    problem: Problem, parts: list[_WeightedPart], memory: int
) -> list[_Settings]:
    """Windows from small to large, each with several values of being ahead."""
    nbytes = problem.graph.output_bytes
    counted = Counter(int(nbytes[weight]) for part in parts for weight in part.weights)
    # The size that most bytes are in comes last.
    sizes = sorted(counted, key=lambda size: (size * counted[size], size))
    common = sizes[-1]
    largest = max(sizes)
    smaller = [size for size in sizes if size < largest][-_SIZES:]
    windows = {int(share * memory) for share in _WINDOW}
    windows |= {int(count * size) for count in _WEIGHTS for size in (common, largest)}
    grid = [_Settings(0, 1.0)]
    for window in sorted(window for window in windows if window <= _MOST_WINDOW * memory):
        grid += [_Settings(window, worth) for worth in (None, *_WORTH)]
        grid += [_Settings(window, None, most=size) for size in smaller if size <= window]
    return grid


def _parts(problem: Problem, start: Array, devices: _Devices) -> list[_WeightedPart]:
    """The parts on the main device, in program order.

    Weights in a group with ops go with these; other weights may go wherever they are allowed.
    """
    graph = problem.graph
    consumers = graph.consumer_lists()
    members: dict[int, list[int]] = {}
    for op, group in enumerate(graph.group.tolist()):
        if group >= 0:
            members.setdefault(group, []).append(op)
    weights: dict[int, list[int]] = {}  # first op of a part -> its weights
    ops: dict[int, list[int]] = {}
    is_free = graph.is_parameter & (graph.group < 0) & problem.allowed[:, devices.host]
    for weight in np.flatnonzero(is_free).tolist():
        heads = set()
        for reader in consumers[weight]:
            together = members.get(int(graph.group[reader]), [reader])
            heads.add(together[0])
            ops[together[0]] = together
        if len(heads) == 1:
            weights.setdefault(heads.pop(), []).append(weight)
    parts = []
    for head in sorted(weights, key=lambda head: _first(problem, ops[head])):
        size = int(graph.output_bytes[weights[head]].sum())
        is_movable = bool(problem.allowed[ops[head], devices.host].all())
        may_be_stored = problem.allowed[weights[head], devices.store].all()
        home = devices.store if may_be_stored else devices.host
        if size and (start[ops[head]] == devices.main).all():
            parts.append(_WeightedPart(ops[head], weights[head], size, is_movable, home))
    return parts


class _Program:
    """The parts of a program in their order, and their seconds on the main device and the host."""

    def __init__(
        self, problem: Problem, start: Array, parts: list[_WeightedPart], devices: _Devices
    ) -> None:
        self.problem = problem
        self.start = start
        self.parts = parts
        self.devices = devices
        (main, _, host) = devices
        graph = problem.graph
        cluster = problem.cluster
        self.size = np.array([part.size for part in parts])  # [parts] bytes
        # [parts] bytes.
        self.largest = np.array([graph.output_bytes[part.weights].max() for part in parts])
        # [parts] seconds.
        self.bring = self.size * cluster.seconds_per_byte[[part.home for part in parts], main]
        hop = float(cluster.sent_latency[main, host] + cluster.sent_latency[host, main])
        seconds = [float(problem.op_time[part.ops, host].sum()) + hop for part in parts]
        self.on_host = np.where([part.movable for part in parts], seconds, np.inf)  # [parts]
        # [parts] seconds of the main device from one part to the next.
        work = np.where(graph.is_parameter, 0.0, problem.op_time[:, main])
        self.on_main = np.add.reduceat(work, [_first(problem, part.ops) for part in parts])

    def place(self, less: int, settings: _Settings, rng: np.random.Generator) -> Placement:
        """The placement of one pass, with so many bytes less on the main device."""
        main, store, host = self.devices
        window = settings.window
        worth = settings.worth or 0.0
        on_host = np.full(len(self.parts), np.inf) if settings.worth is None else self.on_host
        leaves = self._leaving(less, settings, on_host, rng)
        may_stream = self._may_stream(settings)
        most = window * float(self.problem.cluster.seconds_per_byte[store, main])
        # Seconds that the link has worked ahead, at most as the window allows.
        device = self.start.copy()
        ahead = 0.0
        for number, part in enumerate(self.parts):
            passed = float(self.on_main[number])
            if leaves[number]:
                takes = float(on_host[number])
                bring = float(self.bring[number])
                computed = takes - worth * min(takes, most - ahead)
                streamed = max(0.0, bring - ahead) + worth * min(ahead, bring)
                if computed < streamed or not may_stream[number]:
                    device[part.weights] = host
                    device[part.ops] = host
                    passed = takes
                else:
                    device[part.weights] = part.home
                    ahead = max(0.0, ahead - bring)
            ahead = min(most, ahead + passed)
        return self.as_placement(device, window)

    def as_placement(self, device: Array, window: int) -> Placement:
        """The placement with a window of so many bytes on the main device."""
        windows = np.zeros(self.problem.cluster.num_devices, dtype=np.int64)
        windows[self.devices.main] = window
        return self.problem.placement(device, prefetch_bytes=windows)

    def _may_stream(self, settings: _Settings) -> Array:  # [parts] bool
        return np.asarray(self.largest <= min(settings.window, settings.most))

    def _leaving(
        self, less: int, settings: _Settings, on_host: Array, rng: np.random.Generator
    ) -> Array:  # [parts] bool
        """Parts of so many bytes in all that leave the main device.

        First those that the host does fastest for their size, about evenly over equal ones.
        """
        is_possible = np.isfinite(on_host) | self._may_stream(settings)
        # Parts that take the host no time come first, those that can only be streamed last.
        pace = np.round(np.log10(np.maximum(on_host / self.size, np.finfo(np.float64).tiny)), 1)
        pace = np.zeros_like(pace) if settings.alike else pace
        by_chance = settings.uneven * self.size * rng.standard_normal(len(self.parts))
        shift = settings.shift * self.size.max() + by_chance
        leaves = np.zeros(len(self.parts), dtype=bool)
        need = less
        for equal_pace in np.unique(pace[is_possible]).tolist():
            equal = np.flatnonzero(is_possible & (pace == equal_pace))
            share = need / int(self.size[equal].sum())
            given = seen = 0
            skipped = []
            for number in equal.tolist():
                size = int(self.size[number])
                seen += size
                if share < 1.0 and given >= share * (seen + shift[number]):
                    skipped.append(number)
                elif need > 0:
                    leaves[number] = True
                    given += size
                    need -= size
            while need > 0 and skipped:
                last = skipped.pop()
                leaves[last] = True
                need -= int(self.size[last])
        return leaves


def _first(problem: Problem, ops: list[int]) -> int:
    """The first of some ops that is no parameter."""
    return min(op for op in ops if not problem.graph.is_parameter[op])
