"""How often each byte of a parameter is updated, whoever the optimizer is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

import overlaplab as ol
from overlaplab.grading import fixtures, laws
from tests.grading import reducers

WORLD_SIZES = (1, 2, 3, 4)
FIXTURE = fixtures.clean_fixture(num_layers=3, width=7, batch=4)
NAMES = [f"layers.{i}.weight" for i in range(3)]
SIZE = 7 * 7 * 4


def trained(make_optimizer, make_reducer=ol.BucketedReducer, **settings):
    settings = {"steps": 2, "world_size": 2, "fixture": FIXTURE, **settings}
    fixture = settings.pop("fixture")
    return fixtures.train(
        fixture, make_reducer, make_optimizer=make_optimizer, **settings
    ).evidence


def counts(evidence) -> set[tuple[int, int]]:
    """(bytes, times) of every parameter, step and rank."""
    return {(u.bytes, u.times) for u in evidence.updates}


class Own:
    """p -= lr * g in one of the ways to write it, by a learner's own class."""

    def __init__(self, write):
        self.write = write

    def __call__(self, model, reducer):
        self.parameters = list(model.parameters())
        return self

    @torch.no_grad()
    def step(self):
        for p in self.parameters:
            self.write(p)


def minus(p):
    p -= 0.1 * p.grad


def of_data(p):
    p.data -= 0.1 * p.grad.data


def added(p):
    p.add_(p.grad, alpha=-0.1)


def out_of_place(p):
    p.copy_(p - 0.1 * p.grad)


def into_itself(p):
    torch.sub(p, p.grad, alpha=0.1, out=p)


def decayed(p):
    p.mul_(0.99)
    p.grad.add_(p, alpha=0.01)
    p.sub_(p.grad + 0.01 * p)


@pytest.mark.parametrize(
    ("write", "world_size"),
    [
        *((minus, world_size) for world_size in WORLD_SIZES),
        *((write, 2) for write in (of_data, added, out_of_place, into_itself, decayed)),
    ],
)
def test_an_optimizer_of_one_s_own_updates_every_byte_once(write, world_size):
    evidence = trained(Own(write), world_size=world_size)
    assert counts(evidence) == {(SIZE, 1)}
    assert len(evidence.updates) == world_size * 2 * len(NAMES)
    assert laws.updates_law(evidence) == []


ADAM = {"lr": 0.1, "weight_decay": 0.1}
TORCH = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "sgd_foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adamw_loop": lambda p: torch.optim.AdamW(p, **ADAM, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, **ADAM, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, **ADAM, fused=True),
    "adam_l2": lambda p: torch.optim.Adam(p, **ADAM, foreach=True, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}


@pytest.mark.parametrize("name", TORCH)
def test_torch_s_optimizers_update_every_byte_once(name):
    def make(model, reducer):
        return TORCH[name](model.parameters())

    assert counts(trained(make)) == {(SIZE, 1)}


class Twice:
    def __call__(self, model, reducer):
        self.inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        return self

    def step(self):
        self.inner.step()
        self.inner.step()


def test_a_step_that_is_made_twice_is_told():
    first, *_ = laws.updates_law(trained(Twice()))
    assert first.message == "in step 1 rank 0 updated layers.0.weight 2 times"


class ByHand:
    """ZeRO-1 by hand: a rank updates its part of a flat copy; a gather spreads it."""

    def __init__(self, update):
        self.update = update

    def __call__(self, model, reducer):
        self.parameters = list(model.parameters())
        size, rank = dist.get_world_size(), dist.get_rank()
        flat = torch.cat([p.detach().flatten() for p in self.parameters])
        self.full = torch.zeros(-(-len(flat) // size) * size)
        self.full[: len(flat)] = flat
        part = len(self.full) // size
        self.own = slice(rank * part, (rank + 1) * part)
        self.shard = self.full[self.own].clone()
        return self

    @torch.no_grad()
    def step(self):
        gradient = torch.empty_like(self.full)
        flat = torch.cat([p.grad.flatten() for p in self.parameters])
        gradient[: len(flat)].copy_(flat)
        gradient[len(flat) :].zero_()  # the padding
        self.update(self.shard, gradient[self.own])
        dist.all_gather_into_tensor(self.full, self.shard)
        at = 0
        for p in self.parameters:
            p.copy_(self.full[at : at + p.numel()].view_as(p))
            at += p.numel()


def in_place(shard, gradient):
    shard.sub_(gradient, alpha=0.1)


def replaced(shard, gradient):
    shard.copy_(shard - 0.1 * gradient)


def with_zero3(model, zero):
    class Stepping(torch.optim.AdamW):
        def step(self):
            super().step()
            self.zero_grad()

    return Stepping(zero.shards())


def redundancy(model, reducer):
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)


SHARDED = {
    "by_hand": (ByHand(in_place), ol.BucketedReducer),
    "by_hand_replaced": (ByHand(replaced), ol.BucketedReducer),
    "zero3": (with_zero3, ol.Zero3),
    "zero3_bfloat16": (
        with_zero3,
        lambda m: ol.Zero3(m, mixed_precision=torch.bfloat16),
    ),
    "zero_redundancy": (redundancy, ol.BucketedReducer),
}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_over_ranks_each_byte_is_updated_by_one(name, world_size):
    make_optimizer, make_reducer = SHARDED[name]
    fixture = FIXTURE
    if name == "zero3_bfloat16":
        fixture = fixtures.Fixture("half", fixture.make_model, half_batch)
    evidence = trained(
        make_optimizer, make_reducer, world_size=world_size, fixture=fixture
    )
    for step in (1, 2):
        for parameter in NAMES:
            own = [u for u in evidence.updates if (u.step, u.name) == (step, parameter)]
            assert sum(u.bytes for u in own) == SIZE
            assert {u.times for u in own if u.bytes} == {1}
    assert laws.updates_law(evidence, sharded=True, names=NAMES) == []
    if world_size > 1:
        first, *_ = laws.updates_law(evidence)
        assert first.expected == "each byte of it is updated by every rank"


def half_batch(rank, step):
    return tuple(x.bfloat16() for x in FIXTURE.make_batch(rank, step))


def test_a_sharded_optimizer_that_shards_nothing_is_told():
    (first, *_) = laws.updates_law(trained(Own(minus)), sharded=True)
    assert first.message == (
        "in step 1 the ranks updated 196, 196 bytes of layers.0.weight, which has 196"
    )
    assert first.expected == "each byte of it is updated by one rank"


def from_rank_0(p):
    new = p - 0.1 * p.grad
    dist.broadcast(new, 0)
    p.copy_(new)


def gathered(p):
    dist.all_gather_into_tensor(p.view(-1), (p - 0.1 * p.grad).view(-1))


def gathered_beside(p):
    new = torch.empty_like(p)
    dist.all_gather_into_tensor(new.view(-1), (p - 0.1 * p.grad).view(-1))
    p.copy_(new)


@pytest.mark.parametrize("write", [gathered, gathered_beside])
def test_a_gather_is_no_update(write):
    """Those of the ranks that made the new values are not seen, as the module says."""
    assert counts(trained(Own(write), world_size=1)) == {(0, 0)}


def test_new_weights_that_come_from_another_rank_are_no_update_of_this_one():
    evidence = trained(Own(from_rank_0))
    assert {(u.rank, u.bytes) for u in evidence.updates} == {(0, SIZE), (1, 0)}


class OneBuffer:
    """Spreads the weights in the buffer that later carries the gradients."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.flat = torch.cat([p.detach().flatten() for p in self.parameters])
        dist.broadcast(self.flat, 0)
        self.copy(lambda p, piece: p.detach().copy_(piece))

    def copy(self, move):
        pieces = self.flat.split([p.numel() for p in self.parameters])
        for p, piece in zip(self.parameters, pieces, strict=True):
            move(p, piece.view_as(p))

    def wait(self):
        self.copy(lambda p, piece: piece.copy_(p.grad / 2))
        self.copy(lambda p, piece: piece.add_(p.grad / 2))
        self.flat.div_(dist.get_world_size())
        dist.all_reduce(self.flat)
        self.copy(lambda p, piece: p.grad.copy_(piece))


def test_a_buffer_that_held_weights_and_now_gradients_is_no_parameter():
    assert counts(trained(fixtures.make_sgd, OneBuffer)) == {(SIZE, 1)}


def test_a_parameter_that_gets_the_values_of_another_stays_itself():
    class Equal(Own):
        def step(self):
            with torch.no_grad():
                self.parameters[0].copy_(self.parameters[1])
            super().step()

    assert counts(trained(Equal(minus))) == {(SIZE, 1)}


class Master:
    """Half a model's precision: one copy of each parameter is updated instead."""

    def __call__(self, model, reducer):
        self.pairs = [(p, p.detach().double()) for p in model.parameters()]
        return self

    @torch.no_grad()
    def step(self):
        for p, master in self.pairs:
            master -= 0.1 * p.grad
            p.copy_(master)


def test_a_master_copy_is_the_parameter_that_it_was_made_of():
    assert counts(trained(Master())) == {(SIZE, 1)}


class Average:
    """An average of the weights is kept beside them, and no update."""

    def __call__(self, model, reducer):
        self.pairs = [(p, p.detach().clone()) for p in model.parameters()]
        return self

    @torch.no_grad()
    def step(self):
        for p, mean in self.pairs:
            minus(p)
            mean.lerp_(p, 0.1)


def test_an_average_of_weights_is_no_update():
    assert counts(trained(Average())) == {(SIZE, 1)}


class InTheHook:
    """The optimizer runs in the backward pass, as each gradient arrives."""

    def __init__(self, model):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.hook)

    @torch.no_grad()
    def hook(self, p):
        dist.all_reduce(p.grad)
        p.sub_(p.grad, alpha=0.1)

    def wait(self): ...

    def step(self): ...


def test_an_update_in_the_backward_pass_is_one():
    assert counts(trained(lambda model, own: own, InTheHook)) == {(SIZE, 1)}


def test_an_optimizer_that_forgets_a_parameter_is_told():
    def make(model, reducer):
        return torch.optim.SGD(list(model.parameters())[1:], 0.1)

    (one, two) = laws.updates_law(trained(make))
    assert (one.step, two.step) == (1, 2)
    assert "the ranks updated 0, 0 bytes of layers.0.weight" in one.message


@pytest.mark.parametrize("name", ["tied", "frozen", "unused", "mixed_dtypes"])
def test_the_law_asks_nothing_of_what_has_no_gradient(name):
    evidence = trained(
        fixtures.make_sgd, reducers.Right, fixture=fixtures.toy_fixture(name)
    )
    assert laws.updates_law(evidence) == []
    assert any(u.times for u in evidence.updates)
