"""What lab 01 shows of real GPUs: steps timed without a profiler, ratios from traces.

`python -m overlaplab.bench traces` measured both, in one run a link.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

_STORED = Path(__file__).with_name("measured.json")


@dataclass(frozen=True, slots=True)
class Measured:
    """One variant on one link; ms.

    Args:
        link: "NVLink" or "P2P off".
        batch: sequences a GPU; compare rows of one link and batch only.
        name: of the variant.
        tc: compute alone.
        tm: what one message for all adds behind it.
        step: with overlap; these three without a profiler.
        sent, hidden: communication of one profiled step, and its hidden part.
        low, high: between which eight of ten steps lie.
    """

    link: str
    batch: int
    name: str
    tc: float
    tm: float
    sent: float
    hidden: float
    step: float
    low: float
    high: float

    def __iter__(self) -> Iterator[float]:
        return iter((self.tc, self.tm, self.sent, self.hidden, self.step))


@lru_cache(maxsize=1)
def _read() -> Mapping[str, Any]:
    stored: Mapping[str, Any] = json.loads(_STORED.read_text(encoding="utf-8"))
    return stored


def measured() -> tuple[Measured, ...]:
    """Every stored step with overlap."""
    return tuple(
        Measured(
            row["link"],
            row["batch"],
            name,
            row["compute_ms"],
            row["serial_ms"] - row["compute_ms"],
            variant["sent_ms"],
            variant["hidden_ms"],
            variant["median_ms"],
            *variant["p10_p90_ms"],
        )
        for row in _read()["rows"]
        for name, variant in row["variants"].items()
    )


def measured_alone() -> tuple[str, ...]:
    """What Tc and Tm are made of, with its spread, a line each link."""
    lines = []
    for row in _read()["rows"]:
        alone = _spread(row["compute_ms"], row["compute_p10_p90_ms"])
        serial = _spread(row["serial_ms"], row["serial_p10_p90_ms"])
        lines.append(
            f"{row['link']}, batch {row['batch']}: compute alone {alone},\n"
            f"    with one message for all behind it {serial}"
        )
    return tuple(lines)


def _spread(median_ms: float, low_high_ms: Sequence[float]) -> str:
    low, high = low_high_ms
    return f"{median_ms:.1f} ms ({low:.1f} to {high:.1f})"


def machine() -> str:
    """Where and when, one line."""
    s = _read()
    return (
        f"Measured on {s['world_size']} x {s['card']}, torch {s['torch']}, "
        f"NCCL {s['nccl']}, {s['date'][:10]}."
    )


def measure_it_here() -> str:
    """How this machine could measure, if it can."""
    count = torch.cuda.device_count()
    if count < 2:
        return f"This machine has {count} GPUs. Two or more could measure here."
    return (
        f"This machine has {count} GPUs. To measure here, run in a terminal:\n"
        "    python -m overlaplab.bench traces --folder FOLDER"
    )
