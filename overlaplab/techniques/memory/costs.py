"""What blocks cost under each policy, and the rest of the model: one pass per kind.

No step of the whole model is run: blocks that are alike are measured once, alone, and
the model once with its blocks cut out. Knows no budget.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.utils import _pytree as pytree

from overlaplab.techniques.memory.chain import Block, Chain, Option
from overlaplab.techniques.memory.cutting import Kind, Looking, Marking, Stub, cut
from overlaplab.techniques.memory.meters import Meter
from overlaplab.techniques.memory.policies import Policy, compile_part, runner

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Setting:
    """What is measured, and with what.

    Args:
        policies: the menu; the first leaves a block as it is.
        meter: that measures.
        loss: makes a scalar of what the model returns; None: it is one, or every
            output gets a gradient of its own size.
        compiled_parts: methods of the model that are compiled too.
        backend: of `torch.compile`.
        resident: what lives all the time beside model and inputs: (what, bytes).
    """

    policies: tuple[Policy, ...]
    meter: Meter
    loss: Loss | None = None
    compiled_parts: tuple[str, ...] = ()
    backend: str = "inductor"
    resident: tuple[tuple[str, int], ...] = ()


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
            menus: dict[Kind, tuple[Option, ...]] = {}
            for kind in kinds.values():
                if kind not in menus:
                    menus[kind] = tuple(_menu(kind, setting, notes))
            book, rest_ns = _walk(skeleton, stubs, inputs, kinds, setting)
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
    )


def _alone(option: Option) -> Option:
    """Of a block whose outputs nobody else keeps for long: it does so all the time."""
    kept_bytes = option.kept_bytes + option.output_bytes
    return replace(option, kept_bytes=kept_bytes, output_bytes=0)


@contextlib.contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
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
    skeleton(*args, **kwargs)
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
            what = f"its forward changes the buffer {kind.writes}, so it runs once"
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


def _menu(kind: Kind, setting: Setting, notes: list[str]) -> Iterator[Option]:
    """The options of a kind; those that its blocks cannot do are left out."""
    for number, policy in enumerate(setting.policies):
        if policy.recompute and kind.writes:
            continue
        try:
            option = _measure(kind, policy, setting.meter)
            if not number:
                option = replace(option, forward_ns=_forward_ns(kind, setting))
            yield option
        except RuntimeError as error:
            if not number:
                raise
            first = str(error).strip().splitlines()[0]
            notes.append(f"{kind.name} without {policy.name!r}: {first}")


def _measure(kind: Kind, policy: Policy, meter: Meter) -> Option:
    """A block alone: bytes of one forward and backward, and their time."""
    run = runner(policy, kind.block, replays=meter.computes)
    numbers: list[tuple[int, int, int, int, int]] = []
    # Without values one pass gives both; with them, what is compiled or allocated in a
    # first one is no step's.
    for _ in range(2 * meter.computes):
        _bytes_of(kind, run, meter)
    ns = meter.step_ns(
        functools.partial(_repeat, kind, run)
        if meter.computes
        else lambda: numbers.append(_bytes_of(kind, run, meter))
    )
    kept, forward, backward, output, gradients = (
        numbers[0] if numbers else _bytes_of(kind, run, meter)
    )
    return Option(policy.name, kept, forward, backward, output, gradients, ns)


def _forward_ns(kind: Kind, setting: Setting) -> int:
    """Of the block as it is, its forward."""
    run = runner(setting.policies[0], kind.block)
    return setting.meter.step_ns(lambda: _run(kind, run))


def _repeat(kind: Kind, run: Callable[..., Any]) -> None:
    """A forward and backward, as fast as it goes."""
    outputs, _ = _run(kind, run)
    if not kind.gradients:
        kind.gradients = [torch.randn_like(o) for o in outputs]
    torch.autograd.backward(outputs, kind.gradients)
    _drop_gradients(kind.block)


def _bytes_of(
    kind: Kind, run: Callable[..., Any], meter: Meter
) -> tuple[int, int, int, int, int]:
    """kept, forward, backward, output and gradient bytes, as `Option` has them."""
    start = meter.live_bytes()
    meter.mark()
    outputs, leaves = _run(kind, run)
    with_outputs = meter.live_bytes() - start
    forward = meter.peak_bytes() - start
    kept = with_outputs - _stand_in_bytes(kind, meter)
    turn = _Turn(meter)
    apply: Any = _End.apply
    end = apply(turn, *outputs)
    del outputs
    dropped = meter.live_bytes() - start
    torch.autograd.backward(end, torch.empty_like(end))
    backward = meter.peak_bytes() - start - turn.gradient_bytes
    del end
    for leaf in leaves:
        leaf.grad = None
    gradients = meter.live_bytes() - start
    _drop_gradients(kind.block)
    return kept, forward, backward, max(0, dropped - kept), gradients


def _run(kind: Kind, run: Callable[..., Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Its differentiable outputs, and the inputs that get gradients."""
    device_type, dtype, enabled = kind.autocast
    args, kwargs = kind.inputs()
    with torch.autocast(device_type, dtype, enabled):
        outputs, _ = pytree.tree_flatten(run(*args, **kwargs))
    leaves, _ = pytree.tree_flatten((args, kwargs))
    return _differentiable(outputs), _differentiable(leaves)


def _differentiable(values: Sequence[Any]) -> list[Tensor]:
    return [v for v in values if isinstance(v, Tensor) and v.requires_grad]


def _stand_in_bytes(kind: Kind, meter: Meter) -> int:
    """What the skeleton has for its outputs."""
    tensors = [o for o in kind.outputs if isinstance(o, Tensor)]
    return sum(meter.rounded(t.numel() * t.element_size()) for t in tensors)


def _drop_gradients(block: nn.Module) -> None:
    for parameter in block.parameters():
        parameter.grad = None


@dataclass
class _Turn:
    """Where a forward ends and its backward begins."""

    meter: Meter
    gradient_bytes: int = 0


class _End(torch.autograd.Function):
    """Takes a block's outputs; gives them gradients that nobody else holds."""

    @staticmethod
    def forward(ctx: Any, turn: _Turn, *outputs: Tensor) -> Tensor:
        ctx.turn, ctx.device = turn, outputs[0].device
        # Laid out as autograd would: dense, also where an output is a part of more.
        dense = [torch.empty_like(o.detach(), device="meta").stride() for o in outputs]
        ctx.like = [
            (o.shape, strides, o.dtype)
            for o, strides in zip(outputs, dense, strict=True)
        ]
        return outputs[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        meter = ctx.turn.meter
        before = meter.live_bytes()
        made = [
            torch.empty_strided(shape, stride, dtype=dtype, device=ctx.device)
            for shape, stride, dtype in ctx.like
        ]
        if meter.computes:
            for gradient in made:
                gradient.fill_(1)
        ctx.turn.gradient_bytes = meter.live_bytes() - before
        meter.mark()
        return (None, *made)


def _walk(
    skeleton: nn.Module,
    stubs: Mapping[str, Stub],
    inputs: tuple[Any, Any],
    kinds: Mapping[str, Kind],
    setting: Setting,
) -> tuple[Marking, int]:
    """One step of the model without its blocks: what lives where, and its time."""
    meter = setting.meter
    book = Marking(meter, kinds)
    for stub in stubs.values():
        stub.__dict__["book"] = book
    for part in setting.compiled_parts:
        compile_part(skeleton, part, setting.backend)
    args, kwargs = inputs

    def step() -> None:
        outputs = skeleton(*args, **kwargs)
        if setting.loss is not None:
            outputs = setting.loss(outputs)
        leaves = _differentiable(pytree.tree_flatten(outputs)[0])
        if not leaves:
            raise ValueError("the model's output has no gradient: nothing is trained")
        book.turn()
        torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])

    kept = [stub.block for name, stub in stubs.items() if name not in kinds]

    def whole_step() -> None:
        step()
        for module in (skeleton, *kept):
            _drop_gradients(module)

    def marked_step() -> None:
        book.marks = True
        book.begin()
        step()
        book.end()
        book.marks = False

    book.marks = False
    for _ in range(2 * meter.computes):
        whole_step()
    if meter.computes:
        marked_step()
        _drop_gradients(skeleton)
        return book, meter.step_ns(whole_step)
    # Without values, one pass gives both bytes and time.
    return book, meter.step_ns(marked_step)


def _device_type(model: nn.Module, inputs: Any) -> str:
    """Of the first tensor that there is."""
    leaves, _ = pytree.tree_flatten(inputs)
    tensors = [*model.parameters(), *(t for t in leaves if isinstance(t, Tensor))]
    kind = tensors[0].device.type if tensors else "cpu"
    return "cpu" if kind == "meta" else kind  # autocast has none of its own for meta
