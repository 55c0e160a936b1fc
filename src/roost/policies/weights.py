"""Weights in a file: `policy.safetensors`, with a card in its header that says what they were
trained on.

A file from outside is checked before anything is made of it: its format, the policy it is for, the
name, shape and type of every tensor, and that every number is finite.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from roost.core import files
from roost.core.arrays import Array
from roost.errors import InputError

FORMAT = "roost.policy"
VERSION = 1

_KEY = "roost"  # under which the header has our text
_AGAIN = "train them again with roost learn"


def save_weights(
    path: str | Path, policy: str, tensors: Mapping[str, Array], card: Mapping[str, Any]
) -> None:
    """Write the weights of a policy, whole or not at all, with a card of plain JSON values."""
    from safetensors.numpy import save

    path = Path(path)
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise InputError(
                f"{path}: tensor {name!r} is not finite; learning went astray, try a smaller rate"
            )
    # One entry: several would be written in any order, and equal weights shall give equal files.
    about = {"format": FORMAT, "version": VERSION, "policy": policy, "card": dict(card)}
    plain = {
        name: np.ascontiguousarray(tensor, dtype=np.float32) for name, tensor in tensors.items()
    }
    files.write_bytes(path, save(plain, {_KEY: json.dumps(about)}))


def load_weights(
    path: str | Path, policy: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Array], dict[str, Any]]:
    """The tensors of exactly these names and shapes, float32, and the card; raises InputError where
    they are not so."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    path = Path(path)
    data = files.read_plain(path)
    try:
        header = _header(data)
        tensors = load(data)
    except (SafetensorError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path}: is no safetensors file ({error}); --weights takes what roost learn wrote"
        ) from None
    except KeyError as error:  # a type that NumPy has not, such as BF16
        raise InputError(f"{path}: has tensors of type {error}, not float32; {_AGAIN}") from None
    card = _checked_header(path, policy, header)
    for name, shape in shapes.items():
        if name not in tensors:
            raise InputError(
                f"{path}: tensor {name!r} is missing; these weights are not whole, {_AGAIN}"
            )
        _check_tensor(path, name, tensors[name], tuple(shape))
    for name in tensors:
        if name not in shapes:
            raise InputError(f"{path}: has a tensor {name!r} that {policy} does not know; {_AGAIN}")
    return tensors, card


def _header(data: bytes) -> dict[str, Any]:
    """What the file says of itself."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError("it is cut short")
    found = json.loads(data[8 : 8 + length])
    about = (
        json.loads(found.get("__metadata__", {}).get(_KEY, "{}"))
        if isinstance(found, dict)
        else None
    )
    if not isinstance(about, dict):
        raise ValueError("its header is no table")
    return about


def _checked_header(path: Path, policy: str, about: Mapping[str, Any]) -> dict[str, Any]:
    if about.get("format") != FORMAT:
        raise InputError(
            f"{path}: format is {about.get('format')!r}, not {FORMAT!r}: no weights of a policy; "
            f"{_AGAIN}"
        )
    if about.get("version") != VERSION:
        raise InputError(
            f"{path}: version is {about.get('version')!r}; this Roost reads {VERSION}: {_AGAIN}"
        )
    if about.get("policy") != policy:
        raise InputError(
            f"{path}: are weights of {about.get('policy')!r}, not of {policy!r}; use that, or "
            f"{_AGAIN}"
        )
    card = about.get("card")
    if not isinstance(card, dict):
        raise InputError(f"{path}: card is no table; {_AGAIN}")
    return card


def _check_tensor(path: Path, name: str, tensor: Array, shape: tuple[int, ...]) -> None:
    if tensor.dtype != np.float32:
        raise InputError(f"{path}: tensor {name!r} is {tensor.dtype}, not float32; {_AGAIN}")
    if tensor.shape != shape:
        raise InputError(
            f"{path}: tensor {name!r} has shape {list(tensor.shape)}, not {list(shape)}; {_AGAIN}"
        )
    if not np.isfinite(tensor).all():
        raise InputError(f"{path}: tensor {name!r} has a number that is not finite; {_AGAIN}")
