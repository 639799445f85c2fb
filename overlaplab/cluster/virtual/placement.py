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

from overlaplab.cluster.virtual.patching import Patch, in_ranks, patched
from overlaplab.cluster.virtual.recorder import Recorder, current_recorder
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
_TORCHS_TO: Any = torch.Tensor.to


@contextlib.contextmanager
def placing_calls() -> Iterator[None]:
    """While open, calls that place tensors are seen in the threads of ranks."""
    _device._device_constructors()  # keeps them by name
    tensor: Any = torch.Tensor
    patches = [_method(name, act) for name, act in _MOVES.items()]
    patches += [(t, "device", _device_of(t.device)) for t in (tensor, FakeTensor)]
    for owner, names in ((torch, _FACTORIES), (tensor, _METHODS)):
        patches += [(owner, name, _factory(getattr(owner, name))) for name in names]
    with _known_to_torchscript(patches), patched(patches), _forgotten_by_the_compiler():
        yield


@contextlib.contextmanager
def _known_to_torchscript(patches: list[Patch]) -> Iterator[None]:
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


def memory_of(device: Any, caller: CodeType) -> str:
    """Which memory `device` stands for, as `caller` names it: "device", "pageable", or
    "" if it does not say."""
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


def _method(name: str, act: Callable[..., Any]) -> Patch:
    """In a rank a method of torch.Tensor is `act(recorder, original, tensor, ...)`."""
    original = getattr(torch.Tensor, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = current_recorder()
        if recorder is None or type(self) not in PLAIN:
            return original(self, *args, **kwargs)
        return act(recorder, original, self, *args, **kwargs)

    return torch.Tensor, name, method


def _to(rank: Recorder, original: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    first = args[0] if args else kwargs.get("device", kwargs.get("other"))
    if first is None or isinstance(first, torch.dtype):
        return original(tensor, *args, **kwargs)
    if isinstance(first, torch.Tensor):
        on_host = _is_host(rank, first)
        if type(first) not in PLAIN or on_host == _is_host(rank, tensor):
            return original(tensor, *args, **kwargs)
        device = TO_HOST if on_host else DEVICE
        kwargs.pop("other", None)
        rest = (first.dtype, *args[1:])
    else:
        target = memory_of(first, sys._getframe(2).f_code)
        if not target:
            return original(tensor, *args, **kwargs)
        device = _destination(rank, tensor, target)
        kwargs.pop("device", None)
        rest = args[1:]
        if not rest and "dtype" not in kwargs:
            rest = (tensor.dtype,)
    return _move(rank, "to", tensor, device, *rest, **kwargs)


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


def _move(recorder: Recorder, caller: str, *args: Any, **kwargs: Any) -> Any:
    """Call torch's `to`; the copy that it makes is `caller`'s."""
    recorder.moving = caller
    try:
        return _TORCHS_TO(*args, **kwargs)
    finally:
        recorder.moving = ""


def _cpu(recorder: Recorder, original: Any, tensor: Any, **kwargs: Any) -> Any:
    if _is_host(recorder, tensor):
        return original(tensor, **kwargs)
    return _move(recorder, "cpu", tensor, TO_HOST, tensor.dtype, **kwargs)


def _cuda(
    recorder: Recorder,
    _: Any,
    tensor: Any,
    device: Any = None,
    non_blocking: bool = False,
    **kwargs: Any,
) -> Any:
    how = (_destination(recorder, tensor, PLACED), tensor.dtype, non_blocking)
    return _move(recorder, "cuda", tensor, *how, **kwargs)


def _pin_memory(recorder: Recorder, _: Any, tensor: Any, *__: Any, **___: Any) -> Any:
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
        return _move(recorder, "pin_memory", tensor, TO_HOST, tensor.dtype)


def _is_pinned(rank: Recorder, _: Any, tensor: Any, *__: Any, **___: Any) -> bool:
    return rank.storages.place_of(tensor) == PINNED


def _device_of(original: Any) -> property:
    """`tensor.device` in a rank tells the two memories apart, except to torch."""
    read = original.__get__

    def device(self: Any) -> torch.device:
        real: torch.device = read(self)
        if _of_torch(sys._getframe(1).f_code) or real.type != "cpu":
            return real
        recorder = current_recorder()
        if recorder is None or type(self) not in PLAIN:
            return real
        table = recorder.storages
        on_host = table.is_host(self) or (table.is_loading and table.is_unplaced(self))
        return real if on_host else DEVICE

    return property(device)


def _factory(original: Any) -> Any:
    of_data = original in (torch.as_tensor, torch.asarray)

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        device, pin = kwargs.get("device"), kwargs.get("pin_memory")
        if (device is None and not pin) or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        recorder = current_recorder()
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


_MOVES: dict[str, Callable[..., Any]] = {
    "to": _to,
    "cpu": _cpu,
    "cuda": _cuda,
    "pin_memory": _pin_memory,
    "is_pinned": _is_pinned,
}
_SYNCS = {
    "tolist": "tolist",
    "numpy": "numpy",
    "__repr__": "print",
    "__format__": "print",
}


@contextlib.contextmanager
def host_syncs() -> Iterator[None]:
    """While open, calls that make the CPU wait for a GPU are seen in ranks' threads,
    and `record_stream`. `item`, `bool(tensor)` and the like reach the rank's mode."""
    tensor: Any = torch.Tensor
    patches = [
        in_ranks(tensor, n, functools.partial(_sync, name))
        for n, name in _SYNCS.items()
    ]
    with patched([*patches, _method("record_stream", _record_stream)]):
        yield


def _sync(
    name: str, rank: Recorder, original: Any, tensor: Any, *args: Any, **kwargs: Any
) -> Any:
    if rank.looks_away or TracingContext.try_get():
        return original(tensor, *args, **kwargs)  # ... or the compiler looks at it
    if type(tensor) in PLAIN:
        rank.read_on_host(name, tensor)
    if name == "numpy" and not rank.storages.is_host(tensor):
        # The array is the host's memory: what is written there stays there.
        return original(tensor, *args, **kwargs).copy()
    if name != "print":
        return original(tensor, *args, **kwargs)
    if isinstance(tensor, FakeTensor):  # has no number that a format could show
        args = args and ("",)
    with rank.looking_away():  # how its text is made
        return original(tensor, *args, **kwargs)


def _record_stream(recorder: Recorder, _: Any, tensor: Any, s: Any) -> None:
    lane = recorder.current()
    recorder.storages.record_stream(tensor, s.lane.name, lane.name)
