"""0.2: what is counted when backward() returns, and how slips are described."""

from __future__ import annotations

from dataclasses import replace

import pytest

import overlaplab as ol
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab00 import checks as lab00
from overlaplab_course.lab00 import given
from overlaplab_course.lab00.checks import step_and_slower
from overlaplab_course.lab00.given import count, step_of

NUMBER = 6


def right(number=NUMBER):
    timeline, slower = step_and_slower(number)
    seen = count(timeline)
    return {
        "returned_us": seen.returned_us,
        "launched": seen.launched,
        "started": seen.started,
        "finished": seen.finished,
        "finished_if_slower": count(slower).finished,
    }


@pytest.mark.parametrize("number", [6, 1, 17, 31])
def test_the_right_counts_pass_for_every_number(number):
    verdict = judge(find_exercise("0.2"), number, right(number))
    assert verdict.passed, str(verdict)


def test_counts_as_floats_and_with_more_keys_pass():
    said = {key: float(value) for key, value in right().items()} | {"note": "mine"}
    assert judge(find_exercise("0.2"), NUMBER, said).passed


def kernels():
    return [s for s in step_and_slower(NUMBER)[0].spans if s.kind == "compute"]


WRONG = {
    "returned when the GPU ends": (
        lambda: {"returned_us": step_and_slower(NUMBER)[0].end_ns / 1000},
        lab00.RETURNED,
        "the CPU does not wait for it",
    ),
    "in nanoseconds": (
        lambda: {"returned_us": 1000 * right()["returned_us"]},
        lab00.RETURNED,
        "that is in ns",
    ),
    "launches and kernels": (
        lambda: {"launched": len(step_and_slower(NUMBER)[0].spans)},
        lab00.LAUNCHED,
        "launches and kernels together",
    ),
    "the last launch left out": (
        lambda: {"launched": right()["launched"] - 1},
        lab00.LAUNCHED,
        "counts too",
    ),
    "launched is started": (
        lambda: {"started": right()["launched"]},
        lab00.STARTED,
        "a launch is not a start",
    ),
    "started is finished": (
        lambda: {"started": right()["finished"]},
        lab00.STARTED,
        "it has started",
    ),
    "all have finished": (
        lambda: {"finished": len(kernels())},
        lab00.FINISHED,
        "how many by that moment",
    ),
    "the running one has finished": (
        lambda: {"finished": right()["started"]},
        lab00.FINISHED,
        "still running",
    ),
    "slower, not resolved": (
        lambda: {"finished_if_slower": right()["finished"]},
        lab00.SLOWER,
        "count at the new moment",
    ),
    "slower, at the old moment": (
        lambda: {
            "finished_if_slower": sum(
                s.kind == "compute" and s.end_ns <= 1000 * right()["returned_us"]
                for s in step_and_slower(NUMBER)[1].spans
            )
        },
        lab00.SLOWER,
        "count at the new moment",
    ),
    "nothing": (lambda: {"launched": None}, lab00.LAUNCHED, ""),
    "a word": (lambda: {"launched": "all"}, lab00.LAUNCHED, ""),
    "a truth": (lambda: {"launched": True}, lab00.LAUNCHED, ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_slip_is_refused_and_described_by_what_was_counted(name, faults):
    slip, sentence, hint = WRONG[name]
    verdict = judge(find_exercise("0.2"), NUMBER, {**right(), **slip()})
    found = faults(verdict)
    assert list(found) == [sentence]
    assert hint in found[sentence]
    assert verdict.timeline is not None


def test_each_wrong_count_is_described_how_it_is_counted(faults):
    said = {**right(), "launched": 1, "finished": len(kernels())}
    found = faults(judge(find_exercise("0.2"), NUMBER, said))
    assert found[lab00.LAUNCHED] == "launched: 1, expected the number of launch spans"
    assert "how many by that moment" in found[lab00.FINISHED]
    assert "whose .end_ns is not after that moment" in found[lab00.FINISHED]


def test_an_answer_that_is_left_out_is_refused(faults):
    said = right()
    del said["started"]
    found = faults(judge(find_exercise("0.2"), NUMBER, said))
    assert "there is no 'started'" in found[lab00.STARTED]


def test_what_is_no_dict_is_refused():
    verdict = judge(find_exercise("0.2"), NUMBER, [1, 2, 3])
    assert "expected a dict" in verdict.error


@pytest.mark.parametrize("number", range(12))
def test_when_backward_returns_most_is_launched_and_not_finished(number):
    """What the lesson says must hold for whatever number a learner types."""
    counts = right(number)
    assert counts["finished"] < 0.4 * counts["launched"]
    assert counts["finished"] < counts["finished_if_slower"] < counts["launched"]
    assert len({*counts.values()}) == len(counts)


def test_the_step_with_knobs_has_the_operators_of_the_recorded_one():
    model, x = given.model_and_batch(NUMBER)
    recorded = ol.run(given.train_step, model, x, world_size=1, hardware=given.GPU)
    on_shapes = step_of(len(model) // 2, x.shape[1], x.shape[0])

    def described(program):
        return [
            (op.name, op.phase, op.flops, op.read_bytes, op.write_bytes, op.dtype)
            for op in program.ranks[0]
        ]

    assert described(on_shapes) == described(recorded.program)


def test_launches_twice_as_long_return_twice_as_late():
    timeline, slower = step_and_slower(NUMBER)
    assert count(slower).returned_us == 2 * count(timeline).returned_us
    free = ol.resolve(step_of(4, 64, 32), replace(given.GPU, launch_ns=0))
    assert all(span.kind != "launch" for span in free.spans)
