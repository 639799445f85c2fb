"""Each step gives the average of the one before, on all ranks, or one clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

import overlaplab as ol
from overlaplab.errors import DeadlockError, MismatchError, RankError
from tests.ranks import run_untimed, values_of
from tests.techniques.data_parallel import misuse, programs, windows
from tests.techniques.double_buffer import delayed_misuse, delayed_steps

on_both = pytest.mark.parametrize("cluster", ["virtual", "gloo"])

NOTHING = [None]


def values(fn: Callable[..., Any], *args: Any, cluster: str = "virtual") -> Any:
    """What both ranks return alike; nothing is found in the record."""
    run = run_untimed(fn, *args, cluster=cluster)
    assert run.warnings == ()
    first, second = run.values
    assert first == second
    return first


def refuses(says: str, fn: Callable[..., Any], *args: Any, cluster: str) -> None:
    with pytest.raises(RankError, match=says):
        values_of(fn, *args, cluster=cluster)


@on_both
def test_a_wait_gives_the_average_of_the_step_before_and_flush_the_last(
    cluster: str,
) -> None:
    found = values(delayed_steps.steps, cluster=cluster)
    assert found == (
        [NOTHING, [1.5], [11.5], [21.5], [21.5]],
        [True, False],
    )


def test_after_a_flush_a_wait_gives_nothing_as_in_step_0() -> None:
    assert values(delayed_steps.steps, 1) == (
        [NOTHING, [1.5], [11.5], NOTHING, [21.5], [21.5]],
        [True, True, False],
    )


@on_both
def test_a_rank_may_skip_a_backward(cluster: str) -> None:
    # (0 + 12) / 2 in step 1; (21 + 0) / 2 in step 2.
    found = values(delayed_steps.skips, [(), (0,), (1,)], cluster=cluster)
    assert found == [NOTHING, [1.5], [6.0], [10.5]]


def test_a_step_without_any_backward_gives_none() -> None:
    found = values(delayed_steps.skips, [(), (0, 1), ()])
    assert found == [NOTHING, [1.5], NOTHING, [21.5]]


@pytest.mark.parametrize("cut_short", [True, False])
def test_micro_batches_are_one_step(cut_short: bool) -> None:
    found = values(delayed_steps.two_micro_batches, cut_short)
    assert found == [NOTHING, [13.0], [53.0]]


@on_both
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("failing", [(0, 1), (1,)])
def test_a_step_that_is_given_up_leaves_the_one_before_on_the_way(
    cluster: str, failing: tuple[int, ...], to_none: bool
) -> None:
    found = values(delayed_steps.a_step_that_fails, failing, to_none, cluster=cluster)
    # Each weight is 1, so that both have the input for their gradient.
    assert found == [[None, None], [1.5, 1.5], [21.5, 21.5]]


@on_both
def test_what_freezes_gets_its_last_average_and_what_thaws_its_first_a_step_late(
    cluster: str,
) -> None:
    seen, sizes = values(delayed_steps.freezes_everywhere, cluster=cluster)
    assert seen == [
        [None, None, None],
        [1.5, 1.5, 1.5],
        [None, 11.5, 11.5],
        [None, None, 21.5],
        [31.5, None, 31.5],
        [41.5, 41.5, 41.5],
        [51.5, 51.5, 51.5],
    ]
    assert sizes == [3, 2, 1, 2, 3, 3]


@on_both
def test_one_rank_may_freeze_and_ranks_stay_equal(cluster: str) -> None:
    assert values(delayed_steps.freezes_on_rank_0, cluster=cluster) == [
        [None, None],
        [1.5, 1.5],
        [6.0, 11.5],
        [11.0, 21.5],
        [31.5, 31.5],
    ]


def test_a_model_that_is_converted_gets_its_average_in_the_new_dtype() -> None:
    assert values(delayed_steps.converts_between_steps) == [
        None,
        (1.5, torch.float64),
        (11.5, torch.float64),
    ]


@on_both
def test_a_state_is_a_copy_of_the_pending_average_by_name(cluster: str) -> None:
    state, seen = values(delayed_steps.saves_and_loads, cluster=cluster)
    assert {name: t.item() for name, t in state.items()} == {"weight": 11.5}
    assert seen == [NOTHING, [1.5], [11.5], [11.5]]


def test_a_gradient_of_any_stride_is_late_and_a_state_leaves_grad_alone() -> None:
    assert values(delayed_steps.of_any_stride) == (True, 1.5)


def test_a_flush_gives_none_where_the_last_step_had_nothing() -> None:
    assert values(delayed_steps.unused_in_the_last_step) == [
        [None, None],
        [1.5, 1.5],
        [11.5, None],
    ]


def test_steps_of_two_reducers_may_alternate() -> None:
    assert values(delayed_steps.two_models) == [
        [NOTHING, [1.5], [11.5]],
        [NOTHING, [101.5], [111.5]],
    ]


def test_the_dtype_on_the_wire_decides_the_rounding() -> None:
    # 256 + 1 is 256 in bfloat16; 257 / 2 = 128.5 rounds to 128 on the way back.
    exact = torch.tensor([[128.5]]).bfloat16()
    assert torch.equal(values(delayed_steps.reduced_in_float32), exact)


@on_both
def test_what_is_dropped_in_mid_flight_is_freed(cluster: str) -> None:
    assert values_of(delayed_steps.how_many_live, cluster=cluster) == (0, 0)


def test_a_representative_rank_leaves_unused_parameters_alone() -> None:
    run = ol.run(delayed_steps.fake_steps, world_size=8, fake=True)
    assert run.warnings == () and run.values == ([True, True, False, True],)


def test_it_says_that_gradients_are_late_and_what_that_costs() -> None:
    text = values(delayed_steps.says)
    assert text.startswith(
        "DoubleBufferedReducer: gradients one step late, 260.0 KiB for a second set"
    )
    assert "uses the average of the step before" in text and "bucket 1" in text


@on_both
@pytest.mark.parametrize(
    ("program", "says"),
    [
        (delayed_misuse.waits_twice, r"finds in \.grad the average.*once a step"),
        (delayed_misuse.never_waits, r"weight was changed while step 0 was open"),
        (
            delayed_misuse.runs_backward_twice,
            "weight got a second gradient in one step",
        ),
        (delayed_misuse.steps_before_it_waits, "weight was changed while step 1"),
        (delayed_misuse.writes_what_travels, "weight of the step before was written"),
        (delayed_misuse.replaces_a_parameter, "1.weight is not the object"),
    ],
)
def test_a_wrong_loop_is_refused_on_every_rank(
    cluster: str, program: Callable[[], None], says: str
) -> None:
    refuses(says, program, cluster=cluster)


def test_a_backward_onto_an_average_is_refused() -> None:
    says = r"this backward finds in \.grad the average.*zero_grad"
    refuses(says, delayed_misuse.accumulates_into, True, cluster="virtual")
    values_of(delayed_misuse.accumulates_into, False)


@on_both
@pytest.mark.parametrize("backwards", [2, 3])
def test_an_average_that_was_clipped_and_not_zeroed_is_refused_by_name(
    cluster: str, backwards: int
) -> None:
    says = r"gradient of 0\.weight was added .*clipped.* and not zeroed.*zero_grad"
    clips = delayed_misuse.clips_and_keeps
    refuses(says, clips, False, backwards, cluster=cluster)


@on_both
@pytest.mark.parametrize("weights", [1, 2])  # the only one also begins the backward
def test_an_average_that_was_clipped_and_zeroed_is_none_the_worse(
    cluster: str, weights: int
) -> None:
    clips = delayed_misuse.clips_and_keeps
    (grad,) = set(values(clips, True, 3, weights, cluster=cluster))
    assert grad == pytest.approx(0.5 / weights**0.5)


@pytest.mark.parametrize("ends", [True, False])
def test_a_flush_on_one_rank_alone_is_named_on_both(ends: bool) -> None:
    says = r"rank 0 .*flush\(\) 1 of reducer 1.*rank 1 "
    with pytest.raises(DeadlockError, match=f"(?s){says}"):
        run_untimed(delayed_misuse.flushes_alone, ends)


@on_both
@pytest.mark.parametrize("what", ["replace", "free", "zero", "clip"])
def test_a_gradient_that_is_touched_before_the_wait_is_named(
    cluster: str, what: str
) -> None:
    says = r"weight\.grad was replaced, freed or written .*reducer\.wait\(\) first"
    refuses(says, delayed_misuse.touches, what, cluster=cluster)


CALLS = {
    "flush": lambda reducer: reducer.flush(),
    "state_dict": lambda reducer: reducer.state_dict(),
    "load_state_dict": lambda reducer: reducer.load_state_dict({"average": None}),
}


@pytest.mark.parametrize("name", CALLS)
def test_between_steps_means_not_in_an_open_one(name: str) -> None:
    says = rf"reducer\.{name}\(\) while step 0 is open.*wait"
    refuses(says, delayed_misuse.in_an_open_step, CALLS[name], cluster="virtual")


@pytest.mark.parametrize("name", [*CALLS, "wait"])
def test_after_remove_nothing_is_pending_and_every_call_refused(name: str) -> None:
    call = CALLS.get(name, lambda reducer: reducer.wait())
    says = rf"reducer\.{name}\(\) after remove\(\)"
    refuses(says, delayed_misuse.after_remove, call, cluster="virtual")


@pytest.mark.parametrize("late_first", [True, False])
def test_a_second_reducer_of_either_kind_is_refused(late_first: bool) -> None:
    says = "weight has a reducer already"
    refuses(says, delayed_misuse.two_reducers, late_first, cluster="virtual")


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({}, r"state is a dict of \[\]; expected"),
        (None, "state is None; expected"),
        ({1: 2, "average": None}, r"a dict of \['1', 'average'\]; expected"),
        ({"average": {1: 2.0, "a": 2.0}}, "1, which is no parameter"),
        ({"average": [1]}, r'\[1\] under "average"; expected a dict'),
        ({"average": {"bias": torch.ones(1)}}, "bias, which is no parameter"),
        ({"average": {"weight": torch.ones(2)}}, r"float32 \(2,\).*float32 \(1, 1\)"),
        (
            {"average": {"weight": torch.ones(1, 1).double()}},
            r"float64 \(1, 1\); its parameter is float32",
        ),
        ({"average": {"weight": 3.0}}, r"weight is 3\.0"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(state: Any, says: str) -> None:
    refuses(says, delayed_misuse.loads, state, cluster="virtual")


@on_both
def test_a_state_has_the_values_of_the_first_rank(cluster: str) -> None:
    names = ["1.weight", "0.weight"]
    args = (delayed_steps.loads_other_averages, [names, names[::-1]])
    assert values(*args, cluster=cluster) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ([["0.weight"], None], "rank 0 loads an average of 0.weight, rank 1 does not"),
        ([None, ["1.weight"]], "rank 1 loads an average of 1.weight, rank 0 does not"),
        ([["0.weight"], ["0.weight", "1.weight"]], "rank 1 loads .* 1.weight, rank 0"),
        ([[], None], "rank 0 loads an average of a step that no rank used, rank 1"),
        ([None, []], "rank 1 loads an average of a step that no rank used, rank 0"),
    ],
)
def test_ranks_that_load_other_states_are_refused(names: Any, says: str) -> None:
    with pytest.raises((MismatchError, RankError), match=says):
        values_of(delayed_steps.loads_other_averages, names)


PROGRAMS: list[tuple[Any, ...]] = [
    (misuse.checkpointed_backward, ()),
    (misuse.trains_inside_a_backward,),
    (misuse.freeze_differently,),
    (misuse.freeze_and_unfreeze_on_rank_0,),
    (misuse.another_method,),
    (windows.accumulates_in_place,),
    (misuse.half_precision,),
    (misuse.lazily_conjugated,),
    (misuse.abandons_after_a_cast,),
    (misuse.bfloat16_wire, torch.float32),
    (programs.no_backward_on_rank_0,),
    (programs.two_forwards_and_backwards, True),
    (programs.create_graph,),
    (programs.unfreeze_what_was_frozen_at_construction,),
    (programs.strange_strides,),
    (programs.complex_gradients, torch.float64),
    (programs.branch_gradients,),
    (programs.convert_after_construction,),
    (programs.broadcast_values,),
    (programs.removed,),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p[0].__name__)
def test_with_a_flush_in_every_step_it_is_a_bucketed_reducer(program: Any) -> None:
    want, layout = tree_flatten(values_of(*program))
    with delayed_steps.flushed_everywhere():
        got, same_layout = tree_flatten(values_of(*program))
    assert layout == same_layout
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
