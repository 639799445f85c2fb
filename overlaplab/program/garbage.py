"""Making many objects that live on, without the garbage collector's walks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Nothing is collected inside.

    A program or a timeline is tens of thousands of objects, none of them garbage;
    each collection walks all that there are (a fifth of the time of a `resolve`).
    """
    collects = gc.isenabled()
    try:  # an interrupt may come at once
        gc.disable()
        yield
    finally:
        if collects:
            gc.enable()
