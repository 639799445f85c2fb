"""What is ordered, by whatever chain, is no hazard; neither is anything else found."""

import pytest

from overlaplab.cluster.virtual import run_virtual
from overlaplab.program import find_findings
from tests.hazards.right_programs import RIGHT


@pytest.mark.parametrize("program", RIGHT, ids=lambda p: p.__name__)
def test_nothing_is_found_in(program):
    _, record = run_virtual(program, world_size=2)
    assert [str(finding) for finding in find_findings(record)] == []
