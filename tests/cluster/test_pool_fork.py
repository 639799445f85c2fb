"""A forked child has a pool of its own; a deadline may be as long as one likes."""

import math
import os
import time

import pytest

import overlaplab as ol
from tests.guards import GUARD_S


def test_a_forked_child_runs_on_processes_of_its_own_and_so_does_its_parent_after_it():
    before = ol.run(os.getpid, world_size=1, cluster="gloo", timeout_s=math.inf).values
    ear, mouth = os.pipe()
    child = os.fork()
    if not child:
        try:
            found = ol.run(os.getpid, world_size=1, cluster="gloo", timeout_s=1e20)
            os.write(mouth, str(found.values[0]).encode())
            os._exit(0)
        finally:
            os._exit(1)
    end = time.monotonic() + GUARD_S
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.1)
    assert ended[1] == 0
    assert int(os.read(ear, 100)) not in (*before, os.getpid())
    assert ol.run(os.getpid, world_size=1, cluster="gloo").values == before
