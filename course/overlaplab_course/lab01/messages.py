"""Exercise 1.6: what an all-reduce takes, with bits, bytes, latencies and the ring."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.hardware import Hardware, Link
from overlaplab.program import ProgramBuilder, resolve
from overlaplab.timeline import Timeline
from overlaplab_course.lab01.numbers import as_number, close
from overlaplab_course.lab01.steps import CHALK, NS_PER_MS

ONE = "one message between two ranks: latency, and its bits over the link's"
MANY = "many messages in a row: a latency each, the bytes once"
RING = "many ranks: each byte crosses a link 2 (N - 1) / N times"
NOBODY = "one rank alone sends nothing"


class Message(NamedTuple):
    """What is asked: arguments of `send_ms`."""

    num_bytes: int
    gbit_per_s: float
    latency_us: float
    num_messages: int
    num_ranks: int

    def __str__(self) -> str:
        return (
            f"{self.num_bytes:,} bytes, {self.gbit_per_s:g} Gbit/s, "
            f"{self.latency_us:g} us, {_count(self.num_messages, 'message')}, "
            f"{_count(self.num_ranks, 'rank')}"
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


_PIECES = "the ring works in pieces: with more ranks a byte crosses hardly more often"

Send = Callable[[int, float, float, int, int], Any]


def link_of(gbit_per_s: float, latency_us: float) -> Hardware:
    """`chalk` with this link."""
    link = Link(
        latency_ns=round(1000 * latency_us),
        bytes_per_s=round(gbit_per_s * 10**9 / 8),
        source="typed",
    )
    return replace(CHALK, name=f"chalk, {gbit_per_s:g} Gbit/s", link=link)


def resolved(message: Message) -> Timeline:
    """The messages in a row, nothing beside them."""
    builder = ProgramBuilder(num_ranks=1, represents=message.num_ranks)
    size = message.num_bytes // message.num_messages
    for _ in range(message.num_messages):
        builder.collective(0, "all_reduce", bytes=size)
    return resolve(builder.build(), link_of(message.gbit_per_s, message.latency_us))


@lru_cache(maxsize=1)
def cases() -> tuple[tuple[str, Message], ...]:
    """(sentence, message), the lesson's first."""
    draw = random.Random(106)

    def size(parts: int) -> int:
        return parts * draw.randrange(100_000, 100_000_000)

    def link() -> tuple[float, float]:
        return draw.choice((10, 25, 100, 400, 2720)), draw.choice((5, 44, 100, 500))

    found = [(ONE, Message(10**9, 100, 100, 1, 2))]
    found += [(ONE, Message(size(1), *link(), 1, 2)) for _ in range(12)]
    found += [(MANY, Message(10**9, 100, 100, 40, 2))]
    for _ in range(12):
        number = draw.randrange(2, 60)
        found.append((MANY, Message(size(number), *link(), number, 2)))
    for ranks in (3, 4, 8, 16, 64, 512):
        found.append((RING, Message(size(1), *link(), 1, ranks)))
        found.append((RING, Message(size(5), *link(), 5, ranks)))
    found += [(NOBODY, Message(size(3), *link(), 3, 1)) for _ in range(2)]
    return tuple(found)


@exercise(
    "1.6",
    title="what a message takes",
    solution="send_ms",
    verifies=(ONE, MANY, RING, NOBODY),
    points=2,
    timeout_s=20.0,
)
def grade_messages(sheet: Sheet, send_ms: Send) -> None:
    """Simple messages first; a slip there is not told again with more ranks."""
    sheet.ran(f"send_ms on {len(cases())} links and sizes, each on the virtual cluster")
    wrong: set[str] = set()
    for sentence, message in cases():
        # ONE is a part of MANY and RING: what fails there fails everywhere.
        if wrong - {sentence} and sentence != NOBODY:
            continue
        timeline = resolved(message)
        took_ms = timeline.end_ns / NS_PER_MS
        answer = send_ms(*message)
        said = as_number(answer)
        fine = sheet.expect(
            sentence,
            said is not None and close(said, took_ms),
            seen=f"{message}: "
            + (f"{answer!r:.60}" if said is None else f"{said:.6g} ms"),
            expected=f"{took_ms:.4g} ms" if said is not None else "a number of ms",
            hint=_hint(said, message, took_ms),
        )
        if not fine and not wrong:
            sheet.show(
                timeline if message.num_ranks > 1 else None,
                title=f"{message.num_messages} of these messages, run",
            )
        if not fine:
            wrong.add(sentence)


def _hint(said: float | None, message: Message, took_ms: float) -> str:
    """The slip by which the answer is off, "" if it is none that people make."""
    if said is None or not took_ms:
        return ""
    latency_ms = message.num_messages * message.latency_us / 1000
    wire_ms = took_ms - latency_ms
    crossings = 2 * (message.num_ranks - 1) / message.num_ranks
    slips = {
        latency_ms + wire_ms / 8: "a byte is 8 bits, and links are sold in bits",
        latency_ms + wire_ms / 1.024**3: "Gbit/s is 10**9 bits; GiB and GB differ",
        latency_ms + wire_ms * 1e9 / 2**30: "Gbit/s is 10**9 bits; GiB and GB differ",
        took_ms / 1000: "that is in s; asked for are ms",
        1000 * took_ms: "that is in us; asked for are ms",
        latency_ms * 1000 + wire_ms: "the latency is given in us",
        latency_ms + wire_ms / crossings: "in a ring each byte crosses more than once",
        latency_ms + wire_ms * (message.num_ranks - 1) / crossings: _PIECES,
        latency_ms + wire_ms * message.num_ranks / crossings: _PIECES,
        latency_ms + wire_ms / 2: "a sum must come back: hence the 2 in the ring's "
        "2 (N - 1) / N",
        message.latency_us / 1000 + wire_ms: "each message pays the latency",
        latency_ms
        + wire_ms * message.num_messages: "num_bytes is all of them together",
        latency_ms
        + wire_ms / message.num_messages: "num_bytes is all of them together",
        wire_ms: "each message pays the latency",
        message.latency_us / 1000 + wire_ms * message.num_messages: "num_bytes is all "
        "of them together; the latency is what each message pays",
        **dict.fromkeys(
            (
                wire_ms + latency_ms * 2 * (message.num_ranks - 1),
                wire_ms + latency_ms * (message.num_ranks - 1),
                wire_ms + latency_ms * crossings,
                wire_ms + latency_ms * math.log2(message.num_ranks),
            ),
            "here alpha is paid once a message, whatever the number of ranks",
        ),
    }
    wrong = {value: why for value, why in slips.items() if not close(value, took_ms)}
    return next((why for value, why in wrong.items() if close(said, value)), "")
