"""The bytes that a rank holds, over time: what a lane of memory shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Memory:
    """Live device memory of one rank.

    An allocator works in the order of the CPU, which runs ahead of the device. Bytes
    are counted in that order, and each step stands where the device comes to it: at
    the start of the first operator that was launched after it. So the peak is exact,
    and the shape is that of the step.

    Args:
        rank: whose.
        steps: ((time_ns, bytes), ...), times ascending: from each time until the next,
            so many bytes are allocated.
        holders: ((name, bytes), ...): the largest allocations at the peak, largest
            first; by the name that the user gave, else by the operator that filled it.
    """

    rank: int
    steps: tuple[tuple[int, int], ...]
    holders: tuple[tuple[str, int], ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated at any time."""
        return max((size for _, size in self.steps), default=0)

    @property
    def peak_ns(self) -> int:
        """When that was first reached, 0 if nothing was allocated."""
        peak = self.peak_bytes
        return next((time for time, size in self.steps if size == peak), 0)
