"""What lab 01 runs: steps in slow motion, and what a learner's number draws of them.

Every time is a whole number of milliseconds, so that a step can be worked out in the
head. The written steps cost no run and say the same as recorded ones (a test holds them
together).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from overlaplab.cluster.run import run
from overlaplab.hardware import Hardware, Link, find_hardware, with_link
from overlaplab.program import Program, ProgramBuilder, resolve
from overlaplab.timeline import Timeline
from overlaplab_course.gpts import send_each

NS_PER_MS = 1_000_000


# Ten linear layers: the opening step, recorded

NUM_LAYERS = 10
ROWS, WIDTH = 128, 96
GRADIENT_BYTES = 4 * WIDTH * WIDTH  # of one layer
_BACKWARD_FLOPS = 4 * ROWS * WIDTH * WIDTH  # of one layer: two products
_UPDATE_BYTES = 12 * WIDTH * WIDTH  # two tensors read, one written


def slow_gpu(
    layer_ms: float, message_ms: float, *, update_ms: float = 1, latency_us: float = 0
) -> Hardware:
    """A GPU on which one layer's backward pass and one layer's message take so long.

    Its forward pass takes half as long as the backward pass. Launches are free, and
    nothing slows anything else.
    """
    update = ((_UPDATE_BYTES, round(update_ms * NS_PER_MS)),)  # of one layer
    return replace(
        find_hardware("chalk"),
        name="chalk in slow motion",
        flops_per_s={"default": round(1000 * _BACKWARD_FLOPS / layer_ms)},
        memory_bytes_per_s=10**15,
        points={"bytes:add_": update, "bytes:_foreach_add_": update},
        link=Link(
            latency_ns=round(1000 * latency_us),
            bytes_per_s=round(1000 * GRADIENT_BYTES / message_ms),
            source="round numbers, between two ranks",
        ),
    )


GPU = slow_gpu(6, 5)


def ten_layers() -> tuple[nn.Module, Tensor, Optimizer]:
    """Model, batch and optimizer of the opening step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)]
        model = nn.Sequential(*layers)
        # As if an embedding stood before it: each layer's backward pass is alike.
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
    return model, x, SGD(model.parameters(), lr=0.1)


def _backward_only(model: nn.Module, x: Tensor) -> None:
    wait = send_each(model)
    model(x).sum().backward()
    wait()


@lru_cache(maxsize=1)
def recorded() -> Program:
    """Forward and backward pass on two ranks, one message per layer; no update."""
    model, x, _ = ten_layers()
    program = run(_backward_only, model, x, world_size=2, hardware=GPU).program
    assert program is not None
    return program


def from_backward(timeline: Timeline) -> Timeline:
    """Rank 0 from the start of the backward pass on."""
    phases = [(s.attributes.get("phase"), s.start_ns) for s in timeline.spans]
    starts = [start_ns for phase, start_ns in phases if phase == "backward"]
    first_ns = min(starts or [start_ns for phase, start_ns in phases if phase] or [0])
    return timeline.where(lambda s: s.rank == 0 and s.start_ns >= first_ns)


# Written steps of two ranks, one of them written. On CHALK nothing but the bytes of a
# message costs it time, ten of them a ns.

CHALK = replace(with_link("chalk", latency_ns=0), name="chalk")
BYTES_PER_MS = 10 * NS_PER_MS


def write_step(
    layers_ms: Sequence[int],
    messages_ms: Sequence[int],
    *,
    per_bucket: int = 1,
    forward_ms: int = 0,
    forward_launches: int = 1,
    update_ms: int = 0,
) -> Program:
    """A training step for `CHALK`.

    Args:
        layers_ms: the backward pass of each layer, in its order (the last layer first).
        messages_ms: what sending the gradients of each takes.
        per_bucket: layers that share a message; as many as there are: nothing overlaps.
        forward_ms, update_ms: before the backward pass, and after all messages.
        forward_launches: of the forward pass.
    """
    b = ProgramBuilder(num_ranks=1, represents=2)
    for _ in range(forward_launches if forward_ms else 0):
        ns = forward_ms * NS_PER_MS // forward_launches
        b.compute(0, "forward", ns=ns, phase="forward")
    number, works = len(layers_ms), []
    for first in range(0, number, per_bucket):
        bucket = range(first, min(first + per_bucket, number))
        for place in bucket:
            name, ns = f"layer {number - place}", layers_ms[place] * NS_PER_MS
            b.compute(0, name, ns=ns, phase="backward")
        if len(bucket) > 1:
            name = f"layers {number - first} to {number - bucket[-1]}"
        if len(bucket) == number:
            name = "all layers"
        size = sum(messages_ms[place] for place in bucket) * BYTES_PER_MS
        works.append(b.collective(0, "all_reduce", bytes=size, label=name))
    for work in works:
        b.wait(0, work)
    if update_ms:
        b.compute(0, "update", ns=update_ms * NS_PER_MS)
    return b.build()


def pair_timeline(tc_ms: int, tm_ms: int, *, at_once: bool) -> Timeline:
    """Computation and communication that need nothing of one another."""
    b = ProgramBuilder(num_ranks=1, represents=2)
    if tc_ms:
        b.compute(0, "compute", ns=tc_ms * NS_PER_MS)
    if tm_ms:  # launched from a stream that holds nothing, it waits for nothing
        stream, size = "side" if at_once else "default", tm_ms * BYTES_PER_MS
        b.collective(0, "all_reduce", bytes=size, stream=stream)
    return resolve(b.build(), CHALK)


def with_contention(hardware: Hardware) -> Hardware:
    """`hardware` on which computing and sending slow each other, as on two H200s."""
    return replace(
        hardware,
        name=f"{hardware.name} with contention",
        compute_rate_permille=600,
        wire_rate_permille=500,
    )


CONTENDED = with_contention(CHALK)


class Job(NamedTuple):
    """A step of equal layers, of exercise 1.1; all times in ms."""

    num_layers: int
    forward_ms: int
    layer_ms: int
    message_ms: int
    update_ms: int

    @property
    def compute_ms(self) -> int:
        return self.forward_ms + self.num_layers * self.layer_ms + self.update_ms

    @property
    def communication_ms(self) -> int:
        return self.num_layers * self.message_ms

    def timeline(self, per_bucket: int = 1) -> Timeline:
        """The step, with that many layers per message."""
        program = write_step(
            [self.layer_ms] * self.num_layers,
            [self.message_ms] * self.num_layers,
            per_bucket=per_bucket,
            forward_ms=self.forward_ms,
            update_ms=self.update_ms,
        )
        return resolve(program, CHALK)

    def __repr__(self) -> str:
        return (
            f"{self.num_layers} layers\n"
            f"forward pass            {self.forward_ms:>4} ms\n"
            f"backward pass, a layer  {self.layer_ms:>4} ms\n"
            f"message, a layer        {self.message_ms:>4} ms\n"
            f"update                  {self.update_ms:>4} ms"
        )


@lru_cache(maxsize=64)
def job(number: int) -> Job:
    """The step that belongs to a learner's number.

    Odd numbers have the longer chain through the messages, even ones through the
    computing.
    """
    draw = random.Random(f"shortest {int(number)}")
    layers = draw.choice((6, 8, 12))
    layer = draw.choice((3, 4, 5, 6))
    more = draw.choice((1, 2, 3))
    message = layer + more if int(number) % 2 else max(1, layer - more)
    forward = layers * layer // 2
    return Job(layers, forward, layer, message, draw.choice((4, 7, 9)))


@dataclass(frozen=True, slots=True)
class Card:
    """One use of the formula, in exercise 1.3."""

    # tc_ms, tm_ms: computation and communication, each alone
    tc_ms: float
    tm_ms: float
    a: float  # the overlap fraction: hidden / communication of the run, or as promised
    timeline: Timeline | None  # the run; None for a promise
    why: str  # the answer

    @property
    def formula_ms(self) -> float:
        return self.tc_ms + (1 - self.a) * self.tm_ms

    def __repr__(self) -> str:
        alone = f"Tc = {self.tc_ms:g} ms and Tm = {self.tm_ms:g} ms alone, a ="
        if self.timeline is None:
            return f"{alone} {self.a:.3f};\n   a promise: nobody has run it"
        report = self.timeline.report()
        return (
            f"{alone} {self.a:.3f};\n   the run took {report.step_ns / NS_PER_MS:.1f} "
            f"ms; in it {report.compute_ns / NS_PER_MS:.1f} ms of computing, "
            f"{report.communication_ns / NS_PER_MS:.1f} of messages"
        )


@lru_cache(maxsize=32)
def cards(number: int) -> Mapping[str, Card]:
    """The four cards of a learner's number, by letter."""
    draw = random.Random(f"formula {int(number)}")
    layers = draw.choice((6, 8, 10))
    layer_ms = draw.choice((6, 8, 10))
    message_ms = layer_ms - draw.choice((2, 3))
    program = write_step(
        [layer_ms] * layers,
        [message_ms] * layers,
        forward_ms=layers * layer_ms // 2,
        forward_launches=layers,
    )
    # On a GPU whose CPU is the slower: a launch takes longer than a layer.
    launch_ns = round(1.25 * layer_ms * NS_PER_MS)
    slow_launch = replace(CHALK, name="chalk with slow launches", launch_ns=launch_ns)
    found = []
    for hardware, why in (
        (CHALK, "holds"), (CONTENDED, "contention"), (slow_launch, "idle")
    ):  # fmt: skip
        tc, tm, *_ = totals_of(resolve(program, CHALK))
        timeline = resolve(program, hardware)
        a = timeline.report().overlap_fraction
        assert a is not None
        found.append(Card(tc, tm, round(a, 3), timeline, why))
    tc = draw.choice((30, 40, 50))
    tm = tc + draw.choice((30, 50, 60))
    found.append(Card(tc, tm, draw.choice((0.8, 0.9)), None, "impossible"))
    draw.shuffle(found)
    return dict(zip("ABCD", found, strict=True))


@dataclass(frozen=True)
class Times:
    """Five numbers of one run, in ms; unpacks as `ratios(*times)`.

    Args:
        tc, tm: computation and communication, each alone.
        sent, hidden: communication in the run, and the part with computation beside it.
        step: the run.
    """

    tc: float
    tm: float
    sent: float
    hidden: float
    step: float

    def __iter__(self) -> Any:
        return iter((self.tc, self.tm, self.sent, self.hidden, self.step))


@dataclass(frozen=True, repr=False)
class Totals(Times):
    """Of a run of the virtual cluster, with the run itself."""

    timeline: Timeline

    def __repr__(self) -> str:
        return (
            f"alone: compute {self.tc:.1f} ms, communication {self.tm:.1f} ms\n"
            f"run:   communication {self.sent:.1f} ms, {self.hidden:.1f} of it hidden; "
            f"step {self.step:.1f} ms"
        )


def totals_of(timeline: Timeline) -> Totals:
    """Five numbers of a run of the virtual cluster; operators know their time alone."""
    report = timeline.report()
    alone = {"compute": 0, "communication": 0}
    for span in timeline.spans:
        if span.kind in alone and span.rank == report.rank:
            alone[span.kind] += span.attributes.get("alone_ns", span.duration_ns)
    return Totals(
        alone["compute"] / NS_PER_MS,
        alone["communication"] / NS_PER_MS,
        report.communication_ns / NS_PER_MS,
        report.hidden_ns / NS_PER_MS,
        report.step_ns / NS_PER_MS,
        timeline,
    )


def _opening(hardware: Hardware) -> Totals:
    """The step of section 1, written, one message per layer."""
    program = write_step([6] * 10, [5] * 10, forward_ms=30, update_ms=10)
    return totals_of(resolve(program, hardware))


def contended() -> Totals:
    """The lesson's run: the opening step where the two slow each other down."""
    return _opening(CONTENDED)


def uncontended() -> Totals:
    """The opening step as it was; a test holds it to the recorded one."""
    return _opening(CHALK)


def step_and_hidden(
    pairs: Sequence[tuple[float, float]], backward_ms: float
) -> tuple[float, float]:
    """The step, and what of the messages lies within the backward pass.

    Both from the start of the backward pass, for messages that do not overlap.
    """
    step = max([backward_ms, *(end for _, end in pairs)])
    hidden = sum(max(0, min(end, backward_ms) - start) for start, end in pairs)
    return step, hidden
