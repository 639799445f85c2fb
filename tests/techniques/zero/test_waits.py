"""Whatever is slow in a step, each wait for it is there; without it there is a hazard.

The same programs as on GPUs, where a missing wait shows in values.
"""

from __future__ import annotations

import pytest

import overlaplab as ol
from tests.gpu import zero_streams


@pytest.mark.parametrize("name", zero_streams.PROGRAMS)
def test_a_step_of_streams_is_free_of_hazards_and_right(name: str) -> None:
    run = ol.run(zero_streams.PROGRAMS[name], True)
    assert run.warnings == ()
    assert max(run.values) < zero_streams.RIGHT


@pytest.mark.parametrize("name", zero_streams.PROGRAMS)
def test_without_the_wait_there_is_a_hazard(name: str) -> None:
    run = ol.run(zero_streams.PROGRAMS[name], False)
    assert {finding.kind for finding in run.warnings} == {"hazard"}
