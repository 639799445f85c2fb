"""Laws and examples of `plan_buckets`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from overlaplab.techniques.data_parallel import plan_buckets

SIZES = st.lists(st.integers(0, 40), max_size=30)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
CAPS = st.integers(1, 60)


def positions(sizes: list[int], cap: int, first: int | None = None) -> list[list[int]]:
    return [list(b.positions) for b in plan_buckets(sizes, cap, first)]


def test_the_field_case_has_one_plan() -> None:
    assert positions([3, 10, 1, 1, 1, 6], 4) == [[5], [4, 3, 2], [1], [0]]


def test_the_last_parameter_opens_the_first_bucket() -> None:
    assert positions([1, 1, 1], 2) == [[2, 1], [0]]


def test_the_first_bucket_may_be_smaller() -> None:
    assert positions([1] * 6, 3, 1) == [[5], [4, 3, 2], [1, 0]]


def test_a_parameter_that_fills_the_cap_exactly_stays_with_its_bucket() -> None:
    assert positions([2, 2], 4) == [[1, 0]]


def test_one_bucket_a_dtype_is_open_at_a_time() -> None:
    parameters = [torch.empty(1, dtype=d) for d in (*DTYPES[:2], *DTYPES[:2])]
    plan = plan_buckets(parameters, 1024)
    assert [(b.positions, b.dtype) for b in plan] == [
        ((3, 1), "float64"),
        ((2, 0), "float32"),
    ]


def test_buckets_come_in_the_order_in_which_they_become_full() -> None:
    dtypes = (torch.float32, torch.float64, torch.float64, torch.float32)
    plan = plan_buckets([torch.empty(1, dtype=d) for d in dtypes], 1024)
    assert [b.positions for b in plan] == [(2, 1), (3, 0)]


def test_names_and_sizes_print() -> None:
    plan = plan_buckets(nn.Linear(512, 1024).named_parameters(), 2**20)
    assert str(plan).splitlines() == [
        "2 buckets, cap 1.0 MiB",
        "bucket 0      4.0 KiB float32  bias",
        "bucket 1      2.0 MiB float32  weight",
    ]


@pytest.mark.parametrize("caps", [(0, None), (-1, None), (4, 0)])
def test_a_cap_that_is_not_positive_is_refused(caps: tuple[int, int | None]) -> None:
    with pytest.raises(ValueError, match="positive number of bytes"):
        plan_buckets([1], *caps)


@pytest.mark.parametrize(
    ("parameters", "cap", "message"),
    [
        ([1], math.nan, "cap_bytes is nan"),
        ([1], math.inf, "cap_bytes is inf"),
        ([1], "4", "cap_bytes is '4'; expected a number"),
        (["weight"], 4, "entry 0 is 'weight'; expected a tensor, a size"),
        ([1, ("weight",)], 4, "entry 1 is"),
        ([-1], 4, "size of parameter 0 is -1"),
    ],
)
def test_what_is_no_size_or_cap_is_refused_by_name(
    parameters: Any, cap: Any, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        plan_buckets(parameters, cap)


@given(SIZES, CAPS, st.none() | CAPS)
def test_every_parameter_is_in_exactly_one_bucket_in_reverse(
    sizes: list[int], cap: int, first: int | None
) -> None:
    flat = [p for bucket in positions(sizes, cap, first) for p in bucket]
    assert flat == list(reversed(range(len(sizes))))


@given(SIZES, CAPS)
def test_a_bucket_is_within_the_cap_or_alone_and_never_empty(
    sizes: list[int], cap: int
) -> None:
    for bucket in plan_buckets(sizes, cap):
        assert bucket.positions
        assert bucket.bytes <= cap or len(bucket) == 1
        assert bucket.bytes == sum(sizes[p] for p in bucket.positions)


@given(SIZES, CAPS)
def test_a_bucket_is_closed_only_where_the_next_parameter_does_not_fit(
    sizes: list[int], cap: int
) -> None:
    plan = plan_buckets(sizes, cap)
    for bucket, after in zip(plan, plan.buckets[1:], strict=False):
        assert bucket.bytes + sizes[after.positions[0]] > cap


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(DTYPES))), CAPS)
def test_dtypes_never_share_a_bucket(
    shapes: list[tuple[int, torch.dtype]], cap: int
) -> None:
    parameters = [torch.empty(n, dtype=d) for n, d in shapes]
    plan = plan_buckets(parameters, cap)
    for bucket in plan:
        assert len({parameters[p].dtype for p in bucket.positions}) == 1
    ends = [bucket.positions[-1] for bucket in plan]
    assert ends == sorted(ends, reverse=True)
