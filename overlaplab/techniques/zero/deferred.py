"""Models that were built on the meta device get their values unit by unit.

Each tensor has its shape and its device from the beginning, and memory from the moment
when its module is initialised until its unit is sharded. So a rank never holds more
than one unit in full, and what no unit has to itself.

Knows neither rings nor shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from overlaplab import streams
from overlaplab.techniques.model_facts import ModelFacts
from overlaplab.techniques.zero.units import Unit

Init = Callable[[nn.Module], object]


class Deferred:
    """What is on the meta device in `model`: moved to the rank's, without memory.

    Args:
        model: any; its meta parameters and buffers are replaced, ties are kept.
        init: called with each module that owns some of them; None: its own
            `reset_parameters()`.

    Raises:
        ValueError: a module has no `reset_parameters()`, and there is no `init`.
    """

    def __init__(self, model: nn.Module, init: Init | None) -> None:
        self._init = init or _reset
        if init is None:
            _refuse_without_reset(model)
        self._owned: list[tuple[nn.Module, list[Tensor]]] = []
        self._bytes: dict[int, int] = {}  # of tensors that have no values yet
        device = streams.device()
        made: dict[int, Tensor] = {}
        for module in model.modules():
            mine = []
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for name, tensor in _on_meta(table):
                    if id(tensor) not in made:
                        made[id(tensor)] = self._without_memory(tensor, device)
                    table[name] = made[id(tensor)]
                    mine.append(made[id(tensor)])
            if mine:
                self._owned.append((module, mine))
        self._ours = {id(tensor) for tensor in made.values()}
        self._next = 0  # of `_owned`

    def units(self, units: Sequence[Unit], facts: ModelFacts) -> Iterator[Unit]:
        """`units`, each with rank 0's values until the next one is asked for.

        Modules are initialised in the model's order, those before a unit with it: the
        values are those of a model that was built with them, if it draws its numbers in
        that order.
        """
        if not self._owned:
            facts.broadcast()
            yield from units
            return
        for unit in units:
            parameters = [info.parameter for info in unit.parameters]
            self._initialise_until({id(parameter) for parameter in parameters})
            facts.broadcast(parameters)
            yield unit
            for parameter in parameters:
                if id(parameter) in self._ours:
                    parameter.untyped_storage().resize_(0)
        self._initialise_until(self._ours)
        facts.broadcast(parameters=False)

    def _without_memory(self, tensor: Tensor, device: torch.device) -> Tensor:
        made = torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
        storage = made.untyped_storage()
        if storage.nbytes():
            self._bytes[id(made)] = storage.nbytes()
            storage.resize_(0)
        return made

    def _initialise_until(self, wanted: set[int]) -> None:
        """Every module that has not been, to the last one that owns some of them."""
        for i in range(len(self._owned) - 1, self._next - 1, -1):
            if any(id(tensor) in wanted for tensor in self._owned[i][1]):
                break
        else:
            return
        for module, tensors in self._owned[self._next : i + 1]:
            missing = [tensor for tensor in tensors if id(tensor) in self._bytes]
            for tensor in missing:
                tensor.untyped_storage().resize_(self._bytes.pop(id(tensor)))
            if missing:  # else all of it is tied to what was before
                self._init(module)
        self._next = i + 1


def _reset(module: nn.Module) -> None:
    reset: Any = module.reset_parameters
    reset()


def _on_meta(table: Mapping[str, Tensor | None]) -> list[tuple[str, Any]]:
    return [
        (name, tensor)
        for name, tensor in table.items()
        if tensor is not None and tensor.is_meta and not is_fake(tensor)
    ]


def _refuse_without_reset(model: nn.Module) -> None:
    for name, module in model.named_modules():
        mine = [
            own
            for own, tensor in _on_meta({**module._parameters, **module._buffers})
            if tensor.numel()
        ]
        if mine and not callable(getattr(module, "reset_parameters", None)):
            raise ValueError(
                f"module {name or '(the model)'}, a {type(module).__name__}, has "
                f"{', '.join(mine)} on the meta device and no reset_parameters(). Give "
                "it one, or Zero3 an init=, which is called with each such module."
            )
