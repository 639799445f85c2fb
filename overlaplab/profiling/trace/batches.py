"""One trace file as batches of events, and the fields that stand beside them.

Whether a file is compressed is seen from its content, never from its name.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from overlaplab.errors import TraceError
from overlaplab.profiling.trace.chunks import Chunks, mended
from overlaplab.profiling.trace.rows import Row

BLOCK_BYTES = 1 << 16
_GZIP = b"\x1f\x8b"
_AUTOMATIC_HEADER = 32 + zlib.MAX_WBITS
_EVENTS = re.compile(rb'(?<!\\)"traceEvents"\s*:\s*\[')
_MOST_FIELDS_BYTES = 64 << 20  # before the events, and after them
_NOT_OF_EVENTS = "a JSON list, but not of events."
_NO_LIST = "a text that begins with a bracket, as logs do, and no list of events."
_SPACE = b"\xef\xbb\xbf \t\r\n"


class NotATraceError(TraceError):
    """No trace, however whole it is: a folder's reader goes on without it."""


class Blocks:
    """Iterate to get the content of a file, plain or gzip (of several members too),
    about `block_bytes` at a time; `damage` then says where it ended too early.

    Raises:
        TraceError: the file cannot be opened or read, or is empty.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self.path = Path(path)
        self.block_bytes = block_bytes
        self.damage = ""
        self._content: bytes | None = None

    @staticmethod
    def of_text(text: bytes) -> Blocks:
        """Of a text in memory instead of a file."""
        blocks = Blocks("trace")
        blocks._content = text
        return blocks

    def __iter__(self) -> Iterator[bytes]:
        if self._content is not None:
            yield self._content
            return
        try:
            with open(self.path, "rb") as file:
                start = file.peek(len(_GZIP))  # a pipe cannot go back
                if not start:
                    raise NotATraceError(
                        f"{self.path}: empty file (0 bytes); expected a trace as "
                        "torch.profiler's export_chrome_trace writes. Was the run "
                        "stopped before the profiler had written?"
                    )
                compressed = start.startswith(_GZIP)
                yield from self._inflated(file) if compressed else self._plain(file)
        except OSError as error:
            what = error.strerror or str(error)
            raise TraceError(
                f"{self.path}: cannot be read ({what}). Check the path and that you "
                "may read it."
            ) from error

    def _plain(self, file: BinaryIO) -> Iterator[bytes]:
        while block := file.read(self.block_bytes):
            yield block

    def _inflated(self, file: BinaryIO) -> Iterator[bytes]:
        inflate = zlib.decompressobj(_AUTOMATIC_HEADER)
        offset = 0  # of `data` in the file
        while data := file.read(self.block_bytes):
            while data:
                if inflate.eof:  # another member follows, or padding
                    member = data.lstrip(b"\0")
                    if not member.startswith(_GZIP[: len(member)]):
                        self.damage = f"after the compressed data, at byte {offset}"
                        return
                    offset, data = offset + len(data) - len(member), member
                    inflate = zlib.decompressobj(_AUTOMATIC_HEADER)
                before = inflate.copy()
                try:
                    whole = inflate.decompress(data, self.block_bytes)
                except zlib.error:
                    whole, used = _inflate_until_refused(before, data)
                    yield whole
                    self.damage = f"in the compressed data, at byte {offset + used}"
                    return
                rest = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
                offset, data = offset + len(data) - len(rest), rest
                yield whole
        if not inflate.eof:
            yield inflate.flush()
            self.damage = f"at its end, byte {offset}: the compressed data go on"


def _inflate_until_refused(inflate: zlib._Decompress, data: bytes) -> tuple[bytes, int]:
    """What can be had before the damage, and how many bytes of `data` that took."""
    whole: list[bytes] = []
    for i in range(len(data)):
        try:
            whole.append(inflate.decompress(data[i : i + 1]))
        except zlib.error:
            return b"".join(whole), i
    return b"".join(whole), len(data)


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
        chunks, any_rows, ended = Chunks(offset), False, False
        # A list may be of anything, and a log begins with a bracket, too: "[rank0]: ".
        is_of_events, begins = not is_list, text.lstrip(_SPACE)[:1]
        while not ended:
            block = next(blocks, None)
            taken = chunks.take(text) if block is not None else chunks.take_rest(text)
            text, ended = taken.rest + (block or b""), taken.ended
            if taken.rows:
                any_rows = True
                is_of_events |= any(row.ph is not None for row in taken.rows)
                yield taken.rows
            if block is None:
                break
            if not taken.rows and not ended:  # a long event: as much again, or its end
                text = _doubled(text, blocks)
        if ended:
            self._read_trailer(text, blocks, is_list)
        elif not is_list or self._blocks.damage:
            self._remark("ends within its events: what followed is lost")
        self.dropped = dict(chunks.dropped)
        if any_rows and not is_of_events:
            raise NotATraceError(f"{self.path}: {_NOT_OF_EVENTS}")
        if chunks.dropped and not any_rows and is_list and begins not in b"{":
            what = _NOT_OF_EVENTS if chunks.first_damage is None else _NO_LIST
            raise NotATraceError(f"{self.path}: {what}")
        self._conclude(chunks, any_rows)

    def _read_start(self, blocks: Iterator[bytes]) -> tuple[bytes, int, bool]:
        """The array's first bytes, where they stand, and if it is the whole file."""
        # Grown in place: a copy a block would take the square of the time.
        text, blank, searched = bytearray(), 0, 0
        for block in blocks:
            if not text:
                whole, block = block, block.lstrip(_SPACE)
                blank += len(whole) - len(block)
            text += block
            is_wide = b"\0" in text[:2]  # UTF-16, of which a byte order mark is no must
            if text.startswith(b"[") and not is_wide:
                return bytes(text[1:]), blank + 1, True
            if text and (is_wide or not text.startswith(b"{")):
                raise NotATraceError(f"{self.path}: {_what_is(bytes(text[:512]))}")
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

    def _conclude(self, chunks: Chunks, any_rows: bool) -> None:
        if self._blocks.damage:
            self._remark(f"damaged {self._blocks.damage}")
        if chunks.first_repair is not None:
            self._remark(
                f"not quite JSON (unescaped characters or NaN), first at byte "
                f"{chunks.first_repair}; repaired"
            )
        lost = sum(self.dropped.values())
        if lost and not any_rows:
            if chunks.first_damage is None:
                raise NotATraceError(f"{self.path}: {_NOT_OF_EVENTS}")
            raise TraceError(
                f"{self.path}: damaged from byte {chunks.first_damage} on, no whole "
                "event in it. Copy it again from where it was written."
            )
        if chunks.first_damage is not None:
            self._remark(
                f"damaged at byte {chunks.first_damage}; {lost} events dropped, the "
                "whole ones kept"
            )

    def _remark(self, sentence: str) -> None:
        self.remarks.append(f"{self.path.name}: {sentence}")


def _doubled(text: bytes, blocks: Iterator[bytes]) -> bytes:
    """Looking at each block anew would take the square of the time."""
    more, wanted = [text], len(text)
    for block in blocks:
        more.append(block)
        wanted -= len(block)
        if wanted <= 0:
            break
    return b"".join(more)


def _what_is(head: bytes) -> str:
    known = {
        b"<": "HTML or XML, perhaps the page of a failed download",
        b"PK": "a zip archive: unpack it first",
        b"\x28\xb5\x2f\xfd": "compressed by zstd: decompress it first",
        b"BZh": "compressed by bzip2: decompress it first",
        b"\xfd7zXZ": "compressed by xz: decompress it first",
        _GZIP: "compressed twice by gzip: decompress it once (gzip -d)",
        b"version https://git-lfs": "a pointer of Git LFS, not the file: git lfs pull",
    }
    is_wide = (any(head[:2]) and b"\0" in head[:2]) or head[:4] == b"\0\0\0{"
    if is_wide or head.startswith((b"\xff\xfe", b"\xfe\xff")):
        known[b""] = "text in UTF-16 or UTF-32: save it as UTF-8"
    if head[257:262] == b"ustar":
        known[b""] = "a tar archive: unpack it first"
    unknown = f"not JSON, it starts with {head[:12]!r}"
    what = next((known[of] for of in known if head.startswith(of)), unknown)
    return (
        f"{what}. Expected what torch.profiler's export_chrome_trace writes, plain or "
        "gzip."
    )
