"""Format and parse quantities as people write them: 3 significant figures and a decimal unit.

>>> show_bytes(40_100_000_000), show_seconds(0.00284), show_percent(0.5821)
('40.1 GB', '2.84 ms', '58.2%')
>>> parse_count("4M"), parse_seconds("30ms")
(4000000, 0.03)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from meshwright.errors import MeshwrightError

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_COUNT = r"([0-9]{1,30}|[0-9]{1,3}(?:,[0-9]{3}){1,9})(?:\.([0-9]{1,30}))?([kmgt]i?|)"
_NUMBER = r"[-+]?(?:[0-9]{1,300}\.?[0-9]{0,300}|\.[0-9]{1,300})(?:e[-+]?[0-9]{1,9})?"
_FACTORS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def show_bytes(size: float) -> str:
    """Format bytes: `40.1 GB`."""
    return _with_prefix(size, "B")


def show_flops(flops: float) -> str:
    """Format a number of floating-point operations: `1.83 Pflop`."""
    return _with_prefix(flops, "flop")


def show_rate(rate: float, unit: str) -> str:
    """Format a rate: `9.8 k tok/s` for the unit `tok/s`."""
    return _with_prefix(rate, unit)


def show_seconds(seconds: float) -> str:
    """Format seconds: `4.13 s`, `2.84 ms`, `17 us`."""
    for factor, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= factor:
            return f"{_figures(seconds / factor)} {unit}"
    return f"{_figures(seconds * 1e9)} ns" if seconds else "0 s"


def show_range(least: float, most: float) -> str:
    """Format a range of seconds: `1.12 to 1.82 ms`, or one time if both have the same text."""
    first, last = show_seconds(least), show_seconds(most)
    number, _, unit = first.partition(" ")
    return last if first == last else f"{number if last.endswith(f' {unit}') else first} to {last}"


def show_percent(share: float) -> str:
    """Format a share as a percentage: `58.2%` for 0.582."""
    return f"{_figures(100 * share)}%"


def show_estimate(share: float, error: float | None) -> str:
    """Format a share and its standard error, if known, as percentages: `58.2% ± 1.4%`."""
    return show_percent(share) + ("" if error is None else f" ± {show_percent(error)}")


def show_count(count: int, noun: str) -> str:
    """Format a count with its noun: `1 device`, `1,024 devices`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def show_degrees(degrees: Mapping[str, int]) -> str:
    """Format the mesh axes of degree above 1: `fsdp=2,tp=4`; `one device` if there are none."""
    return ",".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1) or "one device"


def show_mesh(degrees: Mapping[str, int]) -> str:
    """Format all mesh axes as command-line options take them: `X=4,Y=1`."""
    return ",".join(f"{axis}={degree}" for axis, degree in degrees.items())


def parse_count(text: str) -> int:
    """Parse a whole number with an optional decimal or binary prefix: `4M` is 4,000,000, `128Ki` is 131,072.

    Raises:
        MeshwrightError: the text is not such a number.
    """
    match = re.fullmatch(_COUNT, text.strip(), re.IGNORECASE)
    if match:
        decimals = match[2] or ""
        value, rest = divmod(
            int(match[1].replace(",", "") + decimals) * _FACTORS[match[3].lower()], 10 ** len(decimals)
        )
        if not rest:
            return value
    raise MeshwrightError(f"{text!r} is not a whole number; write it as 4096, 64k, 128Ki, 4M or 1.5G")


def parse_bytes(text: str) -> int:
    """Parse a number of bytes, with or without B: `64MB`, `64 MB` and `64M` are 64,000,000, `1MiB` is 1,048,576.

    Raises:
        MeshwrightError: the text is not such a number.
    """
    try:
        return parse_count(re.sub(r"\s*([kmgt]i?)?b?$", r"\1", text.strip(), flags=re.IGNORECASE))
    except MeshwrightError:
        raise MeshwrightError(
            f"{text!r} is not a number of bytes; write it as 4096, 64M, 64MB, 64MiB or 1.5G"
        ) from None


def parse_number(text: str) -> float:
    """Parse a finite number: `4.2`, `1e-3`. Raises for other text."""
    value = float(text) if re.fullmatch(_NUMBER, text.strip(), re.IGNORECASE) else math.nan
    if not math.isfinite(value):
        raise MeshwrightError(f"{text!r} is not a number; write it as 4.2 or 1e-3")
    return value


def parse_seconds(text: str) -> float:
    """Parse a time above 0 to seconds: `30ms` is 0.03; the units are s, ms and us. Raises for other text."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(s|ms|us)", text.strip())
    value = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not value:
        raise MeshwrightError(f"{text!r} is not a time; write it as 30ms, 1.5s or 200us")
    return value


def _with_prefix(value: float, unit: str) -> str:
    """Format a value with the largest decimal prefix that leaves it at 1 or more."""
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor * 0.9995:
            return f"{_figures(value / factor)} {prefix}{unit}"
    return f"{_figures(value)} {unit}"


def _figures(value: float) -> str:
    """Format a value with three significant figures, without an exponent; from 100, as a whole number."""
    if value == 0:
        return "0"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}"
