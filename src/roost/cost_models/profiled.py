"""Costs from timing each op on this machine, with tensors of its shapes.

A device runs an op as the runtime does. A CPU runs it with its threads in a thread of its own, on
its own cores if the CPU is several devices; a GPU runs it with a full queue. The time of an op
includes the Python call and the views before it. Equal ops are timed once, and the times are kept
for this hardware. An op that cannot run gets the time of the roofline, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roost.core.cluster import Cluster
from roost.core.costs import Costs
from roost.core.graph import Graph
from roost.cost_models.timing.profile import Profile
from roost.cost_models.timing.progress_log import ProgressLog
from roost.errors import InputError
from roost.presets import machine

if TYPE_CHECKING:
    from roost.frontends.tracing.captured_step import CapturedStep

Progress = Callable[[int, int], None]  # ops timed so far, ops in all


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
    settings = Profiled(
        step,
        beside_copies,
        launches,
        seconds_each=seconds_each,
        cache=cache,
        progress=progress or ProgressLog(),
    )
    return settings.estimate(step.graph, cluster)


def alone_on(cluster: Cluster, device: int, call: Callable[[Any], Any]) -> Any:
    """Call with the PyTorch device of a cluster's device, in the kind of thread that times ops."""
    from roost.cost_models.timing.timers import timed_devices

    timed = timed_devices(cluster)[device]
    if timed.device.type != "cpu":
        return call(timed.device)
    with machine.OwnThread(timed.threads, set(timed.cores or ()) or None) as thread:
        return thread(lambda: call(timed.device))


@dataclass(frozen=True)
class Profiled:
    """Times the ops of a captured step on the devices of this machine."""

    step: CapturedStep | None = None
    # A copy from host memory to a GPU takes bandwidth from CPU ops that read big weights. For one
    # token, linear layers in bfloat16 read 70 GB/s alone and 39 GB/s beside a copy, and the copy
    # lost nothing. A placement that computes on the CPU while it streams to the GPU has copies
    # running nearly all the time.
    beside_copies: bool = True
    # One Python thread launches the ops of a GPU ahead of it. With a full queue an op takes its GPU
    # time; if ops are shorter than their launches, the queue runs dry and an op takes the host's
    # time. That depends on the ops before. So the time of an op is what it adds to a step that runs
    # on the GPU alone, in program order. (The longer of the two times was 22 % too much for a
    # GPT-2 of 1.6 billion weights.) Set to False for the GPU's time alone, if the host is fast
    # enough or CUDA graphs capture the launches.
    launches: bool = True
    # Time each CPU op among the others of its step. Timing one small op again and again misses
    # much, because its code and operands stay in a cache. Off by default: it was right for one CPU,
    # not better for two devices (benchmarks/fidelity.py), and a step of a large model on a CPU is
    # long. Launches on GPUs are always timed in their step if memory allows: with both timed so,
    # predictions were nearer on all three models that were tried beside a GPU.
    in_step: bool = False
    seconds_each: float = 0.03  # for each unique op; at least three calls
    most_seconds: float = 20.0  # an op that the roofline calls longer is not timed
    cache: bool = True  # use the times that are kept, and keep new ones
    refresh: bool = False  # ignore the times that are kept
    progress: Progress | None = field(default=None, repr=False)

    def estimate(self, graph: Graph, cluster: Cluster) -> Costs:
        """The costs of a graph on a cluster."""
        return self.profile(graph, cluster).costs

    def profile(self, graph: Graph, cluster: Cluster) -> Profile:
        """The costs, and where they come from."""
        if self.step is None:
            raise InputError(
                "profiled costs need the captured step, not its graph alone: roost.profile(step, "
                "cluster)"
            )
        if graph.digest != self.step.graph.digest:
            raise InputError(
                f"the graph is {graph.digest}, the captured step is {self.step.graph.digest}"
            )
        from roost.cost_models.timing.profiler import Profiler

        return Profiler(self, self.step, cluster).profile()
