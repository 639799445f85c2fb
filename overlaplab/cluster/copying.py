"""Copies of a function and its arguments, one for each rank.

Threads share what processes copy: a model that is closed over would get every rank's
hooks. So each rank gets its own copy of the function's closure cells and defaults, of
bound objects and of all arguments, as a process would have; ties (one object reached by
two ways) and storage aliasing (views of one flat buffer) are kept. A
function of a notebook or a script brings copies of the globals that it uses, as it
would to a process. Globals of imported modules, classes and libraries' functions stay
shared; tensor hooks are not copied (a pickle drops them, too).
"""

from __future__ import annotations

import contextlib
import copy
import dis
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from overlaplab import ours

Memo = dict[Any, Any]
Job = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def copy_job(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    fake_mode: FakeTensorMode | None = None,
) -> Job:
    """Copies of a call's function and arguments, ties between them kept.

    Raises:
        TypeError: one of them cannot be copied; the message names which.
    """
    memo: Memo = {}
    with _copying(fake_mode):
        new_fn = _copy_part(fn, memo, f"function {_name(fn)}")
        if new_fn is fn and isinstance(fn, types.FunctionType) and not _of_library(fn):
            new_fn = _shallow(fn)
        new_args = tuple(
            _copy_part(value, memo, f"argument {i} of {_name(fn)}")
            for i, value in enumerate(args)
        )
        new_kwargs = {
            key: _copy_part(value, memo, f"argument {key!r} of {_name(fn)}")
            for key, value in kwargs.items()
        }
    return new_fn, new_args, new_kwargs


def _copy_part(value: Any, memo: Memo, what: str) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except _CannotCopy:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        if "deepcopy protocol" in why:
            why = "it holds a tensor that is the result of an operator; pass "
            why += "tensor.detach(), or compute it inside the function"
        raise _CannotCopy(
            f"cannot copy {what} ({type(value).__name__}) for each rank: {why}. Make "
            "it inside the function that the ranks run."
        ) from error


class _CannotCopy(TypeError):
    """The innermost part that failed has named itself already."""


@contextlib.contextmanager
def _copying(fake_mode: FakeTensorMode | None) -> Iterator[None]:
    """Teach `copy.deepcopy` functions, modules and generators for a while."""
    table: dict[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]
    # A library's module may be of a class of its own (torch._dynamo.config).
    copiers = _COPIERS | dict.fromkeys(_subclasses(types.ModuleType), _same)
    before = {kind: table.get(kind) for kind in copiers}
    table.update(copiers)
    try:
        with contextlib.nullcontext() if fake_mode is None else _FakeCopies(fake_mode):
            yield
    finally:
        for kind, copier in before.items():
            if copier is None:
                del table[kind]
            else:
                table[kind] = copier


def _copy_function(fn: types.FunctionType, memo: Memo) -> types.FunctionType:
    """One without closure, defaults, attributes or globals to copy is shared."""
    has_state = fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__ or fn.__dict__
    if _of_library(fn) or not (has_state or _of_notebook(fn)):
        return fn
    cells = tuple(_new_cell(cell, memo) for cell in fn.__closure__ or ())
    namespace = _new_globals(fn, memo) if _of_notebook(fn) else fn.__globals__
    code = _own_code(fn.__code__)
    new = types.FunctionType(code, namespace, fn.__name__, None, cells or None)
    memo[id(fn)] = new  # before the cells' contents: it may be in one of them
    new.__qualname__ = fn.__qualname__
    new.__module__ = fn.__module__
    new.__doc__ = fn.__doc__
    new.__annotations__ = fn.__annotations__
    if namespace is not fn.__globals__:
        _fill_globals(fn, namespace, memo)
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        _fill_cell(cell, memo, f"variable {name!r} of the closure of {_name(fn)}")
    what = f"a default of {_name(fn)}"
    new.__defaults__ = _copy_part(fn.__defaults__, memo, what)
    new.__kwdefaults__ = _copy_part(fn.__kwdefaults__, memo, what)
    new.__dict__.update(_copy_part(fn.__dict__, memo, f"an attribute of {_name(fn)}"))
    return new


def _shallow(fn: types.FunctionType) -> types.FunctionType:
    """The same function with code objects of its own."""
    code, closure = _own_code(fn.__code__), fn.__closure__
    new = types.FunctionType(code, fn.__globals__, fn.__name__, None, closure)
    new.__qualname__, new.__module__ = fn.__qualname__, fn.__module__
    return new


def _own_code(code: types.CodeType) -> types.CodeType:
    """torch.compile keeps what it compiled at the code object: not for other ranks."""
    constants = tuple(
        _own_code(c) if isinstance(c, types.CodeType) else c for c in code.co_consts
    )
    return code.replace(co_consts=constants)


def _of_notebook(fn: types.FunctionType) -> bool:
    """Whether it comes from a notebook or a script: from no module to import.

    A process gets such a function with copies of the globals that it uses.
    """
    return fn.__module__ == "__main__" or fn.__module__ not in sys.modules


def _new_globals(fn: types.FunctionType, memo: Memo) -> dict[str, Any]:
    """This copy's own namespace, one for all functions of one notebook."""
    key = ("globals", id(fn.__globals__))
    if key not in memo:
        kept = ("__builtins__", "__name__", "__file__")
        memo[key] = {n: fn.__globals__[n] for n in kept if n in fn.__globals__}
    namespace: dict[str, Any] = memo[key]
    return namespace


def _fill_globals(
    fn: types.FunctionType, namespace: dict[str, Any], memo: Memo
) -> None:
    for name in _global_names(fn.__code__):
        if name in fn.__globals__ and name not in namespace:
            what = f"the global {name!r} that {_name(fn)} uses"
            namespace[name] = _copy_part(fn.__globals__[name], memo, what)


def _global_names(code: types.CodeType) -> dict[str, None]:
    """The globals that `code` and the functions inside it read or write, in order."""
    names = {
        step.argval: None
        for step in dis.get_instructions(code)
        if step.opname.endswith(("_GLOBAL", "_NAME"))
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _of_library(fn: types.FunctionType) -> bool:
    """A library's function that has a name is referred to by it, as in a pickle.

    Libraries use such functions as keys (torch's `contract`): a copy is another key.
    """
    if not fn.__code__.co_filename.startswith((*ours.folders(), *ours.libraries())):
        return False
    found: Any = sys.modules.get(fn.__module__)
    for name in fn.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is fn


_Filled = object()


def _new_cell(cell: types.CellType, memo: Memo) -> types.CellType:
    new = memo.get(id(cell))
    if new is None:
        new = memo[id(cell)] = types.CellType()
    return new


def _fill_cell(cell: types.CellType, memo: Memo, what: str) -> None:
    new = memo[id(cell)]
    if (id(cell), _Filled) in memo:
        return
    memo[id(cell), _Filled] = cell  # also keeps its id from being used again
    try:
        value = cell.cell_contents
    except ValueError:  # an empty cell: assigned later than the call
        return
    new.cell_contents = _copy_part(value, memo, what)


def _subclasses(kind: type) -> Iterator[type]:
    one: type
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _same(value: Any, memo: Memo) -> Any:
    return value


def _copy_parameter(parameter: torch.nn.Parameter, memo: Memo) -> torch.nn.Parameter:
    """Its own `__deepcopy__` forgets shared memory, `.grad` and attributes."""
    new = torch.nn.Parameter(
        copy.deepcopy(parameter.data, memo), parameter.requires_grad
    )
    memo[id(parameter)] = new
    new.grad = copy.deepcopy(parameter.grad, memo)
    new.__dict__.update(copy.deepcopy(parameter.__dict__, memo))
    return new


_COPIERS: dict[type, Callable[[Any, Memo], Any]] = {
    types.FunctionType: _copy_function,
    types.ModuleType: _same,
    torch.Generator: lambda generator, _: generator.clone_state(),
    torch.nn.Parameter: _copy_parameter,
}


class _FakeCopies(TorchFunctionMode):
    """Copies of tensors are fake: same shapes, strides, ties and aliasing, no data."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self._fake_mode = fake_mode

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            fake = self._fake_mode.from_tensor(tensor, static_shapes=True)
            memo[id(tensor)] = fake
        return memo[id(tensor)]


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__
