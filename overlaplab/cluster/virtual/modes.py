"""The mode of a rank: every operator, below autograd, passes through here."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed import _mesh_layout, device_mesh
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from overlaplab.cluster.virtual import patching, placement
from overlaplab.cluster.virtual.copies import HostMemory, moves
from overlaplab.cluster.virtual.naming import GRADIENT_OPERATORS, name_gradient
from overlaplab.cluster.virtual.patching import in_ranks, patched
from overlaplab.cluster.virtual.placement import PLAIN
from overlaplab.cluster.virtual.recorder import Recorder
from overlaplab.cluster.virtual.storage import NUMBER, PLACED
from overlaplab.cluster.virtual.work import VirtualWork
from overlaplab.operators import (
    COLLECTIVES,
    Operator,
    dtype_name,
    fused,
    operator,
    read,
    tensors_in,
    waits_for_mask,
    written,
)
from overlaplab.program.record import Access
from overlaplab.torch_versions import sharding_propagator

# Computes with the numbers of ranks, on the CPU: nothing of it is the program's.
_MESHES = frozenset({device_mesh.__file__, _mesh_layout.__file__})
_ENGINE = torch.autograd.graph.__file__  # who adds and keeps gradients; no hook
# Functional collectives that copy what they are given, and send the copy.
_COPY_FIRST = frozenset(
    f"{COLLECTIVES}::{name}"
    for name in ("all_reduce", "all_reduce_coalesced", "broadcast")
)
_BETWEEN = frozenset(
    m.__file__ for m in (fused, patching, placement, _device, torch._tensor)
)


@contextlib.contextmanager
def unseen_shapes() -> Iterator[None]:
    """While open, DTensor finds global shapes beside the modes of ranks. It runs the
    whole operator on fake tensors, the first time in a process, and means no kernel."""

    def propagate(_: Recorder, original: Any, *args: Any) -> Any:
        with _disable_current_modes():
            return original(*args)

    name = "_propagate_tensor_meta_non_cached"
    with patched([in_ranks(sharding_propagator(), name, propagate)]):
        yield


class RecordMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each operator and records it; if `fake`, tensors have no values."""

    def __init__(self, recorder: Recorder, *, fake: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._host_memory = HostMemory(recorder)
        self._fake_collectives = FakeCollectives() if fake else None

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
        caller = _caller()
        if caller in _MESHES:
            with _disable_current_modes():  # with values, also where tensors are fake
                return func(*args, **kwargs)
        recorder, facts = self._recorder, operator(func)
        if facts.composite:  # and no autograd took it apart
            with self:
                return fused.take_apart(func, facts.name, args, kwargs)
        table, place = recorder.storages, ""
        if kwargs and moves(kwargs):
            kwargs, place = self._host_memory.place(kwargs)
        if (table.has_host or table.placing_on_host or place) and not facts.skipped:
            inputs = tensors_in((*args, *kwargs.values()))
            if self._host_memory.takes(facts, inputs, place):
                recorder.turns.check()
                writes = written(facts, args, kwargs)
                return self._host_memory.run(
                    func, facts, args, kwargs, place, inputs, writes
                )
            if table.is_loading:  # ... what its dataset has put into the GPU's memory
                with table.placing(PLACED):
                    return self._on_device(func, facts, args, kwargs, caller)
        return self._on_device(func, facts, args, kwargs, caller)

    def _on_device(
        self, func: Any, facts: Operator, args: Any, kwargs: Any, caller: str
    ) -> Any:
        """Run what is no matter of the host's memory."""
        recorder = self._recorder
        if facts.records:
            out = self._record(func, facts, args, kwargs, caller)
        elif facts.skipped:
            return self._skip(func, args, kwargs)
        else:
            recorder.turns.check()
            out = func(*args, **kwargs)
            if facts.allocates:
                self._adopt(facts.name, out)
        if facts.name in GRADIENT_OPERATORS and caller == _ENGINE:
            name_gradient(recorder, out)
        return out

    def _record(
        self, func: Any, facts: Operator, args: Any, kwargs: Any, caller: str
    ) -> Any:
        """Run an operator and record it as a kernel on the current stream."""
        recorder = self._recorder
        table, lane = recorder.storages, recorder.current()
        recorder.settle(lane)
        inputs = tensors_in(args)
        marked = facts.writes or facts.writes_named
        changed = written(facts, args, kwargs) if marked else []
        needed = read(facts, args, kwargs, changed)
        if table.has_host:  # what is left of the host's are numbers for the kernel
            needed = [t for t in needed if not table.is_host(t)]
        reads, read_bytes = table.accesses(needed, lane.name)
        if facts.host_sync:
            self._host_sync(facts.host_sync, reads)
        elif facts.indexes and waits_for_mask(args):
            self._host_sync("nonzero", reads)
        numbers = (
            table.has_numbers
            and (not reads or table.all_numbers(reads))
            and table.all_numbers((*reads, *table.accesses(changed, lane.name)[0]))
        )
        if table.has_resized:  # else torch (2.13) reads and writes at a null pointer
            table.accesses(changed, lane.name)
        out = func(*args, **kwargs)
        if changed and facts.name.startswith("_foreach"):
            # Under any dispatch mode torch (2.13) forgets the versions of lists.
            increment_version(t for t in changed if not t.is_inference())
        outputs = [out] if isinstance(out, torch.Tensor) else tensors_in((out,))
        writes, write_bytes = table.accesses(changed + outputs, lane.name)
        if numbers:
            for tensor in outputs:
                table.place(tensor, NUMBER, lane.name)
        elif writes:  # otherwise its result is a number
            if facts.name in ("add", "add_") and caller == _ENGINE:
                recorder.wait_for_gradients(lane, reads)
            recorder.launch(
                "compute",
                facts.name,
                lane,
                reads=reads,
                writes=writes,
                flops=0 if facts.flops is None else int(facts.flops(args, kwargs, out)),
                dtype=dtype_name((outputs or changed)[0].dtype),
                read_bytes=read_bytes,
                write_bytes=write_bytes,
                differentiable=any(tensor.requires_grad for tensor in inputs),
                launches=(
                    facts.launches
                    if isinstance(facts.launches, int)
                    else facts.launches(args, kwargs)
                ),
            )
        return out

    def _host_sync(self, name: str, reads: tuple[Access, ...]) -> None:
        """A value that no operator made is on the host already."""
        storages = self._recorder.storages
        if any(storages.last_writer(access) is not None for access in reads):
            frontier = self._recorder.current().frontier()
            self._recorder.host_wait(name, frontier, reads)

    def _adopt(self, name: str, out: Any) -> None:
        """Note new storages; a number made by torch.tensor(1.0) is the CPU's."""
        table, lane = self._recorder.storages, self._recorder.current()
        table.accesses(tensors_in((out,)), lane.name)
        if name == "lift_fresh" and out.dim() == 0 and not table.place_of(out):
            table.place(out, NUMBER, lane.name)

    def _skip(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name
        if name in _COPY_FIRST:  # in C++, where no mode sees it
            clone = torch.ops.aten.clone.default
            dense = {"memory_format": torch.contiguous_format}
            given = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            made = [self.__torch_dispatch__(clone, (), (t,), dense) for t in given]
            func = _in_place(name)
            args = (made if given is args[0] else made[0], *args[1:])
        if self._fake_collectives and name.startswith(COLLECTIVES):
            return self._fake_collectives.run(func, args, kwargs)
        if name == "profiler::_record_function_enter_new":
            self._recorder.enter_label(args[0])
        elif name == "profiler::_record_function_exit":
            self._recorder.leave_label()
        return func(*args, **kwargs)


def _in_place(name: str) -> Any:
    """The collective that writes over what it is given."""
    return getattr(torch.ops._c10d_functional, f"{name.split('::')[1]}_").default


def _caller() -> str:
    """The file that called the operator."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename


class FakeCollectives:
    """Launches one rank's functional collectives of fake tensors; keeps their works.

    With values, the C++ of `_c10d_functional` calls the process group. On fake tensors
    only its shape rule runs: here the group is called as that C++ would.
    """

    def __init__(self) -> None:
        self._works: dict[int, VirtualWork] = {}  # by the result's storage

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of `func` on fake tensors, its collective launched or waited for.

        Raises:
            NotImplementedError: it is none that is known here.
        """
        name = func._schema.name.removeprefix(f"{COLLECTIVES}::")
        if name == "wait_tensor":
            work = self._works.pop(_address(args[0]), None)
            if work is not None:
                work.wait()
            return args[0]  # the same tensor, as its C++ gives back
        out = func(*args, **kwargs)
        outputs = list(out) if isinstance(out, (list, tuple)) else [out]
        inputs = list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]]
        work = _launch(name, _group(args[-1]), inputs, outputs, args)
        for tensor in outputs:
            self._works[_address(tensor)] = work
        return out


def _launch(name: str, group: Any, inputs: Any, outputs: Any, args: Any) -> VirtualWork:
    kind = name.removesuffix("_").removesuffix("_coalesced")
    if kind == "all_reduce":
        opts: Any = dist.AllreduceCoalescedOptions()
        opts.reduceOp = _reduce_op(args[1])
        work = group.allreduce_coalesced(outputs, opts)
    elif kind == "broadcast":
        opts = dist.BroadcastOptions()
        opts.rootRank = args[1]
        work = group.broadcast(outputs, opts)
    elif kind == "all_gather_into_tensor":
        work = group.all_gather_single_coalesced(outputs, inputs)
    elif kind == "reduce_scatter_tensor":
        opts = dist.ReduceScatterOptions()
        opts.reduceOp = _reduce_op(args[1])
        work = group.reduce_scatter_single_coalesced(outputs, inputs, opts)
    elif kind == "all_to_all_single":
        opts = dist.AllToAllOptions()
        work = group.all_to_all_single(outputs[0], inputs[0], *args[1:3], opts)
    else:
        raise NotImplementedError(
            f"{COLLECTIVES}.{name} is not supported with fake=True; run with fake=False"
        )
    made: VirtualWork = work
    return made


def _group(given: Any) -> Any:
    c10d: Any = dist.distributed_c10d
    return c10d._resolve_process_group(given) if isinstance(given, str) else given


def _reduce_op(name: str) -> Any:
    return getattr(dist.ReduceOp, name.upper())


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
