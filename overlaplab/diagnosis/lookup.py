"""Finds spans of one timeline: what a rank's device did next, and who launched it.

Knows where to look in a measured run (attribute "launch_ns") and in a virtual one (the
launch has the same "op"); no meaning of what it finds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence

from overlaplab.timeline import CPU_LANE, Span, Timeline
from overlaplab.timeline.critical_path import is_wait

COPIES = ("memcpy", "memset")


class Lookup:
    """The spans of `timeline`, ready to be asked."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.spans = timeline.spans
        device: dict[int, list[int]] = defaultdict(list)
        cpu: dict[int, list[int]] = defaultdict(list)
        for index, span in enumerate(timeline.spans):
            if span.lane == CPU_LANE or span.kind in ("launch", "host"):
                cpu[span.rank].append(index)
            else:
                device[span.rank].append(index)
        self._device, self._cpu = dict(device), dict(cpu)
        self._compute = {
            rank: [i for i in of if self.spans[i].kind == "compute"]
            for rank, of in device.items()
        }
        self._compute_ends = {
            rank: sorted((self.spans[i].end_ns, i) for i in of)
            for rank, of in self._compute.items()
        }
        self._launches = self._find_launches()
        self._acts = {rank: self._find_acts(rank) for rank in device}

    @property
    def ranks(self) -> Sequence[int]:
        return sorted({*self._device, *self._cpu})

    def device(self, rank: int) -> Sequence[int]:
        """Indices of what ran on the rank's device, by start."""
        return self._device.get(rank, ())

    def cpu(self, rank: int) -> Sequence[int]:
        """Indices of the CPU lane's spans, by start."""
        return self._cpu.get(rank, ())

    def waits(self, rank: int) -> Sequence[Span]:
        """The CPU's waits for the device, by start."""
        return [self.spans[i] for i in self.cpu(rank) if is_wait(self.spans[i])]

    def works(self, rank: int) -> Sequence[Span]:
        """What the CPU does itself, such as loading a batch, by start."""
        spans = [self.spans[i] for i in self.cpu(rank)]
        return [s for s in spans if s.kind == "host" and not is_wait(s)]

    def quiet_since(self, rank: int, time_ns: int) -> int | None:
        """When the CPU last launched something or waited, before it did at `time_ns`;
        None where that is not known."""
        acts = self._acts[rank]
        place = bisect_left(acts, time_ns)
        return acts[place - 1] if place else None

    def next_on_device(self, rank: int, time_ns: int) -> int | None:
        """What starts first on the device, at `time_ns` or later."""
        return self._first(self.device(rank), time_ns)

    def next_compute(self, rank: int, time_ns: int) -> int | None:
        """The computation that starts first, at `time_ns` or later."""
        return self._first(self._compute.get(rank, ()), time_ns)

    def _first(self, indices: Sequence[int], time_ns: int) -> int | None:
        place = bisect_left(indices, time_ns, key=lambda i: self.spans[i].start_ns)
        return indices[place] if place < len(indices) else None

    def writer(self, index: int) -> int | None:
        """The computation that ended last before a collective and is not its own part.

        A reducer's own kernels (a flag, a copy) have the label of its collective.
        """
        span = self.spans[index]
        label = span.attributes.get("label")
        ends = self._compute_ends.get(span.rank, [])
        place = bisect_right(ends, (span.start_ns, len(self.spans)))
        for _, found in reversed(ends[max(0, place - 8) : place]):
            if not label or self.spans[found].attributes.get("label") != label:
                return found
        return ends[place - 1][1] if place else None

    def launch(self, index: int) -> tuple[int, int] | None:
        """[begin, end) of the CPU's call that launched a device span, if known.

        Where only the begin is known, both are the begin.
        """
        span = self.spans[index]
        begin_ns = span.attributes.get("launch_ns")
        if isinstance(begin_ns, int):
            only_begin = (begin_ns, begin_ns)
            return self._launches.get((span.rank, "at", begin_ns), only_begin)
        op = span.attributes.get("op")
        return None if op is None else self._launches.get((span.rank, "op", op))

    def _find_acts(self, rank: int) -> list[int]:
        """Ends of the CPU's launches and waits, ascending."""
        own = [self.spans[i] for i in self.cpu(rank)]
        ends = [s.end_ns for s in own if s.kind == "launch" or is_wait(s)]
        begins = (self.spans[i].attributes.get("launch_ns") for i in self.device(rank))
        return sorted([*ends, *(ns for ns in begins if isinstance(ns, int))])

    def _find_launches(self) -> dict[tuple[int, str, int], tuple[int, int]]:
        found: dict[tuple[int, str, int], tuple[int, int]] = {}
        for of_rank in self._cpu.values():
            for index in of_rank:
                span = self.spans[index]
                if span.kind != "launch":
                    continue
                times = span.start_ns, span.end_ns
                found[span.rank, "at", span.start_ns] = times
                if "op" in span.attributes:
                    found[span.rank, "op", span.attributes["op"]] = times
        return found
