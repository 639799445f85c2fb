"""What GPUs did with two of everything: the file of the benchmark, as it is.

    python -m overlaplab.bench double-buffer --out measured.json

SEAM. As long as no `measured.json` lies beside this module, the lesson shows nothing of
GPUs. When it does, `lab.gpu_feeds()` and `lab.gpu_reducers()` print its two tables, in
cells of a section "On real GPUs" before "Where the model lies".
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlaplab_course import stored

STORED = Path(__file__).with_name("measured.json")


def gpu_feeds() -> str:
    """Milliseconds of copies that no step hides, by size of a batch and way to feed.

    Raises:
        FileNotFoundError: nothing is stored.
    """
    found, cases = _read("prefetch")
    ways = list(dict.fromkeys(way for case in cases for way in case["variants"]))
    alone, *ways = ways  # the first computes only
    rows = [
        (
            f"{case['batch_mib']:g}",
            f"{case['fill_ms']:.2f}",
            f"{case['copy_ms']:.2f}",
            f"{case['variants'][alone]['median_ms']:.2f}",
            *(_number(case["variants"].get(way), "exposed_ms") for way in ways),
        )
        for case in cases
    ]
    head = ("MiB", "fill", "copy", "step", *ways)
    return f"{stored.text_table(head, rows)}\n{stored.machine(found)}"


def gpu_reducers() -> str:
    """Milliseconds of a step and GiB of its peak, by link, batch and reducer.

    Raises:
        FileNotFoundError: nothing is stored.
    """
    found, cases = _read("reducer")
    kinds = list(dict.fromkeys(kind for case in cases for kind in case["variants"]))
    rows = [
        (
            f"{case['link']}, batch {case['batch']}",
            *(_number(case["variants"].get(kind), "median_ms") for kind in kinds),
            *(_gib(case["variants"].get(kind)) for kind in kinds),
        )
        for case in cases
    ]
    head = ("", *(f"{kind}, ms" for kind in kinds), *(f"{kind}, GiB" for kind in kinds))
    return f"{stored.text_table(head, rows)}\n{stored.machine(found)}"


def _read(part: str) -> tuple[stored.Stored, list[Mapping[str, Any]]]:
    found = stored.read("08", STORED)
    if found is None:
        raise FileNotFoundError(f"nothing is stored in {STORED}")
    return found, [case for case in found["cases"] if case["part"] == part]


def _number(row: Mapping[str, Any] | None, name: str) -> str:
    return "-" if row is None or name not in row else f"{row[name]:.2f}"


def _gib(row: Mapping[str, Any] | None) -> str:
    size = None if row is None else row.get("peak_allocated_bytes")
    return "-" if size is None else f"{size / 2**30:.2f}"
