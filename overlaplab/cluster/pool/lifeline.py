"""The first thing that a worker process does: tie its life to its parent's.

Imports nothing heavy, so that a worker whose parent dies while torch loads goes too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def start(parent: int, socket: int, diary_file: int, stack_file: int) -> None:
    """Become a worker of the process `parent`; returns never.

    Args:
        parent: process id.
        socket, diary_file, stack_file: inherited descriptors; see `worker.main`.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)
    from overlaplab.cluster.pool.worker import main

    main(socket, diary_file, stack_file)
