"""What lab 02 prints of GPUs: from a stored file, or that there is none."""

from __future__ import annotations

import json

import pytest

from overlaplab_course import measure as lessons
from overlaplab_course import stored as of_lessons
from overlaplab_course.lab02 import show

RATIOS = {"plain": {"step_ratio": 1.0}, "events": {"step_ratio": 1.25}}
STORED = {
    "backend": "nccl",
    "card": "a card",
    "torch": "2.11.0",
    "nccl": "2.28.9",
    "date": "2026-11-28T08:10:00+00:00",
    "command": "a command",
    "world_size": 2,
    "kinds": {"steady": [0, 20]},
    "sizes": {"small": 256, "large": 2048, "mib": 16},
    "first steps": [350.25, *[1.0] * 8, 0.5],
    "stopwatches": {
        "steady": {
            "around": 0.2,
            "wait each": 0.9,
            "wait at the ends": 0.8,
            "events": 0.75,
        }
    },
    "waits": {"as it is": 0.5, "a wait after each operator": 1.0},
    "profiles": {"only small": RATIOS | {"kineto": {"step_ratio": 2.5}}},
    "new groups": {"made by the first call": {"calls": [400.0, *[1.0] * 8, 0.125]}},
}


@pytest.fixture
def store(tmp_path, monkeypatch):
    def store(values):
        path = tmp_path / "measured.json"
        if values is not None:
            path.write_text(json.dumps(values))
        read = of_lessons.read
        monkeypatch.setattr(
            of_lessons, "read", lambda lesson, **options: read(lesson, path, **options)
        )

    return store


def test_each_number_stands_beside_its_name(store):
    store(STORED)
    lines = show.on_gpus().splitlines()
    assert lines == [
        "ms per step      around  wait each  events",
        "steady (0 + 20)    0.20       0.90    0.75",
        "(small products of 256 + large of 2048, bfloat16; 16 MiB)",
        "",
        "first step of the process: 350.2 ms; the tenth: 0.50",
        "first message of a new group: 400.0 ms; the tenth: 0.12",
        "small first, a wait after each operator: x 2.00",
        "only small, in ol.profile(): x 2.50; with events=True: x 1.25",
        "",
        "2 x a card, torch 2.11.0, NCCL 2.28.9, 2026-11-28; medians, the slowest "
        "rank's.",
        f"On two GPUs or more: {of_lessons.command('02')}",
    ]


@pytest.mark.parametrize("values", [None, STORED | {"backend": "gloo"}])
def test_without_a_measurement_on_gpus_it_says_how_to_make_one(store, values):
    store(values)
    assert show.on_gpus() == of_lessons.nothing("02")
    assert "measure 02" in of_lessons.nothing("02") and "02" in lessons.known()


def test_groups_that_were_refused_leave_the_rest(store):
    refused = {"made by the first call": {"error": "no"}}
    store(STORED | {"new groups": refused})
    said = show.on_gpus()
    assert "new group" not in said and "first step of the process: 350.2" in said
