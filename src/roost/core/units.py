"""Quantities with units: `12GiB`, `20us`, `480GB/s`, `5.6TFLOP/s`."""

from __future__ import annotations

import math
import re

from roost.errors import InputError

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
BYTES = {f"{prefix}B": scale for prefix, scale in (_DECIMAL | _BINARY).items()}
RATE = {f"{unit}/s": scale for unit, scale in BYTES.items()}
FLOP_RATE = {f"{prefix}FLOP/s": scale for prefix, scale in _DECIMAL.items()}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}

_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*")


def parse(value: float | str, units: dict[str, float]) -> float:
    """A number in base units. A bare number is in base units already."""
    if isinstance(value, int | float):
        number = float(value)
    else:
        match = _QUANTITY.fullmatch(value)
        if match is None or (match[2] and match[2] not in units):
            raise InputError(
                f"cannot read {value!r}; write a number with one of {', '.join(units)}"
            )
        number = float(match[1]) * units.get(match[2], 1.0)
    if not math.isfinite(number) or number < 0:
        raise InputError(f"{value!r} must be finite and not negative")
    return number


def parse_bytes(value: float | str) -> int:
    """A size in bytes; a whole number stays exactly what it is."""
    parsed = parse(value, BYTES)
    return value if isinstance(value, int) else round(parsed)


def show_bytes(size: float) -> str:
    """`12.0 GiB`, or `-12.0 GiB`."""
    sign, size = ("-", -size) if size < 0 else ("", size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.1f} {unit}"
        size /= 1024
    return f"{sign}{size:.1f} TiB"


def show_seconds(seconds: float) -> str:
    """`1.23 ms`: three significant digits in a suitable unit."""
    if seconds == 0:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 1e-9)} ns"


def show_count(count: float, unit: str = "") -> str:
    """`5.6 TFLOP`: decimal prefixes."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{_three_digits(count / scale)} {prefix}{unit}"
    return f"{_three_digits(count)} {unit}".rstrip()


def _three_digits(value: float) -> str:
    if value == 0 or value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def write_bytes(size: int) -> str | int:
    """A size as files have it: `12GiB` if that is exact, else the plain number."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % int(BYTES[unit]) == 0:
            return f"{size // int(BYTES[unit])}{unit}"
    return size
