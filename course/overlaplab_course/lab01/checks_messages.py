"""The graders of 1.5 and 1.6: when messages travel, and what they take."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from overlaplab.errors import plural
from overlaplab.grading import forms
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.forms import as_number, find_slip, is_close
from overlaplab.program import ProgramBuilder, resolve
from overlaplab.timeline import Timeline
from overlaplab_course.lab01 import given
from overlaplab_course.lab01.checks_extra import LAB  # it registers 1.7 to 1.9
from overlaplab_course.lab01.messages import link_of

# 1.5: truth is the resolver's. A wrong message is charged to what decides it in truth.

COUNT, LENGTH, READY, BUSY = LAB.sentences("1.5")
Case = tuple[int, int, int, int]
Pairs = Sequence[tuple[float, float]]
LESSON: Case = (10, 5, 3, 2)


@lru_cache(maxsize=512)
def resolved(
    num_layers: int, layer_ms: int, message_ms: int, per_bucket: int
) -> tuple[tuple[float, float], ...]:
    """(start, end) of each message in ms from the start of the backward pass."""
    layers, messages = [layer_ms] * num_layers, [message_ms] * num_layers
    program = given.write_step(layers, messages, per_bucket=per_bucket)
    return tuple(
        (span.start_ns / given.NS_PER_MS, span.end_ns / given.NS_PER_MS)
        for span in resolve(program, given.CHALK).spans
        if span.kind == "communication"
    )


@lru_cache(maxsize=1)
def cases() -> tuple[Case, ...]:
    """The lesson's, three of its kind, then many; short ones first."""
    draw = random.Random(105).randrange
    many = [(draw(1, 25), draw(1, 9), draw(1, 12), draw(1, 7)) for _ in range(150)]
    many.sort(key=lambda case: case[0])
    return (LESSON, (10, 5, 3, 10), (10, 5, 3, 3), (4, 2, 5, 1), *many)


@LAB.grader("1.5")
def grade_layers(sheet: Sheet, schedule: Callable[[int, int, int, int], Any]) -> None:
    """The lesson's case is drawn; the first wrong message of each kind is described."""
    sheet.ran(f"the ten layers, then {len(cases()) - 1} other backward passes")
    faults = set[str]()
    for number, case in enumerate(cases()):
        num_layers, layer_ms, message_ms, per_bucket = case
        wanted = "pairs (start, end) in ms, one for each message"
        said = forms.read_pairs(schedule(*case), f"schedule{case} returned", wanted)
        if number == 0:
            _show(sheet, case, said, "your ten layers, two a message")
        sentence, hint, facts = _fault(case, said, resolved(*case))
        if sentence and sentence not in faults:
            where = (
                f"{num_layers} layers of {layer_ms} ms, {message_ms} ms of message "
                f"each, {per_bucket} a bucket"
            )
            if not faults and number:
                _show(sheet, case, said, f"by you: {where}")
            LAB.expect(sheet, sentence, False, hint=hint, where=where, **facts)
            faults.add(sentence)
    if not faults:
        for sentence in (COUNT, LENGTH, READY, BUSY):
            sheet.expect(sentence, True)


def _show(sheet: Sheet, case: Case, said: Pairs, title: str) -> None:
    if any(end < start for start, end in said):
        return  # nothing that a wire could do
    num_layers, layer_ms, _, _ = case
    spans: list[Any] = []
    for i in range(num_layers):
        times_ms = i * layer_ms, (i + 1) * layer_ms
        spans.append(("default", "compute", f"layer {num_layers - i}", *times_ms))
    spans += [("comm", "communication", f"bucket {i}", *p) for i, p in enumerate(said)]
    step_ns, right_ns = (
        round(given.NS_PER_MS * given.step_and_hidden(pairs, num_layers * layer_ms)[0])
        for pairs in (said, resolved(*case))
    )
    drawn = forms.said_timeline(spans, given.NS_PER_MS)
    sheet.show(drawn, step_ns=step_ns, target_ns=right_ns, title=title)


def _fault(case: Case, said: Pairs, truth: Pairs) -> tuple[str, str, Mapping[str, Any]]:
    """(sentence, hint, facts) of the first wrong message, ("", "", {}) if none is."""
    num_layers, layer_ms, message_ms, per_bucket = case
    if len(said) != len(truth):
        rest = num_layers % per_bucket
        last = f", the last one with {rest} of the {num_layers} layers" if rest else ""
        sent = plural(len(said), "message")
        return COUNT, "", {"said": sent, "number": len(truth), "last": last}
    before = 0.0
    for place, ((start, end), right) in enumerate(zip(said, truth, strict=True)):
        through = min(num_layers, (place + 1) * per_bucket)
        layers, length = through - place * per_bucket, end - start
        facts = {
            "message": f"message {place} from {start:g} to {end:g} ms",
            "place": place,
            "length": length,
            "right_length": layers * message_ms,
            "layers": plural(layers, "layer"),
            "message_ms": message_ms,
            "each": " each" if layers > 1 else "",
            "number": layers,
            "num_layers": num_layers,
            "verb": "is" if layers == 1 else "are",
            "ready": through * layer_ms,
            "times": f"{place + 1} * per_bucket" if place else "per_bucket",
            "before": before,
        }
        _, of_length, of_ready, _ = LAB.tables("1.5")
        if abs(length - layers * message_ms) > 1e-6:
            hint = ""
            if abs(end - layers * message_ms) < 1e-6:
                hint = of_length["is_end"]
            elif layers < per_bucket and abs(length - per_bucket * message_ms) < 1e-6:
                hint = of_length["is_full"].format(**facts)
            return LENGTH, hint, facts
        if abs(start - right[0]) > 1e-6:
            if right[0] == before and place:
                return BUSY, "", facts
            late = "late" if place and start > right[0] else "leaves"
            return READY, of_ready[late].format(**facts), facts
        before = right[1]
    return "", "", {}


# 1.6: what an all-reduce takes, with bits, bytes, latencies and the ring.

ONE, MANY, RING, NOBODY = LAB.sentences("1.6")


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
            f"{self.latency_us:g} us, {plural(self.num_messages, 'message')}, "
            f"{plural(self.num_ranks, 'rank')}"
        )


def in_a_row(message: Message) -> Timeline:
    """The messages in a row, nothing beside them."""
    b = ProgramBuilder(num_ranks=1, represents=message.num_ranks)
    for _ in range(message.num_messages):
        size = message.num_bytes // message.num_messages
        b.collective(0, "all_reduce", bytes=size)
    link = link_of(message.gbit_per_s, message.latency_us)
    return resolve(b.build(), link)


@lru_cache(maxsize=1)
def messages() -> tuple[tuple[str, Message], ...]:
    """(sentence, message), the lesson's first."""
    draw = random.Random(106)

    def drawn(number: int, ranks: int = 2) -> Message:
        size = number * draw.randrange(100_000, 100_000_000)
        rate = draw.choice((10, 25, 100, 400, 2720))
        return Message(size, rate, draw.choice((5, 44, 100, 500)), number, ranks)

    found = [(ONE, Message(10**9, 100, 100, 1, 2))]
    found += [(ONE, drawn(1)) for _ in range(12)]
    found += [(MANY, Message(10**9, 100, 100, 40, 2))]
    found += [(MANY, drawn(draw.randrange(2, 60))) for _ in range(12)]
    for ranks in (3, 4, 8, 16, 64, 512):
        found += [(RING, drawn(number, ranks)) for number in (1, 5)]
    found += [(NOBODY, drawn(3, 1)) for _ in range(2)]
    return tuple(found)


@LAB.grader("1.6")
def grade_messages(
    sheet: Sheet, send_ms: Callable[[int, float, float, int, int], Any]
) -> None:
    """Simple messages first; a slip there is not described again with more ranks."""
    sheet.ran(
        f"send_ms on {len(messages())} links and sizes, each on the virtual cluster"
    )
    slips, wrong = LAB.cases("1.6", "slips")[NOBODY], set[str]()
    for sentence, message in messages():
        # ONE is a part of MANY and RING: what fails there fails everywhere.
        if wrong - {sentence} and sentence != NOBODY:
            continue
        timeline = in_a_row(message)
        took_ms = timeline.end_ns / given.NS_PER_MS
        answer = send_ms(*message)
        said, hint = as_number(answer), ""
        seen, expected = f"{message}: {answer!r:.60}", "a number of ms"
        if said is not None:
            seen, expected = f"{message}: {said:.6g} ms", f"{took_ms:.4g} ms"
            hint = find_slip(said, slips, _other_times(message, took_ms))
        fine = said is not None and is_close(said, took_ms)
        sheet.expect(sentence, fine, seen=seen, expected=expected, hint=hint)
        if not fine:
            title = f"{message.num_messages} of these messages, run"
            if not wrong:
                sheet.show(timeline if message.num_ranks > 1 else None, title=title)
            wrong.add(sentence)


def _other_times(message: Message, took_ms: float) -> Mapping[str, float]:
    """By slip, what is said in the place of the right time."""
    if not took_ms:
        return {}
    _, _, latency_us, number, ranks = message
    latency = number * latency_us / 1000
    wire = took_ms - latency
    crossings = 2 * (ranks - 1) / ranks
    times = {
        "bytes": latency + wire / 8,
        "binary": latency + wire / 1.024**3,
        "binary_bits": latency + wire * 1e9 / 2**30,
        "seconds": took_ms / 1000,
        "microseconds": 1000 * took_ms,
        "latency_in_ms": latency * 1000 + wire,
        "no_ring": latency + wire / crossings,
        "to_each_other": latency + wire * (ranks - 1) / crossings,
        "to_each": latency + wire * ranks / crossings,
        "one_way": latency + wire / 2,
        "one_latency": latency_us / 1000 + wire,
        "each_has_all": latency + wire * number,
        "only_one": latency + wire / number,
        "no_latency": wire,
        "all_in_each": latency_us / 1000 + wire * number,
        "hops": wire + latency * 2 * (ranks - 1),
        "half_the_hops": wire + latency * (ranks - 1),
        "crossings": wire + latency * crossings,
        "levels": wire + latency * math.log2(ranks),
    }
    return {slip: ms for slip, ms in times.items() if not is_close(ms, took_ms)}
