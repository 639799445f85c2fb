"""The graders of lab 00's extras: 0.5 (read a timeline) and 0.6 (turn knobs)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlaplab.grading import laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.forms import KnobTask, KnobTasks, Settings, need_dict
from overlaplab.timeline import Timeline
from overlaplab_course.lab00.given import BORDER_AT, FASTER, SHORTER, turn, two_ranks

LATE = "which rank the message waits for"
HELD = "how long the other rank's message waits for it"
LOOKS = "which rank's CPU waits for its GPU, and how long"
DONE = "how many products that rank's GPU has finished when its CPU goes on"
# Sentence, what it asks for, how to find it.
_ASKED = (
    (LATE, ("late_rank",), "the rank whose span on `comm` starts later"),
    (
        HELD,
        ("held_us",),
        "from the start of the earlier rank's span on `comm` to the start of the "
        "later's, in us, to within 3 %",
    ),
    (
        LOOKS,
        ("looking_rank", "cpu_waits_us"),
        "the rank with a span on `cpu` whose name begins with `wait`, and that span's "
        "length in us, to within 3 %",
    ),
    (
        DONE,
        ("products",),
        "compute spans named `mm` of that rank that end no later than the wait",
    ),
)


def read(timeline: Timeline) -> dict[str, Any]:
    """The right answers, from the spans."""
    messages = [s for s in timeline.spans if s.kind == "communication"]
    first, last = sorted(messages, key=lambda s: s.start_ns)
    (wait,) = (
        s for s in timeline.spans if s.kind == "host" and s.name.startswith("wait")
    )
    products = (
        s.kind == "compute" and s.name == "mm" and s.end_ns <= wait.end_ns
        for s in timeline.spans
        if s.rank == wait.rank
    )
    return {
        "late_rank": last.rank,
        "held_us": (last.start_ns - first.start_ns) / 1000,
        "looking_rank": wait.rank,
        "cpu_waits_us": wait.duration_ns / 1000,
        "products": sum(products),
    }


@exercise(
    "0.5",
    title="read a timeline",
    solution=("my_number", "reading"),
    verifies=(LATE, HELD, LOOKS, DONE),
    optional=True,
    timeout_s=30.0,
)
def grade_reading(sheet: Sheet, my_number: int, reading: Mapping[str, Any]) -> None:
    """Each answer against the spans of the run."""
    need_dict(reading, "reading")
    sheet.ran("the two ranks of your number again")
    timeline = two_ranks(int(my_number))
    sheet.show(timeline, title="the two ranks of your number")
    right = read(timeline)
    for sentence, keys, how in _ASKED:
        wrong = [k for k in keys if laws.diagnosis_law(reading, {k: right[k]})]
        seen = [
            f"{k} is {reading[k]!r}" if k in reading else f"there is no {k!r}"
            for k in wrong
        ]
        sheet.expect(sentence, not wrong, seen=", ".join(seen), expected=how)


USABLE = "each entry has values that the sliders have"
IS_LAUNCH = f"launch-bound: {SHORTER} save 40 %, {FASTER} under 2 %"
IS_GPU = f"GPU-bound: {FASTER} saves 40 %, {SHORTER} under 2 %"
IS_BORDER = f"border: the smallest batch at which {SHORTER} save under 10 %"
BATCHES = turn.knobs["batch"].values
_TASKS = KnobTasks(
    turn,
    usable=USABLE,
    measure=lambda s: {
        "shorter": turn.saved_percent(s, SHORTER),
        "faster": turn.saved_percent(s, FASTER),
    },
    tasks=(
        KnobTask(
            "launch-bound",
            IS_LAUNCH,
            lambda n: n["shorter"] >= 40 and n["faster"] < 2,
            seen=f"{SHORTER}: {{shorter:.1f}} %; {FASTER}: {{faster:.1f}} %",
            expected="40 % or more, and under 2 %",
        ),
        KnobTask(
            "GPU-bound",
            IS_GPU,
            lambda n: n["faster"] >= 40 and n["shorter"] < 2,
            seen=f"{FASTER}: {{faster:.1f}} %; {SHORTER}: {{shorter:.1f}} %",
            expected="40 % or more, and under 2 %",
        ),
    ),
    hint="the batch makes kernels long; it makes no more of them",
    expected=f"some of {list(turn.knobs)}; for 'border' a batch",
)


def border_batch() -> int:
    """The answer to the third task."""
    return min(batch for batch in BATCHES if _saved_at(batch) < 10)


def _saved_at(batch: int) -> float:
    return turn.saved_percent({**BORDER_AT, "batch": batch}, SHORTER)


@exercise(
    "0.6",
    title="launch-bound or GPU-bound?",
    solution="found",
    verifies=(*_TASKS.sentences, IS_BORDER),
    optional=True,
    timeout_s=20.0,
)
def grade_knobs(sheet: Sheet, found: Settings) -> None:
    """Resolve the learner's settings, whatever they typed or slid."""
    sheet.ran("your settings, each resolved again")
    batch = found.get("border") if isinstance(found, Mapping) else None
    if isinstance(batch, Mapping):
        batch = batch.get("batch")
    none = [] if batch in BATCHES else [f"'border' is {batch!r}, not one of {BATCHES}"]
    _TASKS.check_usable(sheet, found, more=none)
    sheet.stop_if_wrong()
    _TASKS.judge(sheet, found)
    assert isinstance(batch, int)
    seen = f"at batch {batch} they save {_saved_at(batch):.1f} %"
    if batch // 2 in BATCHES:
        seen += f", at {batch // 2} {_saved_at(batch // 2):.1f} %"
    sheet.expect(
        IS_BORDER,
        batch == border_batch(),
        seen=seen,
        expected="under 10 % at your batch, and 10 % or more at half of it",
        hint=", ".join(f"{k}={v}" for k, v in BORDER_AT.items()),
    )
