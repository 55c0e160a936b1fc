"""Segments: runs of ops without transfers, each recorded as a CUDA graph and launched as one call.

An argument of a segment is copied to the memory where it was recorded, unless it always lies there:
a copy in the window, or an output of an earlier segment. An output is always in the same memory, so
it is good until the next step. `device_code.py` calls `segmented`.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch

from roost.runtime.ops.compiled_source import compiled
from roost.runtime.ops.lines import Line, Ref
from roost.runtime.step.random_ops import is_random

log = logging.getLogger(__name__)

_FEWEST = 4  # ops that are worth a graph
_SYNCHRONISES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


# Records a function of these tensors. Returns how to run it again, and its outputs, which always
# are in the same memory.
Capture = Callable[
    [Callable[..., tuple[Any, ...]], Sequence[Any]], tuple[Callable[[], None], tuple[Any, ...]]
]


class Segment:
    """A run of lines as a function of the names it reads; it returns those that are read later."""

    def __init__(
        self, function: Callable[..., tuple[Any, ...]], stays: Sequence[bool], capture: Capture
    ) -> None:
        """`stays` tells of each argument if it is always in the same memory."""
        self._function = function
        self._stays = stays
        self._capture = capture
        self._replay: Callable[[], None] | None = None
        self._taken: list[Any] = []
        self._made: tuple[Any, ...] = ()
        self._calls = 0
        self._fails = False

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        self._calls += 1
        if self._replay is not None:
            for taken, arg in zip(self._taken, args, strict=True):
                if taken is not arg:
                    taken.copy_(arg)
        # Not recorded in the first call, in which libraries still prepare themselves.
        elif self._calls == 1 or self._fails or not self._record(args):
            return self._function(*args)
        assert self._replay is not None
        self._replay()
        return self._made

    def _record(self, args: Sequence[Any]) -> bool:
        self._taken = [
            arg if stays else arg.clone() for arg, stays in zip(args, self._stays, strict=True)
        ]
        try:
            self._replay, self._made = self._capture(self._function, self._taken)
        except RuntimeError as error:
            log.warning("some ops are launched one by one: %s", str(error).splitlines()[0])
            self._taken = []
            self._fails = True
        return not self._fails


def segmented(
    lines: Sequence[Line], title: str, capture: Capture, mine: str = ""
) -> tuple[list[Line], dict[str, list[int]]]:
    """Turn each run of ops into one line.

    Also gives, for each segment's title, the op of each line of its source. Names of segments end
    with `mine`.
    """
    result: list[Line] = []
    parts: dict[str, list[int]] = {}
    static: set[str] = set()  # names that are always in the same memory
    last = {name: number for number, line in enumerate(lines) for name in line.read}
    end = 0
    for can, group in groupby(
        zip(_capturable(lines), lines, strict=True), key=operator.itemgetter(0)
    ):
        run = [line for _, line in group]
        end += len(run)
        if not can or sum(map(_computes, run)) < _FEWEST:
            result += run
            static |= {line.name for line in run if line.name.startswith("c")}  # in the window
            continue
        made = {line.name for line in run}
        takes = sorted({name for line in run for name in line.read} - made)
        returns = sorted(name for name in made if last.get(name, -1) >= end)
        part = f"{title} {len(parts)}"
        function, parts[part] = compiled(run, part, takes, returns)
        segment = Segment(function, [name in static for name in takes], capture)
        outputs = f"s{len(parts)}{mine}"
        op = run[0].op
        result.append(Line(op, segment, tuple(map(Ref, takes)), name=outputs))
        for place, name in enumerate(returns):
            result.append(Line(op, operator.getitem, (Ref(outputs), place), name=name))
        static |= set(returns)
    return result, parts


def _capturable(lines: Sequence[Line]) -> list[bool]:
    """Tell of each line if a graph can record it."""
    capturable: list[bool] = []
    made: set[str] = set()  # in the run so far
    for line in lines:
        # A tuple of tensors from outside the run is not copied, so it is taken apart outside too.
        can = line.read <= made if line.call is operator.getitem else _launches(line)
        capturable.append(can)
        made = made | {line.name} if can else set()
    return capturable


def _computes(line: Line) -> bool:
    """Tell if a line is more than a view: a graph of views only would be empty."""
    call = line.call
    return (
        isinstance(call, torch._ops.OpOverload)
        and not call.is_view
        and call is not torch.ops.aten.reshape.default
    )


def _launches(line: Line) -> bool:
    """Tell if a line only launches work, which does not depend on values."""
    call = line.call
    if line.node is None or not isinstance(call, torch._ops.OpOverload) or is_random(call):
        return False
    return not any(tag in call.tags for tag in _SYNCHRONISES)
