"""From a model to a plan in one call: capture, costs, search, and a run or two."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import Cluster
from roost.core.costs import Costs
from roost.core.problem import Problem
from roost.core.units import parse_bytes
from roost.errors import Infeasible, InputError, UnknownName
from roost.placers import Placer
from roost.plan.clusters import cluster_of, main_of, with_less
from roost.plan.module_search import PlanSearch
from roost.plan.plan import Plan
from roost.plan.trial_runs import tuned
from roost.search.evaluate import Progress

if TYPE_CHECKING:
    from torch import nn

    from roost.frontends.tracing.captured_step import CapturedStep
    from roost.runtime.whole.trial_run import TrialRun

log = logging.getLogger(__name__)

# Rows up to which a CPU computes with weights about as fast as a link brings them: bfloat16 at 3
# TFLOP/s and 55 GB/s.
_FEW = 32
_TOO_MUCH = 2**62  # bytes: more than there are


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
    """Find where the modules of a model should run on this machine, or another.

    `memory` caps devices, as in {"cuda:0": "6GiB"}; `reserve` takes something off for what the
    example does not show. `kv_tokens` is how long the cache of keys and values grows (sequences
    times tokens) in models of transformers. `exact`: nothing is computed on the CPU, whose rounding
    differs, so that the placed model gives every bit of what the GPU gives without it. `costs` are
    "profiled" here, "estimated" from the figures of the cluster, or given. With `measure` the model
    is run with the example as was planned, and what that shows goes into another search, a few
    times; the fastest of what was run is the plan. None: where that can be, on this machine and
    with costs that were profiled, and where more than one device has a part. `seconds` are those of
    one search. `progress` is called with how many ops are timed of how many; all else that takes
    long is told to `logging`, at level INFO. Raises `Infeasible` where nothing fits.
    """
    import torch

    from roost.frontends.torch import step_of
    from roost.frontends.tracing.dispatched import refuse_dispatched
    from roost.runtime.whole.module_placement import is_placed

    _check_arguments(cluster, memory, reserve)
    if not isinstance(model, torch.nn.Module):
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
    # Before the tokens comes a prompt, for which weights that lie elsewhere are brought, one at a
    # time.
    if kv_tokens:
        own = [
            sum(one.nbytes for one in module.parameters(recurse=False))
            for module in model.modules()
        ]
        room[main] += max(own, default=0)
    few, capped = max(_FEW, 2 * _rows(example_inputs)), main in (memory or {})

    def course(found: Costs, spaces: Array | None) -> PlanSearch:
        return PlanSearch(
            model, example_inputs, step, spaces, where, capped, main, room, found, exact, few,
            placer, seconds, trials, seed, on_trial,
        )  # fmt: skip

    try:
        with_less(where, room)
    except Infeasible as error:  # it is known already that nothing fits
        nothing = Costs(np.zeros((step.graph.num_ops, where.num_devices)))
        raise (
            course(nothing, None).with_what_is_enough(error) if error.device == main else error
        ) from None
    found = _costs(step, where, main, costs, progress)
    Problem(step.graph, where, found)  # which checks costs that were given
    here = cluster is None and costs == "profiled"
    search = course(found, _spaces(step, main) if here else None)
    log.info("searching for a placement of %d ops", step.graph.num_ops)
    plan, known = search.fitting(tries=here if measure is None else measure)
    # What fits only where less is left free than by rule is to be tried, wherever it runs.
    alone = not plan.modules.streamed and not plan.modules.runs_on and known.held is None
    if measure is False or (measure is None and (not here or alone)):
        return plan
    return tuned(search, plan, known, lambda plan: _tried(model, plan))


def _costs(
    step: Any,
    where: Cluster,
    main: str,
    costs: Costs | str,
    progress: Callable[[int, int], None] | None,
) -> Costs:
    from roost.cost_models import estimate
    from roost.cost_models.profiled import profile

    if isinstance(costs, Costs):
        return costs
    if costs == "estimated":
        return estimate(step.graph, where).costs
    # While weights are on their way, or the CPU computes, the host tells the GPU what comes next:
    # then ops take what they take on the GPU. Only where nothing has to wait for weights may
    # launching them be what takes long.
    weights = int(step.graph.output_bytes[step.graph.is_parameter].sum())
    fits = weights <= where.devices[where.index_of(main)].memory
    with _threads_beside(main):
        return profile(step, where, launches=fits, progress=progress)


def _spaces(step: CapturedStep, main: str) -> Array | None:
    """What ops hold for themselves on a GPU, [ops] bytes; None where there is none to tell."""
    import torch

    from roost.cost_models.timing.workspaces import spaces

    return (
        spaces(step, torch.device(main))
        if main.startswith("cuda") and torch.cuda.is_available()
        else None
    )


def _tried(model: nn.Module, plan: Plan) -> TrialRun | None:
    """What a run of a plan shows; None where it cannot be run here, for which a log tells why."""
    import torch

    from roost.runtime.whole.trial_run import TrialRun, trial_run

    try:
        return trial_run(model, plan.modules, plan.example_inputs)
    except torch.OutOfMemoryError:
        return TrialRun(math.inf, _TOO_MUCH, _TOO_MUCH, 0.0, 0)
    # Of any model; the plan may be for other inputs than these, or for another day.
    except Exception as error:
        log.warning(
            "the plan could not be tried: %s: %s",
            type(error).__name__,
            str(error).partition("\n")[0],
        )
        return None


@contextmanager
def _threads_beside(main: str) -> Iterator[None]:
    """The CPU with as many threads as it has beside a GPU."""
    import torch

    from roost.runtime.whole.cpu_beside_gpu import num_threads

    before = torch.get_num_threads()
    if main.startswith("cuda"):
        torch.set_num_threads(num_threads())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_arguments(cluster: object, *sizes: object) -> None:
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
    """Rows of the tensors between modules, as the inputs tell: tokens, or vectors."""
    import torch

    for value in torch.utils._pytree.tree_leaves(example_inputs):
        if isinstance(value, torch.Tensor):
            return value.numel() if not value.is_floating_point() else value.shape[:-1].numel()
    return 0


def kv_bytes(model: nn.Module, tokens: int) -> int:
    """Bytes that keys and values of so many tokens take in a model of transformers, by its
    configuration."""
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
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers, heads = (
        getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads")
    )
    if not layers or not heads:
        raise InputError(
            "the model has no configuration that tells how its cache grows; use reserve for its "
            "bytes"
        )
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    width = max(
        (one.element_size() for one in model.parameters() if one.is_floating_point()), default=0
    )
    if not size or not width:
        raise InputError(
            "the model has no configuration that tells how its cache grows; use reserve for its "
            "bytes"
        )
    return int(2 * layers * groups * size * width * tokens)
