"""What section 4 of lab 08 runs: a training loop whose gradients may come a step late.

Also what one process computes with gradients one step late, and what that does to a
loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from overlaplab import streams
from overlaplab.grading import fixtures, origins
from overlaplab.grading.evidence import Evidence
from overlaplab.grading.fixtures import SLOW_CHALK, Fixture
from overlaplab.grading.forms import Examined
from overlaplab.grading.reading import collect_evidence, watch
from overlaplab.hardware import Hardware
from overlaplab.program import resolve
from overlaplab.timeline import Span, Timeline

Weights = Mapping[str, torch.Tensor]
Grads = list[torch.Tensor | None]
# By the hint that tells of it, what people do in the place of the right thing.
SLIPS = {
    "undelayed": "undelayed",
    "sum": "sum",
    "own": "own first",
    "zero": "zeros first",
    "two": "two steps late",
}


class Reducer(Protocol):
    """What a learner's class must offer, and nothing else of it is used."""

    def wait(self) -> None: ...

    def flush(self) -> bool: ...


MakeReducer = Callable[[torch.nn.Module], Reducer]


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """With momentum and weight decay: a zero in the place of no gradient shows."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def _link(times_slower: float) -> Hardware:
    link = SLOW_CHALK.link
    speed = int(link.bytes_per_s / times_slower)
    return replace(SLOW_CHALK, link=replace(link, bytes_per_s=speed))


# All messages take nearly as long as forward and backward; and longer.
BOARD, SLOW_LINK = _link(1.9), _link(4.0)


@dataclass(frozen=True)
class Case:
    """A model, its ranks, and when the loop flushes.

    Args:
        name: "six equal layers".
        fixture: every rank has data of its own and the same weights.
        num_ranks: so many.
        segments: so many steps, then a flush, each.
    """

    name: str
    fixture: Fixture
    num_ranks: int = 2
    segments: tuple[int, ...] = (4,)

    @property
    def num_steps(self) -> int:
        """Without the updates after a flush."""
        return sum(self.segments)


def _same_weights(fixture: Fixture) -> Fixture:
    return replace(fixture, same_seed=True)


EQUAL = Case("six equal layers", _same_weights(fixtures.clean_fixture(6)))
CASES = (
    EQUAL,
    Case(
        "three layers with biases",
        _same_weights(fixtures.toy_fixture("mlp")),
        num_ranks=3,
        segments=(3, 2),
    ),
    Case(
        "four layers, narrow and wide",
        _same_weights(fixtures.layers_fixture("uneven", [24, 96, 32, 64, 16])),
        num_ranks=4,
        segments=(1, 4),
    ),
)


@dataclass(frozen=True)
class Trained(Examined):
    """A loop that ran.

    `values`: by rank, ([weights after each update], [what flush returned, twice for
    each segment]).
    """

    case: Case

    @cached_property
    def evidence(self) -> Evidence:
        """Of the run."""
        return collect_evidence(self.program, self.run.timeline)

    def on(self, hardware: Hardware) -> Trained:
        """The same program, timed on other hardware."""
        timeline = resolve(self.program, hardware)
        return replace(self, run=replace(self.run, timeline=timeline))

    @property
    def timeline(self) -> Timeline:
        """Rank 0's: one span for each pass of each step, and for its messages."""
        return _told(self.evidence)

    @property
    def gradient_bytes(self) -> int:
        """Of one set."""
        with torch.random.fork_rng(devices=[]):
            model = self.case.fixture.build(0)
        return sum(p.numel() * p.element_size() for p in model.parameters())


def train(make_reducer: MakeReducer, case: Case = EQUAL) -> Trained:
    """Run the loop of section 4 on `case`."""
    options: dict[str, Any] = {"world_size": case.num_ranks, "hardware": BOARD}
    seen = Examined.of(_on_rank, case, make_reducer, timeout_s=30, **options)
    return Trained(seen.run, case)


def _on_rank(case: Case, make_reducer: MakeReducer) -> origins.Held:
    rank, fixture = dist.get_rank(), case.fixture
    model = fixture.build(rank)
    watch(model)
    notes = [*origins.given(model)]
    reducer = make_reducer(model)
    optimizer = make_optimizer(model)
    weights: list[Weights] = []
    flushed: list[Any] = []
    for steps in numbered(case.segments):
        for step in steps:
            batch = fixture.make_batch(rank, step)
            notes += origins.given(batch)
            with streams.step(step):
                fixture.loss(model, *batch).backward()  # type: ignore[no-untyped-call]
                reducer.wait()
                optimizer.step()
                optimizer.zero_grad()
            weights.append(_copy(model))
        for _ in range(2):
            flushed.append(reducer.flush())
            if flushed[-1]:
                optimizer.step()
                optimizer.zero_grad()
            weights.append(_copy(model))
    notes += origins.returned([*model.parameters()])
    return origins.Held((weights, flushed), tuple(notes))


def numbered(segments: Sequence[int]) -> Iterator[range]:
    first = 1
    for length in segments:
        yield range(first, first + length)
        first += length


def _copy(model: torch.nn.Module) -> Weights:
    with _disable_current_modes():  # the harness's, not the learner's
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def right(case: Case, *, slip: str = "") -> list[Weights]:
    """One process on all ranks' batches: the weights after each update, as `train`.

    Each gradient is used one step after it was computed, and after the last step.

    Args:
        slip: what is done wrong instead, one of `SLIPS`.
    """
    fixture, weights = case.fixture, []
    delay = {"undelayed": 0, "two steps late": 2}.get(slip, 1)
    factor = case.num_ranks if slip == "sum" else 1
    with torch.random.fork_rng(devices=[]):
        model = fixture.build(0)
        optimizer = make_optimizer(model)
        parameters = list(model.parameters())
        nothing: Grads = [None] * len(parameters)
        if slip == "zeros first":
            nothing = [torch.zeros_like(p) for p in parameters]
        for steps in numbered(case.segments):
            waiting: list[Grads] = []
            for step in steps:
                batches = [fixture.make_batch(r, step) for r in range(case.num_ranks)]
                whole = [torch.cat(tensors) for tensors in zip(*batches, strict=True)]
                own = batches[0] if slip == "own first" and step == steps[0] else ()
                first = _gradient(model, fixture, own) if own else nothing
                waiting.append(_gradient(model, fixture, whole, factor))
                here = waiting.pop(0) if len(waiting) > delay else first
                _update(optimizer, parameters, here)
                weights.append(_copy(model))
            for _ in range(2):  # the second has nothing to give
                last: Grads = waiting.pop(0) if waiting else [None] * len(parameters)
                _update(optimizer, parameters, last)
                weights.append(_copy(model))
    return weights


def _gradient(
    model: torch.nn.Module, fixture: Fixture, batch: Sequence[Any], factor: int = 1
) -> Grads:
    model.zero_grad()
    (factor * fixture.loss(model, *batch)).backward()  # type: ignore[no-untyped-call]
    return [p.grad for p in model.parameters()]


def _update(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Any], grads: Grads
) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    optimizer.step()


def _told(evidence: Evidence) -> Timeline:
    """Rank 0's spans, those of one pass of one step joined: "forward 2"."""
    own = evidence.timeline.of_rank(0)
    step_of = {
        op: step
        for step in range(evidence.num_steps + 1)
        for op in evidence.ops_of(0, step)
    }
    ops = evidence.program.ranks[0]
    joined: list[Span] = []
    for span in sorted(own.spans, key=lambda s: (s.lane, s.start_ns)):
        op = ops[int(span.attributes["op"])]
        word = op.phase or "update"
        if span.kind == "communication":
            word = "gradients"
        elif span.kind != "compute":
            word = span.name
        name = f"{word} {step_of[op.index]}" if step_of[op.index] else word
        before = joined[-1] if joined else None
        same = before and (before.lane, before.name) == (span.lane, name)
        if before and same and span.start_ns <= before.end_ns:
            joined[-1] = replace(before, end_ns=max(before.end_ns, span.end_ns))
        elif span.duration_ns:
            joined.append(replace(span, name=name))
    drawn = Timeline.of(joined, origin=own.origin)
    return replace(drawn, hardware=own.hardware)


class FromHooks:
    """Undelayed: each gradient is sent when it is there, and waited for in its step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._works: list[Any] = []
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._send)  # type: ignore[no-untyped-call]

    def _send(self, parameter: torch.Tensor) -> None:
        self._works.append(dist.all_reduce(parameter.grad, async_op=True))

    def wait(self) -> None:
        """The averages of this step are in `.grad`."""
        for work in self._works:
            work.wait()
        self._works.clear()
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.grad /= dist.get_world_size()

    def flush(self) -> bool:
        """Nothing is ever left."""
        return False


def costs_text(seen: Trained) -> str:
    """Step, computing and messages in a line."""
    report, steps = seen.run.timeline.of_rank(0).report(), seen.case.num_steps
    compute_ms, wire_ms = report.compute_ns / 1e6, report.communication_ns / 1e6
    each = (
        f"{compute_ms / steps:.1f} ms of computing, {wire_ms / steps:.1f} of messages"
    )
    return f"{steps} steps in {seen.step_ns / 1e6:.1f} ms; in each {each}"
