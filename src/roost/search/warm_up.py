"""What a placer needs once in a process, compiled loops and imports, is fetched before its budget
begins."""

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
from roost.search.local import Simulating

_SECONDS, _TRIALS = 0.5, 1000  # for each placer, compiling not counted

_warm: set[object] = set()  # types of placers


def warm_up(placer: Placer, prove: bool = False, busy: bool = False) -> None:
    """Run a placer, and those that it asks, on a problem of three ops; and a proof, where one is
    asked for.

    For clusters whose crossings keep both ends `busy` the loops are compiled by themselves.
    """
    if prove and _is_cold(bound, busy):
        bound(small_problem(busy), seconds=0.1)
    if not _is_cold(type(placer), busy):
        return
    with contextlib.suppress(Exception):  # whatever is wrong will be told of the real problem
        for name in asked_by(placer):
            warm_up(catalog.find("placers", name)(), busy=busy)
    with contextlib.suppress(Exception):
        _run(placer, small_problem(busy))


def _is_cold(what: object, busy: bool) -> bool:
    """Whether it has not been warmed up so far; from now on it has."""
    key = (what, "busy") if busy else what
    if key in _warm:
        return False
    _warm.add(key)
    return True


def _run(placer: Placer, problem: Problem) -> None:
    """The clock stands still while anything is compiled, or the first loop would leave no time for
    the others."""
    from numba.core.event import TimingListener, install_listener

    with install_listener("numba:compile", TimingListener()) as compiling:  # type: ignore[no-untyped-call]

        def clock() -> float:
            return time.perf_counter() - (compiling.duration if compiling.done else 0.0)

        search = Search(problem, Simulating(problem, 1), Budget(_TRIALS, _SECONDS, clock))
        placer.place(problem, Evaluation(search, "warm-up"))


def small_problem(busy: bool = False) -> Problem:
    """Weights that do not fit beside the ops that read them: so that what fetches them is compiled
    too."""
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
    return Problem(
        graph, cluster, Costs(np.where(graph.is_parameter[:, None], 0.0, [[5.0, 1.0, 1.0]]))
    )
