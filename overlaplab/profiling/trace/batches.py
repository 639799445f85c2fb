"""One trace file as batches of events, and the fields that stand beside them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson

from overlaplab.errors import TraceError
from overlaplab.profiling.trace.blocks import Blocks
from overlaplab.profiling.trace.chunks import Pieces, mended
from overlaplab.profiling.trace.rows import Row

_EVENTS = re.compile(rb'(?<!\\)"traceEvents"\s*:\s*\[')
_MOST_FIELDS_BYTES = 64 << 20  # before the events, and after them
_SPACE = b"\xef\xbb\xbf \t\r\n"


class NotATraceError(TraceError):
    """No trace, however whole it is: a folder's reader goes on without it."""


class OwnTimelineError(Exception):
    """The file is a `Timeline.to_chrome`, which has a reader of its own."""


class Batches:
    """Iterate once for lists of events; all else is known when that has ended.

    Attributes:
        fields: what stands beside the events: "distributedInfo", ...
        dropped: reason -> number of events that could not be decoded.
        remarks: sentences on damage, with its offset (in the decompressed text).
    """

    def __init__(self, blocks: Blocks) -> None:
        self.path = blocks.path
        self.fields: dict[str, Any] = {}
        self.dropped: dict[str, int] = {}
        self.remarks: list[str] = []
        self._blocks = blocks

    def __iter__(self) -> Iterator[list[Row]]:
        """Whole events, in the order of the file.

        Raises:
            NotATraceError: whole, perhaps, but no trace.
            TraceError: no whole event is left of it, or the file cannot be read.
            OwnTimelineError: see there.
        """
        blocks = iter(self._blocks)
        text, offset, is_list = self._read_start(blocks)
        pieces, any_rows, ended = Pieces(offset), False, False
        while not ended:
            block = next(blocks, None)
            taken = pieces.take(text) if block is not None else pieces.take_rest(text)
            text, ended = taken.rest + (block or b""), taken.ended
            if taken.rows:
                any_rows = True
                yield taken.rows
            if block is None:
                break
        if ended:
            self._read_trailer(text, blocks, is_list)
        elif not is_list or self._blocks.damage:
            self._remark("ends within its events: what followed is lost")
        self.dropped = dict(pieces.dropped)
        self._conclude(pieces, any_rows)

    def _read_start(self, blocks: Iterator[bytes]) -> tuple[bytes, int, bool]:
        """The array's first bytes, where they stand, and if it is the whole file."""
        # Grown in place: a copy a block would take the square of the time.
        text, blank, searched = bytearray(), 0, 0
        for block in blocks:
            if not text:
                whole, block = block, block.lstrip(_SPACE)
                blank += len(whole) - len(block)
            text += block
            if text.startswith(b"["):
                return bytes(text[1:]), blank + 1, True
            if text and not text.startswith(b"{"):
                raise NotATraceError(f"{self.path}: {_what_is(bytes(text[:12]))}")
            if found := _EVENTS.search(text, searched):
                self._keep_fields(bytes(text[: found.start()]) + b'"": 0}')
                return bytes(text[found.end() :]), blank + found.end(), False
            searched = max(0, len(text) - 64)
            if max(len(text), blank) > _MOST_FIELDS_BYTES:
                break
        raise NotATraceError(f"{self.path}: {self._why_no_events(bytes(text))}.")

    def _read_trailer(
        self, text: bytes, blocks: Iterator[bytes], is_list: bool
    ) -> None:
        trailer = bytearray(text)
        for block in blocks:
            trailer += block
            if len(trailer) > _MOST_FIELDS_BYTES:
                self._remark("the fields after the events are too long, not read")
                return
        if _EVENTS.search(trailer):
            self._remark("more events follow, in a second 'traceEvents': not read")
        elif not is_list:
            self._keep_fields(b"{" + trailer.lstrip(b" \t\r\n,"))
        elif trailer.strip():
            self._remark("something follows the list of events, not read")

    def _keep_fields(self, text: bytes) -> None:
        try:
            self.fields |= orjson.loads(mended(text))
        except orjson.JSONDecodeError:
            self._remark("fields beside the events are damaged, not read")
        self.fields.pop("", None)
        other = self.fields.get("otherData")
        if isinstance(other, dict) and "overlaplab" in other:
            raise OwnTimelineError

    def _why_no_events(self, text: bytes) -> str:
        if not text.strip():
            if self._blocks.damage:
                return f"damaged {self._blocks.damage}, and nothing is left of it"
            return "blank; expected a trace. Was the run stopped before it was written?"
        if re.search(rb'"schema"\s*:', text):
            return (
                "an execution trace ('schema', but no 'traceEvents'), which knows no "
                "times. Give the file of torch.profiler's export_chrome_trace"
            )
        try:
            orjson.loads(text)
        except orjson.JSONDecodeError as error:
            return f"damaged or cut off before its first event, at byte {error.pos}"
        return "JSON without 'traceEvents', so no trace of torch.profiler"

    def _conclude(self, pieces: Pieces, any_rows: bool) -> None:
        if self._blocks.damage:
            self._remark(f"damaged {self._blocks.damage}")
        if pieces.first_repair is not None:
            self._remark(
                f"not quite JSON (unescaped characters or NaN), first at byte "
                f"{pieces.first_repair}; repaired"
            )
        lost = sum(self.dropped.values())
        if lost and not any_rows:
            if pieces.first_damage is None:
                raise NotATraceError(f"{self.path}: a JSON list, but not of events.")
            raise TraceError(
                f"{self.path}: damaged from byte {pieces.first_damage} on, no whole "
                "event in it. Copy it again from where it was written."
            )
        if pieces.first_damage is not None:
            self._remark(
                f"damaged at byte {pieces.first_damage}; {lost} events dropped, the "
                "whole ones kept"
            )

    def _remark(self, sentence: str) -> None:
        self.remarks.append(f"{self.path.name}: {sentence}")


def _what_is(head: bytes) -> str:
    if head[:1] == b"<":
        what = "HTML or XML, perhaps the page of a failed download"
    elif head[:2] == b"PK":
        what = "a zip archive: unpack it first"
    elif head[:4] == b"\x28\xb5\x2f\xfd":
        what = "compressed by zstd: decompress it first"
    else:
        what = f"not JSON, it starts with {head[:12]!r}"
    return (
        f"{what}. Expected what torch.profiler's export_chrome_trace writes, plain or "
        "gzip."
    )
