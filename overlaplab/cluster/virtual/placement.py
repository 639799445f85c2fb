"""Calls that dispatch nothing here and mean something on a GPU: where a rank's tensors
are (in its memory or in the host's), and what makes the CPU wait for it.

All memory of a virtual rank is this machine's, so a tensor's device does not say. A
storage stays where its program put it: `device="cpu"`, `.cpu()` and `.to("cpu")` mean
the host's pageable memory, `pin_memory` the host's pinned memory, `ol.device()` and any
"cuda" the GPU's. What nobody places is the GPU's, too, except in loaders (loading.py).
While a run is open, the calls that place are patched: in a rank's thread its
`StorageTable` hears of them, elsewhere they are torch's own. torch's code that names
"cpu" places nothing: it means the device of its tensors. To move a tensor, a call asks
torch for a device with an index that no tensor has, which reaches the rank's mode as a
`_to_copy` (copies.py).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _device

from overlaplab.cluster.virtual.recorder import Recorder
from overlaplab.cluster.virtual.storage import NUMBER, PAGEABLE, PINNED, PLACED

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})
DEVICE = torch.device("cpu", 0)  # what `ol.device()` is on the virtual cluster
TO_HOST = torch.device("cpu", 1)
_CPU = torch.device("cpu")

# Called as `torch.NAME(..., device=...)`.
_FACTORIES = (
    *("arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye"),
    *("full", "full_like", "linspace", "ones", "ones_like", "rand", "rand_like"),
    *("randint", "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like"),
)
_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_MODULE = os.path.abspath(torch.nn.modules.module.__file__)
_is_torch: dict[str, bool] = {}


@contextlib.contextmanager
def placing_calls(recorder: Callable[[], Recorder | None]) -> Iterator[None]:
    """While open, calls that place tensors are seen in the threads of ranks.

    Args:
        recorder: the calling thread's, None where it is no rank.
    """
    _device._device_constructors()  # keeps them by name
    tensor: Any = torch.Tensor
    patches: list[tuple[Any, str, Any]] = [
        (tensor, "to", _to(recorder, tensor.to)),
        (tensor, "cpu", _cpu(recorder, tensor.cpu, tensor.to)),
        (tensor, "cuda", _cuda(recorder, tensor.cuda, tensor.to)),
        (tensor, "pin_memory", _pin_memory(recorder, tensor.pin_memory, tensor.to)),
        (tensor, "is_pinned", _is_pinned(recorder, tensor.is_pinned)),
        (tensor, "device", _device_of(recorder, tensor.device)),
        (FakeTensor, "device", _device_of(recorder, FakeTensor.device)),
    ]
    for owner, names in ((torch, _FACTORIES), (tensor, _METHODS)):
        patches += [(owner, n, _factory(recorder, getattr(owner, n))) for n in names]
    with _known_to_torchscript(patches), patched(patches), _forgotten_by_the_compiler():
        yield


@contextlib.contextmanager
def _known_to_torchscript(patches: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Its compiler knows torch's functions by their ids; some imports script (ZeRO)."""
    builtins: Any = torch.jit._builtins
    table = builtins._get_builtin_table()  # made now: of torch's own
    stand_ins = {
        id(new): table[id(getattr(torch, name))]
        for owner, name, new in patches
        if owner is torch and id(getattr(torch, name)) in table
    }
    table.update(stand_ins)
    try:
        yield
    finally:
        for key in stand_ins:
            del table[key]


@contextlib.contextmanager
def _forgotten_by_the_compiler() -> Iterator[None]:
    """A compiler that is imported meanwhile would take the patches for torch's own."""
    name = "torch._dynamo.trace_rules"
    known = name in sys.modules
    try:
        yield
    finally:
        rules: Any = sys.modules.get(name)
        if rules is not None and not known:
            rules.get_torch_obj_rule_map.cache_clear()


@contextlib.contextmanager
def patched(patches: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """While open, `owner.name` is another one, for each of (owner, name, new)."""
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in patches]
    try:
        for owner, name, new in patches:
            setattr(owner, name, new)
        yield
    finally:
        for owner, name, old in before:
            if old is None:  # inherited
                delattr(owner, name)
            else:
                setattr(owner, name, old)


def memory_of(device: Any, caller: CodeType) -> str:
    """Which memory `device` stands for: "device", "pageable", or "" if it does not say.

    Args:
        device: as given to torch.
        caller: who names it.
    """
    if isinstance(device, str):
        kind, _, index = device.partition(":")
    elif isinstance(device, torch.device):
        kind, index = device.type, "" if device.index is None else str(device.index)
    else:
        return "" if device is None else PLACED  # a number is a GPU's
    if kind == "cuda":
        return PLACED
    if kind != "cpu":
        return ""
    if index:
        return PLACED if index == "0" else PAGEABLE
    return "" if _of_torch(caller) else PAGEABLE


def _of_torch(code: CodeType) -> bool:
    """`Module.to` speaks for its caller."""
    filename = code.co_filename
    known = _is_torch.get(filename)
    if known is None:
        known = filename.startswith(_TORCH) and filename != _MODULE
        _is_torch[filename] = known
    return known


Find = Callable[[], Recorder | None]  # the calling thread's


def _in_ranks(find: Find, original: Any, act: Callable[..., Any]) -> Any:
    """A method of torch.Tensor that is `act(recorder, tensor, ...)` in a rank."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = find()
        if recorder is None or type(self) not in PLAIN:
            return original(self, *args, **kwargs)
        return act(recorder, self, *args, **kwargs)

    return method


# Each of these is the new method of torch.Tensor, or function of torch.


def _to(find: Find, original: Any) -> Any:
    def to(recorder: Recorder, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("device", kwargs.get("other"))
        if first is None or isinstance(first, torch.dtype):
            return original(tensor, *args, **kwargs)
        if isinstance(first, torch.Tensor):
            on_host = _is_host(recorder, first)
            if type(first) not in PLAIN or on_host == _is_host(recorder, tensor):
                return original(tensor, *args, **kwargs)
            device = TO_HOST if on_host else DEVICE
            kwargs.pop("other", None)
            rest = (first.dtype, *args[1:])
        else:
            target = memory_of(first, sys._getframe(2).f_code)
            if not target:
                return original(tensor, *args, **kwargs)
            device = _destination(recorder, tensor, target)
            kwargs.pop("device", None)
            rest = args[1:]
            if not rest and "dtype" not in kwargs:
                rest = (tensor.dtype,)
        return _move(recorder, "to", original, tensor, device, *rest, **kwargs)

    return _in_ranks(find, original, to)


def _destination(recorder: Recorder, tensor: torch.Tensor, target: str) -> torch.device:
    """Where torch is asked to move `tensor`: nowhere if it is there already."""
    on_host = _is_host(recorder, tensor)
    if target != PLACED:
        return _CPU if on_host else TO_HOST
    if on_host:
        return DEVICE
    if recorder.storages.place_of(tensor) != NUMBER:
        recorder.storages.place(tensor, PLACED, recorder.current().name)
    return _CPU


def _is_host(recorder: Recorder, tensor: torch.Tensor) -> bool:
    """Whether it is in the host's memory; a loader's is, if nobody said where."""
    if recorder.storages.is_loading:
        recorder.claim_for_host("to", (tensor,))
    return recorder.storages.is_host(tensor)


def _move(recorder: Recorder, caller: str, to: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `to`; the copy that it makes is `caller`'s."""
    recorder.moving = caller
    try:
        return to(*args, **kwargs)
    finally:
        recorder.moving = ""


def _cpu(find: Find, original: Any, to: Any) -> Any:
    def cpu(recorder: Recorder, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_host(recorder, tensor):
            return original(tensor, *args, **kwargs)
        return _move(recorder, "cpu", to, tensor, TO_HOST, tensor.dtype, **kwargs)

    return _in_ranks(find, original, cpu)


def _cuda(find: Find, original: Any, to: Any) -> Any:
    def cuda(
        recorder: Recorder,
        tensor: Any,
        device: Any = None,
        non_blocking: bool = False,
        **kwargs: Any,
    ) -> Any:
        target = _destination(recorder, tensor, PLACED)
        how = (target, tensor.dtype, non_blocking)
        return _move(recorder, "cuda", to, tensor, *how, **kwargs)

    return _in_ranks(find, original, cuda)


def _pin_memory(find: Find, original: Any, to: Any) -> Any:
    def pin_memory(recorder: Recorder, tensor: Any, *_: Any, **__: Any) -> Any:
        place = recorder.storages.place_of(tensor)
        if place == PINNED:
            return tensor
        if recorder.storages.is_arriving and place != PLACED:
            recorder.storages.place(tensor, PINNED, recorder.current().name)
            return tensor
        if place == PLACED:
            raise RuntimeError(
                "pin_memory of a tensor in the GPU's memory: only the host's can be "
                "pinned. Make the tensor there: torch.empty(..., pin_memory=True), or "
                "tensor.cpu().pin_memory()"
            )
        with torch.no_grad():
            return _move(recorder, "pin_memory", to, tensor, TO_HOST, tensor.dtype)

    return _in_ranks(find, original, pin_memory)


def _is_pinned(find: Find, original: Any) -> Any:
    def is_pinned(recorder: Recorder, tensor: Any, *_: Any, **__: Any) -> bool:
        return recorder.storages.place_of(tensor) == PINNED

    return _in_ranks(find, original, is_pinned)


def _device_of(find: Find, original: Any) -> property:
    """`tensor.device` in a rank tells the two memories apart, except to torch."""
    read = original.__get__

    def device(self: Any) -> torch.device:
        real: torch.device = read(self)
        if _of_torch(sys._getframe(1).f_code) or real.type != "cpu":
            return real
        recorder = find()
        if recorder is None or type(self) not in PLAIN:
            return real
        table = recorder.storages
        on_host = table.is_host(self) or (table.is_loading and table.is_unplaced(self))
        return real if on_host else DEVICE

    return property(device)


def _factory(find: Find, original: Any) -> Any:
    of_data = original in (torch.as_tensor, torch.asarray)

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        device, pin = kwargs.get("device"), kwargs.get("pin_memory")
        if (device is None and not pin) or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        recorder = find()
        if recorder is None:
            return original(*args, **kwargs)
        place = PINNED if pin else memory_of(device, sys._getframe(1).f_code)
        if not place:
            return original(*args, **kwargs)
        kwargs["device"] = _CPU
        if pin:
            kwargs["pin_memory"] = False
        if of_data and args and isinstance(args[0], torch.Tensor):
            target = DEVICE if place == PLACED else TO_HOST
            return original(args[0].to(target), *args[1:], **kwargs)
        with recorder.storages.placing(place):
            made = original(*args, **kwargs)
            recorder.storages.access(made, recorder.current().name)
        return made

    return make


_NAMES = {
    "tolist": "tolist",
    "numpy": "numpy",
    "__repr__": "print",
    "__format__": "print",
}


@contextlib.contextmanager
def host_syncs(recorder: Callable[[], Recorder | None]) -> Iterator[None]:
    """While open, calls that make the CPU wait for a GPU are seen in ranks' threads,
    and `record_stream`. `item`, `bool(tensor)` and the like reach the rank's mode.

    Args:
        recorder: the calling thread's, None where it is no rank.
    """
    tensor: Any = torch.Tensor
    patches = [
        (tensor, method, _sync(recorder, name, getattr(tensor, method)))
        for method, name in _NAMES.items()
    ]
    record_stream = _record_stream(recorder, tensor.record_stream)
    with patched([*patches, (tensor, "record_stream", record_stream)]):
        yield


def _sync(find: Find, name: str, original: Any) -> Any:
    def sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = find()
        if recorder is None or recorder.looks_away or TracingContext.try_get():
            return original(self, *args, **kwargs)  # ... or the compiler looks at it
        if type(self) in PLAIN:
            recorder.read_on_host(name, self)
        if name == "numpy" and not recorder.storages.is_host(self):
            # The array is the host's memory: what is written there stays there.
            return original(self, *args, **kwargs).copy()
        if name != "print":
            return original(self, *args, **kwargs)
        if isinstance(self, FakeTensor):  # has no number that a format could show
            args = args and ("",)
        with recorder.looking_away():  # how its text is made
            return original(self, *args, **kwargs)

    return sync


def _record_stream(find: Find, original: Any) -> Any:
    def record_stream(recorder: Recorder, tensor: Any, s: Any) -> None:
        lane = recorder.current()
        recorder.storages.record_stream(tensor, s.lane.name, lane.name)

    return _in_ranks(find, original, record_stream)
