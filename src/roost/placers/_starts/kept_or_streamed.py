"""Weights that do not fit, for inference: some kept, some streamed, some used where they lie.

A link that brings weights and a host that computes beside it work at the same time when both have
something to do all along. So the program is gone through once, with a clock: where the link is
ahead a weight is streamed, and where the main device would have to wait for it the host computes,
and meanwhile the link gets ahead. Kept is what the host would take longest for, for its size. How
much it is worth to be ahead, how far that may be, and where exactly to begin is found by trying: a
walk takes as long as a simulation, and chance finds better patterns than an even one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import MEMORY
from roost.core.graph import FORWARD
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.trial import Trial
from roost.placers import Evaluate, Round
from roost.placers._shared.units import Units
from roost.simulator.compiled import Simulator

# Of the time it takes to bring a weight: what it is worth to have it there.
_WORTH = (0.2, 0.4, 0.6, 0.8, 1.0)
_WINDOW = (0.02, 0.04, 0.08, 0.16)  # of the memory
# And as many of the largest weight, and of the size that most bytes are in.
_WEIGHTS = (1, 1.5, 2, 2.5, 3, 4)
_MOST_WINDOW = 0.75  # of the memory
_SIZES = 3  # of weights, beside the largest, up to which weights are streamed
_RETRIES = 3
_DRAWN, _OPS = 1000, 2_000_000  # walks with settings by chance, at most, and ops in all of them
_SHARE = 0.2  # of the simulations and of the seconds that are left, at most
_FIRST_SHARE = 0.5  # of the seconds, for walks with settings of all kinds
_ALIKE = 0.3  # of those by chance, where parts are away whatever the host would take for them
_KEPT = 8  # walks that become trials


@dataclass(frozen=True)
class _Setting:
    """Of a walk."""

    window: int  # bytes
    worth: float | None  # of being ahead; None: the host computes nothing
    # Parts are away so much earlier or later than evenly, in sizes of the largest part.
    shift: float = 0.0
    uneven: float = 0.0  # and by chance, in sizes of their own
    # Whatever the host would take for a part, it may be away as well as any other.
    alike: bool = False
    # Bytes of a weight that is streamed: many small ones wait less for each other than a few large.
    most: int = 2**62


@dataclass(frozen=True)
class _Part:
    """Ops that run together, and the weights that they alone read."""

    ops: list[int]
    weights: list[int]
    size: int  # bytes of weights
    movable: bool  # whether the host may run it
    home: int  # device that its weights are streamed from


def mixed(problem: Problem, evaluate: Evaluate) -> list[Trial]:
    """Placements for one accelerator and a host; none where there is more to it than that."""
    graph, cluster = problem.graph, problem.cluster
    kinds = [device.kind for device in cluster.devices]
    hosts = [number for number, kind in enumerate(kinds) if kind == "cpu"]
    mains = [number for number, kind in enumerate(kinds) if kind not in ("cpu", MEMORY)]
    if not hosts or not mains or graph.phase.max() > FORWARD or not graph.is_parameter.any():
        return []
    host, main = (
        max(hosts, key=lambda d: int(cluster.memory[d])),
        max(mains, key=lambda d: int(cluster.memory[d])),
    )
    stores = [number for number, kind in enumerate(kinds) if kind == MEMORY] or [host]
    store = max(stores, key=lambda d: int(cluster.memory[d]))
    units = Units.of(problem, "nothing")
    allowed = units.allowed[units.unit]  # [ops, devices] of a group where all of it may be
    somewhere = np.where(allowed[:, host], host, allowed.argmax(axis=1))
    start = np.where(allowed[:, main], main, somewhere).astype(np.int32)
    parts = _parts(problem, start, (main, store, host))
    if not parts:
        return []
    whole = evaluate([problem.placement(start)])[0]
    excess = int(whole.peak_memory[main]) - int(cluster.memory[main])
    if whole.feasible or excess <= 0:
        return [whole]
    walk = _Walk(problem, start, parts, (main, store, host))
    # Drawn whether the round is run or taken from a journal: what is drawn after it must be the
    # same.
    rng = np.random.default_rng(int(evaluate.rng.integers(2**62)))
    state = evaluate.round(lambda: _walked(walk, excess, rng, evaluate), "walks")
    rows = zip(state["devices"], state["windows"].tolist(), strict=True)
    return [
        whole,
        *evaluate([walk.as_placement(np.array(device), window) for device, window in rows]),
    ]


def _walked(walk: _Walk, excess: int, rng: np.random.Generator, evaluate: Evaluate) -> Round:
    """The best of walks with settings of all kinds, then with some by chance, half of these near
    the best so far.

    Fewer where seconds are short: others are to have their turn.
    """
    problem, main, most_simulations = walk.problem, walk.devices[0], evaluate.simulations_left
    memory, simulator = int(problem.cluster.memory[main]), Simulator.of(problem)
    # Bytes that are missing, step time, and which.
    found: list[tuple[int, float, int, _Setting, Placement]] = []

    def tried(setting: _Setting) -> None:
        less = excess + setting.window
        for _ in range(int(min(_RETRIES, most_simulations - len(found)))):
            placement = walk.placement(less, setting, rng)
            timeline = simulator.simulate(placement)
            missing = timeline.missing
            found.append((int(missing.sum()), timeline.step_time, len(found), setting, placement))
            if missing[main] == 0:
                break
            less += int(missing[main])

    settings = _settings(problem, walk.parts, memory)
    until = (1 - _FIRST_SHARE) * evaluate.seconds_left
    for setting in settings:
        tried(setting)
        if evaluate.seconds_left < until:
            break
    windows = sorted({setting.window for setting in settings})
    drawn = int(
        min(_DRAWN, _OPS // problem.graph.num_ops, _SHARE * max(0.0, most_simulations - len(found)))
    )
    until = (1 - _SHARE) * evaluate.seconds_left
    for number in range(drawn):
        if evaluate.seconds_left < until:
            break
        tried(_near(min(found)[3], rng) if number >= drawn // 2 else _by_chance(windows, rng))
    chosen: dict[str, Placement] = {}
    for *_, placement in sorted(found):
        if len(chosen) < _KEPT:
            chosen.setdefault(placement.digest, placement)
    state = {
        "devices": np.stack([placement.device for placement in chosen.values()]),
        "windows": np.array([np.max(placement.prefetch_bytes) for placement in chosen.values()]),
    }
    return Round(list(chosen.values())[:1], len(found), state)


def _by_chance(windows: list[int], rng: np.random.Generator) -> _Setting:
    return _Setting(
        int(rng.choice(windows)),
        float(rng.uniform(0, 1.1)),
        float(rng.uniform(-1, 1)),
        float(rng.choice([0.0, 0.3, 1.0])),
        alike=bool(rng.random() < _ALIKE),
    )


def _near(best: _Setting, rng: np.random.Generator) -> _Setting:
    worth = None if best.worth is None else max(0.0, best.worth + float(rng.normal(0, 0.05)))
    return replace(
        best,
        worth=worth,
        shift=best.shift + float(rng.normal(0, 0.2)),
        uneven=float(rng.choice([best.uneven, 0.3])),
    )


def _settings(problem: Problem, parts: list[_Part], memory: int) -> list[_Setting]:
    """Windows from small to large, each with what being ahead may be worth."""
    counted = Counter(
        int(problem.graph.output_bytes[weight]) for part in parts for weight in part.weights
    )
    # That in which most bytes are comes last.
    sizes = sorted(counted, key=lambda size: (size * counted[size], size))
    common, largest = sizes[-1], max(sizes)
    smaller = [size for size in sizes if size < largest][-_SIZES:]
    windows = {int(share * memory) for share in _WINDOW}
    windows |= {int(count * size) for count in _WEIGHTS for size in (common, largest)}
    wanted = sorted(window for window in windows if window <= _MOST_WINDOW * memory)
    found = [_Setting(0, 1.0)]
    for window in wanted:
        found += [_Setting(window, worth) for worth in (None, *_WORTH)]
        found += [_Setting(window, None, most=size) for size in smaller if size <= window]
    return found


def _parts(problem: Problem, start: Array, devices: tuple[int, int, int]) -> list[_Part]:
    """In program order. Weights in a group with ops go with these; others are free, but for where
    they may be."""
    (main, store, host), graph = devices, problem.graph
    consumers = graph.consumer_lists()
    members: dict[int, list[int]] = {}
    for op, group in enumerate(graph.group.tolist()):
        if group >= 0:
            members.setdefault(group, []).append(op)
    weights: dict[int, list[int]] = {}  # first op of a part -> its weights
    ops: dict[int, list[int]] = {}
    for weight in np.flatnonzero(
        graph.is_parameter & (graph.group < 0) & problem.allowed[:, host]
    ).tolist():
        heads = set()
        for reader in consumers[weight]:
            together = members.get(int(graph.group[reader]), [reader])
            heads.add(together[0])
            ops[together[0]] = together
        if len(heads) == 1:
            weights.setdefault(heads.pop(), []).append(weight)
    sizes = {head: int(graph.output_bytes[own].sum()) for head, own in weights.items()}
    return [
        _Part(
            ops[head],
            weights[head],
            sizes[head],
            movable=bool(problem.allowed[ops[head], host].all()),
            home=store if problem.allowed[weights[head], store].all() else host,
        )
        for head in sorted(
            weights, key=lambda head: min(op for op in ops[head] if not graph.is_parameter[op])
        )
        if start[ops[head]].max() == start[ops[head]].min() == main and sizes[head]
    ]


class _Walk:
    """What the parts take on either side, and placements made of that in one walk through the
    program."""

    def __init__(
        self, problem: Problem, start: Array, parts: list[_Part], devices: tuple[int, int, int]
    ) -> None:
        """`devices`: the main one, where weights are streamed from, and where they are used in
        place."""
        self.problem, self.start, self.parts, self.devices = problem, start, parts, devices
        (main, _, host), graph, cluster = devices, problem.graph, problem.cluster
        self.size = np.array([part.size for part in parts])  # [parts] bytes
        # [parts] bytes.
        self.largest = np.array([graph.output_bytes[part.weights].max() for part in parts])
        # [parts] seconds.
        self.bring = self.size * cluster.seconds_per_byte[[part.home for part in parts], main]
        hop = float(cluster.sent_latency[main, host] + cluster.sent_latency[host, main])
        seconds = [float(problem.op_time[part.ops, host].sum()) + hop for part in parts]
        self.on_host = np.where([part.movable for part in parts], seconds, np.inf)  # [parts]
        # What the main device has to do from one part to the next.
        work = np.where(graph.is_parameter, 0.0, problem.op_time[:, main])
        self.on_main = np.add.reduceat(work, [_first(problem, part) for part in parts])  # [parts]

    def placement(self, less: int, setting: _Setting, rng: np.random.Generator) -> Placement:
        """With so many bytes less on the main device."""
        main, store, host = self.devices
        window, value = setting.window, setting.worth or 0.0
        on_host = np.full(len(self.parts), np.inf) if setting.worth is None else self.on_host
        away, brought = (
            self._away(less, setting, on_host, rng),
            self.largest <= min(window, setting.most),
        )
        most = window * float(self.problem.cluster.seconds_per_byte[store, main])
        # Seconds that the link has worked ahead, at most as the window allows.
        device, ahead = self.start.copy(), 0.0
        for number, part in enumerate(self.parts):
            takes, bring, passed = (
                float(on_host[number]),
                float(self.bring[number]),
                float(self.on_main[number]),
            )
            computed = takes - value * min(takes, most - ahead)
            streamed = max(0.0, bring - ahead) + value * min(ahead, bring)
            if away[number] and (computed < streamed or not brought[number]):
                device[part.weights], device[part.ops], passed = host, host, takes
            elif away[number]:
                device[part.weights] = part.home
                ahead = max(0.0, ahead - bring)
            ahead = min(most, ahead + passed)
        return self.as_placement(device, window)

    def as_placement(self, device: Array, window: int) -> Placement:
        windows = np.zeros(self.problem.cluster.num_devices, dtype=np.int64)
        windows[self.devices[0]] = window
        return self.problem.placement(device, prefetch_bytes=windows)

    # [parts] bool.
    def _away(
        self, less: int, setting: _Setting, on_host: Array, rng: np.random.Generator
    ) -> Array:
        """Parts of so many bytes in all: what the host does fastest for its size, about evenly over
        what is alike."""
        possible = np.isfinite(on_host) | (self.largest <= min(setting.window, setting.most))
        # What takes no time comes first, what can only be brought last.
        pace = np.round(np.log10(np.maximum(on_host / self.size, np.finfo(np.float64).tiny)), 1)
        pace = np.zeros_like(pace) if setting.alike else pace
        shift = setting.shift * self.size.max() + setting.uneven * self.size * rng.standard_normal(
            len(self.parts)
        )
        away, need = np.zeros(len(self.parts), dtype=bool), less
        for one in np.unique(pace[possible]).tolist():
            alike = np.flatnonzero(possible & (pace == one))
            share = need / int(self.size[alike].sum())
            given = seen = 0
            late = []
            for number in alike.tolist():
                seen += int(self.size[number])
                if share < 1.0 and given >= share * (seen + shift[number]):
                    late.append(number)
                elif need > 0:
                    away[number] = True
                    given += int(self.size[number])
                    need -= int(self.size[number])
            while need > 0 and late:
                away[late[-1]] = True
                need -= int(self.size[late.pop()])
        return away


def _first(problem: Problem, part: _Part) -> int:
    return min(op for op in part.ops if not problem.graph.is_parameter[op])
