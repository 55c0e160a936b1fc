"""A whole captured step, run once after the other on one device with made-up tensors, and each op
in it timed.

An op by itself, again and again, finds its code and often its operands in a cache, and gets back
the memory that it has just given away. In a step none of that is so. On a CPU, where a call has
done its work when it returns, the ops can be timed where they are: after the one before, and with
what that one has left. On a GPU it is the launches that are timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx

from roost.cost_models.timing.overwrites import overwrites
from roost.cost_models.timing.timed_ops import TensorSpec, index_limits
from roost.cost_models.timing.updates import UPDATES
from roost.frontends.tracing.captured_step import CapturedStep
from roost.frontends.tracing.program import is_getitem
from roost.frontends.tracing.runnable import runnable

aten = torch.ops.aten
_CPU = torch.device("cpu")


def replayed(
    step: CapturedStep,
    seconds: float,
    least: int = 3,
    most: int = 15,
    device: torch.device = _CPU,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """[ops] seconds of this thread for each op in a step by a clock, the median of some steps that
    take so long together.

    Of these the half counts in which this thread had a core for most of the time: other programs
    are no part of it.
    """
    writer = _Writer(step, device)
    compiled = writer.compiled()
    given = writer.given
    stamps = [0.0] * (1 + len(step.graph.op_names))

    def run(*args: Any) -> None:
        compiled(*args)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the next step begins with an empty queue

    run(*given, stamps, clock)
    found: list[tuple[float, list[float]]] = []
    began = time.perf_counter()
    while len(found) < most and (len(found) < least or time.perf_counter() - began < seconds):
        started, used = time.perf_counter(), time.thread_time()
        run(*given, stamps, clock)
        used = time.thread_time() - used
        share = used / max(time.perf_counter() - started, 1e-9)
        found.append((share, [after - before for before, after in pairwise(stamps)]))
    found.sort(key=lambda each: -each[0])
    return [
        median(times)
        for times in zip(*(times for _, times in found[: (len(found) + 1) // 2]), strict=True)
    ]


class _Writer:
    """Writes the step as one function of its parameters and inputs, as `runtime/ops/device_code.py`
    does for one device."""

    def __init__(self, step: CapturedStep, device: torch.device = _CPU) -> None:
        self.device = device
        # Text, and the names that it reads.
        self.step = step
        self.lines = list[tuple[str, set[str]]]()
        self.named: dict[str, Any] = {}
        self.takes: list[str] = []
        self.given: list[Tensor] = []
        self.names: dict[fx.Node, str] = {}
        self.held: dict[str, str] = {}  # op of a parameter, or of what an optimizer keeps -> name
        self.over = overwrites(step)
        self.numbers = {node: number for number, node in enumerate(step.program.module.graph.nodes)}

    def compiled(self) -> Callable[..., None]:
        step = self.step
        below = index_limits(step)
        for node in step.program.placeholders:
            self._give(
                node,
                step.op_of[node],
                TensorSpec.of(node.meta["val"], below.get(step.op_of[node], 0)),
            )
        for update in step.updates.values():
            like = TensorSpec.of(step.maker[update.resident].meta["val"]) if update.states else None
            for state in update.states:
                assert like is not None
                self._give(None, state, like)
        self.lines.append(("stamps[0] = clock()", set()))
        kept = set(self.takes)
        for number, name in enumerate(step.graph.op_names):
            self._op(name)
            self.lines.append((f"stamps[{number + 1}] = clock()", set()))
        return self._function(kept)

    def _give(self, node: fx.Node | None, op: str, like: TensorSpec) -> None:
        name = f"p{len(self.takes)}"
        self.takes.append(name)
        value = like.tensor(self.device)
        if value.is_floating_point() and not (node is None or value.dim() < 2):
            # Weights: products of numbers that are all positive would grow without end.
            value.sub_(0.5).mul_(0.1)
        self.given.append(value)
        self.held[op] = name
        if node is not None:
            self.names[node] = name

    def _op(self, name: str) -> None:
        step = self.step
        if name in step.updates:
            update = step.updates[name]
            kind = step.graph.kinds[step.graph.index_of(name)]
            states = [self.held[state] for state in update.states]
            value = self._value(update.value)
            self._line(
                None, UPDATES[kind], [self._value(step.maker[update.resident]), value, *states], {}
            )
        elif (
            (node := step.maker.get(name)) is not None
            and node not in self.names
            and node.op == "call_function"
        ):
            self._call(node)
        for node in [each for each in self.names if self._looks_into_parameter(each)]:
            del self.names[node]  # views of parameters are made for every reader

    def _call(self, node: fx.Node) -> str:
        target = runnable(node.target)
        args: list[Any] = list(node.args)
        if node in self.over:
            target, place = self.over[node]
            args[0], args[place] = args[place], args[0]
        said = [self._said(each) for each in args]
        return self._line(
            node, target, said, {key: self._said(each) for key, each in node.kwargs.items()}
        )

    def _line(
        self, node: fx.Node | None, call: Any, args: Sequence[str], kwargs: dict[str, str]
    ) -> str:
        name = "" if node is None else f"v{self.numbers[node]}"
        texts = [*args, *(f"{key}={value}" for key, value in kwargs.items())]
        text = f"{self._constant(call)}({', '.join(texts)})"
        self.lines.append((f"{name} = {text}" if name else text, set(_words(texts))))
        if node is not None:
            self.names[node] = name
        return name

    def _said(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._value(value)
        if isinstance(value, tuple | list):
            inside = ", ".join(map(self._said, value))
            return f"[{inside}]" if isinstance(value, list) else f"({inside},)" if inside else "()"
        return self._constant(self.device if isinstance(value, torch.device) else value)

    def _value(self, node: fx.Node) -> str:
        if node not in self.names:
            if node.op == "get_attr":
                value = getattr(self.step.program.module, str(node.target))
                self.names[node] = self._constant(
                    value.to(self.device) if isinstance(value, Tensor) else value
                )
            else:
                self._call(node)
        return self.names[node]

    def _looks_into_parameter(self, node: fx.Node) -> bool:
        owner = self.step.op_of.get(node)
        if owner is None or is_getitem(node) or self.step.maker.get(owner) is node:
            return False
        return bool(self.step.graph.is_parameter[self.step.graph.index_of(owner)])

    def _constant(self, value: Any) -> str:
        name = f"k{len(self.named)}"
        self.named[name] = value
        return name

    def _function(self, kept: set[str]) -> Callable[..., None]:
        last = {word: number for number, (_, read) in enumerate(self.lines) for word in read}
        last |= {
            text.partition(" = ")[0]: number
            for number, (text, _) in enumerate(self.lines)
            if text.startswith("v") and last.get(text.partition(" = ")[0], -1) < number
        }
        drops: dict[int, list[str]] = {}
        for word, number in last.items():
            if word.startswith("v") and word not in kept:
                drops.setdefault(number, []).append(word)
        source = [f"def step({', '.join([*self.takes, 'stamps', 'clock'])}):"]
        for number, (text, _) in enumerate(self.lines):
            source.append(f"    {text}")
            if number in drops:
                source.append(f"    {' = '.join(drops[number])} = None")
        # Our own text: numbers, and names made of numbers. Names of arguments are those of
        # PyTorch's own ops.
        if not all(key.isidentifier() for node in self.numbers for key in node.kwargs):
            raise ValueError("an op has an argument that cannot be named")
        exec(compile("\n".join(source), "<replayed step>", "exec"), self.named)
        found: Callable[..., None] = self.named.pop("step")
        return found


def _words(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        yield from (
            word.strip("[](), ") for word in text.partition("=")[2 if "=" in text else 0].split(",")
        )
