"""Text of an array of events -> events, as many as are whole; the damage is counted.

[Note: borders] The array is cut between events, so that neither the file nor its
content is ever whole in memory. "}" followed by "," and "{" stands between events,
but also inside an event's own lists and strings. The text from a border to such a
"}", closed by "]", decodes only if it ends at a border too: inside a string the
string stays open, inside a list the outer brackets do. So whatever decodes was cut
well, and "truncated" means that it was not.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import msgspec

from overlaplab.profiling.trace.rows import Row, RowWithoutArgs, decoder

CUT_OFF = "cut off at the end of the file"
DAMAGED = "damaged"
NO_EVENT = "not an event"

_BORDER = re.compile(rb"\}\s*,\s*(?=\{)")
_BYTE = re.compile(r"\(byte (\d+)\)")
_BORDERS_TRIED = 8  # inside one event
_LONGEST_EVENT_BYTES = 4 << 20
_SEPARATORS = b" \t\r\n,"
_OPEN = 0
_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_CONTROL = bytes(32 if i < 32 else i for i in range(256))
_BAD_ESCAPE = re.compile(rb'(\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))|\\')
_NO_NUMBER = re.compile(rb"([:\[,])\s*-?(?:nan|inf|infinity)\b", re.IGNORECASE)

_rows = decoder(list[Row]).decode
_row = decoder(Row).decode
_row_without_args = decoder(RowWithoutArgs).decode
_texts = decoder(list[msgspec.Raw]).decode


@dataclass(slots=True)
class Taken:
    """Events from the start of a text, and what of the text is left."""

    rows: list[Row]  # whole events
    rest: bytes  # the text after them
    ended: bool = False  # the array has ended; `rest` follows it


class Chunks:
    """Takes events off a text that grows at its end.

    Attributes:
        dropped: reason -> number of events that could not be decoded.
        offset: of the text that is left.
        first_damage, first_repair: offsets, None if there is none.
    """

    def __init__(self, offset: int) -> None:
        self.dropped: Counter[str] = Counter()
        self.offset = offset
        self.first_damage: int | None = None
        self.first_repair: int | None = None

    def take(self, text: bytes) -> Taken:
        """Of a text that goes on. See [Note: borders]."""
        taken = self._take(text)
        self.offset += len(text) - len(taken.rest)
        return taken

    def take_rest(self, text: bytes) -> Taken:
        """Of a text that ends here, with or without the end of the array."""
        try:
            return Taken(self._decode(b"[" + text), b"", True)
        except _ERRORS as error:
            if taken := self._until_end(b"[" + text, error, text):
                return taken
        end = len(text.rstrip(_SEPARATORS))
        return self._salvage(text, end, len(text), is_last=True)

    def _take(self, text: bytes) -> Taken:
        cut = len(text)
        for _ in range(_BORDERS_TRIED):
            cut, after = _last_border(text, cut)
            if cut < 0:
                break
            closed = b"[%b]" % text[:cut]
            try:
                return Taken(self._decode(closed), text[after:])
            except _ERRORS as error:
                if taken := self._until_end(closed, error, text):
                    return taken
                if "truncated" not in str(error):
                    return self._salvage(text, cut, after)
        if len(text) < _LONGEST_EVENT_BYTES:
            return Taken([], text)
        cut, after = _last_border(text, len(text))
        return self._salvage(text, *((cut, after) if cut > 0 else (len(text),) * 2))

    def _decode(self, array: bytes) -> list[Row]:
        """Of sound JSON, else an error; elements that are no events are counted."""
        try:
            return _rows(array)
        except (msgspec.ValidationError, UnicodeDecodeError):
            values = _texts(array)
        rows = []
        for value in values:
            row = self._one(bytes(value), 0)
            if isinstance(row, Row):
                rows.append(row)
            else:
                self.dropped[NO_EVENT] += 1
        return rows

    def _until_end(self, closed: bytes, error: Exception, text: bytes) -> Taken | None:
        """If `error` says that the array has ended: what was before."""
        end = _end_of_value(closed, error, b"]")
        if end is None:
            return None
        return Taken(self._decode(closed[:end]), text[end - 1 :], True)

    def _salvage(
        self, text: bytes, end: int, after: int, *, is_last: bool = False
    ) -> Taken:
        """Of a damaged text that ends at a border: all events that are whole."""
        if (better := mended(text[:end])) != text[:end]:
            try:
                rows = _rows(b"[%b]" % better)
            except _ERRORS:
                pass
            else:
                self._note_repair(0)
                return Taken(rows, text[after:])
        rows = []
        borders = list(_BORDER.finditer(text, 0, end))
        starts = [0, *(border.end() for border in borders)]
        ends = [*(border.start() + 1 for border in borders), end]
        i = 0
        while i < len(starts):
            found: Row | int | None = None
            for last in range(i, min(i + _BORDERS_TRIED, len(starts))):
                found = self._one(text[starts[i] : ends[last]], starts[i])
                if found != _OPEN:
                    break
            if isinstance(found, Row):
                rows.append(found)
            elif found:  # a whole one, but then no border
                row = self._one(text[starts[i] : starts[i] + found], starts[i])
                if isinstance(row, Row):
                    rows.append(row)
                follows = text[starts[i] + found : end].lstrip(_SEPARATORS)
                if follows.startswith(b"]"):
                    return Taken(rows, text[end - len(follows) + 1 :], True)
                self._note_damage(end - len(follows))
                starts[last] = end - len(follows)
                if follows.startswith(b"{"):
                    i = last
                    continue
                self.dropped[DAMAGED] += 1
            else:
                is_cut = is_last and found == _OPEN and i + 1 == len(starts)
                self.dropped[CUT_OFF if is_cut else DAMAGED] += 1
                self._note_damage(starts[i])
                last = i
            i = last + 1
        return Taken(rows, text[after:])

    def _one(self, text: bytes, position: int) -> Row | int | None:
        """An event; or where it ends, if before the text; _OPEN; None: damaged."""
        for attempt in (text, mended(text)):
            for decode in (_row, _row_without_args):
                try:
                    row = decode(attempt)
                except msgspec.ValidationError:
                    continue
                except _ERRORS as error:
                    if (end := _end_of_value(text, error, b"}")) is not None:
                        return end
                    if "truncated" in str(error):
                        return _OPEN
                    break
                if attempt is not text:
                    self._note_repair(position)
                return row if isinstance(row, Row) else row.as_row()
        return None

    def _note_damage(self, position: int) -> None:
        if self.first_damage is None:
            self.first_damage = self.offset + position

    def _note_repair(self, position: int) -> None:
        if self.first_repair is None:
            self.first_repair = self.offset + position


def _last_border(text: bytes, before: int) -> tuple[int, int]:
    """The end of an event and the start of the next; (-1, -1) if there is no border."""
    while (closing := text.rfind(b"}", 0, before)) >= 0:
        if border := _BORDER.match(text, closing):
            return closing + 1, border.end()
        before = closing
    return -1, -1


def _end_of_value(text: bytes, error: Exception, closing: bytes) -> int | None:
    """Where the value ends, if the error is that something follows it."""
    if "trailing characters" not in str(error):
        return None
    byte = _BYTE.search(str(error))
    return text.rfind(closing, 0, int(byte.group(1)) - 1) + 1 if byte else None


def mended(text: bytes) -> bytes:
    """Without what writers of traces forget: to escape, to encode, and NaN."""
    text = text.translate(_CONTROL)
    try:
        text.decode()
    except UnicodeDecodeError:
        text = text.decode(errors="replace").encode()
    if b"\\" in text:
        text = _BAD_ESCAPE.sub(lambda found: found.group(1) or rb"\\", text)
    return _NO_NUMBER.sub(rb"\1null", text)
