"""What GPUs did with whole steps of stage 3, stored: `measured.json` of lab 10.

The numbers are one run's of `python -m overlaplab.bench zero3`. To store them:

    python -m overlaplab_course.lab10.measured RESULTS.json

The section of the lesson that shows them is three cells, with the variants that the
benchmark calls "ours", "fsdp2" and "ddp":

    print(lab.gpu_table("median ms"), lab.gpu_table("peak GiB"), sep="\\n\\n")

    for batch in lab.gpu_batches():
        ours = lab.gpu_number("median ms", "ours", batch)
        peer = lab.gpu_number("median ms", "fsdp2", batch)
        print(f"batch {batch}: {ours:.1f} ms, FSDP 2 {peer:.1f}")

    print(lab.gpu_machine())
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from overlaplab_course import stored

STORED = Path(__file__).with_name("measured.json")
_WHERE = ("world_size", "card", "torch", "nccl", "date", "command")


def from_benchmark(results: Mapping[str, Any], model: str = "") -> dict[str, Any]:
    """The stored form of a file of the benchmark.

    Args:
        results: as the file has them.
        model: one of its models; "": the first.

    Raises:
        ValueError: it has no such model.
    """
    models = results.get("models", [])
    chosen = [one for one in models if model in ("", one["model"])]
    if not chosen:
        known = ", ".join(one["model"] for one in models) or "none"
        raise ValueError(f"no model {model!r} in these results; there are: {known}")
    cases = chosen[0]["cases"]
    ways = list(dict.fromkeys(way for case in cases for way in case["variants"]))
    readers: dict[str, Callable[[Any], float | None]] = {
        "median ms": lambda row: row.get("median_ms"),
        "exposed ms": lambda row: row.get("kernels", {}).get("exposed_ms"),
        "peak GiB": lambda row: _gib(row.get("peak_allocated_bytes")),
    }
    tables = {
        name: [
            [way, *(read(case["variants"].get(way, {})) for case in cases)]
            for way in ways
        ]
        for name, read in readers.items()
    }
    return {
        "source": f"{chosen[0]['model']}: forward, backward, averages, fused AdamW",
        **{key: results[key] for key in _WHERE if key in results},
        "batches": [case["batch"] for case in cases],
        "tables": tables,
    }


def _gib(size: int | None) -> float | None:
    return None if size is None else round(size / 2**30, 3)


def _read() -> stored.Stored:
    found = stored.read("10", STORED)
    if found is None:
        raise FileNotFoundError(
            f"nothing is stored in {STORED}; see this module's docstring"
        )
    return found


def gpu_batches() -> Sequence[int]:
    """Sequences on each rank, of each column."""
    batches: Sequence[int] = _read()["batches"]
    return batches


def gpu_table(name: str) -> str:
    """A row for each way to train: its "median ms", "exposed ms" or "peak GiB"."""
    found = _read()
    head = (name, *(f"batch {batch}" for batch in found["batches"]))
    rows = [
        (way, *("-" if number is None else f"{number:.2f}" for number in numbers))
        for way, *numbers in found["tables"][name]
    ]
    return stored.text_table(head, rows)


def gpu_number(name: str, way: str, batch: int) -> float:
    """One number of a table.

    Raises:
        KeyError: it is not there.
    """
    found = _read()
    column = list(found["batches"]).index(batch)
    for row, *numbers in found["tables"][name]:
        if row == way and numbers[column] is not None:
            return float(numbers[column])
    raise KeyError(f"no {name} of {way!r} at batch {batch}")


def gpu_machine() -> str:
    """What was measured, and on which machine."""
    found = _read()
    return f"{found['source']}. {stored.machine(found)}"


def main(arguments: Sequence[str]) -> None:
    """Store the file of the benchmark: RESULTS.json [MODEL]."""
    path, *model = arguments
    results = json.loads(Path(path).read_text("utf-8"))
    entry = from_benchmark(results, *model)
    STORED.write_text(json.dumps(entry, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {STORED}")


if __name__ == "__main__":
    main(sys.argv[1:])
