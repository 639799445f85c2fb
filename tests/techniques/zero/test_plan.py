"""The plan of a step is data: gathers just in time, one row too early is refused."""

from __future__ import annotations

import dataclasses
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlaplab.techniques.zero.plan import (
    PlanError,
    StepPlan,
    Use,
    plan_slots,
    plan_step,
)

NAMES = tuple("abcdef")
used = st.lists(
    st.builds(
        lambda unit, kind: Use(unit, *kind),
        st.integers(0, 5),
        st.sampled_from([(False,), (True,), (True, True), (True, False, True)]),
    ),
    max_size=30,
)
depths = st.integers(0, 4)


def planned(uses: list[Use], prefetch: int) -> StepPlan:
    return plan_step(uses, NAMES, prefetch, plan_slots(uses, 6, min(prefetch + 1, 6)))


def there_and_back(number: int) -> list[Use]:
    forward = [Use(i, False) for i in range(number)]
    return forward + [Use(i, True) for i in reversed(range(number))]


@given(used, depths)
def test_every_unit_is_in_its_slot_when_it_computes(uses: list[Use], prefetch: int):
    plan = planned(uses, prefetch)
    assert plan.uses == uses
    plan.check()


@given(used, depths)
def test_a_plan_gathers_no_more_than_on_demand_and_never_early(
    uses: list[Use], prefetch: int
):
    for number, row in enumerate(planned(uses, prefetch).rows):
        ahead = [use.unit for use in uses[number : number + prefetch + 1]]
        assert set(row.gathers) <= set(ahead)
        assert len(set(row.gathers)) == len(row.gathers)


@given(used, depths)
def test_gradients_leave_when_a_backward_is_over_and_the_weights_go_with_them(
    uses: list[Use], prefetch: int
):
    rows = planned(uses, prefetch).rows
    for row, follows in zip_longest(rows, rows[1:]):
        goes_on = follows is not None and follows.use.unit == row.use.unit
        leaves = row.use.backward and not row.use.again and not row.use.paused
        assert row.scatters == (leaves and not goes_on)
    for number, row in enumerate(rows):
        before = [r for r in rows[:number] if r.use.unit == row.use.unit]
        if before and before[-1].scatters:
            at = max(i for i, r in enumerate(rows[:number]) if r is before[-1])
            assert any(row.use.unit in r.gathers for r in rows[at + 1 : number + 1])


@pytest.mark.parametrize("number", [3, 4, 5, 6])
@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_each_gather_of_there_and_back_is_launched_a_use_before(number, prefetch):
    """D05: but for the first one, there is a computation to hide every gather."""
    plan = planned(there_and_back(number), prefetch)
    first, *others = plan.rows
    assert first.gathers == tuple(range(min(prefetch + 1, number)))
    assert all(row.use.unit not in row.gathers for row in others)


def test_the_slots_of_the_last_units_serve_the_first_of_the_backward():
    gathers = [row.gathers for row in planned(there_and_back(5), 1).rows]
    assert gathers == [(0, 1), (2,), (3,), (4,), (), (), (2,), (1,), (0,), ()]


def test_gradients_and_weights_stay_behind_a_backward_inside_no_sync():
    paused = [Use(0, False), Use(1, False), Use(1, True, False, True)]
    paused.append(Use(0, True, False, True))
    rows = planned(paused + there_and_back(2), 1).rows
    assert [row.scatters for row in rows] == [False] * 6 + [True] * 2
    assert [row.gathers for row in rows] == [(0, 1), *[()] * 7]


def test_a_depth_of_zero_gathers_on_demand():
    gathers = [row.gathers for row in planned(there_and_back(3), 0).rows]
    assert gathers == [(0,), (1,), (2,), (), (1,), (0,)]


def test_a_plan_in_which_a_unit_computes_without_weights_is_refused_with_its_row():
    plan = planned(there_and_back(3), 1)
    rows = list(plan.rows)
    rows[4] = dataclasses.replace(rows[4], gathers=())
    with pytest.raises(PlanError) as caught:
        StepPlan(tuple(rows), plan.slots, plan.names).check()
    assert str(caught.value) == (
        "row 5: a computes with slot 0, which has nothing; its own slot is 0.\n"
        "  0 forward  a slot 0  gather a b\n"
        "  1 forward  b slot 1  gather c\n"
        "  2 forward  c slot 0\n"
        "  3 backward c slot 0  then scatter\n"
        "  4 backward b slot 1  then scatter\n"
        "  5 backward a slot 0  then scatter   <-- here\n"
        "Gather a unit before it computes, into a slot that is not in use."
    )


def test_a_gather_over_what_computes_is_refused():
    plan = planned(there_and_back(3), 1)
    rows = list(plan.rows)
    rows[0] = dataclasses.replace(rows[0], gathers=(0, 1, 2))  # c has a's slot
    with pytest.raises(PlanError, match="row 0: a computes with slot 0, which has c"):
        StepPlan(tuple(rows), plan.slots, plan.names).check()
