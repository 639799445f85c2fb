"""One trace file, read: its rows, its labels, and what it says of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlaplab.profiling.trace.batches import Batches, Blocks
from overlaplab.profiling.trace.cpu import cpu_spans, host_spans
from overlaplab.profiling.trace.device import DeviceReader, clip, places
from overlaplab.profiling.trace.labels import Labels
from overlaplab.profiling.trace.names import Communication
from overlaplab.profiling.trace.rows import integer
from overlaplab.profiling.trace.tables import Place, Tables
from overlaplab.program.garbage import no_collections
from overlaplab.timeline import Span
from overlaplab.timeline.span import PROFILER_STEP


class TraceFile:
    """What one file holds, before its ranks are numbered.

    Attributes:
        rank: that the file says it is of, None if it says nothing.
        world_size: of the job, by the file; 0 if it says nothing.
        places: where kernels ran: a file of one process has one a device.
        base_ns: what its times count from.
        first_ns: of what becomes a span, on the clock of the machine; None if nothing.
        dropped: reason -> number of events.
        remarks: sentences.
    """

    def __init__(self, blocks: Blocks) -> None:
        """Read it; raises what `Batches` raises."""
        self.path = blocks.path
        self._tables = tables = Tables()
        batches = Batches(blocks)
        with no_collections():
            for batch in batches:
                tables.add(batch)
            tables.finish()
            self._labels = Labels(tables)
        self.num_events = tables.num_events
        self.dropped = tables.dropped + Counter(batches.dropped)
        self.remarks = list(batches.remarks)
        self.places: list[Place] = places(tables)
        self._fields = batches.fields
        self.rank = _number_of(batches.fields, "rank")
        self.world_size = _number_of(batches.fields, "world_size") or 0
        base = batches.fields.get("baseTimeNanoseconds")
        self.base_ns = base if type(base) is int else 0
        self.first_ns = self._first_ns()
        self._remark_on_rows()

    @property
    def is_own(self) -> bool:
        """Whether `ol.run` or `ol.profile` recorded it: they mark what they do."""
        return self._labels.is_own

    def busy_ns(self, place: Place) -> int:
        """How long kernels ran there, one after another."""
        return sum(
            row.end - row.start for row in self._tables.on_device if row.place == place
        )

    def device_name(self, place: Place) -> str:
        """ "NVIDIA H200", "" if the file does not say."""
        properties = self._fields.get("deviceProperties")
        for device in properties if isinstance(properties, list) else ():
            if isinstance(device, Mapping) and device.get("id") == place[1]:
                return str(device.get("name", ""))
        return ""

    def spans(
        self,
        rank_of: Mapping[Place, int],
        communication: Communication,
        *,
        shift_ns: int = 0,
        is_own: bool = False,
    ) -> list[Span]:
        """Everything that a timeline shows, on the clock of the machine + `shift_ns`.

        Args:
            rank_of: the rank of each place; of a file without devices, of one place.
            communication: what is communication.
            is_own: a run of ours was profiled; else only if its marks say so. If that
                used no device, its operators on the CPU are computation and gloo's
                transfers communication. Of others they are the host's.
        """
        shift_ns += self.base_ns
        with no_collections():
            if self.places:
                reader = DeviceReader(
                    self._tables, self._labels, communication, rank_of, shift_ns
                )
                spans = list(reader.spans())
                self._remark_on(reader)
            else:
                (rank,) = rank_of.values()
                if not self.num_events:
                    self._remark("has no events")
                    return []
                if is_own or self.is_own:
                    read, what = cpu_spans, "computation and gloo's as communication"
                else:
                    read, what = host_spans, "the host's, gloo's too"
                spans = list(read(self._tables, self._labels, rank, shift_ns))
                self._remark(
                    f"no GPU events; operators of the CPU count as {what}, so no "
                    "number here is about a GPU"
                )
        if self._labels.window is not None:
            start, end = (time + shift_ns for time in self._labels.window)
            spans = [span for span in spans if start <= span.start_ns <= end]
        return spans

    def _first_ns(self) -> int | None:
        tables = self._tables
        if self.places:
            starts = [row.start for row in tables.on_device]
            starts += [min(tables.calls.start)] if len(tables.calls) else []
        else:
            starts = [*tables.operators.start, *tables.annotations.start]
        return min(starts) + self.base_ns if starts else None

    def _remark_on_rows(self) -> None:
        if self.dropped:
            why = ", ".join(f"{reason} ({n})" for reason, n in self.dropped.items())
            self._remark(f"{sum(self.dropped.values())} events dropped: {why}")
        for step, num in self._labels.repeated.items():
            self._remark(
                f"{PROFILER_STEP}{step} stands {num} times: taken for one step"
            )
        if clipped := list(clip(self._tables.on_device)):
            row, lasted_ns = max(clipped, key=lambda pair: pair[1])
            self._remark(
                f"a stream works in order, and {row.name[:60]!r} lasts "
                f"{lasted_ns / 1000:.10g} us, beyond the start of the one behind it: "
                f"it counts until there ({len(clipped)} such GPU events)"
            )

    def _remark_on(self, reader: DeviceReader) -> None:
        in_no_step = "they count in the whole and in no step"
        unlaunched, num = reader.num_without_launch, reader.num_without_step
        if unlaunched:
            remark = f"GPU events without a launch record in the trace: {unlaunched}"
            if unlaunched == num:
                remark += f" (left over from the warm-up, perhaps); {in_no_step}"
            self._remark(remark)
        if num != unlaunched and num:
            self._remark(f"GPU events that no step launched: {num}; {in_no_step}")

    def _remark(self, sentence: str) -> None:
        self.remarks.append(f"{self.path.name}: {sentence}")


def shifted(span: Span, by_ns: int) -> Span:
    """The same, `by_ns` later, with the times among its attributes."""
    attributes = span.attributes
    for name in ("launch_ns", "ready_ns"):
        if name in attributes:
            attributes = {**attributes, name: attributes[name] + by_ns}
    return replace(
        span,
        start_ns=span.start_ns + by_ns,
        end_ns=span.end_ns + by_ns,
        attributes=attributes,
    )


def _number_of(fields: Mapping[str, Any], what: str) -> int | None:
    """Of "distributedInfo", None where it says nothing of use."""
    info = fields.get("distributedInfo")
    said = info.get(what) if isinstance(info, Mapping) else None
    try:
        number = None if said is None else integer(int(said))
    except (TypeError, ValueError, OverflowError):
        return None
    return None if number is None or number < 0 else number


def spans_from_trace(trace: bytes, rank: int) -> list[Span]:
    """Spans of what torch.profiler exported here, on the clock of the machine.

    The label of a span is the innermost profiler range around its launch; the step is
    the N of the enclosing `ProfilerStep#N`. If the trace holds a run that marked
    itself (`RUN_RANGE`), only what starts inside that range counts.

    Raises:
        TraceError: not a trace.
    """
    file = TraceFile(Blocks.of_text(trace))
    rank_of = dict.fromkeys(file.places or [("", 0)], rank)
    return file.spans(rank_of, Communication(), is_own=True)
