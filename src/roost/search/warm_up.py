"""Compile loops and load imports, once in a process, before the budget of a search begins."""

from __future__ import annotations

import contextlib
import time

import numpy as np

from roost import catalog
from roost.bounds import bound
from roost.core.cluster import Cluster, Device, Link
from roost.core.costs import Costs
from roost.core.graph import GraphBuilder
from roost.core.problem import Problem
from roost.placers import Placer, asked_by
from roost.search.budget import Budget
from roost.search.evaluate import Evaluation, Search
from roost.search.simulating import Simulating

_SECONDS, _TRIALS = 0.5, 1000  # for each placer, compiling not counted

_warm: set[object] = set()  # types of placers, and `bound`


def warm_up(placer: Placer, prove: bool = False, busy: bool = False) -> None:
    """Run a placer, the placers that it asks and a proof, if one is needed, on three ops.

    `busy`: transfers keep their two devices from computing. Such clusters have loops of their own.
    """
    if prove and _is_cold(bound, busy):
        bound(small_problem(busy), seconds=0.1)
    if not _is_cold(type(placer), busy):
        return
    with contextlib.suppress(Exception):  # the search itself will raise
        for name in asked_by(placer):
            warm_up(catalog.find("placers", name)(), busy=busy)
    with contextlib.suppress(Exception):
        _run(placer, small_problem(busy))


def _is_cold(user: object, busy: bool) -> bool:
    """True the first time that this type or function is asked about."""
    key = (user, "busy") if busy else user
    if key in _warm:
        return False
    _warm.add(key)
    return True


def _run(placer: Placer, problem: Problem) -> None:
    """Run a placer for a short time. Compiling does not count, or the first loop took it all."""
    from numba.core.event import TimingListener, install_listener

    with install_listener("numba:compile", TimingListener()) as compiling:  # type: ignore[no-untyped-call]

        def clock() -> float:
            return time.perf_counter() - (compiling.duration if compiling.done else 0.0)

        search = Search(problem, Simulating(problem, 1), Budget(_TRIALS, _SECONDS, clock))
        placer.place(problem, Evaluation(search, "warm-up"))


def small_problem(busy: bool = False) -> Problem:
    """Three ops whose weights do not fit beside them, so that loops that fetch are compiled too."""
    builder = GraphBuilder("warm-up")
    last: list[str] = []
    for number in range(3):
        weight = builder.parameter(f"weight{number}", 300)
        last = [builder.add(f"op{number}", "matmul", [weight, *last], flop=1.0, output_bytes=8)]
    host = Device("cpu:0", "cpu", 10_000)
    devices = (host, *(Device(f"cuda:{d}", "cuda", 700) for d in range(2)))
    link = Link("*", "*", 1000.0, sender_busy=0.01 * busy, receiver_busy=0.01 * busy)
    cluster = Cluster("warm-up", devices, (link,))
    graph = builder.freeze()
    op_time = np.where(graph.is_parameter[:, None], 0.0, [[5.0, 1.0, 1.0]])
    return Problem(graph, cluster, Costs(op_time))
