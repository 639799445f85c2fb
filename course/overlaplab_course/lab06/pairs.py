"""The twelve pairs of a model and a link that 6.4a asks for; no learner sees them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache

from overlaplab.grading.declared import Declared
from overlaplab.grading.laws import regret
from overlaplab_course.lab06.given import pack

LAB = Declared(__file__)


@dataclass(frozen=True)
class Case:
    """One backward pass and one link; none of them is in the lesson."""

    name: str  # what the model and the link are like
    model: tuple[int, int, int]  # layers, their width, tokens
    latency_ns: int  # alpha, the fixed cost of a message
    bytes_per_s: int  # payload per second, as the all-reduce of a large message sees it
    tflops: float = 500  # of the GPU
    # a "gpt" in bfloat16, or "narrow": small linear layers in float32
    kind: str = "gpt"
    vocabulary: int = 0  # rows of an embedding, which arrives last and costs no time

    @cached_property
    def _numels(self) -> tuple[int, ...]:
        layers, d, _ = self.model
        gpt = (4 * d * d, 4 * d * d, d, d * d, 3 * d * d, d)  # in the order of arrival
        return (gpt if self.kind == "gpt" else (d, d * d)) * layers

    @cached_property
    def grad_bytes(self) -> tuple[int, ...]:
        """The size of each gradient, in the order of arrival."""
        embedding = (self.vocabulary * self.model[1],) if self.vocabulary else ()
        itemsize = 2 if self.kind == "gpt" else 4
        return tuple(numel * itemsize for numel in (*self._numels, *embedding))

    @cached_property
    def ready_ns(self) -> tuple[int, ...]:
        """When each gradient is ready, from the start of the backward pass."""
        flops = (4 * numel * self.model[2] for numel in self._numels)
        took = (max(3_000, int(f / self.tflops / 1000)) for f in flops)
        ready = tuple(itertools.accumulate(took))
        return (*ready, ready[-1]) if self.vocabulary else ready

    def step_ns(self, cap_bytes: float) -> int:
        """From the start of the backward pass to the end of the last message.

        The same number as `replay` gives, which a test holds it to, in microseconds.
        """
        end_ns = 0
        for bucket in pack(self.grad_bytes, cap_bytes):
            total = sum(self.grad_bytes[i] for i in bucket)
            start_ns = max(end_ns, self.ready_ns[bucket[-1]])
            wire_ns = -(-total * 10**9 // self.bytes_per_s)
            end_ns = start_ns + self.latency_ns + wire_ns
        return end_ns

    @cached_property
    def best_cap_bytes(self) -> int:
        """Of 120 caps in equal ratios, smallest gradient to all, the one to take."""
        low, high = min(self.grad_bytes), sum(self.grad_bytes)
        caps = (int(low * (high / low) ** (k / 119)) + 1 for k in range(120))
        return min(caps, key=self.step_ns)

    @cached_property
    def worst_ns(self) -> int:
        """The worse of the two ends: one message per gradient, one for all."""
        return max(self.step_ns(1), self.step_ns(sum(self.grad_bytes)))

    def regret(self, cap_bytes: float) -> float:
        """0: as good as the best; 1: as bad as the worse end."""
        best_ns = self.step_ns(self.best_cap_bytes)
        return regret(self.step_ns(cap_bytes), best_ns, self.worst_ns)


@lru_cache(maxsize=1)
def cases() -> tuple[Case, ...]:
    """The twelve pairs of a model and a link."""
    (links,) = LAB.cases("6.4a", "links").values()
    (pairs,) = LAB.cases("6.4a", "pairs").values()
    return tuple(
        Case(pair.pop("name"), pair.pop("model"), *links[pair.pop("link")], **pair)
        for pair in map(dict, pairs)
    )
