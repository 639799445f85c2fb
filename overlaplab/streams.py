"""Device-neutral streams: the names and meaning of torch.cuda, on any cluster.

`Stream`, `Event`, `stream(s)`, `current_stream()` and `synchronize()` are torch.cuda's
own objects where the calling rank runs on CUDA, virtual ones on the virtual cluster,
and no-ops in a CPU process, where every operator is finished when it returns.
`annotate` labels a stretch of work (a profiler range, and whatever else listens to
ranges) and `name_tensor` names a tensor for reports. This module does not know the
clusters: a cluster installs a provider for its rank's thread (virtual) or for its whole
process (pool).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from overlaplab import torch_versions  # noqa: F401 (refuses a torch without our names)
from overlaplab.timeline.span import STEP


class Provider(Protocol):
    """What a cluster gives its ranks. Objects follow torch.cuda's interface."""

    def device(self) -> torch.device: ...
    def make_stream(self, priority: int) -> Any: ...
    def make_event(self, enable_timing: bool) -> Any: ...
    def current_stream(self) -> Any: ...
    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...
    def synchronize(self) -> None: ...
    def annotate(self, name: str) -> AbstractContextManager[Any]: ...
    def name_tensor(self, tensor: torch.Tensor, name: str) -> None: ...


RangeListener = Callable[[str], AbstractContextManager[Any]]

_thread = threading.local()
_process_provider: Provider | None = None
_listeners: tuple[RangeListener, ...] = ()


def install_thread_provider(provider: Provider | None) -> Provider | None:
    """Make `provider` this thread's; returns the one that it replaces."""
    previous: Provider | None = getattr(_thread, "provider", None)
    _thread.provider = provider
    return previous


def install_process_provider(provider: Provider | None) -> Provider | None:
    """Make `provider` that of every thread without its own; returns the old one."""
    global _process_provider
    previous, _process_provider = _process_provider, provider
    return previous


def thread_provider() -> Provider | None:
    """The calling thread's own provider."""
    own: Provider | None = getattr(_thread, "provider", None)
    return own


def provider() -> Provider:
    """The calling thread's provider: its own, its process's, or chosen by device."""
    own = thread_provider()
    if own is not None:
        return own
    if _process_provider is not None:
        return _process_provider
    return _CUDA if _runs_on_cuda() else _CPU


def device() -> torch.device:
    """The calling rank's device."""
    return provider().device()


def Stream(priority: int = 0) -> Any:
    """A new stream; a lower `priority` goes first, as in torch.cuda.Stream."""
    return provider().make_stream(priority)


def Event(enable_timing: bool = False) -> Any:
    """A new event, as torch.cuda.Event."""
    return provider().make_event(enable_timing)


def current_stream() -> Any:
    """The stream on which the calling rank's next operator is launched."""
    return provider().current_stream()


def stream(stream: Any) -> AbstractContextManager[Any]:
    """Launch the operators of the `with` block on `stream`."""
    return provider().stream(stream)


def key_reader(provider: Provider) -> Callable[[], Hashable]:
    """A fast way to ask which stream is current, for hooks that run very often.

    Building a torch.cuda.Stream costs microseconds at every gradient. The keys of
    equal streams are equal; `stream_of` gives the stream of one.
    """
    own = getattr(provider, "key_reader", None)
    reader: Callable[[], Hashable] = own() if own else provider.current_stream
    return reader


def stream_of(key: Any) -> Any:
    """The stream of a key that a `key_reader` gave."""
    if not isinstance(key, tuple):
        return key
    stream_id, device_index, device_type = key
    return torch.cuda.Stream(  # type: ignore[no-untyped-call]
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


def go_first(group: Any) -> None:
    """Collectives of `group` have high priority: tell a cluster that models it.

    On NCCL a communicator is made so, and nobody need be told.
    """
    tell = getattr(provider(), "go_first", None)
    if tell is not None:
        tell(group)


def synchronize() -> None:
    """Block the CPU until everything that this rank launched has ended."""
    provider().synchronize()


def annotate(name: str) -> AbstractContextManager[Any]:
    """Label what the `with` block launches: a profiler range on real devices.

    "step 3", or "step" for the next one, marks a step as well: see `step`.
    """
    return provider().annotate(name)


def step(number: int) -> AbstractContextManager[Any]:
    """Mark what the `with` block launches as step `number`; see `Timeline.steps`.

    `annotate(f"step {number}")` does the same, and labels it besides on the virtual
    cluster. Steps do not nest: the outer one counts.
    """
    mark = getattr(provider(), "step", None)
    marked: AbstractContextManager[Any] = (
        annotate(f"{STEP}{number}") if mark is None else mark(number)
    )
    return marked


@contextlib.contextmanager
def listening_to_ranges(listener: RangeListener) -> Iterator[None]:
    """While open, every `annotate` on a real device also enters `listener(name)`."""
    global _listeners
    _listeners += (listener,)
    try:
        yield
    finally:
        _listeners = tuple(other for other in _listeners if other is not listener)


def ranges_are_wanted() -> bool:
    """Whether somebody sees ranges now: a profiler of this thread, or a listener."""
    return bool(_listeners) or torch._C._autograd._profiler_enabled()


def name_tensor(tensor: torch.Tensor, name: str) -> None:
    """Name the bytes of `tensor` in reports from now on (virtual cluster only)."""
    provider().name_tensor(tensor, name)


GRADIENT = "grad "  # before the name of a parameter: its gradient's, in reports


def name_gradients(model: torch.nn.Module, prefix: str = GRADIENT) -> None:
    """Name each gradient when it is complete, `prefix` and its parameter's name.

    Hooks run in the order of their registration: call it before a reducer is made.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            hook = _NameGradient(prefix + name)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


class _NameGradient:
    """A hook that names `.grad`; a class, so that a copy per rank keeps its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None and not parameter.grad.is_sparse:
            name_tensor(parameter.grad, self._name)


_NO_RANGE: AbstractContextManager[None] = contextlib.nullcontext()


def _range(name: str) -> AbstractContextManager[Any]:
    """A profiler range, and those of the listeners inside it, where anybody looks.

    A range that nobody sees would cost a hook as much as ten of its own lines.
    """
    if not ranges_are_wanted():
        return _NO_RANGE
    return _heard_range(name) if _listeners else torch.profiler.record_function(name)


@contextlib.contextmanager
def _heard_range(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.profiler.record_function(name))
        for listener in _listeners:
            stack.enter_context(listener(name))
        yield


def _runs_on_cuda() -> bool:
    if not torch.cuda.is_available():
        return False
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return "nccl" in str(dist.get_backend())
    return True


class _OnStream:
    """`torch.cuda.stream` for a stream of the current device, which hooks enter often.

    That one walks through fifty functions of Python to find the device, twice.
    """

    def __init__(self, stream: Any) -> None:
        self._to = (stream.stream_id, stream.device_index, stream.device_type)

    def __enter__(self) -> None:
        self._back = torch._C._cuda_getCurrentStream(self._to[1])
        _set_current(*self._to)

    def __exit__(self, *_: object) -> None:
        _set_current(*self._back)


def _set_current(stream_id: int, device_index: int, device_type: int) -> None:
    torch._C._cuda_setStream(
        stream_id=stream_id, device_index=device_index, device_type=device_type
    )


class _CudaProvider:
    """torch.cuda itself."""

    def device(self) -> torch.device:
        initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not initialized and "LOCAL_RANK" in os.environ:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return torch.device("cuda", torch.cuda.current_device())

    def make_stream(self, priority: int) -> Any:
        return torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]

    def make_event(self, enable_timing: bool) -> Any:
        return torch.cuda.Event(enable_timing=enable_timing)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Any:
        return torch.cuda.current_stream()

    def key_reader(self) -> Callable[[], Hashable]:
        read: Any = torch._C._cuda_getCurrentStream  # what torch.cuda itself calls
        return functools.partial(read, torch.cuda.current_device())

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        if torch.compiler.is_dynamo_compiling() or stream is None:
            return torch.cuda.stream(stream)
        if stream.device_index != torch._C._cuda_getDevice():
            return torch.cuda.stream(stream)
        return _OnStream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    annotate = staticmethod(_range)

    def name_tensor(self, tensor: torch.Tensor, name: str) -> None:
        return None


class _CpuStream:
    """The one stream of a CPU process: work is done when the call returns."""

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return _CpuEvent() if event is None else event

    def query(self) -> bool:
        return True


class _CpuEvent:
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _CpuProvider:
    """No-ops: on a CPU process every operator ends before its call returns."""

    _stream = _CpuStream()

    def device(self) -> torch.device:
        return torch.device("cpu")

    def make_stream(self, priority: int) -> Any:
        return _CpuStream()

    def make_event(self, enable_timing: bool) -> Any:
        return _CpuEvent()

    def current_stream(self) -> Any:
        return self._stream

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[Any]:
        yield stream

    def synchronize(self) -> None: ...

    annotate = staticmethod(_range)

    def name_tensor(self, tensor: torch.Tensor, name: str) -> None: ...


_CUDA = _CudaProvider()
_CPU = _CpuProvider()
