"""Checkpoints of a sharded model and its optimizers, for another number of ranks, too.

In the layout of `torch.distributed.checkpoint.state_dict`: `model.NAME`,
`optimizer.state.NAME.KEY` and `optimizer.param_groups`, by the model's own names and
with full shapes. Each rank writes its own pieces; `loading` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from overlaplab.techniques.zero.pieces import BoxedTensor, Piece


def model_state(model: nn.Module, pieces: Sequence[Piece]) -> dict[str, Any]:
    """The model's state dict with pieces for parameters; views, nothing is copied."""
    of = {id(piece.info.parameter): piece for piece in pieces}
    state = model.state_dict(keep_vars=True)
    for name, value in state.items():
        if id(value) in of:
            state[name] = of[id(value)].boxed()
        elif isinstance(value, Tensor):
            state[name] = value.detach()
    return dict(state)


def optimizer_state(
    optimizers: Sequence[Optimizer], pieces: Sequence[Piece]
) -> dict[str, Any]:
    """The states of `optimizers` by names of parameters, and their groups in order.

    Raises:
        ValueError: one updates what is no piece, or what another one updates.
        TypeError: a state that is neither a number nor as large as its piece.
    """
    states: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer, group, mine in groups_of(optimizers, pieces):
        groups.append({**group, "params": [piece.info.name for piece in mine]})
        for piece in mine:
            states[piece.info.name] = {
                key: _saved(optimizer, piece, key, value)
                for key, value in optimizer.state.get(piece.held, {}).items()
            }
    return {"state": states, "param_groups": groups}


def restore_optimizer(
    optimizer: Optimizer,
    groups: Sequence[tuple[dict[str, Any], dict[str, Any], Sequence[Piece]]],
    states: Mapping[str, Mapping[str, Any]],
) -> None:
    """Give `optimizer` what `optimizer_state` had of it.

    Args:
        optimizer: whose memory the states become.
        groups: for each of its groups: itself, what it is to have, its pieces.
        states: by name; a parameter that is not there has made no step.
    """
    its: dict[int, Any] = {}
    made: list[dict[str, Any]] = []
    count = 0
    for old, new, mine in groups:
        numbers = range(count, count + len(mine))
        count += len(mine)
        made.append({**old, **new, "params": list(numbers)})
        for number, piece in zip(numbers, mine, strict=True):
            if piece.info.name in states:
                its[number] = {
                    key: value.flat if isinstance(value, BoxedTensor) else value
                    for key, value in states[piece.info.name].items()
                }
    optimizer.load_state_dict({"state": its, "param_groups": made})


def groups_of(
    optimizers: Sequence[Optimizer], pieces: Sequence[Piece]
) -> Iterator[tuple[Optimizer, dict[str, Any], list[Piece]]]:
    """Every group of every optimizer in order, with the pieces that it updates.

    Raises:
        ValueError: an optimizer updates what is no piece, or another one's.
    """
    of = {id(piece.held): piece for piece in pieces}
    taken: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if id(tensor) not in of:
                    raise ValueError(
                        f"{type(optimizer).__name__} updates a tensor of shape "
                        f"{tuple(tensor.shape)} that is none of zero.shards(). Build "
                        "it over zero.shards(), after Zero3."
                    )
                if id(tensor) in taken:
                    name = of[id(tensor)].info.name
                    raise ValueError(f"{name} is in two of the optimizers")
                taken.add(id(tensor))
            yield optimizer, group, [of[id(tensor)] for tensor in group["params"]]


def _saved(optimizer: Optimizer, piece: Piece, key: str, value: object) -> object:
    if isinstance(value, Tensor):
        if value.shape == piece.held.shape:
            return piece.boxed(value)
        if value.dim() == 0:
            return value.detach()
    elif value is None or isinstance(value, bool | int | float | str):
        return value
    what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else "as state"
    raise TypeError(
        f"{type(optimizer).__name__} has {key!r} of {piece.info.name}, a "
        f"{type(value).__name__} {what}; expected a number, or a tensor of the piece's "
        f"shape {tuple(piece.held.shape)}. Only these have a place in another world."
    )
