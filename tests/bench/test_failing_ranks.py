"""Ranks of a measurement that fail end, whatever a backend still waits for."""

from __future__ import annotations

import pytest
from torch.multiprocessing import ProcessRaisedException

from overlaplab.processes import run_ranks
from tests.bench.failing_ranks import fail_behind_messages

ON_GPUS = pytest.mark.gpu(2)


@pytest.mark.timeout(300)  # a guard: NCCL's never ended
@pytest.mark.parametrize(
    ("backend", "device", "num_senders"),
    [
        ("gloo", "cpu", 1),
        *(pytest.param("nccl", "cuda", n, marks=ON_GPUS) for n in range(3)),
    ],
)
def test_an_error_behind_messages_ends_all_ranks(
    backend: str, device: str, num_senders: int
) -> None:
    with pytest.raises(ProcessRaisedException, match="ValueError: of rank"):
        run_ranks(
            fail_behind_messages, device, num_senders, backend=backend, world_size=2
        )
