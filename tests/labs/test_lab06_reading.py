"""6.0, 6.4b and 6.7: readings of a line, of a critical path, of the knobs."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab.hardware import with_link
from overlaplab.program import replay
from overlaplab_course import lab06
from overlaplab_course import stored as stored_tables
from overlaplab_course.lab06 import checks
from overlaplab_course.lab06.given import (
    ETHERNET,
    MIB,
    NVLINK,
    recorded_step,
    three_runs,
)
from overlaplab_course.lab06.show import measured, message_points, stored_benchmarks
from overlaplab_course.lab06.trials import KNOBS, turn, written_step

RESULTS = Path(__file__).parents[2] / "overlaplab" / "bench" / "results"

# 6.0

RIGHT_FITS = {
    "through 25 and 100 MiB": (42, 220.3, 1),
    "least squares": (46.7, 222, 1),
    "the empty message": (44, 221, 1),
}
WRONG_FITS = {
    "bits a second": ((42, 1760, 1), checks.FIT, "at 25 MiB the line says"),
    "latency of 1 MiB": ((64, 220, 0), checks.FIT, "at 0 MiB the line says 64"),
    "in milliseconds": ((0.042, 220, 1), checks.FIT, "at 0 MiB the line says 0"),
    "decimal megabytes": ((42, 254, 1), checks.FIT, "at 100 MiB"),
    "the largest point": ((42, 220, 100), checks.MISSED, "at 100 MiB"),
    "the empty point": ((42, 220, 0), checks.MISSED, "at 0 MiB"),
}


@pytest.mark.parametrize("answer", RIGHT_FITS.values(), ids=RIGHT_FITS)
def test_any_line_through_the_large_messages_passes(answer):
    verdict = judge(find_exercise("6.0"), *answer)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("name", WRONG_FITS)
def test_a_wrong_line_is_refused_at_the_size_that_it_misses(name, faults):
    answer, sentence, reason = WRONG_FITS[name]
    found = faults(judge(find_exercise("6.0"), *answer))
    assert reason in found[sentence]


def test_one_mebibyte_is_the_point_that_the_line_misses():
    points = message_points()
    slope_us = (points[100] - points[25]) / 75
    off = {mib: (points[25] + (mib - 25) * slope_us) / us for mib, us in points.items()}
    assert min(off, key=off.get) == 1


# 6.4b


@pytest.fixture(scope="module")
def reading():
    answers = {}
    for letter, given in three_runs().items():
        timeline = given.timeline()
        shares = timeline.critical_path().shares
        new_ns = given.timeline(latency=0.5).step_ns
        answers[letter] = {
            "largest": max(shares, key=shares.get),
            "half_latency_saves_percent": 100 * (1 - new_ns / timeline.step_ns),
        }
    return {**answers, "tail": "embedding.weight"}


def test_the_three_runs_are_bound_by_three_things(reading):
    assert [reading[letter]["largest"] for letter in "ABC"] == [
        "wire",
        "latency",
        "compute",
    ]


def busiest_lane(reading, given):
    """What runs longest, on the path or not."""
    report = given.timeline().report()
    sends = report.communication_ns > report.compute_ns
    return {"largest": "wire" if sends else "compute"}


def half_of_the_share(reading, given):
    share = given.timeline().critical_path().shares["latency"]
    return {"half_latency_saves_percent": 100 * share / 2}


def a_fraction(reading, given):
    return {
        "half_latency_saves_percent": reading["half_latency_saves_percent"] / 100,
    }


def twice_the_bandwidth(reading, given):
    new_ns = given.timeline(bandwidth=2).step_ns
    return {"half_latency_saves_percent": 100 * (1 - new_ns / given.timeline().step_ns)}


def no_latency_at_all(reading, given):
    new_ns = given.timeline(latency=0).step_ns
    return {"half_latency_saves_percent": 100 * (1 - new_ns / given.timeline().step_ns)}


WRONG_READINGS = {
    busiest_lane: (checks.LARGEST, "run B"),
    half_of_the_share: (checks.COUNTERFACTUAL, "run B"),
    a_fraction: (checks.COUNTERFACTUAL, "run B"),
    twice_the_bandwidth: (checks.COUNTERFACTUAL, "run A"),
    no_latency_at_all: (checks.COUNTERFACTUAL, "run B"),
}


@pytest.mark.parametrize("wrong", WRONG_READINGS, ids=lambda f: f.__name__)
def test_a_wrong_reading_is_refused_with_the_run(wrong, reading, faults):
    sentence, reason = WRONG_READINGS[wrong]
    answer = copy.deepcopy(reading)
    for letter, given in three_runs().items():
        answer[letter] |= wrong(reading[letter], given)
    found = faults(judge(find_exercise("6.4b"), answer))
    assert list(found) == [sentence]
    assert reason in found[sentence]


def test_every_run_that_was_read_wrongly_is_listed(reading, faults):
    answer = copy.deepcopy(reading)
    answer["A"]["largest"] = answer["C"]["largest"] = "idle"
    seen = faults(judge(find_exercise("6.4b"), answer))[checks.LARGEST]
    assert "run A (" in seen and "run C (" in seen and "run B" not in seen
    assert "the largest value in critical_path().shares of run A" in seen


@pytest.mark.parametrize("owner", ["head.weight", "blocks.0.narrow.weight", None])
def test_another_owner_of_the_tail_is_refused(owner, reading, faults):
    found = faults(judge(find_exercise("6.4b"), {**reading, "tail": owner}))
    assert list(found) == [checks.TAIL]


@pytest.mark.parametrize(
    "owner", ["embedding.weight", "Embedding", "grad embedding.weight"]
)
def test_a_rounded_reading_in_other_words_passes(owner, reading):
    answer = copy.deepcopy(reading)
    for letter in "ABC":
        answer[letter]["largest"] = answer[letter]["largest"].upper()
        answer[letter]["half_latency_saves_percent"] += 2.0
    verdict = judge(find_exercise("6.4b"), {**answer, "tail": owner})
    assert verdict.passed, str(verdict)


def test_no_cap_removes_the_tail_of_the_embedding():
    given = three_runs()["C"]
    tail = given.messages()[-1]
    assert tail.names == ("embedding.weight",)
    assert given.timeline().report().exposed_ns >= tail.duration_ns


# 6.7

DEFAULTS = {name: knob.default for name, knob in KNOBS.items()}
START = {**DEFAULTS, "bucket_mib": 25, "gbyte_per_s": 12.5, "ktokens": 8}
FOUND = {
    "latency": {
        **START,
        "bucket_mib": 1,
        "latency_us": 200,
        "gbyte_per_s": 340,
        "ktokens": 2,
    },
    "bandwidth": START,
    "neither": {**START, "gbyte_per_s": 340, "latency_us": 10, "ktokens": 16},
    "25 MiB loses": {**START, "latency_us": 1000, "ktokens": 4},
}
OTHER_FOUND = {
    "latency": {**START, "bucket_mib": 0, "latency_us": 44, "gbyte_per_s": 340}
    | {"ktokens": 2},
    "bandwidth": {**START, "gbyte_per_s": 3, "bucket_mib": 100},
    "neither": {**START, "layers": 6, "gbyte_per_s": 340, "ktokens": 32},
    "25 MiB loses": {**START, "latency_us": 500, "gbyte_per_s": 100, "ktokens": 4},
}
WRONG_FOUND = {
    "latency": (START, checks.IS_LATENCY, "half the latency saves 1."),
    "bandwidth": (FOUND["latency"], checks.IS_WIRE, "twice the bandwidth 3."),
    "neither": (START, checks.IS_NEITHER, "twice the bandwidth 4"),
    "25 MiB loses": (START, checks.IS_LOST, "25 MiB takes"),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_sliders_do_not_start_at_an_answer(name, faults):
    assert faults(judge(find_exercise("6.7"), {**FOUND, name: DEFAULTS}))


@pytest.mark.parametrize("found", [FOUND, OTHER_FOUND], ids=["one", "another"])
def test_any_four_settings_that_do_it_pass(found):
    verdict = judge(find_exercise("6.7"), found)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("name", WRONG_FOUND)
def test_settings_that_do_not_do_it_are_refused_with_numbers(name, faults):
    settings, sentence, reason = WRONG_FOUND[name]
    found = faults(judge(find_exercise("6.7"), {**FOUND, name: settings}))
    assert list(found) == [sentence]
    assert reason in found[sentence]


@pytest.mark.parametrize(
    "wrong",
    [{}, {**START, "latency_us": 10**9}, {**START, "layers": 0}, None],
    ids=["empty", "a second of latency", "no layers", "nothing"],
)
def test_settings_that_no_slider_has_are_refused(wrong, faults):
    found = faults(judge(find_exercise("6.7"), {**FOUND, "neither": wrong}))
    assert list(found) == [checks.SETTINGS]


def test_settings_that_are_there_are_judged_without_the_others(faults):
    said = {**FOUND, "neither": None, "latency": START}
    found = faults(judge(find_exercise("6.7"), said))
    assert set(found) == {checks.SETTINGS, checks.IS_LATENCY}
    assert "you have not filled in 'neither'" in found[checks.SETTINGS]


def test_knobs_that_are_left_out_stand_where_the_sliders_start(faults):
    part = {"latency_us": 500}
    whole = {**{name: knob.default for name, knob in KNOBS.items()}, **part}
    assert turn(**part) == turn(**whole)
    one, other = (
        faults(judge(find_exercise("6.7"), {**FOUND, "neither": settings}))
        for settings in (part, whole)
    )
    assert list(one) == list(other) == [checks.IS_NEITHER]


def test_a_knob_that_does_not_exist_is_refused(faults):
    found = faults(judge(find_exercise("6.7"), {**FOUND, "neither": {"latency": 5}}))
    assert "there is no knob 'latency'" in found[checks.SETTINGS]


# What the lesson says.

FAST = with_link(ETHERNET, latency_ns=10_000, bytes_per_s=340_000_000_000)


@pytest.mark.parametrize("sequences", [2, 10])
@pytest.mark.parametrize("hardware", [ETHERNET, FAST], ids=["ethernet", "fast"])
@pytest.mark.parametrize("cap", [None, 25 * MIB])
def test_the_written_step_takes_as_long_as_the_recorded_one(sequences, hardware, cap):
    recorded = replay(recorded_step(sequences), hardware=hardware, buckets=cap)
    written = replay(written_step(24, 1024 * sequences), hardware=hardware, buckets=cap)
    assert written.step_ns == pytest.approx(recorded.step_ns, rel=0.03)


def test_the_worse_end_is_another_on_another_link():
    each, one = (
        replay(recorded_step(10), hardware=ETHERNET, buckets=cap).step_ns
        for cap in (None, 10**10)
    )
    each_on_nvlink, one_on_nvlink = (
        replay(recorded_step(1), hardware=NVLINK, buckets=cap).step_ns
        for cap in (None, 10**10)
    )
    assert each < one
    assert each_on_nvlink > 1.2 * one_on_nvlink


def test_both_ends_waste_a_fifth_on_ethernet():
    steps = lab06.sweep(recorded_step(10), ETHERNET, [10, 25, 50, 100])
    for cap in (None, 10**10):
        end = replay(recorded_step(10), hardware=ETHERNET, buckets=cap).step_ns
        assert min(steps.values()) < 0.82 * end


def test_a_knob_turned_back_gives_the_same_step():
    first = turn(**START)
    assert turn(**{**START, "latency_us": 5}).step_ns < first.step_ns
    assert turn(**START) == first
    assert turn.saved_percent(START, "twice the bandwidth") > 15


def test_stored_measurements_name_their_machine():
    for table in ("data_parallel", "ends", "hidden"):
        for fact in ("NVIDIA H200", "torch 2.11.0", "NCCL 2.28.9", "2026-11-27"):
            assert fact in str(measured(table))


def test_the_copied_benchmark_is_what_the_repository_stores():
    """The wheel has no results, so the lesson's table is a copy of one of them."""
    path = RESULTS / "data_parallel-2xH100-2026-11-28.json"
    stored = json.loads(path.read_text())
    model = stored["cases"][0]["model"]
    cases = [case for case in stored["cases"] if case["model"] == model]
    copied = stored_tables.read("06")["benchmark"]
    for key in ("command", "date", "world_size", "card", "torch", "nccl"):
        assert copied[key] == stored[key]
    assert copied["source"] == f"{model}, ms per step"
    assert copied["columns"] == [f"batch {case['batch']}" for case in cases]
    for name, *numbers in copied["rows"]:
        assert numbers == [case["variants"][name]["median_ms"] for case in cases]
    assert len(stored_benchmarks()) == len(copied["rows"]) + 1
