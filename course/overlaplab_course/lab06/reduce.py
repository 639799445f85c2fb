"""Exercises 6.2 and 6.3: the hooks that launch, and the finish that waits.

Each half is run behind the reference's other half, so that neither needs the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist

from overlaplab.errors import DeadlockError, MismatchError
from overlaplab.grading import fixtures, laws
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.fixtures import Fixture, Trained
from overlaplab.grading.laws import Violation
from overlaplab_course.lab06.reference import install_hooks as reference_hooks
from overlaplab_course.lab06.reference import plan_buckets
from overlaplab_course.lab06.state import ReducerState

NUM_BUCKETS = 4
FLAG_BYTES = 1024
STEPS = 3

SENT = "what is sent is the gradient, of every parameter"
ONCE = "each gradient is sent once a step, in steps 1, 2 and 3"
BYTES = "the bytes on the wire are those of the gradients, no more"
PROMPT = "each bucket starts when it is full and the wire is free"
ORDER = "all ranks launch the same buckets in one order, whatever arrives first"
SAFE = "no bytes are touched by two streams at once"

MEAN = "after finish, .grad is the mean over ranks, in steps 1, 2 and 3"
TRAPS = "also for tied, frozen, over-size, channels_last and mixed-dtype parameters"
UNUSED = "also where a parameter gets no gradient, on one rank or on all"
WAITED = "every message is waited for"
AGAIN = "the next step starts anew: each gradient is sent once a step"
KEPT = "the overlap that the hooks made is kept"
LEAK = "memory does not grow from step to step"

# What the nets are for, as verdicts name them.
NETS: Mapping[str, str] = {
    "tied": "two layers share one weight",
    "frozen": "some parameters are not trained",
    "unused": "a layer gets no gradient on any rank",
    "uneven": "a layer gets a gradient on some ranks only",
    "zero_element": "a parameter has no elements",
    "over_size": "one gradient is larger than the cap",
    "mixed_dtypes": "layers in float32 and float64",
    "channels_last": "gradients that are not contiguous",
    "branches": "ranks use the layers in different orders",
    "zeroed_in_place": "gradients are zeroed, not None, before each step",
}

Hooks = Callable[[ReducerState], Any]
Finish = Callable[[ReducerState], Any]


@dataclass(frozen=True)
class MakeReducer:
    """A reducer out of two halves, as `fixtures.train` wants it."""

    install_hooks: Hooks
    finish: Finish
    cap_bytes: int

    def __call__(self, model: torch.nn.Module) -> fixtures.Reducer:
        params = [p for p in model.parameters() if p.requires_grad]
        state = ReducerState.of(model, plan_buckets(params, self.cap_bytes))
        self.install_hooks(state)
        return _Reducer(state, self.finish)


@dataclass(frozen=True)
class _Reducer:
    state: ReducerState
    finish: Finish

    def wait(self) -> None:
        self.finish(self.state)


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


@exercise(
    "6.2",
    title="the hook",
    solution="install_hooks",
    verifies=(SENT, ONCE, BYTES, PROMPT, ORDER, SAFE),
    points=3,
    timeout_s=30.0,
)
def grade_hooks(sheet: Sheet, install_hooks: Hooks) -> None:
    """The learner's hooks before the reference's finish."""
    clean = _same_weights(fixtures.clean_fixture())
    sheet.ran(f"your hooks and our finish: {STEPS} steps, 8 layers, 2 ranks")
    finish = _matching_finish(clean, install_hooks)
    if finish is not our_finish:
        sheet.note("you ask for the mean: do not divide again in 6.3")
    cap_bytes = clean_cap_bytes()
    trained = fixtures.train(clean, MakeReducer(install_hooks, finish, cap_bytes))
    reference = _reference()
    evidence = trained.evidence
    sheet.show(
        evidence.step_timeline(2),
        step_ns=evidence.step_ns[1],
        target_ns=reference.evidence.step_ns[1],
    )
    hint = _sending_hint(trained, clean)
    sheet.verify(ONCE, _hinted(laws.once_law(evidence), hint))
    sheet.verify(BYTES, _hinted(laws.bytes_law(evidence), hint))
    sheet.verify(SAFE, laws.no_findings_law(trained.run.warnings, kinds=("hazard",)))
    sheet.verify(SENT, _hinted(wrong_values(trained, clean, 2), hint))
    sheet.stop_if_wrong()
    sheet.verify(
        PROMPT,
        laws.overlap_law(evidence, clean_buckets(), reference.evidence.step_ns),
    )
    sheet.stop_if_wrong()
    for fixture in traps():
        if fixture.name not in ("branches", "tied", "channels_last", "mixed_dtypes"):
            continue  # the others are about the finish
        sheet.ran(f"your hooks and our finish: {STEPS} steps of {_described(fixture)}")
        try:
            trained = fixtures.train(fixture, MakeReducer(install_hooks, finish, 300))
        except (DeadlockError, MismatchError) as error:
            hint = "a full bucket waits until every bucket before it has been launched"
            sheet.show(None)  # the run that failed has no timeline
            sheet.verify(ORDER, [Violation("order", str(error), hint=hint)])
            sheet.stop_if_wrong()
            raise
        seen = trained.run.warnings
        found = {
            ORDER: laws.same_order_law(trained.evidence),
            SENT: wrong_values(trained, fixture, 2),
            ONCE: laws.once_law(trained.evidence),
            SAFE: laws.no_findings_law(seen, kinds=("hazard",)),
        }
        for sentence, violations in found.items():
            sheet.verify(sentence, violations)
        first = next((v[0] for v in found.values() if v), None)
        if first is not None:
            _show_failing(sheet, trained, fixture, first.step or 1)
        sheet.stop_if_wrong()


@exercise(
    "6.3",
    title="the finish",
    solution="finish",
    verifies=(MEAN, AGAIN, WAITED, SAFE, LEAK, KEPT, TRAPS, UNUSED),
    points=3,
    timeout_s=45.0,
)
def grade_finish(sheet: Sheet, finish: Finish) -> None:
    """The learner's finish behind the reference's hooks."""
    clean = _same_weights(fixtures.clean_fixture())
    sheet.ran(f"our hooks and your finish: {STEPS} steps, 8 layers, 2 ranks")
    trained = fixtures.train(
        clean,
        MakeReducer(reference_hooks, finish, clean_cap_bytes()),
        steps=STEPS + 1,  # the end of the run is not like the end of a step
    )
    reference = _reference()
    evidence = trained.evidence
    sheet.show(
        evidence.step_timeline(2),
        step_ns=evidence.step_ns[1],
        target_ns=reference.evidence.step_ns[1],
    )
    seen = trained.run.warnings
    sheet.verify(WAITED, laws.no_findings_law(seen, kinds=("unwaited",)))
    sheet.verify(SAFE, laws.no_findings_law(seen, kinds=("hazard", "unmatched")))
    hint = "what must be as it was, before the next backward pass begins?"
    again = [replace(v, hint=hint) for v in laws.once_law(evidence)]
    sheet.verify(AGAIN, again)
    wrong = wrong_values(trained, clean, 2)
    sheet.verify(MEAN, _hinted(wrong, _value_hint(trained, clean, 2)))
    sheet.stop_if_wrong()
    # Flags of who used what may travel too.
    sheet.verify(AGAIN, laws.bytes_law(evidence, extra_bytes=FLAG_BYTES))
    live_bytes = [row[:STEPS] for row in evidence.live_bytes]
    sheet.verify(LEAK, laws.leak_law(live_bytes))
    sheet.verify(
        KEPT,
        laws.overlap_law(
            evidence,
            clean_buckets(),
            reference.evidence.step_ns,
            steps=range(1, STEPS + 1),
        ),
    )
    for number, fixture in enumerate(traps()):
        num_ranks = (3, 2)[number % 2]
        sheet.ran(
            f"our hooks and your finish: {STEPS} steps on {num_ranks} ranks of "
            f"{_described(fixture)}"
        )
        with warnings.catch_warnings():  # torch remarks on the net 'zero_element'
            warnings.filterwarnings("ignore", message="Initializing zero-element")
            _grade_trap(sheet, finish, fixture, num_ranks)
        sheet.stop_if_wrong()


def _grade_trap(sheet: Sheet, finish: Finish, fixture: Fixture, num_ranks: int) -> None:
    sentence = {"unused": UNUSED, "uneven": UNUSED}.get(fixture.name, TRAPS)
    make = MakeReducer(reference_hooks, finish, 300)
    try:
        trained = fixtures.train(fixture, make, world_size=num_ranks)
    except (DeadlockError, MismatchError) as error:
        hint = _skipped_hint(fixture) or (
            "which ranks launch the buckets that are not full after the backward?"
        )
        sheet.show(None)  # the run that failed has no timeline
        sheet.verify(sentence, [Violation("order", str(error), hint=hint)])
        return
    wrong = wrong_values(trained, fixture, num_ranks)
    if wrong:
        wrong = _hinted(wrong, _value_hint(trained, fixture, num_ranks))
        _show_failing(sheet, trained, fixture, wrong[0].step or 1)
    sheet.verify(sentence, [_in_net(violation, fixture) for violation in wrong])
    seen = trained.run.warnings
    sheet.verify(WAITED, laws.no_findings_law(seen, kinds=("unwaited",)))
    sheet.verify(SAFE, laws.no_findings_law(seen, kinds=("hazard", "unmatched")))


def _described(fixture: Fixture) -> str:
    return f"the net {fixture.name!r}: {NETS[fixture.name]}"


def _show_failing(sheet: Sheet, trained: Trained, fixture: Fixture, step: int) -> None:
    """Draw the run that failed, not the clean one."""
    title = f"your run on {fixture.name!r}, step {step}"
    sheet.show(trained.evidence.step_timeline(step), title=title)


def _hinted(violations: list[Violation], hint: str) -> list[Violation]:
    """With this hint, if there is one."""
    return [replace(v, hint=hint) for v in violations] if hint else violations


def _sending_hint(trained: Trained, fixture: Fixture) -> str:
    """What hooks did that our finish makes look like something else, "" if nothing."""
    evidence = trained.evidence
    for gradient in evidence.gradients_of(0, 1):
        ops = evidence.program.ranks[0]
        phases = {ops[op].phase == "backward" for op in gradient.sends}
        if len(phases) == 2:  # our finish sends only what has no work
            return (
                "works[b] is None after your launch: without async_op=True all_reduce "
                "waits by itself and returns None (with it, store what it returns)"
            )
    initial = dict(fixture.build(0).named_parameters())
    if _is_same(trained.gradients[0][0], initial):
        return "you sent the parameter; its gradient is `.grad`"
    return ""


def _value_hint(trained: Trained, fixture: Fixture, num_ranks: int) -> str:
    """What wrong gradients of rank 0 in step 1 look like, "" if like nothing known."""
    seen = trained.gradients[0][0]
    right = fixtures.oracle(fixture, steps=1, world_size=num_ranks)[0][0]
    if _is_same(seen, right):
        return _skipped_hint(fixture)
    summed = {n: None if g is None else g * num_ranks for n, g in right.items()}
    if _is_same(seen, summed):
        return "this is the SUM over the ranks: divide by dist.get_world_size()"
    if _skipped_hint(fixture):  # more likely there than what follows
        return _skipped_hint(fixture)
    if _is_same(seen, fixtures.oracle(fixture, steps=1, world_size=1)[0][0]):
        return (
            "the buffer has the sum, but `.grad` still has this rank's own gradient: "
            "write it back"
        )
    return ""


def _skipped_hint(fixture: Fixture) -> str:
    if fixture.name == "unused":
        return "a bucket was not sent: send zeros for what has no gradient"
    if fixture.name == "uneven":
        return (
            "a rank skipped a bucket that another one sent: send zeros for what has "
            "no gradient"
        )
    return ""


def _is_same(
    seen: Mapping[str, torch.Tensor | None], right: Mapping[str, torch.Tensor | None]
) -> bool:
    wanted = {n: _as_float32(g) for n, g in right.items()}
    return not laws.values_law([_without_zeros(seen, wanted)], wanted)


def _in_net(violation: Violation, fixture: Fixture) -> Violation:
    return replace(violation, message=f"net {fixture.name!r}: {violation.message}")


class _MixedDtypes(torch.nn.Module):
    """float32 and float64 in turn: no rounding that hides a wrong value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(8, 8, dtype=dtype)
            for dtype in (torch.float32, torch.float64, torch.float32)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            dtype: Any = layer.weight.dtype
            x = torch.tanh(layer(x.to(dtype)))
        return x.square().mean()


def traps() -> list[Fixture]:
    """The adversarial fixtures as this lab uses them."""
    return [
        _same_weights(
            replace(fixture, make_model=_MixedDtypes)
            if fixture.name == "mixed_dtypes"
            else fixture
        )
        for fixture in fixtures.adversarial_fixtures()
    ]


def _same_weights(fixture: Fixture) -> Fixture:
    """Ranks start equal: the broadcast at the start is not this lab's task."""
    return replace(fixture, same_seed=True)


def _matching_finish(clean: Fixture, install_hooks: Hooks) -> Finish:
    """Our finish for these hooks: without a division if they ask for the mean."""
    undivided = partial(our_finish, divide=False)
    make = MakeReducer(install_hooks, undivided, clean_cap_bytes())
    trained = fixtures.train(clean, make, steps=1)
    gradients, _ = fixtures.oracle(clean, steps=1)
    is_mean = not laws.values_law(trained.gradients[0], gradients[0])
    return undivided if is_mean else our_finish


def wrong_values(trained: Trained, fixture: Fixture, num_ranks: int) -> list[Violation]:
    """Violations against one process on the concatenated batch, first step first."""
    gradients, _ = fixtures.oracle(fixture, steps=STEPS, world_size=num_ranks)
    found = []
    for step in range(1, STEPS + 1):
        right = {n: _as_float32(g) for n, g in gradients[step - 1].items()}
        seen = [_without_zeros(rank, right) for rank in trained.gradients[step - 1]]
        found += laws.values_law(seen, right, step=step)
    return found or laws.origin_law(trained.evidence.program, what="a gradient")


def _without_zeros(
    seen: Mapping[str, torch.Tensor | None], right: Mapping[str, torch.Tensor | None]
) -> dict[str, torch.Tensor | None]:
    """Zeros are None where no rank used the parameter: the task leaves it open."""
    return {
        name: None
        if right.get(name) is None and grad is not None and not bool(grad.any())
        else _as_float32(grad)
        for name, grad in seen.items()
    }


def _as_float32(grad: torch.Tensor | None) -> torch.Tensor | None:
    """float64 gradients of nets that compute in float32 as well are no better."""
    return grad.float() if grad is not None and grad.dtype == torch.float64 else grad


@lru_cache(maxsize=1)
def _clean_params() -> dict[str, int]:
    model = fixtures.clean_fixture().build(0)
    return {n: p.numel() * p.element_size() for n, p in model.named_parameters()}


def clean_cap_bytes() -> int:
    """A cap that cuts the clean fixture into `NUM_BUCKETS` buckets."""
    return sum(_clean_params().values()) // NUM_BUCKETS


def clean_buckets() -> Sequence[Sequence[str]]:
    """The names in each bucket of the clean fixture, as the reference plans them."""
    names = list(_clean_params())
    params = list(fixtures.clean_fixture().build(0).parameters())
    plan = plan_buckets(params, clean_cap_bytes())
    return [[names[position] for position in bucket] for bucket in plan]


@lru_cache(maxsize=1)
def _reference() -> Trained:
    make = MakeReducer(reference_hooks, our_finish, clean_cap_bytes())
    return fixtures.train(_same_weights(fixtures.clean_fixture()), make)
