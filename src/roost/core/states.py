"""Files of named arrays with a digest: states from which a search, or learning, goes on."""

from __future__ import annotations

import io
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from roost.core.arrays import Array, state_digest
from roost.core.files import is_special, write_bytes

# The errors of NumPy for a file that is damaged, or of another kind.
_UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    EOFError,
    MemoryError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
    SyntaxError,
    tokenize.TokenError,
)


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write arrays to an `.npz` file, whole or not at all."""
    arrays: dict[str, Any] = {name: np.asarray(value) for name, value in state.items()}
    buffer = io.BytesIO()
    np.savez(buffer, digest=np.array(state_digest(arrays)), **arrays)
    write_bytes(path, buffer.getvalue())


def read_state(path: Path) -> dict[str, Array]:
    """The arrays in a file. Raises FileNotFoundError, or ValueError if they are damaged."""
    try:
        if is_special(path):
            raise ValueError("it is no plain file")  # reading from a pipe may never end
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            state = {name: file[name] for name in file.files}
        if str(state.pop("digest")) != state_digest(state):
            raise ValueError("it is not as it was written")
    except FileNotFoundError:
        raise
    except _UNREADABLE as error:
        raise ValueError(str(error)) from error
    return state
