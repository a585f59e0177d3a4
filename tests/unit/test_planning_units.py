"""Sizes, rates and times, read and written."""

import pytest

from hpc_train.errors import UserError
from hpc_train.planning.units import (
    read_bytes,
    read_rate,
    read_seconds,
    write_bytes,
    write_number,
    write_seconds,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("25GB/s", 25e9),
        ("300 GB/s", 300e9),
        ("512MiB/s", 512 * 2**20),
        ("200Mbit/s", 25e6),
        ("1.5Gbit/s", 187.5e6),
        ("8 bit/s", 1),
    ],
)
def test_rates(text, expected):
    assert read_rate("--bandwidth", text) == expected


@pytest.mark.parametrize("text", ["25GB", "GB/s", "0GB/s", "25GB/h", "fast", "25Gbyte/s", "1.2.3Gbit/s", ""])
def test_no_rate(text):
    with pytest.raises(UserError, match=r"--bandwidth .*: no rate: write for instance 25GB/s or 200Mbit/s"):
        read_rate("--bandwidth", text)


@pytest.mark.parametrize(
    ("text", "expected"), [("2us", 2e-6), ("0.5 ms", 5e-4), ("3µs", 3e-6), ("40ns", 4e-8), ("0s", 0)]
)
def test_times(text, expected):
    assert read_seconds("--latency", text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["2", "us", "2 parsecs", "-2us", ""])
def test_no_time(text):
    with pytest.raises(UserError, match=r"--latency .*: no time: write for instance 2us"):
        read_seconds("--latency", text)


def test_sizes():
    assert read_bytes("--memory", "80GB") == 80e9
    assert read_bytes("--memory", "80") == 80


@pytest.mark.parametrize("text", ["0GB", "much"])
def test_no_size(text):
    with pytest.raises(UserError, match=r"--memory .*: no size: write for instance 80GB"):
        read_bytes("--memory", text)


def test_writing():
    assert [write_bytes(size) for size in (93.1e9, 999.6e6, 512e3, 17, 2.75e12)] == [
        "93.1 GB",
        "1 GB",
        "512 kB",
        "17 B",
        "2.75 TB",
    ]
    assert [write_seconds(s) for s in (1.238, 0.31, 2.5e-6, 0, 120)] == [
        "1.24 s",
        "310 ms",
        "2.5 us",
        "0 us",
        "120 s",
    ]
    assert [write_number(number) for number in (12345, 99.44, 0.1234, 5)] == ["12,345", "99.4", "0.123", "5"]
