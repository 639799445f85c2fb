"""Weights that change places by reference: no copy, and each set is known."""

import pytest

from overlaplab.cluster.virtual import run_virtual
from overlaplab.program import find_findings
from overlaplab.streams import current_stream
from tests.hazards.wrong_buffers import TwoSets


@pytest.mark.parametrize("swap", ["swap_data", "swap_parameter"])
def test_a_swap_is_no_operator(swap):
    def step():
        sets = TwoSets()
        for _ in range(2):
            sets.update()
            sets.serve()
            current_stream().wait_stream(sets.side)
            getattr(sets, swap)()
            sets.side.wait_stream(current_stream())
        return sets.serve()

    (value,), program = run_virtual(step, world_size=1)
    assert value.tolist() == [[4] * 4] * 2
    names = {name.access.storage: name.name for name in program.names}
    used = [
        (
            o.name,
            o.stream,
            [names[a.storage] for a in o.reads + o.writes if a.storage in names],
        )
        for o in program.ranks[0]
        if o.name in ("copy_", "mm")
    ]
    assert used == [
        ("copy_", "stream 1", ["second set"]),
        ("mm", "default", ["first set"]),
        ("copy_", "stream 1", ["first set"]),
        ("mm", "default", ["second set"]),
        ("mm", "default", ["first set"]),
    ]
    assert {o.name for o in program.ranks[0]} == {"ones", "uniform_", "copy_", "mm"}
    assert find_findings(program) == ()
