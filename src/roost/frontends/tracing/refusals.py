"""Errors of tracing in the user's words, with the line of the model that caused them."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path

import torch

from roost.errors import InputError, UnsupportedOp


def refusal(error: Exception, line: str | None) -> InputError:
    """The error to raise for an error while tracing; `line` is the line of the model, if known."""
    text = str(error).strip().split("\n")[0][:300]
    place = f" at {line}" if line else ""
    if _depends_on_data(error):
        # PyTorch's names of unknown numbers, such as u0, say nothing to the author of a model.
        cause = "" if re.search(r"\bu\d+\b", text) else f": {text}"
        return UnsupportedOp(
            f"the model decides by the values of a tensor{place}{cause}. A placement needs one "
            "fixed graph: decide by shapes or settings, use torch.where or a fixed number of "
            "steps, or capture the part before"
        )
    return InputError(f"the model cannot be captured{place}: {type(error).__name__}: {text}")


def _depends_on_data(error: BaseException | None) -> bool:
    while error is not None:
        by_type = type(error).__name__.startswith(("DataDependent", "DynamicOutputShape"))
        if by_type or "data-dependent" in str(error).lower():
            return True
        error = error.__cause__ or error.__context__
    return False


def line_of_error(error: BaseException) -> str | None:
    """`file:line (text)` of the innermost frame of an error that is the model's."""
    return _line_of(traceback.extract_tb(error.__traceback__))


def line_of_caller() -> str | None:
    """`file:line (text)` of the line of the model that runs now."""
    return _line_of(traceback.extract_stack())


def _line_of(frames: traceback.StackSummary) -> str | None:
    """The innermost frame that is neither PyTorch's nor ours."""
    standard = sysconfig.get_path("stdlib")
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
    line = None
    for frame in frames:
        name = frame.filename
        in_standard = name.startswith(standard) and "site-packages" not in name
        if not in_standard and not name.startswith(own):
            line = f"{name}:{frame.lineno} ({(frame.line or '').strip()})"
    return line


def line_of_stack(stack: str) -> str:
    """`file:line (text)` of the innermost frame of a stack that is given as text."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', stack)
    if not frames:
        return ""
    file, line, text = frames[-1]
    return f"{file}:{line} ({text})"
