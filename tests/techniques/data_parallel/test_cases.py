"""Field cases: what reducers get wrong, each on both clusters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import overlaplab as ol
from overlaplab.errors import MismatchError, RankError
from overlaplab.models.toy_nets import random_batch
from overlaplab.techniques.data_parallel import AllReduce, BucketedReducer
from tests.ranks import run_untimed
from tests.techniques.data_parallel import programs, training

CLUSTERS = ("virtual", "gloo")
on_both = pytest.mark.parametrize("cluster", CLUSTERS)


def run(
    fn: Callable[..., Any], *args: Any, cluster: str, world_size: int = 2
) -> list[Any]:
    found = run_untimed(fn, *args, cluster=cluster, world_size=world_size)
    assert found.warnings == ()
    return list(found.values)


def local_gradient(batch: torch.Tensor, model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(batch).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@on_both
@pytest.mark.parametrize("reducer", ["serial", "hooks", "bucketed"])
def test_a_parameter_that_no_rank_used_keeps_none(reducer: str, cluster: str) -> None:
    for seen in run(programs.presence_of_gradients, "unused", reducer, cluster=cluster):
        assert seen == {
            "a.weight": True,
            "a.bias": True,
            "b.weight": False,
            "b.bias": False,
        }


@on_both
@pytest.mark.parametrize("reducer", ["serial", "hooks", "bucketed"])
def test_a_parameter_used_on_rank_0_only_has_a_gradient_on_all(
    reducer: str, cluster: str
) -> None:
    for seen in run(programs.presence_of_gradients, "uneven", reducer, cluster=cluster):
        assert all(seen.values())


@on_both
def test_a_rank_without_a_backward_receives_the_others_averages(cluster: str) -> None:
    first, second = run(programs.no_backward_on_rank_0, cluster=cluster)
    for name, grad in first.items():
        assert grad is not None and grad.abs().sum() > 0
        assert torch.equal(grad, second[name])


@on_both
def test_two_backwards_on_one_graph_average_to_five(cluster: str) -> None:
    assert run(programs.two_backwards_on_one_graph, True, cluster=cluster) == [5, 5]


@on_both
def test_two_micro_batches_accumulate_and_average_to_five(cluster: str) -> None:
    assert run(programs.two_forwards_and_backwards, cluster=cluster) == [5, 5]


@on_both
def test_a_second_backward_without_a_wait_is_refused_by_name(cluster: str) -> None:
    with pytest.raises(RankError, match="weight got a second gradient in one step"):
        run(programs.two_backwards_on_one_graph, False, cluster=cluster)


@on_both
def test_create_graph_gives_the_average_too(cluster: str) -> None:
    # d/dw (w x)^2 = 2 w x^2: 6 on rank 0, 24 on rank 1.
    assert run(programs.create_graph, cluster=cluster) == [15, 15]


@on_both
def test_gradients_of_autograd_grad_stay_local_and_open_no_step(cluster: str) -> None:
    found = run(programs.gradients_of_autograd_grad, cluster=cluster)
    assert found == [(1.0, 1.5), (2.0, 1.5)]


@on_both
@pytest.mark.parametrize("reducer", ["serial", "bucketed", "one bucket"])
def test_what_is_frozen_in_mid_run_is_neither_sent_nor_written(
    reducer: str, cluster: str
) -> None:
    ranks = run(programs.freeze_and_unfreeze, reducer, cluster=cluster)
    for step in range(4):
        for name in ("b.weight", "b.bias"):
            assert torch.equal(ranks[0][step][name], ranks[1][step][name])
    for step in (1, 2):
        for rank in (0, 1):
            stale = ranks[rank][step]["a.weight"]
            assert torch.equal(stale, torch.full_like(stale, float(rank)))
    for step in (0, 3):
        assert torch.equal(ranks[0][step]["a.weight"], ranks[1][step]["a.weight"])


@on_both
def test_what_was_frozen_at_construction_may_train_later(cluster: str) -> None:
    first, second = run(
        programs.unfreeze_what_was_frozen_at_construction, cluster=cluster
    )
    for name, grad in first.items():
        assert torch.equal(grad, second[name])


@on_both
def test_gradients_of_any_stride_are_averaged_in_place(cluster: str) -> None:
    for seen in run(programs.strange_strides, cluster=cluster):
        assert seen["same"] and seen["bias is none"]
        assert torch.equal(seen["first"], 1.5 * torch.arange(24.0).reshape(4, 6).t())
        assert torch.equal(seen["second"], torch.full((4, 6), 1.5))
        expected = 1.5 * torch.arange(32.0).reshape(8, 4, 1, 1)
        assert torch.equal(seen["conv"], expected)


@on_both
def test_halves_accumulate_and_travel_in_another_dtype(cluster: str) -> None:
    first, second = run(programs.accumulated_in_other_dtype, cluster=cluster)
    torch.manual_seed(0)  # as rank 0
    model = programs.Two().bfloat16()
    for rank in range(
        2
    ):  # all four micro-batches in one process, without b in the first
        for step in range(2):
            model.use_b = step == 1
            model(random_batch(rank, step, programs.WIDTH).bfloat16()).backward()
    for name, parameter in model.named_parameters():
        assert first[name].dtype is torch.bfloat16
        assert torch.equal(first[name], second[name])
        assert parameter.grad is not None
        # 8 bits, and this one rounds after each addition.
        torch.testing.assert_close(
            first[name], parameter.grad / 2, rtol=0.02, atol=1e-3
        )


@on_both
def test_the_dtype_on_the_wire_decides_the_rounding(cluster: str) -> None:
    # 256 + 1 is 256 in bfloat16; 257 / 2 = 128.5 rounds to 128 on the way back.
    exact = torch.tensor(128.5).bfloat16().item()
    assert run(programs.reduce_exactly, torch.float32, cluster=cluster) == [exact] * 2


@on_both
def test_complex_gradients_are_averaged(cluster: str) -> None:
    for reduce_dtype in (None, torch.float64):  # a real one would lose half
        for grad in run(programs.complex_gradients, reduce_dtype, cluster=cluster):
            assert torch.equal(grad, torch.full((2, 2), 0.5 + 2.0j))


@on_both
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
    program: Callable[[], None], name: str, cluster: str
) -> None:
    with pytest.raises(RankError, match=f"parameter {name} is not the object"):
        run(program, cluster=cluster)


@on_both
def test_a_copy_of_the_model_has_no_reducer(cluster: str) -> None:
    for rank, (grad, copies) in enumerate(run(programs.copy_model, cluster=cluster)):
        assert grad == 1.5
        assert copies == [1.0 + rank] * 2


def test_a_second_reducer_on_a_parameter_is_refused_until_the_first_is_removed() -> (
    None
):
    assert run(programs.reducer_after_reducer, True, cluster="virtual") == [1.5, 1.5]
    with pytest.raises(RankError, match="weight has a reducer already"):
        run(programs.reducer_after_reducer, False, cluster="virtual")


@on_both
def test_models_that_differ_between_ranks_are_refused(cluster: str) -> None:
    with pytest.raises((RankError, MismatchError), match=r"weight \(5, 4\)"):
        run(programs.different_models, cluster=cluster)


@on_both
def test_a_model_converted_later_is_planned_anew(cluster: str) -> None:
    first, second = run(programs.convert_after_construction, cluster=cluster)
    for name, grad in first.items():
        assert grad.dtype is torch.float64
        assert torch.equal(grad, second[name])


@on_both
def test_empty_parameters_keep_their_shape_and_are_not_sent(cluster: str) -> None:
    expected = ((0, programs.WIDTH), False)
    assert run(programs.zero_elements_round_trip, cluster=cluster) == [expected] * 2


@on_both
def test_buckets_are_launched_in_one_order_whatever_order_gradients_have(
    cluster: str,
) -> None:
    first, second = run(programs.order_of_launches, "branches", cluster=cluster)
    assert first == second == ["b.bias", "b.weight", "a.bias", "a.weight"]


@on_both
def test_swapped_branches_do_not_swap_their_data(cluster: str) -> None:
    first, second = run(programs.branch_gradients, cluster=cluster)
    for name, grad in first.items():
        assert torch.equal(grad, second[name])
        assert not torch.equal(grad, first[name.replace("a.", "b.")]) or "b." in name


@on_both
def test_a_tied_weight_has_one_place_in_the_plan(cluster: str) -> None:
    launched = run(programs.order_of_launches, "tied", cluster=cluster)[0]
    assert launched == ["decode.bias", "encode.bias", "encode.weight"]


@on_both
def test_removed_hooks_leave_local_gradients(cluster: str) -> None:
    first, second = run(programs.removed, cluster=cluster)
    assert not torch.equal(first["a.weight"], second["a.weight"])


@on_both
def test_construction_gives_every_rank_the_values_of_rank_0(cluster: str) -> None:
    first, second = run(programs.broadcast_values, cluster=cluster)
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours, theirs)


@on_both
def test_an_evaluation_between_backward_and_wait_is_harmless(cluster: str) -> None:
    first, second = run(programs.evaluation_between, cluster=cluster)
    for name, grad in first.items():
        assert torch.equal(grad, second[name])


@on_both
def test_a_group_averages_over_its_own_ranks(cluster: str) -> None:
    found = run(programs.in_a_subgroup, cluster=cluster, world_size=3)
    assert found == [1.5, 1.5, 3.0]


# Refused at construction, with what to do.


def build(make_model: Callable[[], nn.Module], **settings: Any) -> None:
    BucketedReducer(make_model(), **settings)


def float8() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight = nn.Parameter(model[0].weight.to(torch.float8_e4m3fn))
    return model


def in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(2, 2)


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("make_model", "settings", "message"),
    [
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
    ],
)
@on_both
def test_bad_input_is_refused_at_construction(
    make_model: Callable[[], nn.Module],
    settings: dict[str, Any],
    message: str,
    cluster: str,
) -> None:
    with pytest.raises(RankError, match=message):
        run(lambda: build(make_model, **settings), cluster=cluster, world_size=1)


@on_both
def test_what_is_no_model_is_refused_by_the_serial_reducer_too(cluster: str) -> None:
    with pytest.raises(
        RankError, match=r"model is a list; expected a torch\.nn\.Module"
    ):
        run(lambda: ol.SerialReducer([1]), cluster=cluster, world_size=1)


def converted_to_double() -> int:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    reducer = ol.SerialReducer(model)
    model.double()
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    reducer.wait()
    return len(reducer.plan)


@on_both
def test_the_serial_reducer_sends_everything_at_once_in_any_dtype(cluster: str) -> None:
    assert run(converted_to_double, cluster=cluster) == [1, 1]


def test_a_reducer_without_a_process_group_says_how_to_get_one() -> None:
    with pytest.raises(ValueError, match=r"ol\.run\(\.\.\.\) or under torchrun"):
        BucketedReducer(nn.Linear(2, 2))


def test_reducers_of_training_are_the_three_of_the_package() -> None:
    assert {"serial", "hooks", "bucketed"} <= set(training.REDUCERS)
