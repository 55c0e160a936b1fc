"""Runs of ops without transfers, each as one call: recorded as a CUDA graph, so that the host
launches it as a whole.

What a segment takes is copied to where it was when recorded, unless it is always there: a copy in
the window, or what an earlier segment made. What it makes is always in the same memory, so it is
good until the next step.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from roost.runtime.ops.compiled_source import compiled
from roost.runtime.ops.lines import Line, Ref
from roost.runtime.step.random_ops import is_random

log = logging.getLogger(__name__)

_FEWEST = 4  # ops that are worth a graph
_SYNCHRONISES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


# Records what a function does to these tensors: how to do it again, and what it returns, always in
# the same memory.
Capture = Callable[
    [Callable[..., tuple[Any, ...]], Sequence[Any]], tuple[Callable[[], None], tuple[Any, ...]]
]


class Segment:
    """A run of lines as a function of the names it takes, that returns those that are read
    later."""

    def __init__(
        self, function: Callable[..., tuple[Any, ...]], stays: Sequence[bool], capture: Capture
    ) -> None:
        """`stays` says of each thing it takes whether it is always in the same memory."""
        self._function, self._stays, self._capture = function, stays, capture
        self._replay: Callable[[], None] | None = None
        self._taken: list[Any] = []
        self._made: tuple[Any, ...] = ()
        self._calls, self._fails = 0, False

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        self._calls += 1
        if self._replay is not None:
            for taken, arg in zip(self._taken, args, strict=True):
                if taken is not arg:
                    taken.copy_(arg)
        # The first time libraries settle in.
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
            self._taken, self._fails = [], True
        return not self._fails


def segmented(
    lines: Sequence[Line], title: str, capture: Capture, mine: str = ""
) -> tuple[list[Line], dict[str, list[int]]]:
    """The lines with each run of ops as one line; and for each function's title the op of each of
    its lines.

    Names of runs end with `mine`.
    """
    found: list[Line] = []
    parts: dict[str, list[int]] = {}
    static: set[str] = set()  # names that are always in the same memory
    last = {name: number for number, line in enumerate(lines) for name in line.read}
    can = _capturable(lines)
    end = 0
    while end < len(lines):
        begin = end
        while end < len(lines) and can[end] == can[begin]:
            end += 1
        run = lines[begin:end]
        if not can[begin] or sum(map(_computes, run)) < _FEWEST:
            found.extend(run)
            # Copies in the window.
            static |= {line.name for line in run if line.name.startswith("c")}
            continue
        made = {line.name for line in run}
        takes = sorted({name for line in run for name in line.read} - made)
        returns = sorted(name for name in made if last.get(name, -1) >= end)
        part = f"{title} {len(parts)}"
        function, parts[part] = compiled(run, part, takes, returns)
        segment = Segment(function, [name in static for name in takes], capture)
        together, op = f"s{len(parts)}{mine}", run[0].op
        found.append(Line(op, segment, tuple(map(Ref, takes)), name=together))
        found += [
            Line(op, operator.getitem, (Ref(together), place), name=name)
            for place, name in enumerate(returns)
        ]
        static |= set(returns)
    return found, parts


def _capturable(lines: Sequence[Line]) -> list[bool]:
    found: list[bool] = []
    made: set[str] = set()  # in the run so far
    for line in lines:
        # A tuple of tensors that comes from outside is not copied: it is taken apart outside too.
        found.append(line.read <= made if line.call is operator.getitem else _launches(line))
        made = made | {line.name} if found[-1] else set()
    return found


def _computes(line: Line) -> bool:
    """Whether a line is more than a look at what is there: a graph of such alone would be empty."""
    call = line.call
    return (
        isinstance(call, torch._ops.OpOverload)
        and not call.is_view
        and call is not torch.ops.aten.reshape.default
    )


def _launches(line: Line) -> bool:
    """Whether a line does nothing but launch what does not depend on values."""
    call = line.call
    if line.node is None or not isinstance(call, torch._ops.OpOverload) or is_random(call):
        return False
    return not any(tag in call.tags for tag in _SYNCHRONISES)
