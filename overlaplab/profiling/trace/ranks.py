"""Files -> ranks, and what only several ranks know: who waited for whom, and whose
clock is off."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from statistics import median

from overlaplab.errors import TraceError
from overlaplab.profiling.trace.file import TraceFile, shifted
from overlaplab.profiling.trace.tables import Place
from overlaplab.timeline import Span, Timeline
from overlaplab.timeline.meetings import find_meetings

# Kernels of one collective end within tens of microseconds of one another on one
# clock; what is more is the clocks.
CLOCKS_AGREE_NS = 100_000
_NO_DEVICE: Place = ("", 0)
_POINT_TO_POINT = frozenset({"send", "recv", "send_recv"})
_RANK_IN_NAME = re.compile(r"rank[_\-.]?(\d+)", re.IGNORECASE)


def timeline_of_ranks(
    spans: Mapping[int, Sequence[Span]],
    *,
    origin: str,
    num_ranks: int | None = None,
) -> Timeline:
    """One timeline of many ranks' spans on one clock, shifted to start at 0."""
    every = [span for of_rank in spans.values() for span in of_rank]
    first_ns = min((span.start_ns for span in every), default=0)
    if first_ns:
        every = [shifted(span, -first_ns) for span in every]
    timeline = Timeline.of(every, origin=origin)
    return timeline if num_ranks is None else replace(timeline, num_ranks=num_ranks)


def number_ranks(
    files: Sequence[TraceFile],
) -> tuple[list[dict[Place, int]], list[str]]:
    """The rank of each place of each file, and remarks where that needed a decision.

    A file of one device is the rank that it names. Without a name a single file is
    rank 0, several are numbered by "rank_N" in their names, else by their order. A
    single file of several devices counts on from its rank; among several files its
    busiest device has its rank, the others come after all ranks.

    Raises:
        TraceError: two files are of one rank; the message names both.
    """
    remarks: list[str] = []
    own = _own_ranks(files, remarks)
    owner: dict[int, TraceFile] = {}
    for file, rank in zip(files, own, strict=True):
        if rank in owner:
            raise TraceError(
                f"{owner[rank].path} and {file.path} both say that they are of rank "
                f"{rank}. Give one of them, or mend 'distributedInfo' in the other."
            )
        owner[rank] = file
    free = count(max(own, default=-1) + 1)
    numbered: list[dict[Place, int]] = []
    for file, rank in zip(files, own, strict=True):
        places = file.places or [_NO_DEVICE]
        if len(files) > 1:
            places = sorted(places, key=file.busy_ns, reverse=True)
            ranks = [rank, *(next(free) for _ in places[1:])]
        else:
            ranks = list(range(rank, rank + len(places)))
        numbered.append(dict(zip(places, ranks, strict=True)))
        if len(places) > 1:
            said = ", ".join(
                f"rank {r} is device {device}"
                for (_, device), r in sorted(numbered[-1].items(), key=lambda p: p[1])
            )
            remarks.append(f"{file.path.name}: several devices; {said}")
    return numbered, remarks


def _own_ranks(files: Sequence[TraceFile], remarks: list[str]) -> list[int]:
    unnamed = [file for file in files if file.rank is None]
    if not unnamed:
        return [file.rank or 0 for file in files]
    if len(files) == 1:
        return [0]
    taken = {file.rank for file in files if file.rank is not None}
    found = [_RANK_IN_NAME.search(file.path.name) for file in unnamed]
    by_name = [int(match.group(1)) for match in found if match]
    if len({*by_name} - taken) == len(unnamed):
        numbers, how = iter(by_name), "by their names"
    else:
        numbers = (n for n in count() if n not in taken)
        how = "by their order"
    ranks = [next(numbers) if file.rank is None else file.rank for file in files]
    said = ", ".join(
        f"{file.path.name} {rank}"
        for file, rank in zip(files, ranks, strict=True)
        if file.rank is None
    )
    remarks.append(f"files that name no rank were numbered {how}: {said}")
    return ranks


def on_one_clock(
    of_rank: Mapping[int, Sequence[Span]], remarks: list[str]
) -> dict[int, list[Span]]:
    """Spans whose collectives know when their last rank had arrived ("ready_ns").

    Collectives are matched by communicator, step and number; where a trace has no steps
    and no numbers, only if they ran at one time. A collective's kernels end together,
    whenever they began: ranks whose clock is off by more than `CLOCKS_AGREE_NS` are
    shifted, and a remark says so. Where the ends still disagree by more, or one comes
    before the last start, the clocks do not show who was last: no "ready_ns".
    """
    spans = {rank: list(of_rank[rank]) for rank in sorted(of_rank)}
    meetings = list(_meetings(spans))
    offsets = _offsets(spans, meetings)
    for rank, offset in offsets.items():
        if abs(offset) > CLOCKS_AGREE_NS:
            remarks.append(
                f"the clock of rank {rank} is {abs(offset) / 1000:.0f} us "
                f"{'ahead' if offset > 0 else 'behind'}, by the ends of its "
                "collectives; its times were shifted"
            )
            spans[rank] = [shifted(span, -offset) for span in spans[rank]]
    for meeting in meetings:
        met = [spans[rank][i] for rank, i in meeting]
        ready_ns = max(span.start_ns for span in met)
        ends_ns = [span.end_ns for span in met]
        if max(ends_ns) - min(ends_ns) > CLOCKS_AGREE_NS or ready_ns > min(ends_ns):
            continue
        for (rank, i), span in zip(meeting, met, strict=True):
            attributes = {**span.attributes, "ready_ns": ready_ns}
            spans[rank][i] = replace(span, attributes=attributes)
    return spans


_Key = tuple[object, tuple[int, ...], int, object]  # communicator, ranks, size, step
Meeting = list[tuple[int, int]]  # (rank, index of its span)


def _meetings(spans: Mapping[int, Sequence[Span]]) -> Iterator[Meeting]:
    """Collectives of which every rank's kernel is known, and which agree."""
    where = [
        (rank, i)
        for rank, of_rank in spans.items()
        for i, span in enumerate(of_rank)
        if span.kind == "communication" and "stream" in span.attributes
    ]
    every = [spans[rank][i] for rank, i in where]
    for together in find_meetings(every, range(len(every)), lambda k: _key(every[k])):
        met = [every[k] for k in together]
        _, group, size, step = _key(met[0])
        members = set(group) or set(spans)
        if {span.rank for span in met} != members or size not in (0, len(members)):
            continue
        if len(members) < 2 or met[0].name in _POINT_TO_POINT:
            continue
        numbers = {span.attributes.get("sequence") for span in met}
        # Recordings that begin at different collectives count them differently.
        numbered = step is not None or None not in numbers
        together_ns = min(s.end_ns for s in met) - max(s.start_ns for s in met)
        if len(numbers) == 1 and (numbered or together_ns > 0):
            yield [where[k] for k in together]


def _key(span: Span) -> _Key:
    about = span.attributes
    communicator = about.get("communicator", span.lane)
    group, size = tuple(about.get("group_ranks", ())), about.get("group_size", 0)
    return communicator, group, size, about.get("step")


def _offsets(
    spans: Mapping[int, Sequence[Span]], meetings: Sequence[Meeting]
) -> dict[int, int]:
    """How far each rank's clock is ahead of the first's, where they met."""
    ends: dict[int, list[int]] = defaultdict(list)
    first = min(spans, default=0)
    for meeting in meetings:
        end_ns = {rank: spans[rank][i].end_ns for rank, i in meeting}
        if first in end_ns:
            for rank, end in end_ns.items():
                ends[rank].append(end - end_ns[first])
    return {rank: int(median(differences)) for rank, differences in ends.items()}
