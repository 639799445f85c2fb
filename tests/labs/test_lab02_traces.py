"""2.5 to 2.7: reading stored traces; what the lesson says holds for every number."""

from __future__ import annotations

from itertools import pairwise

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab.timeline.intervals import merge, subtract
from overlaplab_course.lab02 import checks_traces as checks
from overlaplab_course.lab02 import given, reference, show
from overlaplab_course.lab02.reference import is_communication

NUMBERS = (6, 1, 17)
BATCH_8, BATCH_2 = "overlapped, batch 8", "overlapped, batch 2"


def step(number=6):
    return given.trace_step(BATCH_8, number)


# --- 2.5 -------------------------------------------------------------------------


@pytest.mark.parametrize("number", NUMBERS)
def test_the_right_reading_passes_for_every_number(number):
    verdict = judge(find_exercise("2.5"), number, show.read(step(number)))
    assert verdict.passed, str(verdict)


def test_a_reading_with_a_ruler_passes():
    """Unusual: by eye, to a hundredth of a ms; a whole number of MiB; more keys."""
    right = {k: round(v, 2) for k, v in show.read(step()).items()}
    right |= {"tail_mib": 128, "note": "read with view.show"}
    assert judge(find_exercise("2.5"), 6, right).passed


def messages():
    return [s for s in step().spans if s.kind == "communication"]


WRONG_READINGS = {
    "the first message for the backward pass": (
        lambda r: {"backward_ms": r["first_ms"]},
        checks.BACKWARD,
        "that is the first message",
    ),
    "from the backward pass on": (
        lambda r: {"first_ms": r["first_ms"] - r["backward_ms"]},
        checks.FIRST,
        "count from 0",
    ),
    "the end of the first message": (
        lambda r: {"first_ms": messages()[0].end_ns / 1e6},
        checks.FIRST,
        "that is its end",
    ),
    "the launch for the start": (
        lambda r: {"first_ms": messages()[0].attributes["launch_ns"] / 1e6},
        checks.FIRST,
        "a launch is not a start",
    ),
    "the lead before 0": (
        lambda r: {"lead_ms": r["lead_ms"] - r["first_ms"]},
        checks.LEAD,
        "how long before its start",
    ),
    "all exposed time": (
        lambda r: {"tail_ms": step().report().exposed_ns / 1e6},
        checks.TAIL,
        "not the last's",
    ),
    "in ns": (
        lambda r: {"tail_ms": r["tail_ms"] * 1e6},
        checks.TAIL,
        "that is in ns",
    ),
    "megabytes": (
        lambda r: {"tail_mib": messages()[-1].bytes / 1e6},
        checks.BYTES,
        "MiB are 2**20 bytes",
    ),
    "all messages": (
        lambda r: {"tail_mib": sum(m.bytes for m in messages()) / 2**20},
        checks.BYTES,
        "that is all of them",
    ),
    "nothing": (lambda r: {"lead_ms": None}, checks.LEAD, "is not filled in"),
    "a word": (lambda r: {"lead_ms": "long"}, checks.LEAD, "'long'"),
}


@pytest.mark.parametrize("name", WRONG_READINGS)
def test_a_misreading_is_refused_and_described(name, faults):
    slip, sentence, words = WRONG_READINGS[name]
    right = show.read(step())
    found = faults(judge(find_exercise("2.5"), 6, {**right, **slip(right)}))
    assert list(found) == [sentence]
    assert words in found[sentence]


def test_the_reading_of_another_step_is_refused():
    verdict = judge(find_exercise("2.5"), 6, show.read(step(7)))
    assert not verdict.passed


def test_what_is_no_dict_is_refused():
    assert "expected a dict" in judge(find_exercise("2.5"), 6, [1]).error


# --- 2.6 -------------------------------------------------------------------------


def find_gaps(
    timeline, *, least=1_000_000, union=True, lead=100_000, why=None, every_kind=False
):
    sent = [s for s in timeline.spans if s.kind == "communication" or every_kind]
    pairs = sorted((s.start_ns, s.end_ns) for s in sent)
    busy = merge(pairs) if union else pairs
    found = []
    for (_, end), (start, _) in pairwise(busy):
        if start - end < least:
            continue
        (following,) = [s for s in sent if s.start_ns == start][:1]
        at_once = start - following.attributes.get("launch_ns", start) < lead
        found.append((end, start, why or ("launch" if at_once else "gradient")))
    return found


def by_subtraction(timeline):
    """Unusual: what is left of the whole stretch."""
    sent = {s.start_ns: s for s in timeline.spans if s.kind == "communication"}
    busy = merge(
        (s.start_ns, s.end_ns) for s in timeline.spans if s.kind == "communication"
    )
    for start, end in subtract([(busy[0][0], busy[-1][1])], busy):
        if end - start >= 1e6:
            waited = end - sent[end].attributes["launch_ns"]
            yield [start, end, ("launch", "gradient")[waited >= 1e5]]


def in_one_pass(timeline):
    """Unusual: remembers the latest end; spans are ordered by start already."""
    found, latest = [], None
    for span in timeline.spans:
        if span.kind != "communication":
            continue
        if latest is not None and span.start_ns - latest >= 10**6:
            late = span.start_ns < span.attributes["launch_ns"] + 10**5
            found.append((latest, span.start_ns, "launch" if late else "gradient"))
        latest = max(latest or 0, span.end_ns)
    return tuple(found)


@pytest.mark.parametrize("right", [find_gaps, by_subtraction, in_one_pass])
def test_any_right_way_to_find_gaps_passes(right):
    verdict = judge(find_exercise("2.6"), lambda timeline: right(timeline))
    assert verdict.passed, str(verdict)


def from_zero(timeline):
    """Takes the time before the first message for a gap."""
    first = next(s for s in timeline.spans if s.kind == "communication")
    return [(0, first.start_ns, "gradient"), *find_gaps(timeline)]


def in_ms(timeline):
    return [(a / 1e6, b / 1e6, why) for a, b, why in find_gaps(timeline)]


WRONG_GAPS = {
    "every gap, however short": ({"least": 1}, checks.WHERE),
    "more than 1 ms": ({"least": 1_000_001}, checks.WHERE),
    "of any lane": ({"every_kind": True}, checks.WHERE),
    "between neighbours": ({"union": False}, checks.APART),
    "always the gradient": ({"why": "gradient"}, checks.WHY),
    "always the launch": ({"why": "launch"}, checks.WHY),
    "launched within 5 ms": ({"lead": 5_000_000}, checks.WHY),
}


@pytest.mark.parametrize("name", WRONG_GAPS)
def test_wrong_gaps_are_refused_by_their_sentence(name, faults):
    slips, sentence = WRONG_GAPS[name]
    verdict = judge(find_exercise("2.6"), lambda t: find_gaps(t, **slips))
    assert sentence in faults(verdict)
    assert verdict.timeline is not None


def test_a_wrong_place_and_a_wrong_reason_read_differently(faults):
    exercise = find_exercise("2.6")
    found = faults(judge(exercise, lambda t: find_gaps(t, why="gradient")))
    assert "you say 'gradient', it is 'launch'" in found[checks.WHY]
    found = faults(judge(exercise, lambda t: find_gaps(t, least=1)))
    assert "yours, but shorter than 1 ms" in found[checks.WHERE]
    found = faults(judge(exercise, lambda t: find_gaps(t, union=False)))
    assert "yours, but a message runs in it" in found[checks.APART]
    found = faults(judge(exercise, lambda t: find_gaps(t, least=1_000_001)))
    assert "missing from yours" in found[checks.WHERE]


@pytest.mark.parametrize("wrong", [from_zero, in_ms])
def test_other_wrong_gaps_are_refused(wrong, faults):
    assert checks.WHERE in faults(judge(find_exercise("2.6"), wrong))


def test_a_rule_by_the_compute_lane_fails_on_the_traces(faults):
    """A kernel ends just before every message where the GPU is busy: no cause."""

    def by_idle_time(timeline):
        ends = [s.end_ns for s in timeline.spans if s.kind == "compute"]
        return [
            (
                a,
                b,
                "launch" if not any(b - 16_000 < e <= b for e in ends) else "gradient",
            )
            for a, b, _ in find_gaps(timeline)
        ]

    assert not judge(find_exercise("2.6"), by_idle_time).passed


@pytest.mark.parametrize(
    ("said", "words"),
    [(None, "list of triples"), ([(1, 2)], "list of triples"), ([(1, 2, "?")], "'?'")],
)
def test_what_is_no_list_of_gaps_is_described(said, words):
    assert words in str(judge(find_exercise("2.6"), lambda timeline: said))


@pytest.mark.parametrize("number", range(3))
def test_gradients_hold_up_batch_8_and_launches_batch_2(number):
    for which, why in ((BATCH_8, "gradient"), (BATCH_2, "launch")):
        found = reference.find_gaps(given.trace_step(which, number))
        assert len(found) == 12
        assert {reason for _, _, reason in found} == {why}


def test_annotations_are_lanes_of_the_timeline():
    marks = [(0, 5, "gradient"), (7, 9, "launch")]
    lanes = show.with_gaps(step(), marks).lanes(0)
    assert {"gap: gradient", "gap: launch"} < set(lanes)


# --- 2.7 -------------------------------------------------------------------------


@pytest.mark.parametrize("number", NUMBERS)
def test_the_right_bill_passes_for_every_number(number):
    right = show.pay(*given.both_steps(number))
    verdict = judge(find_exercise("2.7"), number, right)
    assert verdict.passed, str(verdict)


def test_a_bill_from_other_sums_passes():
    """Unusual: step minus exposed and idle parts; ratios rounded to a percent."""
    serial, overlapped = given.both_steps(6)
    a, b = serial.report(), overlapped.report()
    right = show.pay(serial, overlapped)
    said = {
        "hidden_ms": round((b.communication_ns - b.exposed_ns) / 1e6, 2),
        "saved_ms": (a.end_ns - a.start_ns - b.end_ns + b.start_ns) / 1e6,
        "beside_ms": (b.compute_ns - a.compute_ns) / 1e6 - right["alone_ms"],
        "alone_ms": round(right["alone_ms"], 2),
        "messages_ms": (b.exposed_ns + b.hidden_ns - a.exposed_ns) / 1e6,
        "beside_ratio": round(right["beside_ratio"], 2),
    }
    verdict = judge(find_exercise("2.7"), 6, said)
    assert verdict.passed, str(verdict)


WRONG_BILLS = {
    "all communication is hidden": (
        lambda r, a, b: {"hidden_ms": b.communication_ns / 1e6},
        checks.HIDDEN,
        "that is all communication",
    ),
    "hidden is saved": (
        lambda r, a, b: {"saved_ms": r["hidden_ms"]},
        checks.SAVED,
        "hidden is not saved",
    ),
    "saved, of one trace": (
        lambda r, a, b: {"saved_ms": b.saved_ns / 1e6},
        checks.SAVED,
        "its own slowed-down parts",
    ),
    "the other way round": (
        lambda r, a, b: {"beside_ms": -r["beside_ms"]},
        checks.BESIDE,
        "the other way round",
    ),
    "all messages": (
        lambda r, a, b: {"messages_ms": b.communication_ns / 1e6},
        checks.MESSAGES,
        "minus that of the serial",
    ),
    "over all kernels": (
        lambda r, a, b: {"beside_ratio": b.compute_ns / a.compute_ns},
        checks.TOUCHED,
        "over all kernels",
    ),
    "a mean of ratios": (
        lambda r, a, b: {"beside_ratio": checks.mean_of_ratios(*given.both_steps(6))},
        checks.TOUCHED,
        "divide sums",
    ),
    "what it is longer by": (
        lambda r, a, b: {"beside_ratio": r["beside_ratio"] - 1},
        checks.TOUCHED,
        "longer by",
    ),
    "those beside, for the others": (
        lambda r, a, b: {"alone_ms": r["beside_ms"]},
        checks.ALONE,
        "with a message beside",
    ),
    "contention is all that kernels take longer": (
        lambda r, a, b: {"beside_ms": (b.compute_ns - a.compute_ns) / 1e6},
        checks.BESIDE,
        "over all kernels",
    ),
}


@pytest.mark.parametrize("name", WRONG_BILLS)
def test_a_wrong_entry_of_the_bill_is_refused_and_described(name, faults):
    slip, sentence, words = WRONG_BILLS[name]
    serial, overlapped = given.both_steps(6)
    right = show.pay(serial, overlapped)
    wrong = slip(right, serial.report(), overlapped.report())
    found = faults(judge(find_exercise("2.7"), 6, {**right, **wrong}))
    assert list(found) == [sentence]
    assert words in found[sentence]


@pytest.mark.parametrize("number", range(3))
def test_hidden_is_not_saved_whatever_the_number(number):
    right = show.pay(*given.both_steps(number))
    assert 0 < right["saved_ms"] < 0.3 * right["hidden_ms"]
    assert 1.29 < right["beside_ratio"] < 1.35  # "a third"
    assert right["alone_ratio"] < 1.04
    # Kernels that no message touched differ by as much as the step is shorter, or so.
    assert right["alone_ms"] > 0.5 * right["saved_ms"]


@pytest.mark.parametrize("number", range(3))
def test_the_bill_adds_up_to_what_is_idle(number):
    serial, overlapped = given.both_steps(number)
    right = show.pay(serial, overlapped)
    a, b = serial.report(), overlapped.report()
    idle_ms = [
        (r.step_ns - r.compute_ns - r.communication_ns + r.hidden_ns) / 1e6
        for r in (a, b)
    ]
    paid = sum(
        right[key] for key in ("saved_ms", "beside_ms", "alone_ms", "messages_ms")
    )
    assert paid == pytest.approx(right["hidden_ms"] + idle_ms[0] - idle_ms[1])


def test_a_twin_of_another_name_is_refused():
    serial, overlapped = given.both_steps(6)
    with pytest.raises(ValueError, match="same kernels"):
        given.pairs(serial, overlapped.where(lambda s: s.name != "mm"))


# --- did it pay? -----------------------------------------------------------------


def test_what_was_saved_is_a_part_of_what_could_be_saved():
    paid = show.did_it_pay(8)
    assert paid.possible_ms == pytest.approx(5.35, abs=0.01)
    assert paid.saved_ms == pytest.approx(1.32, abs=0.01)
    assert paid.percent == pytest.approx(24.8, abs=0.1)


def test_overlap_may_cost_more_than_it_hides():
    paid = show.did_it_pay(2)
    assert paid.possible_ms > 0 > paid.saved_ms
    assert paid.saved_ms == pytest.approx(-3.59, abs=0.01)


def test_the_spread_of_steps_is_around_their_median():
    for batch in (8, 2):
        for variant in ("compute", "serial", "overlapped"):
            low, high = show.spread_ms(variant, batch)
            assert low < show.unprofiled_ms(variant, batch) < high
    (low, _), (_, high) = (show.spread_ms(v, 8) for v in ("serial", "overlapped"))
    assert high > low  # the lesson says that they overlap


# --- the traces ------------------------------------------------------------------


def test_a_profiler_costs_where_the_step_is_launch_bound():
    cost = {
        batch: show.traced_ms(f"overlapped, batch {batch}")
        / show.unprofiled_ms("overlapped", batch)
        for batch in (8, 2)
    }
    assert 0.95 < cost[8] < 1.05
    assert cost[2] > 1.3


@pytest.mark.parametrize("which", given.TRACES)
def test_rows_of_whole_steps_are_what_their_spans_are(which):
    """The serial trace holds two messages of steps before the first whole one."""
    rows = given.step_rows(which)
    assert 0 < len(rows) <= len(given.raw_rows(which))
    mine = reference.overlap(rows)
    theirs = given.whole_steps(which).report()
    assert mine["compute_ns"] == theirs.compute_ns
    assert mine["communication_ns"] == theirs.communication_ns
    assert mine["hidden_ns"] == theirs.hidden_ns
    sent = [r for r in rows if r.category == "kernel" and is_communication(r)]
    assert len(sent) == (3 if which.startswith("serial") else 3 * 14)


def test_an_unknown_trace_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="serial, batch 8"):
        given.path_of("batch 9")


def test_a_step_begins_at_0_and_its_messages_know_their_launch():
    one = given.trace_step(BATCH_8, 6)
    assert one.start_ns == 0
    assert all(s.attributes["launch_ns"] < s.start_ns for s in messages())
    assert given.trace_step(BATCH_8, 6, cpu=True).start_ns < 0


def test_the_traces_stay_small():
    sizes = [path.stat().st_size for path in given.FOLDER.glob("*.json.gz")]
    assert len(sizes) == 3
    assert max(sizes) <= 600_000
