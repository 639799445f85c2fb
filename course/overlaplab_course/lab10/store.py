"""Store what the benchmark of whole steps measured, for lab 10 to show.

python -m overlaplab.bench zero3 --out RESULTS.json
python -m overlaplab.bench predict zero3 RESULTS.json --out RESULTS.json
python -m overlaplab_course.lab10.store RESULTS.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from overlaplab_course.lab10 import measured

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
        "predicted ms": lambda row: row.get("predicted_ms"),
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


def main(arguments: Sequence[str]) -> None:
    """Store the file of the benchmark: RESULTS.json [MODEL]."""
    path, *model = arguments
    results = json.loads(Path(path).read_text("utf-8"))
    entry = from_benchmark(results, *model)
    measured.STORED.write_text(json.dumps(entry, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {measured.STORED}")


if __name__ == "__main__":
    main(sys.argv[1:])
