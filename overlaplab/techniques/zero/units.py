"""Which parameters are gathered together: units, found or given, and the rest.

Knows modules and names; no rank, no memory. A unit is a module whose parameters are
there while it computes and may be gone before and after. What no unit has to itself
(and what two of them share) is the *rest*: it is there for the whole step.
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
            `find_blocks`.

    Raises:
        TypeError: something given is no module.
        ValueError: it is not in the model, is there twice, or inside another.
    """
    blocks = list(find_blocks(model)) if given is None else _check(model, given)
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
    order = {name: i for i, name in enumerate(names.values())}
    return sorted(blocks, key=lambda block: order[block[0]])
