"""Exercise 5.5: the same GPT on machines where hooks pay, and where they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from overlaplab.hardware import Hardware, collective_ns, find_hardware, with_link
from overlaplab.program import Program, replay
from overlaplab.timeline import Timeline
from overlaplab_course.lab05.given import record_gpt

WAYS = ("each", "one")


class EachAlone:
    """One message per gradient; the mean is asked for: only messages are launched."""

    def __init__(self, model: nn.Module) -> None:
        self.works: list[Any] = []
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self._send)  # type: ignore[no-untyped-call]

    def _send(self, param: nn.Parameter) -> None:
        mean = dist.ReduceOp.AVG
        self.works.append(dist.all_reduce(param.grad, op=mean, async_op=True))

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Costs(NamedTuple):
    """What a step is made of.

    Args:
        compute_ms: all kernels of forward and backward, one after the other.
        launch_ms: what the CPU takes to launch those kernels.
        collective_ms: what the CPU takes to launch one message.
        num_gradients: as many messages as one a gradient makes.
        latency_ms: what a message costs on the wire before its first byte.
        wire_ms: what the bytes of all gradients take.
        last_ms: what the bytes of the last gradient take.
    """

    compute_ms: float
    launch_ms: float
    collective_ms: float
    num_gradients: int
    latency_ms: float
    wire_ms: float
    last_ms: float


@dataclass(frozen=True)
class Setup:
    """The GPT with so many sequences per GPU, on a machine.

    Args:
        name: what the machine is like.
        sequences: of 1024 tokens.
        launch_us: what a launch costs the CPU; 0: captured in a CUDA graph.
        collective_us: the same for a collective, with the Python of its hook.
        latency_us: alpha.
        gbyte_per_s: of gradients.
    """

    name: str
    sequences: int
    launch_us: float
    collective_us: float
    latency_us: float
    gbyte_per_s: float

    @cached_property
    def program(self) -> Program:
        """The GPT's step, one message per gradient."""
        return record_gpt(EachAlone, self.sequences)

    @property
    def hardware(self) -> Hardware:
        """A GPU with this CPU and this link, where nothing slows anything."""
        base = replace(
            find_hardware("ethernet-100g"),
            launch_ns=round(1e3 * self.launch_us),
            collective_launch_ns=round(1e3 * self.collective_us),
        )
        return with_link(
            base,
            latency_ns=round(1e3 * self.latency_us),
            bytes_per_s=round(1e9 * self.gbyte_per_s),
        )

    def timeline(self, way: str) -> Timeline:
        """The step with a message for "each" gradient, or "one" for all at the end."""
        return self.on(self.hardware, way)

    def on(self, hardware: Hardware, way: str) -> Timeline:
        """The same on other hardware."""
        buckets = sum(self._sizes) if way == "one" else None
        return replay(self.program, hardware=hardware, buckets=buckets)

    @cached_property
    def steps_ns(self) -> Mapping[str, int]:
        """How long each way takes."""
        return {way: self.timeline(way).step_ns for way in WAYS}

    @cached_property
    def _sizes(self) -> list[int]:
        ops = self.program.ranks[0]
        return [op.collective.bytes for op in ops if op.collective is not None]

    @property
    def num_gradients(self) -> int:
        """How many messages one a gradient makes."""
        return len(self._sizes)

    @cached_property
    def compute_ms(self) -> float:
        """All kernels of forward and backward, one after the other, nothing beside."""
        return self.timeline("one").report().compute_ns / 1e6

    @property
    def costs(self) -> Costs:
        """What `choose_way` is told."""
        num_kernels = len(self.program.ranks[0]) - self.num_gradients
        return Costs(
            compute_ms=self.compute_ms,
            launch_ms=num_kernels * self.launch_us / 1e3,
            collective_ms=self.collective_us / 1e3,
            num_gradients=self.num_gradients,
            latency_ms=self.latency_us / 1e3,
            wire_ms=self._wire_ms(sum(self._sizes)),
            last_ms=self._wire_ms(self._sizes[-1]),
        )

    def _wire_ms(self, num_bytes: int) -> float:
        return collective_ns(self.hardware, "all_reduce", 2, num_bytes)[1] / 1e6

    def __str__(self) -> str:
        costs = self.costs
        return (
            f"{self.name}: compute {costs.compute_ms:.1f} ms, launches "
            f"{costs.launch_ms:.1f} ms, wire {costs.wire_ms:.1f} ms; "
            f"{costs.num_gradients} messages: {self.collective_us:g} us to launch, "
            f"{self.latency_us:g} us latency"
        )
