"""Tiny problems for contract tests: each is hard in one way. `fits` of each is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import Cluster, Device, Link
from roost.core.costs import Costs
from roost.core.graph import GraphBuilder
from roost.core.problem import Problem

_PROBLEMS: dict[str, Callable[[], Problem]] = {}
FITTING: dict[str, bool] = {}  # whether anything fits, of every tiny problem


def tiny_problems() -> list[str]:
    """The names of the tiny problems."""
    return list(_PROBLEMS)


def tiny_problem(name: str) -> Problem:
    """A tiny problem, made anew."""
    return _PROBLEMS[name]()


def _tiny(fits: bool) -> Callable[[Callable[[], Problem]], Callable[[], Problem]]:
    """A tiny problem by the name of its function; whether anything fits is part of it."""

    def keep(build: Callable[[], Problem]) -> Callable[[], Problem]:
        name = build.__name__.removeprefix("_")
        _PROBLEMS[name] = build
        FITTING[name] = fits
        return build

    return keep


def _machine(
    *memory: int, kinds: Sequence[str] = (), bandwidth: float = 10.0, bus: str = ""
) -> Cluster:
    """GPUs unless told otherwise, with so many bytes each, and links from each to each."""
    devices = tuple(
        Device(f"d{n}", kinds[n] if kinds else "cuda", size) for n, size in enumerate(memory)
    )
    link = Link("*", "*", bandwidth, latency=0.5)
    return Cluster("machine", devices, (replace(link, bus=bus) if bus else link,))


def _timed(
    builder: GraphBuilder,
    cluster: Cluster,
    seconds: Sequence[float] = (),
    speed: Sequence[float] = (),
) -> Problem:
    """A problem whose ops take these seconds in turn, divided by the speed of the device."""
    graph = builder.freeze()
    time: Array = np.zeros(graph.num_ops)
    busy = np.flatnonzero(~graph.is_parameter)
    time[busy] = np.resize(np.array(seconds or [1.0]), len(busy))
    return Problem(
        graph, cluster, Costs(time[:, None] / np.array(speed or [1.0] * cluster.num_devices))
    )


def _layers(
    builder: GraphBuilder, count: int, size: int, weight: int, allowed: Sequence[str] = ()
) -> str:
    """A chain of ops, each with a parameter; the name of the last."""
    before: list[str] = []
    for n in range(count):
        builder.parameter(f"w{n}", weight, module=f"layers.{n}")
        inputs = [*before, f"w{n}"]
        before = [
            builder.add(
                f"f{n}", "op", inputs, output_bytes=size, module=f"layers.{n}", allowed=allowed
            )
        ]
    return before[0]


@_tiny(fits=True)
def _one_op() -> Problem:
    builder = GraphBuilder("one_op")
    builder.add("alone", output_bytes=4)
    return _timed(builder, _machine(10, 10, 10), speed=[1.0, 3.0, 2.0])


@_tiny(fits=True)
def _one_device() -> Problem:
    builder = GraphBuilder("one_device")
    _layers(builder, 3, size=2, weight=10)
    return _timed(builder, Cluster("one", (Device("cpu:0", "cpu", 100),)))


@_tiny(fits=True)
def _only_parameters() -> Problem:
    builder = GraphBuilder("only_parameters")
    for n in range(5):
        builder.parameter(f"w{n}", 10 + n)
    return _timed(builder, _machine(35, 35))


@_tiny(fits=True)
def _chain() -> Problem:
    builder = GraphBuilder("chain")
    _layers(builder, 5, size=20, weight=10)
    return _timed(builder, _machine(200, 200, 200))


@_tiny(fits=True)
def _fork_join() -> Problem:
    builder = GraphBuilder("fork_join")
    builder.add("fork", output_bytes=1)
    ends = []
    for branch in "abc":
        builder.add(f"{branch}0", inputs=["fork"], output_bytes=1, module=branch)
        ends.append(builder.add(f"{branch}1", inputs=[f"{branch}0"], output_bytes=1, module=branch))
    builder.add("join", inputs=ends, output_bytes=1)
    return _timed(builder, _machine(100, 100, 100), seconds=[1.0, 4.0, 3.0, 2.0])


@_tiny(fits=True)
def _two_groups() -> Problem:
    builder = GraphBuilder("two_groups")
    before: list[str] = []
    for n in range(6):
        builder.parameter(f"w{n}", 5, group="ab"[n % 2])
        before = [
            builder.add(
                f"f{n}", inputs=[*before, f"w{n}"], output_bytes=3, group=[None, "a", "b"][n % 3]
            )
        ]
    return _timed(builder, _machine(100, 100))


@_tiny(fits=True)
def _kinds() -> Problem:
    """Ops for one kind of device only, and a parameter that both kinds read."""
    builder = GraphBuilder("kinds")
    builder.parameter("table", 8)
    builder.add("look_up", inputs=["table"], output_bytes=2, allowed=["cpu"])
    builder.add("attend", inputs=["look_up", "table"], output_bytes=2, allowed=["cuda"])
    builder.add("mix", inputs=["attend"], output_bytes=2, group="g")
    builder.add("sample", inputs=["mix"], output_bytes=2, allowed=["cpu"], group="g")
    builder.add("score", inputs=["sample", "attend"], output_bytes=2, allowed=["cuda", "tpu"])
    cluster = _machine(60, 60, 60, kinds=["cpu", "cuda", "cuda"])
    return _timed(builder, cluster, speed=[1.0, 4.0, 2.0])


@_tiny(fits=True)
def _unlike_devices() -> Problem:
    builder = GraphBuilder("unlike_devices")
    last = _layers(builder, 3, size=6, weight=20)
    for n in range(3):
        builder.add(f"head{n}", inputs=[last], output_bytes=2)
    cluster = _machine(1000, 80, 40, kinds=["cpu", "cuda", "tpu"])
    return _timed(builder, cluster, seconds=[4.0, 2.0, 6.0], speed=[1.0, 8.0, 20.0])


@_tiny(fits=True)
def _tight() -> Problem:
    """Only one choice of devices fits."""
    builder = GraphBuilder("tight")
    before: list[str] = []
    for n, weight in enumerate((40, 100, 60)):
        builder.parameter(f"w{n}", weight)
        before = [builder.add(f"f{n}", inputs=[*before, f"w{n}"], output_bytes=2)]
    return _timed(builder, _machine(105, 45, 65), speed=[1.0, 5.0, 2.0])


@_tiny(fits=False)
def _nothing_fits() -> Problem:
    builder = GraphBuilder("nothing_fits")
    _layers(builder, 3, size=10, weight=150)
    return _timed(builder, _machine(100, 200, 120), speed=[1.0, 1.0, 4.0])


@_tiny(fits=True)
def _shared_bus() -> Problem:
    builder = GraphBuilder("shared_bus")
    _layers(builder, 3, size=8, weight=10)
    for n in range(3):
        builder.add(f"side{n}", inputs=[f"f{n}"], output_bytes=8)
    return _timed(builder, _machine(100, 100, 100, bus="one"), seconds=[2.0, 1.0])


@_tiny(fits=True)
def _broadcast() -> Problem:
    builder = GraphBuilder("broadcast")
    builder.add("source", output_bytes=8)
    for n in range(5):
        builder.add(f"reader{n}", inputs=["source"], output_bytes=2)
    return _timed(
        builder,
        replace(_machine(100, 100, 100, bus="{source}"), broadcast=True),
        seconds=[1.0, 3.0, 2.0],
    )


@_tiny(fits=True)
def _zeros() -> Problem:
    """Ops that take no time, tensors of no bytes, and devices without memory, which hold those."""
    builder = GraphBuilder("zeros")
    _layers(builder, 3, size=0, weight=0)
    builder.add("end", inputs=["f2", "f0"], phase="update")
    return _timed(builder, _machine(0, 0), seconds=[0.0])


@_tiny(fits=True)
def _training() -> Problem:
    """Forward, backward and updates; every parameter is read four times."""
    builder = GraphBuilder("training")
    before = _layers(builder, 2, size=6, weight=10)
    for n in reversed(range(2)):
        module = f"layers.{n}"
        inputs = [before, f"w{n}", f"f{n}"]
        before = builder.add(
            f"b{n}", inputs=inputs, output_bytes=6, phase="backward", module=module
        )
        builder.add(f"g{n}", inputs=inputs, output_bytes=10, phase="backward", module=module)
    for n in range(2):
        builder.add(f"u{n}", "sgd", [f"g{n}", f"w{n}"], phase="update", module=f"layers.{n}")
    return _timed(
        builder, _machine(200, 200, 200, kinds=["cpu", "cuda", "cuda"]), speed=[1.0, 4.0, 4.0]
    )


@_tiny(fits=True)
def _streamed() -> Problem:
    """A problem whose parameters do not fit beside their readers: some must be fetched."""
    builder = GraphBuilder("streamed")
    _layers(builder, 3, size=2, weight=45, allowed=["cuda"])
    return _timed(builder, _machine(1000, 100, kinds=["cpu", "cuda"]), speed=[1.0, 4.0])


assert set(FITTING) == set(_PROBLEMS)
