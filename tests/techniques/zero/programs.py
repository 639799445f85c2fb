"""Field cases of ZeRO and FSDP: a model, and what one step of it runs.

A step gives its losses one after another: each is made when it is asked for, and its
backward runs before the next is (or at once, where it gives one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overlaplab.models.toy_nets import WIDTH, random_batch
from overlaplab.techniques.zero import Zero3

NUM_STEPS = 4


class Blocks(nn.Module):
    """Four equal layers and a head; `run(x, step)` says which compute."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 3)
        self.order = list(range(num_layers))
        self.checkpointed: bool | None = None  # use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()  # what reentrant checkpointing asks for
        for index in self.order:
            layer = self.layers[index]
            if self.checkpointed is None:
                x = torch.tanh(layer(x))
            else:
                x = torch.tanh(
                    checkpoint(layer, x, use_reentrant=self.checkpointed)  # type: ignore[arg-type]
                )
        out: Tensor = self.head(x)
        return out.square().mean()


class TwoAtOnce(Blocks):
    """Checkpoints its four layers as one segment: it computes all of them again."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        def segment(x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

        x = x.clone().requires_grad_()
        inside: Any = checkpoint(segment, x, use_reentrant=self.reentrant)
        out: Tensor = self.head(inside)
        return out.square().mean()


class Inside(nn.Module):
    """A block that checkpoints its own inside."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            return torch.tanh(self.two(torch.tanh(self.one(x))))

        out: Tensor = checkpoint(body, x, use_reentrant=False)  # type: ignore[assignment]
        return x + out


class AsksForAGradient(nn.Module):
    """Its forward goes backward to its input, and then computes on."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.one(x))
        (slope,) = torch.autograd.grad(hidden.sum(), x, retain_graph=True)
        out: Tensor = torch.tanh(self.two(hidden + slope))
        return out


class SeveralOutputs(nn.Module):
    """Returns a dict; its second entry reaches the loss only at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": torch.tanh(self.one(x)), "more": [self.two(x).square().mean()]}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SeveralOutputs() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for block in self.blocks:
            found = block(x)
            x, total = found["x"], total + found["more"][0]
        return x.square().mean() + total


class SharedRows(nn.Module):
    """An embedding and a head of one weight: 7 rows, no multiple of a world size."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, :3].abs() * 3).long().clamp(max=6)
        hidden = torch.tanh(self.middle(self.embedding(rows)))
        out: Tensor = self.head(hidden)
        return out.square().mean()


class Uneven(nn.Module):
    """D07: shapes (1,), (2, 3), (20, 2), most ranks without a piece of the small."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))
        self.two = nn.Parameter(torch.linspace(-1, 1, 6).reshape(2, 3))
        self.many = nn.Parameter(torch.linspace(-1, 1, 40).reshape(20, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = (x[:, :2] @ self.two).sum(1) * self.one
        return (y[:, None, None] * self.many).square().mean()


Losses = Callable[[nn.Module, Tensor, int], Iterator[Tensor]]


def one_loss(model: Any, x: Tensor, step: int) -> Iterator[Tensor]:
    yield model(x)


def a_loss_and_another(model: Any, x: Tensor, step: int) -> Iterator[Tensor]:
    yield model(x)
    yield 2 * model(0.5 * x)


def two_forwards_first(model: Any, x: Tensor, step: int) -> Iterator[Tensor]:
    one, two = model(x), 2 * model(0.5 * x)
    yield one
    yield two


def two_forwards_one_loss(model: Any, x: Tensor, step: int) -> Iterator[Tensor]:
    yield model(x) + 2 * model(0.5 * x)


def evaluates_before_its_backward(model: Any, x: Tensor, step: int) -> Iterator[Tensor]:
    loss = model(x)
    with torch.no_grad():
        model(2 * x)
    yield loss


def evaluates_between_steps(model: Any, x: Tensor, step: int) -> Iterator[Tensor]:
    with torch.no_grad():
        before = model(x)
        assert torch.equal(before, model(x))
    loss = model(x)
    assert torch.equal(before, loss.detach())
    yield loss


def another_order_each_step(model: Any, x: Tensor, step: int) -> Iterator[Tensor]:
    model.order = ([0, 1, 2, 3], [3, 1, 0, 2], [0, 2], [2, 0, 1, 3])[step % 4]
    yield model(x)


def a_layer_left_out_once(model: Any, x: Tensor, step: int) -> Iterator[Tensor]:
    model.order = [0, 2, 3] if step == 2 else [0, 1, 2, 3]
    yield model(x)


def freezes_in_the_middle(model: Any, x: Tensor, step: int) -> Iterator[Tensor]:
    """A06 for shards: layer 1 rests in steps 1 and 2."""
    model.layers[1].requires_grad_(step not in (1, 2))
    yield model(x)


def ordered(*order: int, freeze: tuple[int, ...] = (), **settings: Any) -> Any:
    def make() -> nn.Module:
        model = Blocks()
        model.order = list(order)
        for index in freeze:
            model.layers[index].requires_grad_(False)
        for name, value in settings.items():
            setattr(model, name, value)
        return model

    return make


def half_frozen() -> nn.Module:
    """D09: frozen and trainable weights in each unit, one frozen unit in the middle."""
    model = Blocks()
    for layer in model.layers:
        layer.weight.requires_grad_(False)
    model.layers[1].requires_grad_(False)
    return model


class InARow(nn.Module):
    """Three blocks, each of which gets what the one before returned."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(make(), make(), make())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x.clone().requires_grad_())
        return out.square().mean()


def reentrant_segment() -> nn.Module:
    model = TwoAtOnce()
    model.reentrant = True
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Losses]] = {
    "plain": (Blocks, one_loss),
    "tied in two units": (SharedRows, one_loss),
    "a block twice": (ordered(0, 1, 1, 2, 0, 3), one_loss),
    "a block twice, frozen": (ordered(0, 1, 1, 2, 1, 3, freeze=(1,)), one_loss),
    "a block twice, checkpointed": (
        ordered(0, 1, 1, 2, 0, 3, checkpointed=False),
        one_loss,
    ),
    "every block checkpointed, reentrant": (
        ordered(0, 1, 2, 3, checkpointed=True),
        one_loss,
    ),
    "checkpointed inside": (partial(InARow, Inside), one_loss),
    "one segment, checkpointed": (TwoAtOnce, one_loss),
    "one segment, reentrant": (reentrant_segment, one_loss),
    "two forwards, one loss": (Blocks, two_forwards_one_loss),
    "two forwards, two backwards": (Blocks, two_forwards_first),
    "two times forward and backward": (Blocks, a_loss_and_another),
    "evaluation before a backward": (Blocks, evaluates_before_its_backward),
    "evaluation between steps": (Blocks, evaluates_between_steps),
    "another order each step": (Blocks, another_order_each_step),
    "a branch not taken once": (Blocks, a_layer_left_out_once),
    "half frozen": (half_frozen, one_loss),
    "freezing in the middle": (Blocks, freezes_in_the_middle),
    "several outputs": (Nested, one_loss),
    "empty shards": (Uneven, one_loss),
}


def units_of(case: str, model: Any) -> Any:
    """Given where they should be another than those found."""
    if case == "tied in two units":
        return [model.embedding, model.middle, model.head]
    return None


def make_optimizer(
    parameters: dict[str, nn.Parameter],
) -> torch.optim.Optimizer:
    """D08: two groups that take parameters of one shape in turn."""
    rows = list(parameters.values())
    groups = [
        {"params": rows[::2], "lr": 0.05},
        {"params": rows[1::2], "lr": 0.01, "weight_decay": 0.3},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]])


def train_case(
    case: str, prefetch: int, set_to_none: bool = True, num_steps: int = NUM_STEPS
) -> dict[str, Any]:
    make, losses = CASES[case]
    torch.manual_seed(3 + dist.get_rank())
    model = make()
    zero = Zero3(model, units=units_of(case, model), prefetch=prefetch)
    optimizer = make_optimizer(dict(zero.named_shards()))
    for step in range(num_steps):
        for loss in losses(model, random_batch(dist.get_rank(), step, WIDTH), step):
            loss.backward()
        zero.wait()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return zero.full_state_dict()


def train_cases(names: tuple[str, ...], prefetch: int) -> dict[str, Any]:
    return {name: train_case(name, prefetch, prefetch != 0) for name in names}


def train_case_alone(
    case: str, world_size: int, set_to_none: bool = True
) -> dict[str, Any]:
    make, losses = CASES[case]
    torch.manual_seed(3)
    model = make()
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(named)
    for step in range(NUM_STEPS):
        batches = [random_batch(rank, step, WIDTH) for rank in range(world_size)]
        for loss in losses(model, torch.cat(batches), step):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    return model.state_dict()


def half_frozen_facts() -> tuple[set[str], set[str], dict[str, bool]]:
    """Names that have a shard, those with a state, and what trains after `remove`."""
    model = half_frozen()
    zero = Zero3(model)
    named = dict(zero.named_shards())
    optimizer = torch.optim.AdamW(named.values())
    model(random_batch(dist.get_rank(), 0, WIDTH)).backward()
    zero.wait()
    optimizer.step()
    with_states = {name for name, piece in named.items() if piece in optimizer.state}
    zero.remove()
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    return set(named), with_states, flags
