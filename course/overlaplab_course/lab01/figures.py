"""The figure of section 6: one message, all messages, and the step, over their number.

A backward pass of `BACKWARD_MS` makes a gigabyte of gradients, evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from matplotlib.figure import Figure

from overlaplab.program import PayloadTensor, Program, ProgramBuilder, replay
from overlaplab.timeline import Timeline
from overlaplab.view.stacking import Picture
from overlaplab_course.lab01.messages import link_of
from overlaplab_course.lab01.steps import NS_PER_MS

NUM_PIECES = 1000
TOTAL_BYTES = 10**9
BACKWARD_MS = 100


@lru_cache(maxsize=1)
def _program() -> Program:
    builder = ProgramBuilder(num_ranks=1, represents=2)
    for piece in range(NUM_PIECES):
        ready = builder.compute(
            0,
            f"backward {piece}",
            ns=BACKWARD_MS * NS_PER_MS // NUM_PIECES,
            phase="backward",
        )
        part = PayloadTensor(
            TOTAL_BYTES // NUM_PIECES, "bfloat16", ready, f"gradient {piece}"
        )
        builder.collective(0, "all_reduce", payload=[part])
    return builder.build()


def a_gigabyte(
    num_messages: int, *, gbit_per_s: float = 100, latency_us: float = 100
) -> Timeline:
    """The backward pass with its gigabyte in that many equal messages."""
    cap = TOTAL_BYTES // num_messages
    return replay(_program(), hardware=link_of(gbit_per_s, latency_us), buckets=cap)


@dataclass(frozen=True, slots=True)
class Counted:
    """One number of messages; times in ms."""

    num_messages: int
    one_ms: float
    all_ms: float
    step_ms: float


def count(numbers: Sequence[int]) -> list[Counted]:
    """One message, all in a row, and the step, for each number of messages."""
    found = []
    for number in numbers:
        timeline = a_gigabyte(number)
        sent = [s for s in timeline.spans if s.kind == "communication"]
        found.append(
            Counted(
                len(sent),
                sent[0].duration_ns / NS_PER_MS,
                sum(s.duration_ns for s in sent) / NS_PER_MS,
                timeline.step_ns / NS_PER_MS,
            )
        )
    return found


def draw_counted(counted: Sequence[Counted]) -> Figure:
    """The three over the number of messages, both axes logarithmic below."""
    figure = Picture(figsize=(9, 3.2))
    ax = figure.add_axes((0.08, 0.17, 0.6, 0.75))
    numbers = [c.num_messages for c in counted]
    for name, values, ink, style, width in (  # the wide one is seen under the thin
        ("one message", [c.one_ms for c in counted], "#d55e00", "s--", 1.5),
        ("all messages in a row", [c.all_ms for c in counted], "#7fceb9", "-", 6),
        (
            "backward pass with messages",
            [c.step_ms for c in counted],
            "#0072b2",
            "o-",
            1.5,
        ),
    ):
        ax.plot(
            numbers, values, style, color=ink, label=name, markersize=5, linewidth=width
        )
    best = min(counted, key=lambda c: c.step_ms)
    ax.plot(
        [best.num_messages], [best.step_ms], "*", color="black", markersize=13, zorder=5
    )
    ax.set_xscale("log")
    ax.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
    ax.set_ylim(0, None)
    ax.set_xlabel("messages that share the gigabyte")
    ax.set_ylabel("ms")
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    figure.legend(loc="center left", bbox_to_anchor=(0.69, 0.6), frameon=False)
    return figure
