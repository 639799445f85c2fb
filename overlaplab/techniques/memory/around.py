"""The model around its blocks: what lives there when, and how long it takes.

One step of the model with a hole of its size for each block. Knows no policy.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from overlaplab.techniques.memory.cutting import Kind, Stub
from overlaplab.techniques.memory.meters import Meter
from overlaplab.techniques.memory.policies import compile_part
from overlaplab.techniques.memory.setting import (
    Setting,
    drop_gradients,
    run_step,
)


def walk(
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
        run_step(lambda: skeleton(*args, **kwargs), setting, turn=book.turn)

    kept = [stub.block for name, stub in stubs.items() if name not in kinds]

    def whole_step() -> None:
        step()
        drop_gradients(skeleton, *kept)

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
        drop_gradients(skeleton)
        return book, meter.step_ns(whole_step)
    # Without values, one pass gives both bytes and time.
    return book, meter.step_ns(marked_step)


class Marking:
    """Gives outputs without computing; notes what lives around each block.

    Args:
        meter: that is asked.
        planned: kinds of the blocks that are cut out; others run as they are.
    """

    def __init__(self, meter: Meter, planned: Mapping[str, Kind]) -> None:
        self._meter = meter
        self._planned = planned
        self._base_bytes = 0
        self.marks = True
        self.forwards: list[tuple[str, int, int]] = []  # name, most before it, live
        self.backwards: list[tuple[str, int, int]] = []
        self.end_bytes = 0
        self.dropped: set[str] = set()  # nobody outside keeps what these gave
        self._made: dict[str, list[weakref.ref[Any]]] = {}

    def begin(self) -> None:
        """A step begins."""
        self._base_bytes = self._meter.live_bytes()
        self._meter.mark()

    def end(self) -> None:
        """It has ended."""
        self.end_bytes = self._meter.peak_bytes() - self._base_bytes

    def turn(self) -> None:
        """The forward has ended; the backward begins."""
        if self.marks and self.forwards:
            self._look_after(self.forwards[-1][0])

    def _look_after(self, name: str) -> None:
        """Before what comes after `name` goes back: are its outputs still there?"""
        if any(storage() is None for storage in self._made[name]):
            self.dropped.add(name)

    def note(self, rows: list[tuple[str, int, int]], name: str) -> None:
        """Where one begins: the most before it, and what lives now."""
        if self.marks:
            most = self._meter.peak_bytes() - self._base_bytes
            rows.append((name, most, self._meter.live_bytes() - self._base_bytes))

    def note_backward(self, name: str) -> None:
        """The backward of one begins."""
        names = [row[0] for row in self.forwards]
        if self.marks and names.index(name):
            self._look_after(names[names.index(name) - 1])
        self.note(self.backwards, name)

    def made(self, name: str, outputs: list[Tensor]) -> None:
        """Its outputs are there."""
        if self.marks:
            self._made[name] = [weakref.ref(o.untyped_storage()) for o in outputs]
            self._meter.mark()

    def made_gradients(self) -> None:
        """The gradients of its inputs are there."""
        if self.marks:
            self._meter.mark()

    def call(self, stub: Stub, args: Any, kwargs: Any) -> Any:
        kind = self._planned.get(stub.name)
        if kind is None:
            return stub.block(*args, **kwargs)
        leaves, _ = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        first = next(
            o for o in (*tensors, *kind.outputs) if isinstance(o, Tensor)
        )  # a block may take no tensor, as one of positions does
        anchor = torch.empty(0, requires_grad=True, device=first.device)
        apply: Any = _Cut.apply
        made = iter(apply(self, stub.name, kind, anchor, *tensors))
        outputs = [next(made) if isinstance(o, Tensor) else o for o in kind.outputs]
        return pytree.tree_unflatten(outputs, kind.tree)


class _Cut(torch.autograd.Function):
    """A hole of the shape of a block. It holds its inputs until its backward."""

    @staticmethod
    def forward(
        ctx: Any, book: Marking, name: str, kind: Kind, anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        book.note(book.forwards, name)
        like = [leaf for leaf in kind.outputs if isinstance(leaf, Tensor)]
        outputs = [torch.empty_like(leaf) for leaf in like]
        for made, leaf in zip(outputs, like, strict=True):
            if not leaf.is_floating_point():
                made.copy_(leaf)
        ctx.mark_non_differentiable(
            *(
                o
                for o, leaf in zip(outputs, like, strict=True)
                if not leaf.requires_grad
            )
        )
        ctx.set_materialize_grads(False)
        ctx.book, ctx.name, ctx.held = book, name, tensors
        book.made(name, outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.book.note_backward(ctx.name)
        made = [
            torch.empty_like(t) if needs else None
            for t, needs in zip(ctx.held, ctx.needs_input_grad[4:], strict=True)
        ]
        ctx.held = ()
        ctx.book.made_gradients()
        return (None, None, None, None, *made)
