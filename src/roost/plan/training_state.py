"""The state of a training run, and its file: weights, optimizer states and the number of steps.

Names are those of the model, so a state does not depend on the placement or on the number of
microbatches. The file is safetensors: `model/NAME` and `optimizer/NAME:STATE`, and the rest as JSON
in the header. It is written whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roost.core import files
from roost.errors import InputError
from roost.frontends.tracing.captured_step import CapturedStep
from roost.frontends.tracing.optimizers import KEPT

_FORMAT = "roost.training"
_VERSION = 1
_MOST_STEPS = 2**53
_KEY = "roost"  # of our text in the header
_HERE = "it must be a file of trainer.save"


@dataclass(frozen=True)
class TrainingState:
    """Weights and buffers by name, optimizer states as `NAME:STATE`, and updates taken."""

    model: Mapping[str, Tensor]
    states: Mapping[str, Tensor]
    steps: int
    optimizer: str

    def as_dict(self) -> dict[str, Any]:
        """The state as plain data."""
        return {
            "model": dict(self.model),
            "optimizer": dict(self.states),
            "steps": self.steps,
            "kind": self.optimizer,
        }

    @classmethod
    def of_dict(cls, state: Any) -> TrainingState:
        """The state in the result of `as_dict`; raises InputError for anything else."""
        keys = ("model", "optimizer", "steps", "kind")
        if not isinstance(state, Mapping) or any(key not in state for key in keys):
            raise InputError(
                "the state is not the result of trainer.state_dict(): it must have "
                f"{', '.join(keys)}"
            )
        steps = state["steps"]
        if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps <= _MOST_STEPS:
            shown = (
                steps if isinstance(steps, int) and abs(steps) <= _MOST_STEPS else "no such number"
            )
            raise InputError(f"steps of the state is {shown}; it must be a whole number, 0 or more")
        for key in ("model", "optimizer"):
            if not isinstance(state[key], Mapping):
                raise InputError(f"{key!r} of the state must have tensors by name")
        return cls(state["model"], state["optimizer"], steps, str(state["kind"]))

    def save(self, path: Path) -> None:
        """Write the file."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        files.check_writable(path)
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: is no plain file; a run is saved to one")
        rows = {f"model/{name}": value for name, value in self.model.items()}
        rows |= {f"optimizer/{name}": value for name, value in self.states.items()}
        about = {
            "format": _FORMAT,
            "version": _VERSION,
            "steps": self.steps,
            "optimizer": self.optimizer,
        }
        plain = {name: value.contiguous() for name, value in rows.items()}
        try:
            with files.written_whole(path) as temporary:
                save_file(plain, temporary, {_KEY: json.dumps(about)})
        except SafetensorError as error:  # such as a full disk
            raise InputError(f"{path}: cannot be written: {error}") from error

    @classmethod
    def load(cls, path: Path) -> TrainingState:
        """Read a file of `save`."""
        from safetensors import SafetensorError, safe_open

        files.check_plain(path)
        try:
            with safe_open(path, framework="pt") as file:
                about = _about(path, (file.metadata() or {}).get(_KEY))
                rows = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except InputError:
            raise
        except (SafetensorError, ValueError, OSError) as error:
            raise InputError(f"{path}: is no safetensors file ({error}); {_HERE}") from None
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
        for row, value in rows.items():
            part, _, name = row.partition("/")
            if part not in parts:
                raise InputError(f"{path}: has a tensor {row!r}; {_HERE}")
            parts[part][name] = value
        return cls(parts["model"], parts["optimizer"], about["steps"], about["optimizer"])


def _about(path: Path, text: str | None) -> dict[str, Any]:
    """The facts in the header, checked."""
    try:
        about = json.loads(text or "")
        sound = about["format"] == _FORMAT and isinstance(about["optimizer"], str)
        sound = sound and type(about["steps"]) is int and 0 <= about["steps"] <= _MOST_STEPS
        version = about["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise InputError(f"{path}: says nothing of a training run; {_HERE}")
    if version != _VERSION:
        raise InputError(f"{path}: has version {version!r}; this Roost reads version {_VERSION}")
    return dict(about)


def weight_names(step: CapturedStep) -> list[str]:
    """The parameters and buffers of a step; a tied weight has its first name."""
    return [name for name in step.program.residents if name not in step.program.constants]


def state_names(step: CapturedStep) -> Iterator[tuple[str, str, str]]:
    """Each optimizer state: its op, its name in a file, and its parameter; no kept gradients."""
    owner = {op: name for name, op in step.resident_ops.items()}
    for update in step.updates.values():
        name = owner[update.resident]
        for state in update.states:
            kind = state.rpartition(":")[2].partition("#")[0]
            if kind != KEPT:
                yield state, f"{name}:{kind}", name


def fitted(
    state: TrainingState, step: CapturedStep, optimizer: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Residents by name and optimizer states by op, of a state that fits a step.

    Raises InputError that names the tensor and both shapes.
    """
    if state.optimizer != optimizer:
        raise InputError(
            f"the state is of a run with {state.optimizer!r}, the trainer has {optimizer!r}; make "
            f'the trainer with optimizer="{state.optimizer}"'
        )
    likes = {name: node.meta["val"] for name, node in step.program.resident_nodes.items()}
    names = weight_names(step)
    weights = _matched("weight", state.model, {name: likes[name] for name in names})
    rows = list(state_names(step))
    states = _matched("optimizer state", state.states, {name: likes[of] for _, name, of in rows})
    return weights, {op: states[name] for op, name, _ in rows}


def _matched(what: str, given: Mapping[str, Any], likes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the shapes, types and layouts that a step has."""
    for name in given:
        if name not in likes:
            raise InputError(f"the state has the {what} {name!r}, which this model does not have")
    found: dict[str, Tensor] = {}
    for name, like in likes.items():
        value = given.get(name)
        if value is None:
            raise InputError(
                f"the state lacks the {what} {name!r}, {list(like.shape)} of {like.dtype}; it is "
                "the state of another model"
            )
        if not isinstance(value, Tensor) or value.is_meta or value.layout != torch.strided:
            raise InputError(f"{what} {name!r} of the state must be a dense tensor with values")
        if value.shape != like.shape or value.dtype != like.dtype:
            raise InputError(
                f"{what} {name!r} of the state is {list(value.shape)} of {value.dtype}; the model "
                f"has {list(like.shape)} of {like.dtype}"
            )
        if value.stride() != like.stride():  # kernels and so rounding depend on it
            value = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(value)
        found[name] = value
    return found
