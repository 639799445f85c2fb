"""Who made the collectives: only what the trace says counts."""

from __future__ import annotations

import pytest

import overlaplab as ol
from tests.diagnosis.hand import compute, send, timeline


def makers(*spans) -> list[str]:
    return [maker.name for maker in ol.diagnose(timeline(*spans)).makers]


@pytest.mark.parametrize(
    "more, maker",
    [
        ({"label": "DistributedDataParallel.forward"}, "DistributedDataParallel"),
        (
            {"operator": "torch::distributed::reducer::mul_out"},
            "DistributedDataParallel",
        ),
        ({"label": "FSDP::pre_forward (layers.0)"}, "FSDP"),
        ({"operator": "fsdp::split_with_sizes_copy"}, "FSDP"),
        ({"label": "forward"}, "unknown"),
        ({}, "unknown"),
    ],
)
def test_ranges_and_operators_of_the_computation_name_it(more: dict, maker: str):
    assert makers(compute(0, 10, **more), send(5, 20)) == [maker]


def test_a_reducer_is_known_by_its_class_around_the_bucket():
    ranges = ["step", "BucketedReducer", "bucket 3"]
    assert makers(compute(0, 10), send(5, 20, label="bucket 3", ranges=ranges)) == [
        "BucketedReducer"
    ]


def test_bucket_labels_alone_name_no_class():
    found = ol.diagnose(
        timeline(
            compute(0, 10),
            send(5, 20, label="bucket 3", collective="allreduce_coalesced"),
        )
    )
    (maker,) = found.makers
    assert maker.name == "overlaplab's reducer"
    assert maker.evidence == {"coalesced collectives labelled 'bucket N'": 1}


def test_zero3_is_known_by_the_labels_of_its_collectives():
    sent = [send(5, 9, label="gather blocks.0"), send(9, 12, label="scatter blocks.0")]
    assert makers(compute(0, 10), *sent) == ["unknown"]  # anybody may say so
    found = ol.diagnose(
        timeline(compute(0, 10), *sent, send(12, 13, label="who has gradients"))
    )
    (maker,) = found.makers
    assert maker.name == "Zero3"
    assert set(maker.evidence) == {
        "collectives labelled 'gather UNIT'",
        "collectives labelled 'scatter UNIT'",
    }


def test_a_kernel_called_bucket_is_no_evidence():
    assert makers(compute(0, 10, label="bucket 3"), send(5, 20)) == ["unknown"]


def test_both_are_named_where_both_are_there():
    found = makers(
        compute(0, 10, label="DistributedDataParallel.forward"),
        compute(10, 20, label="DistributedDataParallel.forward"),
        send(5, 20, label="FSDP::all_gather"),
    )
    assert found == ["DistributedDataParallel", "FSDP"]
