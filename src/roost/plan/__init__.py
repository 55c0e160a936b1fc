"""From a model to a plan in one call: capture, costs, search; and the plan, applied to the model."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roost.core.cluster import Cluster
from roost.core.costs import Costs
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.core.timeline import Timeline
from roost.core.trial import Result
from roost.core.units import parse_bytes, show_bytes, show_seconds
from roost.errors import Infeasible, InputError, UnknownName
from roost.placers import Placer
from roost.plan.clusters import (
    cluster_of,
    hop_of,
    kept_longer,
    main_of,
    only_on,
    with_less,
    with_share,
    with_store,
    without_store,
)
from roost.search.evaluate import Progress
from roost.search.solve import solve
from roost.simulator.compiled import simulate
from roost.transforms.by_module import ByModule

if TYPE_CHECKING:
    from torch import nn

    from roost.frontends.torch import Described
    from roost.report.exports import DeviceMap
    from roost.runtime.modules import ModulePlacement
    from roost.runtime.verify import Verification

log = logging.getLogger(__name__)

# What libraries take for themselves, and rounding of the allocator: no op's, and not in any graph.
_WORKSPACE = 96 * 2**20
_ATTEMPTS = 4  # at a plan that fits
# Rows up to which a CPU computes with weights about as fast as a link brings them: bfloat16 at 3 TFLOP/s and 55 GB/s.
_FEW = 32


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Where each module of a model runs and where its weights live, and what that is expected to take."""

    problem: Problem  # of the graph as captured; the memory from which weights are streamed is a device in it
    result: Result  # of the search, in which a module is one group
    modules: ModulePlacement
    placement: Placement  # the same, op by op
    timeline: Timeline  # simulated
    # What it was made from, and a file does not have.
    step: Described | None = None
    example_inputs: Any = None

    @property
    def step_time(self) -> float:
        """Seconds that a step is expected to take."""
        return self.timeline.step_time

    def apply(self, model: nn.Module) -> nn.Module:
        """Place the model: the same object, for inference, with `generate` and all."""
        from roost.runtime.modules import apply

        return apply(model, self.modules)

    def remove(self, model: nn.Module) -> nn.Module:
        """Take the placement off again."""
        from roost.runtime.modules import remove

        return remove(model)

    def verify(self, model: nn.Module, inputs: Any = None, tolerance: float | None = None) -> Verification:
        """Whether the placed model gives what it gives unplaced: outputs, buffers, tied weights. It is left as it was.

        `inputs` are those that the plan was made with where none are given; a plan from a file has none.
        """
        from roost.runtime.verify_modules import verify_modules

        given = self.example_inputs if inputs is None else inputs
        if given is None:
            raise InputError(
                "a plan from a file has no inputs to call the model with; give some: verify(model, inputs)"
            )
        return verify_modules(model, self.modules, given, tolerance=tolerance)

    def device_map(self, model: nn.Module | None = None) -> DeviceMap:
        """The nearest that accelerate can express, and what that costs: it streams nothing ahead."""
        from roost.report.exports import device_map

        problem, placement = self.on_real_devices()
        return device_map(model, problem, placement)

    def on_real_devices(self) -> tuple[Problem, Placement]:
        """Problem and placement without the device that memory is: as files have them, and exports take them."""
        return without_store(self.problem, self.placement)

    def save(self, path: str | Path) -> None:
        """Write `plan.json`, compressed where the name ends in `.gz`; `roost.load` reads it, for the same model."""
        from roost.core import formats
        from roost.plan import files  # noqa: F401  it tells what is written

        formats.save(self, path)

    def __repr__(self) -> str:
        return (
            f"Plan({self.problem.graph.name!r} on {self.problem.cluster.name!r}: {show_seconds(self.step_time)} a step)"
        )

    def __str__(self) -> str:
        """What a person wants to know before running it."""
        main, weights = self.modules.main, self._weights()
        total = max(1, sum(weights.values()))
        lines = [
            f"{kind:34} {show_bytes(size):>10} of weights, {size / total:4.0%}"
            for kind, size in weights.items()
            if size
        ]
        if not self.modules.streamed and not self.modules.runs_on:
            lines.append(f"one device is best: everything runs on {main}")
        if self.modules.streamed:
            lines.append(f"{'window for weights on their way':34} {show_bytes(self.modules.window):>10} on {main}")
        real = simulate(*self.on_real_devices())
        sizes = zip(real.device_names, real.peak_memory.tolist(), strict=True)
        peak = ", ".join(f"{name} {show_bytes(size)}" for name, size in sizes if size)
        bound = (
            f", at least {show_seconds(self.result.bound.step_time)} whatever the placement"
            if self.result.bound
            else ""
        )
        lines.append(f"step: {show_seconds(self.step_time)} expected{bound}")
        lines.append(f"memory: {peak}")
        return "\n".join(lines)

    def _weights(self) -> dict[str, int]:
        """Bytes of weights by what is done with them."""
        graph, names = self.problem.graph, self.problem.cluster.device_names
        streamed = {name for brought in self.modules.streamed.values() for name in brought}
        found: Counter[str] = Counter()
        for op in np.flatnonzero(graph.is_parameter & (np.diff(graph.consumer_start) > 0)).tolist():
            home = names[self.placement.device[op]]
            if home == self.modules.main:
                kind = f"kept on {home}"
            elif graph.op_names[op] in streamed:
                kind = f"streamed from {home} to {self.modules.main}"
            elif self.problem.cluster.devices[self.placement.device[op]].kind == "cpu":
                kind = f"used where they lie, on {home}"
            else:
                kind = f"kept on {home}"
            found[kind] += int(graph.output_bytes[op])
        return dict(sorted(found.items()))


def place(
    model: nn.Module,
    example_inputs: Any,
    cluster: Cluster | str | None = None,
    *,
    memory: Mapping[str, int | str] | None = None,
    reserve: Mapping[str, int | str] | None = None,
    kv_tokens: int = 0,
    exact: bool = False,
    costs: Costs | str = "profiled",
    placer: str | Placer = "auto",
    seconds: float = 10.0,
    trials: int | None = None,
    seed: int = 0,
    on_trial: Callable[[Progress], object] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Find where the modules of a model should run on this machine, or another.

    `memory` caps devices, as in {"cuda:0": "6GiB"}; `reserve` takes something off for what the example does not show.
    `kv_tokens` is how long the cache of keys and values grows (sequences times tokens) in models of transformers.
    `exact`: nothing is computed on the CPU, whose rounding differs, so that the placed model gives every bit of what
    the GPU gives without it. `costs` are "profiled" here, "estimated" from the figures of the cluster, or given.
    `progress` is called with how many ops are timed of how many; all else that takes long is told to `logging`, at
    level INFO. Raises `Infeasible` where nothing fits.
    """
    import torch

    from roost.cost_models import estimate
    from roost.cost_models.profiled import profile
    from roost.frontends.torch import step_of
    from roost.runtime.modules import is_placed
    from roost.runtime.rounding import by_modules

    _check_arguments(cluster, memory, reserve)
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"a torch.nn.Module is needed, not {type(model).__name__}")
    if is_placed(model):
        raise InputError("the model is placed already; take that off first, plan.remove(model)")
    if not isinstance(costs, Costs) and costs not in ("profiled", "estimated"):
        raise UnknownName("kind of costs", str(costs), ["profiled", "estimated"])
    where = cluster_of(cluster, memory or {})
    log.info("capturing the model")
    step = step_of(model, example_inputs)
    room = {name: parse_bytes(size) for name, size in (reserve or {}).items()}
    main = main_of(where)
    room[main] = room.get(main, 0) + kv_bytes(model, kv_tokens) + (_WORKSPACE if main.startswith("cuda") else 0)
    if kv_tokens:  # before the tokens comes a prompt, for which weights that lie elsewhere are brought, one at a time
        own = [sum(one.nbytes for one in module.parameters(recurse=False)) for module in model.modules()]
        room[main] += max(own, default=0)
    where = with_less(where, room)
    if costs == "profiled":
        # While weights are on their way, or the CPU computes, the host tells the GPU what comes next: then ops take
        # what they take on the GPU. Only where nothing has to wait for weights may launching them be what takes long.
        weights = int(step.graph.output_bytes[step.graph.is_parameter].sum())
        fits = weights <= where.devices[where.index_of(main)].memory
        with _threads_beside(main):
            found = profile(step, where, launches=fits, progress=progress)
    elif isinstance(costs, Costs):
        found = costs
    else:
        found = estimate(step.graph, where).costs
    problem = Problem(step.graph, where, found)  # which checks costs that were given
    if exact:
        found = only_on(main, step.graph, where, found)
        problem = Problem(step.graph, where, found)
    problem = Problem(step.graph, with_less(where, {main: kept_longer(problem, main)}), found)
    problem = with_store(problem, main, hop_of(main))
    kind = where.devices[where.index_of(main)].kind
    whole = ByModule(kind, tied=step.program.tied).apply(step.graph)
    few = max(_FEW, 2 * _rows(example_inputs))
    log.info("searching for a placement of %d ops", step.graph.num_ops)
    share, less = 1.0, 0  # of the host's memory for streamed weights, and as much for the others: it is one memory
    for _ in range(_ATTEMPTS):
        shared = with_share(problem, share)
        if less:
            shared = Problem(shared.graph, with_less(shared.cluster, {main: less}), shared.costs)
        result = solve(whole.problem(shared), placer, seconds, trials, seed, on_trial)
        modules, placement = by_modules(shared, whole.expand(result.best.placement), model, step.program.tied)
        timeline = simulate(shared, placement)
        plan = Plan(shared, result, replace(modules, few_rows=few), placement, timeline, step, example_inputs)
        real = simulate(*plan.on_real_devices())
        if real.feasible and timeline.feasible:
            if exact:
                _check_exact(plan, main)
            return plan
        # What one module needs together may be more than was counted, and both kinds of host memory are one.
        over = int(timeline.peak_memory[where.index_of(main)]) - int(shared.cluster.memory[where.index_of(main)])
        if over <= 0 and share < 1.0:
            break
        share, less = (share, less + over) if over > 0 else (0.5, less)
    missing = np.maximum(real.peak_memory - real.capacity, 0)
    worst = int(missing.argmax())
    raise Infeasible(
        f"nothing was found that fits: {real.device_names[worst]!r} lacks {show_bytes(int(missing[worst]))}; give it "
        "more, or search longer",
        real.device_names[worst],
        int(missing[worst]),
    )


def _check_exact(plan: Plan, main: str) -> None:
    """Raise `Infeasible` where something is computed elsewhere: to a search that is only very slow, no more."""
    graph, device = plan.problem.graph, plan.placement.device
    elsewhere = np.flatnonzero(~graph.is_parameter & (device != plan.problem.cluster.index_of(main)))
    if len(elsewhere):
        op = int(elsewhere[0])
        raise Infeasible(
            f"nothing was found that fits and computes on {main!r} alone, as exact asks: {graph.op_names[op]!r} would "
            f"run on {plan.problem.cluster.device_names[device[op]]!r}; give {main!r} more memory, search longer or "
            "with placer='auto', or leave out exact",
            main,
        )


@contextmanager
def _threads_beside(main: str) -> Iterator[None]:
    """The CPU with as many threads as it has beside a GPU."""
    import torch

    from roost.runtime.aside import num_threads

    before = torch.get_num_threads()
    if main.startswith("cuda"):
        torch.set_num_threads(num_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_arguments(cluster: object, *sizes: object) -> None:
    if not (cluster is None or isinstance(cluster, str | Cluster)):
        raise InputError(f"cluster is {cluster!r}; it must be a roost.Cluster, the name of a preset or a file, or None")
    for given in sizes:
        if given is None:
            continue
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise InputError(f'sizes are {given!r}; give them by device, as in {{"cuda:0": "6GiB"}}')
        for name, size in given.items():
            if isinstance(size, bool) or not isinstance(size, int | float | str):
                raise InputError(f"the size for device {name!r} is {size!r}; give bytes, or a text such as '6GiB'")
            try:
                parse_bytes(size)
            except InputError as error:
                raise InputError(f"the size for device {name!r}: {error}") from None


def _rows(example_inputs: Any) -> int:
    """Rows of the tensors between modules, as the inputs tell: tokens, or vectors."""
    import torch

    for value in torch.utils._pytree.tree_leaves(example_inputs):
        if isinstance(value, torch.Tensor):
            return value.numel() if not value.is_floating_point() else value.shape[:-1].numel()
    return 0


def kv_bytes(model: nn.Module, tokens: int) -> int:
    """Bytes that keys and values of so many tokens take in a model of transformers, by its configuration."""
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise InputError(f"kv_tokens is {tokens!r}; it must be a whole number, not negative")
    if tokens == 0:
        return 0
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise InputError("kv_tokens is for decoders; an encoder and a decoder keep more: use reserve for their bytes")
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    if not layers or not heads:
        raise InputError("the model has no configuration that tells how its cache grows; use reserve for its bytes")
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    width = max((one.element_size() for one in model.parameters() if one.is_floating_point()), default=0)
    if not size or not width:
        raise InputError("the model has no configuration that tells how its cache grows; use reserve for its bytes")
    return int(2 * layers * groups * size * width * tokens)
