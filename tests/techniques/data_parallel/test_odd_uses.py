"""What users try beside a plain loop: it works, or one sentence says what to do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from overlaplab.errors import MismatchError
from overlaplab.techniques.data_parallel import AllReduce, BFloat16Wire, BucketedReducer
from tests.ranks import On, everywhere, values_on
from tests.techniques.data_parallel.misuse import Buffers, average, batch, mean, weight
from tests.techniques.data_parallel.training import REDUCERS

each_reducer = pytest.mark.parametrize("reducer", REDUCERS)


def told(what: Callable[[], Any]) -> str:
    with pytest.raises((TypeError, ValueError, RuntimeError, MismatchError)) as error:
        what()
    return str(error.value)


def copies(reducer: str) -> list[str]:
    """Of a reducer, and of a model that has it as an attribute."""
    model = weight()
    model.reducer = REDUCERS[reducer](model)
    return [
        told(partial(how, what))
        for how in (copy.deepcopy, pickle.dumps)
        for what in (model, model.reducer)
    ]


@everywhere
@each_reducer
def test_a_copy_of_a_reducer_is_refused_with_what_to_copy(on: On, reducer: str) -> None:
    for texts in values_on(on, copies, reducer):
        (text,) = set(texts)
        assert "Reducer cannot be copied or pickled" in text
        assert "Copy the model without it, and build another reducer" in text


def ends_the_step_in_a_hook(how: str, reducer: str) -> tuple[str, list[float]]:
    """And goes on rightly after it has been told."""
    model = nn.Sequential(weight(), weight())
    reduces = REDUCERS[reducer](model)
    hook = model[1].weight.register_post_accumulate_grad_hook(
        lambda _: getattr(reduces, how)()
    )
    text = told(lambda: model(batch(0)).sum().backward())
    hook.remove()
    reduces.abandon()
    model.zero_grad()
    model(batch(1)).sum().backward()
    reduces.wait()
    return text, average(model)


@everywhere
@each_reducer
@pytest.mark.parametrize("how", ["wait", "abandon"])
def test_a_step_that_is_ended_inside_its_backward_is_refused(
    on: On, how: str, reducer: str
) -> None:
    found = values_on(on, ends_the_step_in_a_hook, how, reducer)

    says = (
        f"reducer.{how}() inside the backward pass, in a hook: gradients may be still "
        "to come. Call it after loss.backward() has returned."
    )
    assert found == ((says, [mean(on.ranks, 1)] * 2),) * on.ranks


def fails_before_most_buckets(most: int | None) -> list[float]:
    """On rank 0, whose buckets the others' launches wait for if few are in flight."""
    model = nn.Sequential(*(weight() for _ in range(4)))
    reduces = BucketedReducer(model, bucket_mib=1e-6, max_in_flight=most)
    loss = model(batch(0)).sum()
    if dist.get_rank() == 0:
        model[2].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        model[2].weight._backward_hooks.clear()
    else:
        loss.backward()
    reduces.abandon()
    model.zero_grad()
    model(batch(1)).sum().backward()
    reduces.wait()
    return average(model)


@everywhere
@pytest.mark.parametrize("most", [1, 2, None])
def test_a_rank_that_fails_early_meets_the_others_when_all_abandon(
    on: On, most: int | None
) -> None:
    found = values_on(on, fails_before_most_buckets, most)
    assert found == ([mean(on.ranks, 1)] * 4,) * on.ranks


def a_sparse_gradient(reducer: str) -> tuple[str, list[float]]:
    """Of a function, which no module told of; then a dense step."""
    model = nn.Linear(1, 3, bias=False)
    reduces = REDUCERS[reducer](model)

    def step(sparse: bool) -> None:
        rows = torch.tensor([0, 1 + dist.get_rank() % 2])
        nn.functional.embedding(rows, model.weight, sparse=sparse).sum().backward()
        reduces.wait()

    text = told(partial(step, True))
    reduces.abandon()
    model.zero_grad()
    step(False)
    assert model.weight.grad is not None
    return text, model.weight.grad.flatten().tolist()


@everywhere
@each_reducer
def test_a_sparse_gradient_is_refused_by_its_parameters_name(
    on: On, reducer: str
) -> None:
    odd = on.ranks // 2 / on.ranks
    right = pytest.approx([1, 1 - odd, odd])
    for text, grad in values_on(on, a_sparse_gradient, reducer):
        assert text.startswith("the gradient of weight has layout torch.sparse_coo")
        assert "Use sparse=False" in text
        assert grad == right


def freezes_behind_the_forward() -> tuple[str, list[float]]:
    model = nn.Sequential(weight(), weight())
    reducer = BucketedReducer(model, bucket_mib=1e-6)
    loss = model(batch(0)).sum()
    model[0].requires_grad_(False)
    text = told(loss.backward)
    model[0].requires_grad_(True)
    reducer.abandon()
    model.zero_grad()
    model(batch(1)).sum().backward()
    reducer.wait()
    return text, average(model)


@everywhere
def test_what_was_frozen_behind_its_forward_is_named(on: On) -> None:
    for text, averages in values_on(on, freezes_behind_the_forward):
        assert text.startswith("0.weight was frozen between a forward and its backward")
        assert averages == [mean(on.ranks, 1)] * 2


def joins_with_an_update_that_is_none(reducer: str) -> str:
    model = weight()
    join = REDUCERS[reducer](model).join(update=5)  # type: ignore[attr-defined]
    return told(join.__enter__)


@everywhere
@each_reducer
def test_an_update_that_cannot_be_called_is_refused_on_every_rank(
    on: On, reducer: str
) -> None:
    (text,) = set(values_on(on, joins_with_an_update_that_is_none, reducer))
    assert text.startswith("update is 5; expected a function without arguments")


def with_a_buffer(buffer: torch.Tensor) -> None:
    BucketedReducer(Buffers(buffer))


def nested() -> None:
    with_a_buffer(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


def quantized() -> None:
    with_a_buffer(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))


def sharded() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model)
    BucketedReducer(model)


def ddp_inside() -> None:
    inner = nn.parallel.DistributedDataParallel(weight())
    BucketedReducer(nn.Sequential(weight(), inner))


REFUSED: dict[str, Callable[[], object]] = {
    "parameter 0.weight is a DTensor": sharded,
    "module 1 is wrapped in DistributedDataParallel": ddp_inside,
    "buffer table is nested": nested,
    "buffer table is quantized": quantized,
    "bucket_mib is 1e+308; expected a finite": lambda: BucketedReducer(
        weight(), bucket_mib=1e308
    ),
    "process_group is None; expected a ProcessGroup": lambda: AllReduce(None),  # type: ignore[arg-type]
    "process_group is 'x'; expected a ProcessGroup": lambda: BFloat16Wire("x"),  # type: ignore[arg-type]
    "does not contain this rank": lambda: AllReduce(dist.GroupMember.NON_GROUP_MEMBER),  # type: ignore[arg-type]
}


def all_refused() -> list[str]:
    return [told(what) for what in REFUSED.values()]


@everywhere
def test_what_cannot_be_is_refused_by_name(on: On) -> None:
    for texts in values_on(on, all_refused):
        for text, says in zip(texts, REFUSED, strict=True):
            assert says in text


def scripted() -> list[float]:
    model = torch.jit.script(nn.Sequential(weight(), nn.Sequential(weight())))
    reducer = BucketedReducer(model, bucket_mib=np.int64(1))  # type: ignore[arg-type]
    for step in range(2):
        model.zero_grad()
        model(batch(step)).sum().backward()
        reducer.wait()
    return average(model)


@everywhere
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_scripted_module_is_averaged(on: On) -> None:
    assert values_on(on, scripted) == ([mean(on.ranks, 1)] * 2,) * on.ranks


BUFFERS = {
    "shape": lambda: torch.ones(2 + dist.get_rank()),
    "dtype": lambda: torch.ones(2, dtype=torch.int32 if dist.get_rank() else None),
    "missing": lambda: torch.ones(0 if dist.get_rank() else 2),
}


def buffers_that_differ(how: str, later: bool) -> str:
    """At construction, or by when they are broadcast."""
    model = Buffers(torch.ones(2))
    if not later:
        model.table = BUFFERS[how]()
        return told(lambda: BucketedReducer(model))
    reducer = BucketedReducer(model)
    model.table = BUFFERS[how]()
    return told(reducer.broadcast_buffers)


@everywhere
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("how", BUFFERS)
def test_buffers_that_differ_between_ranks_are_named_on_every_rank(
    on: On, how: str, later: bool
) -> None:
    """Else gloo moves bytes from one dtype to another, or a rank waits for ever."""
    (text,) = set(values_on(on, buffers_that_differ, how, later))

    assert "differ in their buffers:\n  rank 0: buffer table (2,) torch.float32" in text
    assert text.endswith("Register the same buffers on every rank.")


def uses_a_destroyed_group(how: str) -> str:
    reducer = BucketedReducer(weight())
    dist.destroy_process_group()
    dist.init_process_group()
    calls = {"join": reducer.join().__enter__, "buffers": reducer.broadcast_buffers}
    return told(calls[how])


@everywhere
@pytest.mark.parametrize("how", ["join", "buffers"])
def test_what_needs_a_group_says_that_it_was_destroyed(on: On, how: str) -> None:
    (text,) = set(values_on(on, uses_a_destroyed_group, how))
    assert text.startswith("the reducer's process group has been destroyed")
