"""Remedies name only what applies to the trace."""

from __future__ import annotations

import re
from pathlib import Path

import overlaplab as ol
from overlaplab.diagnosis import FINDING_KINDS, Finding
from overlaplab.diagnosis.findings import REMEDIES
from overlaplab.timeline import Span
from tests.diagnosis.hand import MIB, compute, copy, send, timeline


def findings(*spans: Span) -> tuple[Finding, ...]:
    return ol.diagnose(timeline(*spans)).findings


def bound(**more: object) -> str:
    """The remedy of a step that sends more than it computes."""
    found = findings(
        compute(0, 20),
        send(20, 60, launch=1, **more),
        compute(20, 40, launch=2),
        send(60, 100, launch=3, **more),
    )
    (one,) = (f for f in found if f.kind == "communication-bound")
    return one.remedy


def test_bf16_gradients_are_not_advised_to_become_bf16():
    assert "bf16" in bound(dtype="Float")
    assert "bf16" not in bound(dtype="BFloat16") + bound(dtype="c10::BFloat16")


def test_options_of_ddp_are_named_only_where_ddp_sends():
    assert "no_sync" not in bound() and "comm_hooks" not in bound()
    ours = bound(label="DistributedDataParallel.forward")
    assert "no_sync" in ours and "comm_hooks" in ours
    (one,) = findings(compute(0, 50), copy(50, 70, what="Memcpy DtoD"))
    assert "gradient_as_bucket_view" not in one.remedy


def test_a_trace_of_cpus_gets_no_advice_on_cards():
    def slow_rank(**more: object) -> Finding:
        return findings(
            compute(0, 40),
            send(40, 100, **more),
            compute(0, 90, rank=1),
            send(90, 100, rank=1, **more),
        )[0]

    assert slow_rank().kind == "straggler" == slow_rank(stream=20).kind
    assert "nvidia-smi" not in slow_rank().remedy
    assert "nvidia-smi" in slow_rank(stream=20).remedy


def test_a_last_bucket_much_larger_than_the_others_is_one_tensor():
    def last(size: int) -> Finding:
        buckets = [send(10 * i, 10 * i + 5, bytes=25 * MIB) for i in range(1, 8)]
        (one,) = findings(compute(0, 80), *buckets, send(80, 100, bytes=size))
        return one

    assert "half the size" in last(25 * MIB).says
    assert "bucket_cap_mb" in last(25 * MIB).remedy
    assert "one tensor" in last(128 * MIB).says
    assert "bucket_cap_mb" not in last(128 * MIB).remedy


def test_a_rule_names_no_remedy_that_is_not_there_and_leaves_out_none_that_is():
    rules = Path(ol.__file__).parent / "diagnosis"
    source = "".join(path.read_text() for path in rules.glob("rules_*.py"))
    # A remedy has its kind's name, or that and a comma with what was seen.
    kinds = "|".join({kind.split("-")[0] for kind in FINDING_KINDS})
    named = set(re.findall(rf"[\"']((?:{kinds})[-\w]*(?:, | on )[\w ]+)[\"']", source))
    assert named == {key for key in REMEDIES if key not in FINDING_KINDS}
    assert all(f'"{key}"' in source for key in REMEDIES if key in FINDING_KINDS)
