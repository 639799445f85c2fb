"""Cost formulas: numbers that a person can check by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlaplab.hardware import OPERATIONS, collective_ns, compute_ns, find_hardware

CHALK = find_hardware("chalk")


@pytest.mark.parametrize(
    ("operation", "num_ranks", "wire_ns"),
    [
        ("all_reduce", 2, 1_000),
        ("all_reduce", 4, 1_500),
        ("all_gather", 4, 750),
        ("reduce_scatter", 4, 750),
        ("all_to_all", 4, 750),
        ("gather", 4, 750),
        ("scatter", 4, 750),
        ("broadcast", 4, 1_000),
        ("reduce", 4, 1_000),
        ("send", 2, 1_000),
        ("recv", 2, 1_000),
        ("barrier", 4, 0),
    ],
)
def test_ten_kilobytes_on_chalk(operation, num_ranks, wire_ns):
    assert collective_ns(CHALK, operation, num_ranks, 10_000) == (1_000, wire_ns)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_rank_sends_nothing(operation):
    assert collective_ns(CHALK, operation, 1, 10_000) == (0, 0)


def test_wire_time_is_rounded_up():
    assert collective_ns(CHALK, "all_reduce", 2, 1) == (1_000, 1)
    assert collective_ns(CHALK, "all_reduce", 3, 11) == (1_000, 2)  # 4/3 of 1.1


def test_an_unknown_collective_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'allreduce'.*all_reduce, all_gather"):
        collective_ns(CHALK, "allreduce", 2, 1)


def test_a_collective_of_no_rank_or_of_negative_bytes_is_refused():
    with pytest.raises(ValueError, match="num_ranks is 0"):
        collective_ns(CHALK, "all_reduce", 0, 1)
    with pytest.raises(ValueError, match="bytes -1"):
        collective_ns(CHALK, "all_reduce", 2, -1)


def test_a_kernel_takes_the_larger_of_arithmetic_and_memory_and_never_less_than_floor():
    h100 = find_hardware("h100-nvlink")
    assert compute_ns(h100, 780 * 10**9, "bfloat16") == 1_000_000
    assert compute_ns(h100, 780 * 10**9, "bfloat16", 14 * 10**9) == 10_000_000
    assert compute_ns(h100, 1, "bfloat16", 1) == h100.kernel_floor_ns == 2_000
    assert compute_ns(CHALK, 0, "", 0) == 0


def test_a_dtype_that_is_not_listed_runs_at_the_default_rate():
    h100 = find_hardware("h100-nvlink")
    flops = 10**12
    assert compute_ns(h100, flops, "int4") == compute_ns(h100, flops, "float32")


@given(st.sampled_from(OPERATIONS), st.integers(1, 64), st.integers(0, 10**12))
def test_more_bytes_never_take_less_time(operation, num_ranks, bytes):
    one = collective_ns(CHALK, operation, num_ranks, bytes)
    more = collective_ns(CHALK, operation, num_ranks, bytes + 1)
    assert one[0] == more[0] and one[1] <= more[1]


@pytest.mark.parametrize(
    ("num_ranks", "bytes", "measured_us", "rel"),
    [
        # Captured, so without the launch; another run than the profile's.
        (2, 4 * 2**10, 9.8, 0.35),
        (2, 2**20, 21, 0.25),
        (2, 5 * 2**20, 43, 0.1),
        (2, 25 * 2**20, 119, 0.04),
        (2, 100 * 2**20, 382, 0.04),
        # The curve is that of two ranks; four reach a little more.
        (4, 25 * 2**20, 161, 0.07),
        (4, 100 * 2**20, 518, 0.07),
        (4, 1_477_000_000, 6_300, 0.07),
    ],
)
def test_the_nvlink_profile_is_near_what_was_measured(
    num_ranks, bytes, measured_us, rel
):
    hw = find_hardware("h200-nvlink")
    predicted = sum(collective_ns(hw, "all_reduce", num_ranks, bytes)) / 1e3
    assert predicted == pytest.approx(measured_us, rel=rel)
