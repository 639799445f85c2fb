"""6.1: each wrong plan is refused for its own fault, each right one passes."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest

from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab06 import plan_checks
from overlaplab_course.lab06.reference import plan_buckets


def trainable(params):
    return [i for i in reversed(range(len(params))) if params[i].requires_grad]


def nbytes(param):
    return param.numel() * param.element_size()


def refuse(cap_bytes):
    if cap_bytes <= 0:
        raise ValueError("the cap must be positive")


def fill(params, order, cap_bytes, size=nbytes, key=lambda p: p.dtype):
    """First come, first served, one open bucket for each `key`."""
    refuse(cap_bytes)
    buckets, is_open = [], {}
    for i in order:
        group = key(params[i])
        bucket = is_open.get(group)
        if bucket is None or sum(size(params[j]) for j in [*bucket, i]) > cap_bytes:
            bucket = is_open[group] = []
            buckets.append(bucket)
        bucket.append(i)
    return sorted(buckets, key=lambda b: -min(b))


def forward_order(params, cap_bytes):
    return fill(params, trainable(params)[::-1], cap_bytes)


def cap_in_elements(params, cap_bytes):
    return fill(params, trainable(params), cap_bytes, size=lambda p: p.numel())


def empty_before_an_oversize_one(params, cap_bytes):
    refuse(cap_bytes)
    buckets, is_open = [], {}
    for i in trainable(params):
        bucket = is_open.setdefault(params[i].dtype, [])
        if sum(nbytes(params[j]) for j in [*bucket, i]) > cap_bytes:
            buckets.append(bucket)
            bucket = is_open[params[i].dtype] = []
        bucket.append(i)
    return buckets + list(is_open.values())


def dtypes_mixed(params, cap_bytes):
    return fill(params, trainable(params), cap_bytes, key=lambda p: None)


def last_partial_bucket_dropped(params, cap_bytes):
    return fill(params, trainable(params), cap_bytes)[:-1]


def bin_packing(params, cap_bytes):
    refuse(cap_bytes)
    bins = []
    for i in trainable(params):
        for bucket in bins:
            fits = sum(nbytes(params[j]) for j in [*bucket, i]) <= cap_bytes
            if fits and params[bucket[0]].dtype == params[i].dtype:
                bucket.append(i)
                break
        else:
            bins.append([i])
    return sorted(bins, key=lambda b: -min(b))


def closed_when_the_dtype_changes(params, cap_bytes):
    refuse(cap_bytes)
    buckets = []
    for i in trainable(params):
        last = buckets[-1] if buckets else []
        same = bool(last) and params[last[0]].dtype == params[i].dtype
        if same and sum(nbytes(params[j]) for j in [*last, i]) <= cap_bytes:
            last.append(i)
        else:
            buckets.append([i])
    return buckets


def frozen_ones_too(params, cap_bytes):
    return fill(params, list(reversed(range(len(params)))), cap_bytes)


def ordered_by_opening(params, cap_bytes):
    return sorted(fill(params, trainable(params), cap_bytes), key=lambda b: -max(b))


def any_cap(params, cap_bytes):
    if cap_bytes <= 0:
        return [[i] for i in trainable(params)]
    return fill(params, trainable(params), cap_bytes)


WRONG = {
    forward_order: (plan_checks.ARRIVAL, "bucket 1 is [2, 3, 4], expected [4, 3, 2]"),
    cap_in_elements: (plan_checks.CAP, "the cap is 4096 bytes"),
    empty_before_an_oversize_one: (plan_checks.FULL, "bucket 0 is empty"),
    dtypes_mixed: (plan_checks.DTYPE, "torch.bfloat16 and torch.float32"),
    last_partial_bucket_dropped: (plan_checks.ONCE, "in no bucket: [0]"),
    bin_packing: (plan_checks.RUN, "the torch.bfloat16 buckets are [[3, 2, 0], [1]]"),
    closed_when_the_dtype_changes: (plan_checks.MAXIMAL, "fits under the cap"),
    frozen_ones_too: (plan_checks.ONCE, "frozen or no position at all"),
    ordered_by_opening: (plan_checks.LAUNCH, "is full when gradient"),
    any_cap: (plan_checks.REFUSED, "plan_buckets(params, 0) returned [[0]]"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_a_wrong_plan_is_refused_for_its_own_fault(wrong, faults):
    law, reason = WRONG[wrong]
    found = faults(judge(find_exercise("6.1"), wrong))
    assert law in found
    assert reason in found[law]


def recursive(params, cap_bytes):
    """One dtype at a time, the rest of the list by recursion, merged at the end."""
    refuse(cap_bytes)

    def split(order):
        if not order:
            return []
        totals = list(itertools.accumulate(nbytes(params[i]) for i in order))
        num = max(1, sum(total <= cap_bytes for total in totals))
        return [order[:num], *split(order[num:])]

    order = trainable(params)
    dtypes = {params[i].dtype for i in order}
    buckets = [
        b for d in dtypes for b in split([i for i in order if params[i].dtype == d])
    ]
    return sorted(buckets, key=lambda b: b[-1], reverse=True)


def numpy_cumsum(params, cap_bytes):
    """Search for the last total under the cap; positions are numpy's integers."""
    if not cap_bytes > 0:
        raise ValueError(cap_bytes)
    order = np.array(trainable(params), dtype=np.int64)
    buckets = []
    for dtype in {params[i].dtype for i in order}:
        own = np.array([i for i in order if params[i].dtype == dtype])
        ends = np.cumsum([nbytes(params[i]) for i in own])
        start = 0
        while start < len(own):
            sent = ends[start - 1] if start else 0
            stop = np.searchsorted(ends, sent + cap_bytes, side="right")
            stop = max(stop, start + 1)
            buckets.append(tuple(own[start:stop]))
            start = stop
    return tuple(sorted(buckets, key=lambda b: -b[-1]))


def two_lines(params, cap_bytes):
    """The reference, under a name of its own: imported objects are refused."""
    return plan_buckets(params, cap_bytes)


@pytest.mark.parametrize(
    "right", [recursive, numpy_cumsum, two_lines], ids=lambda f: f.__name__
)
def test_an_unusual_right_plan_passes(right):
    verdict = judge(find_exercise("6.1"), right)
    assert verdict.passed, str(verdict)


def test_an_answer_that_is_no_plan_is_explained():
    verdict = judge(find_exercise("6.1"), lambda params, cap_bytes: list(params))
    assert "expected a list of buckets" in verdict.error


def test_the_generated_reference_is_refused_and_its_code_in_a_notebook_passes():
    verdict = judge(find_exercise("6.1"), plan_buckets)
    assert "overlaplab's own" in verdict.error

    typed = {"__name__": "__main__"}
    exec(inspect.getsource(plan_buckets), typed)
    verdict = judge(find_exercise("6.1"), typed["plan_buckets"])
    assert verdict.passed, str(verdict)
