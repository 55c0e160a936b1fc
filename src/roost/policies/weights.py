"""Files of weights: `policy.safetensors`, with a card in its header about the training.

`roost learn` writes them, `--weights` reads them. A file from outside is checked before use: its
format, its policy, the name, shape and type of each tensor, and that each number is finite.
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

_KEY = "roost"  # of our text in the header
_AGAIN = "train them again with roost learn"


def save_weights(
    path: str | Path, policy: str, tensors: Mapping[str, Array], card: Mapping[str, Any]
) -> None:
    """Write the weights of a policy with a card of JSON values; nothing is left half written."""
    from safetensors.numpy import save

    path = Path(path)
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise InputError(
                f"{path}: tensor {name!r} is not finite; learning diverged, try a smaller rate"
            )
    # One entry only: several have no fixed order, and equal weights must give equal files.
    header = {"format": FORMAT, "version": VERSION, "policy": policy, "card": dict(card)}
    float32 = {name: np.ascontiguousarray(tensors[name], dtype=np.float32) for name in tensors}
    files.write_bytes(path, save(float32, {_KEY: json.dumps(header)}))


def load_weights(
    path: str | Path, policy: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Read the float32 tensors of exactly these names and shapes, and the card.

    Raises InputError if the file has anything else.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    path = Path(path)
    data = files.read_bytes(path)
    try:
        header = _header(data)
        tensors = load(data)
    except (SafetensorError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path}: is no safetensors file ({error}); --weights takes a file of roost learn"
        ) from None
    except KeyError as error:  # a type that NumPy has not, such as BF16
        raise InputError(f"{path}: has tensors of type {error}, not float32; {_AGAIN}") from None
    card = _checked_card(path, policy, header)
    for name, shape in shapes.items():
        if name not in tensors:
            raise InputError(f"{path}: tensor {name!r} is missing; {_AGAIN}")
        _check_tensor(path, name, tensors[name], tuple(shape))
    for name in tensors:
        if name not in shapes:
            raise InputError(f"{path}: has a tensor {name!r} that {policy} does not know; {_AGAIN}")
    return tensors, card


def _header(data: bytes) -> dict[str, Any]:
    """Our text in the header; raises ValueError or TypeError if the header is broken."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError("it is cut short")
    table = json.loads(data[8 : 8 + length])
    if isinstance(table, dict):
        header = json.loads(table.get("__metadata__", {}).get(_KEY, "{}"))
        if isinstance(header, dict):
            return header
    raise ValueError("its header is no table")


def _checked_card(path: Path, policy: str, header: Mapping[str, Any]) -> dict[str, Any]:
    expected = {"format": FORMAT, "version": VERSION, "policy": policy}
    for key, value in expected.items():
        given = header.get(key)
        if given != value:
            raise InputError(f"{path}: {key} is {given!r}, not {value!r}; {_AGAIN}")
    card = header.get("card")
    if not isinstance(card, dict):
        raise InputError(f"{path}: card is no table; {_AGAIN}")
    return card


def _check_tensor(path: Path, name: str, tensor: Array, shape: tuple[int, ...]) -> None:
    wrong = ""
    if tensor.dtype != np.float32:
        wrong = f"is {tensor.dtype}, not float32"
    elif tensor.shape != shape:
        wrong = f"has shape {list(tensor.shape)}, not {list(shape)}"
    elif not np.isfinite(tensor).all():
        wrong = "has a number that is not finite"
    if wrong:
        raise InputError(f"{path}: tensor {name!r} {wrong}; {_AGAIN}")
