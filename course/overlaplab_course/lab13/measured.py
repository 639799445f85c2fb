"""What two GPUs did with inserted messages: `measured.json`, from the benchmark.

    python -m overlaplab.bench compiler --out measured.json

Medians of four runs, on three machines; the samples lie beside the benchmark, in
overlaplab/bench/results. "links" is of another machine, of hooks alone, on two links:

    python -m overlaplab.bench predict measure --minutes 6 --out predict-2xH200.json

"rows" is of one machine more, on two links; the files say how.
"""

from __future__ import annotations

import json
import re
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
    "ours": "inserted, its own size",
    "compute, inductor": "compute alone, Inductor",
    "our reducer, inductor": "hooks over Inductor's computing",
    "ours, inductor": "inserted, lowered by Inductor",
    "ddp 25, inductor": "torch.compile(DDP), 25 MiB",
    "ddp 100, inductor": "torch.compile(DDP), 100 MiB",
}


@lru_cache(maxsize=1)
def _stored() -> Mapping[str, Any]:
    """
    Raises:
        FileNotFoundError: nothing is stored.
    """
    found: Mapping[str, Any] = json.loads(STORED.read_text("utf-8"))
    return found


def _runs() -> tuple[Mapping[str, Any], ...]:
    return tuple(_stored()["runs"])


def _on(run: Mapping[str, Any]) -> str:
    """The link, where it is not NVLink."""
    return f"{run['link']}, " if "link" in run else ""


def _columns() -> dict[str, Mapping[str, float]]:
    return {
        f"{_on(run)}{run['machine']}, batch {case['batch']}": case["ms"]
        for run in _runs()
        for case in run["cases"]
    }


def ms(column: str, way: str) -> float:
    """The median step of one way, by its name in the benchmark."""
    return _columns()[column][way]


def ms_of_rows() -> dict[str, Mapping[str, float]]:
    """Steps of DDP, of inserted messages and of those with rows, by link and batch."""
    return {
        f"{case['link']}, batch {case['batch']}": case["ms"]
        for case in _stored()["rows"]
    }


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


def won_percent(serial: float, least: float, ms: float) -> float:
    """How much of what there is to win over the serial step is won."""
    return 100 * (serial - ms) / (serial - least)


def won_table() -> str:
    """The potential of each link and batch, and how much of it each way has won.

    The least is what computing takes alone, or all messages, whichever is longer. The
    best of all sizes of buckets counts.
    """
    rows = []
    for column, ms_of in _columns().items():
        serial = ms_of["serial"]
        least = max(ms_of["compute"], serial - ms_of["compute"])
        ours = min(ms_of[way] for way in ms_of if re.fullmatch(r"ours( \d+)?", way))
        won = (won_percent(serial, least, ms) for ms in (ms_of["our reducer"], ours))
        cells = [f"{each:.0f} %" for each in won]
        name = column if "P2P" in column else f"NVLink, {column}"
        rows.append((name, f"{serial - least:.1f}", *cells))
    links = _stored()["links"]
    for case in links["cases"]:
        serial, messages = case["serial"], case["messages"]
        least = max(messages, serial - messages)
        hooks = won_percent(serial, least, min(case["hooks"].values()))
        name = f"{case['link']}, {links['machine']}, batch {case['batch']}"
        rows.append((name, f"{serial - least:.1f}", f"{hooks:.0f} %", "-"))
    head = ("", "potential, ms", "hooks", "compiler")
    return stored.text_table(head, rows)
