"""The graders of lab 01: here of 1.1 to 1.5, how long a step is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.forms import (
    as_number,
    is_close,
    need_dict,
    read_numbers,
    read_pairs,
    said_timeline,
)
from overlaplab.program import resolve
from overlaplab.timeline import Timeline
from overlaplab_course.lab01 import checks_messages, given, reference  # noqa: F401
from overlaplab_course.lab01.given import (
    CHALK,
    CONTENDED,
    NS_PER_MS,
    Card,
    Job,
    Totals,
    cards,
    job,
    pair_timeline,
    totals_of,
    write_step,
)

# 1.1: all gradients are needed for the update, so two chains bound the step of the
# learner's number. A message a layer reaches the longer one, which the resolver shows.

LAST = "the chain that ends with the last message"
ALL = "the chain that has all messages"
SHORTEST = "the shortest step: the longer of the two"


@exercise(
    "1.1",
    title="the shortest step",
    solution=("my_number", "chains"),
    verifies=(LAST, ALL, SHORTEST),
    timeout_s=20.0,
)
def grade_shortest(sheet: Sheet, my_number: int, chains: Mapping[str, Any]) -> None:
    """Each number alone; the shortest step is drawn for who has found it."""
    need_dict(chains, "chains")
    mine = job(int(my_number))
    timeline = mine.timeline()
    reached_ms = timeline.step_ns / NS_PER_MS
    sheet.ran("your step with no overlap, and with a message a layer")
    sheet.show(mine.timeline(mine.num_layers), title="your step, no overlap yet")
    sheet.note(f"a message a layer reaches it: {reached_ms:g} ms")
    all_right = True
    for sentence, key, right, how, slips in _chains(mine, reached_ms):
        said = as_number(chains.get(key))
        seen = f"{key!r} is {chains[key]!r}" if key in chains else f"no {key!r}"
        slip = "" if said is None else slips.get(said, "")
        if isinstance(chains.get(key), str):
            slip = "that is a string; expected a number"
        all_right &= sheet.expect(
            sentence,
            said is not None and abs(said - right) < 0.01,
            seen=f"{seen}\n{slip}" if slip else seen,
            expected=how,
        )
    if all_right:  # before that it would be the answer
        step_ns = timeline.step_ns
        title = "your step, a message a layer"
        sheet.show(timeline, step_ns=step_ns, target_ns=step_ns, title=title)


def _chains(
    mine: Job, reached_ms: float
) -> Iterable[tuple[str, str, float, str, Mapping[float, str]]]:
    """Sentence, key, the right number, how to find it, and what other numbers are."""
    _, forward, layer, message, update = mine
    compute, communication = mine.compute_ms, mine.communication_ms
    last = compute + message
    all_ = forward + layer + communication + update
    serial = compute + communication
    yield (
        LAST,
        "last message",
        last,
        ("forward, every layer's backward, one message, update, in ms"),
        {
            compute: "that is the computing alone: the last gradient comes when "
            "nothing is left to compute beside its message",
            serial: "all messages, one after the other: all but one can go earlier",
            last - update: "the update needs the last message: it comes after",
            last - forward: "the forward pass stands in the chain too",
        },
    )
    yield (
        ALL,
        "all messages",
        all_,
        ("forward, one layer's backward, every message, update, in ms"),
        {
            communication: "the wire cannot start before there is a gradient",
            all_ - layer: "the first gradient takes one layer's backward pass",
            all_ - update: "the update comes after the last message",
            all_ - forward: "there is no gradient before the forward pass",
            serial: "the other layers' backward passes run beside the wire",
        },
    )
    yield (
        SHORTEST,
        "shortest",
        reached_ms,
        "as long as the longer of the two chains",
        {
            serial: "that is the step with no overlap",
            min(last, all_): "both chains must fit into the step",
            max(compute, communication): "max(Tc, Tm) is a bound that this step cannot "
            "reach",
        },
    )


# 1.2: truth is a pair of operators that need nothing of one another, resolved one after
# the other and at once: nothing overlaps better.

SERIAL = "serial: the step if nothing overlaps"
BOUND = "bound: the step if all that can be is hidden, with less to send than compute"
SENDING = "and with more to send than to compute"
SPEEDUP = "best speed-up: how many times the bound goes into serial"

Bounds = Callable[[float, float], Any]


@lru_cache(maxsize=1)
def pairs() -> tuple[tuple[int, int], ...]:
    """(Tc, Tm) in ms; those of the lesson, one of each without a side, many more."""
    draw = random.Random(101)
    many = [(draw.randrange(1, 200), draw.randrange(1, 200)) for _ in range(40)]
    return (
        (100, 50), (100, 25), (40, 40), (50, 100), (30, 90), (70, 0), (0, 20), *many
    )  # fmt: skip


@exercise(
    "1.2",
    title="bounds",
    solution="bounds",
    verifies=(SERIAL, BOUND, SENDING, SPEEDUP),
    timeout_s=20.0,
)
def grade_bounds(sheet: Sheet, bounds: Bounds) -> None:
    """Each number against two timelines of the same two operators."""
    sheet.ran(f"bounds(tc, tm) on {len(pairs())} pairs; each pair run both ways")
    fine = True
    for tc, tm in pairs():
        wanted = "(serial, bound, speed-up)"
        said = _ask(bounds, (tc, tm), "bounds", wanted, "one of the times may be 0")
        best = pair_timeline(tc, tm, at_once=True)
        serial_ms = pair_timeline(tc, tm, at_once=False).step_ns / NS_PER_MS
        best_ms = best.step_ns / NS_PER_MS
        at_once = f"at once they took {best_ms:g} ms"
        serially = f"one after the other they took {serial_ms:g} ms"
        both = f"{at_once}, one after the other {serial_ms:g}"
        bound = SENDING if tm > tc else BOUND
        for place, (sentence, name, right, expected) in enumerate((
            (SERIAL, "serial", serial_ms, serially),
            (bound, "bound", best_ms, at_once),
            (SPEEDUP, "best speed-up", serial_ms / best_ms, both),
        )):  # fmt: skip
            answer = said[place]
            if answer is not None and is_close(answer, right):
                continue
            told = "None" if answer is None else f"{answer:g}"
            sheet.expect(
                sentence,
                False,
                seen=f"Tc = {tc} ms, Tm = {tm} ms: {name} is {told}",
                expected=expected,
                hint="" if answer is None else _bounds_hint(place, answer, tc, tm),
            )
            if fine:
                title = f"{tc} and {tm} ms at once: nothing is shorter"
                sheet.show(best, title=title)
            fine = False
    for sentence in (SERIAL, BOUND, SENDING, SPEEDUP):
        sheet.expect(sentence, True)  # only now: who breaks off has earned none


def _ask(
    function: Callable[..., Any],
    args: Iterable[float],
    name: str,
    wanted: str,
    zero: str,
) -> list[float | None]:
    """Three numbers; a division by zero is described with its arguments."""
    try:
        return read_numbers(function(*args), 3, name, wanted)
    except ZeroDivisionError as error:
        raise ZeroDivisionError(
            f"division by zero in {name}{(*args,)}; {zero}"
        ) from error


def _bounds_hint(place: int, said: float, tc: int, tm: int) -> str:
    if place == 1:
        if tm > tc and is_close(said, tc):
            return "what is left of the longer side cannot hide behind the shorter"
        if is_close(said, min(tc, tm)):
            return "the longer of the two is always left"
        if is_close(said, (tc + tm) / 2):
            return "half of the sum is less than the longer side"
    if place == 2 and tc and tm:
        if is_close(said, 1 + tm / tc) and tm > tc:
            return "1 + Tm/Tc hides all messages, also behind nothing"
        if is_close(said, max(tc, tm) / (tc + tm)):
            return "a speed-up is old time over new time"
        if is_close(said, 100 * min(tc, tm) / (tc + tm)):
            return "a factor such as 1.5, not percent"
    return ""


# 1.3: four cards: three runs and a promise. Times alone come from the same step on a
# GPU that does nothing else; the overlap fraction from the run itself, as a profiler
# would say it.

FORMULA = "what the formula says for each card"
WHYS: Mapping[str, tuple[str, str]] = {  # sentence and hint
    "holds": (
        "on which card it holds",
        "the formula's number is the run's: nothing is left to explain",
    ),
    "contention": (
        "where the two slow each other down",
        "alone the GPU computes for a shorter time than in the run",
    ),
    "idle": (
        "where somebody has nothing to do",
        "the times alone count work only: what of a time in which nothing runs?",
    ),
    "impossible": (
        "where it promises what no schedule can reach",
        "a step is at least as long as its messages are",
    ),
}


@exercise(
    "1.3",
    title="where the formula stops",
    solution=("my_number", "reading"),
    verifies=(FORMULA, *(sentence for sentence, _ in WHYS.values())),
    points=2,
    timeout_s=20.0,
)
def grade_formula(sheet: Sheet, my_number: int, reading: Mapping[str, Any]) -> None:
    """Numbers first; then each card's diagnosis, by its own sentence."""
    need_dict(reading, "reading")
    sheet.ran("the runs of your cards again, and the formula for each")
    wrong, wrongly_read = [], []
    for letter, card in cards(int(my_number)).items():
        entry = reading.get(letter)
        entry = entry if isinstance(entry, Mapping) else {}
        said, why = as_number(entry.get("formula_ms")), entry.get("verdict")
        if said is None:
            wrong.append(f"{letter}: formula_ms is {entry.get('formula_ms')!r}")
        elif abs(said - card.formula_ms) > 0.15:
            wrong.append(f"{letter}: {said:g} ms{_formula_slip(card, said)}")
        word = why.strip().casefold() if isinstance(why, str) else ""
        sentence, hint = WHYS[card.why]
        if word != card.why and card.timeline is not None:
            wrongly_read.append((card.timeline, f"card {letter}"))
        sheet.expect(
            sentence,
            word == card.why,
            seen=f"{letter}: you say {why!r}; {_describe_card(card)}",
            expected="the word that the numbers beside it call for"
            if word in WHYS
            else f"one of {', '.join(WHYS)}",
            hint=hint if word in WHYS else "",
        )
    for timeline, title in wrongly_read[:1]:
        sheet.show(timeline, title=title)
    expected = "Tc + (1 - a) * Tm, in ms, to within 0.15"
    sheet.expect(FORMULA, not wrong, seen="\n".join(wrong), expected=expected)


def _formula_slip(card: Card, said: float) -> str:
    if is_close(said, card.tc_ms + card.a * card.tm_ms):
        return ": that takes a in the place of 1 - a"
    if card.timeline and abs(said - card.timeline.step_ns / NS_PER_MS) < 0.15:
        return ": that is what the run took, not what the formula says"
    if is_close(said, max(card.tc_ms, card.tm_ms)):
        return ": that is the bound, not the formula"
    return ": give it to one decimal" if abs(said - card.formula_ms) <= 0.51 else ""


def _describe_card(card: Card) -> str:
    """The numbers that decide."""
    says = f"the formula says {card.formula_ms:.1f} ms"
    if card.timeline is None:
        return f"{says}, and Tm alone is {card.tm_ms:g} ms"
    report = card.timeline.report()
    idle_ns = report.step_ns - report.compute_ns - report.exposed_ns
    return (
        f"{says}, the run took {report.step_ns / NS_PER_MS:.1f}; in it the GPU "
        f"computes for {report.compute_ns / NS_PER_MS:.1f} ms (alone {card.tc_ms:g}), "
        f"for {idle_ns / NS_PER_MS:.1f} neither side works"
    )


# 1.4: times alone are those of each operator with nothing beside it, times in the run
# are what its timeline shows. Without contention and gaps all agree with `report()`.

OVERLAP = "overlap fraction: what is hidden, of what is sent in the run"
SAVED = "saved fraction: what the step is shorter than serial, of Tm"
EFFICIENCY = "efficiency: what is saved, of what could be"
NONE = "None where there is nothing to divide by"
_RATIOS = (  # sentence, name, how
    (OVERLAP, "overlap fraction", "hidden / sent: both are of the run"),
    (SAVED, "saved fraction", "(tc + tm - step) / tm: both times alone"),
    (EFFICIENCY, "efficiency", "(tc + tm - step) / (serial - bound): what could be "
     "saved is what the bound leaves"),
)  # fmt: skip

Ratios = Callable[[float, float, float, float, float], Any]


@lru_cache(maxsize=1)
def unseen() -> tuple[Totals, ...]:
    """Runs to try a function on: with and without contention, gaps, either side."""
    draw = random.Random(104)
    found = []
    for _ in range(60):
        number = draw.randrange(1, 8)
        program = write_step(
            [draw.randrange(1, 9) for _ in range(number)],
            [draw.randrange(1, 12) for _ in range(number)],
            per_bucket=draw.randrange(1, 4),
            forward_ms=draw.randrange(0, 9),
            update_ms=draw.randrange(0, 5),
        )
        launching = replace(CHALK, launch_ns=draw.randrange(1, 9) * NS_PER_MS)
        hardware = draw.choice((CHALK, CONTENDED, launching))
        found.append(totals_of(resolve(program, hardware)))
    return tuple(found)


@lru_cache(maxsize=1)
def one_sided() -> tuple[Totals, ...]:
    """Nothing to send; nothing to compute; neither."""
    computing = resolve(write_step([5] * 4, [0] * 4, per_bucket=4), CHALK)
    only = computing.where(lambda s: s.kind == "compute")
    sending = resolve(write_step([0] * 4, [7] * 4), CHALK)
    wire = sending.where(lambda s: s.kind == "communication")
    return totals_of(only), totals_of(wire), totals_of(Timeline.of(()))


@exercise(
    "1.4",
    title="three ratios",
    solution="ratios",
    verifies=(OVERLAP, SAVED, EFFICIENCY, NONE),
    points=2,
    timeout_s=20.0,
)
def grade_ratios(sheet: Sheet, ratios: Ratios) -> None:
    """Each ratio on the lesson's run and on unseen ones; then the empty sides."""
    runs = (given.contended(), *unseen())
    sheet.ran(f"ratios on {len(runs)} runs; then on three with a side missing")
    fine = True
    for totals in runs:
        truth = reference.ratios(*totals)
        for place, said in enumerate(_ask_ratios(ratios, totals)):
            sentence, name, how = _RATIOS[place]
            right = sheet.expect(
                sentence,
                said is not None and is_close(said, truth[place]),
                seen=f"{totals}\n{name} is {_number(said)}",
                expected=how,
                hint="" if said is None else _ratio_hint(place, said, totals, truth),
            )
            if fine and not right:
                sheet.show(totals.timeline, title="the run on which it is wrong")
            fine &= right
    sheet.stop_if_wrong()
    for totals in one_sided():
        wrong = [
            f"{name} is {_number(said)}"
            for (_, name, _), said, right in zip(
                _RATIOS,
                _ask_ratios(ratios, totals),
                reference.ratios(*totals),
                strict=True,
            )
            if (said is None) != (right is None)
            or (said is not None and not is_close(said, right))
        ]
        sheet.expect(
            NONE,
            not wrong,
            seen=f"{totals}\n" + "\n".join(wrong),
            expected="None for each ratio whose denominator is 0, and only for those",
            hint="efficiency divides by what could be saved: the shorter of Tc and Tm",
        )


def _ask_ratios(ratios: Ratios, totals: Totals) -> list[float | None]:
    wanted = "(overlap fraction, saved fraction, efficiency)"
    return _ask(ratios, totals, "ratios", wanted, "expected None for that ratio")


def _number(said: float | None) -> str:
    return "None" if said is None else f"{said:.3f}"


def _ratio_hint(place: int, said: float, totals: Totals, truth: Sequence[float]) -> str:
    tc, tm, _, hidden, step = totals
    right = truth[place]
    if right < 0 and said == 0:
        return "a run can be slower than serial: then saved is less than 0"
    if is_close(said, truth[0]):
        return "hidden is not saved: beside each other both may take longer"
    if place and is_close(said, truth[place - 1]):
        return f"that is the {_RATIOS[place - 1][1]}"
    if place == 0 and is_close(said, hidden / tm):
        return "hidden is time of the run, so it is compared with what the run sent"
    if place == 2 and is_close(said, (tc + tm - step) / tc):
        return "where Tm is the shorter, no more than Tm can be saved"
    return "a fraction, not percent" if is_close(said, 100 * right) else ""


# 1.5: truth is the resolver's. A wrong message is charged to what decides it in truth.

COUNT = "each layer travels once: one message a bucket, the last one with the rest"
READY = "with the wire free, a message starts when its last layer is through"
BUSY = "behind another message, it starts when that one has ended"
LENGTH = "a message takes as long as its layers' messages together"

Case = tuple[int, int, int, int]
Pairs = Sequence[tuple[float, float]]
Schedule = Callable[[int, int, int, int], Any]
LESSON: Case = (10, 5, 3, 2)


class Fault(NamedTuple):
    """The first message of a case that breaks a rule."""

    sentence: str
    seen: str
    expected: str
    hint: str


@lru_cache(maxsize=512)
def resolved(
    num_layers: int, layer_ms: int, message_ms: int, per_bucket: int
) -> tuple[tuple[float, float], ...]:
    """(start, end) of each message in ms from the start of the backward pass."""
    layers, messages = [layer_ms] * num_layers, [message_ms] * num_layers
    program = write_step(layers, messages, per_bucket=per_bucket)
    return tuple(
        (span.start_ns / NS_PER_MS, span.end_ns / NS_PER_MS)
        for span in resolve(program, CHALK).spans
        if span.kind == "communication"
    )


@lru_cache(maxsize=1)
def cases() -> tuple[Case, ...]:
    """The lesson's, three of its kind, then many; short ones first."""
    draw = random.Random(105)
    many = [
        (draw.randrange(1, 25), draw.randrange(1, 9), draw.randrange(1, 12),
         draw.randrange(1, 7))
        for _ in range(150)
    ]  # fmt: skip
    many.sort(key=lambda case: case[0])
    return (LESSON, (10, 5, 3, 10), (10, 5, 3, 3), (4, 2, 5, 1), *many)


@exercise(
    "1.5",
    title="ten layers",
    solution="schedule",
    verifies=(COUNT, LENGTH, READY, BUSY),
    points=3,
    timeout_s=30.0,
)
def grade_layers(sheet: Sheet, schedule: Schedule) -> None:
    """The lesson's case is drawn; the first wrong message of each kind is described."""
    sheet.ran(f"the ten layers, then {len(cases()) - 1} other backward passes")
    faults: dict[str, Fault] = {}
    for number, case in enumerate(cases()):
        num_layers, layer_ms, message_ms, per_bucket = case
        wanted = "pairs (start, end) in ms, one for each message"
        said = read_pairs(schedule(*case), f"schedule{case} returned", wanted)
        if number == 0:
            _show(sheet, case, said, "your ten layers, two a message")
        fault = _fault(case, said, resolved(*case))
        if fault is not None and fault.sentence not in faults:
            where = (
                f"{num_layers} layers of {layer_ms} ms, {message_ms} ms of message "
                f"each, {per_bucket} a bucket"
            )
            if not faults and number:
                _show(sheet, case, said, f"by you: {where}")
            faults[fault.sentence] = fault._replace(seen=f"{where}: {fault.seen}")
    for sentence, seen, expected, hint in faults.values():
        sheet.expect(sentence, False, seen=seen, expected=expected, hint=hint)
    if not faults:
        for sentence in (COUNT, LENGTH, READY, BUSY):
            sheet.expect(sentence, True)


def _show(sheet: Sheet, case: Case, said: Pairs, title: str) -> None:
    if any(end < start for start, end in said):
        return  # nothing that a wire could do
    num_layers, layer_ms, _, _ = case
    backward_ms = num_layers * layer_ms
    step, right = (
        given.step_and_hidden(pairs, backward_ms)[0]
        for pairs in (said, resolved(*case))
    )
    layers: list[Any] = [
        (
            "default",
            "compute",
            f"layer {num_layers - i}",
            i * layer_ms,
            (i + 1) * layer_ms,
        )
        for i in range(num_layers)
    ]
    messages: list[Any] = [
        ("comm", "communication", f"bucket {i}", *pair) for i, pair in enumerate(said)
    ]
    sheet.show(
        said_timeline([*layers, *messages], NS_PER_MS),
        step_ns=round(step * NS_PER_MS),
        target_ns=round(right * NS_PER_MS),
        title=title,
    )


def _fault(case: Case, said: Pairs, truth: Pairs) -> Fault | None:
    """The first wrong message, None if all are right."""
    num_layers, layer_ms, message_ms, per_bucket = case
    if len(said) != len(truth):
        rest = num_layers % per_bucket
        last = f", the last one with {rest} of the {num_layers} layers" if rest else ""
        hint = "if the layers do not divide, a smaller bucket is left at the end"
        seen = given.count_of(len(said), "message")
        return Fault(COUNT, seen, f"{len(truth)}{last}", hint)
    before = 0.0
    for place, ((start, end), right) in enumerate(zip(said, truth, strict=True)):
        seen = f"message {place} from {start:g} to {end:g} ms"
        through = min(num_layers, (place + 1) * per_bucket)
        layers, length = through - place * per_bucket, end - start
        if abs(length - layers * message_ms) > 1e-6:
            each = " each" if layers > 1 else ""
            expected = (
                f"{layers * message_ms} ms: {given.count_of(layers, 'layer')} of "
                f"{message_ms} ms{each}"
            )
            hint = "message_ms is for one layer; how many layers are in this bucket?"
            if abs(end - layers * message_ms) < 1e-6:
                hint = (
                    "the second number of a pair is the end of the message, not its "
                    "length"
                )
            elif layers < per_bucket and abs(length - per_bucket * message_ms) < 1e-6:
                verb = "is" if layers == 1 else "are"
                hint = (
                    f"{layers} of {num_layers} layers {verb} left for message {place}"
                )
            return Fault(LENGTH, f"{seen}: {length:g} ms long", expected, hint)
        if abs(start - right[0]) > 1e-6:
            if right[0] == before and place:
                expected = f"the message before it ends at {before:g} ms"
                hint = "the wire sends one message at a time: max() of two times"
                return Fault(BUSY, seen, expected, hint)
            expected = f"its last layer is through at {through * layer_ms} ms"
            number = f"{place + 1} * per_bucket" if place else "per_bucket"
            hint = (
                f"bucket {place} leaves when the backward pass is through with "
                f"{number} layers"
            )
            if place and start > right[0]:
                hint = (
                    "the backward pass does not wait for the wire: while a message "
                    "travels, the next layers are computed"
                )
            return Fault(READY, seen, expected, hint)
        before = right[1]
    return None
