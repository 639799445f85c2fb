"""0.5 and 0.6: a timeline read, a step's bound found; and what is stored of GPUs."""

from __future__ import annotations

import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab.program import resolve
from overlaplab_course import lab00
from overlaplab_course import stored as of_lessons
from overlaplab_course.lab00 import checks as graders
from overlaplab_course.lab00 import given
from overlaplab_course.lab00 import measured as lab00_measured
from overlaplab_course.lab00.checks import border_batch, read
from overlaplab_course.lab00.given import step_of, two_ranks

NUMBER = 6


def right():
    return read(two_ranks(NUMBER))


# 0.5


@pytest.mark.parametrize("number", [6, 1, 17])
def test_the_right_reading_passes_for_every_number(number):
    verdict = judge(find_exercise("0.5"), number, read(two_ranks(number)))
    assert verdict.passed, str(verdict)


def test_a_reading_from_the_figure_passes():
    said = right()
    said["held_us"] = round(said["held_us"])
    said["cpu_waits_us"] = float(round(said["cpu_waits_us"], -1))
    assert judge(find_exercise("0.5"), NUMBER, said).passed


def first_to_come(said):
    return {"late_rank": 1 - said["late_rank"]}


def whole_message(said):
    span = next(s for s in two_ranks(NUMBER).spans if s.kind == "communication")
    return {"held_us": span.duration_ns / 1000}


def in_nanoseconds(said):
    return {"held_us": 1000 * said["held_us"]}


def other_rank_looks(said):
    return {"looking_rank": 1 - said["looking_rank"]}


def end_of_the_wait(said):
    wait = next(s for s in two_ranks(NUMBER).spans if s.name.startswith("wait"))
    return {"cpu_waits_us": wait.end_ns / 1000}


def all_products(said):
    return {"products": said["products"] + 1}


def nothing(said):
    return {"products": None}


WRONG = {
    first_to_come: graders.LATE,
    whole_message: graders.HELD,
    in_nanoseconds: graders.HELD,
    other_rank_looks: graders.LOOKS,
    end_of_the_wait: graders.LOOKS,
    all_products: graders.DONE,
    nothing: graders.DONE,
}


@pytest.mark.parametrize("slip", WRONG, ids=lambda f: f.__name__)
def test_a_wrong_reading_is_refused_by_its_sentence(slip, faults):
    verdict = judge(find_exercise("0.5"), NUMBER, {**right(), **slip(right())})
    found = faults(verdict)
    assert list(found) == [WRONG[slip]]
    assert "what the run shows" not in found[WRONG[slip]]


def test_each_wrong_reading_is_described_where_to_read_it_and_how_exactly(faults):
    found = faults(judge(find_exercise("0.5"), NUMBER, {"held_us": 1}))
    assert "'held_us' is 1, expected from the start" in found[graders.HELD]
    assert "to within 3 %" in found[graders.HELD]
    assert "there is no 'products'" in found[graders.DONE]


def test_numbers_draw_different_runs():
    drawn = {given.draw_uneven(number) for number in range(40)}
    assert len(drawn) > 15
    late = [d.products[1] > d.products[0] for d in drawn]
    looks_late = [d.looks == (d.products[1] > d.products[0]) for d in drawn]
    assert any(late) and not all(late)
    assert any(looks_late) and not all(looks_late)


@pytest.mark.parametrize("number", range(8))
def test_every_number_draws_a_run_whose_answers_differ(number):
    said = read(two_ranks(number))
    assert said["held_us"] > 20
    assert said["cpu_waits_us"] > 20
    assert said["products"] >= 3


# 0.6

FOUND = {
    "launch-bound": {"batch": 16},
    "GPU-bound": {"batch": 4096},
    "border": border_batch(),
}
OTHER_FOUND = {
    "launch-bound": {"batch": 1024, "width": 128, "launch_us": 40, "teraflops": 100},
    "GPU-bound": {"width": 1024, "launch_us": 2, "batch": 512},
    "border": {**given.BORDER_AT, "batch": border_batch()},
}


@pytest.mark.parametrize("found", [FOUND, OTHER_FOUND], ids=["one", "another"])
def test_any_settings_that_do_it_pass(found):
    verdict = judge(find_exercise("0.6"), found)
    assert verdict.passed, str(verdict)


BORDER = border_batch()
WRONG_FOUND = {
    "swapped": (
        {"launch-bound": FOUND["GPU-bound"], "GPU-bound": FOUND["launch-bound"]},
        {graders.IS_LAUNCH, graders.IS_GPU},
    ),
    "where the sliders start, launch": (
        {"launch-bound": {n: k.default for n, k in given.KNOBS.items()}},
        {graders.IS_LAUNCH},
    ),
    "where the sliders start, GPU": (
        {"GPU-bound": {n: k.default for n, k in given.KNOBS.items()}},
        {graders.IS_GPU},
    ),
    "one batch too small": ({"border": BORDER // 2}, {graders.IS_BORDER}),
    "one batch too large": ({"border": 2 * BORDER}, {graders.IS_BORDER}),
    "no batch of the slider": ({"border": BORDER + 1}, {graders.USABLE}),
    "left out": ({"GPU-bound": None}, {graders.USABLE}),
    "no such knob": ({"GPU-bound": {"rows": 1}}, {graders.USABLE}),
    "no such value": ({"GPU-bound": {"batch": 10**6}}, {graders.USABLE}),
}


@pytest.mark.parametrize("name", WRONG_FOUND)
def test_settings_that_do_not_do_it_are_refused(name, faults):
    slip, sentences = WRONG_FOUND[name]
    found = faults(judge(find_exercise("0.6"), {**FOUND, **slip}))
    assert set(found) == sentences


def test_at_the_border_the_kernels_take_as_long_as_the_launches():
    for batch, longer in ((BORDER // 2, "launch"), (BORDER, "compute")):
        spans = given.turn(**{**given.BORDER_AT, "batch": batch}).spans
        total = {kind: 0 for kind in ("launch", "compute")}
        for span in spans:
            total[span.kind] += span.duration_ns
        assert max(total, key=total.get) == longer


# Stored measurements


STORED = {
    "world_size": 2,
    "card": "NVIDIA H100 80GB HBM3",
    "torch": "2.11.0",
    "nccl": "2.28.9",
    "date": "2026-11-28T04:10:00+00:00",
    "products": [
        {"width": 4096, "number": 50, "returned_ms": 0.4, "finished_ms": 11.5}
    ],
    "steps": {
        "layers": 12,
        "width": 2048,
        "dtype": "bfloat16",
        "rows": [{"batch": 16, "returned_ms": 1.5, "finished_ms": 1.6}],
    },
    "loops": {
        "layers": 12,
        "width": 2048,
        "dtype": "bfloat16",
        "batches": 20,
        "rows": [{"batch": 4096, "item_ms": 3.0, "at the end_ms": 2.5}],
    },
    "two ranks": {
        "width": 8192,
        "bytes": 2**27,
        "ranks": 2,
        "product_ms": 2.0,
        "message_ms": 1.0,
        "product first_ms": 3.0,
        "message first_ms": 2.2,
    },
}
TABLES = (
    lab00_measured.launches,
    lab00_measured.backwards,
    lab00_measured.loops,
    lab00_measured.two_ranks,
)
ALL_TABLES = (*TABLES, lab00_measured.launch_costs)


@pytest.fixture
def store(monkeypatch):
    return lambda found: monkeypatch.setattr(of_lessons, "read", lambda *_, **__: found)


@pytest.mark.parametrize("table", TABLES, ids=lambda f: f.__name__)
def test_a_stored_table_names_its_machine(table, store):
    store(STORED)
    described = table()
    for fact in ("2 x NVIDIA H100", "torch 2.11.0", "NCCL 2.28.9", "2026-11-28"):
        assert fact in described


@pytest.mark.parametrize("table", ALL_TABLES, ids=lambda f: f.__name__)
def test_where_nothing_is_stored_no_number_is_shown(table, store):
    store(None)
    described = table()
    assert described == of_lessons.nothing("00")
    assert " ms" not in described


def test_a_prediction_stands_beside_what_was_measured(store):
    store(STORED)
    described = lab00_measured.launches()
    assert "0.40     11.50" in described
    assert "Predicted: h100-nvlink" in described
    assert "20%" in lab00_measured.loops()
    assert "saved: 0.80 of the 1.00 ms" in lab00_measured.two_ranks()


def test_what_the_lesson_says_of_the_stored_numbers_is_so():
    stored = of_lessons.read("00")
    assert stored is not None
    *launch_bound, last = stored["steps"]["rows"]
    times = [row["finished_ms"] for row in launch_bound]
    assert max(times) < 1.25 * min(times)
    assert last["finished_ms"] > 2 * last["returned_ms"]
    hardware = of_lessons.profile_of(stored)
    steps = stored["steps"]
    first = step_of(steps["layers"], steps["width"], launch_bound[0]["batch"])
    assert resolve(first, hardware).end_ns / 1e6 < 0.8 * times[0]
    products = stored["products"][0]
    bare_us = 1000 * products["returned_ms"] / products["number"]
    assert bare_us == pytest.approx(hardware.launch_ns / 1000, rel=0.25)
    costs = [
        row["item_ms"] / row["at the end_ms"] - 1 for row in stored["loops"]["rows"]
    ]
    assert [row["batch"] for row in stored["loops"]["rows"]][2] == 8192
    assert 0 < costs[0] < 0.05 and max(costs) == costs[2] > 2 * costs[3]
    wide = stored["products"][1]
    assert wide["returned_ms"] > 1.4 * products["returned_ms"]
    two = stored["two ranks"]
    saved = two["product first_ms"] - two["message first_ms"]
    assert 0 < saved < 0.9 * min(two["product_ms"], two["message_ms"])


# Helpers of the cells


def test_a_launch_table_shows_when_each_operator_runs():
    timeline = two_ranks(NUMBER)
    rows = lab00.launch_table(timeline).splitlines()[1:]
    assert rows[0].split()[:6] == ["mm", "0", "to", "10", "10", "to"]
    assert all("us" in row for row in rows)


def test_what_passed_is_run_in_the_place_of_the_courses(capsys, monkeypatch):
    monkeypatch.setattr(lab00._kept, "_mine", {})
    assert lab00.mine_or_ours("0.4") is not None
    assert "not solved yet" in capsys.readouterr().out
    lab00.keep("0.4", "mine")
    assert lab00.mine_or_ours("0.4") == "mine"
