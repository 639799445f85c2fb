"""What is saved by some ranks and loaded by others."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import overlaplab as ol
from overlaplab.techniques.zero import Zero3

NUM_ROWS, NUM_STEPS = 12, 3


class Block(nn.Module):
    """Weights of two orders of memory, a scalar, and a buffer that changes."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.back = nn.Conv2d(5, 3, 1)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen[1] += 2.0
        return x + self.gain * torch.tanh(self.back(torch.tanh(self.conv(x))))


class Net(nn.Module):
    """Blocks between tied ends; something frozen, something empty, an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.start = nn.Linear(4, 4)
        self.end = nn.Linear(4, 4, bias=False)
        self.end.weight = self.start.weight
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.told = {"note": "none", "count": torch.zeros(2)}

    def get_extra_state(self) -> Any:
        return self.told

    def set_extra_state(self, state: Any) -> None:
        self.told = state

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return (self.end(x) * self.frozen.mean()).square().mean()


def batch_of(step: int, rank: int, size: int) -> Tensor:
    """Its part of rows that do not depend on how many ranks there are."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(NUM_ROWS, 3, 4, 4, generator=generator)[rank::size]
    return rows.to(ol.device())


def make_optimizer(kind: str, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """`parameters` in two groups, so that both must be found again."""
    params = list(parameters)
    groups = [{"params": params[::2], "lr": 0.02}, {"params": params[1::2]}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return getattr(torch.optim, kind)(groups, lr=0.01)  # type: ignore[no-any-return]


def make(seed: int, kind: str) -> tuple[Net, Zero3, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net().to(ol.device())
    zero = Zero3(model)
    return model, zero, make_optimizer(kind, zero.shards())


def train(model: Net, zero: Zero3, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        model(batch_of(step, dist.get_rank(), dist.get_world_size())).backward()
        zero.wait()
        optimizer.step()
        optimizer.zero_grad()


def start_and_save(folder: Path, kind: str = "AdamW") -> tuple[Any, Any]:
    """Full values where it was saved, and after as many steps again."""
    model, zero, optimizer = make(1, kind)
    train(model, zero, optimizer, range(NUM_STEPS))
    model.told = {"note": "saved", "count": torch.ones(2)}
    optimizer.param_groups[1]["lr"] = 0.03
    dcp.save({**zero.checkpoint(optimizer), "step": NUM_STEPS}, checkpoint_id=folder)
    saved = zero.full_state_dict()
    train(model, zero, optimizer, range(NUM_STEPS, 2 * NUM_STEPS))
    return saved, zero.full_state_dict()


def load_and_go_on(folder: Path, kind: str = "AdamW") -> tuple[Any, Any]:
    model, zero, optimizer = make(2, kind)
    zero.load_checkpoint(folder, optimizer)
    loaded = zero.full_state_dict()
    train(model, zero, optimizer, range(NUM_STEPS, 2 * NUM_STEPS))
    return loaded, zero.full_state_dict()


def load_after_steps(folder: Path) -> tuple[Any, Any]:
    """Into a model and an optimizer that have values of their own."""
    model, zero, optimizer = make(2, "AdamW")
    train(model, zero, optimizer, range(5))
    zero.load_checkpoint(folder, optimizer)
    loaded = zero.full_state_dict()
    train(model, zero, optimizer, range(NUM_STEPS, 2 * NUM_STEPS))
    return loaded, zero.full_state_dict()


def save_in_the_background(folder: Path) -> Any:
    """Full values where it was saved; steps go on while files are written."""
    model, zero, optimizer = make(1, "AdamW")
    train(model, zero, optimizer, range(NUM_STEPS))
    saved = zero.full_state_dict()
    writing = dcp.async_save(zero.checkpoint(optimizer), checkpoint_id=folder)
    train(model, zero, optimizer, range(NUM_STEPS, 2 * NUM_STEPS))
    writing.result()
    return saved


def save_the_model(folder: Path, prefix: str) -> Any:
    _, zero, _ = make(1, "AdamW")
    dcp.save({prefix: zero.checkpoint()}, checkpoint_id=folder)
    return zero.full_state_dict()


def load_the_model(folder: Path, prefix: str = "") -> Any:
    _, zero, _ = make(2, "AdamW")
    zero.load_checkpoint(folder, prefix=prefix)
    return zero.full_state_dict()


def train_alone(model: Any, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        model(batch_of(step, 0, 1).cpu()).backward()
        optimizer.step()
        optimizer.zero_grad()


def make_alone(seed: int, kind: str = "AdamW") -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad and p.numel()]
    return model, make_optimizer(kind, trained)


def load_alone(folder: Path, model: Any, optimizer: Any) -> None:
    """As any model that is not sharded, or is by FSDP2, loads a checkpoint."""
    state, states = get_state_dict(model, optimizer)
    target = {"model": state, "optimizer": states}
    dcp.load(target, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=target["model"],
        optim_state_dict=target["optimizer"],
    )


def make_layers(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))


def one_step_of_layers(model: Any, optimizer: Any, zero: Zero3 | None) -> None:
    model(torch.randn(2, 5)).square().mean().backward()
    if zero:
        zero.wait()
    optimizer.step()
    optimizer.zero_grad()


def layers_of_fsdp2(folder: Path, loads: bool) -> tuple[Any, Any]:
    """Full values, and an optimizer's, after a step that is saved, or after loading."""
    model = make_layers(1 + loads)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    if loads:
        load_alone(folder, model, optimizer)
    else:
        one_step_of_layers(model, optimizer, None)
    state, states = get_state_dict(model, optimizer)
    if not loads:
        dcp.save({"model": state, "optimizer": states}, checkpoint_id=folder)
    moments = {n: its["exp_avg"] for n, its in states["state"].items()}
    return tuple({n: t.full_tensor() for n, t in d.items()} for d in (state, moments))


def layers_of_zero(folder: Path, loads: bool) -> tuple[Any, Any]:
    """The same of `Zero3`; of moments, those of this rank's pieces."""
    model = make_layers(1 + loads)
    zero = Zero3(model)
    optimizer = torch.optim.AdamW(zero.shards())
    if loads:
        zero.load_checkpoint(folder, optimizer)
    else:
        one_step_of_layers(model, optimizer, zero)
        dcp.save(zero.checkpoint(optimizer), checkpoint_id=folder)
    moments = {  # a piece without an element has none
        name: optimizer.state[piece]["exp_avg"] if len(piece) else piece.detach()
        for name, piece in zero.named_shards()
    }
    return zero.full_state_dict(), moments


def does_not_fit(folder: Path, change: str) -> tuple[str, bool]:
    """The error of loading into a model that differs; whether all stayed as it was."""
    torch.manual_seed(2)
    model = Net()
    if change == "names":
        model.more = nn.Linear(2, 2)
        del model.blocks[2]
    if change == "shapes":
        model.blocks[1].back = nn.Conv2d(5, 3, 3, padding=1)
        model.blocks[0].seen = torch.zeros(5)
    zero = Zero3(model)
    shards = zero.shards()
    groups = [shards[::2], shards[1::2]]
    if change == "groups":
        groups = [shards[:5], shards[5:]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    if change == "optimizers":
        optimizer = torch.optim.AdamW(shards)
    before = zero.full_state_dict()
    try:
        zero.load_checkpoint(folder, optimizer)
    except (ValueError, CheckpointException) as error:
        after = zero.full_state_dict()
        same = all(
            torch.equal(before[n], after[n])
            for n in before
            if isinstance(before[n], Tensor)
        )
        return str(error), same and not optimizer.state
    return "loaded", False


def states_that_fit_nowhere() -> None:
    _, zero, optimizer = make(1, "AdamW")
    optimizer.state[zero.shards()[0]]["factors"] = torch.zeros(2, 99)
    zero.checkpoint(optimizer)


def optimizer_of_the_model() -> None:
    model, zero, _ = make(1, "AdamW")
    zero.checkpoint(torch.optim.AdamW(model.parameters()))


def one_piece_in_two_optimizers() -> None:
    _, zero, optimizer = make(1, "AdamW")
    zero.checkpoint(optimizer, optimizer)


def save_in_a_step() -> None:
    model, zero, optimizer = make(1, "AdamW")
    model(batch_of(0, 0, 1)).backward()
    zero.checkpoint(optimizer)


def compute_with_a_part() -> None:
    _, zero, _ = make(1, "AdamW")
    zero.checkpoint()["model"]["start.weight"] + 1


REFUSED = {
    states_that_fit_nowhere: (
        "AdamW has 'factors' of blocks.0.gain",
        "shape (2, 99)",
        "expected a number, or a tensor of the piece's shape",
    ),
    optimizer_of_the_model: ("none of zero.shards()", "AdamW updates a tensor"),
    one_piece_in_two_optimizers: ("is in two of the optimizers",),
    save_in_a_step: ("zero.checkpoint() in step 0, which is open", "zero.wait()"),
    compute_with_a_part: ("of a piece of a sharded tensor", "can only be saved"),
}


def load_full(who_has_it: str) -> Any:
    """Full values of another model, after a step in this one."""
    model, zero, optimizer = make(2, "AdamW")
    train(model, zero, optimizer, range(1))
    other = make_alone(1)[0]
    other.told = {"note": "other", "count": torch.ones(2)}
    other.blocks[0].seen += 3
    has_it = who_has_it == "everybody" or dist.get_rank() == 0
    zero.load_full_state_dict(other.state_dict() if has_it else None)
    loaded = zero.full_state_dict()
    train(model, zero, optimizer, range(1))
    return loaded


def load_too_little() -> tuple[str, bool]:
    _, zero, _ = make(2, "AdamW")
    before = zero.full_state_dict()
    state = {**Net().state_dict(), "start.bias": torch.zeros(3)}
    del state["blocks.1.gain"], state["blocks.0.seen"]
    try:
        zero.load_full_state_dict(state if dist.get_rank() == 0 else None)
    except ValueError as error:
        after = zero.full_state_dict()
        names = [n for n in before if isinstance(before[n], Tensor)]
        return str(error), all(torch.equal(before[n], after[n]) for n in names)
    return "loaded", False
