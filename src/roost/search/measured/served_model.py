"""The code of a worker process: the captured model, and its placements that are ready to be timed.

`serve` answers the requests of `worker.py`, one at a time. It may hang or die while it does.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from roost.core.cluster import Cluster, Device
from roost.core.costs import Costs
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.errors import InputError, RoostError
from roost.frontends.tracing.trace import without_cache
from roost.presets import machine
from roost.runtime.ops.run import GraphRuntime
from roost.runtime.step.optimizers import Optimizer
from roost.runtime.step.random_ops import is_random
from roost.search.measured.model_source import ModelSource
from roost.simulator.compiled import Simulator

# Steps whose results are compared. In training the second step shows what the first has written.
CHECKED_STEPS = 2
_MEMORY_FACTOR = 1.5  # times the simulated peak
_BLOCK_BYTES = 2**30  # of a CUDA device: for workspaces, and blocks that are not full
_PARENT_SECONDS = 1.0  # between two checks that the searching process is still there

# Largest difference to the unplaced step, over the size of the result. Kernels of two kinds of
# device add in different orders, and convolutions on GPUs round to fewer bits.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_TOLERANCE_CUDA = {**_TOLERANCE, torch.float64: 1e-7, torch.float32: 5e-3}


class WrongResult(RoostError):
    """A placed step gives other numbers than the unplaced one."""


@dataclass(frozen=True)
class ReadyPlacement:
    """The first figures of a placement that is ready to be timed."""

    seconds: float  # of its fastest warm-up step
    peak: Mapping[int, int]  # device -> bytes, of devices whose memory can be measured


def cores_of(cluster: Cluster) -> list[set[int]]:
    """The CPU cores for the thread of each device; an empty set leaves the choice to the system."""
    return machine.parts([device.kind for device in cluster.devices])


class ServedModel:
    """The model in this process, and its runs by the digest of their placement."""

    def __init__(
        self, source: ModelSource, problem: Problem, runtime: Callable[..., Any] | None = None
    ) -> None:
        self.source = source
        self.problem = problem
        self.runtime = runtime or GraphRuntime
        self.update = source.update or Optimizer()
        self.cores = cores_of(problem.cluster)
        self.cuda = {
            n: torch.device(d.name)
            for n, d in enumerate(problem.cluster.devices)
            if d.kind == "cuda"
        }
        model, args, kwargs = source.build()
        self.step = source.described(model, args, kwargs, problem.graph.name)
        if self.step.graph.digest != problem.graph.digest:
            raise InputError(
                f"the model that is measured has graph {self.step.graph.digest}, the problem has "
                f"{problem.graph.digest}; capture it with the same settings"
            )
        self.inputs = [
            leaf.detach().cpu() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        ]
        self.residents = _residents(model)
        self.tolerance = _TOLERANCE_CUDA if self.cuda else _TOLERANCE
        self.expected = self._unplaced()
        self._check_captured(model, args, kwargs)
        self.source = replace(source, model="")  # free a model that was moved to a GPU
        self.running: dict[str, Any] = {}
        gc.collect()
        gc.freeze()

    # ------------------------------------------------------------------ requests

    def build(self, key: str, placement: Placement, warm_up: int) -> ReadyPlacement:
        """Check the first steps of a placement against the unplaced model, and warm it up."""
        self.drop(key)
        base = self._begin_memory()
        run = self.runtime(
            self.step,
            self.problem,
            placement,
            self.residents,
            self.update,
            self.cores,
            self.source.seed,
        )
        self.running[key] = run
        for number, expected in enumerate(self.expected, 1):
            returned = run.step(*self.inputs)
            self._wait()
            if why := difference(returned, expected, self.tolerance):
                raise WrongResult(
                    f"step {number} gives other numbers than the unplaced model: {why}"
                )
        seconds = min(self.time(key, 1) for _ in range(max(1, warm_up)))
        peak = {n: torch.cuda.max_memory_allocated(d) - base[n] for n, d in self.cuda.items()}
        return ReadyPlacement(seconds, peak)

    def time(self, key: str, steps: int) -> float:
        """Seconds of a step, the mean of so many in a row."""
        run = self.running[key]
        self._wait()
        gc.disable()
        try:
            began = time.perf_counter()
            for _ in range(steps):
                run.step(*self.inputs)
            self._wait()
            return (time.perf_counter() - began) / steps
        finally:
            gc.enable()

    def drop(self, key: str) -> None:
        if key in self.running:
            self.running.pop(key).close()
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()

    def free(self) -> dict[int, int]:
        """Free bytes of each CUDA device."""
        return {n: int(torch.cuda.mem_get_info(device)[0]) for n, device in self.cuda.items()}

    # ------------------------------------------------------------------ helpers

    def _wait(self) -> None:
        for device in self.cuda.values():
            torch.cuda.synchronize(device)

    def _begin_memory(self) -> dict[int, int]:
        """Bytes in use on each CUDA device. Caps each a little above its memory in the cluster.

        The peak decides whether a placement fits. PyTorch takes memory in large blocks for each
        stream, and libraries take workspaces. Without room for these a placement would fail within
        a small cap.
        """
        base = {}
        for number, device in self.cuda.items():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            base[number] = torch.cuda.memory_allocated(device)
            total = torch.cuda.get_device_properties(device).total_memory
            own = _MEMORY_FACTOR * self.problem.cluster.devices[number].memory
            most = torch.cuda.memory_reserved(device) + own + _BLOCK_BYTES
            torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), device)
        return base

    def _unplaced(self) -> list[list[Any]]:
        """The results of the first steps on one device: a GPU with room for all, else the CPU."""
        alone, placement = self._one_device()
        with GraphRuntime(
            self.step,
            alone,
            placement,
            self.residents,
            self.update,
            cores_of(alone.cluster),
            self.source.seed,
        ) as run:
            steps = CHECKED_STEPS if self.source.train else 1
            return [[_kept(value) for value in run.step(*self.inputs)] for _ in range(steps)]

    def _one_device(self) -> tuple[Problem, Placement]:
        graph = self.problem.graph
        gpus = [self.problem.cluster.devices[number] for number in self.cuda]
        for device in [*gpus, Device("cpu", "cpu", 2**60)]:
            cluster = Cluster("unplaced", (replace(device, memory=2**60),))
            try:
                alone = Problem(graph, cluster, Costs(np.zeros((graph.num_ops, 1))))
            except InputError:
                continue  # an op may not run there
            placement = alone.placement(np.zeros(graph.num_ops, np.int32))
            if device.kind != "cuda" or _has_room(alone, placement):
                self._alone_on = torch.device("cpu" if device.kind == "cpu" else device.name)
                return alone, placement
        raise InputError("no one device may run all ops: there is no unplaced step to compare with")

    def _check_captured(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise InputError if the captured step gives other numbers than the model.

        A step that draws at random, or returns other values, cannot be compared.
        """
        if any(is_random(node.target) for node in self.step.program.module.graph.nodes):
            return
        there = torch.utils._pytree.tree_map_only(
            Tensor, lambda value: value.to(self._alone_on), (args, kwargs)
        )
        with torch.no_grad(), without_cache(model):
            returned = model.to(self._alone_on)(*there[0], **there[1])
            returned = self.source.loss(returned) if self.source.loss is not None else returned
        model_gives = [_kept(leaf) for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]
        if len(model_gives) != len(self.expected[0]):
            return
        if why := difference(self.expected[0], model_gives, self.tolerance):
            raise InputError(f"the captured step does not give what the model gives: {why}")


def _residents(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name. Buffers are copied: the model changes them when it runs."""
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    tensors = {name: value.detach().cpu() for name, value in parameters}
    return tensors | {name: value.detach().cpu().clone() for name, value in buffers}


def _has_room(alone: Problem, placement: Placement) -> bool:
    """True if the whole model fits on its one device, a GPU, as it really is."""
    need = int(Simulator.of(alone).simulate(placement).peak_memory[0])
    free = torch.cuda.mem_get_info(torch.device(alone.cluster.devices[0].name))[0]
    return _MEMORY_FACTOR * need < free


def _kept(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def difference(
    results: list[Any], expected: list[Any], tolerance: Mapping[torch.dtype, float]
) -> str:
    """The first difference between results in words; "" if there is none."""
    if len(results) != len(expected):
        return f"{len(results)} results instead of {len(expected)}"
    for number, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
        if not isinstance(theirs, Tensor):
            continue
        if not isinstance(ours, Tensor) or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            return f"result {number} is of another shape or type"
        if why := _differs(ours.detach().cpu(), theirs, tolerance.get(theirs.dtype, 0.0)):
            return f"result {number} {why}"
    return ""


def _differs(ours: Tensor, theirs: Tensor, share: float) -> str:
    if torch.equal(ours, theirs):
        return ""
    if not theirs.is_floating_point():
        return "differs"
    ours = ours.double()
    theirs = theirs.double()
    sound = theirs.isfinite()
    is_sound = ours.isfinite()
    if not torch.equal(is_sound, sound):
        lost = (~is_sound & sound).any()
        return "is not a number where it should be one" if lost else "differs"
    if not sound.any():
        return ""
    ours = ours[sound]
    theirs = theirs[sound]
    size = float(theirs.square().mean().sqrt())
    error = (ours - theirs).abs()
    if not (error > share * (size + theirs.abs())).any():
        return ""
    return f"differs by {float(error.max()):.3g}, of a size of {size:.3g}"


# ---------------------------------------------------------------------- the process


def serve(connection: Connection) -> None:
    """Receive the model and the problem, then answer requests until the other side closes."""
    # A group of its own, so that it can be ended with all that it starts. Ctrl-C is not for it.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # the model may print; standard output is for results
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        packed, problem, runtime = pickle.loads(connection.recv_bytes())
        served = ServedModel(pickle.loads(packed), problem, runtime)
        connection.send((True, None))
        while True:
            command, args = connection.recv()
            try:
                connection.send((True, getattr(served, command)(*args)))
            except Exception as error:
                connection.send((False, kind_and_text(error)))
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:  # before the first request
        connection.send((False, kind_and_text(error)))


def kind_and_text(error: BaseException) -> tuple[str, str]:
    """The kind of an error, as `WorkerFailed` has it, and its first line."""
    lines = str(error).strip().splitlines()
    if isinstance(error, RoostError):
        return _kind(error), lines[0] if lines else type(error).__name__
    return _kind(error), ": ".join([type(error).__name__, *lines[:1]])


def _kind(error: BaseException) -> str:
    """memory: none was left. refused: the placement cannot run, and did not. failed: the rest."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    if any(isinstance(each, MemoryError | torch.OutOfMemoryError) for each in causes):
        return "memory"
    if any("DefaultCPUAllocator: " in str(each) for each in causes):
        return "memory"
    return "refused" if isinstance(error, InputError) else "failed"


def _end_with(parent: int) -> None:
    """End this process when its parent is gone. Otherwise it would hold its memory for ever."""
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    os._exit(1)
