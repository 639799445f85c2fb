"""What GPUs did with two of everything: `measured.json`, as the benchmark wrote it.

    python -m overlaplab.bench double-buffer --out measured.json

Medians only: the samples lie beside the benchmark, in overlaplab/bench/results.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlaplab_course import stored

STORED = Path(__file__).with_name("measured.json")
ALONE = "compute"


def gpu_feeds() -> str:
    """Milliseconds of a step that a way to feed adds to it, by the size of a batch.

    Raises:
        FileNotFoundError: nothing is stored.
    """
    found, cases = _read("prefetch")
    ways = list(dict.fromkeys(way for case in cases for way in case["variants"]))
    rows = [
        ("to fill pinned memory", *(f"{case['fill_ms']:.2f}" for case in cases)),
        ("to copy", *(f"{case['copy_ms']:.2f}" for case in cases)),
        ("a step alone", *(f"{_ms(case, ALONE):.2f}" for case in cases)),
        *(
            (way, *(_number(case["variants"].get(way), "exposed_ms") for case in cases))
            for way in ways
            if way != ALONE
        ),
    ]
    head = ("ms", *(f"{case['batch_mib']:g} MiB" for case in cases))
    return f"{stored.text_table(head, rows)}\n{stored.machine(found)}"


def gpu_reducers() -> str:
    """Milliseconds of a step and GiB of its peak, by link, batch and reducer.

    Raises:
        FileNotFoundError: nothing is stored.
        LookupError: the file has no reducers.
    """
    found, cases = _read("reducer")
    kinds = list(dict.fromkeys(kind for case in cases for kind in case["variants"]))
    rows = [
        (
            f"{case['link']}, batch {case['batch']}",
            *(_number(case["variants"].get(kind), "median_ms") for kind in kinds),
            "|",
            *(_gib(case["variants"].get(kind)) for kind in kinds),
        )
        for case in cases
    ]
    head = ("ms | GiB", *kinds, "|", *kinds)
    return f"{stored.text_table(head, rows)}\n{stored.machine(found)}"


def _read(part: str) -> tuple[stored.Stored, list[Mapping[str, Any]]]:
    found = stored.read("08", STORED)
    if found is None:
        raise FileNotFoundError(f"nothing is stored in {STORED}")
    cases = [case for case in found["cases"] if case["part"] == part]
    if not cases:
        raise LookupError(f"{STORED} has no part {part!r}; measure it, and store it")
    return found, cases


def _ms(case: Mapping[str, Any], way: str) -> float:
    return float(case["variants"][way]["median_ms"])


def _number(row: Mapping[str, Any] | None, name: str) -> str:
    # "+ 0.0" makes a zero of what rounds to minus zero.
    return "-" if row is None or name not in row else f"{round(row[name], 2) + 0.0:.2f}"


def _gib(row: Mapping[str, Any] | None) -> str:
    size = None if row is None else row.get("peak_allocated_bytes")
    return "-" if size is None else f"{size / 2**30:.2f}"
