"""One step's order of collectives and waits, in a form that GPUs and `virtual` share.

A step is told as *tokens* in the order of the CPU's calls: operators that both sides
launch under one name (`MARKERS`), collectives, and the waits between streams. What is
kept of them does not depend on how many kernels an operator has or how a library
orders its own streams: for every collective, which markers it comes after, and which
marker is the first to come after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from overlaplab.program import Program

END = "cumsum"  # stands before and after the step, nowhere else
MARKERS = frozenset(
    {
        END,
        "mm",
        "addmm",
        "gelu",
        "gelu_backward",
        "native_layer_norm",
        "native_layer_norm_backward",
        "embedding",
        "embedding_dense_backward",
    }
)


@dataclass(frozen=True)
class Token:
    """One call of the CPU.

    Args:
        kind: "marker", "collective", "record" (an event) or "wait" (for one).
        stream: where it is launched, records or waits.
        communicator: of a collective: a communicator runs one after the other.
        name: of a marker; of a collective, "operation elements dtype".
        event: of a record or wait: the same for both.
    """

    kind: str
    stream: object
    name: str = ""
    event: object = None
    communicator: object = None


@dataclass
class _Known:
    """What a stream is behind: by stream, how many of its tokens."""

    tokens: dict[object, int] = field(default_factory=dict)

    def join(self, other: Mapping[object, int]) -> None:
        for stream, count in other.items():
            self.tokens[stream] = max(self.tokens.get(stream, 0), count)


Form = dict[str, Any]


def normal_form(tokens: Iterable[Token]) -> Form:
    """Markers and collectives between the two `END` markers.

    Returns:
        "operators": the markers in order, in one text, with a "*" where the stream is
        not that of the first. "collectives": a line each, in the order of launch:
        what, on which stream, after how many markers it was launched, how many of them
        it is behind, and the number of the first marker that is behind it.
    """
    known: dict[object, _Known] = {}
    events: dict[object, dict[object, int]] = {}
    communicators: dict[object, dict[object, int]] = {}
    last: list[tuple[Token, int, dict[object, int]]] = []
    for token in tokens:
        mine = known.setdefault(token.stream, _Known())
        if token.kind == "record":
            events[token.event] = dict(mine.tokens)
        elif token.kind == "wait":
            mine.join(events.get(token.event, {}))
        else:
            if token.communicator is not None:
                mine.join(communicators.get(token.communicator, {}))
            before = dict(mine.tokens)
            mine.tokens[token.stream] = place = before.get(token.stream, 0) + 1
            last.append((token, place, before))
            if token.communicator is not None:
                communicators[token.communicator] = dict(mine.tokens)
    return _told(list(_step(last)))


_Entry = tuple[Token, int, dict[object, int]]


def _step(entries: Sequence[_Entry]) -> Iterator[_Entry]:
    ends = [i for i, (t, _, _) in enumerate(entries) if t.name == END]
    if len(ends) != 2:
        raise ValueError(f"expected 2 {END} markers around the step, got {len(ends)}")
    yield from entries[ends[0] : ends[1] + 1]


def _told(entries: list[_Entry]) -> Form:
    markers = [e for e in entries if e[0].kind == "marker"]
    main = markers[0][0].stream
    names: dict[object, str] = {main: "compute"}
    lines = []
    for at, (token, place, before) in enumerate(entries):
        if token.kind != "collective":
            continue
        stream = names.setdefault(token.stream, f"stream {len(names)}")
        launched = sum(e[0].kind == "marker" for e in entries[:at])
        behind = sum(before.get(t.stream, 0) >= p for t, p, _ in markers)
        first = next(
            (
                i
                for i, (t, p, b) in enumerate(markers)
                if b.get(token.stream, 0) >= place
                or (t.stream == token.stream and p > place)
            ),
            None,
        )
        waited = "never" if first is None else f"before operator {first}"
        lines.append(
            f"{token.name} on {stream}: launched after {launched}, behind {behind}, "
            f"waited for {waited}"
        )
    return {
        "operators": " ".join(
            t.name if t.stream == main else f"{t.name}*" for t, _, _ in markers
        ),
        "collectives": lines,
    }


# -- from the record of the virtual cluster


def program_tokens(program: Program, rank: int) -> Iterator[Token]:
    """Tokens of one rank: every dependency of the record as an event and a wait."""
    for op in program.ranks[rank]:
        stream: str = op.stream
        collective = op.collective
        for dependency in op.after:
            yield Token("wait", stream, event=dependency)
        if collective is not None:
            itemsize = getattr(torch, op.dtype).itemsize
            elements = sum(part.bytes for part in collective.payload) // itemsize
            yield Token(
                "collective",
                stream,
                f"{collective.operation} {elements} {op.dtype}",
                communicator=collective.group,
            )
        elif op.name in MARKERS:
            yield Token("marker", stream, op.name)
        yield Token("record", stream, event=op.index)


# -- from a Chrome trace of torch.profiler

_OPERATIONS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "broadcast": "broadcast",
}
_DTYPES = {"Float": "float32", "BFloat16": "bfloat16", "Int": "int32"}


def trace_tokens(trace: Mapping[str, Any]) -> list[Token]:
    """Tokens of one rank's trace, as `orders.py` writes them.

    Streams are known by their number in the trace; the notes of events name them by
    pointer. The call that waits stands right before the note of it, and has the number.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    events.sort(key=lambda e: float(e["ts"]))
    calls = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver")
        and "correlation" in e.get("args", {})
    }
    waiting = {
        e["args"]["correlation"]: e["args"]["stream"]
        for e in events
        if e.get("name") == "Stream Wait Event"
    }
    notes = [e for e in events if str(e.get("name")).startswith("event_")]
    notes = [e for e in notes if e.get("cat") in ("user_annotation", "cpu_op")]
    operators = _calls(events, lambda n: n.removeprefix("aten::") in MARKERS)
    communications = _calls(events, lambda n: n == "record_param_comms")
    streams = _stream_numbers(notes, calls, waiting)
    timed: list[tuple[float, Token]] = []
    for note in notes:
        kind, event, pointer = note["name"].split()
        stream = streams.get(pointer, f"pointer {pointer}")
        what = kind.removeprefix("event_")
        timed.append((float(note["ts"]), Token(what, stream, event=event)))
    seen: set[int] = set()
    for event in events:
        args = event.get("args", {})
        call = calls.get(args.get("correlation"))
        if event.get("cat") != "kernel" or call is None:
            continue
        at = float(call["ts"])
        if "nccl" in event["name"].lower():
            launcher = _owner(communications, call) or {}
            name = _collective_name(event, launcher.get("args", {}))
            group = args.get("Process Group Name")
            token = Token("collective", args["stream"], name, communicator=group)
            timed.append((at, token))
        else:
            operator = _owner(operators, call)
            if operator is not None and id(operator) not in seen:
                seen.add(id(operator))
                name = operator["name"].removeprefix("aten::")
                timed.append((at, Token("marker", args["stream"], name)))
    timed.sort(key=lambda pair: pair[0])
    return [token for _, token in timed]


def _stream_numbers(
    notes: Sequence[Mapping[str, Any]],
    calls: Mapping[int, Mapping[str, Any]],
    waiting: Mapping[int, int],
) -> dict[str, int]:
    """The number in the trace of each stream that waits, by its pointer."""
    made = sorted(
        (float(calls[c]["ts"]), calls[c]["tid"], s)
        for c, s in waiting.items()
        if c in calls
    )
    found = {"0": 7}  # the default stream
    for note in notes:
        kind, _, pointer = note["name"].split()
        if kind != "event_wait":
            continue
        before = [s for at, tid, s in made if tid == note["tid"] and at <= note["ts"]]
        if before:
            found.setdefault(pointer, before[-1])
    return found


def _collective_name(kernel: Mapping[str, Any], launcher: Mapping[str, Any]) -> str:
    args = {**launcher, **kernel["args"]}
    operation = args.get("Collective name", kernel["name"])
    dtype = args.get("dtype", "?")
    return (
        f"{_OPERATIONS.get(operation, operation)} {args.get('In msg nelems', '?')} "
        f"{_DTYPES.get(dtype, dtype)}"
    )


def _calls(
    events: Sequence[Mapping[str, Any]], wanted: Callable[[str], bool]
) -> dict[Any, list[Any]]:
    """Operators that the CPU called, by thread, in order."""
    found: dict[Any, list[Any]] = {}
    for event in events:
        if event.get("cat") == "cpu_op" and wanted(str(event.get("name", ""))):
            found.setdefault(event["tid"], []).append(event)
    for calls in found.values():
        calls.sort(key=lambda e: e["ts"])
    return found


def _owner(operators: Mapping[Any, list[Any]], call: Mapping[str, Any]) -> Any:
    """The outermost operator in which the CPU made `call`, None if in none."""
    for event in operators.get(call["tid"], []):
        if event["ts"] <= call["ts"] < event["ts"] + event["dur"]:
            return event
    return None
