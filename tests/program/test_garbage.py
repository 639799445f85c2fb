"""The collector is paused, and only as long as it should be."""

import gc

import pytest

from overlaplab.program import ProgramBuilder, resolve
from overlaplab.program.garbage import no_collections


def test_the_collector_stands_still_inside_and_goes_on_after_an_error():
    with pytest.raises(ZeroDivisionError), no_collections():
        assert not gc.isenabled()
        _ = 1 / 0
    assert gc.isenabled()


def test_who_had_it_off_before_has_it_off_after():
    gc.disable()
    try:
        with no_collections():
            pass
        resolve(ProgramBuilder().build(), "chalk")
        assert not gc.isenabled()
    finally:
        gc.enable()
