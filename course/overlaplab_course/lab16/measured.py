"""The frontier of a GPT on a GPU, predicted beside measured: `measured.json`.

The file is written when somebody has measured; until then the tables say so. Schema:
"rows", a list of {"way", "gib", "predicted gib", "ms", "predicted ms"}, and what
`overlaplab_course.stored` says of machines.
"""

from __future__ import annotations

from overlaplab_course import stored

NOTHING = "Nothing is stored yet: this table waits for a GPU."


def gpu_frontier() -> str:
    """A row for each way and budget."""
    found = stored.read("16")
    if found is None:
        return NOTHING
    rows = [
        (
            row["way"],
            *(
                "-" if row.get(key) is None else f"{row[key]:.2f}"
                for key in ("gib", "predicted gib", "ms", "predicted ms")
            ),
        )
        for row in found["rows"]
    ]
    head = ("way", "peak GiB", "predicted", "step ms", "predicted")
    return f"{stored.text_table(head, rows)}\nMeasured on {stored.machine(found)}."
