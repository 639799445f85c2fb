"""What each double buffer costs and wins: training jobs on hardware profiles.

A job is a program of sixteen steps on one profile. What is not doubled stands in line
on the compute stream; what is doubled goes beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from typing import Any

from overlaplab.grading.laws import regret
from overlaplab.hardware import find_hardware
from overlaplab.program import Program, ProgramBuilder, resolve
from overlaplab.timeline import Timeline
from overlaplab_course import stored

BUFFERS = ("batch", "gradients", "weights")
CHOICES = tuple(c for n in range(4) for c in combinations(BUFFERS, n))
STEPS, LAYERS = 16, 8
_MIB = 2**20


@dataclass(frozen=True)
class Job:
    """One training on one machine, in bfloat16.

    Args:
        name: "a language model, long sequences".
        profile: of the hardware.
        num_ranks: so many.
        layer_mib: weights of each of the eight layers.
        tokens: on each rank; they set what a step computes.
        batch_mib: what is copied for a step.
        every: after so many steps the weights are copied to the host; 0: never.
        free_mib: memory for second buffers.
    """

    name: str
    profile: str
    num_ranks: int
    layer_mib: int
    tokens: int
    batch_mib: int
    every: int
    free_mib: int

    @property
    def mib(self) -> dict[str, int]:
        """What a second buffer takes."""
        weights = LAYERS * self.layer_mib
        return {"batch": self.batch_mib, "gradients": weights, "weights": weights}

    def bytes_of(self, choice: Collection[str]) -> int:
        """MiB of second buffers."""
        return sum(self.mib[name] for name in choice)

    def program(self, choice: Collection[str]) -> Program:
        """Sixteen steps with the buffers of `choice` doubled."""
        b = ProgramBuilder(num_ranks=1, represents=self.num_ranks)
        flops = 2 * self.tokens * self.layer_mib * _MIB // 2
        size, sent, read = self.layer_mib * _MIB, list[int](), list[tuple[int, ...]]()
        for step in range(STEPS):
            where: dict[str, Any] = {"label": f"step {step}"}
            self._bring(b, choice, read, step)
            for _ in range(LAYERS):
                b.compute(0, "forward", flops=flops, dtype="bfloat16", **where)
            works = []
            for _ in range(LAYERS):
                b.compute(0, "backward", flops=2 * flops, dtype="bfloat16", **where)
                works.append(b.collective(0, "all_reduce", bytes=size))
            late = "gradients" in choice
            for work in sent if late else works:
                b.wait(0, work)
            sent = works
            b.compute(0, "update", read_bytes=8 * LAYERS * size, **where)
            read.append(b.record_event(0))
            if self.every and step % self.every == 0:
                self._publish(b, choice)
        for work in sent if "gradients" in choice else ():
            b.wait(0, work)
        return b.build()

    def _bring(
        self,
        b: ProgramBuilder,
        choice: Collection[str],
        read: Sequence[tuple[int, ...]],
        step: int,
    ) -> None:
        """The batch of a step: in line, or beside the step before."""
        stream = "copying" if "batch" in choice else "default"
        if stream == "copying" and step > 1:
            b.wait_event(0, stream, read[step - 2])
        b.copy(0, "h2d", bytes=self.batch_mib * _MIB, stream=stream)
        if stream == "copying":
            b.wait_stream(0, "default", stream)

    def _publish(self, b: ProgramBuilder, choice: Collection[str]) -> None:
        """The weights to the host: in line, or beside the steps that follow."""
        stream = "publishing" if "weights" in choice else "default"
        if stream == "publishing":
            b.wait_stream(0, stream, "default")
        b.copy(0, "d2h", bytes=LAYERS * self.layer_mib * _MIB, stream=stream)

    def timed(self, choice: Collection[str]) -> Timeline:
        """Its steps on its machine."""
        return resolve(self.program(choice), find_hardware(self.profile))

    def step_ms(self, choice: Collection[str]) -> float:
        """A step, the mean over the sixteen."""
        return self._steps[tuple(name for name in BUFFERS if name in choice)]

    @cached_property
    def _steps(self) -> Mapping[tuple[str, ...], float]:
        return {c: self.timed(c).step_ns / 1e6 / STEPS for c in CHOICES}

    @cached_property
    def ms(self) -> dict[str, float]:
        """What a step takes of everything where nothing is doubled.

        The computing is what it takes beside the messages, which slow it on some links.
        """
        timeline = self.timed(())
        took = {"h2d": 0, "d2h": 0, "messages": 0}
        for span in timeline.spans:
            if span.kind == "memcpy":
                took[str(span.attributes["direction"])] += span.duration_ns
            elif span.kind == "communication":
                took["messages"] += span.duration_ns
        exposed_ns = timeline.report().exposed_ns
        compute_ns = timeline.step_ns - exposed_ns - took["h2d"] - took["d2h"]
        every = {
            "compute": compute_ns,
            "copy": took["h2d"],
            "messages": took["messages"],
            "exposed": exposed_ns,
            "publish": took["d2h"],
        }
        return {name: time_ns / 1e6 / STEPS for name, time_ns in every.items()}

    @property
    def fitting(self) -> list[tuple[str, ...]]:
        """Choices whose second buffers fit."""
        return [c for c in CHOICES if self.bytes_of(c) <= self.free_mib]

    @property
    def best_ms(self) -> float:
        """The shortest step of those that fit."""
        return min(map(self.step_ms, self.fitting))

    def regret(self, choice: Collection[str]) -> float:
        """What a choice that fits loses of what there was to gain.

        Nothing where the step is within 1 % of the best.
        """
        if self.step_ms(choice) <= 1.01 * self.best_ms:
            return 0.0
        steps = (self.step_ms(choice), self.best_ms, self.step_ms(()))
        return regret(*(round(1e6 * step) for step in steps))

    def wasted(self, choice: Collection[str]) -> Iterator[str]:
        """Buffers without which the step is as short, to half a percent."""
        for name in choice:
            less = [other for other in choice if other != name]
            if self.step_ms(less) <= 1.005 * self.step_ms(choice):
                yield name


EXAMPLE = Job("images", "ethernet-100g", 8, 24, 24000, 400, 4, 10**6)

EXAMPLE_IB = Job("language, 4 nodes", "h100-ib400", 32, 200, 1024, 1, 16, 10**6)


@lru_cache(maxsize=4)
def bill_table(job: Job = EXAMPLE) -> str:
    """Step and memory of every choice."""
    alone = job.step_ms(())
    rows = [
        (
            " + ".join(choice) or "nothing",
            f"{job.step_ms(choice):.1f}",
            f"{alone - job.step_ms(choice):.1f}",
            f"{job.bytes_of(choice)}",
        )
        for choice in CHOICES
    ]
    return stored.text_table(("doubled", "step, ms", "won, ms", "MiB more"), rows)


_GRADIENTS, _GRADIENT_MIB, _BACKWARD_MS = 48, 8, 1


def _bucketed(profile: str, cap_mib: int) -> float:
    """The backward pass and its messages in ms, with two flat buckets in turn."""
    hardware = find_hardware(profile)
    flops = hardware.flops_per_s["bfloat16"] * _BACKWARD_MS // 1000
    b = ProgramBuilder(num_ranks=1, represents=8)
    works, held = list[int](), 0
    for gradient in range(1, _GRADIENTS + 1):
        if held == 0 and len(works) > 1:
            b.wait(0, works[-2])  # the bucket that is filled now has left
        b.compute(0, "backward", flops=flops, dtype="bfloat16")
        held += _GRADIENT_MIB
        size = _GRADIENT_MIB * _MIB
        b.compute(0, "fill", read_bytes=size, write_bytes=size)
        if held >= cap_mib or gradient == _GRADIENTS:
            works.append(b.collective(0, "all_reduce", bytes=held * _MIB))
            held = 0
    for work in works[-2:]:
        b.wait(0, work)
    b.compute(0, "update", read_bytes=1)
    return resolve(b.build(), hardware).step_ns / 1e6


def buckets_table(caps: Sequence[int] = (8, 16, 32, 64, 128, 192)) -> str:
    """Step and memory by the cap of two flat buckets, on a fast and a slow link."""
    profiles = ("h200-nvlink", "ethernet-100g")
    rows = [
        (str(cap), str(2 * cap), *(f"{_bucketed(p, cap):.1f}" for p in profiles))
        for cap in caps
    ]
    head = ("cap, MiB", "two, MiB", *(f"{profile}, ms" for profile in profiles))
    return stored.text_table(head, rows)
