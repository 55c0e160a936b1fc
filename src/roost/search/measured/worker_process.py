"""What runs in a process that measures: the model, captured once, and the placements of it that are
held ready.

It does what the other side asks for (`worker.py`), one thing at a time, and may hang or die in
doing so.
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

# Whose results are compared: in training the second shows what the first has written.
CHECKED_STEPS = 2
_ROOM = 1.5  # times what the simulator says
_BLOCKS = 2**30  # bytes of a CUDA device, for workspaces, and blocks that are not full
_PARENT_SECONDS = 1.0  # between two looks at whether the process that asks is still there

# Largest difference to the unplaced step, as a share of the size of the result: kernels of two
# kinds of device add up in other orders, and convolutions on GPUs round to fewer bits.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_TOLERANCE_CUDA = {**_TOLERANCE, torch.float64: 1e-7, torch.float32: 5e-3}


class WrongResult(RoostError):
    """A placed step that does not give the numbers of the unplaced one."""


@dataclass(frozen=True)
class Built:
    """A placement that is ready to be timed."""

    seconds: float  # of its last step
    peak: Mapping[int, int]  # device -> bytes, where that can be measured


def cores_of(cluster: Cluster) -> list[set[int]]:
    """Cores for the thread of each device; an empty set leaves it to the system."""
    return machine.parts([device.kind for device in cluster.devices])


class Bench:
    """The model in this process, and runs of it by name."""

    def __init__(
        self, source: ModelSource, problem: Problem, runtime: Callable[..., Any] | None = None
    ) -> None:
        self.source, self.problem, self.runtime = source, problem, runtime or GraphRuntime
        self.update, self.cores = source.update or Optimizer(), cores_of(problem.cluster)
        self.cuda = {
            n: torch.device(d.name)
            for n, d in enumerate(problem.cluster.devices)
            if d.kind == "cuda"
        }
        model, args, kwargs = source.build()
        self.step = source.described(model, args, kwargs, problem.graph.name)
        if self.step.graph.digest != problem.graph.digest:
            raise InputError(
                f"the model that is measured has graph {self.step.graph.digest}, the problem "
                f"{problem.graph.digest}; "
                "capture it with the same settings"
            )
        self.inputs = [
            leaf.detach().cpu() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        ]
        self.residents = _residents(model)
        self.tolerance = _TOLERANCE_CUDA if self.cuda else _TOLERANCE
        self.expected = self._unplaced()
        self._check_captured(model, args, kwargs)
        self.source = replace(source, model="")  # a model that was moved to a GPU would stay there
        self.running: dict[str, Any] = {}
        gc.collect()
        gc.freeze()

    # ------------------------------------------------------------------ what is asked for

    def build(self, key: str, placement: Placement, warm_up: int) -> Built:
        """Make a placement ready: its first steps are compared with those of the unplaced model,
        some more warm it."""
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
        for number, expected in enumerate(self.expected):
            found = run.step(*self.inputs)
            self._wait()
            if why := difference(found, expected, self.tolerance):
                raise WrongResult(
                    f"step {number + 1} gives other numbers than the unplaced model: {why}"
                )
        seconds = min(self.time(key, 1) for _ in range(max(1, warm_up)))
        peak = {n: torch.cuda.max_memory_allocated(d) - base[n] for n, d in self.cuda.items()}
        return Built(seconds, peak)

    def time(self, key: str, steps: int) -> float:
        """Seconds of a step, over so many in a row."""
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
        """Bytes that are free on each CUDA device, beside what is held ready."""
        return {
            number: int(torch.cuda.mem_get_info(device)[0]) for number, device in self.cuda.items()
        }

    # ------------------------------------------------------------------ inside

    def _wait(self) -> None:
        for device in self.cuda.values():
            torch.cuda.synchronize(device)

    def _begin_memory(self) -> dict[int, int]:
        """Bytes in use on each CUDA device; from here on it gives not much more than the cluster
        says that it has.

        What a placement holds is judged by its peak. PyTorch takes memory in large blocks, apart
        for each stream, and libraries take workspaces: with no room for these a placement within a
        small cap would fail.
        """
        base = {}
        for number, device in self.cuda.items():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            base[number] = torch.cuda.memory_allocated(device)
            total = torch.cuda.get_device_properties(device).total_memory
            most = (
                torch.cuda.memory_reserved(device)
                + _ROOM * self.problem.cluster.devices[number].memory
                + _BLOCKS
            )
            torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), device)
        return base

    def _unplaced(self) -> list[list[Any]]:
        """What the first steps return on one device: that of a GPU where all of it has room there,
        else the CPU."""
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
        for device in [
            *(self.problem.cluster.devices[number] for number in self.cuda),
            Device("cpu", "cpu", 2**60),
        ]:
            cluster = Cluster("unplaced", (replace(device, memory=2**60),))
            try:
                alone = Problem(graph, cluster, Costs(np.zeros((graph.num_ops, 1))))
            except InputError:
                continue  # an op that may not run there
            placement = alone.placement(np.zeros(graph.num_ops, np.int32))
            if device.kind != "cuda" or _has_room(alone, placement):
                self._alone_on = torch.device("cpu" if device.kind == "cpu" else device.name)
                return alone, placement
        raise InputError("no one device may run all ops: there is nothing to compare with")

    def _check_captured(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """The captured step must be the model's; where it draws at random, or returns other things,
        nobody can say."""
        if any(is_random(node.target) for node in self.step.program.module.graph.nodes):
            return
        there = torch.utils._pytree.tree_map_only(
            Tensor, lambda value: value.to(self._alone_on), (args, kwargs)
        )
        with torch.no_grad(), without_cache(model):
            returned = model.to(self._alone_on)(*there[0], **there[1])
            returned = self.source.loss(returned) if self.source.loss is not None else returned
        found = [_kept(leaf) for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]
        if len(found) == len(self.expected[0]) and (
            why := difference(self.expected[0], found, self.tolerance)
        ):
            raise InputError(f"the captured step does not give what the model gives: {why}")


def _residents(model: nn.Module) -> dict[str, Tensor]:
    """Parameters as they lie; buffers copied, for the model changes them when it is called."""
    found = {
        name: value.detach().cpu() for name, value in model.named_parameters(remove_duplicate=False)
    }
    return found | {
        name: value.detach().cpu().clone()
        for name, value in model.named_buffers(remove_duplicate=False)
    }


def _has_room(alone: Problem, placement: Placement) -> bool:
    """Whether all of a model has room on its one device, a GPU, whatever the cluster says of its
    memory."""
    from roost.simulator.compiled import Simulator

    need = int(Simulator.of(alone).simulate(placement).peak_memory[0])
    return _ROOM * need < torch.cuda.mem_get_info(torch.device(alone.cluster.devices[0].name))[0]


def _kept(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def difference(
    found: list[Any], expected: list[Any], tolerance: Mapping[torch.dtype, float]
) -> str:
    """What is wrong with results, or nothing."""
    if len(found) != len(expected):
        return f"{len(found)} results instead of {len(expected)}"
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
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
    ours, theirs = ours.double(), theirs.double()
    sound = theirs.isfinite()
    if not torch.equal(ours.isfinite(), sound):
        return (
            "is not a number where it should be one"
            if (~ours.isfinite() & sound).any()
            else "differs"
        )
    if not sound.any():
        return ""
    ours, theirs = ours[sound], theirs[sound]
    size = float(theirs.square().mean().sqrt())
    over = (ours - theirs).abs() - share * (size + theirs.abs())
    return (
        f"differs by {float((ours - theirs).abs().max()):.3g}, of a size of {size:.3g}"
        if (over > 0).any()
        else ""
    )


# ---------------------------------------------------------------------- the process


def serve(connection: Connection) -> None:
    """Take the model and the problem, then do what is asked for until the other side closes."""
    # A group of its own, so that it can be ended with all that it starts; and Ctrl-C is not for it.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what a model prints is no result of ours
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        packed, problem, runtime = pickle.loads(connection.recv_bytes())
        bench = Bench(pickle.loads(packed), problem, runtime)
        connection.send((True, None))
        while True:
            command, args = connection.recv()
            try:
                connection.send((True, getattr(bench, command)(*args)))
            except Exception as error:
                connection.send((False, told(error)))
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:  # before anything was measured
        connection.send((False, told(error)))


def told(error: BaseException) -> tuple[str, str]:
    """The kind of an error, and what it says."""
    return _kind(error), _said(error)


def _kind(error: BaseException) -> str:
    """memory: there was none left. refused: it cannot be run, and nothing was. failed: anything
    else."""
    causes: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in causes:
        causes.append(at)
        at = at.__cause__ or at.__context__
    short = any(isinstance(each, MemoryError | torch.OutOfMemoryError) for each in causes)
    if short or any("DefaultCPUAllocator: " in str(each) for each in causes):
        return "memory"
    return "refused" if isinstance(error, InputError) else "failed"


def _said(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    if isinstance(error, RoostError):
        return text[0] if text else type(error).__name__
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _end_with(parent: int) -> None:
    """A process that nobody asks any more would hold its memory for ever."""
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    os._exit(1)
