"""One worker process, seen from its parent: start, talk, locate, kill."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

from overlaplab.cluster.pool.collective_log import Notes, read_notes
from overlaplab.cluster.pool.starting import Starter

_LOG_BYTES = 100_000
_END_S = 10.0  # for a killed process to be gone
_STACKS = re.compile(r"^(Current thread|Thread|Extension modules)\b", re.MULTILINE)


class WorkerProcess:
    """A started worker. Its files have no names, so nothing is left of them.

    `main_thread` is set by the first message that the worker sends.
    """

    def __init__(self, starter: Starter) -> None:
        ours, theirs = socket.socketpair()
        self._collective_log, self._stack, self._log = files = [
            tempfile.TemporaryFile()  # noqa: SIM115 (closed in kill)
            for _ in range(3)
        ]
        with theirs:
            numbers = [theirs.fileno(), *(file.fileno() for file in files)]
            self._handle = starter.start(numbers)
        self.connection = Connection(ours.detach())
        self.main_thread: int | None = None
        self.started_s = time.time()
        self._log_start = 0

    @property
    def pid(self) -> int:
        return self._handle.pid

    def send(self, message: Any) -> bool:
        """Send; False if the worker is dead."""
        try:
            self.connection.send(message)
        except OSError:
            return False
        return True

    def has_ended(self) -> bool:
        return self._handle.poll() is not None

    def how_it_ended(self) -> str:
        """ "killed by SIGKILL", "exited with code 3"."""
        code = self._wait()
        if code is None:
            return "closed its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def mark_log(self) -> None:
        """`log()` gives what is written from now on."""
        self._log_start = os.fstat(self._log.fileno()).st_size

    def log(self) -> str:
        """What C++ code and the dying interpreter wrote, without the stacks."""
        data = os.pread(self._log.fileno(), _LOG_BYTES, self._log_start)
        text = data.decode(errors="replace")
        return _STACKS.split(text, maxsplit=1)[0].strip()

    def notes(self) -> Notes:
        return read_notes(self._collective_log.fileno())

    def ask_for_stack(self) -> None:
        """Make faulthandler dump every thread; works while the GIL is held."""
        os.ftruncate(self._stack.fileno(), 0)
        os.lseek(self._stack.fileno(), 0, os.SEEK_SET)
        if not self.has_ended():
            os.kill(self.pid, signal.SIGUSR1)

    def has_dumped_stack(self) -> bool:
        """Whether the thread that runs the user's function is in the dump."""
        return f"{self.main_thread:016x}" in self.stack()

    def stack(self) -> str:
        """What faulthandler has dumped so far."""
        size = os.fstat(self._stack.fileno()).st_size
        return os.pread(self._stack.fileno(), size, 0).decode(errors="replace")

    def kill(self) -> None:
        """End the worker, and what it started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._wait()
        self.connection.close()
        for file in (self._collective_log, self._stack, self._log):
            file.close()

    def _wait(self) -> int | None:
        """Its exit code; None if it still runs after a moment."""
        until = time.monotonic() + _END_S
        while (code := self._handle.poll()) is None and time.monotonic() < until:
            time.sleep(0.001)
        return code
