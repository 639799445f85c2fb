"""`read_trace`: files of torch.profiler, of any rank and version, as one timeline."""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson

from overlaplab.errors import TraceError
from overlaplab.profiling.kineto import spans_from_trace, timeline_of_ranks
from overlaplab.timeline import Source, Span, Timeline

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def read_trace(paths: Paths, *, communication: Sequence[str] = ()) -> Timeline:
    """The timeline of one trace, of several, or of a folder of ranks.

    Args:
        paths: a file (.json or .json.gz, by its content), several, or a folder.
        communication: more patterns (regular expressions) of kernels that communicate.

    Returns:
        A timeline of origin "trace", from 0; `source` says what was read and dropped.

    Raises:
        TraceError: no trace, or damaged beyond use; with file and offset.
    """
    files = _files(paths)
    of_rank: dict[int, list[Span]] = {}
    file_of_rank: dict[int, Path] = {}
    num_events = 0
    for file in files:
        data = file.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        trace = orjson.loads(data)
        rank = int(trace.get("distributedInfo", {}).get("rank", 0))
        if rank in of_rank:
            raise TraceError(f"{file_of_rank[rank]} and {file} both are of rank {rank}")
        file_of_rank[rank] = file
        of_rank[rank] = spans_from_trace(trace, rank)
        num_events += len(trace["traceEvents"])
    timeline = timeline_of_ranks(of_rank, origin="trace")
    ranks = sorted(file_of_rank)
    source = Source(tuple(str(file_of_rank[rank]) for rank in ranks), (), num_events)
    return replace(timeline, source=source)


def _files(paths: Paths) -> list[Path]:
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    files: list[Path] = []
    for path in map(Path, paths):
        files.extend(sorted(path.glob("*.json*")) if path.is_dir() else [path])
    return files
