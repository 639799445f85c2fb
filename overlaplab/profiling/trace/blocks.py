"""The bytes of a trace file, block by block, decompressed, as far as they are whole.

Whether a file is compressed is seen from its content, never from its name. Knows
nothing of JSON.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from overlaplab.errors import TraceError

BLOCK_BYTES = 1 << 16
_GZIP = b"\x1f\x8b"
_AUTOMATIC_HEADER = 32 + zlib.MAX_WBITS


class Blocks:
    """Iterate to get the content; `damage` then says where it ended too early.

    Args:
        path: a file, plain or gzip (of several members too).
        block_bytes: about how much to give at a time.

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
    def of_text(text: bytes, name: str = "trace") -> Blocks:
        """Of a text in memory instead of a file."""
        blocks = Blocks(name)
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
                    raise TraceError(
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
