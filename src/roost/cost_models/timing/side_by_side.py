"""The slowdown of a step on a CPU device while its neighbours are as busy.

Devices that are cores of one CPU share its memory and caches. Ops are timed one device at a time;
in a placed step all of them work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from roost.core.cluster import Cluster
from roost.cost_models.timing import timers, whole_step
from roost.frontends.tracing.captured_step import CapturedStep
from roost.presets import machine, measurement_cache

log = logging.getLogger(__name__)

_SECONDS = 2.0  # of steps, alone and side by side
_LEAST, _MOST = 3, 9  # steps
_KEPT = "side_by_side"
_LARGEST = 2.0  # beyond it other programs were measured


def slowdown(step: CapturedStep, cluster: Cluster) -> float:
    """Seconds of a step beside the same step on all other CPU devices, over its seconds alone.

    At least 1; and 1 where a cluster has one CPU device, or memory does not suffice.
    """
    devices = [each for each in timers.timed_devices(cluster) if each.is_cpu and each.cores]
    needed = step.graph.output_bytes.sum(dtype=float) * len(devices)
    if len(devices) < 2 or needed > machine.available_memory() // 2:
        return 1.0
    key = dict(machine.hardware())
    name = f"{','.join(each.hardware for each in devices)}: {step.graph.digest}"
    kept = measurement_cache.read(_KEPT, key)
    if not (isinstance(kept.get(name), float) and 1.0 <= kept[name] <= _LARGEST):
        kept[name] = _measured(step, devices)
        measurement_cache.write(_KEPT, key, kept)
    return float(kept[name])


def _measured(step: CapturedStep, devices: list[timers.TimedDevice]) -> float:
    log.info("timing a step on %d CPU devices at once", len(devices))
    with ExitStack() as stack:
        threads = [
            stack.enter_context(machine.OwnThread(each.threads, set(each.cores or ())))
            for each in devices
        ]
        pool = stack.enter_context(ThreadPoolExecutor(len(devices)))

        def step_seconds() -> float:
            # Not the time that other programs have the core, which no placement changes.
            clock = time.thread_time
            return sum(whole_step.replayed(step, _SECONDS, _LEAST, _MOST, clock=clock))

        def run(thread: Callable[[Callable[[], Any]], Any]) -> float:
            return float(thread(step_seconds))

        try:
            alone = [run(thread) for thread in threads]
            beside = list(pool.map(run, threads))
        except Exception as error:  # any op may fail; the placed step will say so
            log.debug("steps cannot be timed side by side: %s", error)
            return 1.0
    longest = max(both / one for both, one in zip(beside, alone, strict=True))
    return min(max(1.0, longest), _LARGEST)
