"""The graders of lab 05's reducers: 5.3, 5.4 and the repairs 5.6a and 5.6b."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from overlaplab.grading import fixtures, laws, program_laws
from overlaplab.grading.declared import Declared
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.fixtures import Fixture
from overlaplab.grading.forms import check_diagnosis, need_dict
from overlaplab.grading.gradients import (
    are_own,
    are_same,
    are_sums,
    hold,
    traps,
    wrong_gradients,
)
from overlaplab.grading.laws import Violation
from overlaplab_course.lab05 import given, reference
from overlaplab_course.lab05.given import MakeReducer, Model, Played, play
from overlaplab_course.lab05.repairs import RepairCase, repair_cases

LAB = Declared(__file__)
IDLE_NS = 20_000  # the board's element-wise kernels take no longer
SLOWER = program_laws.slower(given.BOARD, launch_ns=20_000)

# Whose gradients arrive in one order on all ranks: on these the prompt law holds. Never
# two ranks alone: a division by 2 is no mean.
IN_ORDER: Mapping[str, Model] = {
    "the model of section 1": given.UNTIED,
    "a narrow one, two layers with one weight": Model(
        ("embedding", "w0", "w1", "w0", "head"), rows=80, width=60, ranks=3
    ),
}


@lru_cache(maxsize=4)
def _best(model: Model) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The course's steps, on both clocks."""
    ours = play(reference.PromptReducer, model)
    slow = ours.trained.on(SLOWER)
    return tuple(ours.evidence.step_ns), tuple(slow.step_ns)


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


def _judge_in_order(
    sheet: Sheet,
    make_reducer: MakeReducer,
    says: Mapping[str, str],
    *,
    flag_bytes: int = 0,
) -> None:
    """All that one message per gradient promises, on nets without surprises.

    Args:
        says: the exercise's sentence for "mean", "once", "prompt" and "memory".
        flag_bytes: that may travel beside the gradients in each step.
    """
    for what, model in IN_ORDER.items():
        sheet.ran(f"your reducer: 3 steps of {what}, {model.ranks} ranks")
        with sheet.meeting(says["once"]):
            seen = play(make_reducer, model)
        (best_ns, slow_best_ns), step_ns = _best(model), seen.evidence.step_ns
        sheet.show(seen.timeline, step_ns=step_ns[1], target_ns=best_ns[1])
        _hold(sheet, seen)
        sheet.stop_if_wrong()
        sheet.verify(
            says["once"], laws.bytes_law(seen.evidence, extra_bytes=flag_bytes)
        )
        _judge_prompt(sheet, says["prompt"], seen, best_ns, slow_best_ns)
        sheet.verify(says["memory"], laws.leak_law(seen.evidence.live_bytes))
        sheet.stop_if_wrong()
    sheet.show_first()


def _judge_prompt(
    sheet: Sheet,
    sentence: str,
    seen: Played,
    best_ns: Sequence[int],
    slow_best_ns: Sequence[int],
) -> None:
    """When each message starts, on both clocks."""
    each = _each_alone(seen)
    late = laws.overlap_law(seen.evidence, each, best_ns, slack_ns=IDLE_NS, strict=True)
    sheet.verify(sentence, _of_messages(late))
    late = laws.overlap_law(seen.trained.on(SLOWER), each, slow_best_ns)
    sheet.verify(sentence, _of_messages(program_laws.on_clock(SLOWER, late)))


def _hold(sheet: Sheet, seen: Played) -> None:
    """The laws of programs, on one net."""
    wrong = wrong_gradients(seen.trained, seen.fixture, seen.ranks)
    hint = LAB.hint(MEAN, _what_it_is(seen)) if wrong else ""
    hold(sheet, seen.trained, wrong, hints={"recorded": hint})


def _in_one_order(
    sheet: Sheet, make_reducer: MakeReducer, fixture: Fixture, sentence: str
) -> None:
    """On three ranks on which a set has another order."""
    apart = program_laws.order_law(
        f"your reducer on {fixture.name!r}",
        lambda: play(make_reducer, fixture, 3, apart=True),
        lambda seen: wrong_gradients(seen.trained, fixture, 3),
    )
    sheet.verify(sentence, apart)


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
    with sheet.meeting(sentence, hint=stuck):
        seen = play(make_reducer, fixture, ranks)
    wrong = wrong_gradients(seen.trained, fixture, ranks)
    found = [*laws.same_order_law(seen.evidence), *wrong]
    if found:
        step = found[0].step or 1
        title = f"your run on {fixture.name!r}, step {step}"
        sheet.show(given.named(seen.evidence, step), title=title)
    named = [replace(v, message=f"net {fixture.name!r}: {v.message}") for v in found]
    hold(sheet, seen.trained, named, values=sentence)
    sheet.stop_if_wrong()


# -- 5.3

MEAN, ONCE, PROMPT, WAITED, SAFE, CPU, MEMORY, TRAPS = LAB.sentences("5.3")
_KEYS = ("mean", "once", "prompt", "memory")
SAYS = dict(zip(_KEYS, (MEAN, ONCE, PROMPT, MEMORY), strict=True))


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
    _in_one_order(sheet, make_reducer, given.UNTIED.fixture, ONCE)


# -- 5.4

ORDER, SOME, RIGHT, AT_ONCE, *_, LEAN = LAB.sentences("5.4")
FLAG_BYTES = 256  # who used what may travel, too
ORDERED_SAYS = dict(zip(_KEYS, (RIGHT, RIGHT, AT_ONCE, LEAN), strict=True))


def _differing() -> dict[str, Fixture]:
    toys = (fixtures.toy_fixture(n) for n in ("uneven", "alternating", "unused"))
    nets = {f.name: replace(f, same_seed=True) for f in toys}
    nets |= {f.name: f for f in given.SITUATIONS.values() if f.name not in nets}
    nets |= {f.name: f for f in traps() if f.name not in nets}
    return nets


@LAB.grader("5.4")
def grade_ordered(sheet: Sheet, make_reducer: MakeReducer) -> None:
    """As 5.3, then nets on which ranks see other gradients or another order."""
    _judge_in_order(sheet, make_reducer, ORDERED_SAYS, flag_bytes=FLAG_BYTES)
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
    _in_one_order(sheet, make_reducer, fixtures_by_name["branches"], ORDER)


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
    for case in (own, own.elsewhere):
        sheet.ran(f"your {case}: 3 steps")
        with sheet.meeting(SENT, hint=LAB.cases("5.6a", "stuck")[SENT]):
            seen = case.play(repaired)
        _judge_repaired(sheet, case, seen)
        sheet.stop_if_wrong()
    sheet.show_first(f"your {own}: 3 steps")


def _judge_repaired(sheet: Sheet, own: RepairCase, seen: Played) -> None:
    """The laws, and the step on both clocks."""
    step_ns, (best_ns, slow_best_ns) = seen.evidence.step_ns, _best_repaired(own)
    title, times = f"your {own.name}", (step_ns[1], best_ns[1])
    sheet.show(seen.timeline, step_ns=times[0], target_ns=times[1], title=title)
    wrong = wrong_gradients(seen.trained, own.fixture, own.ranks)
    is_sum = bool(wrong) and _what_it_is(seen) == "sum"
    hint = LAB.hint(VALUES, "sum") if is_sum and own.name != "Fir" else ""
    once = [*laws.same_order_law(seen.evidence), *laws.once_law(seen.evidence)]
    hold(sheet, seen.trained, wrong, once, hints={"recorded": hint})
    sheet.stop_if_wrong()
    sheet.verify(NO_LEAK, laws.leak_law(seen.evidence.live_bytes))
    _judge_prompt(sheet, SHORT, seen, best_ns, slow_best_ns)


@lru_cache(maxsize=16)
def _best_repaired(own: RepairCase) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The course's steps, on both clocks."""
    ours = own.play(getattr(reference, own.name))
    return tuple(ours.evidence.step_ns), tuple(ours.trained.on(SLOWER).step_ns)


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
