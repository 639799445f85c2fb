"""Forms fail closed: what is missing, of a wrong type or not known is refused."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.grading import Exercise, Sheet, Violation, origins, program_laws
from overlaplab.grading.exercise import StopGradingError
from overlaplab.grading.forms import (
    Examined,
    KnobProgram,
    KnobTasks,
    Repair,
    check_diagnosis,
)
from overlaplab.hardware import find_hardware
from overlaplab.view import Knob
from overlaplab_course import stored


def sheet_for(sentences, laws=()):
    grade = {"points": 1, "grade": lambda sheet: None, "laws": dict(laws)}
    return Sheet(Exercise("9.1", "form", ("answer",), sentences, **grade))


def failed(sheet):
    return {c.name: c.seen for c in sheet.verdict().checks if not c.passed}


# -- knobs

KNOBS = {"batch": Knob((1, 2, 4), 1), "fast": Knob((False, True), False)}


def timed(s):
    return SimpleNamespace(step_ns=100 * s["batch"] // (2 if s["fast"] else 1))


TURN = KnobProgram(KNOBS, timed, what_if={"twice": lambda s: {"batch": 2 * s["batch"]}})
TASKS = KnobTasks(
    TURN,
    (
        {"says": "usable", "seen": "the step takes {step} ns"},
        {"says": "is long", "entry": "long", "limits": {"step": [400, math.inf]}},
        {"says": "is short", "entry": "short", "limits": {"step": [0, 101]}},
    ),
    measure=lambda s: {"step": TURN(**s).step_ns},
    condition=lambda s: "fast is judged" if "fast" in s else "",
)


def grade(found):
    sheet = sheet_for(TASKS.sentences)
    TASKS.grade(sheet, found)
    return sheet


def test_right_settings_pass():
    assert grade({"long": {"batch": 4}, "short": {"batch": 1}}).verdict().passed


def test_knobs_that_are_left_out_stand_where_they_start():
    assert TURN(batch=4).step_ns == 400
    assert TURN.filled({"fast": True}) == {"batch": 1, "fast": True}
    assert TURN.saved_percent({"batch": 2}, "twice") == -100
    with pytest.raises(TypeError, match="no knob 'bach'"):
        TURN(bach=4)


def test_a_setting_that_does_not_do_as_asked_is_described_with_its_numbers():
    sheet = grade({"long": {"batch": 4}, "short": {"batch": 2}})
    assert failed(sheet) == {"is short": "{'batch': 2}: the step takes 200 ns"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (None, "you have not filled in 'short'"),
        ({}, "you have not filled in 'short'"),
        ([1], "'short' is [1], not a dict"),
        ({"bach": 1}, "there is no knob 'bach'"),
        ({"batch": 3}, "batch is 3, not one of (1, 2, 4)"),
        ({"batch": 1, "fast": True}, "'short': fast is judged"),
    ],
)
def test_an_unusable_setting_is_refused_and_the_others_are_judged(settings, words):
    sheet = grade({"long": {"batch": 4}, "short": settings})
    assert words in failed(sheet)["usable"]
    verdict = sheet.verdict()
    assert not verdict.passed
    assert [c.name for c in verdict.checks if c.passed] == ["is long"]
    assert verdict.unjudged == ("is short",)


@pytest.mark.parametrize("found", [None, [], "long", {}, torch.ones(2)])
def test_what_is_no_dict_of_settings_is_refused(found):
    assert "'long'" in failed(grade(found))["usable"]


def test_other_problems_make_the_settings_unusable():
    sheet = sheet_for(TASKS.sentences)
    found = {"long": {"batch": 4}, "short": {"batch": 1}}
    TASKS.check_usable(sheet, found, more=["'border' is missing"])
    assert failed(sheet) == {"usable": "'border' is missing"}


def test_tasks_from_a_file_are_measured_in_their_own_way():
    tables = [
        {"says": "usable", "seen": "it takes {step}"},
        {"says": "is long", "entry": "long", "limits": {"step": [400, math.inf]}},
    ]
    measures = {"long": lambda s: {"step": TURN(**s).step_ns}}
    tasks = KnobTasks(TURN, tables, measures=measures)
    for batch, wrong in ((4, {}), (2, {"is long": "{'batch': 2}: it takes 200"})):
        sheet = sheet_for(tasks.sentences)
        tasks.grade(sheet, {"long": {"batch": batch}})
        assert failed(sheet) == wrong


# -- diagnoses and repairs

TRUTH = {"kind": "race", "rank": 1}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"kind": "race"}, "rank: no answer"),
        ({"kind": "race", "rank": 0}, "rank: 0 is not what"),
        ({"kind": 3, "rank": 1}, "kind: 3 is not what"),
        ({}, "kind: no answer\nrank: no answer"),
    ],
)
def test_a_diagnosis_that_is_wrong_or_missing_is_refused(said, words):
    sheet = sheet_for(("diagnosis",))
    check_diagnosis(sheet, "diagnosis", said, TRUTH)
    assert words in failed(sheet)["diagnosis"]


def test_a_diagnosis_with_places_says_where_to_look():
    sheet = sheet_for(("diagnosis",))
    said = {"kind": None, "rank": 0}
    check_diagnosis(sheet, "diagnosis", said, TRUTH, where={"rank": "its first line"})
    assert failed(sheet)["diagnosis"].splitlines() == [
        "not filled in: kind",
        "rank: 0 is not what the run shows",
    ]


@pytest.mark.parametrize("said", [None, "race", [("kind", "race")]])
def test_a_diagnosis_that_is_no_dict_is_an_error(said):
    with pytest.raises(TypeError, match="expected a dict"):
        check_diagnosis(sheet_for(("diagnosis",)), "diagnosis", said, TRUTH)


def double(x):
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    return x + x


def double_without_a_wait(x):
    work = dist.all_reduce(x, async_op=True)
    y = x + x
    assert work is not None
    work.wait()
    return y


def doubled_by_hand(x):
    dist.all_reduce(x)
    return torch.tensor([4.0] * 500)


def double_where_there_are_two(x):
    return double(x) if dist.get_world_size() == 2 else x


def double_and_wait(x):
    y = double(x)
    streams.synchronize()
    return y


def double_slowly(x):
    y = torch.ones(8, 8)
    for _ in range(50):
        y = y @ y / 8
    return double(x + 0 * y.sum())


def on_rank(number, program):
    return origins.hold(program, torch.full((500,), float(number)))


def play(case, program):
    number, num_ranks = case
    played.append(case)
    return Examined.of(on_rank, number, program, world_size=num_ranks)


played = []


def wrong(case, seen, right):
    pairs = zip(seen.values, right.values, strict=True)
    return [
        Violation("values", "wrong")
        for mine, ours in pairs
        if not torch.equal(mine, ours)
    ]


SENTENCES = ("diagnosis", "safe", "values", "one message", "kept")
LAWS = {"hazard": "safe", "unwaited": "safe", "recorded": "values", "cpu": "kept"}
SLOWER = program_laws.slower(find_hardware("h100-nvlink"), launch_ns=50_000)
REPAIR = Repair(
    diagnosis="diagnosis",
    kept="kept",
    truth=lambda number: TRUTH,
    cases=lambda number: ((number, 2), (number + 1, 3)),
    play=play,
    clock=SLOWER,
    reference=double,
    wrong=wrong,
    ran="number {number}",
    hint="what waits?",
    also={"one message": lambda seen: []},
)


def repaired(program, number=1):
    sheet = sheet_for(SENTENCES, LAWS)
    with contextlib.suppress(StopGradingError):
        REPAIR.grade(sheet, number, TRUTH, program)
    return sheet


def test_a_right_repair_passes():
    played.clear()
    verdict = repaired(double).verdict()
    assert verdict.passed and verdict.ran == "number 1"
    assert {(1, 2), (2, 3)} == {*played}


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (double_without_a_wait, "safe"),
        (lambda x: double(x) + 1, "values"),
        (doubled_by_hand, "values"),
        (double_where_there_are_two, "values"),
        (double_and_wait, "kept"),
        (double_slowly, "kept"),
    ],
)
def test_each_sentence_of_a_repair_is_judged(program, sentence):
    assert sentence in failed(repaired(program))


def test_a_repair_with_no_diagnosis_is_an_error():
    with pytest.raises(TypeError, match="expected a dict"):
        REPAIR.grade(sheet_for(SENTENCES, LAWS), 1, None, double)


# -- stored measurements


def test_a_stored_measurement_is_read_with_its_machine(tmp_path):
    path = tmp_path / "measured.json"
    assert stored.read("03", path) is None
    path.write_text(
        '{"world_size": 2, "card": "H200", "torch": "2.11", "nccl": "2.28",'
        ' "date": "2026-11-28T04", "backend": "gloo"}'
    )
    found = stored.read("03", path)
    assert found is not None
    assert stored.machine(found) == "2 x H200, torch 2.11, NCCL 2.28, 2026-11-28"
    assert stored.profile_of(found).name == "h200-nvlink"
    assert stored.read("03", path, on_gpus=True) is None
    assert stored.read("03") is not None


def test_without_a_file_the_command_is_shown():
    assert stored.command("03") in stored.nothing("03")
    assert "This machine has" in stored.measure_it_here("make it")


def test_columns_stand_below_each_other():
    rows = [("", "a", "b"), ("row", 1, 22), ("short",)]
    assert stored.columns(rows) == ["       a   b", "row    1  22", "short"]
