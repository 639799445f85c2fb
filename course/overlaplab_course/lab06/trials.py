"""What extras of lab 06 try out: repairs on one's own net, settings of DDP, knobs."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from overlaplab.cluster.run import run
from overlaplab.errors import RankError
from overlaplab.grading import fixtures
from overlaplab.grading.fixtures import Fixture, Trained
from overlaplab.grading.forms import KnobProgram, Settings
from overlaplab.hardware import Link, find_hardware, with_link
from overlaplab.models import Transformer, TransformerConfig
from overlaplab.program import (
    PayloadTensor,
    Program,
    ProgramBuilder,
    only_step,
    replay,
    resolve,
)
from overlaplab.streams import annotate
from overlaplab.timeline import Timeline
from overlaplab.view import Knob
from overlaplab_course.gpts import SEQUENCE
from overlaplab_course.lab06.given import (
    ETHERNET,
    MIB,
    NUM_RANKS,
    WIDTH,
    ReducerState,
    pack,
)

# -- 6.5: repairs


@dataclass(frozen=True)
class RepairCase:
    """One learner's net, and how its gradients are cut into buckets."""

    fixture: Fixture
    cap_bytes: int

    def train(
        self, make_reducer: Callable[[ReducerState], Any], num_ranks: int = 2
    ) -> Trained:
        """Three steps with the reducer that `make_reducer` makes."""
        make = partial(self._attach, make_reducer)
        return fixtures.train(self.fixture, make, world_size=num_ranks)

    def buckets(self) -> list[list[str]]:
        """The names of each bucket's gradients, in the order of arrival."""
        model = self.fixture.build(0)
        names = [name for name, _ in model.named_parameters()]
        return [[names[i] for i in bucket] for bucket in self._plan(model)]

    def _plan(self, model: nn.Module) -> list[list[int]]:
        sizes = [p.numel() * p.element_size() for p in model.parameters()]
        last = len(sizes) - 1
        packed = pack(sizes[::-1], self.cap_bytes)
        return [[last - i for i in bucket] for bucket in packed]

    def _attach(
        self, make_reducer: Callable[[ReducerState], Any], model: nn.Module
    ) -> Any:
        return make_reducer(ReducerState.of(model, self._plan(model)))


@lru_cache(maxsize=16)
def repair_case(number: int) -> RepairCase:
    """The net that belongs to a learner's number.

    Narrow and wide layers in an order of its own; a wide layer is a bucket of its own,
    narrow ones share. The first bucket is a wide layer or two, then narrow ones follow.
    """
    draw = random.Random(int(number))
    widths = [96] * (draw.choice((1, 2, 3)) + 1)  # last layers: the first buckets
    while len(widths) < 9 + draw.choice((0, 1)):
        widths.append(draw.choice((48, 56, 64)))
    fixture = replace(
        fixtures.layers_fixture("yours", widths[::-1]),
        make_batch=partial(_samples, widths[-1]),
        same_seed=True,
    )
    return RepairCase(fixture, cap_bytes=96 * 96 * 4)


def _samples(width: int, rank: int, step: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return (torch.randn(32, width, generator=generator),)


# -- 6.6: settings of DDP

STEPS = 3  # DDP cuts its buckets anew after the first, or (static_graph) the second
DDP_WIDTH = 128
TOKENS = 64

# A small model in slow motion: the backward pass and the messages take equally long.
SLOW = replace(
    find_hardware("chalk"),
    name="chalk in slow motion",
    flops_per_s={"default": 10**11},
    memory_bytes_per_s=10**12,
    link=Link(latency_ns=250_000, bytes_per_s=3 * 10**8, source="round numbers"),
)


class _Net(nn.Module):
    """The transformer, and a layer that one of two settings of the net leaves out."""

    def __init__(self, uses_all: bool) -> None:
        super().__init__()
        self.uses_all = uses_all
        self.extra = nn.Linear(DDP_WIDTH, DDP_WIDTH)
        config = TransformerConfig(
            num_layers=2,
            d_model=DDP_WIDTH,
            num_heads=4,
            vocab_size=64,
            max_tokens=TOKENS,
        )
        self.body = Transformer(config)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.body(tokens, tokens)
        if self.uses_all:
            loss = loss + self.extra(self.extra.bias).square().mean()
        return loss


def net_bytes() -> int:
    """The gradients of the small transformer together."""
    return sum(p.numel() * p.element_size() for p in _Net(True).parameters())


@dataclass(frozen=True, slots=True)
class DdpRun:
    """The third step of a run of DDP; it prints as one line."""

    settings: Settings  # keyword arguments of DDP
    messages: tuple[int, ...] = ()  # bytes of each all-reduce
    copies: int = 0  # gradients copied into buckets
    step_ns: int = 0  # its duration
    error: str = ""  # why there was no third step, "" if there was

    def __str__(self) -> str:
        typed = ", ".join(f"{k}={v}" for k, v in self.settings.items()) or "default"
        if self.error:
            return f"{typed:<28} {self.error}"
        sizes = " ".join(f"{size / MIB:.2f}" for size in self.messages[:4])
        plural = "s" if len(self.messages) > 1 else ""
        more = " ..." if len(self.messages) > 4 else ""
        return (
            f"{typed:<28} step {self.step_ns / 1e6:5.1f} ms, {self.copies:>3} copies, "
            f"{len(self.messages):>2} message{plural} (MiB: {sizes}{more})"
        )


def try_ddp(**settings: Any) -> DdpRun:
    """Train three steps with DDP and these settings on two ranks.

    With `find_unused_parameters` one layer is left out, as the setting is for.
    """
    return try_with(settings, uses_all=not settings.get("find_unused_parameters"))


def try_with(settings: Settings, *, uses_all: bool = True) -> DdpRun:
    """The same with settings in a dict, and a layer left out or not."""
    return _try_ddp(tuple(sorted(settings.items())), uses_all)


@lru_cache(maxsize=64)
def _try_ddp(items: tuple[tuple[str, Any], ...], uses_all: bool) -> DdpRun:
    settings = dict(items)
    try:
        recorded = run(_train, settings, uses_all, world_size=2, hardware=SLOW)
    except RankError as error:
        cause = error.__cause__ or error
        first = str(cause).strip().partition(". ")[0]
        first = textwrap.shorten(first, 60, placeholder=" ...")
        return DdpRun(settings, error=f"{type(cause).__name__}: {first}")
    assert recorded.program is not None
    program = only_step(recorded.program, STEPS)
    ops = program.ranks[0]
    sent = [op.collective for op in ops if op.collective is not None]
    return DdpRun(
        settings,
        messages=tuple(c.bytes for c in sent if c.operation == "all_reduce"),
        copies=sum(op.name == "copy_" and op.phase == "backward" for op in ops),
        step_ns=resolve(program, SLOW).step_ns,
    )


def _train(settings: Settings, uses_all: bool) -> None:
    model = _Net(uses_all)
    parallel = DistributedDataParallel(model, **settings)
    for step in range(1, STEPS + 1):
        tokens = torch.randint(64, (8, TOKENS))
        model.zero_grad(set_to_none=True)
        loss = parallel(tokens)
        with annotate(f"step {step}"):  # the forward pass hides nothing
            loss.backward()


# -- 6.7: knobs

KNOBS: Mapping[str, Knob] = {
    "bucket_mib": Knob(
        (0, 1, 2, 5, 10, 25, 50, 100, 200, 500), 10, "bucket (MiB; 0: each alone)"
    ),
    "latency_us": Knob((5, 10, 20, 44, 100, 200, 500, 1000), 100, "latency (us)"),
    "gbyte_per_s": Knob((1, 3, 12.5, 25, 50, 100, 340), 50, "bandwidth (GB/s)"),
    "layers": Knob((6, 12, 24, 48), 24, "layers"),
    "ktokens": Knob((1, 2, 4, 8, 16, 32), 4, "tokens per GPU (thousands)"),
}


@lru_cache(maxsize=64)
def written_step(layers: int, tokens: int) -> Program:
    """A step of a transformer, width `WIDTH`, written down and not run.

    Takes a millisecond for any number of layers and tokens, so that sliders can turn
    them; a test holds its step to that of the recorded program.
    """
    builder = ProgramBuilder(num_ranks=1, represents=NUM_RANKS)
    row_bytes = tokens * WIDTH * 2
    attention = 4 * tokens * SEQUENCE * WIDTH
    matrices = {"qkv": 3, "projection": 1, "widen": 4, "narrow": 4}

    def compute(name: str, flops: int = 0, rows: int = 0) -> int:
        return builder.compute(
            0, name, flops=flops, dtype="bfloat16", read_bytes=rows * row_bytes
        )

    def gradient(name: str, numel: int, ready: int) -> None:
        tensor = PayloadTensor(2 * numel, "bfloat16", ready, name)
        builder.collective(0, "all_reduce", payload=[tensor])

    square = WIDTH * WIDTH
    for _ in range(layers):
        compute("norm, gelu, add", rows=22)
        compute("attention", flops=attention)
        for name, factor in matrices.items():
            compute(name, flops=2 * factor * square * tokens)
    for layer in reversed(range(layers)):
        for name in ("narrow", "widen", "mlp_norm", "projection", "qkv", "norm"):
            where = f"blocks.{layer}.{name}"
            factor = matrices.get(name, 0)
            if name == "projection":
                compute("attention backward", flops=5 * attention // 2)
            ready = compute(f"{name} backward", rows=7)
            gradient(f"{where}.bias", max(factor, 1) * WIDTH, ready)
            if factor:
                flops = 4 * factor * square * tokens
                ready = compute(f"{name} backward", flops=flops)
            gradient(f"{where}.weight", max(factor * square, WIDTH), ready)
    return builder.build()


def _timed(s: Settings) -> Timeline:
    """The written step with these knobs; 0 MiB: each gradient alone."""
    hardware = with_link(
        ETHERNET,
        latency_ns=round(s["latency_us"] * 1e3),
        bytes_per_s=round(s["gbyte_per_s"] * 1e9),
    )
    program = written_step(s["layers"], 1024 * s["ktokens"])
    return replay(
        program, hardware=hardware, buckets=int(s["bucket_mib"] * MIB) or None
    )


turn = KnobProgram(
    KNOBS,
    _timed,
    what_if={
        "half the latency": lambda s: {"latency_us": s["latency_us"] / 2},
        "twice the bandwidth": lambda s: {"gbyte_per_s": s["gbyte_per_s"] * 2},
    },
)
WHAT_IF = turn.what_if
