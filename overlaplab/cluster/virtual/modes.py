"""The modes of a rank: every operator and every host sync passes through here.

`RecordMode` sees operators below autograd; `HostSyncMode` sees the calls that dispatch
nothing on CPU tensors although on a GPU they would make the CPU wait.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from overlaplab.cluster.virtual.operators import (
    SKIPPED_NAMESPACES,
    dtype_name,
    operator,
)
from overlaplab.cluster.virtual.recorder import Recorder
from overlaplab.cluster.virtual.storage import covered_bytes
from overlaplab.program.record import Access

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})


class RecordMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each operator and records it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

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
            if kind not in _PLAIN:
                return NotImplemented
        kwargs = kwargs or {}
        recorder = self._recorder
        facts = operator(func)
        if not facts.records:
            if getattr(func, "namespace", "") in SKIPPED_NAMESPACES:
                return self._skip(func, args, kwargs)
            recorder.turns.check()
            out = func(*args, **kwargs)
            self._adopt(out)
            return out
        lane = recorder.current()
        recorder.settle(lane)
        name = lane.name
        access = recorder.storages.access
        overwritten: tuple[torch.Tensor, ...] = ()
        writes: dict[Access, None] = {}
        if facts.writes_named:
            overwritten = _written(facts, args, kwargs)
            for tensor in overwritten:
                _add(writes, access(tensor, name))
        reads: dict[Access, None] = {}
        for tensor in _tensors(args) if facts.reads else ():
            if not (facts.overwrites and any(tensor is w for w in overwritten)):
                _add(reads, access(tensor, name))
        if kwargs:
            for tensor in _tensors(kwargs.values()):
                if not (facts.overwrites and any(tensor is w for w in overwritten)):
                    _add(reads, access(tensor, name))
        if facts.host_sync:
            self._host_sync(facts.host_sync, tuple(reads))
        out = func(*args, **kwargs)
        if facts.host_sync == "item" or facts.host_sync == "equal":
            return out
        dtype = None
        outs = (out,) if isinstance(out, torch.Tensor) else tuple(_tensors((out,)))
        for tensor in outs:
            if dtype is None:
                dtype = tensor.dtype
            _add(writes, access(tensor, name))
        if dtype is None and overwritten:
            dtype = overwritten[0].dtype
        if not writes and not reads:
            return out
        recorder.launch(
            "compute",
            facts.name,
            lane,
            reads=tuple(reads),
            writes=tuple(writes),
            flops=0 if facts.flops is None else facts.flops(args, kwargs, out),
            dtype=dtype_name(dtype),
            read_bytes=sum(map(covered_bytes, reads)),
            write_bytes=sum(map(covered_bytes, writes)),
        )
        return out

    def _host_sync(self, name: str, reads: tuple[Access, ...]) -> None:
        """A value that no operator made is on the host already."""
        storages = self._recorder.storages
        if any(storages.last_writer(access) is not None for access in reads):
            self._recorder.host_wait(name, self._recorder.current().frontier())

    def _adopt(self, out: Any) -> None:
        lane = self._recorder.current().name
        for tensor in _tensors((out,)):
            self._recorder.storages.access(tensor, lane)

    def _skip(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name
        if name == "profiler::_record_function_enter_new":
            self._recorder.labels.append(args[0])
        elif name == "profiler::_record_function_exit" and self._recorder.labels:
            self._recorder.labels.pop()
        return func(*args, **kwargs)


class HostSyncMode(TorchFunctionMode):
    """Records what makes a CPU wait for a GPU and is not dispatched here."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _SYNCS.get(func)
        if name is None:
            return func(*args, **kwargs)
        if name == "record_stream":  # keeps a block from reuse: nothing is reused here
            return None
        if name == "to" and "cpu" not in args[1:2] and kwargs.get("device") != "cpu":
            return func(*args, **kwargs)
        tensor = args[0]
        if type(tensor) in _PLAIN and name != "pin_memory":
            self._wait(name, tensor)
        if name == "print":
            with _disable_current_modes():
                return func(*args, **kwargs)
        if name == "pin_memory":
            return tensor
        return func(*args, **kwargs)

    def _wait(self, name: str, tensor: torch.Tensor) -> None:
        recorder = self._recorder
        lane = recorder.current()
        access = recorder.storages.access(tensor, lane.name)
        if access is not None and recorder.storages.last_writer(access) is not None:
            recorder.host_wait(name, lane.frontier())


_SYNCS: dict[Any, str] = {
    torch.Tensor.cpu: "cpu",
    torch.Tensor.to: "to",
    torch.Tensor.tolist: "tolist",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.__array__: "numpy",
    torch.Tensor.__repr__: "print",
    torch.Tensor.__format__: "print",
    torch.Tensor.pin_memory: "pin_memory",
    torch.Tensor.record_stream: "record_stream",
}


def _add(accesses: dict[Access, None], access: Access | None) -> None:
    if access is not None:
        accesses[access] = None


def _tensors(values: Any) -> list[torch.Tensor]:
    """The tensors in arguments or results, in order; lists are looked into."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _written(facts: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, ...]:
    values = [args[i] for i in facts.writes if i < len(args)]
    values += [kwargs[name] for name in facts.writes_named if name in kwargs]
    return tuple(_tensors(values))
