"""What the cells of lab 06 run: recorded steps, and steps written without running.

A recorded program is re-timed by `replay`, on any link and with any bucket size; only
another model or another number of tokens needs another program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import nn

from overlaplab import streams
from overlaplab.cluster.run import run
from overlaplab.hardware import Hardware, find_hardware, with_link
from overlaplab.models import Transformer, TransformerConfig
from overlaplab.program import (
    PayloadTensor,
    Program,
    ProgramBuilder,
    only_step,
    replay,
)
from overlaplab.program.replay import rebucket
from overlaplab.streams import annotate
from overlaplab.timeline import Timeline

MIB = 2**20
NUM_RANKS = 4
SEQUENCE = 1024
WIDTH = 1024
LAYERS = 24
STEP = "step"


def _captured(name: str) -> Hardware:
    """The profile `name` without launch costs, as a step in a CUDA graph has none."""
    return replace(
        find_hardware(name),
        name=f"{name}, captured",
        launch_ns=0,
        collective_launch_ns=0,
    )


ETHERNET = _captured("ethernet-100g")
NVLINK = _captured("h100-nvlink")
INFINIBAND = replace(
    with_link(ETHERNET, latency_ns=20_000, bytes_per_s=50_000_000_000),
    name="infiniband-400g, captured",
)


@contextlib.contextmanager
def in_bfloat16() -> Iterator[None]:
    """Parameters that are made in the `with` block are bfloat16."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


cut = only_step  # the name in the lesson


def name_gradients(model: nn.Module) -> None:
    """Let reports call each gradient by its parameter's name."""
    streams.name_gradients(model, prefix="")


def train_step(
    sequences: int, vocabulary: int, layers: int = LAYERS, width: int = WIDTH
) -> None:
    """Forward, backward, and one all-reduce a gradient as soon as it is there."""
    config = TransformerConfig(
        num_layers=layers, d_model=width, num_heads=16, vocab_size=vocabulary
    )
    with in_bfloat16():
        model = Transformer(config)
    name_gradients(model)
    works = []

    def send(param: torch.Tensor) -> None:
        works.append(dist.all_reduce(param.grad, async_op=True))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(send)  # type: ignore[no-untyped-call]
    tokens = torch.randint(vocabulary, (sequences, SEQUENCE))
    with annotate(STEP):
        model(tokens, targets=tokens).backward()
        for work in works:
            work.wait()


@lru_cache(maxsize=4)
def recorded_step(sequences: int, vocabulary: int = 256) -> Program:
    """`train_step` on four GPUs, shapes only; one rank stands for all."""
    recorded = run(
        train_step, sequences, vocabulary, world_size=NUM_RANKS, fake=True, timeout_s=90
    )
    assert recorded.program is not None
    return cut(recorded.program)


@lru_cache(maxsize=2)
def measured_step(sequences: int) -> Program:
    """The GPT that was measured (738.5 M parameters), on two GPUs, shapes only."""
    recorded = run(
        train_step, sequences, 32_768, 12, 2048, world_size=2, fake=True, timeout_s=90
    )
    assert recorded.program is not None
    return cut(recorded.program)


@dataclass(frozen=True, slots=True)
class Message:
    """One all-reduce: whose gradients it carries, and when."""

    names: tuple[str, ...]
    bytes: int
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    def __str__(self) -> str:
        whose = self.names[0]
        if len(self.names) > 1:
            whose += f" to {self.names[-1]} ({len(self.names)})"
        when = f"{self.start_ns / 1e6:.1f} to {self.end_ns / 1e6:.1f} ms"
        return f"{when}: {self.bytes / MIB:.1f} MiB, {whose}"


@dataclass(frozen=True, slots=True)
class GivenRun:
    """One step to read.

    Args:
        name: what it is.
        program: the record, one all-reduce a gradient.
        hardware: what it runs on.
        bucket_mib: how gradients share messages, None: each alone.
    """

    name: str
    program: Program
    hardware: Hardware
    bucket_mib: float | None

    def messages(self) -> list[Message]:
        """What it sends, in the order in which it leaves."""
        program = self.program
        if self.bucket_mib is not None:
            program = rebucket(program, int(self.bucket_mib * MIB))
        spans = {
            span.attributes.get("op"): span
            for span in replay(program, hardware=self.hardware).spans
            if span.kind == "communication"
        }
        return [
            Message(
                names=tuple(part.name for part in op.collective.payload),
                bytes=op.collective.bytes,
                start_ns=spans[op.index].start_ns,
                end_ns=spans[op.index].end_ns,
            )
            for op in program.ranks[0]
            if op.collective is not None
        ]

    def timeline(self, latency: float = 1.0, bandwidth: float = 1.0) -> Timeline:
        """The step on its link, or on one with `latency` and `bandwidth` times as much.

        >>> # run.timeline(latency=0.5) has half the latency
        """
        link = self.hardware.link
        edited = with_link(
            self.hardware,
            latency_ns=round(link.latency_ns * latency),
            bytes_per_s=round(link.bytes_per_s * bandwidth),
        )
        cap = None if self.bucket_mib is None else int(self.bucket_mib * MIB)
        return replay(self.program, hardware=edited, buckets=cap)


@lru_cache(maxsize=1)
def three_runs() -> dict[str, GivenRun]:
    """The runs of exercise 6.4b, by letter."""
    return {
        "A": GivenRun(
            "24 layers, 10k tokens, Ethernet, 25 MiB", recorded_step(10), ETHERNET, 25
        ),
        "B": GivenRun(
            "24 layers, 2k tokens, NVLink, a message a gradient",
            recorded_step(2),
            NVLINK,
            None,
        ),
        "C": GivenRun(
            "GPT with a vocabulary of 32k, 8k tokens, InfiniBand, 25 MiB",
            recorded_step(8, 32_768),
            INFINIBAND,
            25,
        ),
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
        part = PayloadTensor(2 * numel, "bfloat16", ready, name)
        builder.collective(0, "all_reduce", payload=[part])

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
