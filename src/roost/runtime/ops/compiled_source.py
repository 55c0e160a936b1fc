"""Lines turned into source and compiled: the functions that launchers and CUDA graphs run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from keyword import iskeyword
from typing import Any

from roost.errors import InputError
from roost.runtime.ops.lines import Line, Ref, refs


def compiled(
    lines: Sequence[Line], title: str, takes: Sequence[str] = (), returns: Sequence[str] = ()
) -> tuple[Callable[..., Any], list[int]]:
    """Compile lines into a function; also give the op of each line of its source.

    The source drops each name after the last line that reads it.
    """
    last: dict[str, int] = {}
    for number, line in enumerate(lines):
        names = line.read | {line.name} if line.name else line.read
        last |= dict.fromkeys(names, number)
    dropped: dict[int, list[str]] = {}
    for name in last.keys() - set(returns):
        dropped.setdefault(last[name], []).append(name)
    constants = _Constants()
    source = [f"def step({', '.join(takes)}):"]
    ops = [-1]
    for number, line in enumerate(lines):
        source.append(f"    {_statement(line, constants)}")
        ops.append(line.op)
        if number in dropped:
            source.append(f"    {' = '.join(sorted(dropped[number]))} = None")
            ops.append(line.op)
    source.append(f"    return ({', '.join(returns)},)" if returns else "    return")
    ops.append(-1)
    # The text is ours: numbers, names made of numbers, and checked names of arguments. No value of
    # the model is in it.
    exec(compile("\n".join(source), title, "exec"), constants.named)
    # Popped, or the function would hold itself and all constants.
    function: Callable[..., Any] = constants.named.pop("step")
    return function, ops


def _statement(line: Line, constants: _Constants) -> str:
    if not all(key.isidentifier() and not iskeyword(key) for key in line.kwargs):
        raise InputError(
            f"an op of the program has arguments that cannot be named: {sorted(line.kwargs)}"
        )
    args = [constants.text(value) for value in line.args]
    args += [f"{key}={constants.text(value)}" for key, value in line.kwargs.items()]
    call = f"{constants.text(line.call)}({', '.join(args)})"
    return f"{line.name} = {call}" if line.name else call


class _Constants:
    """Values that the source names instead of writing them out."""

    def __init__(self) -> None:
        self.named: dict[str, Any] = {}
        self._known: dict[int, str] = {}

    def text(self, value: Any) -> str:
        """Give the text of a value in the source."""
        if isinstance(value, Ref):
            return value.name
        if value is None or type(value) in (bool, int):  # a subclass may have any repr
            return repr(value)
        if isinstance(value, tuple | list) and list(refs(value)):
            inside = ", ".join(map(self.text, value))
            return f"[{inside}]" if isinstance(value, list) else f"({inside},)"
        if id(value) not in self._known:
            self._known[id(value)] = f"k{len(self._known)}"
            self.named[self._known[id(value)]] = value
        return self._known[id(value)]
