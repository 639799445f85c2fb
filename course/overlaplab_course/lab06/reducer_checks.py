"""The graders of lab 06's hooks (6.2a, 6.2), finish (6.3) and repairs (6.5a, 6.5b).

Each half is run with the course's other half, so that neither needs the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from overlaplab.grading import fixtures, laws, program_laws
from overlaplab.grading.declared import Declared
from overlaplab.grading.evidence import Evidence
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.fixtures import Fixture, Trained
from overlaplab.grading.forms import check_diagnosis
from overlaplab.grading.gradients import hold, traps, wrong_gradients
from overlaplab.grading.laws import Violation
from overlaplab_course.lab06.broken import FirstReducer
from overlaplab_course.lab06.given import ReducerState
from overlaplab_course.lab06.reducer_reasons import (
    PARAMETER_SENT,
    SKIPPED_HINTS,
    hint_of_values,
    nothing_launched,
    slip_of_hooks,
)
from overlaplab_course.lab06.reference import install_hooks as our_hooks
from overlaplab_course.lab06.reference import plan_buckets
from overlaplab_course.lab06.trials import RepairCase, repair_case

LAB = Declared(__file__)
SENT, ONCE, BYTES, PROMPT, ORDER, SAFE, FREE_CPU = LAB.sentences("6.2")
MEAN, AGAIN, WAITED, _, LEAK, KEPT, TRAPS, UNUSED, _ = LAB.sentences("6.3")
DIAGNOSIS, VALUES = LAB.sentences("6.5a")[:2]
# By sentence, the nets of 6.3 and what each is for.
NETS: Mapping[str, Mapping[str, str]] = LAB.cases("6.3", "nets")
STEPS = 3
FLAG_BYTES = 1024
LEFT_IN_ORDER = "launch what the hooks left in the order of the plan, on every rank"
SLOWER = program_laws.slower(fixtures.SLOW_CHALK, launch_ns=5_000)


class Clean(NamedTuple):
    """Equal layers, two in a bucket, and where they are trained."""

    ranks: int
    layers: int
    width: int

    @property
    def fixture(self) -> Fixture:
        made = fixtures.clean_fixture(self.layers, self.width, batch=self.width // 2)
        return replace(made, same_seed=True)

    @property
    def cap_bytes(self) -> int:
        return 2 * self.width * self.width * 4

    @property
    def buckets(self) -> list[list[str]]:
        return fixtures.layer_buckets(self.layers)

    def __str__(self) -> str:
        return f"{STEPS} steps, {self.layers} layers, {self.ranks} ranks"


# Two shapes in two worlds: a division by 2 is no mean on three ranks.
CLEANS = (Clean(2, 8, 64), Clean(3, 6, 48))
CLEAN = CLEANS[0].fixture
CLEAN_CAP_BYTES = CLEANS[0].cap_bytes

Plan = Callable[[list[torch.nn.Parameter]], list[list[int]]]
Hooks = Callable[[ReducerState], Any]
Finish = Callable[[ReducerState], Any]
MakeReducer = Callable[[ReducerState], Any]


def our_finish(state: ReducerState, divide: bool = True) -> None:
    """Finish what any hooks began, whether or not they use flat buffers.

    With divide=False what comes back is the sum, or already the mean where the hooks
    have asked for it.
    """
    num_ranks = dist.get_world_size() if divide else 1
    for bucket, work in enumerate(state.works):
        if work is None:
            for param, place in state.pairs(bucket):
                if param.grad is None:
                    place.zero_()
                else:
                    place.copy_(param.grad)
            state.works[bucket] = dist.all_reduce(state.buffers[bucket], async_op=True)
    for bucket, work in enumerate(state.works):
        work.wait()
        if state.buffers[bucket] is None:  # the gradients themselves were reduced
            for position in state.plan[bucket]:
                grad = state.params[position].grad
                if grad is not None:
                    grad.div_(num_ranks)
            continue
        for param, place in state.pairs(bucket):
            if param.grad is None:
                param.grad = torch.empty_like(param)
            param.grad.copy_(place).div_(num_ranks)
    state.missing = [len(bucket) for bucket in state.plan]
    state.works = [None] * len(state.plan)


def reducer(
    plan: Plan, install_hooks: Hooks, finish: Finish, model: torch.nn.Module
) -> SimpleNamespace:
    """A reducer out of its parts: all but the model is what `fixtures.train` takes."""
    params = [p for p in model.parameters() if p.requires_grad]
    state = ReducerState.of(model, plan(params))
    install_hooks(state)
    return SimpleNamespace(wait=partial(finish, state))


def _reducer(
    install_hooks: Hooks, finish: Finish, cap_bytes: int
) -> Callable[[torch.nn.Module], SimpleNamespace]:
    """With the course's plan."""
    plan = partial(plan_buckets, cap_bytes=cap_bytes)
    return partial(reducer, plan, install_hooks, finish)


@lru_cache(maxsize=2)
def our_steps(clean: Clean) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The steps of the course's reducer on a clean net, on both clocks."""
    make = _reducer(our_hooks, our_finish, clean.cap_bytes)
    ours = fixtures.train(clean.fixture, make, world_size=clean.ranks)
    return tuple(ours.evidence.step_ns), tuple(ours.on(SLOWER).step_ns)


def _late(trained: Trained, clean: Clean) -> list[Violation]:
    """Buckets that start late, on both clocks."""
    first, second = our_steps(clean)
    steps = range(1, STEPS + 1)
    late = laws.overlap_law(trained.evidence, clean.buckets, first, steps=steps)
    if late:
        return late
    late = laws.overlap_law(trained.on(SLOWER), clean.buckets, second, steps=steps)
    return program_laws.on_clock(SLOWER, late)


def _show(sheet: Sheet, evidence: Evidence, target_ns: int) -> None:
    timeline = evidence.step_timeline(2)
    sheet.show(timeline, step_ns=evidence.step_ns[1], target_ns=target_ns)


@LAB.grader("6.2a")
def grade_simple_hooks(sheet: Sheet, install_simple_hooks: Hooks) -> None:
    """Hooks that need not keep an order, before the course's finish."""
    finish = _matching_finish(install_simple_hooks)
    _on_clean_nets(sheet, install_simple_hooks, finish)


def _on_clean_nets(
    sheet: Sheet, install_hooks: Hooks, finish: Finish, also_bytes: bool = False
) -> None:
    """The learner's hooks where all ranks fill their buckets in one order."""
    for clean in CLEANS:
        sheet.ran(f"your hooks and our finish: {clean}")
        make = _reducer(install_hooks, finish, clean.cap_bytes)
        trained = fixtures.train(clean.fixture, make, world_size=clean.ranks)
        if clean is CLEANS[0]:
            _show(sheet, trained.evidence, our_steps(clean)[0][1])
        hint = slip_of_hooks(trained, clean.fixture)
        if hint:
            sentence = SENT if hint == PARAMETER_SENT else ONCE
            sheet.expect(sentence, False, seen=hint, hint=hint)
        wrong = wrong_gradients(trained, clean.fixture, clean.ranks)
        hold(sheet, trained, wrong, hints={"once": hint, "recorded": hint})
        if also_bytes:
            sheet.verify(BYTES, laws.bytes_law(trained.evidence), hint=hint)
        sheet.stop_if_wrong()
        sheet.verify(
            PROMPT,
            nothing_launched(install_hooks, trained, clean.fixture, clean.cap_bytes),
        )
        sheet.verify(PROMPT, _late(trained, clean))
        sheet.stop_if_wrong()


@LAB.grader("6.2")
def grade_hooks(sheet: Sheet, install_hooks: Hooks) -> None:
    """The learner's hooks before the course's finish."""
    sheet.ran(f"your hooks and our finish: {CLEANS[0]}")
    finish = _matching_finish(install_hooks)
    if finish is not our_finish:
        sheet.note("you ask for the mean: do not divide again in 6.3")
    _on_clean_nets(sheet, install_hooks, finish, also_bytes=True)
    nets = LAB.cases("6.2", "nets")[ORDER]
    deadlock = LAB.cases("6.2", "deadlock")[ORDER]
    make = _reducer(install_hooks, finish, 300)
    for number, fixture in enumerate(f for f in traps() if f.name in nets):
        num_ranks = (3, 2)[number % 2]
        net = f"the net {fixture.name!r}: {nets[fixture.name]}"
        sheet.ran(f"your hooks and our finish: {STEPS} steps of {net}")
        with sheet.meeting(ORDER, hint=deadlock):
            trap = fixtures.train(fixture, make, world_size=num_ranks)
        other_order = laws.same_order_law(trap.evidence)
        wrong = wrong_gradients(trap, fixture, num_ranks)
        _show_failing(sheet, trap, fixture, [*other_order, *wrong])
        sheet.verify(ORDER, other_order)
        hold(sheet, trap, wrong)
        sheet.stop_if_wrong()
    sheet.verify(ORDER, _apart("your hooks", make, "mixed_dtypes"))


@LAB.grader("6.3")
def grade_finish(sheet: Sheet, finish: Finish) -> None:
    """The learner's finish behind the course's hooks."""
    for clean in CLEANS:
        sheet.ran(f"our hooks and your finish: {clean}")
        fixture, num_ranks = clean.fixture, clean.ranks
        make = _reducer(our_hooks, finish, clean.cap_bytes)
        # One step more: the end of the run is not like the end of a step.
        trained = fixtures.train(fixture, make, steps=STEPS + 1, world_size=num_ranks)
        evidence = trained.evidence
        if clean is CLEANS[0]:
            _show(sheet, evidence, our_steps(clean)[0][1])
        wrong = wrong_gradients(trained, fixture, num_ranks)
        again = "what must be as it was, before the next backward pass begins?"
        hint = ""
        if wrong:
            hint = hint_of_values(trained, fixture, num_ranks, clean.cap_bytes)
        hold(sheet, trained, wrong, hints={"once": again, "recorded": hint})
        sheet.stop_if_wrong()
        # Flags of who used what may travel too.
        sheet.verify(AGAIN, laws.bytes_law(evidence, extra_bytes=FLAG_BYTES))
        sheet.verify(LEAK, laws.leak_law([row[:STEPS] for row in evidence.live_bytes]))
        sheet.verify(KEPT, _late(trained, clean))
    for number, fixture in enumerate(traps()):
        with warnings.catch_warnings():  # torch remarks on the net 'zero_element'
            warnings.filterwarnings("ignore", message="Initializing zero-element")
            _grade_trap(sheet, finish, fixture, (3, 2)[number % 2])
        sheet.stop_if_wrong()
    make = _reducer(our_hooks, finish, 300)
    sheet.verify(MEAN, _apart("your finish", make, "unused"))


def _grade_trap(sheet: Sheet, finish: Finish, fixture: Fixture, num_ranks: int) -> None:
    name = fixture.name
    sentence, nets = next(pair for pair in NETS.items() if name in pair[1])
    sheet.ran(
        f"our hooks and your finish: {STEPS} steps on {num_ranks} ranks of "
        f"the net {name!r}: {nets[name]}"
    )
    make = _reducer(our_hooks, finish, 300)
    hint = "which ranks launch the buckets that are not full after the backward?"
    hint = SKIPPED_HINTS.get(name, hint)
    with sheet.meeting(sentence, hint=hint):
        trained = fixtures.train(fixture, make, world_size=num_ranks)
    wrong = wrong_gradients(trained, fixture, num_ranks)
    _show_failing(sheet, trained, fixture, wrong)
    other_order = laws.same_order_law(trained.evidence)
    sheet.verify(sentence, other_order, hint=LEFT_IN_ORDER)
    hint = hint_of_values(trained, fixture, num_ranks, 300) if wrong else ""
    wrong = [replace(v, message=f"net {name!r}: {v.message}") for v in wrong]
    # A gradient may be a view of its buffer, which no copy fills; and where some are
    # missing, who asks which ranks have one may wait for the answer.
    hold(
        sheet,
        trained,
        wrong,
        [],
        values=sentence,
        cpu=False,
        hints={"recorded": hint},
    )


def _apart(what: str, make: fixtures.MakeReducer, name: str) -> list[Violation]:
    """On three ranks on which a set has another order."""
    net = next(fixture for fixture in traps() if fixture.name == name)
    return program_laws.order_law(
        f"{what} on {net.name!r}",
        lambda: fixtures.train(net, make, world_size=3, apart=True),
        lambda trained: wrong_gradients(trained, net, 3),
    )


def _show_failing(
    sheet: Sheet, trained: Trained, fixture: Fixture, found: list[Violation]
) -> None:
    """Draw the run that failed, not the clean one."""
    if found:
        step = found[0].step or 1
        title = f"your run on {fixture.name!r}, step {step}"
        sheet.show(trained.evidence.step_timeline(step), title=title)


def _matching_finish(install_hooks: Hooks) -> Finish:
    """Our finish for these hooks: without a division if they ask for the mean."""
    undivided = partial(our_finish, divide=False)
    make = _reducer(install_hooks, undivided, CLEAN_CAP_BYTES)
    trained = fixtures.train(CLEAN, make, steps=1)
    gradients, _ = fixtures.oracle(CLEAN, steps=1)
    is_mean = not laws.values_law(trained.gradients[0], gradients[0])
    return undivided if is_mean else our_finish


# -- repairs


@LAB.grader("6.5a")
def grade_resending(
    sheet: Sheet, my_number: int, said: Mapping[str, Any], repaired: MakeReducer
) -> None:
    """The fault is gone, the values are right, the overlap is still there."""
    own = repair_case(my_number)
    sent = own.train(FirstReducer).evidence.sends_of(0, 2)
    truth = {"kind": "sent again", "step": 2, "messages": len(sent)}
    _grade_repair(sheet, int(my_number), own, truth, said, repaired)


@LAB.grader("6.5b")
def grade_racing(
    sheet: Sheet, my_number: int, said: Mapping[str, Any], repaired: MakeReducer
) -> None:
    """The edge is there, and nothing waits that need not."""
    own = repair_case(my_number)
    first = next(b for b, names in enumerate(own.buckets()) if len(names) > 1)
    truth = {"kind": "race", "bucket": first, "written_on": "stream 1"}
    _grade_repair(sheet, int(my_number), own, truth, said, repaired)


def _grade_repair(
    sheet: Sheet,
    number: int,
    own: RepairCase,
    truth: Mapping[str, object],
    said: Mapping[str, Any],
    repaired: MakeReducer,
) -> None:
    kinds = LAB.cases("6.5a", "kinds")[DIAGNOSIS]
    check_diagnosis(sheet, DIAGNOSIS, said, truth, kinds=kinds)
    for net, case, num_ranks in (
        ("your net", own, 2),
        ("another net", repair_case(number + 1), 3),
    ):
        sheet.ran(f"your reducer: {STEPS} steps of {net} on {num_ranks} ranks")
        make = _reducer(our_hooks, our_finish, case.cap_bytes)
        trained = case.train(repaired, num_ranks)
        best = fixtures.train(case.fixture, make, world_size=num_ranks)
        best_ns = best.evidence.step_ns
        _show(sheet, trained.evidence, best_ns[1])
        hold(sheet, trained, wrong_gradients(trained, case.fixture, num_ranks))
        sheet.stop_if_wrong()
        late = laws.overlap_law(trained.evidence, case.buckets(), best_ns)
        slow_ns = best.on(SLOWER).step_ns
        late = late or laws.overlap_law(trained.on(SLOWER), case.buckets(), slow_ns)
        sheet.verify(PROMPT, late)
        sheet.stop_if_wrong()
    sheet.show_first()
