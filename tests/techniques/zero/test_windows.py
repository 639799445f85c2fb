"""What reaches a unit past its hooks trains as in one process, or is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import overlaplab as ol
from overlaplab.models.toy_nets import WIDTH, random_batch
from overlaplab.techniques.zero import Zero3


class Block(nn.Module):
    """Its output is a sum, whose backward saves nothing."""

    skipped = False

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x if self.skipped else x + self.two(torch.tanh(self.one(x)))


class Net(nn.Module):
    block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(type(self).block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out.square().mean()


def skips(*which: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net: Any = Net()
        for number in which:
            net.blocks[number].skipped = True
        return net

    return make


class Segment(Net):
    def forward(self, x: Tensor) -> Tensor:
        inside: Any = checkpoint(self.body, x, use_reentrant=False)
        out: Tensor = self.head(inside)
        return out.square().mean()


class PassesOn(Block):
    def forward(self, x: Tensor) -> Any:
        x, more = x
        return super().forward(x) + more, more


class Shared(Net):
    """A layer's output goes through every block unchanged."""

    block = PassesOn

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, more = self.body((x, self.before(x)))
        out: Tensor = self.head(x)
        return out.square().mean() + more.square().mean()


def normed() -> nn.Module:
    """Its weights are made in a hook of its own, before the forward."""
    net: Any = Net()
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    net.blocks = nn.ModuleList(nn.utils.spectral_norm(layer) for layer in layers)
    return net


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "a block that returns its input": skips(1),
    "the last block returns its input": skips(2),
    "a segment that ends in a unit": Segment,
    "a tensor that blocks pass on": Shared,
    "a hook that computes the weight": normed,
}


def make(name: str) -> Any:
    torch.manual_seed(4)
    return RIGHT[name]().double()


def batch(rank: int, step: int) -> Tensor:
    return random_batch(rank, step, WIDTH).double()


def train(name: str, prefetch: int) -> dict[str, Any]:
    model = make(name)
    zero = Zero3(model, prefetch=prefetch)
    optimizer = torch.optim.SGD(zero.shards(), lr=0.3)
    for step in range(3):
        model(batch(dist.get_rank(), step)).backward()
        zero.wait()
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state_dict()


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("name", RIGHT)
def test_what_units_return_does_not_matter(name: str, prefetch: int) -> None:
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.cat([batch(rank, step) for rank in range(2)])).backward()
        optimizer.step()
    run = ol.run(train, name, prefetch)
    assert run.warnings == ()
    for state in run.values:
        for key, want in model.state_dict().items():
            torch.testing.assert_close(state[key], want)


class Stores(Block):
    """A penalty that no output has; it is made after the output, with the weights."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.penalty = self.one(self.two(x)).square().mean()
        return out


class OfStores(Net):
    block = Stores


class Hidden:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Hides(Block):
    hiding = True

    def forward(self, x: Any) -> Any:
        out = super().forward(x.x if isinstance(x, Hidden) else x)
        return Hidden(out) if self.hiding else out


class OfHides(Net):
    block = Hides

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(self.before(x))
        out = self.head(out.x if isinstance(out, Hidden) else out)
        return out.square().mean()


def sharded(net: Callable[[], nn.Module] = Net, **settings: Any) -> Any:
    torch.manual_seed(1)
    model = net().double()
    return model, Zero3(model, **settings), batch(dist.get_rank(), 0)


def penalty_in_an_attribute() -> None:
    model, _, x = sharded(OfStores)
    (model(x) + sum(block.penalty for block in model.blocks)).backward()


def penalty_over_parameters() -> None:
    model, _, x = sharded()
    (model(x) + sum(p.square().sum() for p in model.parameters())).backward()


def penalty_with_its_own_backward() -> None:
    model, _, x = sharded()
    model(x).backward()
    sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]


def hides_from_frozen_blocks() -> None:
    def frozen() -> nn.Module:
        net = OfHides()
        net.blocks.requires_grad_(False)
        return net

    model, _, x = sharded(frozen)
    model(x).backward()


def hides_later_and_has_an_unused_unit() -> None:
    class Unused(OfHides):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(WIDTH, WIDTH)

    model, zero, x = sharded(Unused)
    for block in model.blocks:
        block.hiding = False
    model(x).backward()
    zero.wait()
    for block in model.blocks:
        block.hiding = True
    model(x).backward()
    zero.wait()


def optimizer_over_the_model() -> None:
    model, zero, x = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).backward()
    zero.wait()
    optimizer.step()


def clamps_parameters() -> None:
    model, zero, x = sharded()
    model(x).backward()
    zero.wait()
    with torch.no_grad():
        model.blocks[1].one.weight.clamp_(-0.1, 0.1)
    model(x)


def writes_in_its_forward() -> None:
    class Writes(Block):
        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                self.one.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    class OfWrites(Net):
        block = Writes

    model, zero, x = sharded(OfWrites)
    model(x).backward()
    zero.wait()


def embedding_with_a_norm() -> None:
    Zero3(nn.Sequential(nn.Embedding(9, 3, max_norm=1.0), nn.Linear(3, 3)))


def clip_before_wait() -> None:
    model, zero, x = sharded()
    model(x).backward()
    zero.clip_grad_norm_(1.0)


def old_graph_of_the_rest() -> None:
    model, zero, x = sharded(units=[])
    loss = model(x)
    loss.backward(retain_graph=True)
    zero.wait()
    loss.backward()


def copy_the_model() -> None:
    copy.deepcopy(sharded()[0])


def copy_a_layer() -> None:
    copy.deepcopy(sharded()[0].head)


def pickle_the_model() -> None:
    pickle.dumps(sharded()[0])


def pickle_a_layer() -> None:
    pickle.dumps(sharded()[0].blocks[0].one)


WRONG: dict[Callable[[], None], str] = {
    penalty_in_an_attribute: "unit blocks.2 would begin without its weights",
    penalty_over_parameters: "is used outside the forward of its unit head",
    penalty_with_its_own_backward: "is used outside the forward of its unit head",
    hides_from_frozen_blocks: "unit blocks.2 would begin without its weights",
    hides_later_and_has_an_unused_unit: "got gradients without its weights",
    optimizer_over_the_model: "Build it over what does: SGD(zero.shards())",
    clamps_parameters: "parameter blocks.1.one.weight was written in place",
    writes_in_its_forward: "parameter blocks.0.one.weight was written in place",
    embedding_with_a_norm: "module 0 has max_norm=1.0",
    clip_before_wait: "zero.clip_grad_norm_() before zero.wait()",
    old_graph_of_the_rest: "reached unit (rest) in a graph of step 0",
    copy_the_model: "a sharded model cannot be copied or pickled",
    copy_a_layer: "a sharded model cannot be copied or pickled",
    pickle_the_model: "a sharded model cannot be copied or pickled",
    pickle_a_layer: "a sharded model cannot be copied or pickled",
}


@pytest.mark.parametrize("wrong", WRONG, ids=lambda fn: fn.__name__)
def test_what_would_be_silently_wrong_is_refused(wrong: Callable[[], None]) -> None:
    with pytest.raises(ol.OverlaplabError) as caught:
        ol.run(wrong)
    assert WRONG[wrong] in str(caught.value)
