"""torch's settings of a whole process, which a run must not leave changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kept_settings() -> Iterator[None]:
    """Put back what the `with` block changes: default dtype, grad mode, threads,
    deterministic algorithms, anomaly detection."""
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
