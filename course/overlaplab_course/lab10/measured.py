"""What GPUs did with whole steps of stage 3: what is stored in `measured.json`.

`overlaplab_course.lab10.store` writes it from a file of the benchmark.
"""

from __future__ import annotations

from pathlib import Path

from overlaplab_course import stored

STORED = Path(__file__).with_name("measured.json")


def _read() -> stored.Stored:
    found = stored.read("10", STORED)
    if found is None:
        raise FileNotFoundError(
            f"nothing is stored in {STORED}; python -m overlaplab_course.lab10.store "
            "RESULTS.json does"
        )
    return found


def gpu_table(name: str) -> str:
    """A row for each way to train: its "median ms", "predicted ms", "peak GiB"."""
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
