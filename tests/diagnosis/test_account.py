"""Where a step's time goes: literal accounts, and that they add up."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

import overlaplab as ol
from overlaplab.diagnosis.case import case_of
from overlaplab.timeline import KINDS, Span, Timeline
from tests.diagnosis.hand import compute, copy, launch, send, span, timeline, wait


def parts(made: Timeline) -> dict[str, float]:
    """Entries that are not empty, in microseconds."""
    (step,) = case_of(made, None).steps
    return {entry: ns / 1000 for entry, ns in step.parts.items() if ns}


def test_hidden_communication_counts_as_computing_and_the_rest_as_the_last_sending():
    made = timeline(compute(0, 100), send(60, 130))
    assert parts(made) == {"computing": 100, "sending_last": 30}


def test_exposed_communication_is_awaited_if_the_next_kernel_starts_when_it_ends():
    made = timeline(compute(0, 50), send(50, 80), compute(80, 100, launch=10))
    assert parts(made) == {"computing": 70, "sending_awaited": 30}


def test_exposed_communication_is_the_cpus_until_the_next_kernel_is_launched():
    made = timeline(compute(0, 50), send(50, 80), compute(80, 100, launch=70))
    expected = {"computing": 70, "sending_cpu": 20, "sending_awaited": 10}
    assert parts(made) == expected


def test_what_follows_the_last_collective_awaits_nothing_if_it_is_an_optimizer():
    made = timeline(
        compute(0, 90, launch=0),
        send(90, 120),
        compute(120, 130, launch=20, name="_fused_adamw_"),
    )
    assert parts(made) == {"computing": 100, "sending_last": 30}


def test_a_gap_before_a_kernel_that_was_not_launched_is_the_cpus_to_the_launchs_end():
    made = timeline(
        compute(0, 50, launch=-9), launch(60, 75), compute(80, 100, launch=60)
    )
    assert parts(made) == {"computing": 70, "idle_cpu": 25, "idle_other": 5}


def test_a_gap_after_a_wait_of_the_cpu_is_the_waits():
    made = timeline(
        compute(0, 50, launch=-9),
        wait(10, 51),
        launch(60, 75),
        compute(80, 100, launch=60),
    )
    assert parts(made) == {"computing": 70, "idle_sync": 25, "idle_other": 5}


def test_a_wait_that_began_after_the_gap_did_not_cause_it():
    made = timeline(
        compute(0, 50, launch=-9),
        wait(55, 56),
        launch(60, 75),
        compute(80, 100, launch=60),
    )
    assert "idle_sync" not in parts(made)


def test_a_gap_without_launch_records_is_of_unknown_cause_and_cpu_bound_time_is_none():
    made = timeline(compute(0, 50), compute(80, 100))
    assert parts(made) == {"computing": 70, "idle_other": 30}
    assert case_of(made, None).steps[0].cpu_bound_ns is None


def test_copies_count_where_nothing_computes_and_nothing_is_sent():
    made = timeline(compute(0, 50), copy(40, 70), send(60, 90), compute(90, 100))
    expected = {"computing": 60, "copying": 10, "sending_awaited": 30}
    assert parts(made) == expected


def test_steps_windows_follow_one_another_though_the_cpu_runs_ahead():
    made = timeline(
        launch(0, 1, step=1),
        launch(2, 3, step=2),
        compute(5, 50, step=1, launch=0),
        compute(60, 100, step=2, launch=2),
    )
    windows = [(s.start_ns, s.end_ns) for s in case_of(made, None).steps]
    assert windows == [(0, 50_000), (50_000, 100_000)]


def test_a_step_cut_out_of_a_run_begins_with_its_first_kernel_if_that_was_queued():
    made = timeline(launch(2, 3, step=2), compute(160, 200, step=2, launch=2))
    (step,) = case_of(made, None).steps
    assert (step.start_ns, step.end_ns) == (160_000, 200_000)


def test_only_a_step_that_exists_can_be_asked_for():
    made = timeline(compute(0, 10, step=3))
    assert [s.step for s in ol.diagnose(made, step=3).case.steps] == [3]
    try:
        ol.diagnose(made, step=4)
    except ValueError as error:
        assert "no step 4" in str(error) and "(3,)" in str(error)
    else:
        raise AssertionError("step 4 was accepted")


@st.composite
def any_timeline(draw: st.DrawFn) -> Timeline:
    spans: list[Span] = []
    for _ in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(KINDS))
        start = draw(st.integers(0, 100))
        lane = "cpu" if kind in ("launch", "host") else draw(st.sampled_from("abc"))
        more = {}
        if draw(st.booleans()):
            more["launch"] = draw(st.integers(-10, 100))
        if draw(st.booleans()):
            more["step"] = draw(st.integers(1, 2))
        end = start + draw(st.integers(0, 40))
        rank = draw(st.integers(0, 1))
        name = draw(st.sampled_from(["wait x", "mm", "all_reduce"]))
        spans.append(span(rank, lane, kind, name, start, end, **more))
    return timeline(*spans)


@settings(max_examples=200)
@given(any_timeline())
def test_every_account_adds_up_to_its_step_and_exposed_to_its_sending(made: Timeline):
    found = ol.diagnose(made)
    for step in found.case.steps:
        assert sum(step.parts.values()) == step.step_ns
        assert all(ns >= 0 for ns in step.parts.values())
        ordered = [(p.start_ns, p.end_ns) for p in step.stretches]
        assert all(a[1] <= b[0] for a, b in pairwise(ordered))
    for one in found.findings:
        assert one.cost_ns > 0
        assert all(0 <= index < len(made.spans) for index in one.spans)
    if not made.steps:
        for step in found.case.steps:
            sending = sum(ns for e, ns in step.parts.items() if e.startswith("sending"))
            assert sending == step.exposed_ns
    assert str(found)
