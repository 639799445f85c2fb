"""What a law says where it is broken, and how it writes times and names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """One fact that breaks a law.

    Args:
        law: "prompt", "early", "blocked", "once", "bytes", "order", "values", "hazard",
            "unwaited", "unmatched", "leak", "step", "regret" or "diagnosis".
        message: what was seen, with numbers, ranks and times.
        expected: what the law asks for.
        hint: the smallest hint, "" if none.
        rank, step: where, None if everywhere. Steps count from 1.
        bucket: index in the plan that was given, None if not about one.
    """

    law: str
    message: str
    expected: str = ""
    hint: str = ""
    rank: int | None = None
    step: int | None = None
    bucket: int | None = None


def ms(time_ns: int) -> str:
    """Milliseconds, with three digits after the point below 1 ms."""
    value = time_ns / 1e6
    return f"{value:.1f} ms" if abs(value) >= 1 else f"{value:.3f} ms"


def list_names(names: Sequence[str]) -> str:
    if not names:
        return "no gradient"
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
