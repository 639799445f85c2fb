"""What a law says where it is broken, and how it writes times and names."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TEXTS: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    Path(__file__).with_name("laws.toml").read_text("utf-8")
)


@dataclass(frozen=True, slots=True)
class Violation:
    """One fact that breaks a law.

    Args:
        law: "prompt", "early", "blocked", "once", "bytes", "order", "values", "hazard",
            "unwaited", "unmatched", "leak", "step", "updates", "regret" or "diagnosis".
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


def broken(entry: str, **facts: Any) -> Violation:
    """What laws.toml says under `entry`, with `facts` in their places.

    Args:
        facts: `rank`, `step` and `bucket` say where; `why` is one of the `hints`.
    """
    text = _TEXTS[entry]
    where = {key: facts.setdefault(key, None) for key in ("rank", "step", "bucket")}
    message, expected = (
        text.get(key, "").format(**facts) for key in ("message", "expected")
    )
    hint = text["hints"][facts["why"]] if "hints" in text else text.get("hint", "")
    return Violation(entry.split()[0], message, expected, hint, **where)


def ms(time_ns: int) -> str:
    """Milliseconds, with three digits after the point below 1 ms."""
    value = time_ns / 1e6
    return f"{value:.1f} ms" if abs(value) >= 1 else f"{value:.3f} ms"


def list_names(names: Sequence[str]) -> str:
    if not names:
        return "no gradient"
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
