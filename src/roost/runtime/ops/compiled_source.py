"""Lines as source, compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from keyword import iskeyword
from typing import Any

from roost.errors import InputError
from roost.runtime.ops.lines import Line, Ref, refs


def compiled(
    lines: Sequence[Line], title: str, takes: Sequence[str] = (), returns: Sequence[str] = ()
) -> tuple[Callable[..., Any], list[int]]:
    """The lines as a function, and the op of each line; each name is dropped after the last line
    that reads it."""
    last: dict[str, int] = {}
    for number, line in enumerate(lines):
        for name in line.read | ({line.name} if line.name else set()):
            last[name] = number
    dropped: dict[int, list[str]] = {}
    for name, number in last.items():
        if name in returns:
            continue
        dropped.setdefault(number, []).append(name)
    constants = _Constants()
    said = constants.said
    source, ops = [f"def step({', '.join(takes)}):"], [-1]
    for number, line in enumerate(lines):
        if not all(key.isidentifier() and not iskeyword(key) for key in line.kwargs):
            raise InputError(
                f"an op of the program has arguments that cannot be named: {sorted(line.kwargs)}"
            )
        args = [
            *map(said, line.args),
            *(f"{key}={said(value)}" for key, value in line.kwargs.items()),
        ]
        source.append(
            f"    {f'{line.name} = ' if line.name else ''}{said(line.call)}({', '.join(args)})"
        )
        ops.append(line.op)
        if number in dropped:
            source.append(f"    {' = '.join(sorted(dropped[number]))} = None")
            ops.append(line.op)
    source.append(
        f"    return ({''.join(f'{name}, ' for name in returns)})" if returns else "    return"
    )
    ops.append(-1)
    # Our own text: numbers, names made of numbers, and names of arguments, which were looked at. No
    # value is in it.
    exec(compile("\n".join(source), title, "exec"), constants.named)
    # Or it would hold itself, and all that is in there.
    found: Callable[..., Any] = constants.named.pop("step")
    return found, ops


class _Constants:
    """What the source names and does not say."""

    def __init__(self) -> None:
        self.named: dict[str, Any] = {}
        self._known: dict[int, str] = {}

    def said(self, value: Any) -> str:
        """A value as the source says it."""
        if isinstance(value, Ref):
            return value.name
        if value is None or type(value) in (bool, int):  # a subclass may print itself as it likes
            return repr(value)
        if isinstance(value, tuple | list) and list(refs(value)):
            inside = ", ".join(map(self.said, value))
            return f"[{inside}]" if isinstance(value, list) else f"({inside},)"
        if id(value) not in self._known:
            self._known[id(value)] = f"k{len(self._known)}"
            self.named[self._known[id(value)]] = value
        return self._known[id(value)]
