"""Which orders of sends and receives end on NCCL, and which never do.

What never ends is killed: each order has processes of its own.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from torch.multiprocessing.spawn import spawn

from tests.gpu.p2p_programs import LARGE, SMALL, run_rank

pytestmark = pytest.mark.gpu(2)

PATIENCE_S = 15  # after both ranks have begun; what ends, ends in milliseconds


def which_end(cases: list[tuple[str, int, bool]], folder: Path) -> dict[str, bool]:
    """Run all cases beside one another; whether each ended."""
    contexts = {}
    for i, case in enumerate(cases):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        place = folder / str(i)
        place.mkdir()
        args = (port, str(place), *case)
        contexts[place] = spawn(run_rank, args=args, nprocs=2, join=False)

    def have(place: Path, what: str) -> bool:
        return all((place / f"{what}{rank}").exists() for rank in range(2))

    deadline = time.monotonic() + 120
    while not all(have(p, "begun") for p in contexts) and time.monotonic() < deadline:
        time.sleep(0.5)
    begun = all(have(place, "begun") for place in contexts)
    deadline = time.monotonic() + PATIENCE_S
    while not all(have(p, "ended") for p in contexts) and time.monotonic() < deadline:
        time.sleep(0.5)
    for context in contexts.values():
        for process in context.processes:
            process.kill()
    assert begun, "some processes did not come up"
    return {
        f"{order}, {num * 4} bytes, {'eager' if eager else 'lazy'}": have(p, "ended")
        for p, (order, num, eager) in zip(contexts, cases, strict=True)
    }


def test_sends_before_receives_on_both_ranks_never_end(tmp_path: Path) -> None:
    cases = [
        (order, num, eager)
        for order in ("send, recv", "isend, irecv", "batch", "one of each first")
        for num in (LARGE, SMALL)
        for eager in (False, True)
    ]
    found = which_end(cases, tmp_path)
    assert found == {
        case: case.startswith(("batch", "one of each first")) for case in found
    }
