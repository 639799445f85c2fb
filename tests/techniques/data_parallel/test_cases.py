"""Field cases: what reducers get wrong, each on both clusters."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import overlaplab as ol
from overlaplab.errors import MismatchError, RankError
from overlaplab.models.toy_nets import Branches, random_batch
from overlaplab.techniques.data_parallel import AllReduce, BucketedReducer
from tests.ranks import On, everywhere, run_on
from tests.techniques.data_parallel import programs, training
from tests.techniques.data_parallel.misuse import mean


def run(fn: Callable[..., Any], *args: Any, on: On) -> list[Any]:
    found = run_on(on, fn, *args)
    assert found.warnings == ()
    return list(found.values)


def alike(values: list[dict[str, Any]]) -> dict[str, Any]:
    """The gradients that all ranks have."""
    first, *others = values
    for other in others:
        for name, grad in first.items():
            assert torch.equal(grad, other[name]), name
    return first


def local_gradient(
    batch: torch.Tensor, make: Callable[[], nn.Module] = programs.Two
) -> dict[str, Any]:
    """Of rank 0's model on a batch."""
    torch.manual_seed(0)  # as rank 0
    model = make().to(batch.dtype)
    model(batch).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def mean_of(gradients: list[dict[str, Any]]) -> dict[str, Any]:
    return {n: sum(g[n] for g in gradients) / len(gradients) for n in gradients[0]}


def right_at(on: On, step: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """What the ranks' gradients of `Two` average to."""
    batches = [random_batch(r, step, programs.WIDTH).to(dtype) for r in range(on.ranks)]
    return mean_of([local_gradient(batch) for batch in batches])


@everywhere
@pytest.mark.parametrize("reducer", ["serial", "hooks", "bucketed"])
def test_a_parameter_that_no_rank_used_keeps_none(reducer: str, on: On) -> None:
    for seen in run(programs.presence_of_gradients, "unused", reducer, on=on):
        assert seen == {
            "a.weight": True,
            "a.bias": True,
            "b.weight": False,
            "b.bias": False,
        }


@everywhere
@pytest.mark.parametrize("reducer", ["serial", "hooks", "bucketed"])
def test_a_parameter_used_on_rank_0_only_has_a_gradient_on_all(
    reducer: str, on: On
) -> None:
    for seen in run(programs.presence_of_gradients, "uneven", reducer, on=on):
        assert all(seen.values())


@everywhere
def test_a_rank_without_a_backward_receives_the_others_averages(on: On) -> None:
    found = alike(run(programs.no_backward_on_rank_0, on=on))
    idle = local_gradient(random_batch(0, 0, programs.WIDTH))
    right = {n: grad - idle[n] / on.ranks for n, grad in right_at(on).items()}
    torch.testing.assert_close(found, right)


@everywhere
def test_two_backwards_on_one_graph_add_up_and_are_averaged(on: On) -> None:
    right = 1 + 2 * on.ranks  # (1 + 2 + 3 + 4) / 2, (1 + ... + 6) / 3
    assert run(programs.two_backwards_on_one_graph, True, on=on) == [right] * on.ranks


@everywhere
def test_two_micro_batches_add_up_and_are_averaged(on: On) -> None:
    right = 1 + 2 * on.ranks
    assert run(programs.two_forwards_and_backwards, True, on=on) == [right] * on.ranks


@everywhere
@pytest.mark.parametrize(
    "program",
    [programs.two_backwards_on_one_graph, programs.two_forwards_and_backwards],
)
def test_a_second_backward_without_a_wait_is_refused_by_name(
    on: On, program: Callable[[bool], float]
) -> None:
    says = r"weight got a second gradient in one step(?!.*one graph).*no_sync"
    with pytest.raises(RankError, match=says):
        run(program, False, on=on)


@everywhere
def test_create_graph_gives_the_average_too(on: On) -> None:
    # d/dw (w x)^2 = 2 w x^2: 6 on rank 0, 24 on rank 1, 54 on rank 2.
    right = {2: 15, 3: 28}[on.ranks]
    assert run(programs.create_graph, on=on) == [right] * on.ranks


@everywhere
def test_gradients_of_autograd_grad_stay_local_and_open_no_step(on: On) -> None:
    found = run(programs.gradients_of_autograd_grad, on=on)
    assert found == [(1.0 + rank, mean(on.ranks)) for rank in range(on.ranks)]


@everywhere
@pytest.mark.parametrize("reducer", ["serial", "bucketed", "one bucket"])
def test_what_is_frozen_in_mid_run_is_neither_sent_nor_written(
    reducer: str, on: On
) -> None:
    ranks = run(programs.freeze_and_unfreeze, reducer, on=on)
    for step, of_ranks in enumerate(zip(*ranks, strict=True)):
        names, right = ["b.weight", "b.bias"], right_at(on, step)
        if step in (1, 2):
            for rank, seen in enumerate(of_ranks):
                stale = seen["a.weight"]
                assert torch.equal(stale, torch.full_like(stale, float(rank)))
        else:
            names += ["a.weight", "a.bias"]
        found = alike([{n: seen[n] for n in names} for seen in of_ranks])
        torch.testing.assert_close(found, {n: right[n] for n in names})


@everywhere
def test_what_was_frozen_at_construction_may_train_later(on: On) -> None:
    found = alike(run(programs.unfreeze_what_was_frozen_at_construction, on=on))
    torch.testing.assert_close(found, right_at(on))


@everywhere
def test_gradients_of_any_stride_are_averaged_in_place(on: On) -> None:
    for seen in run(programs.strange_strides, on=on):
        assert seen["same"] and seen["bias is none"]
        times = mean(on.ranks)
        assert torch.equal(seen["first"], times * torch.arange(24.0).reshape(4, 6).t())
        assert torch.equal(seen["second"], torch.full((4, 6), times))
        expected = times * torch.arange(32.0).reshape(8, 4, 1, 1)
        assert torch.equal(seen["conv"], expected)


@everywhere
def test_halves_accumulate_and_travel_in_another_dtype(on: On) -> None:
    found = alike(run(programs.accumulated_in_other_dtype, on=on))
    torch.manual_seed(0)  # as rank 0
    model = programs.Two().bfloat16()
    # All micro-batches in one process, without b in each rank's first.
    for rank in range(on.ranks):
        for step in range(2):
            model.use_b = step == 1
            model(random_batch(rank, step, programs.WIDTH).bfloat16()).backward()
    for name, parameter in model.named_parameters():
        assert found[name].dtype is torch.bfloat16
        assert parameter.grad is not None
        # 8 bits, and this one rounds after each addition.
        torch.testing.assert_close(
            found[name], parameter.grad / on.ranks, rtol=0.02, atol=1e-3
        )


@everywhere
def test_the_dtype_on_the_wire_decides_the_rounding(on: On) -> None:
    # 256 + 1 + 1 is 256 in bfloat16, a third of it 85.5. Halves round alike.
    right = {2: 128.0, 3: 86.0}[on.ranks]
    assert run(programs.reduce_exactly, torch.float32, on=on) == [right] * on.ranks


@everywhere
def test_complex_gradients_are_averaged(on: On) -> None:
    for reduce_dtype in (None, torch.float64):  # a real one would lose half
        for grad in run(programs.complex_gradients, reduce_dtype, on=on):
            right = complex((on.ranks - 1) / 2, 2.0)
            assert torch.equal(grad, torch.full((2, 2), right))


@everywhere
@pytest.mark.parametrize(
    ("program", "name"),
    [
        (programs.replace_a_parameter, "a.weight"),
        (programs.replace_a_module, "b.weight"),
        (programs.replace_and_call_the_parts, "a.weight"),
        (programs.load_other_parameters, "a.weight"),
    ],
)
def test_a_replaced_parameter_is_named_when_the_step_ends(
    program: Callable[[], None], name: str, on: On
) -> None:
    with pytest.raises(RankError, match=f"parameter {name} is not the object"):
        run(program, on=on)


@everywhere
def test_a_copy_of_the_model_has_no_reducer(on: On) -> None:
    for rank, (grad, copies) in enumerate(run(programs.copy_model, on=on)):
        assert grad == mean(on.ranks)
        assert copies == [1.0 + rank] * 2


@everywhere
def test_a_parameter_may_have_another_reducer_once_the_first_is_removed(on: On) -> None:
    assert run(programs.reducer_after_reducer, on=on) == [mean(on.ranks)] * on.ranks


@everywhere
def test_models_that_differ_between_ranks_are_refused(on: On) -> None:
    with pytest.raises((RankError, MismatchError), match=r"weight \(5, 4\)"):
        run(programs.different_models, on=on)


@everywhere
def test_a_model_converted_later_is_planned_anew(on: On) -> None:
    found = alike(run(programs.convert_after_construction, on=on))
    torch.testing.assert_close(found, right_at(on, dtype=torch.float64))


@everywhere
def test_empty_parameters_keep_their_shape_and_are_not_sent(on: On) -> None:
    expected = ((0, programs.WIDTH), False)
    assert run(programs.zero_elements_round_trip, on=on) == [expected] * on.ranks


@everywhere
def test_buckets_are_launched_in_one_order_whatever_order_gradients_have(
    on: On,
) -> None:
    order = ["b.bias", "b.weight", "a.bias", "a.weight"]
    assert run(programs.order_of_launches, "branches", on=on) == [order] * on.ranks


@everywhere
def test_swapped_branches_do_not_swap_their_data(on: On) -> None:
    found = alike(run(programs.branch_gradients, on=on))
    batches = map(programs.branch_batch, range(on.ranks))
    right = mean_of([local_gradient(batch, Branches) for batch in batches])
    torch.testing.assert_close(found, right)


@everywhere
def test_a_tied_weight_has_one_place_in_the_plan(on: On) -> None:
    order = ["decode.bias", "encode.bias", "encode.weight"]
    assert run(programs.order_of_launches, "tied", on=on) == [order] * on.ranks


@everywhere
def test_removed_hooks_leave_local_gradients(on: On) -> None:
    for rank, seen in enumerate(run(programs.removed, on=on)):
        right = local_gradient(random_batch(rank, 0, programs.WIDTH))
        torch.testing.assert_close(seen, right)


@everywhere
def test_construction_gives_every_rank_the_values_of_rank_0(on: On) -> None:
    first, *others = run(programs.broadcast_values, on=on)
    for other in others:
        assert all(map(torch.equal, first, other))


@everywhere
def test_an_evaluation_between_backward_and_wait_is_harmless(on: On) -> None:
    found = alike(run(programs.evaluation_between, on=on))
    torch.testing.assert_close(found, right_at(on))


@everywhere
def test_buffers_broadcast_before_two_forwards_leave_one_backward_right(on: On) -> None:
    right = 2 * mean(on.ranks)  # both forwards with rank 0's buffer, which is 1
    found = run(programs.buffers_between_two_forwards, False, on=on)
    assert found == [right] * on.ranks


@everywhere
def test_buffers_broadcast_between_forward_and_backward_are_noticed(on: On) -> None:
    with pytest.raises(RankError, match="modified by an inplace operation"):
        run(programs.buffers_between_two_forwards, True, on=on)


@everywhere
def test_a_group_averages_over_its_own_ranks(on: On) -> None:
    right = {2: [1.0, 2.0], 3: [1.5, 1.5, 3.0]}[on.ranks]
    assert run(programs.in_a_subgroup, on=on) == right


# Refused at construction, with what to do.


def float8() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight = nn.Parameter(model[0].weight.to(torch.float8_e4m3fn))
    return model


def in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(2, 2)


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))


# Model, settings, what is said.
BAD: list[tuple[Any, dict[str, Any], str]] = [
    (sparse, {}, r"module 0 makes sparse gradients .* Use sparse=False"),
    (lambda: nn.ReLU(), {}, "no parameter that requires a gradient"),
    (lambda: nn.LazyLinear(3), {}, "no shape yet"),
    (lambda: nn.Linear(2, 2), {"bucket_mib": 0}, "bucket_mib is 0"),
    (lambda: nn.Linear(2, 2), {"bucket_mib": -1.0}, "bucket_mib is -1.0"),
    (lambda: nn.Linear(2, 2), {"first_bucket_mib": 0}, "first_bucket_mib is 0"),
    (lambda: nn.Linear(2, 2), {"bucket_mib": math.inf}, "inf; expected a finite"),
    (lambda: nn.Linear(2, 2), {"bucket_mib": math.nan}, "nan; expected a finite"),
    (lambda: nn.Linear(2, 2), {"bucket_mib": "25"}, "'25'; expected a number"),
    (lambda: nn.Linear(2, 2), {"max_in_flight": 0}, "max_in_flight is 0"),
    (lambda: nn.Linear(2, 2), {"max_in_flight": 1.5}, "1.5; expected an int"),
    (lambda: nn.Linear(2, 2), {"reduce_dtype": "bf16"}, "'bf16'; expected a dtype"),
    (lambda: [nn.Linear(2, 2)], {}, "model is a list; expected a torch.nn.Module"),
    (lambda: nn.Linear(2, 2), {"reduce_dtype": torch.int64}, "a float dtype"),
    (lambda: nn.Linear(2, 2), {"reduce_dtype": torch.float8_e4m3fn}, "not sum"),
    (lambda: nn.Linear(2, 2), {"wire": 5}, "wire is 5; expected an object with"),
    (lambda: nn.Linear(2, 2), {"wire": AllReduce}, "wire is <class .*expected an"),
    (lambda: nn.Linear(2, 2), {"process_group": "world"}, "a ProcessGroup or None"),
    (in_inference_mode, {}, r"parameter weight was made in torch.inference_mode"),
    (float8, {}, "0.weight is torch.float8_e4m3fn.* Freeze it"),
]


def refused_here() -> list[str]:
    """What is said here about each of `BAD`."""
    texts = []
    for make_model, settings, _ in BAD:
        with pytest.raises((TypeError, ValueError)) as error:
            BucketedReducer(make_model(), **settings)
        texts.append(str(error.value))
    return texts


@cache
def refusals(on: On) -> list[set[str]]:
    """Of each of `BAD`, what the ranks say."""
    return list(map(set, zip(*run(refused_here, on=on), strict=True)))


@pytest.mark.parametrize("case", range(len(BAD)), ids=[says for *_, says in BAD])
@everywhere
def test_bad_input_is_refused_at_construction(on: On, case: int) -> None:
    for text in refusals(on)[case]:
        assert re.search(BAD[case][-1], text), text


@everywhere
def test_what_is_no_model_is_refused_by_the_serial_reducer_too(on: On) -> None:
    with pytest.raises(
        RankError, match=r"model is a list; expected a torch\.nn\.Module"
    ):
        run(lambda: ol.SerialReducer([1]), on=on)


def converted_to_double() -> int:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    reducer = ol.SerialReducer(model)
    model.double()
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    reducer.wait()
    return len(reducer.plan)


@everywhere
def test_the_serial_reducer_sends_everything_at_once_in_any_dtype(on: On) -> None:
    assert run(converted_to_double, on=on) == [1] * on.ranks


def test_a_reducer_without_a_process_group_says_how_to_get_one() -> None:
    with pytest.raises(ValueError, match=r"ol\.run\(\.\.\.\) or under torchrun"):
        BucketedReducer(nn.Linear(2, 2))


def test_reducers_of_training_are_the_three_of_the_package() -> None:
    assert {"serial", "hooks", "bucketed"} <= set(training.REDUCERS)
