"""Numbers that a learner's function returns."""

from __future__ import annotations

import math
from collections.abc import Iterable

from overlaplab.timeline import Span, Timeline

NS_PER_MS = 1_000_000


def close(said: float, right: float) -> bool:
    """Equal to a part in ten thousand: rounding is free, a forgotten term is not."""
    return math.isclose(said, right, rel_tol=1e-4, abs_tol=1e-6)


def as_number(answer: object) -> float | None:
    """A finite number of any type, None for anything else (a bool, a text)."""
    if isinstance(answer, bool | str | bytes):
        return None
    try:
        number = float(answer)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def read_numbers(
    answer: object, count: int, function: str, wanted: str
) -> list[float | None]:
    """`count` finite numbers, or None among them.

    Raises:
        ValueError: it is something else.
    """
    try:
        if isinstance(answer, str) or not isinstance(answer, Iterable):
            raise ValueError("no tuple")
        values = [None if value is None else float(value) for value in answer]
        if len(values) != count or not all(
            value is None or math.isfinite(value) for value in values
        ):
            raise ValueError("other numbers")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{function} returned {answer!r:.200}; expected {wanted}: {count} numbers"
        ) from error
    return values


def said_timeline(
    backward_ms: float, layer_ms: float, pairs: Iterable[tuple[float, float]]
) -> Timeline:
    """Layers of a backward pass, and the messages that a learner puts beside it.

    A message that would run beside another has a lane of its own, so that neither hides
    the other.
    """
    spans = []
    number = max(1, round(backward_ms / layer_ms))
    for i in range(number):
        start, end = i * layer_ms, (i + 1) * layer_ms
        spans.append(
            Span(0, "default", "compute", f"layer {number - i}", _ns(start), _ns(end))
        )
    wire_end_ms = -math.inf
    for i, (start, end) in enumerate(pairs):
        end = max(start, end)
        lane = "comm" if start >= wire_end_ms - 1e-9 else "comm, at once"
        wire_end_ms = max(wire_end_ms, end)
        name = f"bucket {i}"
        spans.append(Span(0, lane, "communication", name, _ns(start), _ns(end)))
    return Timeline.of(spans)


def _ns(ms: float) -> int:
    return round(ms * NS_PER_MS)
