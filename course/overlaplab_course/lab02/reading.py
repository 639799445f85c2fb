"""Exercise 2.5: read five numbers of a real step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.timeline import Timeline
from overlaplab_course.lab02.answers import Answer, grade_answers
from overlaplab_course.lab02.traces import trace_step

BACKWARD = "when the backward pass starts on the GPU"
FIRST = "when the first gradient message starts"
LEAD = "how long before that the CPU had launched it"
TAIL = "how much of the last message is after all computation"
BYTES = "how large that message is"

MIB = 2**20


def read(step: Timeline) -> dict[str, float]:
    """The right numbers, from the spans of one step that starts at 0."""
    messages = [s for s in step.spans if s.kind == "communication"]
    compute = [s for s in step.spans if s.kind == "compute"]
    first, last = messages[0], max(messages, key=lambda s: s.end_ns)
    computed_ns = max(s.end_ns for s in compute)
    backward = next(s for s in compute if "backward" in s.name)
    return {
        "backward_ms": backward.start_ns / 1e6,
        "first_ms": first.start_ns / 1e6,
        "lead_ms": (first.start_ns - first.attributes["launch_ns"]) / 1e6,
        "tail_ms": (last.end_ns - max(computed_ns, last.start_ns)) / 1e6,
        "tail_mib": last.bytes / MIB,
    }


@exercise(
    "2.5",
    title="read a real step",
    solution=("my_number", "reading"),
    verifies=(BACKWARD, FIRST, LEAD, TAIL, BYTES),
    points=2,
    timeout_s=30.0,
)
def grade_reading(sheet: Sheet, my_number: int, reading: Mapping[str, Any]) -> None:
    """Each number against the spans of the learner's own step."""
    sheet.ran("your step of the trace 'overlapped, batch 8'")
    step = trace_step("overlapped, batch 8", int(my_number))
    right = read(step)
    messages = [s for s in step.spans if s.kind == "communication"]
    last = max(messages, key=lambda s: s.end_ns)
    report = step.report()
    answers = {
        "backward_ms": Answer(
            BACKWARD,
            right["backward_ms"],
            0.02,
            "the start of the first compute span with 'backward' in its name, in ms",
            ((right["first_ms"], "that is the first message"),),
        ),
        "first_ms": Answer(
            FIRST,
            right["first_ms"],
            0.02,
            "the smallest start of a communication span, in ms",
            (
                (
                    messages[0].attributes["launch_ns"] / 1e6,
                    "that is its launch, and a launch is not a start",
                ),
                (messages[0].end_ns / 1e6, "that is its end"),
                (
                    right["first_ms"] - right["backward_ms"],
                    "count from 0, not from the backward pass",
                ),
            ),
        ),
        "lead_ms": Answer(
            LEAD,
            right["lead_ms"],
            0.05,
            'the start of the first message minus its attributes["launch_ns"], in ms',
            (
                (
                    -messages[0].attributes["launch_ns"] / 1e6,
                    "that is its launch before 0; how long before its start?",
                ),
            ),
        ),
        "tail_ms": Answer(
            TAIL,
            right["tail_ms"],
            0.02,
            "the end of the last message minus the end of the last compute span (or "
            "minus the message's own start, where that is later), in ms",
            (
                (report.exposed_ns / 1e6, "that is all exposed time, not the last's"),
                (last.duration_ns / 1e6, "that is the whole message"),
            ),
        ),
        "tail_mib": Answer(
            BYTES,
            right["tail_mib"],
            0.5,
            "the last message's .bytes, in MiB (2**20)",
            (
                (messages[-1].bytes / 1e6, "MiB are 2**20 bytes"),
                (messages[-1].bytes, "that is in bytes"),
                (sum(m.bytes for m in messages) / MIB, "that is all of them"),
            ),
        ),
    }
    sheet.show(step, title="your step, overlapped, batch 8")
    grade_answers(sheet, reading, answers)
