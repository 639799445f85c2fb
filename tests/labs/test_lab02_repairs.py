"""2.8: two broken profilers. What is pasted over the fault is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import overlaplab
from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab02 import broken, totals
from overlaplab_course.lab02.rows import unseen_rows


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first run of a process imports for long: not on an exercise's deadline."""
    broken.plain_ms(0)


def events():
    return (streams.Event(enable_timing=True) for _ in range(4))


def answer(begin, computed, sending, sent):
    start, end = begin.elapsed_time(sending), begin.elapsed_time(sent)
    compute_ms = begin.elapsed_time(computed)
    return {
        "compute_ms": compute_ms,
        "communication_ms": end - start,
        "hidden_ms": max(0.0, min(compute_ms, end) - max(0.0, start)),
    }


def repaired(compute, send):
    begin, computed, sending, sent = events()
    main, side = streams.current_stream(), streams.Stream()
    side.wait_stream(main)
    begin.record()
    with streams.stream(side):
        sending.record()
        work = send()
        work.wait()
        sent.record()
    compute()
    computed.record()
    main.wait_stream(side)
    streams.synchronize()
    return answer(begin, computed, sending, sent)


def waits_beside(compute, send):
    """Unusual: the message is sent from the main stream; only its wait is beside."""
    begin, computed, sending, sent = events()
    main, side = streams.current_stream(), streams.Stream()
    begin.record(main)
    sending.record(main)
    work = send()
    with streams.stream(side):
        work.wait()
        sent.record()
    compute()
    computed.record(main)
    work.wait()
    sent.synchronize()
    computed.synchronize()
    return answer(begin, computed, sending, sent)


def computes_beside(compute, send):
    """Unusual: the products move to another stream, the message stays."""
    begin, computed, sending, sent = events()
    main, side = streams.current_stream(), streams.Stream()
    side.wait_stream(main)
    sending.record()
    work = send()
    with streams.stream(side):
        begin.record()
        compute()
        computed.record()
    work.wait()
    sent.record()
    main.wait_stream(side)
    streams.synchronize()
    return answer(begin, computed, sending, sent)


@pytest.mark.parametrize("right", [repaired, waits_beside, computes_beside])
def test_any_profiler_that_sees_the_overlap_passes(right):
    verdict = judge(find_exercise("2.8a"), lambda compute, send: right(compute, send))
    assert verdict.passed, str(verdict)


def serialises(compute, send):
    begin, computed, sending, sent = events()
    sending.record()
    send().wait()
    sent.record()
    begin.record()
    compute()
    computed.record()
    streams.synchronize()
    said = answer(begin, computed, sending, sent)
    return said | {"hidden_ms": min(said["compute_ms"], said["communication_ms"])}


def sends_twice(compute, send):
    said = repaired(compute, send)
    alone, done = streams.Event(enable_timing=True), streams.Event(enable_timing=True)
    alone.record()
    send().wait()
    done.record()
    streams.synchronize()
    return said | {"communication_ms": alone.elapsed_time(done)}


def the_cpu_waits(compute, send):
    begin, computed, sending, sent = events()
    side = streams.Stream()
    side.wait_stream(streams.current_stream())
    with streams.stream(side):
        sending.record()
        send().wait()
        sent.record()
    sent.synchronize()
    begin.record()
    compute()
    computed.record()
    streams.synchronize()
    said = answer(begin, computed, sending, sent)
    return said | {"hidden_ms": min(said["compute_ms"], said["communication_ms"])}


def hides_everything(compute, send):
    said = repaired(compute, send)
    return said | {"hidden_ms": said["communication_ms"]}


def events_swapped(compute, send):
    """The message's start before the products, its end still after them."""
    begin, computed, sending, sent = events()
    begin.record()
    sending.record()
    work = send()
    compute()
    computed.record()
    work.wait()
    sent.record()
    streams.synchronize()
    return answer(begin, computed, sending, sent)


def by_difference(compute, send):
    """Takes the whole step for compute."""
    said = repaired(compute, send)
    return said | {"compute_ms": said["compute_ms"] + said["communication_ms"]}


WRONG = {
    broken.broken_profile: (broken.MESSAGE, broken.HIDDEN),
    events_swapped: (broken.MESSAGE, broken.HIDDEN),
    serialises: (broken.UNDISTURBED,),
    the_cpu_waits: (broken.UNDISTURBED,),
    sends_twice: (broken.ONCE,),
    hides_everything: (broken.HIDDEN,),
    by_difference: (broken.COMPUTE,),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_a_fault_pasted_over_is_refused_by_its_sentence(wrong, faults):
    verdict = judge(find_exercise("2.8a"), lambda compute, send: wrong(compute, send))
    found = faults(verdict)
    assert set(WRONG[wrong]) <= set(found)
    assert verdict.timeline is not None


def test_the_broken_profiler_sees_no_overlap_of_any_step():
    for case in range(len(broken.CASES)):
        timed = broken.profile_with(broken.broken_profile, case)
        assert timed.value[0]["hidden_ms"] == 0
        assert broken.truth(timed.timeline)["hidden_ms"] > 0


# --- 2.8b ------------------------------------------------------------------------


def summary(rows, *, kernels_only=True, step="wall", busy="union", top=max):
    rows = [r for r in rows if r.category == "kernel" or not kernels_only]
    sums = {}
    for row in rows:
        sums.setdefault(row.name, []).append(row.end_ns - row.start_ns)
    by_name = {name: sum(times) for name, times in sums.items()}
    wall = max(r.end_ns for r in rows) - min(r.start_ns for r in rows)
    covered, until = 0, 0
    for row in sorted(rows, key=lambda r: r.start_ns):
        covered += max(0, row.end_ns - max(until, row.start_ns))
        until = max(until, row.end_ns)
    names = {"sum": sum(by_name.values()), "largest": max(by_name.values())}
    names |= {"wall": wall, "union": covered}
    return {
        "step_ns": names[step],
        "busy_ns": names[busy],
        "by_name": by_name,
        "top": top(by_name, key=lambda name: by_name[name]),
    }


def backwards(rows):
    """Unusual: reference on rows in reverse order, a Counter for the sums."""
    from collections import Counter

    said = totals.reference(rows[::-1])
    return said | {"by_name": Counter(said["by_name"])}


@pytest.mark.parametrize("right", [summary, backwards])
def test_any_summary_that_adds_up_passes(right):
    verdict = judge(find_exercise("2.8b"), lambda rows: right(rows))
    assert verdict.passed, str(verdict)


WRONG_SUMMARIES = {
    "the largest name is the step": ({"step": "largest"}, totals.STEP),
    "the sum is the step": ({"step": "sum"}, totals.STEP),
    "busy is the step": ({"step": "union"}, totals.STEP),
    "the sum is busy": ({"busy": "sum"}, totals.BUSY),
    "the step is busy": ({"busy": "wall"}, totals.BUSY),
    "annotations too": ({"kernels_only": False}, totals.NAMES),
    "the smallest on top": ({"top": min}, totals.TOP),
}


@pytest.mark.parametrize("name", WRONG_SUMMARIES)
def test_a_wrong_summary_is_refused_by_its_sentence(name, faults):
    slips, sentence = WRONG_SUMMARIES[name]
    verdict = judge(find_exercise("2.8b"), lambda rows: summary(rows, **slips))
    assert sentence in faults(verdict)


def test_the_broken_summary_is_wrong_in_three_ways(faults):
    verdict = judge(find_exercise("2.8b"), lambda rows: totals.broken_summary(rows))
    assert set(faults(verdict)) == {totals.STEP, totals.BUSY, totals.NAMES}
    assert (
        summary(unseen_rows(1))["busy_ns"]
        == totals.reference(unseen_rows(1))["busy_ns"]
    )


# --- both ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "name", "package_has"),
    [
        ("profile-step", "profile_step", broken.broken_profile),
        ("summary", "summary", totals.broken_summary),
    ],
)
def test_the_lesson_hands_out_what_the_package_holds_as_broken(cell, name, package_has):
    import nbformat

    lab = Path(overlaplab.__file__).parents[1] / "labs" / "02_measuring.ipynb"
    notebook = nbformat.read(lab, as_version=4)
    (source,) = [c.source for c in notebook.cells if c.get("id") == cell]
    given = {"streams": streams}
    exec(source, given)
    if name == "summary":
        rows = unseen_rows(3)
        assert given[name](rows) == package_has(rows)
    else:
        for case in range(len(broken.CASES)):
            mine = broken.profile_with(given[name], case).value
            assert mine == broken.profile_with(package_has, case).value
