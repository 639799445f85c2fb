"""What a run notes beside operators: `record_stream`; and what `check` leaves out."""

import torch
import torch.distributed as dist

import overlaplab as ol
from overlaplab import streams
from overlaplab.cluster.virtual import run_virtual
from overlaplab.program import find_findings


def test_record_stream_is_kept_with_the_stream_and_the_place():
    def step():
        side = streams.Stream()
        a, b = torch.ones(4), torch.ones(4)
        a.record_stream(side)
        b += 1
        a[:2].record_stream(side)
        a.record_stream(streams.current_stream())
        return a.sum()

    _, program = run_virtual(step, world_size=1)
    assert [s.recorded for s in program.storages] == [
        (("stream 1", 2), ("stream 1", 3), ("default", 3)),
        (),
        (),
    ]
    assert [o.name for o in program.ranks[0]] == ["ones", "ones", "add_", "sum"]


def race():
    side = streams.Stream()
    x = torch.ones(4)
    with streams.stream(side):
        x += 1
    dist.all_reduce(x, async_op=True)


def test_without_check_a_run_has_no_findings_and_the_same_record():
    checked = ol.run(race, world_size=2)
    unchecked = ol.run(race, world_size=2, check=False)
    assert {f.kind for f in checked.warnings} == {"hazard", "unwaited"}
    assert unchecked.warnings == ()
    assert unchecked.program == checked.program
    assert unchecked.timeline == checked.timeline
    found = find_findings(unchecked.program, unchecked.timeline)
    assert found == checked.warnings
