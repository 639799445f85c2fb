"""What blocks cost under each policy, and the rest of the model: one pass per kind.

No step of the whole model is run: blocks that are alike are measured once, alone, and
the model once with its blocks cut out. Knows no budget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.utils import _pytree as pytree

from overlaplab.techniques.memory.alone import measure_menu
from overlaplab.techniques.memory.arguments import inputs_do_not_fit
from overlaplab.techniques.memory.around import walk
from overlaplab.techniques.memory.chain import Block, Chain, Option
from overlaplab.techniques.memory.cutting import (
    Kind,
    Looking,
    NotCopiedError,
    Stub,
    cut,
)
from overlaplab.techniques.memory.meters import Meter
from overlaplab.techniques.memory.setting import Setting

_NO_VALUES = DataDependentOutputException, DynamicOutputShapeException


def measure_chain(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    blocks: Mapping[str, nn.Module],
    setting: Setting,
) -> Chain:
    """The chain of a model, see [Note: how the peak adds up] in chain.py.

    Args:
        model: not changed; neither are its gradients, its buffers and the generators.
        args, kwargs: of its forward.
        blocks: by name.
        setting: how.

    Raises:
        ValueError: the model cannot be copied, needs values that fake tensors do not
            have, gives no output with a gradient, or its blocks are no chain.
    """
    meter = setting.meter
    on_gpu = any(p.is_cuda for p in model.parameters())
    devices = [torch.cuda.current_device()] if on_gpu else []
    resident = _resident_bytes(model, (args, kwargs), meter)
    with torch.random.fork_rng(devices), torch.enable_grad(), meter.open():
        skeleton, stubs = cut(model, blocks, meter)
        inputs = pytree.tree_map_only(Tensor, meter.adopt, (tuple(args), dict(kwargs)))
        with _explained(model):
            kinds, notes = _look(skeleton, stubs, inputs, setting)
            if note := meter.settle():
                notes.append(note)
            menus: dict[Kind, tuple[Option, ...]] = {}
            for kind in kinds.values():
                if kind not in menus:
                    menus[kind] = tuple(measure_menu(kind, setting, notes))
            book, rest_ns = walk(skeleton, stubs, inputs, kinds, setting)
            rest_launch_ns = meter.launch_ns
    resident += sum(num_bytes for _, num_bytes in setting.resident)
    resident += meter.workspace_bytes()
    forwards, backwards = book.forwards, book.backwards
    came = {row[0] for row in backwards}
    if unused := [name for name, *_ in forwards if name not in came]:
        raise ValueError(
            f"the backward never comes to {_listed(unused)}: the loss does not depend "
            "on what was made there. Leave it out: blocks=[...] of the others"
        )
    if [row[0] for row in backwards] != [row[0] for row in reversed(forwards)]:
        raise ValueError(
            "the backward does not come to the blocks in the opposite order of the "
            f"forward: {', '.join(name for name, *_ in backwards)}. A planner of "
            "chains cannot order them; give blocks=[...] that follow one another"
        )
    after = [most for _, most, _ in [*forwards[1:], backwards[0]]]

    def menu_of(name: str) -> tuple[Option, ...]:
        menu = menus[kinds[name]]
        return tuple(map(_alone, menu)) if name in book.dropped else menu

    rows = [
        Block(name, menu_of(name), live, back_live, after_bytes, before_bytes)
        for (name, _, live), (_, before_bytes, back_live), after_bytes in zip(
            forwards, reversed(backwards), after, strict=True
        )
    ]
    return Chain(
        tuple(rows),
        resident,
        first_bytes=forwards[0][1],
        last_bytes=book.end_bytes,
        rest_ns=rest_ns,
        notes=tuple(notes),
        named_bytes=setting.resident,
        rest_launch_ns=rest_launch_ns,
    )


def _alone(option: Option) -> Option:
    """Of a block whose outputs nobody else keeps for long: it does so all the time."""
    kept_bytes = option.kept_bytes + option.output_bytes
    return replace(option, kept_bytes=kept_bytes, output_bytes=0)


@contextlib.contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except _NO_VALUES as error:
        raise ValueError(
            f"{type(model).__name__} looks at the values of its tensors ({error}), "
            'which are not there while it is planned. Measure: hardware="measured"'
        ) from error


def _resident_bytes(model: nn.Module, inputs: Any, meter: Meter) -> int:
    """Parameters, buffers and inputs, each storage once."""
    leaves, _ = pytree.tree_flatten(inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in (*model.parameters(), *model.buffers(), *tensors)
        if t.layout is torch.strided
    }
    return sum(map(meter.rounded, storages.values()))


def _look(
    skeleton: nn.Module,
    stubs: Mapping[str, Stub],
    inputs: tuple[Any, Any],
    setting: Setting,
) -> tuple[dict[str, Kind], list[str]]:
    """What is planned, and what is not and why."""
    book = Looking(_device_type(skeleton, inputs))
    for stub in stubs.values():
        stub.__dict__["book"] = book
    args, kwargs = inputs
    try:
        skeleton(*args, **kwargs)
    except (torch.OutOfMemoryError, NotCopiedError, *_NO_VALUES):
        raise
    except Exception as error:
        raise inputs_do_not_fit(skeleton, args, kwargs, error) from error
    planned: dict[str, Kind] = {}
    reasons: dict[str, list[str]] = {}
    for name, times in book.counts().items():
        kind = next(kind for called, kind in book.calls if called == name)
        reason = kind.obstacle
        if times > 1:
            reason = f"it is called {times} times in a step"
        if reason:
            reasons.setdefault(reason, []).append(name)
        else:
            planned[name] = kind
        if kind.writes and not reason:
            what = f"its forward changes {kind.writes}, so it runs once"
            reasons.setdefault(what, []).append(name)
    if uncalled := [name for name in stubs if name not in book.counts()]:
        reasons["it was not called"] = uncalled
    notes = [f"{_listed(names)} kept: {why}" for why, names in reasons.items()]
    if not planned:
        raise ValueError(
            f"no block can be planned. {'; '.join(notes)}. Name other blocks: "
            "blocks=[model.first, ...]"
        )
    return planned, notes


def _listed(names: Sequence[str]) -> str:
    if len(names) < 4:
        return ", ".join(names)
    return f"{names[0]} to {names[-1]} ({len(names)})"


def _device_type(model: nn.Module, inputs: Any) -> str:
    """Of the first tensor that there is."""
    leaves, _ = pytree.tree_flatten(inputs)
    tensors = [*model.parameters(), *(t for t in leaves if isinstance(t, Tensor))]
    kind = tensors[0].device.type if tensors else "cpu"
    return "cpu" if kind == "meta" else kind  # autocast has none of its own for meta
