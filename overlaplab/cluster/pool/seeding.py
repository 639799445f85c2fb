"""The random state in which every rank starts, the same on every cluster."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

SEED = 0


def seed() -> None:
    """Put torch's, random's and numpy's generators into the ranks' first state."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


@contextmanager
def seeded() -> Iterator[None]:
    """`seed()` for the `with` block; the caller's state comes back after it."""
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    seed()
    try:
        yield
    finally:
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        np.random.set_state(state[2])
