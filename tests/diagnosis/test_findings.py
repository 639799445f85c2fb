"""Each kind of finding on a timeline made by hand, and where it must not be found.

A step of 100 us; costs in microseconds. `kinds` has all findings, so a neighbour that
creeps in is seen.
"""

from __future__ import annotations

import dataclasses

import pytest

import overlaplab as ol
from overlaplab.diagnosis import Finding
from overlaplab.hardware import find_hardware
from overlaplab.timeline import Span, Timeline
from tests.diagnosis.hand import (
    MIB,
    compute,
    copy,
    launch,
    send,
    span,
    timeline,
    wait,
)


def findings(*spans: Span, **more: object) -> tuple[Finding, ...]:
    made = timeline(*spans)
    return ol.diagnose(made, **more).findings  # type: ignore[arg-type]


def kinds(*spans: Span) -> list[tuple[str, float]]:
    """(kind, cost in us) of all findings, the most expensive first."""
    return [(one.kind, one.cost_ns / 1000) for one in findings(*spans)]


# --- nothing to find -------------------------------------------------------------


def test_a_step_that_hides_all_has_no_findings():
    assert kinds(compute(0, 100), send(20, 60)) == []


def test_a_step_without_communication_has_none_either():
    assert kinds(compute(0, 100)) == []


# --- same stream -----------------------------------------------------------------


def awaited(*, next_launch: float) -> list[Span]:
    return [
        compute(0, 30, launch=0),
        send(30, 60, launch=1),
        compute(60, 80, launch=next_launch),
        send(80, 90, launch=61),
        compute(90, 100, launch=next_launch + 20),
    ]


def test_launched_computation_that_stands_still_is_same_stream():
    assert kinds(*awaited(next_launch=25)) == [("same-stream", 40)]


def test_computation_that_is_launched_after_the_collective_is_not():
    found = kinds(*awaited(next_launch=70))
    assert found != [] and "same-stream" not in [kind for kind, _ in found]


def test_the_stream_that_is_shared_is_named():
    mixed = [
        compute(0, 40, stream=7),
        send(40, 60, stream=7, lane="default"),
        compute(60, 100, stream=7),
    ]
    (one,) = findings(*mixed)
    assert one.evidence["shared_lanes"] == ["default"]
    apart = [dataclasses.replace(s, lane="comm") for s in mixed[1:2]]
    apart = [dataclasses.replace(s, attributes={"stream": 9}) for s in apart]
    (one,) = findings(mixed[0], *apart, mixed[2])
    assert one.evidence["shared_lanes"] == []
    assert "waited for at once" in one.says


# --- launched late, one bucket, last bucket, communication-bound -------------------


def test_several_collectives_after_all_computation_are_launched_late():
    tail = [send(80, 90, launch=75), send(90, 100, launch=76)]
    assert kinds(compute(0, 80, launch=0), *tail) == [("launched-late", 20)]


def test_collectives_launched_in_time_that_queue_are_not_launched_late():
    found = kinds(
        compute(0, 20, launch=0),
        send(20, 30, launch=1),
        compute(20, 80, launch=4),
        send(60, 80, launch=2),
        send(80, 100, launch=3),
    )
    assert found == [("last-bucket", 20)]


def test_the_forwards_thread_separates_one_late_message_from_one_bucket():
    backward = [compute(0, 20, thread=1), compute(20, 80, thread=2)]
    late = [*backward, send(80, 100, thread=1)]
    hook = [*backward, send(80, 100, thread=2)]
    assert kinds(*late) == [("launched-late", 20)]
    assert kinds(*hook) == [("one-bucket", 20)]


def test_the_phase_shows_the_same_on_the_virtual_cluster():
    backward = [compute(0, 20, phase="forward"), compute(20, 80, phase="backward")]
    assert kinds(*backward, send(80, 100)) == [("launched-late", 20)]
    assert kinds(*backward, send(80, 100, phase="backward")) == [("one-bucket", 20)]


def test_two_buckets_of_which_one_hides_are_not_one_bucket():
    found = kinds(compute(0, 80), send(40, 60), send(80, 100))
    assert found == [("last-bucket", 20)]


def test_late_messages_cost_no_more_than_computation_could_hide():
    found = dict(kinds(compute(0, 30), send(30, 90), send(90, 100)))
    assert found == {"communication-bound": 40, "launched-late": 30}


def test_the_last_bucket_says_when_it_was_ready_and_what_half_of_it_would_save():
    (one,) = findings(
        compute(0, 50),
        send(30, 50),
        compute(50, 79, name="embedding_dense_backward"),
        send(80, 100, bytes=50 * MIB, label="bucket 1"),
    )
    assert (one.kind, one.cost_ns) == ("last-bucket", 20_000)
    assert one.evidence["start_after_backward_ns"] == 1000
    assert one.evidence["last_kernel"] == "embedding_dense_backward"
    assert one.evidence["remaining_computation_ns"] == 0
    assert one.evidence["last_bytes"] == 50 * MIB
    assert one.evidence["half_would_save_ns"] == 10_000
    assert '"bucket 1" of 50 MiB (of 75 MiB sent)' in one.says


def test_an_optimizer_behind_it_is_nothing_to_hide_the_last_bucket_behind():
    step = [compute(0, 70), send(20, 40), send(70, 90)]
    assert kinds(*step, compute(90, 100, name="_foreach_add_")) == [("last-bucket", 20)]
    assert kinds(*step, compute(90, 100, name="mm")) == [("same-stream", 20)]


def test_more_sending_than_computation_is_communication_bound():
    found = kinds(
        compute(0, 20),
        send(20, 60, launch=1),
        compute(20, 40, launch=2),
        send(60, 100, launch=3),
    )
    assert found == [("communication-bound", 60)]


# --- small messages ----------------------------------------------------------------


def many(size: int, each_us: float, number: int = 20) -> list[Span]:
    """Messages one after the other behind 20 us of computation."""
    starts = [20 + each_us * i for i in range(number)]
    sent = [send(t, t + each_us, bytes=size, launch=1) for t in starts]
    large = send(starts[-1] + each_us, starts[-1] + 5 * each_us, bytes=20 * MIB)
    return [compute(0, 20, launch=0), compute(20, 22, launch=2), *sent, large]


def test_many_messages_that_cost_the_same_whatever_their_size_are_small():
    one = next(f for f in findings(*many(4096, 4)) if f.kind == "small-messages")
    # 21 messages would be 1 bucket; 20 of them cost 4 us each, 78 + 16 are exposed.
    assert one.cost_ns == 80_000
    assert one.evidence["num_small"] == 20 and one.evidence["num_spared"] == 20


def test_as_many_large_messages_are_not():
    spans = [compute(0, 20), compute(20, 22)]
    spans += [send(20 + 4 * i, 24 + 4 * i, bytes=25 * MIB) for i in range(20)]
    assert "small-messages" not in dict(kinds(*spans))


def test_seven_small_messages_are_not_many():
    assert "small-messages" not in dict(kinds(*many(4096, 4, number=6)))


# --- the CPU -----------------------------------------------------------------------


def gaps(*, launched: tuple[float, float]) -> list[Span]:
    first, second = launched
    return [
        compute(0, 20, launch=-9),
        compute(40, 60, launch=first),
        compute(80, 100, launch=second),
    ]


def test_a_device_that_idles_for_launches_is_launch_bound():
    (one,) = findings(*gaps(launched=(38, 77)))
    assert (one.kind, one.cost_ns) == ("launch-bound", 35_000)
    assert one.evidence["between_launches_ns"] == 43_000
    assert "profiler costs the CPU" in one.says


def test_a_device_that_idles_though_all_is_launched_is_not():
    assert kinds(*gaps(launched=(5, 6))) == []


def test_a_wait_in_the_middle_is_a_host_sync_and_not_launch_bound():
    step = [
        compute(0, 40, launch=-9),
        wait(5, 41, name="cudaStreamSynchronize"),
        compute(60, 100, launch=58),
    ]
    (one,) = findings(*step)
    assert (one.kind, one.cost_ns) == ("host-sync", 18_000)
    assert one.evidence["waits"] == {"cudaStreamSynchronize": 1}


def test_a_wait_at_the_end_of_a_step_is_none():
    assert kinds(compute(0, 100, launch=-9), wait(5, 101)) == []


# --- peers -------------------------------------------------------------------------


def two_ranks(*, ends: tuple[float, float]) -> list[Span]:
    """Each rank computes until its end, then both meet; 10 us on the wire."""
    last = max(ends)
    return [
        span_
        for rank, end in enumerate(ends)
        for span_ in (
            compute(0, 40, rank=rank),
            send(20, 30, rank=rank),
            compute(40, end, rank=rank),
            send(end, last + 10, rank=rank),
        )
    ]


def test_the_rank_that_computes_more_is_the_straggler():
    found = findings(*two_ranks(ends=(60, 90)))
    one = next(f for f in found if f.kind == "straggler")
    assert (one.rank, one.cost_ns) == (1, 30_000)
    assert one.evidence["waiting_rank"] == 0
    assert one.evidence["computes_more_ns"] == 30_000


def test_ranks_that_come_together_have_no_straggler():
    assert "straggler" not in dict(kinds(*two_ranks(ends=(90, 90))))


def test_ranks_that_are_late_in_turn_have_none():
    spans = []
    for rank in (0, 1):
        starts = (20, 40) if rank == 0 else (30, 30)
        spans += [
            compute(0, 10, rank=rank),
            send(starts[0], 35, rank=rank),
            send(starts[1] + 15, 60, rank=rank),
            compute(60, 100, rank=rank),
        ]
    assert "straggler" not in dict(kinds(*spans))


def test_waiting_that_is_hidden_has_no_straggler():
    spans = [compute(0, 100), compute(0, 100, rank=1), send(10, 60)]
    assert "straggler" not in dict(kinds(*spans, send(50, 60, rank=1)))


def test_clocks_that_differ_are_no_straggler():
    here = [compute(0, 80), send(40, 50), send(50, 60), send(80, 100)]
    there = [
        dataclasses.replace(
            s, rank=1, start_ns=s.start_ns + 7000, end_ns=s.end_ns + 7000
        )
        for s in here
    ]
    assert kinds(*here, *there) == [("last-bucket", 20)]


# --- copies, contention, bandwidth -------------------------------------------------


def test_copies_with_nothing_beside_them_are_in_the_way():
    (one,) = findings(
        compute(0, 50), copy(50, 90, what="Memcpy DtoH (Device -> Pageable)")
    )
    assert (one.kind, one.cost_ns) == ("memcpy-in-the-way", 40_000)
    assert "pin_memory" in one.remedy


def test_copies_beside_computation_are_not():
    assert kinds(compute(0, 100), copy(50, 90)) == []


def twins(*, beside_us: float) -> list[Span]:
    """Three kernels alone, three with communication beside them."""
    alone = [compute(10 * i, 10 * i + 10) for i in range(6)]
    spans = [compute(60, 60 + beside_us)]
    for _ in range(2):
        start = spans[-1].end_ns / 1000
        spans.append(compute(start, start + beside_us))
    end = spans[-1].end_ns / 1000
    return [*alone, *spans, send(60, end), compute(end, end + 10)]


def test_kernels_that_take_longer_beside_communication_are_contention():
    (one,) = findings(*twins(beside_us=15))
    assert one.kind == "contention"
    # The first and last of the three have a neighbour alone, and the same name: all are
    # twins. Each takes 15 us instead of 10.
    assert one.cost_ns == 15_000
    assert one.evidence["twins"][0]["ratio"] == 1.5


def test_kernels_that_take_as_long_beside_it_are_not():
    assert kinds(*twins(beside_us=10)) == []


def test_other_shapes_are_no_twins():
    spans = [
        dataclasses.replace(s, attributes={"grid": [i, 1, 1]})
        for i, s in enumerate(twins(beside_us=15))
    ]
    assert kinds(*spans) == []


@pytest.mark.parametrize("took_us, found", [(2000, True), (190, False)])
def test_a_link_far_under_the_profiles_is_reported(took_us: int, found: bool):
    # h200-nvlink moves 50 MiB between two ranks in 190 us.
    ranks = [
        span_
        for rank in (0, 1)
        for span_ in (
            compute(0, 1000, rank=rank),
            send(1000, 1000 + took_us, rank=rank, bytes=50 * MIB, group_size=2),
        )
    ]
    hw = find_hardware("h200-nvlink")
    by_kind = {f.kind: f for f in findings(*ranks, hardware=hw)}
    assert ("low-bandwidth" in by_kind) == found
    if found:
        evidence = by_kind["low-bandwidth"].evidence
        assert evidence["bus_bytes_per_s"] == pytest.approx(50 * MIB / 2e-3, rel=0.01)
        assert evidence["is_guess"] is False


def test_without_a_profile_no_link_is_slow():
    spans = [compute(0, 1000), send(1000, 9000, group_size=2)]
    assert "low-bandwidth" not in dict(kinds(*spans))


def test_the_cards_name_gives_a_profile_and_that_it_is_a_guess_is_said():
    made = timeline(compute(0, 10), send(10, 20), device="NVIDIA H200")
    found = ol.diagnose(made)
    assert found.to_dict()["hardware"] == "h200-nvlink"
    assert found.to_dict()["hardware_is_guess"] is True
    assert "guessed from the card's name" in str(found)
    assert ol.diagnose(timeline(compute(0, 10))).case.hardware is None


# --- which of many -------------------------------------------------------------------


def test_the_median_step_of_the_rank_that_loses_most_is_described():
    spans = []
    for number, (at, tail) in enumerate(((0, 20), (200, 40), (400, 30)), start=1):
        spans += [
            compute(at, at + 80, step=number),
            send(at + 10, at + 20, step=number),
            send(at + 80, at + 80 + tail, step=number),
        ]
    (one,) = findings(*spans)
    assert (one.kind, one.step, one.cost_ns) == ("last-bucket", 3, 30_000)
    assert [item["ns"] for item in one.evidence["seen"]] == [20_000, 40_000, 30_000]


def test_what_happens_in_one_step_of_three_is_reported_of_that_step():
    spans = [compute(100 * n, 100 * n + 100, step=n) for n in (1, 3)]
    spans += [compute(200, 250, step=2), copy(250, 300, step=2)]
    (one,) = findings(*spans)
    assert (one.kind, one.step, one.cost_ns) == ("memcpy-in-the-way", 2, 50_000)


def test_findings_come_most_expensive_first():
    found = kinds(compute(0, 50), copy(50, 60), send(60, 100), compute(100, 101))
    assert [ns for _, ns in found] == sorted((ns for _, ns in found), reverse=True)
    assert len(found) == 2


def test_launches_of_the_virtual_cluster_are_found_by_their_operator():
    made = Timeline.of(
        [
            launch(0, 30, op=1),
            launch(30, 60, op=2),
            compute(30, 32, op=1),
            compute(60, 62, op=2),
        ],
        origin="virtual",
    )
    (one,) = ol.diagnose(made).findings
    assert (one.kind, one.cost_ns) == ("launch-bound", 58_000)
    assert "profiler" not in one.says


def test_an_unknown_kind_of_lane_does_no_harm():
    made = timeline(span(0, "x", "memset", "memset", 0, 0), compute(0, 10))
    assert ol.diagnose(made).findings == ()


def test_when_peers_arrived_is_taken_from_their_spans_and_not_from_a_wrong_remark():
    spans = [
        span_
        for rank in (0, 1)
        for span_ in (
            compute(0, 80, rank=rank),
            send(80, 100, rank=rank, ready_ns=99_000),
        )
    ]
    found = ol.diagnose(timeline(*spans))
    assert [c.moving_ns for c in found.case.collectives] == [20_000, 20_000]
