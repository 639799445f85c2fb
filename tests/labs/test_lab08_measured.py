"""What lab 08 will show of GPUs: the tables of a file of the benchmark."""

from __future__ import annotations

import json

import pytest

from overlaplab_course.lab08 import measured


def write(path, cases):
    head = {"world_size": 2, "card": "A card", "torch": "2.13", "backend": "nccl"}
    path.write_text(json.dumps({**head, "date": "2026-01-02T03", "cases": cases}))


@pytest.fixture
def results(tmp_path, monkeypatch):
    path = tmp_path / "measured.json"
    monkeypatch.setattr(measured, "STORED", path)
    return path


def test_feeds_are_shown_by_size_with_what_no_step_hides(results):
    ways = {"compute": 4.0, "by hand": 5.5, "ours, pageable": 4.04}
    rows = {
        way: {"median_ms": ms, "exposed_ms": round(ms - 4.0, 2)}
        for way, ms in ways.items()
    }
    case = {"part": "prefetch", "batch_mib": 64, "copy_ms": 2.5, "fill_ms": 5.25}
    write(results, [{**case, "variants": rows}, {"part": "reducer"}])
    *table, machine = measured.gpu_feeds().splitlines()
    assert [line.split()[-1] for line in table[1:]] == [
        "5.25",
        "2.50",
        "4.00",
        "1.50",
        "0.04",
    ]
    assert machine == "2 x A card, torch 2.13, 2026-01-02"


def test_what_is_stored_shows_that_a_late_step_is_its_messages_on_a_slow_link():
    assert "MiB" in measured.gpu_feeds()
    rows = measured.gpu_reducers().splitlines()
    assert [row.split("  ")[0] for row in rows[1:-1]] == [
        f"{link}, batch {batch}"
        for link in ("p2p-off", "nvlink")
        for batch in (1, 2, 8)
    ]
    compute, _, bucketed, delayed = map(float, rows[2].split()[3:7])
    assert compute < delayed < bucketed
    assert max(map(len, rows)) <= 95  # a page 1280 pixels wide wraps longer ones


def test_a_part_that_is_not_stored_is_named(results):
    write(results, [])
    with pytest.raises(LookupError, match="no part 'reducer'"):
        measured.gpu_reducers()


def test_reducers_are_shown_by_link_and_batch_with_their_memory(results):
    rows = {
        "compute": {"median_ms": 20.0},
        "bucketed": {"median_ms": 30.0, "peak_allocated_bytes": 2 * 2**30},
        "delayed": {"median_ms": 24.5, "peak_allocated_bytes": 3 * 2**30},
    }
    case = {"part": "reducer", "link": "p2p-off", "batch": 2, "variants": rows}
    write(results, [case])
    _, row, _ = measured.gpu_reducers().splitlines()
    numbers = ["20.00", "30.00", "24.50", "|", "-", "2.00", "3.00"]
    assert row.split() == ["p2p-off,", "batch", "2", *numbers]


def test_without_a_file_nothing_is_made_up(results):
    for table in (measured.gpu_feeds, measured.gpu_reducers):
        with pytest.raises(FileNotFoundError, match="nothing is stored"):
            table()
