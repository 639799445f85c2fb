"""The course's own solutions, for cells that stand on what is not solved yet."""

from __future__ import annotations


def ratios(
    tc: float, tm: float, sent: float, hidden: float, step: float
) -> tuple[float | None, float | None, float | None]:
    """(overlap fraction, saved fraction, efficiency)."""
    saved = tc + tm - step
    could = min(tc, tm)
    return (
        hidden / sent if sent else None,
        saved / tm if tm else None,
        saved / could if could else None,
    )


def schedule(
    num_layers: int, layer_ms: float, message_ms: float, per_bucket: int
) -> list[tuple[float, float]]:
    """(start, end) of each message, in ms from the start of the backward pass."""
    pairs: list[tuple[float, float]] = []
    free = 0.0
    for first in range(0, num_layers, per_bucket):
        last = min(first + per_bucket, num_layers)
        start = max(free, last * layer_ms)
        free = start + (last - first) * message_ms
        pairs.append((start, free))
    return pairs
