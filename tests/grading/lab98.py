"""Three exercises of a lab that only these tests have, judged without a cluster."""

from __future__ import annotations

from typing import Any

from overlaplab.grading import Sheet, exercise, stage
from overlaplab.grading.laws import values_law


@exercise("98.1", title="Double", solution="double", verifies=("it doubles",))
def grade_double(sheet: Sheet, double: Any) -> None:
    import torch

    sheet.ran("double on three numbers")
    x = torch.tensor([1.0, 2.0, 3.0])
    sheet.verify("it doubles", values_law([{"x": double(x)}], {"x": 2 * x}))


@exercise(
    "98.2",
    title="Counter",
    solution="Counter",
    verifies=("it counts", "it starts at zero"),
    points=2,
    timeout_s=3,
)
def grade_counter(sheet: Sheet, counter_class: Any) -> None:
    counter = counter_class()
    value = stage.job(getattr, counter, "value")
    sheet.expect("it starts at zero", value == 0, seen=str(value))
    stage.job(getattr, counter, "add")()
    value = stage.job(getattr, counter, "value")
    sheet.expect("it counts", value == 1, seen=str(value))


@exercise(
    "98.3",
    title="Answer",
    solution=("answer", "reason"),
    verifies=("the answer is right",),
    optional=True,
)
def grade_answer(sheet: Sheet, answer: Any, reason: Any) -> None:
    sheet.expect("the answer is right", answer == 42, hint="read the book")
