"""What section 4 of lab 08 runs: a training loop whose gradients come a step late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.distributed as dist

from overlaplab.grading import fixtures
from overlaplab.grading.evidence import Evidence
from overlaplab.grading.fixtures import SLOW_CHALK, Fixture, Gradients
from overlaplab.grading.forms import Examined
from overlaplab.grading.stage import run
from overlaplab.hardware import Hardware
from overlaplab.program import resolve
from overlaplab.timeline import Span, Timeline


class Reducer(Protocol):
    """What a learner's class must offer, and nothing else of it is used."""

    def wait(self) -> None: ...

    def flush(self) -> bool: ...


MakeReducer = Callable[[torch.nn.Module], Reducer]


def make_optimizer(model: torch.nn.Module, _: object = None) -> torch.optim.Optimizer:
    """With momentum and weight decay: a zero in the place of no gradient shows."""
    # Not in lists, in which a step takes a set of gradients of its own for the decay.
    return torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1, foreach=False
    )


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

    @property
    def flush_after(self) -> tuple[int, ...]:
        """The steps after which the loop flushes."""
        ends = range(1, len(self.segments) + 1)
        return tuple(sum(self.segments[:end]) for end in ends)

    @property
    def updates(self) -> list[tuple[int, bool]]:
        """Of each update: the step, and whether it uses what a flush gave."""
        return [
            (step, flushed)
            for step in range(1, self.num_steps + 1)
            for flushed in (False, True)
            if not flushed or step in self.flush_after
        ]


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

    Args:
        case: on which.
        gradients: `[update][rank][name]`: what the optimizer found in `.grad`.
        parameters: `[rank][name]`, at the end.
        evidence: of the run, on `BOARD`.
    """

    case: Case
    gradients: tuple[tuple[Gradients, ...], ...]
    parameters: tuple[Gradients, ...]
    evidence: Evidence

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


def train(
    make_reducer: MakeReducer, case: Case = EQUAL, *, apart: bool = False
) -> Trained:
    """Run the loop of section 4 on `case`; `apart`: see `fixtures.train`."""
    seen = fixtures.train(
        case.fixture,
        make_reducer,
        make_optimizer=make_optimizer,
        steps=case.num_steps,
        world_size=case.num_ranks,
        hardware=BOARD,
        flush_after=case.flush_after,
        apart=apart,
    )
    return Trained(seen.run, case, seen.gradients, seen.parameters, seen.evidence)


@lru_cache(maxsize=8)
def right(case: Case) -> tuple[tuple[Gradients, ...], Gradients]:
    """One process on all ranks' batches: gradients of each update, parameters."""
    return fixtures.late_oracle(
        case.fixture,
        make_optimizer=make_optimizer,
        steps=case.num_steps,
        world_size=case.num_ranks,
        flush_after=case.flush_after,
    )


def flush_of_nothing(make_reducer: MakeReducer) -> tuple[Any, ...]:
    """By rank: what `flush()` returns before any step."""
    found = run(_flush_first, make_reducer, world_size=2, hardware=BOARD, timeout_s=30)
    return found.values


def _flush_first(make_reducer: MakeReducer) -> Any:
    return make_reducer(EQUAL.fixture.build(dist.get_rank())).flush()


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
