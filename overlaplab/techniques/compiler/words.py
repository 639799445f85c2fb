"""Times and numbers of things as people read them."""

from __future__ import annotations


def time_text(time_ns: int) -> str:
    """In the largest unit that leaves at least 1.

    >>> time_text(16_364_224), time_text(5_000), time_text(7), time_text(0)
    ('16.36 ms', '5 us', '7 ns', '0 ns')
    """
    for scale, unit in ((1_000_000, "ms"), (1_000, "us")):
        if time_ns >= scale:
            return f"{time_ns / scale:.4g} {unit}"
    return f"{time_ns} ns"


def count(number: int, noun: str) -> str:
    """
    >>> count(1, "message"), count(1400, "gradient")
    ('1 message', '1,400 gradients')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
