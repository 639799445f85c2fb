"""Measured curves: exact integers between points, and their place in the formulas."""

from dataclasses import replace
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlaplab.hardware import compute_ns, find_hardware, interpolate
from overlaplab.hardware.points import check_points

CHALK = find_hardware("chalk")
CURVE = ((100, 50), (300, 60), (1_000, 200))


@st.composite
def curves(draw):
    works = draw(st.sets(st.integers(1, 10**15), min_size=1, max_size=6))
    times = draw(
        st.lists(st.integers(1, 10**12), min_size=len(works), max_size=len(works))
    )
    return tuple(zip(sorted(works), sorted(times), strict=True))


@pytest.mark.parametrize(
    ("work", "ns"),
    [
        (0, 50),  # below the first
        (100, 50),
        (101, 51),  # 50.05, rounded up
        (200, 55),
        (300, 60),
        (650, 130),
        (1_000, 200),
        (1_001, 201),  # 200.2
        (5_000, 1_000),  # in proportion
    ],
)
def test_between_points_goes_a_straight_line_and_beyond_them_a_proportion(work, ns):
    assert interpolate(CURVE, work) == ns


@given(curves(), st.integers(0, 10**16))
def test_more_work_never_takes_less_time(curve, work):
    assert interpolate(curve, work) <= interpolate(curve, work + 1)


@given(curves())
def test_a_curve_goes_through_its_points(curve):
    assert [interpolate(curve, work) for work, _ in curve] == [ns for _, ns in curve]


@given(curves(), st.data())
def test_between_two_points_it_is_the_exact_line_rounded_up(curve, data):
    if len(curve) == 1:
        return
    at = data.draw(st.integers(0, len(curve) - 2))
    (x0, y0), (x1, y1) = curve[at : at + 2]
    work = data.draw(st.integers(x0, x1))
    assert interpolate(curve, work) == ceil(
        y0 + Fraction((work - x0) * (y1 - y0), x1 - x0)
    )


@pytest.mark.parametrize(
    "points",
    [
        (),
        5,
        "12",
        [1, 2],
        [(1, 2, 3)],
        [(1, 2.0)],
        [(True, 2)],
        [(-1, 2)],
        [(2, 2), (1, 3)],
        [(1, 2), (1, 3)],
        [(1, 3), (2, 2)],
        [(0, 5)],
        [(5, 0)],
    ],
    ids=repr,
)
def test_what_is_no_ascending_curve_is_refused_by_the_name_of_its_key(points):
    with pytest.raises(ValueError, match=r"^KEY: expected .* pairs \(work, ns\)"):
        check_points("KEY", points)


def test_a_point_that_is_out_of_order_is_told_by_its_number():
    with pytest.raises(ValueError, match=r"point 2 is \(3, 1\) behind \(2, 9\)"):
        check_points("KEY", [[1, 8], [2, 9], [3, 1]])


def test_the_most_specific_curve_times_the_arithmetic():
    hw = replace(
        CHALK,
        points={
            "flops:float32": ((1_000, 10),),
            "flops:mm:float32": ((1_000, 20),),
            "flops:mm:bfloat16": ((1_000, 30),),
        },
    )
    times = [
        compute_ns(hw, 1_000, dtype, name=name)
        for name, dtype in (
            ("mm", "float32"),
            ("mm", "bfloat16"),
            ("bmm", "float32"),
            ("bmm", "bfloat16"),  # by the rate of `chalk`
        )
    ]
    assert times == [20, 30, 10, 1]


def test_the_most_specific_curve_times_the_memory():
    hw = replace(CHALK, points={"bytes": ((1_000, 10),), "bytes:add": ((1_000, 7),)})
    assert compute_ns(hw, 0, "float32", 2_000, "mul") == 20
    assert compute_ns(hw, 0, "float32", 2_000, "add") == 14


def test_steps_of_lists_have_a_curve_of_their_own():
    points = {"bytes": ((1_000, 10),), "bytes:lists of tensors": ((1_000, 7),)}
    hw = replace(CHALK, points={**points, "bytes:_foreach_add_": ((1_000, 5),)})
    names = "_fused_adamw_", "_foreach_mul_", "_foreach_add_", "_fused_rms_norm", "add_"
    assert [compute_ns(hw, 0, "", 1_000, name) for name in names] == [7, 7, 5, 10, 10]


def test_curves_of_arithmetic_and_memory_compete_and_the_floor_holds():
    hw = replace(
        CHALK,
        kernel_floor_ns=3,
        points={"flops:float32": ((1_000, 10),), "bytes": ((1_000, 8),)},
    )
    assert compute_ns(hw, 1_000, "float32", 1_000) == 10
    assert compute_ns(hw, 1_000, "float32", 2_000) == 16
    # No FLOPs and no bytes take no time, whatever the first point says.
    assert compute_ns(hw, 0, "float32", 0) == 3
