"""What ranks share in a process: random generators, and torch's settings of a whole
process, which a run must not leave changed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch

from overlaplab.cluster.membership import ENVIRONMENT


@contextmanager
def kept_settings() -> Iterator[None]:
    """Put back what the `with` block changes: default dtype, grad mode, threads,
    deterministic algorithms, anomaly detection, environment variables."""
    environment = dict(os.environ)
    dtype = torch.get_default_dtype()
    grad = torch.is_grad_enabled()
    num_threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    anomaly = torch.is_anomaly_enabled()
    check_nan = torch.is_anomaly_check_nan_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        now = torch.are_deterministic_algorithms_enabled()
        if now != deterministic:  # it imports the compiler
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.autograd.set_detect_anomaly(anomaly, check_nan)
        set_environment(dict.fromkeys(os.environ) | environment)


SEED = 0


def seed() -> None:
    """Put torch's, random's and numpy's generators into the ranks' first state."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


@contextmanager
def seeded() -> Iterator[None]:
    """`seed()` for the `with` block; the caller's state comes back after it."""
    state = process_state()
    seed()
    try:
        yield
    finally:
        set_process_state(state)


def first_state() -> tuple[Any, ...]:
    """What `seed` makes, as `set_process_state` takes it; changes nothing."""
    return *_first_generators(), torch.get_default_dtype(), {}


@cache  # whoever sets a state copies it
def _first_generators() -> tuple[Any, ...]:
    generator = torch.Generator()
    generator.manual_seed(SEED)
    numpy_state = np.random.RandomState(SEED).get_state()
    return generator.get_state(), random.Random(SEED).getstate(), numpy_state


def process_state() -> tuple[Any, ...]:
    """What ranks would share and processes do not: the random generators, the default
    dtype, torchrun's part of the environment; as `set_process_state` takes it."""
    return (
        torch.default_generator.get_state(),
        random.getstate(),
        np.random.get_state(),
        torch.get_default_dtype(),
        {name: os.environ.get(name) for name in ENVIRONMENT},
    )


def set_process_state(state: tuple[Any, ...]) -> None:
    """Put back what `process_state` returned."""
    torch_state, python_state, numpy_state, dtype, environment = state
    torch.default_generator.set_state(torch_state)
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_default_dtype(dtype)
    set_environment(environment)


def set_environment(environment: Mapping[str, str | None]) -> None:
    """Set these variables; those that are None are deleted."""
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        elif os.environ.get(name) != value:
            os.environ[name] = value
