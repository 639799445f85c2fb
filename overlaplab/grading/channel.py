"""Messages to and from a process in which code of the learner's runs.

It may write anything to its end, stop in the middle of a message, or be gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

MOST_BYTES = 64 * 2**20  # of one message
SILENCE_S = 30.0  # in the middle of one
LAST_WORDS = "last words"  # a file in the folder of a process: why it ended
_LENGTH = struct.Struct("!i")  # before each, as `Connection` writes it


class Channel:
    """One end of a connection.

    Args:
        connection: closed with this.
        silence_s: in the middle of a message, after which it is none; on the wall.
    """

    def __init__(self, connection: Connection, silence_s: float | None = None) -> None:
        self.connection = connection
        self._silence_s = silence_s

    def send(self, message: Mapping[str, Any], payload: bytes | None = None) -> None:
        """JSON values, and bytes; whoever is gone shows at the next `receive`."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(json.dumps(message).encode())
            if payload is not None:
                self.connection.send_bytes(payload)

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message; None at the deadline.

        Raises:
            EOFError: the process is gone, or what it sends is no message.
            ValueError: it is no JSON.
        """
        message = json.loads(self.receive_bytes(timeout_s) or b"null")
        return message if isinstance(message, dict) else None

    def receive_bytes(self, timeout_s: float) -> bytes | None:
        """The next message as it is; None at the deadline.

        Raises:
            EOFError: the process is gone, or what it sends is no message.
        """
        try:
            if not self.connection.poll(max(0.0, timeout_s)):
                return None
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
            if not 0 <= length <= MOST_BYTES:
                raise EOFError(f"sent a message of {length} bytes")
            return self._read(length)
        except OSError:  # reset
            raise EOFError from None

    def _read(self, num_bytes: int) -> bytes:
        """That many bytes of a message that has begun.

        `Connection.recv_bytes` would wait for the rest of it without end.
        """
        found = bytearray()
        while len(found) < num_bytes:
            if not self.connection.poll(self._silence_s or SILENCE_S):
                raise EOFError("stopped in the middle of a message")
            part = os.read(self.connection.fileno(), num_bytes - len(found))
            if not part:
                raise EOFError
            found += part
        return bytes(found)

    def close(self) -> None:
        self.connection.close()
