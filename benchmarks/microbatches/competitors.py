"""The competitors: each trains a zoo model in one or two processes, and gives the loss of a step.

All of them start from the same weights and see the same batches. Every process has one PyTorch
thread on one core, and keeps freed memory as Roost's runtime does (`keep_memory`), so that no
difference comes from the C library.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Protocol

import allocations
import stages
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

RATE = 1e-4  # of AdamW
PATIENCE = timedelta(seconds=120)  # for the other process; then it is thought dead


@dataclass(frozen=True)
class Job:
    """What one process of a competitor does."""

    kind: str  # a key of KINDS
    model: str
    small: bool
    rank: int
    cores: tuple[int, ...]
    store: str = ""  # a file where the processes of a competitor meet
    share: float = 0.5  # of the work, for the process with rank 0
    options: dict[str, Any] = field(default_factory=dict)


class Competitor(Protocol):
    """A model in training."""

    facts: dict[str, Any]  # for the row

    def step(self, batch: tuple[Tensor, ...], copies: int) -> float:
        """Train with a batch in so many microbatches; give the loss, or NaN if others know it."""

    def close(self) -> None: ...


def batches(job: Job) -> Iterator[tuple[Tensor, ...]]:
    """Batches without end, the same ones for every competitor."""
    settings = stages.example(job.model, job.small)
    seed = 0
    while True:
        seed += 1
        torch.manual_seed(seed)
        yield settings.inputs(True)


def network(job: Job) -> nn.Module:
    """The model with the weights that all competitors start from."""
    torch.manual_seed(0)
    return stages.example(job.model, job.small).model().train()


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=RATE)


class OneDevice:
    """One process; gradients are accumulated over microbatches."""

    def __init__(self, job: Job) -> None:
        self.model = network(job)
        self.optimizer = adamw(self.model.parameters())
        count = sum(parameter.numel() for parameter in self.model.parameters())
        self.facts: dict[str, Any] = {"parameters": count}

    def step(self, batch: tuple[Tensor, ...], copies: int) -> float:
        total = 0.0
        for part in zip(*(each.chunk(copies) for each in batch), strict=True):
            loss = self.model(*part) / copies
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def close(self) -> None:
        pass


class Share(OneDevice):
    """One of two processes that never talk, each with its rows of the batch: the ceiling."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        whole = len(next(batches(job))[0])
        first = round(whole * job.share)
        self.rows = slice(0, first) if job.rank == 0 else slice(first, whole)
        self.facts = {f"rows of process {job.rank}": self.rows.stop - self.rows.start}

    def step(self, batch: tuple[Tensor, ...], copies: int) -> float:
        return super().step(tuple(each[self.rows] for each in batch), copies)


def meet(job: Job) -> None:
    """Join the other process of a competitor, over the loopback device."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    where = f"file://{job.store}"
    dist.init_process_group("gloo", where, rank=job.rank, world_size=2, timeout=PATIENCE)


class DistributedData:
    """DistributedDataParallel over gloo: two processes, each with half of the batch."""

    def __init__(self, job: Job) -> None:
        from torch.nn.parallel import DistributedDataParallel

        meet(job)
        self.rank = job.rank
        self.model = DistributedDataParallel(network(job), gradient_as_bucket_view=True)
        self.optimizer = adamw(self.model.parameters())
        self.facts: dict[str, Any] = {}

    def step(self, batch: tuple[Tensor, ...], copies: int) -> float:
        loss = self.model(*(each.chunk(2)[self.rank] for each in batch))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())

    def close(self) -> None:
        dist.destroy_process_group()


class OneForwardOneBackward:
    """`torch.distributed.pipelining`, Schedule1F1B: two processes with one stage each.

    The gradients of tied weights are added up across the stages, as Megatron does.
    """

    def __init__(self, job: Job) -> None:
        meet(job)
        self.job = job
        whole = network(job)
        batch = next(batches(job))
        self.cut = stages.cut(job.model, whole, batch, job.share)
        self.own = (self.cut.first, self.cut.last)[job.rank]
        self.optimizer = adamw(self.own.parameters())
        self.schedules: dict[int, Any] = {}
        self.facts: dict[str, Any] = {"cut": self.cut.says, "tied": len(self.cut.tied)}

    def _schedule(self, batch: tuple[Tensor, ...], copies: int) -> Any:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        first, last = stages.split_inputs(self.job.model, tuple(x.chunk(copies)[0] for x in batch))
        with torch.no_grad():
            middle = self.cut.first(*first)
            logits = self.cut.last(middle, **last)
        middle.requires_grad_()
        logits.requires_grad_()
        args, outputs = ((first, (middle,)), ((middle,), (logits,)))[self.job.rank]
        stage = PipelineStage(
            self.own, self.job.rank, 2, torch.device("cpu"), input_args=args, output_args=outputs
        )
        return Schedule1F1B(stage, copies, loss_fn=mean_loss)

    def step(self, batch: tuple[Tensor, ...], copies: int) -> float:
        if copies not in self.schedules:
            self.schedules[copies] = self._schedule(batch, copies)
        first, last = stages.split_inputs(self.job.model, batch)
        losses: list[Tensor] = []
        schedule = self.schedules[copies]
        if self.job.rank == 0:
            schedule.step(*first)
        else:
            schedule.step(**last, target=batch[-1], losses=losses, return_outputs=False)
        for parameter in self.cut.tied:
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        known = [loss.item() for loss in losses]
        return sum(known) / len(known) if known else float("nan")

    def close(self) -> None:
        dist.destroy_process_group()


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Roost:
    """`roost.trainer` on two virtual devices with one core each; it chooses the microbatches.

    It is told that the second device is slowed, by its peak in the cluster: the way to say that a
    core serves other programs too.
    """

    def __init__(self, job: Job) -> None:
        import roost

        make: Any = getattr(roost, "trainer", None)
        if make is None:
            raise Missing("this Roost has no `roost.trainer`")
        cluster = slowed(roost.probe(virtual=2), job.options["slower"])
        self.trainer = make(
            network(job),
            next(batches(job)),
            optimizer="adamw",
            lr=RATE,
            microbatches="auto",
            cluster=cluster,
            seconds=job.options["seconds"],
        )
        plan = self.trainer.plan
        self.facts: dict[str, Any] = {
            "copies": plan.microbatches,
            "expected": plan.step_time,
            "one device expected": plan.one_device_step_time,
            "plan": str(plan),
        }

    def step(self, batch: tuple[Tensor, ...], copies: int) -> float:
        return float(self.trainer.step(*batch))

    def memory(self, batch: tuple[Tensor, ...]) -> dict[str, dict[str, float]] | None:
        """Peak memory of each device in one more step, simulated and allocated."""
        return allocations.memory(self.trainer.plan, lambda: self.trainer.step(*batch))

    def close(self) -> None:
        self.trainer.close()


def slowed(cluster: Any, times: float) -> Any:
    """The cluster with a second device that is so many times slower."""
    first, second = cluster.devices
    second = replace(
        second,
        peak={kind: rate / times for kind, rate in second.peak.items()},
        memory_bandwidth=second.memory_bandwidth / times,
        launch_overhead=second.launch_overhead * times,
    )
    return replace(cluster, devices=(first, second))


class Missing(Exception):
    """A competitor that cannot take part here; the text says why."""


KINDS: dict[str, type[Any]] = {
    "one": OneDevice,
    "ddp": DistributedData,
    "1f1b": OneForwardOneBackward,
    "ceiling": Share,
    "roost": Roost,
}
