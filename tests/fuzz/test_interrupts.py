"""A few of the interrupts of `interrupts`, in a process of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.guards import GUARD_S


@pytest.mark.parametrize(("cluster", "seed"), [("virtual", 3), ("gloo", 5)])
def test_an_interrupt_leaves_nothing_and_the_next_run_is_right(cluster: str, seed: int):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.fuzz.interrupts", "--cluster", cluster),
            *("--number", "6", "--seed", str(seed)),
        ],
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 interrupts" in done.stdout and " 0 faults" in done.stdout
