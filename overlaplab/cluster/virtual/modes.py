"""The mode of a rank: every operator, below autograd, passes through here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from overlaplab.cluster.virtual.copies import HostMemory, moves, tensors_in
from overlaplab.cluster.virtual.naming import GRADIENT_OPERATORS, name_gradient
from overlaplab.cluster.virtual.operators import (
    Operator,
    dtype_name,
    operator,
    waits_for_mask,
)
from overlaplab.cluster.virtual.placement import PLAIN
from overlaplab.cluster.virtual.recorder import Lane, Recorder
from overlaplab.cluster.virtual.storage import NUMBER, covered_bytes
from overlaplab.program.record import Access


class RecordMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each operator and records it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._host_memory = HostMemory(recorder)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """torch.compile stays on beneath this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; wrapping it would import the compiler (3 s)."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for kind in types:
            # First let a subclass (AsyncCollectiveTensor) unwrap: its wait comes
            # before the use of its value.
            if kind not in PLAIN:
                return NotImplemented
        kwargs = kwargs or {}
        recorder = self._recorder
        facts = operator(func)
        table, place = recorder.storages, ""
        if kwargs and moves(kwargs):
            kwargs, place = self._host_memory.place(kwargs)
        if (place or table.has_host or table.placing_on_host) and not facts.skipped:
            inputs = tensors_in((*args, *kwargs.values()))
            if self._host_memory.takes(facts, inputs, place):
                recorder.turns.check()
                return self._host_memory.run(
                    func,
                    facts,
                    args,
                    kwargs,
                    place,
                    inputs,
                    _written(facts, args, kwargs),
                )
        if not facts.records:
            if facts.skipped:
                return self._skip(func, args, kwargs)
            recorder.turns.check()
            out = func(*args, **kwargs)
            self._adopt(facts.name, out)
            if facts.name in GRADIENT_OPERATORS:
                name_gradient(recorder, out)
            return out
        lane = recorder.current()
        recorder.settle(lane)
        written = _written(facts, args, kwargs) if facts.writes_named else []
        reads: dict[Access, None] = {}
        if facts.reads:
            inputs = tensors_in(args)
            if kwargs:
                inputs += tensors_in(kwargs.values())
            if table.has_host:  # what is left of the host's are numbers for the kernel
                inputs = [t for t in inputs if not table.is_host(t)]
            if facts.overwrites:
                inputs = [t for t in inputs if not any(t is w for w in written)]
            reads = self._accesses(inputs, lane)
        if facts.host_sync:
            self._host_sync(facts.host_sync, reads)
        elif facts.indexes and waits_for_mask(args):
            self._host_sync("nonzero", reads)
        numbers = self._numbers({**reads, **self._accesses(written, lane)})
        out = func(*args, **kwargs)
        outputs = tensors_in((out,))
        writes = self._accesses(written + outputs, lane)
        if numbers:
            for tensor in outputs:
                table.place(tensor, NUMBER, lane.name)
        elif writes:  # otherwise its result is a number
            recorder.launch(
                "compute",
                facts.name,
                lane,
                reads=tuple(reads),
                writes=tuple(writes),
                flops=0 if facts.flops is None else facts.flops(args, kwargs, out),
                dtype=dtype_name((outputs or written)[0].dtype),
                read_bytes=sum(map(covered_bytes, reads)),
                write_bytes=sum(map(covered_bytes, writes)),
                differentiable=any(tensor.requires_grad for tensor in tensors_in(args)),
            )
        if facts.name in GRADIENT_OPERATORS:
            name_gradient(recorder, out)
        return out

    def _accesses(
        self, tensors: Iterable[torch.Tensor], lane: Lane
    ) -> dict[Access, None]:
        """The bytes of `tensors`, each once, in order."""
        found: dict[Access, None] = {}
        for tensor in tensors:
            access = self._recorder.storages.access(tensor, lane.name)
            if access is not None:
                found[access] = None
        return found

    def _numbers(self, accesses: Iterable[Access]) -> bool:
        """Whether an operator touches numbers of the CPU only: no kernel."""
        storages = self._recorder.storages
        return storages.has_numbers and storages.all_numbers(accesses)

    def _host_sync(self, name: str, reads: Iterable[Access]) -> None:
        """A value that no operator made is on the host already."""
        storages = self._recorder.storages
        if any(storages.last_writer(access) is not None for access in reads):
            frontier = self._recorder.current().frontier()
            self._recorder.host_wait(name, frontier, tuple(reads))

    def _adopt(self, name: str, out: Any) -> None:
        """Note new storages; a number made by torch.tensor(1.0) is the CPU's."""
        table, lane = self._recorder.storages, self._recorder.current()
        self._accesses(tensors_in((out,)), lane)
        if name == "lift_fresh" and out.dim() == 0 and not table.place_of(out):
            table.place(out, NUMBER, lane.name)

    def _skip(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name
        if name == "profiler::_record_function_enter_new":
            self._recorder.labels.append(args[0])
        elif name == "profiler::_record_function_exit" and self._recorder.labels:
            self._recorder.labels.pop()
        return func(*args, **kwargs)


def _written(facts: Operator, args: Any, kwargs: Any) -> list[torch.Tensor]:
    values = [args[i] for i in facts.writes if i < len(args)]
    values += [kwargs[name] for name in facts.writes_named if name in kwargs]
    return tensors_in(values)
