"""Runs a model as it is written, with its weights where a placement has them.

A module's weights are kept on the device that computes, or streamed to it ahead of need, or the
module runs where they lie. Nothing of the model changes but where its tensors are and what happens
around a call: names in `state_dict` stay, tied weights stay tied, and `remove` takes it all off
again. For inference: training steps have the graph runtime.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from roost.core.arrays import digest
from roost.errors import InputError, UnknownName
from roost.frontends.tracing.dispatched import refuse_dispatched
from roost.runtime.whole.copy_streams import CudaCopyQueue, ThreadCopyQueue
from roost.runtime.whole.cpu_beside_gpu import CallTime, CpuBesideGpu
from roost.runtime.whole.tensor_moves import given_back, lent, mapped, moved, pin, place_of, unpin
from roost.runtime.whole.weight_window import ModuleWeights, WeightWindow, alike

_MARK = "_roost_placed"

_NO_COPIES = (
    "a placed model cannot be copied or pickled; take its plan off first, plan.remove(model)"
)

# A tensor at home, and under which names modules hold it.
Slots = tuple[Tensor, list[tuple[dict[str, Any], str]]]


@dataclass(frozen=True)
class ModulePlacement:
    """Where the weights of a model live, and where its modules run."""

    main: str  # the device on which everything runs that is not mentioned
    # Parameter or buffer -> device; tied ones under one of their names, or all.
    home: Mapping[str, str]
    # Modules that run on another device than the main one.
    runs_on: Mapping[str, str] = field(default_factory=dict)
    # Module -> weights brought for each call.
    streamed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    window: int = 0  # bytes on the main device for weights on their way
    model: str = ""  # signature of the model that it is for; "" is any
    # With more rows than this in a tensor, what runs elsewhere runs on the main device; 0: never.
    few_rows: int = 0
    # Of those that run elsewhere: what they give is read there, and stays.
    stays: tuple[str, ...] = ()
    # Of those with weights brought: in the call itself, not through the window.
    on_the_spot: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for module in self.stays:
            if module not in self.runs_on:
                raise InputError(
                    f"what module {module!r} gives is to stay elsewhere, but it runs on {self.main}"
                )
        if len(set(self.on_the_spot)) < len(self.on_the_spot):
            raise InputError(
                "a module is named twice of those whose weights are to come on the spot"
            )
        for module in self.on_the_spot:
            if module not in self.streamed:
                raise InputError(
                    f"weights of module {module!r} are to come on the spot, but none of it are "
                    f"streamed"
                )
        for module, names in self.streamed.items():
            if module in self.runs_on:
                raise InputError(
                    f"module {module!r} runs on {self.runs_on[module]}; its weights cannot be "
                    f"streamed too"
                )
            for name in names:
                if self.home.get(name) in (None, self.main):
                    raise InputError(
                        f"{name!r} is streamed to {module!r}, but lives on {self.main} already"
                    )


def signature(model: nn.Module) -> str:
    """A short name that differs where names, shapes or types of parameters and buffers differ."""
    return digest(
        [f"{name} {list(t.shape)} {t.dtype}" for name, t in sorted(named_tensors(model).items())]
    )


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    found = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))


def is_placed(model: nn.Module) -> bool:
    return _MARK in model.__dict__


def placed(model: nn.Module) -> Placed:
    """What was done to a model that is placed."""
    found: Placed = model.__dict__[_MARK]
    return found


def apply(model: nn.Module, placement: ModulePlacement) -> nn.Module:
    """Place a model: the same object, ready to be called."""
    check(model, placement)
    Placed(model, placement)
    return model


def remove(model: nn.Module) -> nn.Module:
    """Take a placement off: the model is what it was, on the devices where it was."""
    placed = model.__dict__.get(_MARK)
    if placed is None:
        raise InputError("the model has no placement of ours to take off")
    placed.remove()
    return model


class Placed:
    """What was done to a model."""

    def __init__(self, model: nn.Module, placement: ModulePlacement) -> None:
        self.model, self.placement = model, placement
        self.main = place_of(placement.main)
        self._modules = dict(model.named_modules(remove_duplicate=False))
        # And a forward that was put there by somebody else.
        self._wrapped: list[tuple[nn.Module, Any]] = []
        self._pinned: list[Tensor] = []
        self._was: list[tuple[Tensor, torch.device]] = []
        self._one_at_a_time = threading.RLock()  # a model may be called by several threads
        self.window: WeightWindow | None = None
        self.cpu_beside_gpu: CpuBesideGpu | None = (
            None  # computes on the CPU, in the order of the GPU's stream
        )
        self.call_time = CallTime()
        model.__dict__[_MARK] = self
        try:
            self._settle()
            self._stream()
            for name, device in placement.runs_on.items():
                self._run_elsewhere(name, place_of(device))
            self._wrap(model, self._run)
            for module in model.modules():
                module.__dict__["_apply"] = _refuse_to_move
        except BaseException:
            self.remove()
            raise

    def __reduce__(self) -> Any:
        raise InputError(_NO_COPIES)

    def remove(self) -> None:
        for module in self.model.modules():
            if module.__dict__.get("_apply") is _refuse_to_move:
                del module.__dict__["_apply"]
        for module, before in reversed(self._wrapped):
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = before
        self._wrapped.clear()
        if self.cpu_beside_gpu is not None:
            self.cpu_beside_gpu.close()
            self.cpu_beside_gpu = None
        if self.window is not None:
            self.window.close()
            self.window = None
        for tensor in self._pinned:
            unpin(tensor)
        self._pinned.clear()
        for tensor, device in self._was:
            tensor.data = tensor.data.to(device)
        self._was.clear()
        self.model.__dict__.pop(_MARK, None)

    def _settle(self) -> None:
        """Bring every tensor home: first those that leave the main device, so that there is room
        for the others."""
        home: dict[int, tuple[Tensor, torch.device]] = {}
        for name, tensor in named_tensors(self.model).items():
            device = place_of(self.placement.home.get(name, self.placement.main))
            if name in self.placement.home or id(tensor) not in home:
                home[id(tensor)] = (tensor, device)
        for tensor, device in sorted(home.values(), key=lambda pair: pair[1] == self.main):
            self._was.append((tensor, tensor.device))
            tensor.data = tensor.data.to(device)

    def _stream(self) -> None:
        tensors = named_tensors(self.model)
        brought = {name for names in self.placement.streamed.values() for name in names}
        if not brought:
            return
        if self.main.type == "cuda":
            for tensor in {id(tensors[name]): tensors[name] for name in sorted(brought)}.values():
                if pin(tensor):
                    self._pinned.append(tensor)
        slots = {
            module: [self._slots(tensors[name], module) for name in names]
            for module, names in self.placement.streamed.items()
        }
        for module in self.placement.on_the_spot:
            self._wrap(
                self._modules[module],
                functools.partial(_on_the_spot, self.main, module, slots.pop(module)),
            )
        if not slots:
            return
        loads = {
            module: ModuleWeights(module, [tensor for tensor, _ in own])
            for module, own in slots.items()
        }
        way = CudaCopyQueue(self.main) if self.main.type == "cuda" else ThreadCopyQueue()
        self.window = WeightWindow(way, self.main, self.placement.window, list(loads.values()))
        for module, own in slots.items():
            self._wrap(
                self._modules[module], functools.partial(_streamed, self.window, loads[module], own)
            )

    def _slots(self, tensor: Tensor, module: str) -> Slots:
        """Where a module, or what is inside it, holds a tensor."""
        tables: list[dict[str, Any]] = [
            table
            for inside in self._modules[module].modules()
            for table in (inside._parameters, inside._buffers)
        ]
        return tensor, [
            (table, key) for table in tables for key, value in table.items() if value is tensor
        ]

    def _run_elsewhere(self, name: str, device: torch.device) -> None:
        """A module runs on another device; where a call has many rows, its weights come to the main
        one instead."""
        if name in self.placement.stays:
            self._wrap(
                self._modules[name], functools.partial(_elsewhere, self.call_time, device, None)
            )
            return
        if self.main.type != "cuda" or device.type != "cpu":
            self._wrap(
                self._modules[name],
                functools.partial(_elsewhere, self.call_time, device, self.main),
            )
            return
        if self.cpu_beside_gpu is None:
            self.cpu_beside_gpu = CpuBesideGpu(self.main, self.call_time)
        few = self.placement.few_rows
        if few:
            for inside in (
                module for module in self._modules[name].modules() if module._parameters
            ):
                own = [tensor for tensor in inside._parameters.values() if tensor is not None]
                self._pinned += [tensor for tensor in own if pin(tensor)]
                self._wrap(
                    inside, functools.partial(_brought, self.main, inside._parameters), alone=False
                )
        self._wrap(self._modules[name], functools.partial(_aside, self.cpu_beside_gpu, few))

    def _run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A call of the whole model: inputs come to the main device, what it returns goes where its
        inputs were."""
        before = next(_tensors((args, kwargs)), None)
        with torch.no_grad():
            args, kwargs = moved((args, kwargs), self.main)
            try:
                returned = forward(*args, **kwargs)
            finally:
                if self.window is not None:
                    self.window.end_run()
                if self.cpu_beside_gpu is not None:
                    self.cpu_beside_gpu.join()
            return returned if before is None else moved(returned, before.device)

    def _wrap(self, module: nn.Module, around: Callable[..., Any], alone: bool = True) -> None:
        """`alone`: one thread at a time. Not what may run in a thread of ours, while the caller's
        waits for it."""
        run = _Wrapped(module.forward, around, self._one_at_a_time if alone else nullcontext())
        self._wrapped.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = run


class _Wrapped:
    """A forward with something around it. It belongs to its module, and to no copy of it."""

    def __init__(self, forward: Callable[..., Any], around: Callable[..., Any], lock: Any) -> None:
        # First: of a forward that is wrapped already it takes what is in there.
        functools.update_wrapper(self, forward)
        self._forward, self._around, self._lock = forward, around, lock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return self._around(self._forward, *args, **kwargs)

    def __reduce__(self) -> Any:
        raise InputError(_NO_COPIES)

    def __deepcopy__(self, memo: object) -> Any:
        raise InputError(_NO_COPIES)


def _streamed(
    window: WeightWindow,
    load: ModuleWeights,
    slots: list[Slots],
    forward: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    _check_slots(load.name, slots)
    visit = window.enter(load)
    try:
        return _apart(_with(load.name, slots, visit.views, forward, *args, **kwargs), window)
    finally:
        window.leave(visit)


def _on_the_spot(
    main: torch.device,
    name: str,
    slots: list[Slots],
    forward: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Weights come in the order of what is computed, and go when it is done: they need no
    window."""
    _check_slots(name, slots)
    here = []
    with torch.inference_mode(False), torch.no_grad():
        for tensor, _ in slots:
            here.append(alike(tensor.detach().to(main, non_blocking=True, copy=True), tensor))
    return _with(name, slots, here, forward, *args, **kwargs)


def _check_slots(name: str, slots: list[Slots]) -> None:
    for tensor, places in slots:
        if any(table[key] is not tensor for table, key in places):
            raise InputError(
                f"a weight of module {name!r} is another tensor than when the plan was applied; "
                f"take the plan off "
                "before, and apply it again, or write into the tensor that is there"
            )


def _with(
    name: str,
    slots: list[Slots],
    here: Sequence[Tensor],
    forward: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A call of a module with other tensors in the place of its weights."""
    brought = []
    for (tensor, places), other in zip(slots, here, strict=True):
        brought.append((tensor, other, other._version, places))
        for table, key in places:
            table[key] = other
    try:
        returned = forward(*args, **kwargs)
        if any(other._version != version for _, other, version, _ in brought):
            raise InputError(
                f"module {name!r} writes into its own weights; it cannot be streamed, keep them"
            )
        return returned
    finally:
        for tensor, other, _, places in brought:
            for table, key in places:
                if table[key] is other:
                    table[key] = tensor


def _apart(returned: Any, window: WeightWindow) -> Any:
    """What a module returns, and not a part of the window, which is about to be written over."""
    if isinstance(returned, Tensor):
        return returned.clone() if window.holds(returned) else returned
    return mapped(
        returned, lambda tensor: tensor.clone() if window.holds(tensor) else tensor, objects=True
    )


def _refuse_to_move(*args: Any, **kwargs: Any) -> Any:
    raise InputError(
        "the model is placed: it cannot be moved or converted; take its plan off first, "
        "plan.remove(model)"
    )


def _elsewhere(
    spent: CallTime,
    device: torch.device,
    back: torch.device | None,
    forward: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    (args, kwargs), copies = lent((args, kwargs), device)
    begun = time.perf_counter()
    returned = forward(*args, **kwargs)
    spent.add(time.perf_counter() - begun)
    given_back(copies)
    return returned if back is None else moved(returned, back)


def _aside(
    aside: CpuBesideGpu, few_rows: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    if few_rows:
        given = next(_tensors((args, kwargs)), None)
        if (
            given is not None
            and given.device == aside.device
            and given.shape[:-1].numel() > few_rows
        ):
            return forward(*args, **kwargs)
    return aside(forward, *args, **kwargs)


def _brought(
    main: torch.device,
    own: dict[str, Any],
    forward: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A module that runs on the CPU, unless it is given a tensor of the main device."""
    given = next(_tensors((args, kwargs)), None)
    if given is None or given.device != main:
        return forward(*args, **kwargs)
    kept = dict(own)
    for key, tensor in kept.items():
        if tensor is not None:
            own[key] = nn.Parameter(tensor.data.to(main, non_blocking=True), requires_grad=False)
    try:
        return forward(*args, **kwargs)
    finally:
        own.update(kept)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)


def check_signature(model: nn.Module, placement: ModulePlacement) -> None:
    """Refuse a model that the placement is not for."""
    if placement.model and placement.model != signature(model):
        odd = sorted(set(placement.home) - set(named_tensors(model)))
        said = f", which has no {odd[0]!r}" if odd else ""
        raise InputError(
            f"the plan is for model {placement.model}, this model is {signature(model)}{said}"
        )


def check(model: nn.Module, placement: ModulePlacement) -> None:
    """Refuse what cannot be placed, before anything is moved."""
    if not isinstance(model, nn.Module):
        raise InputError(f"a torch.nn.Module is needed, not {type(model).__name__}")
    forwards = (module.__dict__.get("forward") for module in model.modules())
    if any(is_placed(module) for module in model.modules()) or any(
        isinstance(f, _Wrapped) for f in forwards
    ):
        raise InputError(
            "the model is placed already; roost's plan.remove(model) takes that off first"
        )
    refuse_dispatched(model)
    tensors, modules = named_tensors(model), dict(model.named_modules(remove_duplicate=False))
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise InputError(
                f"{name!r} is on the meta device and has no value; build the model with its weights"
            )
        if tensor.layout != torch.strided:
            raise InputError(f"{name!r} is sparse; only dense weights can be placed")
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for module, names in placement.streamed.items():
        for name in names:
            if name in buffers:
                raise InputError(
                    f"{name!r} of module {module!r} is a buffer; only parameters can be streamed"
                )
            if not name.startswith(f"{module}."):
                raise InputError(
                    f"{name!r} is not inside module {module!r}, and cannot be brought for it"
                )
    for module in placement.streamed:
        around = next(
            (top for top in placement.runs_on if module == top or module.startswith(f"{top}.")),
            None,
        )
        if around is not None:
            raise InputError(
                f"module {module!r} is inside {around!r}, which runs elsewhere; it cannot be "
                f"streamed to"
            )
    check_signature(model, placement)
    for name in placement.home:
        if name not in tensors:
            raise UnknownName("parameter or buffer of the model", name, tensors)
    for name in (*placement.runs_on, *placement.streamed):
        if name not in modules:
            raise UnknownName("module of the model", name, modules)
    for device in {placement.main, *placement.home.values(), *placement.runs_on.values()}:
        place_of(device)
