"""Forks of one server, seen from the process that asks for them.

The server is `fork_server.py`; what each fork does is its job: "play", "host", "judge".
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import overlaplab
from overlaplab.grading.channel import LAST_WORDS, Channel

# A child may need so long to start (it imports torch) and, after a deadline of its
# own, to say what it was doing. On the wall, so they are guards.
START_S = 600.0
GRACE_S = 15.0
_MOST_WORDS = 2000  # bytes, of the reason that a process gives for its end
_MEANS = {
    "SIGKILL": " (out of memory?)",
    "SIGSEGV": " (a crash in compiled code: memory that is not there)",
    "SIGBUS": " (a crash in compiled code, or no room in /dev/shm)",
    "SIGFPE": " (a crash in compiled code: a division by 0)",
    "SIGABRT": " (compiled code gave up)",
}


class Fork(Channel):
    """A fork of the server in a session of its own, and a connection to it."""

    def __init__(self, server: Server, job: str) -> None:
        self._server = server
        self._scratch = tempfile.TemporaryDirectory(dir=server.scratch.name)
        ours, theirs = socket.socketpair()
        super().__init__(Connection(ours.detach()))
        with theirs:
            request = {"job": job, "folder": self._scratch.name}
            self.process = int(server.ask(request, theirs)["process"])

    def pass_on(self, other: Channel) -> None:
        """Hand this child the connection to another."""
        with contextlib.suppress(OSError):
            descriptor = other.connection.fileno()
            reduction.send_handle(self.connection, descriptor, self.process)

    def how_it_ended(self) -> tuple[str, bool]:
        """("was killed by SIGKILL", whether that can only be its code's doing)."""
        try:
            request = {"wait": self.process, "timeout_s": GRACE_S}
            code = self._server.ask(request)["code"]
        except EOFError:
            return "lost its server", False
        if code is None:
            return "closed its connection", True
        self.process = 0
        if code == -signal.SIGXCPU:
            return "did not end, nor could it be stopped", True
        if code < 0:
            name = signal.Signals(-code).name
            return f"was killed by {name}{_MEANS.get(name, '')}", name != "SIGKILL"
        words = self._last_words() or "os._exit, or a library that gave up"
        return f"ended the process with code {code} ({words})", True

    def _last_words(self) -> str:
        """What it raised outside of the learner's code; "" if it did not say."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            path = Path(self._scratch.name, LAST_WORDS)
            if not path.is_symlink() and path.stat().st_size <= _MOST_WORDS:
                return path.read_text("utf-8")
        return ""

    def close(self) -> None:
        """End the child and all that it started."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process, signal.SIGKILL)
                os.killpg(self.process, signal.SIGKILL)
            with contextlib.suppress(EOFError):
                self._server.ask({"wait": self.process, "timeout_s": GRACE_S})
        super().close()
        self._scratch.cleanup()


class Server:
    """`fork_server.py` as a process."""

    def __init__(self, modules: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        self.scratch = tempfile.TemporaryDirectory(prefix="overlaplab-grade-")
        package_parent = str(Path(overlaplab.__file__).parent.parent)
        paths = [package_parent, os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "MPLBACKEND": "Agg",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        script = str(Path(__file__).with_name("fork_server.py"))
        with theirs:
            self.process = subprocess.Popen(
                # -P: this folder's modules (laws, cells) are not top-level ones.
                [
                    *(sys.executable, "-P", script, str(theirs.fileno())),
                    *(self.scratch.name, *modules),
                ],
                pass_fds=[theirs.fileno()],
                cwd=self.scratch.name,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())

    def ask(
        self, request: Mapping[str, Any], handle: socket.socket | None = None
    ) -> dict[str, Any]:
        """The server's answer.

        Args:
            request: JSON values.
            handle: a socket to send with it.

        Raises:
            EOFError: the server is gone.
        """
        try:
            self._connection.send_bytes(json.dumps(request).encode())
            if handle is not None:
                reduction.send_handle(
                    self._connection, handle.fileno(), self.process.pid
                )
            if self._connection.poll(START_S):
                answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
                return answer
        except (OSError, EOFError):
            pass
        raise EOFError(f"the judging process is gone (code {self.process.poll()})")

    def close(self) -> None:
        """End the server and its forks; whoever waits for an answer gets EOFError."""
        self.process.kill()
        self.process.wait()
        self._connection.close()
        self.scratch.cleanup()
