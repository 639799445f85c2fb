"""What lab 06 hands out: the reducer's state, steps to time, nets to train, knobs.

A recorded program is timed again by `replay`, on any link and with any bucket size;
only another model or another number of tokens needs another program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from overlaplab import streams
from overlaplab.hardware import Hardware, find_hardware, with_link
from overlaplab.program import Program, only_step, replay
from overlaplab.program.replay import rebucket
from overlaplab.streams import name_tensor
from overlaplab.timeline import Timeline
from overlaplab_course.gpts import Attach, record_step, send_each

MIB = 2**20
NUM_RANKS = 4
WIDTH = 1024
LAYERS = 24
cut = only_step  # the name in the lesson


@dataclass
class ReducerState:
    """Everything that a bucketed reducer knows between two optimizer steps.

    The hooks (exercise 6.2) write it while the backward pass runs; the finish (6.3)
    reads it after. It is data: when a bucket is sent is for the learner to write.

    Args:
        params: the trainable parameters, in registration order. A tied weight is in
            here once.
        plan: `plan[b]` lists the positions in `params` of bucket b, in the order in
            which their gradients arrive. Buckets are launched in this order, on
            every rank.
        buffers: `buffers[b]` is flat, of the bucket's dtype, with room for each of
            its gradients. After the bucket's all-reduce has been waited for, it holds
            the SUM over ranks. Put another flat tensor there if you like, or None if
            you all-reduce the `.grad` tensors themselves.
        missing: `missing[b]` gradients of bucket b have not arrived in this step.
        works: `works[b]` is what the launch of bucket b returned (anything with a
            `wait()`), None as long as b has not been launched in this step.
        handles: what `register_post_accumulate_grad_hook` returned.
    """

    params: list[nn.Parameter]
    plan: list[list[int]]
    buffers: list[Tensor | None]
    missing: list[int]
    works: list[Any]
    handles: list[Any] = field(default_factory=list)

    @staticmethod
    def of(model: nn.Module, plan: Sequence[Sequence[int]]) -> ReducerState:
        """A state at the start of a step: nothing has arrived, nothing is launched."""
        params = [p for p in model.parameters() if p.requires_grad]
        buffers: list[Tensor | None] = []
        for number, bucket in enumerate(plan):
            first = params[bucket[0]]
            numel = sum(params[position].numel() for position in bucket)
            buffer = torch.zeros(numel, dtype=first.dtype, device=first.device)
            name_tensor(buffer, f"buffer of bucket {number}")
            buffers.append(buffer)
        missing = [len(bucket) for bucket in plan]
        positions = [list(bucket) for bucket in plan]
        return ReducerState(params, positions, buffers, missing, [None] * len(plan))

    def bucket_of(self, param: Tensor) -> int:
        """The bucket that `param` belongs to."""
        for number, bucket in enumerate(self.plan):
            if any(self.params[position] is param for position in bucket):
                return number
        raise ValueError(
            f"a tensor of shape {tuple(param.shape)} is in no bucket of the plan; "
            "pass a parameter of state.params (a hook receives the parameter)"
        )

    def pairs(self, bucket: int) -> list[tuple[nn.Parameter, Tensor]]:
        """The bucket's parameters, each with its place in the flat buffer.

        The place is a view of the buffer in the parameter's shape: `copy_` into it
        fills the buffer, `copy_` from it reads the buffer.
        """
        buffer = self.buffers[bucket]
        if buffer is None:
            raise ValueError(
                f"buffers[{bucket}] is None: this bucket was reduced in the .grad "
                "tensors themselves and has no flat buffer to take a view of"
            )
        pairs, offset = [], 0
        for position in self.plan[bucket]:
            param = self.params[position]
            place = buffer[offset : offset + param.numel()].view(param.shape)
            pairs.append((param, place))
            offset += param.numel()
        return pairs


# -- steps


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


def name_gradients(model: nn.Module) -> None:
    """Let reports call each gradient by its parameter's name."""
    streams.name_gradients(model, prefix="")


def _record(
    attach: Attach, sequences: int, vocab_size: int = 256, width: int = WIDTH
) -> Program:
    """A step of a transformer of 24 layers on four GPUs."""
    sizes = {"num_layers": LAYERS, "width": width, "vocab_size": vocab_size}
    return record_step(attach, sequences, world_size=NUM_RANKS, **sizes)


@lru_cache(maxsize=4)
def recorded_step(sequences: int, vocabulary: int = 256) -> Program:
    """The 24 layers of the lesson on four GPUs, one message per gradient."""
    return _record(send_each, sequences, vocabulary)


@lru_cache(maxsize=2)
def measured_step(sequences: int) -> Program:
    """The GPT that was measured (738.5 M parameters), on two GPUs."""
    sizes = {"num_layers": 12, "width": 2048, "vocab_size": 32_768}
    return record_step(send_each, sequences, world_size=2, **sizes)


def record_reducer(
    plan_buckets: Callable[..., Sequence[Sequence[int]]],
    install_hooks: Callable[[ReducerState], Any],
    finish: Callable[[ReducerState], Any],
    *,
    sequences: int,
    bucket_mib: float = 25,
) -> Program:
    """The 24 layers with a reducer out of three parts."""

    def attach(model: nn.Module) -> Callable[[], Any]:
        plan = plan_buckets(list(model.parameters()), int(bucket_mib * MIB))
        state = ReducerState.of(model, plan)
        install_hooks(state)
        return partial(finish, state)

    return _record(attach, sequences)


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
        program: the record, one all-reduce per gradient.
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

        `run.timeline(latency=0.5)` has half the latency.
        """
        link = self.hardware.link
        edited = replace(
            link,
            latency_ns=round(link.latency_ns * latency),
            bytes_per_s=round(link.bytes_per_s * bandwidth),
            times=tuple((size, round(ns / bandwidth)) for size, ns in link.times),
        )
        cap = None if self.bucket_mib is None else int(self.bucket_mib * MIB)
        hardware = replace(self.hardware, link=edited)
        return replay(self.program, hardware=hardware, buckets=cap)


@lru_cache(maxsize=1)
def three_runs() -> dict[str, GivenRun]:
    """The runs of exercise 6.4b, by letter."""
    a = "24 layers, 10k tokens, Ethernet, 25 MiB"
    b = "24 narrow layers, 2k tokens, NVLink, a message per gradient"
    c = "GPT with a vocabulary of 32k, 8k tokens, InfiniBand, 25 MiB"
    return {
        "A": GivenRun(a, recorded_step(10), ETHERNET, 25),
        "B": GivenRun(b, _record(send_each, 2, width=WIDTH // 2), NVLINK, None),
        "C": GivenRun(c, recorded_step(8, 32_768), INFINIBAND, 25),
    }


def pack(grad_bytes: Sequence[int], cap_bytes: float) -> list[list[int]]:
    """First come, first served, up to the cap; an over-size gradient alone."""
    buckets: list[list[int]] = []
    room = 0.0
    for i, size in enumerate(grad_bytes):
        if not buckets or size > room:
            buckets.append([])
            room = cap_bytes
        buckets[-1].append(i)
        room -= size
    return buckets
