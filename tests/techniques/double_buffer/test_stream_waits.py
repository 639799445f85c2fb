"""Whatever is slow, each wait for it is there; without it there is a hazard.

The same programs as on GPUs, where a missing wait shows in values.
"""

from __future__ import annotations

import pytest

import overlaplab as ol
from tests.gpu import double_buffer_programs as programs


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_what_is_slow_is_waited_for(name: str) -> None:
    run = ol.run(programs.PROGRAMS[name], True)
    assert run.warnings == ()
    assert max(run.values) < programs.RIGHT


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_without_the_wait_there_is_a_hazard(name: str) -> None:
    run = ol.run(programs.PROGRAMS[name], False)
    assert {finding.kind for finding in run.warnings} == {"hazard"}
