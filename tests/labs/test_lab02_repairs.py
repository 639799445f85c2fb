"""2.8: two broken profilers. What is pasted over the fault is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import overlaplab
from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab02 import checks, given, reference
from overlaplab_course.lab02.checks import unseen_rows


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The first run of a process imports for long: not on an exercise's deadline."""
    checks.plain_ms(0)


def broken_profile(compute, send):
    """As the lesson hands it out (the last test holds the two together)."""
    begin, computed, sending, sent = (
        streams.Event(enable_timing=True) for _ in range(4)
    )
    begin.record()
    work = send()
    compute()
    computed.record()
    sending.record()
    work.wait()
    sent.record()
    streams.synchronize()
    hidden_ms = max(0.0, sending.elapsed_time(computed))
    return {
        "compute_ms": begin.elapsed_time(computed),
        "communication_ms": sending.elapsed_time(sent),
        "hidden_ms": hidden_ms,
    }


def broken_summary(rows):
    """As the lesson hands it out (the last test holds the two together)."""
    by_name = {}
    for row in rows:
        length_ns = row.end_ns - row.start_ns
        by_name[row.name] = by_name.get(row.name, 0) + length_ns
    top = max(by_name, key=lambda name: by_name[name])
    return {
        "step_ns": by_name[top],
        "busy_ns": sum(by_name.values()),
        "by_name": by_name,
        "top": top,
    }


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
    broken_profile: (checks.MESSAGE_MS, checks.HIDDEN_MS),
    events_swapped: (checks.MESSAGE_MS, checks.HIDDEN_MS),
    serialises: (checks.UNDISTURBED,),
    the_cpu_waits: (checks.UNDISTURBED,),
    sends_twice: (checks.ONE_MESSAGE,),
    hides_everything: (checks.HIDDEN_MS,),
    by_difference: (checks.COMPUTE_MS,),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_a_fault_pasted_over_is_refused_by_its_sentence(wrong, faults):
    verdict = judge(find_exercise("2.8a"), lambda compute, send: wrong(compute, send))
    found = faults(verdict)
    assert set(WRONG[wrong]) <= set(found)
    assert verdict.timeline is not None


def test_the_broken_profiler_sees_no_overlap_of_any_step():
    for case in range(len(given.PROFILED)):
        timed = given.profile_with(broken_profile, case)
        assert timed.value[0]["hidden_ms"] == 0
        assert given.truth(timed.timeline)["hidden_ms"] > 0


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

    said = reference.summary(rows[::-1])
    return said | {"by_name": Counter(said["by_name"])}


@pytest.mark.parametrize("right", [summary, backwards])
def test_any_summary_that_adds_up_passes(right):
    verdict = judge(find_exercise("2.8b"), lambda rows: right(rows))
    assert verdict.passed, str(verdict)


WRONG_SUMMARIES = {
    "the largest name is the step": ({"step": "largest"}, checks.STEP),
    "the sum is the step": ({"step": "sum"}, checks.STEP),
    "busy is the step": ({"step": "union"}, checks.STEP),
    "the sum is busy": ({"busy": "sum"}, checks.BUSY),
    "the step is busy": ({"busy": "wall"}, checks.BUSY),
    "annotations too": ({"kernels_only": False}, checks.NAMES),
    "the smallest on top": ({"top": min}, checks.TOP),
}


@pytest.mark.parametrize("name", WRONG_SUMMARIES)
def test_a_wrong_summary_is_refused_by_its_sentence(name, faults):
    slips, sentence = WRONG_SUMMARIES[name]
    verdict = judge(find_exercise("2.8b"), lambda rows: summary(rows, **slips))
    assert sentence in faults(verdict)


def test_the_broken_summary_is_wrong_in_three_ways(faults):
    verdict = judge(find_exercise("2.8b"), lambda rows: broken_summary(rows))
    assert set(faults(verdict)) == {checks.STEP, checks.BUSY, checks.NAMES}
    assert (
        summary(unseen_rows(1))["busy_ns"]
        == reference.summary(unseen_rows(1))["busy_ns"]
    )


# --- both ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "name", "package_has"),
    [
        ("profile-step", "profile_step", broken_profile),
        ("summary", "summary", broken_summary),
    ],
)
def test_the_lesson_hands_out_what_the_package_holds_as_broken(cell, name, package_has):
    import nbformat

    lab = Path(overlaplab.__file__).parents[1] / "labs" / "02_measuring.ipynb"
    notebook = nbformat.read(lab, as_version=4)
    (source,) = [c.source for c in notebook.cells if c.get("id") == cell]
    names = {"streams": streams}
    exec(source, names)
    if name == "summary":
        rows = unseen_rows(3)
        assert names[name](rows) == package_has(rows)
    else:
        for case in range(len(given.PROFILED)):
            mine = given.profile_with(names[name], case).value
            assert mine == given.profile_with(package_has, case).value
