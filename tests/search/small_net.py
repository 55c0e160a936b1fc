"""A small model to measure, and runtimes of it that take a set time or fail, as the placement of
one op says."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from roost.core.cluster import Cluster, Device, Link
from roost.core.costs import Costs
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.frontends.torch import capture
from roost.runtime.ops.run import GraphRuntime

FAULTS = ("fine", "allocates", "sleeps", "killed", "raises", "nan", "wrong", "slow", "child")


class Net(nn.Module):
    """Linear layers one after the other; the loss where it is trained."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = torch.relu(layer(values))
        return self.norm(values).square().mean()


def made() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(3)
    return Net(), (torch.randn(5, 8),)


def cluster(num_devices: int = 2, memory: int = 2**40) -> Cluster:
    figures: dict[str, Any] = {"peak": {"float32": 1e10}, "memory_bandwidth": 1e10}
    devices = tuple(
        Device(f"cpu:{number}", "cpu", memory, **figures) for number in range(num_devices)
    )
    return Cluster("threads", devices, (Link("*", "*", 1e10),))


def problem(train: bool = False, memory: int = 2**40) -> Problem:
    graph = capture(*made(), train=train)
    seconds = np.where(graph.is_parameter, 0.0, 1e-3)[:, None].repeat(2, axis=1)
    return Problem(graph, cluster(memory=memory), Costs(seconds))


def fault_of(placement: Placement) -> str:
    """What a placement stands for: a number in binary, by the devices of the first ops."""
    number = int(sum(int(placement.device[op]) << op for op in range(4)))
    return FAULTS[number] if number < len(FAULTS) else "slow"


def standing_for(problem: Problem, fault: str, more: int = 0) -> Placement:
    """The placement that has a fault; for each number up to 15 another one."""
    device = np.zeros(problem.graph.num_ops, np.int32)
    number = FAULTS.index(fault)
    device[:4] = [(number >> op) & 1 for op in range(4)]
    device[4:8] = [(more >> op) & 1 for op in range(4)]
    return problem.placement(device)


class Faulty(GraphRuntime):
    """A step takes a set time, ten times as long where the placement is slow, or fails as the
    placement says."""

    fast, slow = 0.01, 0.1

    def __init__(self, step: Any, problem: Problem, placement: Placement, *more: Any) -> None:
        self.fault = fault_of(problem.check(placement))
        super().__init__(step, problem, placement, *more)

    def step(self, *inputs: Any) -> list[Any]:
        time.sleep(self.slow if self.fault == "slow" else self.fast)
        results = super().step(*inputs)
        fault = getattr(self, f"_{self.fault}", None)
        return results if fault is None else fault(results)

    def _allocates(self, results: list[Any]) -> list[Any]:
        held = []
        while True:
            held.append(np.ones(2**22))

    def _sleeps(self, results: list[Any]) -> list[Any]:
        while True:
            time.sleep(1.0)

    def _child(self, results: list[Any]) -> list[Any]:
        if os.fork() == 0:
            os.setsid()
        return self._sleeps(results)

    def _killed(self, results: list[Any]) -> list[Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return results

    def _raises(self, results: list[Any]) -> list[Any]:
        raise RuntimeError("this op is not for this device")

    def _nan(self, results: list[Any]) -> list[Any]:
        return [result * float("nan") for result in results]

    def _wrong(self, results: list[Any]) -> list[Any]:
        return [result * 1.001 for result in results]
