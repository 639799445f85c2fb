"""Nanoseconds and bytes as people read them. The only place where units change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from overlaplab.errors import printable

MIB = 2**20
_TIME_UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us"), (1, "ns"))
_BYTE_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def format_ns(time_ns: int) -> str:
    """A time with four digits, in the largest unit that leaves at least 1.

    >>> format_ns(56_000_000), format_ns(-1_234_567), format_ns(64_100), format_ns(7)
    ('56 ms', '-1.235 ms', '64.1 us', '7 ns')
    """
    scale, unit = time_unit(time_ns)
    return f"{_four_digits(time_ns / scale)} {unit}"


def format_bytes(num_bytes: int) -> str:
    """A size with four digits; MiB is 2**20 bytes.

    >>> format_bytes(25 * 2**20), format_bytes(1536), format_bytes(3), format_bytes(0)
    ('25 MiB', '1.5 KiB', '3 B', '0 B')
    """
    for scale, unit in _BYTE_UNITS:
        if abs(num_bytes) >= scale:
            return f"{_four_digits(num_bytes / scale)} {unit}"
    return "0 B"


def shortened(name: str, most: int = 40) -> str:
    """A name that fits beside a drawing: its start and its end, on one line.

    >>> shortened("all_reduce"), shortened("a" * 30 + "b" * 30, 20)
    ('all_reduce', 'aaaaaaaaaaa...bbbbbb')
    """
    name = printable(" ".join(name.split()))
    if len(name) <= most:
        return name
    end = most // 3
    return f"{name[: most - 3 - end]}...{name[-end:]}"


def time_unit(longest_ns: int) -> tuple[int, str]:
    """Nanoseconds a unit, and its name, for times of up to `longest_ns`.

    >>> time_unit(1_500_000), time_unit(900)
    ((1000000, 'ms'), (1, 'ns'))
    """
    for scale, unit in _TIME_UNITS:
        if abs(longest_ns) >= scale:
            return scale, unit
    return 1_000_000, "ms"  # zero, of no unit: ms as everywhere else


def decimals(values: Iterable[float]) -> int:
    """Digits after the point that show four digits of the largest, and no zeros more.

    >>> decimals([56.0, 3.0]), decimals([42.3125, 1.0]), decimals([1234.5])
    (0, 2, 0)
    """
    values = [abs(v) for v in values]
    digits = max(0, 4 - len(str(int(max(values, default=0.0)))))
    while digits and all(round(v, digits) == round(v, digits - 1) for v in values):
        digits -= 1
    return digits


def percentages(parts: Iterable[int]) -> list[int]:
    """Whole percents that add up to 100 (largest remainder); zeros if all are 0.

    >>> percentages([1, 1, 1]), percentages([0, 0])
    ([34, 33, 33], [0, 0])
    """
    parts = list(parts)
    whole = sum(parts)
    if whole == 0:
        return [0] * len(parts)
    percents = [100 * part // whole for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda i: -(100 * parts[i] % whole))
    for i in by_remainder[: 100 - sum(percents)]:
        percents[i] += 1
    return percents


def share_text(parts: Mapping[Any, int]) -> str:
    """Parts as percents that add up to 100, without those of 0 %.

    >>> share_text({"compute": 3, "wire": 1, "idle": 0})
    'compute 75 %, wire 25 %'
    """
    named = zip(parts, percentages(parts.values()), strict=True)
    return ", ".join(f"{name} {percent} %" for name, percent in named if percent)


def _four_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
