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


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (units.show_bytes(0), "0 B"),
        (units.show_bytes(1023), "1023 B"),
        (units.show_bytes(1024), "1.0 KiB"),
        (units.show_bytes(2**40), "1.0 TiB"),
        (units.show_seconds(1.0), "1.00 s"),
        (units.show_seconds(1e-3), "1.00 ms"),
        (units.show_seconds(1e-6), "1.00 us"),
        (units.show_seconds(123.0), "123 s"),
        (units.show_count(0), "0"),
        (units.show_count(1, "FLOP"), "1.00 FLOP"),
        (units.show_count(9.994), "9.99"),
        (units.show_count(10), "10.0"),
        (units.show_count(99.94), "99.9"),
        (units.show_count(100), "100"),
        (units.show_count(1e3), "1.00 k"),
        (units.show_count(1e6), "1.00 M"),
        (units.show_count(1e9), "1.00 G"),
        (units.show_count(1e12), "1.00 T"),
        (units.show_count(1e15), "1.00 P"),
    ],
)
def test_shows_three_digits_in_the_largest_unit_that_fits(shown, text):
    assert shown == text


@pytest.mark.parametrize(
    ("prefix", "power"), [("", 0), *zip("kKMGTP", (1, 1, 2, 3, 4, 5), strict=True)]
)
def test_each_prefix_is_a_power_of_1000_or_1024(prefix, power):
    assert units.BYTES[f"{prefix}B"] == units.RATE[f"{prefix}B/s"] == 1000.0**power
    assert units.FLOP_RATE[f"{prefix}FLOP/s"] == 1000.0**power
    if prefix not in ("", "k"):
        assert units.BYTES[f"{prefix}iB"] == units.RATE[f"{prefix}iB/s"] == 1024.0**power


def test_zero_is_a_quantity_and_a_whole_number_of_bytes_stays_exact():
    assert units.parse(0, units.SECONDS) == 0.0
    assert units.parse_bytes(2**60 + 1) == 2**60 + 1
    assert units.parse_bytes("1.4B") == 1
    assert [units.SECONDS[unit] for unit in ("s", "ms", "us", "µs", "ns")] == [
        1.0,
        1e-3,
        1e-6,
        1e-6,
        1e-9,
    ]


def test_writes_exact_sizes_only():
    assert units.write_bytes(12 * 2**30) == "12GiB"
    assert units.write_bytes(2**30 + 1) == 2**30 + 1
    assert units.write_bytes(0) == 0
