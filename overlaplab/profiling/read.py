"""`read_trace`: files of torch.profiler, of any rank and version, as one timeline."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from overlaplab.errors import TraceError
from overlaplab.profiling.trace.batches import (
    BLOCK_BYTES,
    Blocks,
    NotATraceError,
    OwnTimelineError,
)
from overlaplab.profiling.trace.file import TraceFile
from overlaplab.profiling.trace.names import Communication
from overlaplab.profiling.trace.ranks import (
    number_ranks,
    on_one_clock,
    timeline_of_ranks,
)
from overlaplab.program.garbage import no_collections
from overlaplab.timeline import Source, Span, Timeline

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def read_trace(
    paths: Paths,
    *,
    communication: Sequence[str] = (),
    block_bytes: int = BLOCK_BYTES,
) -> Timeline:
    """The timeline of one trace, of several, or of a folder of ranks.

    Reads what `torch.profiler` writes (of any version, for NVIDIA and AMD), plain or
    gzip, whole or damaged, and what `Timeline.to_chrome` writes. A rank is one device
    of one process; kernels whose names match a pattern are communication, all other
    kernels computation; copies, fills, synchronisation and annotations are neither.
    A span belongs to the step in which the CPU launched it. In a file without any GPU
    event all is the host's, unless `ol.run` or `ol.profile` recorded a run on CPUs.

    Args:
        paths: a file (.json or .json.gz, by its content), several, or a folder, of
            which all traces are read.
        communication: more patterns (regular expressions, case ignored) of kernels
            that communicate.
        block_bytes: how much of a file to read at a time.

    Returns:
        A timeline of origin "trace", from 0. `source` says what was read, dropped
        and decided, and by which patterns kernels counted as communication.

    Raises:
        TraceError: no trace, damaged beyond use, or two of one rank; the message has
            the file, the offset and what to do.
        ValueError: a pattern is no regular expression, or matches every name.
        TypeError: an argument is of another type.
    """
    if not isinstance(block_bytes, int):
        raise TypeError(f"block_bytes={block_bytes!r}; expected a whole number")
    if block_bytes < 1:
        raise ValueError(f"block_bytes={block_bytes}; expected at least 1")
    known = Communication(communication)
    with no_collections():
        return _read(paths, known, block_bytes)


def _read(paths: Paths, known: Communication, block_bytes: int) -> Timeline:
    remarks: list[str] = []
    read = _read_files(paths, block_bytes, remarks)
    if isinstance(read, Timeline):
        return read
    numbered, decisions = number_ranks(read)
    ready = sorted(zip(read, numbered, strict=True), key=lambda f: min(f[1].values()))
    first_ns = min((f.first_ns for f in read if f.first_ns is not None), default=0)
    of_rank: dict[int, list[Span]] = {}
    dropped: Counter[str] = Counter()
    devices: dict[int, str] = {}
    for file, rank_of in ready:
        for span in file.spans(rank_of, known, shift_ns=-first_ns):
            of_rank.setdefault(span.rank, []).append(span)
        dropped.update(file.dropped)
        remarks += file.remarks
        for place, rank in rank_of.items():
            if name := file.device_name(place):
                devices[rank] = name
    if len(of_rank) > 1:
        of_rank = on_one_clock(of_rank, decisions)
    # Not everything that a file has became a span: the first may start later.
    first_ns += min((s.start_ns for of in of_rank.values() for s in of), default=0)
    timeline = timeline_of_ranks(of_rank, origin="trace")
    kinds = {span.kind for span in timeline.spans}
    if "communication" not in kinds and any(f.places or not f.is_own for f in read):
        decisions.append("no communication kernels found")
        if any(f.places and f.world_size > 1 for f in read):
            decisions.append(_candidates(timeline, max(f.world_size for f in read)))
    source = Source(
        files=tuple(str(file.path) for file, _ in ready),
        devices=tuple(sorted(devices.items())),
        num_events=sum(file.num_events for file in read),
        dropped=tuple(sorted(dropped.items())),
        communication_names=known.patterns,
        remarks=(*decisions, *remarks),
        zero_ns=first_ns,
    )
    return replace(timeline, source=source)


def _candidates(timeline: Timeline, world_size: int) -> str:
    """Which kernels of a job of many ranks may be those that communicate."""
    found: dict[str, Counter[str]] = {}
    for span in timeline.spans:
        if span.kind == "compute":
            name = str(span.attributes.get("kernel") or span.name)[:80]
            found.setdefault(span.lane, Counter())[name] += 1
    if len(found) > 2:  # the stream that computes most is the least suspect
        found.pop("default", None)
    streams = "; ".join(
        f"{lane}: " + ", ".join(f"{name!r} ({n}x)" for name, n in of.most_common(3))
        for lane, of in [*found.items()][:5]
    )
    return (
        f"a job of {world_size} ranks, and no kernel has a name that is known to "
        f"communicate. Kernels by stream: {streams}. If one communicates, name it: "
        "--communication PATTERN, read_trace(..., communication=[PATTERN])"
    )


def _read_files(
    paths: Paths, block_bytes: int, remarks: list[str]
) -> list[TraceFile] | Timeline:
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(given, Sequence) or not all(
        isinstance(path, str | os.PathLike) for path in given
    ):
        raise TypeError(f"{paths!r} is no path; expected a file, a folder or several")
    if not given:
        raise ValueError("read_trace([]): no path given")
    if any(os.fspath(path) == "" for path in given):
        raise ValueError("a path is empty: ''. Is a variable of the shell not set?")
    files: list[TraceFile] = []
    for path in map(Path, given):
        found: list[TraceFile] | Path
        if path.is_dir():
            found = _read_folder(path, block_bytes, remarks)
        else:
            try:
                found = [TraceFile(Blocks(path, block_bytes=block_bytes))]
            except OwnTimelineError:
                found = path
        if isinstance(found, list):
            files += found
        elif len(given) == 1:
            return Timeline.from_chrome(found)
        else:
            raise TraceError(
                f"{found}: a timeline that Timeline.to_chrome wrote; read it alone"
            )
    return files


def _read_folder(
    folder: Path, block_bytes: int, remarks: list[str]
) -> list[TraceFile] | Path:
    """Its traces; if it has none, the one timeline of ours in it."""
    files, ignored, own = [], [], []
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise TraceError(f"{folder}: cannot be read ({error.strerror})") from error
    for path in inside:
        if path.name.startswith("."):  # of the system, or not written to its end
            ignored.append(path.name)
            continue
        try:
            files.append(TraceFile(Blocks(path, block_bytes=block_bytes)))
        except OwnTimelineError:
            own.append(path)
        except NotATraceError:
            ignored.append(path.name)
    if not files and len(own) == 1:
        return own[0]
    if not files and own:
        raise TraceError(
            f"{folder}: {len(own)} timelines that Timeline.to_chrome wrote, each a run "
            f"of its own, and no trace: {', '.join(path.name for path in own)}. "
            "Give one of them."
        )
    ignored = sorted([*ignored, *(path.name for path in own)])
    if not files:
        folders = sorted(path.name for path in folder.iterdir() if path.is_dir())
        raise TraceError(
            f"{folder}: no trace among its {len(inside)} files (folders in it: "
            f"{', '.join(folders[:5]) or 'none'}). "
            "Give the folder that holds the files of torch.profiler."
        )
    if ignored:
        remarks.append(f"{folder.name}: no traces, ignored: {', '.join(ignored)}")
    return files
