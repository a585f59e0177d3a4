"""Sizes, rates and times as people write and read them.  PURE: neither torch nor MPI."""

import math
import re

from hpc_train.comm.interface import Wire
from hpc_train.config import parse_bytes
from hpc_train.errors import UserError

# Bytes on the wire for each byte in fp32, with the exponents of blocks; see comm/wire.py.
WIRE_SHARE = {
    Wire.FP32: 1.0,
    Wire.BF16: 0.5,
    Wire.FP16: 0.5 + 2 / (4 * 1024),
    Wire.INT8: 0.25 + 2 / (4 * 128),
}

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def read_bytes(name: str, text: str) -> float:
    """`80GB` or `512MiB` in bytes; `name` is the option that the error names.

    Raises:
        UserError: it is not a size above 0.
    """
    try:
        size = float(parse_bytes(text))
    except ValueError:
        size = 0.0
    return _positive(size, f"{name} {text}: no size: write for instance 80GB or 512MiB")


def read_rate(name: str, text: str) -> float:
    """`25GB/s`, `512MiB/s` or `200Mbit/s` in bytes per second.

    Raises:
        UserError: it is not a rate above 0.
    """
    fix = f"{name} {text}: no rate: write for instance 25GB/s or 200Mbit/s"
    amount, slash, per = text.strip().rpartition("/")
    if not slash or per.strip() != "s":
        raise UserError(fix)
    bits = re.fullmatch(r"([0-9.]+)\s*([kmgt]?)bit", amount.strip().lower())
    try:
        rate = float(bits[1]) * _PREFIXES[bits[2]] / 8 if bits else float(parse_bytes(amount))
    except ValueError:
        rate = 0.0
    return _positive(rate, fix)


def read_seconds(name: str, text: str) -> float:
    """`2us`, `1.5 ms` or `0s` in seconds.

    Raises:
        UserError: it is not a time.
    """
    amount, unit = re.fullmatch(r"\s*([0-9.]*)\s*(.*?)\s*", text, re.DOTALL).groups()  # type: ignore[union-attr]
    try:
        return float(amount) * _SECONDS[unit]
    except (ValueError, KeyError):
        raise UserError(f"{name} {text}: no time: write for instance 2us or 0.5ms") from None


def write_bytes(size: float) -> str:
    """For instance `93.1 GB`, `512 kB` or `17 B`: three digits."""
    for unit, bytes_ in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.9995 * bytes_:
            return f"{write_number(size / bytes_)} {unit}"
    return f"{size:.0f} B"


def write_seconds(seconds: float) -> str:
    """For instance `1.24 s`, `310 ms` or `2.5 us`: three digits."""
    for unit, length_s in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * length_s:
            return f"{write_number(seconds / length_s)} {unit}"
    return f"{write_number(seconds / 1e-6)} us"


def write_number(number: float) -> str:
    """Three digits, or all before the point: `0.123`, `1.5`, `12,345`."""
    if number >= 100:
        return f"{number:,.0f}"
    digits = 1 if number >= 10 else 2 if number >= 1 else 3
    text = f"{number:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _positive(number: float, fix: str) -> float:
    if not (number > 0 and math.isfinite(number)):
        raise UserError(fix)
    return number
