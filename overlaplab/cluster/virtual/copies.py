"""Operators that touch the host's memory: copies between it and the GPU's, and the
CPU's own.

A copy is a "memcpy" on the current stream. The CPU waits for it unless the host's side
is pinned and the caller said `non_blocking`. What works on the host's memory only is
the CPU's ("host"): in the order of the program, and nothing makes it wait for copies
that are in flight.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from overlaplab.cluster.virtual.recorder import Recorder
from overlaplab.cluster.virtual.storage import HOST, NUMBER, PAGEABLE, PINNED, PLACED
from overlaplab.operators import Operator, dtype_name, tensors_in
from overlaplab.program.record import Access
from overlaplab.timeline.span import NO_ATTRIBUTES

_CPU = torch.device("cpu")
_COPIES = frozenset({"copy_", "_foreach_copy_"})
# What the caller wrote, where the operator has another name.
_PINNING = "pin_memory"


def moves(kwargs: Any) -> bool:
    """Whether a call's keywords say where its result is to be."""
    device = kwargs.get("device")
    return bool(kwargs.get("pin_memory")) or (
        device is not None and device.index is not None and device.type == "cpu"
    )


class HostMemory:
    """Runs and records one rank's operators on the host's memory."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._table = recorder.storages

    def place(self, kwargs: Any) -> tuple[Any, str]:
        """The keywords that torch understands here, and the memory that they name."""
        kwargs = dict(kwargs)
        device, place = kwargs.get("device"), ""
        if device is not None and device.type == "cpu":
            if device.index is not None:
                place = PAGEABLE if device.index else PLACED
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            place, kwargs["pin_memory"] = PINNED, False
        if place == PAGEABLE and self._recorder.moving == _PINNING:
            place = PINNED
        return kwargs, place

    def takes(self, facts: Operator, inputs: list[torch.Tensor], place: str) -> bool:
        """Whether the operator is a copy between memories or the CPU's own.

        Raises:
            RuntimeError: it mixes the host's memory and the GPU's.
        """
        loads = self._table.is_loading and not self._table.placing_on_device
        if loads:
            self._recorder.claim_for_host(facts.name, inputs)
        if facts.name == "_to_copy" and place:
            return place in HOST or self._table.is_host(inputs[0])
        if self._table.placing_on_device and (facts.allocates or not facts.reads):
            return False  # zeros_like(host, device=ol.device()) reads no number of it
        host = [t for t in inputs if self._table.is_host(t)]
        if not host:
            made_here = self._table.placing_on_host or (loads and not inputs)
            return place in HOST or made_here
        if len(host) == len(inputs) or facts.name in _COPIES:
            return True
        others = [t for t in inputs if self._table.place_of(t) not in (*HOST, NUMBER)]
        if not others:
            return True
        if facts.indexes or all(t.dim() == 0 for t in host):
            self._recorder.host(facts.name, self._accesses(host))
            return False  # a kernel, that gets numbers
        if any(self._table.place_of(t) == PLACED for t in others):
            raise RuntimeError(
                f"{facts.name}: expected all tensors to be on the same device, but "
                f"found at least two: {_described(host[0])} in the host's memory and "
                f"{_described(others[0])} in the GPU's. Move one with "
                "tensor.to(ol.device()) or tensor.cpu()"
            )
        # Nobody said where these are; beside the host's they can only be the host's.
        self._recorder.claim_for_host(facts.name, others)
        return True

    def run(
        self,
        func: Any,
        facts: Operator,
        args: Any,
        kwargs: Any,
        place: str,
        inputs: list[torch.Tensor],
        written: list[torch.Tensor],
    ) -> Any:
        """Run and record what `takes` said yes to."""
        if facts.name == "_to_copy" or facts.name in _COPIES:
            self._recorder.settle(self._recorder.current())
        if facts.name == "_to_copy":
            return self._new_copy(func, args, kwargs, place)
        if facts.name in _COPIES:
            out = func(*args, **kwargs)
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking")
            targets, sources = (a if isinstance(a, list) else [a] for a in args[:2])
            for target, source in zip(targets, sources, strict=True):
                self._copied(target, source, bool(non_blocking), facts.name)
            return out
        new = place or ("" if self._table.placing_on_host else PAGEABLE)
        reads = [t for t in inputs if not any(t is w for w in written)]
        if not facts.overwrites:
            reads = inputs
        read = self._accesses(reads) if facts.reads else ()
        out = func(*args, **kwargs)
        outputs = tensors_in((out,))
        if new:
            with self._table.placing(new):
                self._accesses(outputs)
        if facts.records:
            name = facts.host_sync or facts.name
            self._recorder.host(name, read, self._accesses(written + outputs))
        return out

    def _new_copy(self, func: Any, args: Any, kwargs: Any, place: str) -> Any:
        source = args[0]
        name = self._recorder.moving or "_to_copy"
        non_blocking = bool(kwargs.get("non_blocking"))
        if not place:
            place = PAGEABLE
        elif place == PAGEABLE and non_blocking and not self._table.is_host(source):
            place = PINNED  # as torch does, lest the copy be synchronous
        out = func(*args, **kwargs)
        with self._table.placing(place):
            self._accesses((out,))
        self._copied(out, source, non_blocking, name)
        return out

    def _copied(
        self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool, name: str
    ) -> None:
        """Record the copy that was made."""
        recorder, table = self._recorder, self._table
        lane = recorder.current()
        read, write = self._accesses((source,)), self._accesses((target,))
        from_host, to_host = table.is_host(source), table.is_host(target)
        if from_host and to_host:
            recorder.host(name, read, write)
            return
        if to_host and self._is_number(source, read):
            recorder.host(name, (), write)
            return
        if name == _PINNING:  # the CPU copies, when the value is there
            recorder.read_on_host(name, source)
            recorder.host(name, (), write)
            return
        wire = source if from_host else target
        num_bytes = wire.numel() * wire.itemsize
        pinned = table.place_of(source if from_host else target) == PINNED
        direction = "h2d" if from_host else "d2h"
        crosses = from_host or to_host
        recorder.launch(
            "memcpy" if crosses else "compute",
            f"copy {direction}" if crosses else name,
            lane,
            reads=read,
            writes=write,
            dtype=dtype_name(wire.dtype),
            read_bytes=num_bytes,
            write_bytes=num_bytes,
            differentiable=source.requires_grad,
            attributes=(
                {"direction": direction, "pinned": pinned} if crosses else NO_ATTRIBUTES
            ),
        )
        if crosses and not (pinned and non_blocking):
            recorder.host_wait(name, lane.frontier())

    def _is_number(self, source: torch.Tensor, read: tuple[Access, ...]) -> bool:
        """Whether the value is on the host already: no operator made it."""
        place = self._table.place_of(source)
        if place == PLACED:
            return False
        return all(self._table.last_writer(access) is None for access in read)

    def _accesses(self, tensors: Iterable[torch.Tensor]) -> tuple[Access, ...]:
        lane = self._recorder.current().name
        return self._table.accesses(tensors, lane)[0]


def _described(tensor: torch.Tensor) -> str:
    return f"one of shape {tuple(tensor.shape)}"
