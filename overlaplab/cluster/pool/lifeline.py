"""The first thing that a process of the pool does: tie its life to its parent's.

Imports nothing heavy, so that a process whose parent dies while torch loads goes too.
A *template* is a process that has loaded torch and done nothing with it; it forks
workers in milliseconds, where each would load torch for seconds. Forking is safe there
because no operator has run: torch has no threads yet, and CUDA is untouched.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import struct
import sys

_PR_SET_PDEATHSIG = 1
FORK, POLL = b"F", b"P"
REQUEST = struct.Struct("=ci")  # which, process id
REPLY = struct.Struct("=i")  # process id, or exit code as subprocess gives it
RUNNING = 2**31 - 1  # the reply to POLL while the worker runs
NUM_FILES = 4  # of a worker: socket, collective log, stack, log


def start(
    parent: int, socket_file: int, collectives_file: int, stack_file: int
) -> None:
    """Become a worker of the process `parent`; returns never. See `worker.main`."""
    _die_with(parent)
    from overlaplab.cluster.pool.worker import main

    main(socket_file, collectives_file, stack_file)


def start_template(parent: int, control_file: int, has_dynamo: int) -> None:
    """Become a template: fork a worker, or report how one ended, as `parent` asks on a
    socket. `has_dynamo`: `parent` has loaded torch._dynamo, as a first optimizer does
    for seconds; its workers will want it, and can have it at once."""
    _die_with(parent)
    import overlaplab.cluster.pool.worker  # noqa: F401 (to have it loaded)

    if has_dynamo:
        import torch._dynamo  # noqa: F401

    gc.freeze()  # what is loaded stays; a collection in a worker need not touch it
    control = socket.socket(fileno=control_file)
    while True:
        request, files, _, _ = socket.recv_fds(control, REQUEST.size, NUM_FILES)
        if not request:
            os._exit(0)
        which, pid = REQUEST.unpack(request)
        reply = _fork(control, files) if which == FORK else _poll(pid)
        control.sendall(REPLY.pack(reply))


def _fork(control: socket.socket, files: list[int]) -> int:
    template = os.getpid()
    pid = os.fork()
    if pid == 0:
        control.close()
        os.setsid()  # an interrupt of the terminal or kernel is the parent's to handle
        socket_file, collectives_file, stack_file, log_file = files
        os.dup2(log_file, 1)
        os.dup2(log_file, 2)
        os.close(log_file)
        try:
            start(template, socket_file, collectives_file, stack_file)
        finally:
            os._exit(1)
    for file in files:
        os.close(file)
    return pid


def _poll(pid: int) -> int:
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:  # asked again after it was reported
        return 0
    return os.waitstatus_to_exitcode(status) if ended else RUNNING


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)
