"""`ol.profile` on CPU processes: steps, ranks, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import overlaplab as ol
from overlaplab.errors import ProfileError, RankError
from overlaplab.profiling.sessions import (
    KinetoRecorder,
    without_earlier_launches,
)
from tests.guards import GUARD_S

MODES = pytest.mark.parametrize("events", [False, True], ids=["kineto", "events"])
# One operator a step, another one each time.
OPERATORS = (torch.sin, torch.cos, torch.tan, torch.exp)


def profiled(*, num_steps: int = 4, last_step: bool = True, **options: Any) -> Any:
    x = torch.rand(64)
    with ol.profile(**options) as profile:
        for number in range(num_steps):
            with ol.annotate(f"part {number}"):
                OPERATORS[number](x)
            if number < num_steps - 1 or last_step:
                profile.step()
    return profile


def names(timeline: ol.Timeline) -> list[str]:
    return [s.name for s in timeline.spans if s.kind == "compute"]


def test_steps_carry_their_numbers_and_warm_up_is_left_out():
    timeline = profiled(warmup=2).timeline

    assert timeline.steps == (2, 3)
    assert names(timeline) == ["tan", "exp"]
    assert names(timeline.of_step(3)) == ["exp"]
    assert [s.attributes["label"] for s in timeline.spans] == ["part 2", "part 3"]
    assert timeline.start_ns == 0


def test_the_event_mode_has_the_same_steps_and_labels():
    timeline = profiled(warmup=2, events=True).timeline

    assert timeline.steps == (2, 3)
    found = [s.attributes.get("label") for s in timeline.of_step(2).spans]
    assert [label for label in found if label] == ["part 2"]
    assert timeline.report().compute_ns > 0


@MODES
def test_without_step_the_block_is_one_step(events):
    x = torch.rand(64)
    with ol.profile(events=events) as profile:
        x.sin()

    assert profile.timeline.steps == (0,)


@MODES
def test_what_comes_after_the_last_step_belongs_to_none(events):
    timeline = profiled(num_steps=2, last_step=False, events=events).timeline

    assert timeline.steps == (0,)
    outside = [s for s in timeline.spans if "step" not in s.attributes]
    assert "part 1" in {s.attributes.get("label") for s in outside}


@MODES
def test_so_many_steps_and_no_more_are_recorded(events):
    profile = profiled(warmup=1, steps=2, events=events)

    assert profile.timeline.steps == (1, 2)
    assert profile.step_number == 4


def test_the_timeline_is_there_once_the_steps_are():
    with ol.profile(steps=1) as profile:
        torch.rand(8).sin()
        profile.step()
        assert "sin" in names(profile.timeline)


@MODES
def test_an_exception_passes_and_what_was_recorded_stays(events):
    with pytest.raises(ZeroDivisionError), ol.profile(events=events) as profile:
        torch.rand(8).sin()
        profile.step()
        raise ZeroDivisionError

    assert profile.timeline.steps == (0,)
    assert profiled().timeline.steps == (0, 1, 2, 3)  # nothing is left open


def test_an_exception_in_the_warm_up_leaves_no_profiler_running():
    with pytest.raises(ZeroDivisionError), ol.profile(warmup=3):
        raise ZeroDivisionError

    assert profiled().timeline.steps == (0, 1, 2, 3)


def test_a_saved_trace_gives_the_same_timeline(tmp_path):
    profile = profiled(warmup=1)

    file, in_folder = profile.save(tmp_path / "t.json"), profile.save(tmp_path / "all")

    assert in_folder == tmp_path / "all" / "rank_0.json.gz"
    for path in (file, in_folder):
        read = ol.read_trace(path)
        assert names(read) == names(profile.timeline)
        assert read.report().compute_ns == profile.timeline.report().compute_ns


@pytest.fixture(scope="module")
def own_script():
    """A process of its own: Kineto takes its log level at its first use.

    It has neither the pool nor its collective_log.
    """
    script = (
        "import torch, torch.distributed as dist, overlaplab as ol\n"
        "for _ in range(2):\n"
        "    with ol.profile() as p: torch.ones(3).sin(); p.step()\n"
        "    assert p.timeline.steps == (0,)\n"
        "print('profiled')\n"
        "store = dist.HashStore()\n"
        "dist.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
        "with ol.profile() as profile:\n"
        "    with ol.annotate('norm'):\n"
        "        dist.all_reduce(torch.ones(3), async_op=True).wait()\n"
        "for s in profile.timeline.spans:\n"
        "    if s.kind in ('communication', 'host', 'launch'):\n"
        "        print(s.lane, s.name, s.bytes, s.attributes.get('label'))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=GUARD_S
    )


def test_nothing_is_printed(own_script):
    assert (own_script.returncode, own_script.stderr) == (0, "")
    assert own_script.stdout.startswith("profiled\n")


def test_in_a_script_of_one_s_own_launches_carry_labels_and_waits_are_seen(own_script):
    _, *spans = own_script.stdout.splitlines()
    assert sorted(spans) == [
        "comm all_reduce 12 norm",
        "cpu launch all_reduce 0 None",
        "cpu wait all_reduce 0 None",
    ], own_script.stderr


# What it refuses.


def test_a_block_of_warm_up_alone_has_nothing_to_show():
    with ol.profile(warmup=3) as profile:
        profile.step()

    with pytest.raises(ProfileError, match=r"after 1 step\(\) calls.*first 3 steps"):
        _ = profile.timeline


def test_an_open_profile_has_no_timeline_and_an_unused_one_neither():
    with ol.profile() as profile:
        with pytest.raises(ProfileError, match="still open"):
            _ = profile.timeline
        with pytest.raises(ProfileError, match="still open"):
            profile.save("nowhere.json")
    with pytest.raises(ProfileError, match=r"use `with ol.profile\(\)"):
        _ = ol.profile().timeline


def test_step_counts_inside_the_block_only_and_a_profile_serves_once():
    profile = ol.profile()
    with pytest.raises(ProfileError, match="before the profile's `with` block"):
        profile.step()
    with profile:
        pass
    with pytest.raises(ProfileError, match="after the profile's `with` block"):
        profile.step()
    with pytest.raises(ProfileError, match="has been used"), profile:
        pass


@MODES
def test_profiles_do_not_nest_and_the_outer_one_goes_on(events):
    with ol.profile() as outer:
        torch.rand(8).sin()
        with (
            pytest.raises(ProfileError, match="profiles do not nest"),
            ol.profile(events=events),
        ):
            pass
        torch.rand(8).cos()

    assert {"sin", "cos"} <= set(names(outer.timeline))


def test_a_step_of_another_thread_is_refused():
    caught = []

    def call(profile: Any) -> None:
        try:
            profile.step()
        except ProfileError as error:
            caught.append(str(error))

    with ol.profile() as profile:
        thread = threading.Thread(target=call, args=(profile,))
        thread.start()
        thread.join()

    assert "another thread" in caught[0]


def test_a_profiler_that_runs_already_is_named_and_goes_on():
    with torch.autograd.profiler.profile(use_kineto=True) as theirs:
        with pytest.raises(ProfileError, match=r"torch\.profiler is running already"):
            ol.profile().__enter__()
        torch.rand(8).sin()

    assert "aten::sin" in {event.name for event in theirs.function_events}
    assert profiled().timeline.steps == (0, 1, 2, 3)


def test_a_profiler_inside_the_block_is_reported_to_have_ended_it():
    with (
        pytest.raises(ProfileError, match=r"another torch\.profiler was started in"),
        ol.profile() as profile,
        torch.autograd.profiler.profile(use_kineto=True),
    ):
        pass

    with pytest.raises(ProfileError, match="broke off"):
        _ = profile.timeline
    assert profiled().timeline.steps == (0, 1, 2, 3)


def test_events_run_beside_another_profiler():
    with torch.autograd.profiler.profile(use_kineto=True) as theirs:
        timeline = profiled(events=True).timeline

    assert timeline.steps == (0, 1, 2, 3)
    assert "aten::sin" in {event.name for event in theirs.function_events}


def test_events_leave_no_trace_of_torch_profiler(tmp_path):
    with pytest.raises(ProfileError, match="to_chrome"):
        profiled(events=True).save(tmp_path / "t.json")


def test_a_virtual_rank_is_sent_to_its_run():
    with pytest.raises(RankError, match=r"read\s+run.timeline after the run"):
        ol.run(lambda: ol.profile().__enter__())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"warmup": -1}, ValueError, "warmup .* at least 0, got -1"),
        ({"steps": 0}, ValueError, "steps .* at least 1, got 0"),
        ({"warmup": 1.5}, TypeError, "warmup .* got 1.5"),
        ({"steps": True}, TypeError, "steps .* got True"),
    ],
)
def test_numbers_of_steps_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        ol.profile(**options)


# On GPUs, from traces made by hand.


def test_a_gpu_whose_activity_nobody_could_record_is_said_with_the_way_out():
    recorder = KinetoRecorder(cuda=False)
    recorder._cuda = True
    recorder.trace = b'{"traceEvents": []}'

    with pytest.raises(ProfileError, match=r"CUPTI gave no events.*events=True"):
        recorder.spans(0)


def test_kernels_launched_before_the_recording_are_left_out():
    def kernel(name: str, lane: str, start: int, **attributes: int) -> ol.Span:
        return ol.Span(
            0, lane, "compute", name, start, start + 5, attributes=attributes
        )

    spans = [
        ol.Span(0, "cpu", "launch", "launch mm", 0, 1),
        kernel("leaked", "default", 2),
        kernel("mm", "default", 10, launch_ns=0),
        kernel("without a record", "default", 20),
        kernel("leaked too", "stream 7", 12),
    ]

    kept = [s.name for s in without_earlier_launches(spans)]

    assert kept == ["launch mm", "mm", "without a record"]


# Ranks.


def trained(events: bool) -> tuple[Any, Any]:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    reducer = ol.BucketedReducer(model, bucket_mib=0.02)
    x = torch.rand(16, 64)
    torch.erfinv(x)
    with ol.profile(warmup=1, events=events) as profile:
        for _ in range(3):
            model.zero_grad()
            with ol.annotate("forward"):
                loss = model(x).sin().mean()
            loss.backward()
            reducer.wait()
            profile.step()
    torch.lgamma(x)
    return profile.timeline, profile.gather()


@MODES
def test_ranks_meet_on_rank_0_and_buckets_carry_their_names(events):
    run = ol.run(trained, events, cluster="gloo", timeout_s=GUARD_S)
    (mine, both), (other, none) = run.values

    assert none is None and mine.origin == both.origin == "gloo"
    assert mine.steps == other.steps == both.steps == (1, 2)
    for rank in (0, 1):
        sent = [
            s
            for s in both.of_step(2).spans
            if s.rank == rank and s.kind == "communication"
        ]
        assert {s.attributes.get("label") for s in sent} == {
            f"bucket {i}" for i in range(3)
        }
        assert {s.name for s in sent} == {"all_reduce"}
        assert sum(s.bytes for s in sent) >= 3 * (64 * 64 + 64) * 4
    assert sorted({s.rank for s in mine.spans}) == [0]
    assert mine.num_ranks == both.num_ranks == 2
    assert not [r for r in both.source.remarks if "not seen by" in r]
    # On rank 0 the other rank's spans stand where its own clock put them.
    for rank, own in ((0, mine), (1, other)):
        by_ns = own.source.zero_ns - both.source.zero_ns
        assert both.of_rank(rank).start_ns == own.start_ns + by_ns
        assert both.of_rank(rank).end_ns == own.end_ns + by_ns


@MODES
def test_the_timeline_of_the_run_goes_on_around_a_profile_and_holds_it(events):
    run = ol.run(trained, events, cluster="gloo", timeout_s=GUARD_S)

    for rank in (0, 1):
        found = names(run.timeline.of_rank(rank))
        assert found.index("erfinv") < found.index("sin") < found.index("lgamma")


def ddp_by_events() -> tuple[str, ...]:
    model = DistributedDataParallel(nn.Linear(4, 4))
    with ol.profile(events=True) as profile:
        model(torch.rand(2, 4)).sum().backward()
    return profile.timeline.source.remarks


def test_collectives_that_events_cannot_see_are_counted():
    for remarks in ol.run(ddp_by_events, cluster="gloo", timeout_s=GUARD_S).values:
        (unseen,) = [r for r in remarks if "not seen by events" in r]
        assert unseen.startswith("1 collectives of process group 'default'")


def one_rank_forgets_to_step() -> str:
    with ol.profile(warmup=1) as profile:
        if dist.get_rank() == 0:
            profile.step()
    try:
        profile.gather()
    except ProfileError as error:
        return str(error)
    return ""


def test_a_rank_without_a_recording_is_named_on_all():
    for text in ol.run(
        one_rank_forgets_to_step, cluster="gloo", timeout_s=GUARD_S
    ).values:
        assert text.startswith("rank 1: nothing was recorded")
