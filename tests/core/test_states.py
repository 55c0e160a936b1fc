"""Saved states."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from roost.core.states import read_state


def test_a_header_that_is_not_python_is_told(tmp_path: Path) -> None:
    """NumPy reads the header of an array with Python's tokenizer."""
    buffer = io.BytesIO()
    np.save(buffer, np.arange(4))
    path = tmp_path / "state.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", buffer.getvalue().replace(b"(4,)", b"(4,("))
    with pytest.raises(ValueError, match=r"multi-line|header|literal|never closed"):
        read_state(path)
