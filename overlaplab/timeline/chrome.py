"""A timeline as Chrome-trace JSON, which Perfetto opens, and back without loss.

A rank is a process and a lane a thread. The format's `ts` and `dur` are microseconds;
the exact nanoseconds, the causes and all else are in `args`, and `from_chrome` reads
only those. A trace of the PyTorch profiler is another dialect: `overlaplab.profiling`
reads it.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import orjson
from msgspec import Meta, Struct, ValidationError, convert

from overlaplab.errors import TraceError
from overlaplab.files import write_whole
from overlaplab.timeline.span import (
    NO_ATTRIBUTES,
    Kind,
    Memory,
    Source,
    Span,
    lanes_of,
)

# A timeline as its fields by name: `Timeline` itself stands above this module.
Fields = Mapping[str, Any]
_PLAIN = ("num_ranks", "represents", "origin", "hardware")
MOST_BYTES = 256 << 20  # of a file, unzipped; as objects they take several times that
_LARGEST = 1 << 62
_INTEGERS = {"step", "launch_ns", "ready_ns", "alone_ns", "group_size"}
FORMAT = 1  # of otherData.overlaplab; a file of another number is refused
_Time = Annotated[int, Meta(ge=-_LARGEST, le=_LARGEST)]
_Amount = Annotated[int, Meta(ge=0, le=_LARGEST)]


class _Args(Struct):
    lane: str
    start_ns: _Time
    end_ns: _Time
    bytes: _Amount
    flops: _Amount
    cause: int | None
    attributes: dict[str, Any]


class _Event(Struct):
    """What `_span_event` writes, without what is for Perfetto alone."""

    pid: int
    name: str
    cat: Kind
    args: _Args

    def span(self) -> Span:
        own = self.args
        times = own.start_ns, own.end_ns
        about = _attributes(own.attributes) or NO_ATTRIBUTES
        moved = own.bytes, own.flops
        return Span(self.pid, own.lane, self.cat, self.name, *times, *moved, about)


def write_chrome(timeline: Fields, path: str | os.PathLike[str]) -> Path:
    """Write the fields of a `Timeline`; a reader sees the whole file or the one that
    was there before. Open it at https://ui.perfetto.dev or chrome://tracing: nothing is
    uploaded.

    Raises:
        FileNotFoundError: the folder does not exist.
        TypeError: an attribute of a span is no JSON value.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: no folder {path.parent}")
    trace = {
        "displayTimeUnit": "ns",
        "otherData": {
            "overlaplab": FORMAT,
            **{name: timeline[name] for name in _PLAIN},
            "causes": bool(timeline["causes"]),
            "memory": [asdict(memory) for memory in timeline["memory"]],
            "source": asdict(timeline["source"]),
        },
        "traceEvents": list(_events(timeline)),
    }
    write_whole(path, orjson.dumps(trace, default=_plain))
    return path


def read_chrome(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what `write_chrome` wrote: the fields of an equal timeline.

    Raises:
        FileNotFoundError: there is no such file.
        TraceError: the file is no such trace; says where it stopped and why.
    """
    path = Path(path)
    other, events = _open_trace(path)
    spans: list[Span] = []
    causes: list[int | None] = []
    try:
        for event in events:
            if event.get("ph") == "X":
                read = convert(event, _Event, strict=False)  # 1e6 ns are whole, too
                spans.append(read.span())
                causes.append(read.args.cause)
        for cause in causes:
            if cause is not None and not 0 <= cause < len(spans):
                raise ValueError(f"cause {cause} of {len(spans)} spans")
        return {
            **{name: other[name] for name in _PLAIN},
            "spans": tuple(spans),
            "causes": tuple(causes) if other["causes"] else (),
            "memory": convert(other.get("memory", ()), tuple[Memory, ...]),
            "source": convert(other.get("source", {}), Source),
        }
    except (KeyError, ValueError, AttributeError, ValidationError) as error:
        raise TraceError(
            f"{path}: damaged at span {len(spans)} ({type(error).__name__}: {error}). "
            "Write it again with Timeline.to_chrome."
        ) from error


def _events(timeline: Fields) -> Iterator[dict[str, Any]]:
    spans, causes = timeline["spans"], timeline["causes"]
    threads: dict[tuple[int, str], int] = {}
    for rank in sorted({s.rank for s in spans}):
        yield _metadata("process_name", rank, 0, {"name": f"rank {rank}"})
        yield _metadata("process_sort_index", rank, 0, {"sort_index": rank})
        for thread, lane in enumerate(lanes_of(spans, rank)):
            threads[rank, lane] = thread
            yield _metadata("thread_name", rank, thread, {"name": lane})
            yield _metadata("thread_sort_index", rank, thread, {"sort_index": thread})
    for memory in timeline["memory"]:
        for time_ns, size in memory.steps:
            yield {
                "ph": "C",
                "name": "memory",
                "pid": memory.rank,
                "ts": time_ns / 1000,
                "args": {"bytes": size},
            }
    for index, span in enumerate(spans):
        cause = causes[index] if causes else None
        yield _span_event(span, threads[span.rank, span.lane], cause)
        if cause is not None:
            yield from _flow(spans[cause], span, threads, index)


def _metadata(name: str, rank: int, thread: int, args: object) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": thread, "args": args}


def _span_event(span: Span, thread: int, cause: int | None) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": span.rank,
        "tid": thread,
        "ts": span.start_ns / 1000,
        "dur": span.duration_ns / 1000,
        "args": {
            "lane": span.lane,
            "start_ns": span.start_ns,
            "end_ns": span.end_ns,
            "bytes": span.bytes,
            "flops": span.flops,
            "cause": cause,
            "attributes": span.attributes,
        },
    }


def _flow(
    source: Span, target: Span, threads: Mapping[tuple[int, str], int], index: int
) -> Iterator[dict[str, Any]]:
    """An arrow from a cause on another lane: on the same one the order shows it."""
    if (source.rank, source.lane) == (target.rank, target.lane):
        return
    # Perfetto ties each end of an arrow to the slice that encloses its time stamp:
    # the last nanosecond is inside, the end is not.
    leave_ns = max(source.start_ns, source.end_ns - 1)
    ends = (("s", source, leave_ns), ("f", target, target.start_ns))
    for phase, span, time_ns in ends:
        yield {
            "ph": phase,
            "bp": "e",
            "id": index,
            "name": "cause",
            "cat": "cause",
            "pid": span.rank,
            "tid": threads[span.rank, span.lane],
            "ts": time_ns / 1000,
        }


def _plain(value: object) -> object:
    """For orjson: read-only mappings as objects, tuples are known to it."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"attribute {value!r} of a span is no JSON value")


def _open_trace(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    expected = "expected the JSON that Timeline.to_chrome writes"
    data = b""
    try:
        with open(path, "rb") as file:
            is_zipped = file.peek(2).startswith(b"\x1f\x8b")
            with gzip.GzipFile(fileobj=file) if is_zipped else file as content:
                data = content.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise TraceError(
                f"{path}: a timeline of more than {MOST_BYTES >> 20} MiB, which is "
                "read whole. Write fewer steps: timeline.of_step(N).to_chrome(...)."
            )
        trace = orjson.loads(data)
    except (orjson.JSONDecodeError, EOFError, OSError, zlib.error) as error:
        raise TraceError(
            f"{path}: not JSON, or cut off ({len(data)} bytes; {error}); {expected}."
        ) from error
    other = trace.get("otherData") if isinstance(trace, dict) else None
    if not isinstance(other, dict) or "overlaplab" not in other:
        raise TraceError(
            f"{path}: JSON, but without otherData.overlaplab; {expected}. A trace of "
            "the PyTorch profiler is read by overlaplab.profiling."
        )
    if other["overlaplab"] != FORMAT:
        raise TraceError(
            f"{path}: trace format {other['overlaplab']!r}; this version reads "
            f"{FORMAT}. Write it again with this version."
        )
    events = trace.get("traceEvents")
    if not isinstance(events, list):
        raise TraceError(f"{path}: traceEvents is no list; {expected}.")
    return other, events


def _attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """With integers where `Timeline` and its readers count on them."""
    for key in _INTEGERS & attributes.keys():
        if type(attributes[key]) is not int or abs(attributes[key]) > _LARGEST:
            raise ValueError(f"{key} is {attributes[key]!r}; expected an integer")
    return attributes
