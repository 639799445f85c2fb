"""3.3: how a wrong diagnosis is described; figures name things as findings do."""

from __future__ import annotations

from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab03 import checks
from overlaplab_course.lab03.given import Case


def look_up(towers):
    main, sides = streams.current_stream(), []
    for tower in towers:
        sides.append(streams.Stream())
        sides[-1].wait_stream(main)
        with streams.stream(sides[-1]):
            tower.fetch()
            tower.forward()
    for side in sides:
        main.wait_stream(side)


def graded(said):
    return judge(find_exercise("3.3b"), 3, said, look_up)


def test_what_is_not_filled_in_is_described_in_one_line(faults):
    right = checks.REPAIRS["3.3b"].truth(3)
    found = faults(graded({**right, "kind": None, "tensor": None}))[checks.DIAGNOSIS]
    assert "not filled in: kind, tensor" in found
    assert "is not what the run shows" not in found


def test_a_wrong_answer_comes_with_where_to_look(faults):
    right = checks.REPAIRS["3.3b"].truth(3)
    verdict = graded({**right, "rank": 1 - right["rank"]})
    found = faults(verdict)
    assert list(found) == [checks.DIAGNOSIS]
    assert "is not what the run shows" in found[checks.DIAGNOSIS]
    assert "rank: look at the finding's first line" in verdict.hint


def test_messages_are_numbered_in_figures_as_in_findings():
    seen = Case("3.3a", 3).as_handed_out()
    names = {s.name for s in seen.timeline.spans if s.kind == "communication"}
    assert names == {f"all_reduce #{n}" for n in range(5)}
    assert any(name in str(seen.findings[0]) for name in names)
