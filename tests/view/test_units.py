"""Times and sizes as people read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlaplab.view.units import decimals, format_bytes, format_ns, percentages


@pytest.mark.parametrize(
    ("time_ns", "text"),
    [
        (0, "0 ms"),
        (999, "999 ns"),
        (1000, "1 us"),
        (12_345_678, "12.35 ms"),
        (-15_000, "-15 us"),
        (90_000_000_000, "90 s"),
        (4_321_987_000_000, "4322 s"),
    ],
)
def test_a_time_has_four_digits_and_the_largest_unit(time_ns, text):
    assert format_ns(time_ns) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(1023, "1023 B"), (1024, "1 KiB"), (25 * 2**20, "25 MiB"), (3 * 2**29, "1.5 GiB")],
)
def test_a_mebibyte_is_two_to_the_twentieth(num_bytes, text):
    assert format_bytes(num_bytes) == text


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=6))
def test_percentages_add_up_to_100_and_none_is_off_by_one_percent(parts):
    percents = percentages(parts)
    whole = sum(parts)
    assert sum(percents) == (100 if whole else 0)
    for part, percent in zip(parts, percents, strict=True):
        assert abs(percent * whole - 100 * part) < max(whole, 1)


def test_whole_numbers_get_no_point():
    assert decimals([56.0, 6.0, 50.0]) == 0
    assert decimals([41.115, 6.3]) == 2
    assert decimals([]) == 0
