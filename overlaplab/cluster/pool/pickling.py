"""Bytes for a function, its arguments and its result, on their way between processes.

cloudpickle sends functions of a notebook cell by value. On top of it this module keeps
what plain pickle loses and the virtual cluster's copies keep: tensors that share
memory share it on the other side too (a flat buffer and its views), `.grad` and
Python attributes of tensors survive, hooks do not. Knows nothing of processes.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.machinery import PathFinder
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch

from overlaplab import ours

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def dumps(value: Any, *, detach: bool = False) -> bytes:
    """Pickle `value` with the aliasing between its tensors; raises whatever an object
    raises that cannot be pickled.

    Args:
        detach: give non-leaf tensors without their graph (results); otherwise a
            tensor that is part of a graph is refused, as `copy.deepcopy` does.
    """
    file = io.BytesIO()
    Pickler(file, detach=detach).dump(value)  # type: ignore[no-untyped-call]
    return file.getvalue()


def loads(data: bytes, device: torch.device | None = None) -> Any:
    """The inverse of `dumps`; accelerator tensors land on `device`, default the CPU."""
    global _accelerator
    previous, _accelerator = _accelerator, device or torch.device("cpu")
    try:
        return pickle.loads(data)
    finally:
        _accelerator = previous


def dump_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bytes:
    """Pickle a call in one piece, so that what its parts share stays shared.

    Raises:
        TypeError: the call cannot be pickled; names the argument or the closure
            variable at fault.
    """
    try:
        return dumps((fn, tuple(args), dict(kwargs)))
    except Exception as error:
        where, cause = _culprit(fn, args, kwargs) or ("something in it", error)
        raise TypeError(
            f"{_name(fn)} cannot be sent to the ranks: {where} cannot be pickled "
            f"({type(cause).__name__}: {cause}). Make it inside the function, or pass "
            "plain data from which each rank makes its own."
        ) from cause


def _culprit(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, Exception] | None:
    parts = [(f"argument {i} ({type(a).__name__})", a) for i, a in enumerate(args)]
    parts += [(f"argument {k}= ({type(v).__name__})", v) for k, v in kwargs.items()]
    code = getattr(fn, "__code__", None)
    if isinstance(fn, FunctionType) and code is not None:
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # a cell that is not filled yet
                continue
            if value is not fn:
                kind = type(value).__name__
                parts.append((f"its closure variable {name!r} ({kind})", value))
        for name in code.co_names:
            if name in fn.__globals__ and fn.__globals__[name] is not fn:
                value = fn.__globals__[name]
                kind = type(value).__name__
                parts.append((f"the global {name!r} ({kind}) that it uses", value))
    for where, value in parts:
        try:
            dumps(value)
        except Exception as error:
            return where, error
    return None


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


class Pickler(cloudpickle.Pickler):
    """cloudpickle that goes through a tensor's storage, each storage once."""

    def __init__(self, file: io.BytesIO, *, detach: bool) -> None:
        super().__init__(file, protocol=5)  # type: ignore[no-untyped-call]
        self._detach = detach
        # The memo of pickle goes by identity: one wrapper object a storage.
        self._storages: dict[int, torch.UntypedStorage] = {}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in _PLAIN_TYPES and _is_plain(obj):
            return self._reduce_tensor(obj)
        if type(obj) is torch.UntypedStorage:
            return _reduce_storage(obj)
        if isinstance(obj, CodeType):
            return self._reduce_code(obj)
        if isinstance(obj, FunctionType | type):
            _by_value_unless_importable(obj)
        return super().reducer_override(obj)  # type: ignore[no-untyped-call]

    def _reduce_code(self, code: CodeType) -> Any:
        """As cloudpickle, but with the file's name: errors shall say where."""
        reduced: Any = self.dispatch_table[CodeType](code)
        return reduced[0], tuple(
            code.co_filename if value == "<dynamic-code>" else value
            for value in reduced[1]
        )

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        requires_grad = tensor.requires_grad
        if not tensor.is_leaf:
            if not self._detach:
                raise TypeError(
                    f"a tensor of shape {tuple(tensor.shape)} is part of an autograd "
                    "graph; only leaf tensors can be copied to a rank: pass "
                    "tensor.detach()"
                )
            requires_grad = False
        storage = tensor.untyped_storage()
        storage = self._storages.setdefault(storage._cdata, storage)
        arguments = (
            type(tensor),
            storage,
            tensor.dtype,
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            requires_grad,
        )
        state = (tensor.grad if tensor.is_leaf else None, dict(tensor.__dict__))
        if state == (None, {}):
            return _rebuild_tensor, arguments
        return _rebuild_tensor, arguments, state, None, None, _set_tensor_state


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not torch._is_functional_tensor(tensor)
    )


def _rebuild_tensor(
    kind: type[torch.Tensor],
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    plain = torch.empty(0, dtype=dtype, device=storage.device)
    plain.set_(storage, offset, shape, stride)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(plain, requires_grad)
    if kind is torch.nn.Buffer:
        plain = torch.nn.Buffer(plain)
    return plain.requires_grad_(requires_grad)


def _set_tensor_state(tensor: torch.Tensor, state: tuple[Any, dict[str, Any]]) -> None:
    grad, attributes = state
    tensor.__dict__.update(attributes)
    if grad is not None:
        tensor.grad = grad


# Where `loads` puts storages of an accelerator; one load at a time in a process.
_accelerator = torch.device("cpu")


def _reduce_storage(storage: torch.UntypedStorage) -> Any:
    on_cpu: torch.UntypedStorage = storage.cpu()  # type: ignore[no-untyped-call]
    content: Any = torch.empty(0, dtype=torch.uint8).set_(on_cpu).numpy()
    data = pickle.PickleBuffer(content)
    return _rebuild_storage, (data, storage.nbytes(), storage.device.type)


def _rebuild_storage(data: Any, num_bytes: int, kind: str) -> torch.UntypedStorage:
    # A storage of torch's own allocator: one over Python's memory cannot be resized,
    # which sharded parameters do.
    storage = torch.UntypedStorage(num_bytes)  # type: ignore[no-untyped-call]
    if num_bytes:
        storage.copy_(torch.frombuffer(data, dtype=torch.uint8).untyped_storage())
    if kind != "cpu" and _accelerator.type != "cpu":
        storage = storage.to(device=_accelerator)
    return storage


def _by_value_unless_importable(obj: Any) -> None:
    """Make cloudpickle send objects of modules that no fresh process can import."""
    name = getattr(obj, "__module__", None)
    module = sys.modules.get(name) if isinstance(name, str) else None
    if isinstance(module, ModuleType) and not _is_importable(module):
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]


@cache
def _is_importable(module: ModuleType) -> bool:
    if module.__name__ == "__main__" or not hasattr(module, "__file__"):
        return True  # cloudpickle knows __main__; the others are built in
    top = module.__name__.partition(".")[0]
    if top in ("torch", "numpy", *ours.packages()):
        return True
    path: Any = None  # not find_spec: that believes what this process has imported
    name = ""
    for part in module.__name__.split("."):
        name = f"{name}.{part}".lstrip(".")
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return False
        path = spec.submodule_search_locations or []
    return True
