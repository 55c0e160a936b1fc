"""The check for models that accelerate has dispatched."""

from __future__ import annotations

from torch import nn

from roost.errors import InputError


def refuse_dispatched(model: nn.Module) -> None:
    """Raise if hooks of accelerate move weights and inputs: they work against Roost's moves."""
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            raise InputError(
                f"module {name or type(model).__name__!r} was dispatched by accelerate; take that "
                "off first with accelerate.hooks.remove_hook_from_module(model, recurse=True), or "
                "load it without a device_map"
            )
