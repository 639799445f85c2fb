"""The modes of a rank: every operator and every host sync passes through here.

`RecordMode` sees operators below autograd; `HostSyncMode` sees the calls that dispatch
nothing on CPU tensors although on a GPU they would make the CPU wait.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from overlaplab.cluster.virtual.operators import (
    SKIPPED_NAMESPACES,
    Operator,
    dtype_name,
    operator,
)
from overlaplab.cluster.virtual.recorder import Lane, Recorder
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
            self._adopt(facts.name, out)
            return out
        lane = recorder.current()
        recorder.settle(lane)
        written = _written(facts, args, kwargs) if facts.writes_named else []
        reads: dict[Access, None] = {}
        if facts.reads:
            inputs = _tensors(args)
            if kwargs:
                inputs += _tensors(kwargs.values())
            if facts.overwrites:
                inputs = [t for t in inputs if not any(t is w for w in written)]
            reads = self._accesses(inputs, lane)
        if facts.host_sync:
            self._host_sync(facts.host_sync, reads)
        on_host = self._on_host({**reads, **self._accesses(written, lane)})
        out = func(*args, **kwargs)
        outputs = _tensors((out,))
        writes = self._accesses(written + outputs, lane)
        if on_host:
            self._recorder.storages.mark_host(writes)
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
                differentiable=any(tensor.requires_grad for tensor in _tensors(args)),
            )
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

    def _on_host(self, accesses: Iterable[Access]) -> bool:
        """Whether an operator touches numbers on the host only: no kernel."""
        storages = self._recorder.storages
        return storages.has_host and storages.all_host(accesses)

    def _host_sync(self, name: str, reads: Iterable[Access]) -> None:
        """A value that no operator made is on the host already."""
        storages = self._recorder.storages
        if any(storages.last_writer(access) is not None for access in reads):
            frontier = self._recorder.current().frontier()
            self._recorder.host_wait(name, frontier, tuple(reads))

    def _adopt(self, name: str, out: Any) -> None:
        """Note new storages; a number made by torch.tensor(1.0) is the CPU's."""
        new = self._accesses(_tensors((out,)), self._recorder.current())
        if name == "lift_fresh" and out.dim() == 0:
            self._recorder.storages.mark_host(new)

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
        if name == "record_stream":
            return self._record_stream(*args, **kwargs)
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

    def _record_stream(self, tensor: torch.Tensor, s: Any) -> None:
        lane = self._recorder.current()
        self._recorder.storages.record_stream(tensor, s.lane.name, lane.name)

    def _wait(self, name: str, tensor: torch.Tensor) -> None:
        recorder = self._recorder
        lane = recorder.current()
        access = recorder.storages.access(tensor, lane.name)
        if access is not None and recorder.storages.last_writer(access) is not None:
            recorder.host_wait(name, lane.frontier(), (access,))

    def __enter__(self) -> HostSyncMode:
        _of_thread.mode = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self


_of_thread = threading.local()


@contextlib.contextmanager
def host_syncs_of_hooks() -> Iterator[None]:
    """While open, hooks of the backward pass are seen by their rank's HostSyncMode.

    torch takes a function mode off while the mode handles a call, and `backward` is
    such a call: without this, no hook would run under it.
    """
    autograd: Any = torch.autograd
    run_backward = autograd._engine_run_backward

    def run_under_mode(*args: Any, **kwargs: Any) -> Any:
        mode = getattr(_of_thread, "mode", None)
        with contextlib.nullcontext() if mode is None else mode:
            return run_backward(*args, **kwargs)

    autograd._engine_run_backward = run_under_mode
    try:
        yield
    finally:
        autograd._engine_run_backward = run_backward


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


def _tensors(values: Any) -> list[torch.Tensor]:
    """The tensors in arguments or results, in order; lists are looked into."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _written(facts: Operator, args: Any, kwargs: Any) -> list[torch.Tensor]:
    values = [args[i] for i in facts.writes if i < len(args)]
    values += [kwargs[name] for name in facts.writes_named if name in kwargs]
    return _tensors(values)
