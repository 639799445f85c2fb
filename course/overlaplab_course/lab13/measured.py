"""What two GPUs did with inserted messages: `measured.json`, from the benchmark.

    python -m overlaplab.bench compiler --out measured.json

Medians of two runs, each on a machine of its own; the samples lie beside the benchmark,
in overlaplab/bench/results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from overlaplab_course import stored

STORED = Path(__file__).with_name("measured.json")
NAMES = {
    "compute": "compute alone",
    "serial": "one message at the end",
    "ddp 100 views static": "DDP, 100 MiB, views, static graph",
    "our reducer": "hooks: BucketedReducer",
    "ours 25": "inserted, 25 MiB",
    "ours 100": "inserted, 100 MiB",
    "ours 400": "inserted, 400 MiB",
    "compute, inductor": "compute alone, Inductor",
    "our reducer, inductor": "hooks over Inductor's computing",
    "ddp 25, inductor": "torch.compile(DDP), 25 MiB",
    "ddp 100, inductor": "torch.compile(DDP), 100 MiB",
}


@lru_cache(maxsize=1)
def _runs() -> tuple[Mapping[str, Any], ...]:
    """The stored runs.

    Raises:
        FileNotFoundError: nothing is stored.
    """
    return tuple(json.loads(STORED.read_text("utf-8"))["runs"])


def _columns() -> dict[str, Mapping[str, float]]:
    return {
        f"{run['machine']}, batch {case['batch']}": case["ms"]
        for run in _runs()
        for case in run["cases"]
    }


def ms(column: str, way: str) -> float:
    """The median step of one way, by its name in the benchmark."""
    return _columns()[column][way]


def gpu_table() -> str:
    """Milliseconds per step: a row for each way, a column for each run and batch."""
    columns = _columns()
    rows = [
        (
            NAMES[way],
            *(f"{each[way]:.1f}" if way in each else "-" for each in columns.values()),
        )
        for way in NAMES
    ]
    told = f"Each machine: {stored.machine(_runs()[0])}."
    return f"{stored.text_table(('ms per step', *columns), rows)}\n{told}"
