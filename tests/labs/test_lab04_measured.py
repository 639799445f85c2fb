"""Tables of lab 04 from a stored file, and what they say where there is none."""

from __future__ import annotations

import json

import pytest

from overlaplab_course import stored as of_lessons
from overlaplab_course.lab04 import show as lab

STORED = {
    "backend": "nccl",
    "card": "a card",
    "torch": "2.11.0",
    "nccl": "2.28.9",
    "date": "2026-11-28T04:10:00+00:00",
    "world_size": 2,
    "layer": [64, 32, 64, 32],
    "ways": {"no message": 2.0, "wait late": 2.1, "the message alone": 0.4},
    "windows": {"no limit": 5.0, "stalling, k=1": 6.5},
    "window_peak_bytes": {"no limit": 10 * 2**20, "stalling, k=1": None},
    "small_tensors": [64, 16384],
    "small": {"one by one": 3.0, "one flat tensor": 0.2},
    "by_size": {
        "all_reduce": {"4096": 0.02, "104857600": 0.5},
        "all_gather": {"4096": 0.02, "104857600": 0.25},
        "reduce_scatter, all_gather": {"4096": 0.04, "104857600": 0.5},
    },
    "captured_by_size": {"refused": "all_reduce: RuntimeError: no"},
}


@pytest.fixture
def stored(tmp_path, monkeypatch):
    def store(values):
        path = tmp_path / "measured.json"
        if values is not None:
            path.write_text(json.dumps(values))
        read = of_lessons.read
        monkeypatch.setattr(
            of_lessons, "read", lambda lesson, **options: read(lesson, path, **options)
        )

    return store


def no_layer(x, w, way):
    return x @ w["in"]


@pytest.mark.parametrize(
    "table",
    [lambda: lab.gpus_table(no_layer), lab.machine],
)
def test_without_a_measurement_every_table_says_how_to_measure(table, stored):
    stored(None)
    assert "Nothing is stored yet" in table()
    assert of_lessons.command("04") in table()


def test_a_rehearsal_on_gloo_is_no_measurement(stored):
    stored({**STORED, "backend": "gloo"})
    assert "Nothing is stored yet" in lab.gpus_table(no_layer)


def test_a_number_that_is_not_stored_is_refused(stored):
    stored(None)
    with pytest.raises(LookupError, match="Nothing is stored yet"):
        lab.number("ways", "wait late")


def test_every_number_stands_in_us_beside_its_prediction_and_peak(stored, monkeypatch):
    stored(STORED)
    monkeypatch.setattr(lab, "predicted_ms", lambda layer, way: 2.25)
    monkeypatch.setattr(lab, "predicted_window_ms", lambda name: 4.5)
    lines = [" ".join(row.split()) for row in lab.gpus_table(no_layer).splitlines()]
    assert lines[0] == "section us predicted measured captured"
    for line in (
        "3 no message 2000",
        "3 wait late 2250 2100",
        "5 no limit (peak 10 MiB) 4500 5000",
        "5 stalling, k=1 4500 6500",
        "6 64 tensors of 16 KiB, one flat tensor 200",
        "7 all_reduce of 4 KiB 20",
    ):
        assert line in lines
    assert lab.machine().startswith("2 x a card, torch 2.11.0, NCCL 2.28.9, 2026-11-28")


@pytest.mark.parametrize("name", ["no limit", "stalling, k=1", "side stream, k=2"])
def test_a_window_of_the_measured_size_has_a_prediction(name, stored):
    stored({**STORED, "grads": [4096, 4096], "tokens": [2048, 12288] * 2})
    lab.predicted_window_ms.cache_clear()
    alone_ms = lab.predicted_window_ms("no message")
    predicted_ms = lab.predicted_window_ms(name)
    lab.predicted_window_ms.cache_clear()
    assert alone_ms < predicted_ms < 10 * alone_ms


def test_a_message_alone_is_no_step(stored):
    stored({**STORED, "grads": [4096, 4096], "tokens": [2048]})
    assert lab.predicted_window_ms("a message alone") is None
