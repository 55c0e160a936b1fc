"""Costs held against whole steps: a step all on one device, run there, says how much longer it takes than its ops do.

Ops are timed one by one; in a step they find other caches, other threads and other launches around them. What a step on
one device alone takes more or less is put on all ops of that device alike, so that placements on several devices are
predicted with each as fast as it is at work.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from roost.core.costs import Costs
from roost.core.problem import Problem
from roost.errors import RoostError
from roost.frontends.torch import Described
from roost.runtime.graph import GraphRuntime
from roost.runtime.optimizers import Optimizer
from roost.simulator.compiled import simulate

log = logging.getLogger(__name__)

_WARM, _LEAST, _MOST = 2, 5, 30  # steps
_ODD = 5.0  # times: something else was going on


def calibrated(
    step: Described,
    problem: Problem,
    residents: Mapping[str, Tensor],
    inputs: Any,
    cores: Sequence[set[int]] | None = None,
    seconds: float = 1.0,
) -> tuple[Problem, dict[str, float]]:
    """The problem with devices as fast as whole steps on them are, and for each that was run by how much slower.

    A device that the whole step does not fit on, or fails on, keeps its costs. `inputs` are a tuple, a dict or a
    tensor; `residents` are copied; `seconds` are for each device, at least five steps.
    """
    given = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    slower: dict[str, float] = {}
    op_time = problem.op_time.copy()
    for number, name in enumerate(problem.cluster.device_names):
        alone = problem.placement(np.full(problem.graph.num_ops, number))
        expected = simulate(problem, alone)
        if not expected.feasible or expected.step_time <= 0:
            why = "takes no time" if expected.feasible else "does not fit"
            log.info("the whole step %s on %s: its costs stay as they are", why, name)
            continue
        try:
            with GraphRuntime(step, problem, alone, residents, Optimizer(rate=0.0), cores) as run:
                measured = _step_time(run, given, seconds)
        except (RoostError, RuntimeError) as error:
            log.warning("the whole step could not be run on %s: %s", name, str(error).partition("\n")[0])
            continue
        slower[name] = measured / expected.step_time
        if not 1 / _ODD < slower[name] < _ODD:
            log.warning(
                "a whole step on %s takes %.2g times what its ops take: time them anew, with nothing else at work",
                name,
                slower[name],
            )
        op_time[:, number] *= slower[name]
    source = f"{problem.costs.source}, held against whole steps on {' and '.join(slower)}" if slower else ""
    return Problem(problem.graph, problem.cluster, Costs(op_time, source or problem.costs.source)), slower


def _step_time(run: GraphRuntime, inputs: Sequence[Any], seconds: float) -> float:
    for _ in range(_WARM):
        run.step(*inputs)
    found: list[float] = []
    while len(found) < _LEAST or (sum(found) < seconds and len(found) < _MOST):
        begun = time.perf_counter()
        run.step(*inputs)
        found.append(time.perf_counter() - begun)
    return statistics.median(found)
