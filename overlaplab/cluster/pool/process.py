"""One worker process, seen from its parent: start, talk, locate, kill."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import IO, Any

from overlaplab.cluster.pool.diary import Notes, read_notes

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "numbers = [int(a) for a in sys.argv[2:]]; sys.argv = ['']; "
    "from overlaplab.cluster.pool.lifeline import start; start(*numbers)"
)
# torchrun's variables would make a worker believe that it is somebody's rank.
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LOG_BYTES = 100_000
_STACKS = re.compile(r"^(Current thread|Thread|Extension modules)\b", re.MULTILINE)

# The kernel kills a worker when the *thread* that started it ends: so one thread that
# lives as long as this process starts them all.
_launcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="overlaplab pool")


class WorkerProcess:
    """A started worker. Its files have no names, so nothing is left of them.

    `main_thread` is set by the first message that the worker sends.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        # fmt: off
        self._diary: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in kill)
        self._stack: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        # fmt: on
        files = (theirs.fileno(), self._diary.fileno(), self._stack.fileno())
        command = [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path)]
        command += [str(number) for number in (os.getpid(), *files)]
        with theirs:
            self._popen = _launcher.submit(
                subprocess.Popen,
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=_environment(),
                pass_fds=files,
                # An interrupt of the terminal or kernel is the parent's to handle.
                start_new_session=True,
            ).result()
        self.connection = Connection(ours.detach())
        self.main_thread: int | None = None
        self._log_start = 0

    @property
    def pid(self) -> int:
        pid: int = self._popen.pid
        return pid

    def send(self, message: Any) -> bool:
        """Send; False if the worker is dead."""
        try:
            self.connection.send(message)
        except OSError:
            return False
        return True

    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    def how_it_ended(self) -> str:
        """ "killed by SIGKILL", "exited with code 3"."""
        try:
            code = self._popen.wait(timeout=1)
        except subprocess.TimeoutExpired:
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
        return read_notes(self._diary.fileno())

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
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._popen.kill()
        self._popen.wait()
        self.connection.close()
        for file in (self._diary, self._stack, self._log):
            file.close()


def _environment() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
    environment["OVERLAPLAB_RANK"] = "1"  # `run` refuses to nest
    environment.setdefault("KINETO_LOG_LEVEL", "99")  # it prints on every start
    if sys.platform == "linux":  # all ranks are on this machine
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment
