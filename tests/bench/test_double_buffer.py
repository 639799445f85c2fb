"""The benchmark of double buffering: its arithmetic, and a rehearsal on the CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from overlaplab.bench import command
from overlaplab.bench.double_buffer import delayed, feeding, measure, prefetched
from overlaplab.bench.double_buffer.plan import REHEARSAL, Plan
from overlaplab.bench.timing import Samples, time_until
from tests.ranks import values_of

MS = 1_000_000


class Rehearsal(NamedTuple):
    results: Any
    environments: list[Mapping[str, str]]  # of its jobs


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    environments = []

    def on_gloo(
        fn: Callable[..., Any], *args: Any, environment: Mapping[str, str]
    ) -> None:
        environments.append(environment)
        values_of(fn, *args, cluster="gloo")

    out = tmp_path_factory.mktemp("double") / "new" / "double_buffer.json"
    parts, links = ("prefetch", "reducer"), ("nvlink", "p2p-off")
    measure.measure({"backend": "gloo"}, parts, links, REHEARSAL, out, 9, on_gloo)
    return Rehearsal(json.loads(out.read_bytes()), environments)


def cases(rehearsal: Rehearsal, part: str) -> list[Any]:
    found = [case for case in rehearsal.results["cases"] if case["part"] == part]
    return found


def test_each_link_has_a_job_with_its_settings(rehearsal: Rehearsal) -> None:
    assert rehearsal.environments == [{}, {}, {"NCCL_P2P_DISABLE": "1"}]
    links = [case["link"] for case in cases(rehearsal, "reducer")]
    assert links == ["nvlink", "p2p-off"]
    assert rehearsal.results["world_size"] == 2 and "torch" in rehearsal.results


def test_every_way_to_feed_is_timed_at_every_length(rehearsal: Rehearsal) -> None:
    found = cases(rehearsal, "prefetch")
    assert len(found) == len(REHEARSAL.lengths)
    assert found[0]["matmuls"] < found[1]["matmuls"]
    for case in found:
        assert case["not_measured"] == {}
        assert list(case["variants"]) == ["compute", *feeding.WAYS]
        for row in case["variants"].values():
            assert len(row["samples_ms"]) == REHEARSAL.steps_a_round
        assert case["ratio_to_best_peer"][case["best_peer"]] == 1
        assert prefetched.table(case).count("of the best peer") == 8
        assert prefetched.table(case).count("of the best with its loader") == 3


def test_every_kind_of_reducer_is_timed_beside_the_others(rehearsal: Rehearsal) -> None:
    for case in cases(rehearsal, "reducer"):
        assert list(case["variants"]) == ["compute", "ddp", "bucketed", "delayed"]
        assert case["ratio_to_bucketed"]["bucketed"] == 1
        assert case["ratio_to_ddp"]["ddp"] == 1
        for kind, row in case["variants"].items():
            assert len(row["samples_ms"]) == REHEARSAL.steps_a_round
            assert row["name"] in case["sweeps_median_ms"][kind]
        assert set(case["sweeps_median_ms"]["delayed"]) == {
            "delayed default",
            "delayed 1",
        }
        assert case["gradient_norm"] > 0
        assert delayed.table(case).count("of bucketed") == 4


def test_exposed_is_a_step_minus_the_one_that_computes_only() -> None:
    times = {
        way: Samples((ms * MS,) * 3)
        for way, ms in (
            ("compute", 9),
            ("pinned, blocking", 18),
            ("torch's workers", 12),
            ("ours, pinned", 10),
        )
    }
    found = prefetched.compared(times)
    assert found["variants"]["ours, pinned"]["exposed_ms"] == 1
    assert found["variants"]["ours, pinned"]["exposed_percent"] == 10
    assert found["variants"]["pinned, blocking"]["exposed_percent"] == 50
    assert found["best_peer"] == "torch's workers"
    assert found["ratio_to_best_peer"]["ours, pinned"] == pytest.approx(10 / 12, 1e-3)
    assert found["ratio_to_same_loader"] == {"ours, pinned": round(10 / 18, 4)}

    steps = {"compute": 60, "ddp": 80, "bucketed": 100, "delayed": 70}
    rows = delayed.compared({k: Samples((v * MS,)) for k, v in steps.items()}, {})
    assert rows["variants"]["delayed"]["exposed_ms"] == 10
    assert rows["ratio_to_bucketed"]["delayed"] == 0.7
    assert rows["ratio_to_ddp"]["delayed"] == 0.875


@pytest.mark.parametrize(("step_ms", "steps"), [(2, 75), (100, 8)])
def test_a_block_begins_when_the_clock_of_the_gpu_has_fallen(
    monkeypatch: pytest.MonkeyPatch, step_ms: int, steps: int
) -> None:
    """On an H200 after tens of milliseconds of matmuls, by 6 %: more than is judged."""
    monkeypatch.setattr(prefetched, "_time", lambda _: step_ms * MS)
    case = object.__new__(prefetched._Case)
    case._plan = Plan(settling=8, settling_ms=150)
    assert case._settling(lambda: None) == steps


def feeds_wrong_batches() -> dict[str, str]:
    def half(loaders: feeding.Loaders) -> Iterator[Tensor]:
        for batch in loaders.pageable():
            whole = batch.clone()
            whole[: len(whole) // 2] = 0
            yield whole

    ways = {"pinned, blocking": feeding.pinned_blocking, "ours, pinned": half}
    prefetched.WAYS = ways  # type: ignore[misc]
    try:
        (case, _) = prefetched.cases(0.01, REHEARSAL, 1e12)
    finally:
        prefetched.WAYS = feeding.WAYS  # type: ignore[misc]
    assert list(case["variants"]) == ["compute", "pinned, blocking"]
    found: dict[str, str] = case["not_measured"]
    return found


def test_a_way_that_feeds_wrong_batches_is_not_timed() -> None:
    for found in values_of(feeds_wrong_batches, cluster="gloo"):
        assert list(found) == ["ours, pinned"]
        assert "has values from 0.0 to" in found["ours, pinned"]


def feeds_pageable_batches_for_two_rounds() -> list[str]:
    plan = replace(REHEARSAL, loaders=("pageable",), rounds=2)
    (case, _) = prefetched.cases(0.01, plan, 1e12)
    assert all(len(row["samples_ms"]) == 4 for row in case["variants"].values())
    return list(case["variants"])


def test_one_loader_is_measured_alone_if_it_is_asked_for() -> None:
    ways = ["compute", "pageable, pinned in the loop", "ours, pageable"]
    for found in values_of(feeds_pageable_batches_for_two_rounds, cluster="gloo"):
        assert found == ways


def test_every_other_round_goes_back_through_the_ways() -> None:
    taken = values_of(takes_three_rounds, cluster="gloo", world_size=1)[0]
    assert taken == ["a", "a", "b", "b", "b", "b", "a", "a", "a", "a", "b", "b"]


def takes_three_rounds() -> list[str]:
    taken: list[str] = []
    steps = {name: partial(taken.append, name) for name in "ab"}
    times, rounds = time_until(
        float("inf"), steps, num_rounds=3, steps_a_round=1, settling={}
    )
    assert rounds == 3 and list(times) == ["a", "b"]
    return taken


def test_workers_that_the_hosts_shared_memory_has_no_room_for_are_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = shutil.disk_usage("/")._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(RuntimeError, match="need 8 MiB of /dev/shm, 1 MiB are free"):
        feeding.Loaders(2**20, world_size=2).workers()


def test_torchrun_starts_one_part_on_one_link(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr("sys.argv", ["overlaplab.bench", "double-buffer"])
    assert command.main() == 2
    assert "Choose one: --part prefetch" in capsys.readouterr().err
