"""Which blocks a model has, and which of them are alike.

Blocks are the children of its outermost lists: `nn.ModuleList` and `nn.Sequential`.
Two blocks are alike when they have the same code, the same sizes and the same settings:
then one of them is measured for both. Knows no costs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from overlaplab.techniques.memory.arguments import checked_model

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.Size)


HIDDEN = (
    "in which torch sees no tensors: make it a tuple or a dict, or use "
    "torch.export.register_dataclass"
)


def hides_tensors(value: Any) -> bool:
    """Whether it is an object that has tensors to be trained through, and no tensor."""
    if isinstance(value, Tensor | nn.Module):
        return False
    inside = getattr(value, "__dict__", {}).values()
    return any(isinstance(v, Tensor) and v.requires_grad for v in inside)


def find_blocks(
    model: nn.Module, blocks: Sequence[nn.Module] | None = None
) -> dict[str, nn.Module]:
    """The blocks by their first names in the model.

    Args:
        model: whose.
        blocks: these ones; None: the children of its outermost lists.

    Raises:
        TypeError: `model`, or one of `blocks`, is no module.
        ValueError: there is none; one of `blocks` is not in the model, or in another.
    """
    checked_model(model)
    if blocks is None:
        found = dict(_children_of_lists(model, ""))
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no nn.ModuleList or nn.Sequential whose "
                "children could be its blocks. Name them: blocks=[model.first, ...]"
            )
        return found
    if isinstance(blocks, str) or not isinstance(blocks, Iterable):
        raise TypeError(
            f"blocks is a {type(blocks).__name__}; expected a list of modules"
        )
    names = {id(module): name for name, module in model.named_modules()}
    chosen: dict[str, nn.Module] = {}
    for number, block in enumerate(blocks):
        if not isinstance(block, nn.Module):
            raise TypeError(
                f"blocks[{number}] is {block!r}; expected a module of the model, such "
                "as model.first"
            )
        name = names.get(id(block))
        if not name:
            raise ValueError(f"blocks[{number}] is no module inside of the model")
        inside = [n for n in chosen if f"{name}.".startswith(f"{n}.") or n == name]
        around = [n for n in chosen if n.startswith(f"{name}.")]
        if inside or around:
            raise ValueError(
                f"blocks[{number}] ({name}) overlaps block {(inside + around)[0]}: no "
                "block may contain another"
            )
        chosen[name] = block
    if not chosen:
        raise ValueError("blocks is empty; expected at least one module of the model")
    return chosen


def _children_of_lists(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList):
            yield from _children_of_lists(child, inner)
        elif is_list:
            yield inner, child
        else:
            yield from _children_of_lists(child, inner)


def likeness(block: nn.Module) -> Hashable:
    """Equal for blocks of which one may be measured for the other."""
    return tuple(
        (path, type(module), module.training, _tensors(module), _settings(module))
        for path, module in block.named_modules(remove_duplicate=False)
    )


def _tensors(module: nn.Module) -> Hashable:
    named = [*module._parameters.items(), *module._buffers.items()]
    return tuple((name, None if t is None else spec_of(t)) for name, t in named)


def _settings(module: nn.Module) -> Hashable:
    """What else a forward may look at; of objects only which ones they are."""
    inner = vars(nn.Module()).keys()
    own = {key: value for key, value in vars(module).items() if key not in inner}
    return tuple((key, _frozen(value)) for key, value in sorted(own.items()))


def counters(block: nn.Module) -> dict[str, Any]:
    """Plain attributes of a block and what is in it: a forward may change them."""
    return {
        f"{path}.{key}" if path else key: value
        for path, module in block.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, _PLAIN)
    }


def _frozen(value: Any) -> Hashable:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_frozen, value))
    return type(value), id(value)


def spec_of(value: Any) -> Hashable:
    """Of a tensor all that costs depend on; of other values the value."""
    if not isinstance(value, Tensor):
        return _frozen(value)
    layout = tuple(value.stride()) if value.layout is torch.strided else value.layout
    shape = tuple(value.shape)
    return shape, layout, value.dtype, value.device, value.requires_grad


def call_spec(args: Any, kwargs: Any) -> Hashable:
    """Of the arguments of a call."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    return str(tree), tuple(map(spec_of, leaves))
