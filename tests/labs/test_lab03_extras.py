"""3.5 to 3.7, and what the lab shows of GPUs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab.hardware import Link, find_hardware
from overlaplab_course.lab03 import checks_extra, given
from overlaplab_course.lab03.four_races import PROGRAMS
from overlaplab_course.lab03.given import finish_with, steps_ms
from overlaplab_course.lab03.show import (
    MATMUL,
    MESSAGE_BYTES,
    beside_the_sanitizer,
    on_gpus,
    predicted_ms,
    sanitizer_report,
)

ENOUGH = {"kernels": 1, "one chain": 1, "batches": 3}


@pytest.mark.parametrize("said", [ENOUGH, {k: float(v) for k, v in ENOUGH.items()}])
def test_the_fewest_streams_pass(said):
    assert judge(find_exercise("3.5"), said).passed


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kernels": 6}, "kernels: 6 streams"),
        ({"one chain": 3}, "one chain: 3 streams"),
        ({"batches": 6}, "batches: 6 streams"),
        ({"batches": 2}, "batches: 2 streams"),
        ({"batches": None}, "batches: None streams"),
    ],
    ids=str,
)
def test_too_many_or_too_few_streams_are_refused(change, reason, faults):
    found = faults(judge(find_exercise("3.5"), {**ENOUGH, **change}))
    assert reason in found[checks_extra.FEWEST]
    assert len(found[checks_extra.FEWEST].splitlines()) == 1


def test_more_streams_than_engines_make_the_batches_slower():
    steps = steps_ms("batches")
    assert [round(steps[n]) for n in (1, 2, 3, 6)] == [44, 28, 24, 26]


def side_only(side, work):
    side.synchronize()


def work_only(side, work):
    work.wait()


def everything(side, work):
    streams.synchronize()


def by_the_main_stream(side, work):
    work.wait()
    streams.current_stream().synchronize()


def event_before_the_wait(side, work):
    event = side.record_event()
    work.wait()
    event.synchronize()


def by_the_side_stream(side, work):
    with streams.stream(side):
        work.wait()
    side.synchronize()


def by_a_third_stream(side, work):
    third = streams.Stream()
    with streams.stream(third):
        work.wait()
        event = third.record_event()
    event.synchronize()


def by_asking(side, work):
    while not work.is_completed():
        pass


@pytest.mark.parametrize(
    ("finish", "sentence", "reason"),
    [
        (
            side_only,
            checks_extra.WAITED,
            "went on at 2.0 ms, the sum was there at 6.0 ms",
        ),
        (side_only, checks_extra.SUM_READ, "nobody waits for all_reduce"),
        (work_only, checks_extra.WAITED, "went on at 0.000 ms"),
        (everything, checks_extra.NO_MORE, "went on at 13.0 ms"),
        (by_the_main_stream, checks_extra.NO_MORE, "went on at 13.0 ms"),
        (event_before_the_wait, checks_extra.WAITED, "went on at 2.0 ms"),
        (event_before_the_wait, checks_extra.SUM_READ, "hazard"),
    ],
)
def test_a_finish_too_early_or_too_late_is_refused(finish, sentence, reason, faults):
    found = faults(judge(find_exercise("3.6"), 3, finish))
    assert sentence in found
    assert reason in found[sentence]


@pytest.mark.parametrize("finish", [by_the_side_stream, by_a_third_stream, by_asking])
def test_a_finish_behind_the_collective_passes(finish):
    for number in (3, 4):
        verdict = judge(find_exercise("3.6"), number, finish)
        assert verdict.passed, str(verdict)


def test_numbers_draw_sums_of_several_lengths():
    ends = {finish_with(n, by_the_side_stream).sum_ns // 10**6 for n in range(8)}
    assert len(ends) >= 3


FOUND = {
    "expensive": {"gbit_per_s": 400, "batch_mib": 256, "ktokens": 8},
    "free": {"gbit_per_s": 25, "batch_mib": 16, "ktokens": 8},
    "copy": {"gbit_per_s": 100, "batch_mib": 512, "ktokens": 8},
}
OTHER = {
    "expensive": {"gbit_per_s": 400, "batch_mib": 1, "ktokens": 2, "staged": True},
    "free": {"gbit_per_s": 100, "batch_mib": 1},
    "copy": {"gbit_per_s": 100, "batch_mib": 256, "ktokens": 2},
}


@pytest.mark.parametrize("found", [FOUND, OTHER], ids=["plain", "other"])
def test_settings_that_do_as_asked_pass(found):
    verdict = judge(find_exercise("3.7"), found)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(
    ("name", "settings", "sentence", "reason"),
    [
        (
            "expensive",
            {"gbit_per_s": 100, "batch_mib": 512},
            checks_extra.IS_DEAR,
            "costs 0.0 %",
        ),
        (
            "free",
            {"gbit_per_s": 400, "ktokens": 8},
            checks_extra.IS_FREE,
            "staging costs",
        ),
        (
            "free",
            {"gbit_per_s": 400, "batch_mib": 1, "ktokens": 32},
            checks_extra.IS_FREE,
            "busy 40%",
        ),
        ("copy", {"gbit_per_s": 25}, checks_extra.IS_COPY, "the copy takes 1.0"),
        (
            "copy",
            {"gbit_per_s": 200, "batch_mib": 512},
            checks_extra.IS_COPY,
            "staging costs",
        ),
        ("copy", {"gbit": 25}, checks_extra.SETTINGS, "there is no knob 'gbit'"),
        ("copy", {"gbit_per_s": 30}, checks_extra.SETTINGS, "gbit_per_s is 30"),
        ("expensive", None, checks_extra.SETTINGS, "not filled in 'expensive'"),
    ],
)
def test_settings_that_do_not_are_refused(name, settings, sentence, reason, faults):
    found = faults(judge(find_exercise("3.7"), {**FOUND, name: settings}))
    assert list(found) == [sentence]
    assert reason in found[sentence]


def test_no_wish_is_met_where_the_sliders_start():
    start = {name: knob.default for name, knob in given.KNOBS.items()}
    verdict = judge(find_exercise("3.7"), dict.fromkeys(FOUND, start))
    assert [check.passed for check in verdict.checks] == [True, False, False, False]


def test_the_measured_job_is_predicted_as_it_was_measured():
    """A matmul and 64 MiB a unit, each a millisecond: 16 and 11 of them."""
    unit_flops, unit_bytes = 2 * MATMUL**3, MESSAGE_BYTES
    slow = replace(
        find_hardware("chalk"),
        flops_per_s={"default": 1000 * unit_flops},
        link=Link(latency_ns=0, bytes_per_s=1000 * unit_bytes),
    )
    assert predicted_ms(slow, events=False) == pytest.approx(16 + 11)
    assert predicted_ms(slow, events=True) == pytest.approx(19 - 2)


def stored(tmp_path, answers):
    path = tmp_path / "measured.json"
    path.write_text(
        json.dumps(
            {
                "world_size": 2,
                "card": "Card",
                "torch": "2.11.0",
                "nccl": "2.28.9",
                "date": "2026-11-28T04:10:00+00:00",
                "answers": answers,
            }
        )
    )
    return path


def test_what_is_stored_is_shown_with_its_machine(tmp_path):
    answers = {
        "job": {"unit": "a matmul", "ms": {"one stream": 2.5}},
        "races": {"one event for two": {"broken, busy": 20}},
        "feeds": {"error": "no memory"},
    }
    lines = str(on_gpus(stored(tmp_path, answers))).splitlines()
    assert any("a hop to another stream, event: us" in line for line in lines)
    assert lines[1].split()[-1] == "2.5" and lines[1].split()[0] == "1"
    busy = next(line for line in lines if "for two: wrong of 20, busy" in line)
    assert busy.split()[-1] == "20"
    assert next(line for line in lines if "steps alone" in line).split()[-1] == "-"
    assert lines[-1] == "Measured on 2 x Card, torch 2.11.0, NCCL 2.28.9, 2026-11-28."


def test_without_a_stored_file_the_command_is_shown(tmp_path):
    text = str(on_gpus(tmp_path / "none.json"))
    assert "python -m overlaplab_course.measure 03" in text
    assert "overlaplab_course.measure" in str(
        sanitizer_report("event", tmp_path / "none.json")
    )


def test_four_races_are_found_here_and_their_repairs_are_silent(tmp_path):
    broken = {"event": "CSAN detected a possible data race", "reuse": "no report"}
    answers = {"sanitizer": {"broken": broken, "repaired": {"event": "no report"}}}
    lines = str(beside_the_sanitizer(stored(tmp_path, answers))).splitlines()
    assert [line.split(maxsplit=1)[0] for line in lines[1:-1]] == [*PROGRAMS]
    assert all("broken: race, repaired: silent" in line for line in lines[1:-1])
    assert lines[1].endswith("broken: race, repaired: silent")
    assert lines[2].endswith("broken: silent, repaired: not measured")


def test_the_sanitizers_words_are_shown(tmp_path):
    path = stored(tmp_path, {"sanitizer": {"broken": {"event": "CSAN detected"}}})
    assert "CSAN detected" in str(sanitizer_report("event", path))
    assert "not measured" in str(sanitizer_report("flat", path))


def test_a_misspelled_knob_is_described_in_a_line():
    misspelled = {"expensive": {"gbit": 25}}
    assert "no knob 'gbit'" in given.problem_with("expensive", misspelled)
    assert given.problem_with("expensive", FOUND) == ""


def test_the_start_of_the_sliders_is_not_yet_expensive(faults):
    start = {"gbit_per_s": 200, "batch_mib": 64, "ktokens": 8}
    found = faults(judge(find_exercise("3.7"), {**FOUND, "expensive": start}))
    assert list(found) == [checks_extra.IS_DEAR]
