"""The module runtime: runs a model as it is written, with its weights where a placement has them.

`Plan.apply` calls it. The weights of a module are kept on the main device, or streamed to it ahead
of need, or the module runs where they lie. Only the devices of tensors change, and what happens
around a call: names in `state_dict` stay, tied weights stay tied, and `remove` undoes it all. It is
for inference; the graph runtime runs training steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from roost.errors import InputError
from roost.runtime.whole.copy_streams import CudaCopyQueue, ThreadCopyQueue
from roost.runtime.whole.cpu_beside_gpu import CallTime, CpuBesideGpu
from roost.runtime.whole.module_placement import PLACED, ModulePlacement, check, named_tensors
from roost.runtime.whole.tensor_moves import moved, pin, torch_device, unpin
from roost.runtime.whole.weight_window import ModuleWeights, WeightWindow
from roost.runtime.whole.wrapped_calls import (
    NO_COPIES,
    Call,
    Slots,
    WrappedForward,
    beside_gpu,
    brought_for_gpu,
    copied_in_call,
    elsewhere,
    refuse_to_move,
    streamed,
)


def apply(model: nn.Module, placement: ModulePlacement) -> nn.Module:
    """Place a model: the same object, ready to be called."""
    check(model, placement)
    PlacedModel(model, placement)
    return model


def remove(model: nn.Module) -> nn.Module:
    """Take a placement off: the model is as it was, on the devices where it was."""
    if PLACED not in model.__dict__:
        raise InputError("the model has no placement of ours to take off")
    placed_model(model).remove()
    return model


def placed_model(model: nn.Module) -> PlacedModel:
    """Give the changes to a model that is placed."""
    placed: PlacedModel = model.__dict__[PLACED]
    return placed


class PlacedModel:
    """All changes to a placed model, which `remove` undoes."""

    def __init__(self, model: nn.Module, placement: ModulePlacement) -> None:
        self.model = model
        self.placement = placement
        self.main = torch_device(placement.main)
        self._modules = dict(model.named_modules(remove_duplicate=False))
        # Wrapped modules, and their own forwards that somebody else had put there.
        self._wrapped: list[tuple[nn.Module, Any]] = []
        self._pinned: list[Tensor] = []
        self._device_before: list[tuple[Tensor, torch.device]] = []
        self._one_at_a_time = threading.RLock()  # several threads may call a model
        self.window: WeightWindow | None = None
        self.cpu_beside_gpu: CpuBesideGpu | None = None
        self.call_time = CallTime()
        model.__dict__[PLACED] = self
        try:
            self._settle()
            self._stream()
            for name, device in placement.runs_on.items():
                self._run_elsewhere(name, torch_device(device))
            self._wrap(model, self._run)
            for module in model.modules():
                module.__dict__["_apply"] = refuse_to_move
        except BaseException:
            self.remove()
            raise

    def __reduce__(self) -> Any:
        raise InputError(NO_COPIES)

    def remove(self) -> None:
        for module in self.model.modules():
            if module.__dict__.get("_apply") is refuse_to_move:
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
        for tensor, device in self._device_before:
            tensor.data = tensor.data.to(device)
        self._device_before.clear()
        self.model.__dict__.pop(PLACED, None)

    def _settle(self) -> None:
        """Bring every tensor home; first those that leave the main device, which makes room."""
        home: dict[int, tuple[Tensor, torch.device]] = {}
        for name, tensor in named_tensors(self.model).items():
            device = torch_device(self.placement.home.get(name, self.placement.main))
            if name in self.placement.home or id(tensor) not in home:
                home[id(tensor)] = (tensor, device)
        for tensor, device in sorted(home.values(), key=lambda pair: pair[1] == self.main):
            self._device_before.append((tensor, tensor.device))
            tensor.data = tensor.data.to(device)

    def _stream(self) -> None:
        tensors = named_tensors(self.model)
        streams = self.placement.streamed
        brought = sorted({name for names in streams.values() for name in names})
        if not brought:
            return
        if self.main.type == "cuda":
            self._pin({id(tensors[name]): tensors[name] for name in brought}.values())
        slots = {
            module: [self._slots(tensors[name], module) for name in names]
            for module, names in streams.items()
        }
        for module in self.placement.on_the_spot:
            around = partial(copied_in_call, self.main, module, slots.pop(module))
            self._wrap(self._modules[module], around)
        if not slots:
            return
        weights = {
            module: ModuleWeights(module, [slot.tensor for slot in own])
            for module, own in slots.items()
        }
        queue = CudaCopyQueue(self.main) if self.main.type == "cuda" else ThreadCopyQueue()
        self.window = WeightWindow(queue, self.main, self.placement.window, list(weights.values()))
        for module, own in slots.items():
            self._wrap(self._modules[module], partial(streamed, self.window, weights[module], own))

    def _pin(self, tensors: Any) -> None:
        self._pinned += [tensor for tensor in tensors if pin(tensor)]

    def _slots(self, tensor: Tensor, module: str) -> Slots:
        """Find the names under which a module, or one inside it, holds a tensor."""
        tables: list[dict[str, Any]] = []
        for inside in self._modules[module].modules():
            tables += [inside._parameters, inside._buffers]
        places = [(table, key) for table in tables for key in table if table[key] is tensor]
        return Slots(tensor, places)

    def _run_elsewhere(self, name: str, device: torch.device) -> None:
        """Run a module on another device; a call with many rows brings its weights instead."""
        module = self._modules[name]
        stays = name in self.placement.stays
        if stays or self.main.type != "cuda" or device.type != "cpu":
            back = None if stays else self.main
            self._wrap(module, partial(elsewhere, self.call_time, device, back))
            return
        if self.cpu_beside_gpu is None:
            self.cpu_beside_gpu = CpuBesideGpu(self.main, self.call_time)
        few_rows = self.placement.few_rows
        if few_rows:
            for inside in module.modules():
                own = inside._parameters
                if own:
                    self._pin([tensor for tensor in own.values() if tensor is not None])
                    self._wrap(inside, partial(brought_for_gpu, self.main, own), alone=False)
        self._wrap(module, partial(beside_gpu, self.cpu_beside_gpu, few_rows))

    def _run(self, call: Call) -> Any:
        """Call the whole model: inputs come to the main device, outputs go where inputs were."""
        before = call.first_tensor()
        with torch.no_grad():
            args, kwargs = moved((call.args, call.kwargs), self.main)
            try:
                returned = call.forward(*args, **kwargs)
            finally:
                if self.window is not None:
                    self.window.end_run()
                if self.cpu_beside_gpu is not None:
                    self.cpu_beside_gpu.join()
            return returned if before is None else moved(returned, before.device)

    def _wrap(self, module: nn.Module, around: Callable[[Call], Any], alone: bool = True) -> None:
        """Put a function around a module's forward.

        `alone`: one thread at a time. Not for a module that may run in our thread while the
        caller's thread waits for it.
        """
        lock = self._one_at_a_time if alone else nullcontext()
        self._wrapped.append((module, module.__dict__.get("forward")))
        module.__dict__["forward"] = WrappedForward(module.forward, around, lock)
