"""What the report says of real steps on two H200s (tests/traces/h200/README.md)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import overlaplab as ol
from overlaplab.diagnosis import Diagnosis

FOLDER = Path(__file__).parents[1] / "traces" / "h200"
US = 1000
MS = 1_000_000


@cache
def diagnosis(name: str) -> Diagnosis:
    path = FOLDER / name
    return ol.diagnose(
        ol.read_trace(path if path.is_dir() else path.with_suffix(".json.gz"))
    )


def finding(name: str, kind: str):
    (one,) = (f for f in diagnosis(name).findings if f.kind == kind)
    return one


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("serial-b8-rank0", ["launched-late"]),
        ("one-bucket-b8-rank0", ["one-bucket"]),
        ("ddp-default-b8", ["memcpy-in-the-way", "last-bucket", "contention"]),
        ("ours-100-b8", ["contention", "last-bucket"]),
        (
            "per-parameter-b2-rank0",
            ["launch-bound", "cpu-elsewhere", "small-messages", "last-bucket"],
        ),
        ("ours-100-b2-slow-link-rank0", ["low-bandwidth", "communication-bound"]),
    ],
)
def test_each_way_to_send_has_findings_of_its_own(name: str, kinds: list[str]):
    assert [one.kind for one in diagnosis(name).findings] == kinds


def test_ddp_and_our_reducer_are_kept_apart():
    assert [m.name for m in diagnosis("ddp-default-b8").makers] == [
        "DistributedDataParallel"
    ]
    (ours,) = diagnosis("ours-100-b8").makers
    assert ours.name == "BucketedReducer"
    # 14 buckets, 3 steps, 2 ranks.
    assert ours.evidence["range BucketedReducer"] == 84


@pytest.mark.parametrize("name", ["ddp-default-b8", "ours-100-b8"])
def test_the_last_bucket_is_exposed_because_nothing_is_left_to_compute(name: str):
    one = finding(name, "last-bucket")
    # 64 MiB elements of bfloat16: the embedding's gradient, which no cap splits.
    assert 128 * 2**20 <= one.evidence["last_bytes"] < 129 * 2**20
    assert 0 <= one.evidence["start_after_backward_ns"] < 100 * US
    assert one.evidence["remaining_computation_ns"] == 0
    assert one.evidence["is_one_tensor"] and "half the size" not in one.says
    assert one.evidence["half_would_save_ns"] is None
    assert "bucket_cap_mb" not in one.remedy and "shard it" in one.remedy


def test_our_last_bucket_waited_for_the_embeddings_gradient():
    one = finding("ours-100-b8", "last-bucket")
    assert one.evidence["last_kernel"] == "embedding_dense_backward"
    assert one.evidence["waited_for"] == "its inputs"


def test_ddp_copies_gradients_in_and_out_of_its_buckets():
    one = finding("ddp-default-b8", "memcpy-in-the-way")
    assert "gradient_as_bucket_view=True" in one.remedy
    assert "Memcpy DtoD (Device -> Device)" in one.evidence["by_kind_ns"]


def test_the_serial_steps_message_was_launched_by_another_thread_than_the_buckets():
    late = finding("serial-b8-rank0", "launched-late")
    assert late.evidence["after_backward"] is not None
    assert late.evidence["hidden_ns"] == 0
    only = finding("one-bucket-b8-rank0", "one-bucket")
    assert only.evidence["bucket_bytes"] == late.evidence["bytes"] == 1_477_042_472


def test_most_is_hidden_and_less_is_saved():
    found = diagnosis("ours-100-b8")
    assert all(s.hidden_ns > 0.85 * s.communication_ns for s in found.case.steps)
    # Where enough kernels also ran alone to know what the computation takes.
    known = [s for s in found.saved.values() if "by the same kernels" in s.basis]
    assert known
    assert all(s.saved_ns < 0.5 * s.possible_ns for s in known)


def test_contention_agrees_with_the_same_kernels_of_the_serial_step():
    """The serial step runs the same 444 kernels in the same order, all alone."""
    serial = diagnosis("serial-b8-rank0").case
    ours = diagnosis("ours-100-b8").case
    for number in (2, 3, 4):
        (alone,) = (s for s in serial.steps if s.step == number)
        (mixed,) = (s for s in ours.steps if (s.rank, s.step) == (0, number))
        sent = [(c.span.start_ns, c.span.end_ns) for c in ours.of(mixed)]
        pairs = [
            (serial.timeline.spans[a], ours.timeline.spans[b])
            for a, b in zip(alone.compute, mixed.compute, strict=True)
        ]
        more_ns = sum(
            ran.duration_ns - by_itself.duration_ns
            for by_itself, ran in pairs
            if any(start < ran.end_ns and ran.start_ns < end for start, end in sent)
        )
        # Twins of the same step ran at its clock, which is lower than the serial
        # step's (the card is at its power cap), and not every kernel has one.
        assert 0.7 * more_ns < ours.contention_of(mixed).cost_ns < more_ns


def test_the_slow_links_bandwidth_is_far_under_the_cards_profile():
    found = diagnosis("ours-100-b2-slow-link-rank0")
    one = finding("ours-100-b2-slow-link-rank0", "communication-bound")
    assert one.evidence["moving_ns"] > 3 * one.evidence["hideable_ns"]
    rates = [c.bus_bytes_per_s for c in found.case.collectives]
    assert all(20e9 < rate < 40e9 for rate in rates if rate)
    assert found.case.hardware is not None and found.case.is_guess
    assert found.case.hardware.link.bytes_per_s > 300e9


def test_the_slow_link_is_reported_first_with_what_to_look_at():
    found = diagnosis("ours-100-b2-slow-link-rank0")
    link, bound = found.findings
    assert "NCCL_P2P_DISABLE" in link.remedy and "topo" in link.remedy
    assert "see low-bandwidth" in bound.remedy and "cannot help" not in bound.remedy
    assert "bf16" not in bound.remedy  # the gradients are


def test_a_slow_link_saves_the_same_by_a_profile_that_is_given():
    path = FOLDER / "ours-100-b2-slow-link-rank0.json.gz"
    given = ol.diagnose(ol.read_trace(path), hardware="h200-nvlink")
    guessed = diagnosis("ours-100-b2-slow-link-rank0")
    assert given.findings[0].kind == "low-bandwidth"
    for key, saved in guessed.saved.items():
        assert given.saved[key].saved_ns == saved.saved_ns > 0


def test_the_serial_step_says_what_was_saved_and_another_batchs_is_refused():
    serial = ol.read_trace(FOLDER / "serial-b8-rank0.json.gz")
    ours = ol.read_trace(FOLDER / "ours-100-b8" / "rank_0.json.gz")
    found = ol.diagnose(ours, serial=serial)
    described = found.case.described
    assert described is not None
    saved = found.saved[described.rank, described.step]
    assert saved.serial_step_ns is not None
    assert saved.saved_ns == saved.serial_step_ns - described.step_ns > 1 * MS
    words = " ".join(str(found).split())
    assert "Saved 1.29" in words and "the serial step takes 68.5 ms" in words
    with pytest.raises(ValueError, match="not of the same work: it computes"):
        ol.diagnose(
            ol.read_trace(FOLDER / "ours-100-b2-slow-link-rank0.json.gz"), serial=serial
        )


def test_launch_bound_says_that_the_profiler_slows_the_cpu():
    one = finding("per-parameter-b2-rank0", "launch-bound")
    assert "The profiler costs the CPU some microseconds an operator" in one.says
    assert one.evidence["between_launches_ns"] > one.evidence["kernel_ns"]


def test_two_ranks_know_who_waited_and_one_rank_says_that_it_does_not():
    both = diagnosis("ours-100-b8")
    assert all(c.knows_ready for c in both.case.collectives)
    assert {c.last for c in both.case.collectives} == {0, 1}
    alone = diagnosis("serial-b8-rank0")
    assert not any(c.knows_ready for c in alone.case.collectives)
    assert any(r.startswith("One rank only") for r in alone.remarks)
