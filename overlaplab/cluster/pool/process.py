"""One worker process, seen from its parent: start, talk, locate, kill.

It is started by a template's fork (Linux), or as a new interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Protocol

from overlaplab.cluster.pool.collective_log import Notes, read_notes
from overlaplab.cluster.pool.lifeline import FORK, POLL, REPLY, REQUEST, RUNNING
from overlaplab.errors import OverlaplabError

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "numbers = [int(a) for a in sys.argv[2:]]; sys.argv = ['']; "
    "from overlaplab.cluster.pool import lifeline; lifeline.{start}(*numbers)"
)
# torchrun's variables would make a worker believe that it is somebody's rank.
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

_LOAD_S = 600.0  # torch loads in seconds, on a busy machine in many

# The kernel kills a process when the *thread* that started it ends: so one thread that
# lives as long as this process starts them all.
_launchers = [ThreadPoolExecutor(max_workers=1, thread_name_prefix="overlaplab pool")]


def new_launcher() -> None:
    """In a forked child, which has no thread but its own."""
    _launchers.append(ThreadPoolExecutor(1, thread_name_prefix="overlaplab pool"))


class Handle(Protocol):
    """A started process."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""


class Starter:
    """Starts workers with the environment that this process has now."""

    def __init__(self) -> None:
        self._template: _Template | None = None

    def start(self, files: Sequence[int]) -> Handle:
        """Start a worker with its socket, collective log, stack and log; the caller
        closes its own copies of these files."""
        if sys.platform != "linux":  # forking is not safe with every system's libraries
            return _popen("start", files[:3], files[3])
        if self._template is None or self._template.is_broken:
            self.close()
            self._template = _Template()
        return self._template.fork(files)

    def close(self) -> None:
        """Forget the template; the workers must have ended."""
        template, self._template = self._template, None
        if template is not None:
            template.close()


class _Template:
    """Asks a template process; see `lifeline`."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_LOAD_S)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        with theirs:
            self._process = _popen(
                "start_template",
                [theirs.fileno()],
                self._log.fileno(),
                "torch._dynamo" in sys.modules,
            )
        self._lock = threading.Lock()
        self.is_broken = False

    def fork(self, files: Sequence[int]) -> Handle:
        try:
            return _Forked(self, self._ask(FORK, 0, files))
        except OSError as error:
            self._log.seek(0)
            log = self._log.read().decode(errors="replace")
            raise OverlaplabError(
                f"no process can be started: {error}\n{log}"
            ) from None

    def poll(self, pid: int) -> int | None:
        try:
            code = self._ask(POLL, pid)
        except OSError:  # the template has died, and its workers with it
            return -signal.SIGKILL
        return None if code == RUNNING else code

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _ask(self, which: bytes, pid: int, files: Sequence[int] = ()) -> int:
        if self.is_broken:
            raise ConnectionError("the template process does not answer")
        request = REQUEST.pack(which, pid)
        with self._lock:
            try:
                if files:
                    socket.send_fds(self._control, [request], list(files))
                else:
                    self._control.sendall(request)
                reply = self._control.recv(REPLY.size)
                if len(reply) < REPLY.size:
                    raise ConnectionError("the template process has died")
            except BaseException:  # an interrupt too: its reply would answer the next
                self.is_broken = True
                raise
        answer: int = REPLY.unpack(reply)[0]
        return answer


class _Forked:
    def __init__(self, template: _Template, pid: int) -> None:
        self.pid = pid
        self._template = template
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._template.poll(self.pid)
        return self._code


def _popen(
    start: str, files: Sequence[int], log: int, *more: int
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _BOOTSTRAP.format(start=start)]
    command += [json.dumps(sys.path)]
    command += [str(int(number)) for number in (os.getpid(), *files, *more)]
    return (
        _launchers[-1]
        .submit(
            lambda: subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                pass_fds=files,
                start_new_session=True,  # as in a template's fork
            )
        )
        .result()
    )


def _environment() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
    environment["OVERLAPLAB_RANK"] = "1"  # `run` refuses to nest
    environment.setdefault("KINETO_LOG_LEVEL", "99")  # it prints on every start
    if sys.platform == "linux":  # all ranks are on this machine
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


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
