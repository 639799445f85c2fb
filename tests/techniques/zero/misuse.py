"""What people do wrong with a sharded model, and what must be right around it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab.models.toy_nets import TOY_NETS, WIDTH, random_batch
from overlaplab.techniques.data_parallel import BucketedReducer
from overlaplab.techniques.zero import Zero3
from tests.techniques.data_parallel.misuse import Fails
from tests.techniques.zero.programs import AsksForAGradient, Blocks, InARow


def batch(step: int = 0) -> Tensor:
    return random_batch(dist.get_rank(), step, WIDTH)


def sharded(**settings: Any) -> tuple[Any, Zero3]:
    torch.manual_seed(1)
    model = Blocks()
    return model, Zero3(model, **settings)


def save_the_model() -> None:
    sharded()[0].state_dict()


def save_a_part() -> None:
    sharded()[0].layers[1].state_dict()


def load_into_it() -> None:
    sharded()[0].load_state_dict(Blocks().state_dict())


def call_a_unit() -> None:
    sharded()[0].layers[1](batch())


def call_the_head_after_a_step() -> None:
    model, zero = sharded()
    model(batch()).backward()
    zero.wait()
    model.head(batch())


class Peeks(Blocks):
    """Computes with a unit's part after its unit was resharded."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        inner: Any = self.layers[0]
        out: Tensor = nn.Sequential(*inner)(x) if self.peeks else x
        return out.square().mean()

    peeks = True


def compute_after_reshard() -> None:
    model = Peeks()
    model.layers = nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
    )
    Zero3(model)
    model(batch())


def call_what_a_failed_forward_left() -> None:
    model, _ = sharded()
    with contextlib.suppress(RuntimeError):
        model(torch.zeros(2, WIDTH + 1))
    model.layers[0](batch())


def call_what_was_computed_again_in_part() -> None:
    model, zero = sharded()
    model.checkpointed = False  # stops at the last tensor that it needs, in layers.0
    model(batch()).backward()
    zero.wait()
    model.layers[0](batch())


def goes_backward_inside(prefetch: int = 1) -> float:
    """How far a step is from one process, of blocks that ask for a gradient inside."""
    torch.manual_seed(1)
    model, plain = InARow(AsksForAGradient), InARow(AsksForAGradient)
    plain.load_state_dict(model.state_dict())
    zero = Zero3(model, prefetch=prefetch)
    optimizer = torch.optim.SGD(zero.shards(), lr=0.5)
    alone = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(3):
        for net in (model, plain):
            net(random_batch(0, step, WIDTH)).backward()
        zero.wait()
        for each in (optimizer, alone):
            each.step()
            each.zero_grad()
    found = zero.full_state_dict()
    return max(float((found[n] - p).abs().max()) for n, p in plain.state_dict().items())


def go_backward_over_what_computes() -> None:
    goes_backward_inside(prefetch=0)


def second_derivatives() -> None:
    model, _ = sharded()
    model(batch()).backward(create_graph=True)


def backward_of_an_old_graph() -> None:
    model, zero = sharded()
    loss = model(batch())
    loss.backward(retain_graph=True)
    zero.wait()
    loss.backward()


def forget_to_wait() -> None:
    model, zero = sharded()
    optimizer = torch.optim.AdamW(zero.shards())
    model(batch()).backward()
    optimizer.step()


def wait_inside_no_sync() -> None:
    _, zero = sharded()
    with zero.no_sync():
        zero.wait()


def wait_after_remove() -> None:
    _, zero = sharded()
    zero.remove()
    zero.wait()


def cast_the_model() -> None:
    model, _ = sharded()
    model.double()
    model(batch().double())


def replace_a_parameter() -> None:
    model, _ = sharded()
    model.layers[2].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    model(batch())


def shard_twice() -> None:
    model, _zero = sharded()
    Zero3(model)


def reduce_what_is_sharded() -> None:
    model, _zero = sharded()
    BucketedReducer(model)


class Hidden:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return Hidden(self.linear(x.x if isinstance(x, Hidden) else x))


def outputs_that_no_hook_sees() -> None:
    blocks = nn.Sequential(Hides(), Hides(), Hides())
    _zero = Zero3(blocks)
    blocks(batch()).x.square().mean().backward()


def ranks_that_choose() -> None:
    net = TOY_NETS["uneven"]
    model = net.make_model()
    zero = Zero3(model)
    model(net.make_batch(dist.get_rank(), 0)).backward()
    zero.wait()


class BorrowsItsEmbedding(nn.Module):
    """Its head is the embedding's weight, and no module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2 * WIDTH, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.abs() * 3).long().clamp(max=WIDTH)
        x = self.layers(self.embedding(rows))
        return nn.functional.linear(x, self.embedding.weight).square().mean()


def weight_outside_its_unit() -> None:
    model = BorrowsItsEmbedding()
    Zero3(model)
    model(batch())


def units_that_are_none() -> None:
    model = Blocks()
    Zero3(model, units=[nn.Tanh()])


def negative_prefetch() -> None:
    Zero3(Blocks(), prefetch=-1)


def prefetch_of_no_number() -> None:
    Zero3(Blocks(), prefetch=1.5)  # type: ignore[arg-type]


def mixed_precision_of_integers() -> None:
    Zero3(Blocks(), mixed_precision=torch.int32)


def group_of_no_kind() -> None:
    Zero3(Blocks(), process_group="world")  # type: ignore[arg-type]


def bad_norm() -> None:
    _, zero = sharded()
    zero.clip_grad_norm_(1.0, 0.0)


WRONG: dict[Callable[[], None], tuple[str, ...]] = {
    save_the_model: ("state dict of a sharded Blocks", "zero.full_state_dict()"),
    save_a_part: ("state dict of a sharded Linear",),
    load_into_it: ("state dict of a sharded Blocks", "load_full_state_dict()"),
    call_a_unit: ("module layers.1 computes", "unit layers.1 are not gathered"),
    call_the_head_after_a_step: ("module head computes", "unit head are not gathered"),
    call_what_a_failed_forward_left: ("module layers.0 computes",),
    call_what_was_computed_again_in_part: ("module layers.0 computes",),
    compute_after_reshard: ("module layers.0.0 computes", "unit layers.0"),
    go_backward_over_what_computes: (
        "a backward inside the forward of unit blocks.1",
        "gather unit blocks.0 into the same slot",
        "prefetch",
    ),
    second_derivatives: ("create_graph=True", "unit head"),
    backward_of_an_old_graph: ("backward in step 1", "graph of step 0"),
    forget_to_wait: ("AdamW.step() before zero.wait()", "shards have none yet"),
    wait_inside_no_sync: ("inside no_sync()",),
    wait_after_remove: ("zero.wait() after remove()",),
    cast_the_model: ("parameter layers.0.weight is no longer a view",),
    replace_a_parameter: ("parameter layers.2.weight is not the object",),
    shard_twice: ("layers.0.weight has a reducer already",),
    reduce_what_is_sharded: ("layers.0.weight has a reducer already",),
    outputs_that_no_hook_sees: (
        "the backward of unit 2 would begin without its weights",
        "takes a tensor out of it that its forward did not return",
    ),
    ranks_that_choose: (
        "ranks compute with different units",
        "rank 0: forward of experts.0, use 1 of step 0",
        "rank 1: forward of experts.1, use 1 of step 0",
        "units=[]",
    ),
    weight_outside_its_unit: (
        "parameter embedding.weight is used outside the forward of its unit embedding",
        "Zero3(model, units=[...])",
    ),
    units_that_are_none: ("units[0], a Tanh, is not a module inside the model",),
    negative_prefetch: ("prefetch is -1; expected 0 or more",),
    prefetch_of_no_number: ("prefetch is 1.5; expected a number of uses",),
    mixed_precision_of_integers: ("mixed_precision is torch.int32; expected",),
    group_of_no_kind: ("process_group is 'world'; expected a ProcessGroup",),
    bad_norm: ("norm_type is 0.0; expected a positive number or inf",),
}


def one_rank_leaves_the_plan(in_step: int) -> None:
    model, zero = sharded()
    for step in range(3):
        if step == in_step and dist.get_rank() == 1:
            model.order = [0, 2, 3]
        model(batch(step)).backward()
        zero.wait()


class Stops(nn.Module):
    now = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if index == 1:
                x = Fails.apply(x, self.now)
        return x.square().mean()


def fails_in_backward(where: str) -> Any:
    """Step 1 of 3 fails everywhere; what `where` says comes instead of the rest."""
    torch.manual_seed(2)
    model = Stops()
    zero = Zero3(model)
    optimizer = torch.optim.SGD(zero.shards(), lr=0.5)
    for step in range(3):
        model.now = step == 1
        try:
            model(batch(step)).backward()
        except ZeroDivisionError:
            model.now = False
            if where == "forward":
                model(batch(step))
            if where == "wait":
                zero.wait()
            zero.abandon()
            continue
        zero.wait()
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state_dict()


def fails_alone() -> dict[str, Any]:
    """As above without step 1, in one process of two batches."""
    torch.manual_seed(2)
    model = Stops()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in (0, 2):
        optimizer.zero_grad()
        x = torch.cat([random_batch(rank, step, WIDTH) for rank in range(2)])
        model(x).backward()
        optimizer.step()
    return model.state_dict()


def fails_in_forward() -> Tensor:
    """An evaluation that raises leaves a model that evaluates."""
    model, _ = sharded()
    with torch.no_grad():
        with contextlib.suppress(RuntimeError):
            model(torch.zeros(2, WIDTH + 1))
        loss: Tensor = model(batch())
        return loss


def gradients_of_two_batches(how: str) -> dict[str, Any]:
    """Steps 0 and 1 in one window, then step 2 alone: SGD's parameters after it."""
    model, zero = sharded()
    optimizer = torch.optim.SGD(zero.shards(), lr=0.5)
    for window in ((0, 1), (2,)):
        *first, last = window
        for step in first:
            if how == "no_sync":
                with zero.no_sync():
                    model(batch(step)).backward()
            else:
                model(batch(step)).backward()
        model(batch(last)).backward()
        full = {n for n, p in model.named_parameters() if p.grad is not None}
        zero.wait()
        assert full == {"layers.0.weight", "layers.0.bias"}  # nothing came behind it
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return zero.full_state_dict()


def clipped(max_norm: float, norm_type: float) -> tuple[float, dict[str, Any]]:
    model, zero = sharded()
    optimizer = torch.optim.SGD(zero.shards(), lr=1.0)
    model(batch()).backward()
    zero.wait()
    norm = zero.clip_grad_norm_(max_norm, norm_type)
    optimizer.step()
    return norm.item(), zero.full_state_dict()


def removed() -> Any:
    """The model trains by itself after remove(), with no hook left."""
    model, zero = sharded()
    model(batch()).backward()
    zero.remove()
    assert all(p.grad is None for p in model.parameters())
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    model.load_state_dict(model.state_dict())
    model(batch()).backward()
    return sum(hooks), {n: p.grad.clone() for n, p in model.named_parameters()}


def names_and_sizes() -> Any:
    """D10: names, shapes and both entries of what is tied, of a net with everything."""
    net = TOY_NETS["zero_element"].make_model()
    tied = TOY_NETS["tied"].make_model()
    buffers = TOY_NETS["buffers"].make_model()
    return [
        {name: tuple(t.shape) for name, t in Zero3(m).full_state_dict().items()}
        for m in (net, tied, buffers)
    ]


def gradients_that_nobody_has() -> dict[str, tuple[bool, bool]]:
    """Of a net with a layer that reaches no loss: (has elements, has a gradient)."""
    net = TOY_NETS["unused"]
    model = net.make_model()
    zero = Zero3(model)
    model(net.make_batch(dist.get_rank(), 0)).backward()
    zero.wait()
    return {
        name: (len(piece) > 0, piece.grad is not None)
        for name, piece in zero.named_shards()
    }


def doubles_weights(where: str) -> tuple[float, float]:
    """A loss before and after every weight was doubled between two steps."""
    model, zero = sharded()
    losses = []
    for _ in range(2):
        loss = model(batch())
        losses.append(loss.item())
        loss.backward()
        zero.wait()
        with torch.no_grad():
            if where == "in the shards":
                for piece in zero.shards():
                    piece.mul_(2)
            elif where == "by full values":
                full = {k: 2 * v for k, v in zero.full_state_dict().items()}
                zero.load_full_state_dict(full)
            else:
                for parameter in model.parameters():
                    parameter.data.mul_(2)
    return losses[0], losses[1]
