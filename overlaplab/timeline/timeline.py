"""A run, as it happened: an immutable, ordered set of spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from overlaplab.timeline.span import Span


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened, when.

    Args:
        spans: ordered by (start_ns, rank, lane, end_ns, program order).
        causes: for each span the index (in `spans`) of the span whose end let it
            start, or None where nothing did (it starts the step) or nobody knows
            (a measured run: `critical_path` then infers it from the times). A
            collective's cause is what held up the *last* rank to arrive; a host
            wait's cause is the span that it waited for.
        num_ranks: ranks that are drawn.
        represents: how many ranks each drawn one stands for.
        origin: "virtual", "gloo", "nccl" or "trace".
        hardware: name of the profile that timed it, "" if it was measured.
    """

    spans: tuple[Span, ...]
    causes: tuple[int | None, ...] = ()
    num_ranks: int = 1
    represents: int = 1
    origin: str = "virtual"
    hardware: str = ""

    @staticmethod
    def of(spans: Iterable[Span], *, origin: str = "trace") -> Timeline:
        """Order measured spans; causes are unknown."""
        ordered = tuple(
            sorted(spans, key=lambda s: (s.start_ns, s.rank, s.lane, s.end_ns))
        )
        ranks = {s.rank for s in ordered}
        return Timeline(ordered, num_ranks=max(ranks, default=0) + 1, origin=origin)

    def lanes(self, rank: int) -> Sequence[str]:
        """The lanes of `rank`, CPU first, in the order of their first span."""
        seen = dict.fromkeys(s.lane for s in self.spans if s.rank == rank)
        return sorted(seen, key=lambda lane: lane != "cpu")
