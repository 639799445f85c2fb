"""How long a test waits. No test fails because a machine is slow or busy.

`GUARD_S` ends what hangs: nothing that goes well comes near it. `soon` is for the few
tests that wait for a deadline to pass, while what they started must get there first.
"""

from __future__ import annotations

import os
import time

GUARD_S = 900


def soon(seconds: float) -> float:
    """So many seconds on an idle machine, more on one that is busy."""
    return round(seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), 1)


def wait_until(happened, poll_s: float = 0.05) -> bool:  # type: ignore[no-untyped-def]
    """Whether it happened before the guard."""
    end = time.monotonic() + GUARD_S
    while not happened():
        if time.monotonic() > end:
            return False
        time.sleep(poll_s)
    return True
