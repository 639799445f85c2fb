"""Races that people write are found: kind, tensor and both sides; repaired, silent."""

import pytest

from overlaplab.cluster.virtual import run_virtual
from overlaplab.program import find_findings
from tests.hazards.wrong_buffers import WRONG
from tests.hazards.wrong_programs import Wrong

programs = pytest.mark.parametrize("wrong", WRONG, ids=lambda w: w.program.__name__)


@programs
def test_the_race_is_found_with_its_tensor_and_both_sides(wrong: Wrong):
    _, program = run_virtual(wrong.program, (False,), world_size=wrong.world_size)
    sides = []
    for finding in find_findings(program):
        assert finding.kind == "hazard", finding
        first, then = (program.ranks[finding.rank][index] for index in finding.ops)
        sides.append(
            (finding.name, (first.name, first.stream), (then.name, then.stream))
        )
        for source in (first.source, then.source):
            assert source.startswith("wrong_")
            assert f"[{source}" in str(finding)
    assert (wrong.tensor, wrong.first, wrong.then) in sides


@programs
def test_the_repaired_program_is_silent(wrong: Wrong):
    _, program = run_virtual(wrong.program, (True,), world_size=wrong.world_size)
    assert [str(finding) for finding in find_findings(program)] == []
