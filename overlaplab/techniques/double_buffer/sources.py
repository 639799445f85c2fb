"""What a module has to copy from and into, by name. Knows no stream.

Parameters and buffers of a module's state, and the rules for a source of new values.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

Source = nn.Module | Mapping[str, Tensor]

PLAIN = (Tensor, nn.Parameter, FakeTensor)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, under all names that they have."""
    found: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def with_ties_of(tensors: list[Tensor]) -> list[Tensor]:
    """New memory, in which the same tensors share storages at the same places."""
    storages: dict[int, Tensor] = {}
    made = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = torch.empty(
                storage.nbytes(), dtype=torch.uint8, device=tensor.device
            )
        size = tensor.element_size()
        flat = storages[storage._cdata][: storage.nbytes() // size * size]
        typed = flat.view(tensor.dtype)
        made.append(
            typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        )
    return made


def _refuse_source(name: str, tensor: object, target: Tensor) -> None:
    if not isinstance(tensor, Tensor) or type(tensor) not in PLAIN:
        raise ValueError(f"{name} of the source is {tensor!r}; expected a plain tensor")
    if tensor.shape != target.shape:
        raise ValueError(
            f"{name} of the source has shape {tuple(tensor.shape)}; the serving module "
            f"has {tuple(target.shape)}"
        )
    if not torch.can_cast(tensor.dtype, target.dtype):
        raise ValueError(
            f"{name} of the source is {tensor.dtype}, which cannot become "
            f"{target.dtype}. Convert it first."
        )
    if tensor.device != target.device and not tensor.is_pinned():
        raise ValueError(
            f"{name} of the source is on {tensor.device}, in memory from which a copy "
            f"to {target.device} holds up the CPU. Move it there, or pin it."
        )


def place_of(tensor: Tensor) -> tuple[int, int]:
    """(storage, where in it) of a tensor that lives."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def matched(source: Source, named: dict[str, Tensor], own: set[int]) -> list[Tensor]:
    """For each tensor of `named`, tied ones once, that of the source, detached.

    Args:
        source: what has the values.
        named: the state that they are for.
        own: storages that are no source.

    Raises:
        TypeError, ValueError: see `DoubleBufferedWeights.update_from`.
    """
    given = state_of(source) if isinstance(source, nn.Module) else source
    if not isinstance(given, Mapping):
        raise TypeError(
            f"source is a {type(given).__name__}; expected a module or a state dict"
        )
    if unknown := given.keys() - named.keys():
        raise ValueError(
            f"the source has {min(map(str, unknown))}, which the serving module has "
            "not. Give a module or state dict with the same names."
        )
    found: dict[int, Tensor] = {}
    for name, target in named.items():
        if name not in given:
            continue
        tensor = given[name]
        _refuse_source(name, tensor, target)
        if place_of(tensor)[0] in own:
            raise ValueError(
                f"{name} of the source is the serving module's own: trained like that, "
                "each set would get every other update only. Train another copy, and "
                "update from it."
            )
        if place_of(found.setdefault(id(target), tensor.detach())) != place_of(tensor):
            raise ValueError(
                f"{name} is tied in the serving module, and the source has two tensors "
                "for it. Tie them there, or give one of the names."
            )
    for name, target in named.items():
        if id(target) not in found:
            raise ValueError(
                f"the source has no {name}: an update writes everything, or the two "
                "sets would drift apart. Give all of it."
            )
    return [found[key] for key in dict.fromkeys(map(id, named.values()))]
