"""Which parameters are gathered together: units, found or given, and the rest.

Knows modules and names; no rank, no memory. A unit is a module whose parameters are
there while it computes and may be gone before and after. What no unit has to itself
(and what two of them share) is the *rest*: it is there for the whole step, so little
should be in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from overlaplab.techniques.model_facts import ParameterInfo

REST = "(rest)"


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Parameters that are gathered together.

    Args:
        name: of its module in the model; `REST` for what no unit has.
        module: whose forward needs them.
        parameters: its own, in the model's order.
    """

    name: str
    module: nn.Module
    parameters: tuple[ParameterInfo, ...]

    @property
    def is_rest(self) -> bool:
        """Whether it is there for the whole step."""
        return self.name == REST

    @property
    def is_lookup(self) -> bool:
        """An embedding, whose backward needs no weights."""
        return type(self.module) is nn.Embedding

    @property
    def is_late(self) -> bool:
        """Whether its gradients leave at the end of a step."""
        return self.is_rest or self.is_lookup


def make_units(
    model: nn.Module,
    parameters: Sequence[ParameterInfo],
    given: Sequence[nn.Module] | None = None,
) -> list[Unit]:
    """The units in the model's order, the rest last (if anything is left for it).

    Args:
        model: the whole.
        parameters: of it, each once.
        given: modules of the model, none inside another; None: repeated blocks, see
            `find_blocks`, and layers beside them that are not small, such as an
            embedding and a head.

    Raises:
        TypeError: something given is no module.
        ValueError: it is not in the model, is there twice, or inside another.
    """
    if given is None:
        blocks = list(find_blocks(model))
        blocks += find_large_layers(model, [block for _, block in blocks])
    else:
        blocks = _check(model, given)
    order = {name: i for i, (name, _) in enumerate(model.named_modules())}
    blocks.sort(key=lambda block: order[block[0]])
    users: dict[int, set[int]] = {}  # of each parameter: blocks, or -1
    inside = {id(m): i for i, (_, block) in enumerate(blocks) for m in block.modules()}
    for module in model.modules():
        for parameter in module._parameters.values():
            users.setdefault(id(parameter), set()).add(inside.get(id(module), -1))
    members: list[list[ParameterInfo]] = [[] for _ in blocks]
    rest: list[ParameterInfo] = []
    for info in parameters:
        (first, *others) = users[id(info.parameter)]
        (rest if others or first < 0 else members[first]).append(info)
    units = [
        Unit(name, block, tuple(mine))
        for (name, block), mine in zip(blocks, members, strict=True)
        if mine
    ]
    return [*units, Unit(REST, model, tuple(rest))] if rest else units


def find_blocks(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the members that repeat in a ModuleList or Sequential.

    Two or more of one class with parameters; the outermost, so blocks are never inside
    one another.
    """
    counts: Counter[type] = Counter()
    if isinstance(model, nn.ModuleList | nn.Sequential):
        counts.update(type(child) for child in model if _has_parameters(child))
    seen: set[int] = set()
    for name, child in model.named_children():  # a member that is there twice, once
        if counts[type(child)] > 1 and _has_parameters(child):
            if id(child) not in seen:
                yield prefix + name, child
            seen.add(id(child))
        else:
            yield from find_blocks(child, f"{prefix}{name}.")


def find_large_layers(
    model: nn.Module, blocks: Sequence[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of layers outside `blocks`, a quarter of the largest or more.

    Smaller ones cost less in the rest than two more collectives in a step.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    least = max(map(_size, blocks), default=0) / 4
    for name, module in model.named_modules():
        is_layer = id(module) not in inside and not list(module.children())
        if least and is_layer and module is not model and _size(module) >= least:
            yield name, module


def _size(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _check(model: nn.Module, given: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    names = {id(module): name for name, module in model.named_modules()}
    for position, module in enumerate(given):
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"units[{position}] is a {type(module).__name__}; expected a module of "
                "the model"
            )
        if id(module) not in names or module is model:
            raise ValueError(
                f"units[{position}], a {type(module).__name__}, is not a module inside "
                "the model. Give modules of the model itself, such as model.blocks[0]."
            )
    blocks = [(names[id(module)], module) for module in given]
    for name, module in blocks:
        for other, outer in blocks:
            if (name, module) == (other, outer):
                if blocks.count((name, module)) > 1:
                    raise ValueError(f"unit {name} is given twice")
            elif any(inner is module for inner in outer.modules()):
                raise ValueError(
                    f"unit {name} is inside unit {other}: its weights would be "
                    "gathered twice. Give one of the two."
                )
    return blocks
