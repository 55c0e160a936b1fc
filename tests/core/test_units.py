"""Quantities as people write them."""

import pytest

from roost.core import units
from roost.errors import InputError


@pytest.mark.parametrize(
    ("text", "known", "value"),
    [
        ("12GiB", units.BYTES, 12 * 2**30),
        (" 1.5 MB ", units.BYTES, 1.5e6),
        ("64", units.BYTES, 64),
        (64, units.BYTES, 64),
        ("20us", units.SECONDS, 20e-6),
        ("20µs", units.SECONDS, 20e-6),
        ("7.6GB/s", units.RATE, 7.6e9),
        ("5.6TFLOP/s", units.FLOP_RATE, 5.6e12),
        (".5ms", units.SECONDS, 5e-4),
        ("1e3B", units.BYTES, 1000),
    ],
)
def test_reads(text, known, value):
    assert units.parse(text, known) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    "text", ["", "GiB", "12 gigs", "-3GiB", "1e999GiB", "nan", "12GiB/s", "1 2GiB"]
)
def test_refuses(text):
    with pytest.raises(InputError):
        units.parse(text, units.BYTES)


def test_shows():
    assert units.show_bytes(12 * 2**30) == "12.0 GiB"
    assert units.show_bytes(100) == "100 B"
    assert units.show_bytes(-(2**20)) == "-1.0 MiB"
    assert units.show_bytes(3 * 2**50) == "3072.0 TiB"
    assert units.show_seconds(0.00123) == "1.23 ms"
    assert units.show_seconds(0) == "0 s"
    assert units.show_seconds(5e-9) == "5.00 ns"
    assert units.show_count(5.6e12, "FLOP") == "5.60 TFLOP"


def test_writes_exact_sizes_only():
    assert units.write_bytes(12 * 2**30) == "12GiB"
    assert units.write_bytes(2**30 + 1) == 2**30 + 1
    assert units.write_bytes(0) == 0
