"""When the user's own modules last changed: a worker keeps what it has imported."""

from __future__ import annotations

import os
import sys

from overlaplab.cluster.pool.frames import is_users


def newest_change_s() -> float:
    """Newest modification time of the user's modules that are imported here.

    Seconds since the epoch, 0 if there are none. Libraries do not count.
    """
    newest = 0.0
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not is_users(file):
            continue
        try:
            newest = max(newest, os.stat(file).st_mtime)
        except OSError:  # moved away since
            continue
    return newest
