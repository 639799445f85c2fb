"""Extra 0.5: read a timeline of two ranks. The learner's number draws the run."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from overlaplab.cluster.run import run
from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.timeline import Span, Timeline
from overlaplab_course.lab00.runs import GPU

LATE = "which rank the message waits for"
HELD = "how long the other rank's message waits for it"
LOOKS = "which rank's CPU waits for its GPU, and how long"
DONE = "how many products that rank's GPU has finished when its CPU goes on"


class _Draw(NamedTuple):
    """What each rank does: products before the message, and who looks at a number."""

    products: tuple[int, int]
    looks: int


def _draw(number: int) -> _Draw:
    draw = random.Random(int(number) + 1000)
    few = draw.randrange(3, 6)
    many = few + draw.randrange(2, 5)
    products = draw.choice(((few, many), (many, few)))
    return _Draw(products, draw.choice((0, 1)))


def _uneven_step(draw: _Draw) -> None:
    rank = dist.get_rank()
    with _disable_current_modes():
        a = torch.eye(256)
        x = torch.ones(256, 256)
    for _ in range(draw.products[rank]):
        a = a @ a
    if rank == draw.looks:
        a[0, 0].item()
    work = dist.all_reduce(x, async_op=True)
    a = a @ a
    assert work is not None
    work.wait()
    x.mul_(0.5)


@lru_cache(maxsize=16)
def two_ranks(number: int) -> Timeline:
    """The run of a learner's number."""
    return run(_uneven_step, _draw(number), world_size=2, hardware=GPU).timeline


def read(timeline: Timeline) -> dict[str, Any]:
    """The right answers, from the spans."""
    messages = [s for s in timeline.spans if s.kind == "communication"]
    first, last = sorted(messages, key=lambda s: s.start_ns)
    (wait,) = [s for s in timeline.spans if _is_wait(s)]
    done = [
        s
        for s in timeline.spans
        if s.name == "mm" and s.rank == wait.rank and s.end_ns <= wait.end_ns
        if s.kind == "compute"
    ]
    return {
        "late_rank": last.rank,
        "held_us": (last.start_ns - first.start_ns) / 1000,
        "looking_rank": wait.rank,
        "cpu_waits_us": wait.duration_ns / 1000,
        "products": len(done),
    }


def _is_wait(span: Span) -> bool:
    return span.kind == "host" and span.name.startswith("wait")


@exercise(
    "0.5",
    title="read a timeline",
    solution=("my_number", "reading"),
    verifies=(LATE, HELD, LOOKS, DONE),
    points=1,
    optional=True,
    timeout_s=30.0,
)
def grade_reading(sheet: Sheet, my_number: int, reading: Mapping[str, Any]) -> None:
    """Each answer against the spans of the run."""
    if not isinstance(reading, Mapping):
        raise TypeError(f"reading is {type(reading).__name__}; expected a dict")
    sheet.ran("the two ranks of your number again")
    timeline = two_ranks(int(my_number))
    sheet.show(timeline, title="the two ranks of your number")
    right = read(timeline)
    how = {
        LATE: "the rank whose span on `comm` starts later",
        HELD: "from the start of the earlier rank's span on `comm` to the start of "
        "the later's, in us, to within 3 %",
        LOOKS: "the rank with a span on `cpu` whose name begins with `wait`, and that "
        "span's length in us, to within 3 %",
        DONE: "compute spans named `mm` of that rank that end no later than the wait",
    }
    for sentence, keys in (
        (LATE, ("late_rank",)),
        (HELD, ("held_us",)),
        (LOOKS, ("looking_rank", "cpu_waits_us")),
        (DONE, ("products",)),
    ):
        wrong = [k for k in keys if laws.diagnosis_law(reading, {k: right[k]})]
        sheet.expect(
            sentence,
            not wrong,
            seen=", ".join(
                f"{k} is {reading[k]!r}" if k in reading else f"there is no {k!r}"
                for k in wrong
            ),
            expected=how[sentence],
        )
