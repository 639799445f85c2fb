"""A run, as it happened: an immutable, ordered set of spans."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from overlaplab.errors import plural
from overlaplab.timeline import chrome
from overlaplab.timeline import critical_path as _path
from overlaplab.timeline import report as _report
from overlaplab.timeline.critical_path import CriticalPath
from overlaplab.timeline.report import Report
from overlaplab.timeline.span import KINDS, NO_SOURCE, Memory, Source, Span, lanes_of

PageWriter = Callable[
    ["Timeline", str | os.PathLike[str], "Timeline | None", str | Sequence[str]], Path
]
# A timeline has the name `save_html` and knows no pictures: overlaplab/__init__.py,
# which stands above all rooms, hands in the writer of `view`.
_page_writer: PageWriter | None = None


def set_page_writer(writer: PageWriter) -> None:
    """Decide what `Timeline.save_html` does."""
    global _page_writer
    _page_writer = writer


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
        memory: of each rank that allocated anything, where known.
        source: the files that it was read from, and what was left out.
    """

    spans: tuple[Span, ...]
    causes: tuple[int | None, ...] = ()
    num_ranks: int = 1
    represents: int = 1
    origin: str = "virtual"
    hardware: str = ""
    memory: tuple[Memory, ...] = ()
    source: Source = NO_SOURCE

    def __repr__(self) -> str:
        """One line: a timeline has thousands of spans."""
        steps = f", {plural(len(self.steps), 'step')}" if self.steps else ""
        ranks = plural(self.num_ranks, "rank")
        return (
            f"<Timeline of {ranks}{steps}: {len(self.spans)} spans in "
            f"{self.end_ns - self.start_ns} ns, {self.origin}>"
        )

    @staticmethod
    def of(spans: Iterable[Span], *, origin: str = "trace") -> Timeline:
        """Order measured spans; causes are unknown."""
        ordered = tuple(
            sorted(spans, key=lambda s: (s.start_ns, s.rank, s.lane, s.end_ns))
        )
        ranks = {s.rank for s in ordered}
        return Timeline(ordered, num_ranks=max(ranks, default=0) + 1, origin=origin)

    def lanes(self, rank: int) -> Sequence[str]:
        """The lanes of `rank`: CPU, "default", communicators, then other streams."""
        return lanes_of(self.spans, rank)

    @property
    def start_ns(self) -> int:
        """First start over all ranks, 0 if nothing happened."""
        return self.spans[0].start_ns if self.spans else 0

    @property
    def end_ns(self) -> int:
        """Last end over all ranks, 0 if nothing happened."""
        return max((s.end_ns for s in self.spans), default=0)

    @property
    def step_ns(self) -> int:
        """The slowest rank's time from its first start to its last end."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for span in self.spans:
            first[span.rank] = min(span.start_ns, first.get(span.rank, span.start_ns))
            last[span.rank] = max(span.end_ns, last.get(span.rank, span.end_ns))
        return max((last[rank] - first[rank] for rank in first), default=0)

    def report(self) -> Report:
        """What was computed, sent, hidden, exposed, saved; `Report` defines each."""
        return _report.report(self.spans)

    def critical_path(self) -> CriticalPath:
        """The chain that the step is as long as; `CriticalPath` defines its shares."""
        return _path.critical_path(self.spans, self.causes)

    def order(self, kinds: Collection[str] = KINDS) -> str:
        """The spans of these kinds, one a line, for comparison with a literal text.

        >>> Timeline.of([Span(0, "default", "compute", "mm", 5, 105)]).order()
        '0 default mm 5-105'
        """
        return "\n".join(
            f"{s.rank} {s.lane} {s.name} {s.start_ns}-{s.end_ns}"
            for s in self.spans
            if s.kind in kinds
        )

    def where(self, keep: Callable[[Span], bool]) -> Timeline:
        """The spans for which `keep` is true; a cause that is not kept is unknown."""
        kept = [i for i, span in enumerate(self.spans) if keep(span)]
        new_index: dict[int | None, int] = {old: new for new, old in enumerate(kept)}
        causes = tuple(new_index.get(self.causes[i]) for i in kept if self.causes)
        return replace(self, spans=tuple(self.spans[i] for i in kept), causes=causes)

    def of_rank(self, rank: int) -> Timeline:
        """One rank's spans and memory.

        Raises:
            ValueError: the timeline has no such rank; the message lists its ranks.
        """
        ranks = sorted({span.rank for span in self.spans})
        if rank not in ranks:
            raise ValueError(f"no rank {rank!r} in this timeline; it has {ranks}")
        memory = tuple(m for m in self.memory if m.rank == rank)
        return replace(self.where(lambda span: span.rank == rank), memory=memory)

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the steps, ascending; () if nobody marked any.

        A step is what was launched in a range that marks one: `annotate("step 3")` in
        any run, `ol.profile`'s own, or a trace's `ProfilerStep#3`. What was launched
        outside (the construction of a model) belongs to none.
        """
        found = (s.attributes.get("step") for s in self.spans)
        return tuple(sorted({step for step in found if step is not None}))

    def of_step(self, step: int) -> Timeline:
        """What was launched in one step: spans by their attribute "step".

        Raises:
            ValueError: the timeline has no such step; the message lists its steps.
        """
        if step not in self.steps:
            raise ValueError(f"no step {step!r} in this timeline; it has {self.steps}")
        return self.where(lambda span: span.attributes.get("step") == step)

    def between(self, start_ns: int, end_ns: int) -> Timeline:
        """The spans that lie within [start_ns, end_ns], for one step of several."""
        return self.where(lambda s: start_ns <= s.start_ns and s.end_ns <= end_ns)

    def to_chrome(self, path: str | os.PathLike[str]) -> Path:
        """Write a trace for https://ui.perfetto.dev; see `chrome.write_chrome`."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return chrome.write_chrome(own, path)

    def save_html(
        self,
        path: str | os.PathLike[str],
        beside: Timeline | None = None,
        *,
        title: str | Sequence[str] = "",
    ) -> Path:
        """Write one interactive page that needs no network; see `view.page`.

        Args:
            path: usually "NAME.html"; the folder must exist.
            beside: a second timeline, under this one on the same scale.
            title: over it; two for two.
        """
        assert _page_writer is not None, "overlaplab/__init__.py sets it"
        return _page_writer(self, path, beside, title)

    @staticmethod
    def from_chrome(path: str | os.PathLike[str]) -> Timeline:
        """Read what `to_chrome` wrote; see `chrome.read_chrome` for its errors."""
        return Timeline(**chrome.read_chrome(path))
