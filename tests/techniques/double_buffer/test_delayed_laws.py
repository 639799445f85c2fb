"""Random steps with late gradients: right on all ranks, or refused (hypothesis).

The scripts are those of the reducer's laws: beside the model each rank trains a twin
without a reducer, and the mean of the twins' gradients is what the next `wait` leaves.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlaplab.errors import OverlaplabError
from overlaplab.techniques.double_buffer import DoubleBufferedReducer
from tests.ranks import values_of
from tests.techniques.data_parallel import test_machine_laws as laws


def check(script: list[laws.Action]) -> None:
    """Equal on both ranks, and the average of the step before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(laws, "BucketedReducer", DoubleBufferedReducer)
        first, second = values_of(laws.play, script)
    assert len(first) == len(second)
    nothing: list[laws.Seen] = [(None, None, False)] * 3
    waits = zip([nothing, *first], [nothing, *second], first, second, strict=False)
    for one_before, other_before, one, other in waits:
        for (_, mine, _), (_, its, _), (got, *_), (same, *_) in zip(
            one_before, other_before, one, other, strict=True
        ):
            assert got == same
            mean = ((mine or 0.0) + (its or 0.0)) / 2
            assert abs((got or 0.0) - mean) <= 1e-4 * abs(mean) + 1e-6


@given(laws.right_steps)
@settings(max_examples=60)
def test_steps_in_order_are_right_and_late_on_every_rank(steps: Any) -> None:
    check(laws.script_of(steps))


@given(st.lists(laws.actions(laws.EVERYTHING), max_size=12))
@settings(max_examples=150)
def test_steps_in_any_order_are_right_and_late_or_refused(
    script: list[laws.Action],
) -> None:
    with contextlib.suppress(OverlaplabError):
        check([*script, ("wait", None)])
