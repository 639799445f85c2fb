"""Whatever is late, each wait of the prefetcher is there; without it there is a hazard.

The same programs as on GPUs, where a missing wait shows in values.
"""

from __future__ import annotations

import pytest

import overlaplab as ol
from tests.gpu import prefetcher_programs as programs


@pytest.mark.parametrize("name", programs.PAIRS)
def test_a_loop_is_free_of_hazards_and_right(name: str) -> None:
    program, right = programs.PAIRS[name]
    run = ol.run(program, True, world_size=1)
    assert run.warnings == ()
    assert run.values[0] == right


@pytest.mark.parametrize("name", programs.PAIRS)
def test_without_the_wait_there_is_a_hazard(name: str) -> None:
    program, _ = programs.PAIRS[name]
    run = ol.run(program, False, world_size=1)
    assert {finding.kind for finding in run.warnings} == {"hazard"}
