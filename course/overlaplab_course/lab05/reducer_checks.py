"""The graders of lab 05's reducers: 5.3, 5.4 and the repairs 5.6a and 5.6b."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from overlaplab.errors import DeadlockError, MismatchError
from overlaplab.grading import fixtures, laws
from overlaplab.grading.declared import Declared
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.fixtures import Fixture
from overlaplab.grading.forms import check_diagnosis, need_dict
from overlaplab.grading.gradients import (
    are_own,
    are_same,
    are_sums,
    traps,
    wrong_gradients,
)
from overlaplab.grading.laws import Violation
from overlaplab.grading.violation import ms
from overlaplab.timeline.intervals import merge
from overlaplab_course.lab05 import given, reference
from overlaplab_course.lab05.given import MakeReducer, Model, Played, play
from overlaplab_course.lab05.repairs import RepairCase, repair_cases

LAB = Declared(__file__)
IDLE_NS = 20_000  # the board's element-wise kernels take no longer

# Whose gradients arrive in one order on all ranks: on these the prompt law holds. Never
# two ranks alone: a division by 2 is no mean.
IN_ORDER: Mapping[str, Model] = {
    "the model of section 1": given.UNTIED,
    "a narrow one, two layers with one weight": Model(
        ("embedding", "w0", "w1", "w0", "head"), rows=80, width=60, ranks=3
    ),
}


@lru_cache(maxsize=4)
def _best_ns(model: Model) -> tuple[int, ...]:
    return tuple(play(reference.PromptReducer, model).evidence.step_ns)


def _each_alone(seen: Played) -> list[list[str]]:
    """Every gradient is a bucket of its own."""
    return [[g.name] for g in seen.evidence.gradients_of(0, 1)]


def _of_messages(found: Sequence[Violation]) -> list[Violation]:
    """The prompt law in this lab's words: a bucket of one gradient is a message."""

    def said(text: str) -> str:
        return text.replace("bucket", "message").replace("was full", "was ready")

    own = "launch each message in its gradient's hook, and wait only at the end"
    return [
        replace(
            v,
            message=said(v.message),
            expected=said(v.expected),
            hint=own if "bucket" in v.hint else v.hint,
        )
        for v in found
    ]


def _too_long(seen: Played, best_ns: Sequence[int]) -> list[Violation]:
    """What a step that is longer than the reference's does with the wire.

    The prompt law lets a message wait for another that was launched before it; whether
    that one had to go first shows here.
    """
    found = []
    for step, (took_ns, by_ns) in enumerate(
        zip(seen.evidence.step_ns, best_ns, strict=True), 1
    ):
        slow = laws.step_law(took_ns, by_ns)
        found += (_idle(seen, step) if slow else []) + slow
    hint = "what does the wire carry first, and when is that gradient ready?"
    return [replace(violation, hint=hint) for violation in found]


def _idle(seen: Played, step: int) -> list[Violation]:
    """Gradients that are ready while the wire has nothing to do."""
    evidence = seen.evidence
    zero, sends = evidence.begin_ns(step), evidence.sends_of(0, step)
    busy = merge([(send.start_ns, send.end_ns) for send in sends])
    found = []
    for gradient in evidence.gradients_of(0, step):
        bucket = evidence.bucket([gradient.name], step)
        if bucket is None or bucket.start_ns is None:
            continue
        ready = bucket.armed_ns
        free = next((end for start, end in busy if start <= ready < end), ready)
        if bucket.start_ns > free + IDLE_NS:
            times = (ms(ns - zero) for ns in (ready, free, bucket.start_ns))
            message = "{}: ready at {}, the wire was free at {}, it left at {}"
            message = message.format(gradient.name, *times) + f" (step {step})"
            expected = "the wire is not idle while a gradient is ready"
            found.append(Violation("idle", message, expected, step=step))
    return found


def cpu_waits_ns(seen: Played) -> int:
    """How long the CPU of rank 0 waits for its device, in all steps."""
    own = seen.evidence.timeline.of_rank(0).spans
    return sum(span.duration_ns for span in own if span.kind == "host")


def _judge_in_order(
    sheet: Sheet,
    make_reducer: MakeReducer,
    says: Mapping[str, str],
    flag_bytes: int = 0,
) -> None:
    """All that one message per gradient promises, on nets without surprises.

    Args:
        says: the exercise's sentence for "mean", "once", "prompt", "waited", "safe",
            "cpu" and "memory".
        flag_bytes: that may travel beside the gradients in each step.
    """
    drawn = []
    for what, model in IN_ORDER.items():
        sheet.ran(f"your reducer: 3 steps of {what}, {model.ranks} ranks")
        try:
            seen = play(make_reducer, model)
        except (DeadlockError, MismatchError) as error:
            sheet.stuck(says["once"], error)
            sheet.stop_if_wrong()
            raise
        best_ns, step_ns = _best_ns(model), seen.evidence.step_ns
        figure = (seen.timeline, step_ns[1], best_ns[1])
        sheet.show(figure[0], step_ns=figure[1], target_ns=figure[2])
        found = seen.findings
        unwaited = laws.no_findings_law(found, kinds=("unwaited",))
        sheet.verify(says["waited"], unwaited)
        races = laws.no_findings_law(found, kinds=("hazard", "unmatched"))
        sheet.verify(says["safe"], races)
        sheet.verify(says["once"], laws.once_law(seen.evidence))
        wrong = wrong_gradients(seen.trained, seen.fixture, model.ranks)
        hint = LAB.hint(MEAN, _what_it_is(seen)) if wrong else ""
        sheet.verify(says["mean"], wrong, hint=hint)
        sheet.stop_if_wrong()
        sheet.verify(
            says["once"], laws.bytes_law(seen.evidence, extra_bytes=flag_bytes)
        )
        late = _of_messages(laws.overlap_law(seen.evidence, _each_alone(seen), best_ns))
        late = late or _too_long(seen, best_ns)
        sheet.verify(says["prompt"], late)
        waits_ns = cpu_waits_ns(seen)
        LAB.refuse(sheet, says["cpu"], waits_ns > 0, ms=waits_ns / 1e6)
        sheet.verify(says["memory"], laws.leak_law(seen.evidence.live_bytes))
        sheet.stop_if_wrong()
        drawn.append(figure)
    timeline, first_ns, best = drawn[0]  # of what the lesson draws, too
    sheet.show(timeline, step_ns=first_ns, target_ns=best)


def _what_it_is(seen: Played) -> str:
    """What wrong gradients of rank 0 in step 1 are, "" if nothing known."""
    gradients = seen.trained.gradients[0][0]
    grown = {n: None if g is None else g * seen.ranks for n, g in gradients.items()}
    if are_sums(gradients, seen.fixture, seen.ranks):
        return "sum"
    if are_same(gradients, dict(seen.fixture.build(0).named_parameters())):
        return "weights"
    own = any(are_own(grads, seen.fixture) for grads in (gradients, grown))
    return "own" if own else ""


def _judge_net(
    sheet: Sheet,
    make_reducer: MakeReducer,
    fixture: Fixture,
    ranks: int,
    what: str,
    sentence: str,
    says: Mapping[str, str],
    *,
    stuck: str = "",
) -> None:
    """Values, findings and order on one net with a trap."""
    sheet.ran(f"your reducer: 3 steps on {ranks} ranks of {fixture.name!r}: {what}")
    try:
        seen = play(make_reducer, fixture, ranks)
    except (DeadlockError, MismatchError) as error:
        sheet.stuck(sentence, error, hint=stuck)
        sheet.stop_if_wrong()
        return
    wrong = wrong_gradients(seen.trained, fixture, ranks)
    found = [*laws.same_order_law(seen.evidence), *wrong]
    if found:
        step = found[0].step or 1
        title = f"your run on {fixture.name!r}, step {step}"
        sheet.show(given.named(seen.evidence, step), title=title)
    named = [replace(v, message=f"net {fixture.name!r}: {v.message}") for v in found]
    sheet.verify(sentence, named)
    seen_kinds = {says["waited"]: ("unwaited",), says["safe"]: ("hazard", "unmatched")}
    for one, kinds in seen_kinds.items():
        sheet.verify(one, laws.no_findings_law(seen.findings, kinds=kinds))
    sheet.verify(says["once"], laws.once_law(seen.evidence))
    sheet.stop_if_wrong()


# -- 5.3

MEAN, ONCE, PROMPT, WAITED, SAFE, CPU, MEMORY, TRAPS = LAB.sentences("5.3")
_KEYS = ("mean", "once", "prompt", "waited", "safe", "cpu", "memory")
SAYS = dict(zip(_KEYS, LAB.sentences("5.3"), strict=False))


@LAB.grader("5.3")
def grade_prompt(sheet: Sheet, make_reducer: MakeReducer) -> None:
    """Two shapes on three and four ranks, then nets with traps on two and three."""
    _judge_in_order(sheet, make_reducer, SAYS)
    nets = LAB.cases("5.3", "nets")[TRAPS]
    for number, fixture in enumerate(f for f in traps() if f.name in nets):
        what, ranks = nets[fixture.name], 3 - number % 2
        with warnings.catch_warnings():  # torch remarks on the net 'zero_element'
            warnings.filterwarnings("ignore", message="Initializing zero-element")
            _judge_net(sheet, make_reducer, fixture, ranks, what, TRAPS, SAYS)


# -- 5.4

ORDER, SOME, RIGHT, AT_ONCE = LAB.sentences("5.4")[:4]
_REST = LAB.sentences("5.4")[4:]
FLAG_BYTES = 256  # who used what may travel, too
ORDERED_SAYS = dict(zip(_KEYS, (RIGHT, RIGHT, AT_ONCE, *_REST), strict=True))


def _differing() -> dict[str, Fixture]:
    toys = (fixtures.toy_fixture(n) for n in ("uneven", "alternating", "unused"))
    nets = {f.name: replace(f, same_seed=True) for f in toys}
    nets |= {f.name: f for f in given.SITUATIONS.values() if f.name not in nets}
    nets |= {f.name: f for f in traps() if f.name not in nets}
    return nets


@LAB.grader("5.4")
def grade_ordered(sheet: Sheet, make_reducer: MakeReducer) -> None:
    """As 5.3, then nets on which ranks see other gradients or another order."""
    _judge_in_order(sheet, make_reducer, ORDERED_SAYS, FLAG_BYTES)
    fixtures_by_name, stuck = _differing(), LAB.cases("5.4", "stuck")
    number = 0
    for sentence, nets in LAB.cases("5.4", "nets").items():
        for name, what in nets.items():
            ranks, number = (3, 2, 4)[number % 3], number + 1
            _judge_net(
                sheet,
                make_reducer,
                fixtures_by_name[name],
                ranks,
                what,
                sentence,
                ORDERED_SAYS,
                stuck=stuck.get(sentence, ""),
            )


# -- 5.6a and 5.6b

DIAGNOSIS, VALUES, SENT, ORDERED, NO_WAIT, NO_LEAK, SHORT = LAB.sentences("5.6a")


def _grade_repair(
    sheet: Sheet, own: RepairCase, said: object, repaired: MakeReducer
) -> None:
    answers = need_dict(said, "the diagnosis")
    sheet.ran(f"your {own}: 3 steps")
    truth = own.truth()
    if laws.diagnosis_law(answers, {"kind": own.kind}):
        truth = {"kind": own.kind}  # the other entry's name would give it away
    check_diagnosis(sheet, DIAGNOSIS, answers, truth)
    try:
        seen = own.play(repaired)
    except (DeadlockError, MismatchError) as error:
        sheet.stuck(SENT, error, hint=LAB.cases("5.6a", "stuck")[SENT])
        return
    best_ns = _best_repaired_ns(own)
    step_ns = seen.evidence.step_ns
    title = f"your {own.name}"
    sheet.show(seen.timeline, step_ns=step_ns[1], target_ns=best_ns[1], title=title)
    sheet.verify(ORDERED, laws.no_findings_law(seen.findings))
    sent = [*laws.same_order_law(seen.evidence), *laws.once_law(seen.evidence)]
    sheet.verify(SENT, sent)
    wrong = wrong_gradients(seen.trained, own.fixture, own.ranks)
    is_sum = bool(wrong) and _what_it_is(seen) == "sum"
    hint = LAB.hint(VALUES, "sum") if is_sum and own.name != "Fir" else ""
    sheet.verify(VALUES, wrong, hint=hint)
    sheet.stop_if_wrong()
    waits_ns = cpu_waits_ns(seen)
    LAB.refuse(sheet, NO_WAIT, waits_ns > 0, ms=waits_ns / 1e6)
    sheet.verify(NO_LEAK, laws.leak_law(seen.evidence.live_bytes))
    slow = _too_long(seen, best_ns)
    blocked = laws.unblocked_law(seen.evidence) if slow else []
    sheet.verify(SHORT, [*blocked, *slow])


@lru_cache(maxsize=16)
def _best_repaired_ns(own: RepairCase) -> tuple[int, ...]:
    return tuple(own.play(getattr(reference, own.name)).evidence.step_ns)


@LAB.grader("5.6a")
def grade_first(
    sheet: Sheet, my_number: int, said: Mapping[str, Any], *classes: MakeReducer
) -> None:
    """The first that the number draws."""
    own = repair_cases(my_number)[0]
    _grade_repair(sheet, own, said, _chosen(own, classes))


@LAB.grader("5.6b")
def grade_second(
    sheet: Sheet, my_number: int, said: Mapping[str, Any], *classes: MakeReducer
) -> None:
    """The second."""
    own = repair_cases(my_number)[1]
    _grade_repair(sheet, own, said, _chosen(own, classes))


def _chosen(own: RepairCase, classes: Sequence[MakeReducer]) -> MakeReducer:
    names = ("Alder", "Birch", "Cedar", "Elm", "Fir")
    return dict(zip(names, classes, strict=True))[own.name]
