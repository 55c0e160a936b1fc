"""From a model to a plan in one call: capture, costs, search, and a few trial runs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from roost.core.arrays import Array
from roost.core.cluster import Cluster
from roost.core.costs import Costs
from roost.core.problem import Problem
from roost.core.units import parse_bytes
from roost.cost_models import estimate
from roost.cost_models.profiled import profile
from roost.cost_models.timing.workspaces import spaces
from roost.errors import Infeasible, InputError, UnknownName
from roost.frontends.torch import step_of
from roost.frontends.tracing.captured_step import CapturedStep
from roost.frontends.tracing.dispatched import refuse_dispatched
from roost.placers import Placer
from roost.plan.clusters import cluster_of, main_of, with_less
from roost.plan.module_search import PlanSearch, SearchSettings
from roost.plan.plan import Plan
from roost.plan.trial_runs import fastest_of_runs
from roost.runtime.whole.cpu_beside_gpu import num_threads
from roost.runtime.whole.module_placement import is_placed
from roost.runtime.whole.trial_run import TrialRun, trial_run
from roost.search.evaluate import Progress

log = logging.getLogger(__name__)

# Rows up to which a CPU computes with weights about as fast as a link brings them: bfloat16 at 3
# TFLOP/s and 55 GB/s.
_FEW = 32
_TOO_MUCH = 2**62  # bytes: more than any device has


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
    measure: bool | None = None,
    placer: str | Placer = "auto",
    seconds: float | None = 10.0,
    trials: int | None = None,
    seed: int = 0,
    on_trial: Callable[[Progress], object] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Find the best place for each module of a model, on this machine or another cluster.

    - `memory`: caps on devices, as in {"cuda:0": "6GiB"}.
    - `reserve`: memory to leave free for what the example does not show.
    - `kv_tokens`: length of the cache of keys and values (sequences times tokens), for models of
      transformers.
    - `exact`: compute nothing on the CPU, which rounds in another way: the placed model then gives
      every bit that the GPU gives without a plan.
    - `costs`: "profiled" here, "estimated" from the figures of the cluster, or given.
    - `measure`: run the model with the example by the plan, correct the search by that run, and
      search again, a few times; the fastest plan that was run wins. Default: if the plan is for
      this machine, with profiled costs, and uses more than one device.
    - `seconds`, `trials`: the budget of one search.
    - `progress`: called with the number of timed ops, and of all ops to time. Other news goes to
      `logging`, at level INFO.

    Raises `Infeasible` if nothing fits.
    """
    check_where(cluster, memory, reserve)
    if not isinstance(model, nn.Module):
        raise InputError(f"a torch.nn.Module is needed, not {type(model).__name__}")
    if is_placed(model):
        raise InputError("the model is placed already; take that off first, plan.remove(model)")
    refuse_dispatched(model)
    if measure not in (None, True, False):
        raise InputError(f"measure is {measure!r}; it must be True, False or None")
    if not isinstance(costs, Costs) and costs not in ("profiled", "estimated"):
        raise UnknownName("kind of costs", str(costs), ["profiled", "estimated"])
    where = cluster_of(cluster, memory or {})
    log.info("capturing the model")
    step = step_of(model, example_inputs)
    room = {name: parse_bytes(size) for name, size in (reserve or {}).items()}
    main = main_of(where)
    room[main] = room.get(main, 0) + kv_bytes(model, kv_tokens)
    if kv_tokens:  # for the prompt, weights that live elsewhere are brought one module at a time
        room[main] += max(_own_bytes(module) for module in model.modules())

    def search_with(op_costs: Costs, workspace: Array | None) -> PlanSearch:
        return PlanSearch(
            model=model,
            example_inputs=example_inputs,
            step=step,
            workspace=workspace,
            cluster=where,
            capped=main in (memory or {}),
            main=main,
            reserved=room,
            costs=op_costs,
            exact=exact,
            few_rows=max(_FEW, 2 * _rows(example_inputs)),
            settings=SearchSettings(placer, seconds, trials, seed, on_trial),
        )

    try:
        with_less(where, room)
    except Infeasible as error:  # before the minutes of profiling
        if error.device == main:
            nothing = Costs(np.zeros((step.graph.num_ops, where.num_devices)))
            error = search_with(nothing, None).with_enough(error)
        raise error from None
    op_costs = _costs(step, where, main, costs, progress)
    Problem(step.graph, where, op_costs)  # checks costs that were given
    here = cluster is None and costs == "profiled"
    search = search_with(op_costs, _workspace(step, main) if here else None)
    log.info("searching for a placement of %d ops", step.graph.num_ops)
    plan, known = search.first_plan(may_run=here if measure is None else measure)
    if measure is None:
        one_device = not plan.modules.streamed and not plan.modules.runs_on
        # A plan with less spare memory than by rule is run in any case.
        measure = here and not (one_device and known.spare is None)
    return (
        fastest_of_runs(search, plan, known, lambda plan: _tried(model, plan)) if measure else plan
    )


def _own_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters(recurse=False))


def _costs(
    step: CapturedStep,
    where: Cluster,
    main: str,
    costs: Costs | str,
    progress: Callable[[int, int], None] | None,
) -> Costs:
    if isinstance(costs, Costs):
        return costs
    if costs == "estimated":
        return estimate(step.graph, where).costs
    # While weights are on their way, or the CPU computes, there is time to launch ops ahead: they
    # take their time on the GPU. Only if nothing waits for weights may launching take longer.
    weights = int(step.graph.output_bytes[step.graph.is_parameter].sum())
    fits = weights <= where.devices[where.index_of(main)].memory
    with _threads_beside(main):
        return profile(step, where, launches=fits, progress=progress)


def _workspace(step: CapturedStep, main: str) -> Array | None:
    """Measure the bytes that each op holds for itself on a GPU, [ops]; None without a GPU."""
    if not main.startswith("cuda") or not torch.cuda.is_available():
        return None
    return spaces(step, torch.device(main))


def _tried(model: nn.Module, plan: Plan) -> TrialRun | None:
    """Run a plan; None if it cannot be run here: then the log tells why."""
    try:
        return trial_run(model, plan.modules, plan.example_inputs)
    except torch.OutOfMemoryError:
        return TrialRun(math.inf, _TOO_MUCH, _TOO_MUCH, 0.0, 0)
    # Any error of the model; the plan may be for other inputs than these.
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        log.warning("the plan could not be run: %s: %s", type(error).__name__, first_line)
        return None


@contextmanager
def _threads_beside(main: str) -> Iterator[None]:
    """Set the number of threads that the CPU has beside a GPU."""
    before = torch.get_num_threads()
    if main.startswith("cuda"):
        torch.set_num_threads(num_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_where(cluster: object, *sizes: object) -> None:
    """Raise if a cluster or sizes by device are of another type."""
    if not (cluster is None or isinstance(cluster, str | Cluster)):
        raise InputError(
            f"cluster is {cluster!r}; it must be a roost.Cluster, the name of a preset or a file, "
            f"or None"
        )
    for given in sizes:
        if given is None:
            continue
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise InputError(
                f'sizes are {given!r}; give them by device, as in {{"cuda:0": "6GiB"}}'
            )
        for name, size in given.items():
            if isinstance(size, bool) or not isinstance(size, int | float | str):
                raise InputError(
                    f"the size for device {name!r} is {size!r}; give bytes, or a text such as "
                    f"'6GiB'"
                )
            try:
                parse_bytes(size)
            except InputError as error:
                raise InputError(f"the size for device {name!r}: {error}") from None


def _rows(example_inputs: Any) -> int:
    """Rows of the tensors between modules, by the inputs: tokens, or vectors."""
    for value in tree_leaves(example_inputs):
        if isinstance(value, torch.Tensor):
            return value.shape[:-1].numel() if value.is_floating_point() else value.numel()
    return 0


def kv_bytes(model: nn.Module, tokens: int) -> int:
    """Bytes of the keys and values of so many tokens, by the configuration of the model."""
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise InputError(f"kv_tokens is {tokens!r}; it must be a whole number, not negative")
    if tokens == 0:
        return 0
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            "kv_tokens is for decoders; an encoder and a decoder keep more: use reserve for their "
            "bytes"
        )
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    layers = getattr(config, "num_hidden_layers", None) or 0
    heads = getattr(config, "num_attention_heads", None) or 0
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None)
    if not size and heads:
        size = getattr(config, "hidden_size", 0) // heads
    weights = [one.element_size() for one in model.parameters() if one.is_floating_point()]
    width = max(weights, default=0)
    if not (layers and heads and size and width):
        raise InputError(
            "the model has no configuration that tells how its cache grows; use reserve for its "
            "bytes"
        )
    return int(2 * layers * groups * size * width * tokens)
