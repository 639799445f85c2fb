"""Plain data: all that the process with the learner's objects can say to the judge.

`pack` writes a value as msgpack: None, bool, int, float, str and bytes as they are,
everything else as a list that begins with what it is. `unpack` makes new objects of
exactly these types, or refuses. What can be called, and whatever has no plain form,
stays where it is: a number and a text stand for it.

A value of a subclass goes by what its base holds: its own methods are not asked.
"""

from __future__ import annotations

import array
from collections import deque
from collections.abc import (
    Callable,
    ItemsView,
    Iterator,
    KeysView,
    Mapping,
    ValuesView,
)
from dataclasses import fields
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any, TypeVar

import msgspec
import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from overlaplab.program import Program, TensorName

R = TypeVar("R", bound=type)

MOST_ITEMS = 10_000  # of what an iterator yields
_MOST_DIGITS = 1000  # of an integer, in hexadecimal
_MOST_TEXT = 2000  # characters that stand for an object
_ENCODER = msgspec.msgpack.Encoder(enc_hook=dict)  # of a MappingProxyType
_DECODER = msgspec.msgpack.Decoder()
_TYPED = {c.__name__: msgspec.msgpack.Decoder(c) for c in (Program, TensorName)}
_RECORDS: dict[str, type] = {}
_LISTED = (Iterator, KeysView, ValuesView, ItemsView, range, deque, array.array)
_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_TENSORS = (torch.Tensor, torch.nn.Parameter, FakeTensor)
# msgpack has no more bits.
_INTS = range(-(2**63), 2**64)

_WRONG = (ValueError, TypeError, KeyError, RuntimeError, ArithmeticError)

# What makes a number of an object, and what makes an object of number and text.
Keep = Callable[[Any], int]
MakeHandle = Callable[[int, str], Any]


class NotPlainError(ValueError):
    """What was said is no plain data."""


def record(cls: R) -> R:
    """Decorate a dataclass that ranks return: it goes by its fields."""
    _RECORDS[cls.__name__] = cls
    return cls


# -- there


def pack(value: Any, keep: Keep) -> bytes:
    """`value` as bytes.

    Args:
        value: of any type.
        keep: called with each object that has no plain form; returns its number.

    Raises:
        TypeError: a subclass of `torch.Tensor` that has bytes of its own only.
        ValueError: an iterator does not end, an integer is very large.
    """
    return _ENCODER.encode(_tree(value, keep))


def _tree(value: Any, keep: Keep) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is bytes or kind is float:
        return value
    if isinstance(value, str):
        return _text(str.__str__(value))
    if isinstance(value, int):
        return _int(int.__int__(value))
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, list):
        return ["list", *(_tree(x, keep) for x in list.__iter__(value))]
    if isinstance(value, tuple):
        return ["tuple", *(_tree(x, keep) for x in tuple.__iter__(value))]
    if isinstance(value, dict):
        return _pairs(dict.items(value), keep)
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if kind.__name__ in _TYPED and kind in (Program, TensorName):
        return ["typed", kind.__name__, _ENCODER.encode(value)]
    if _RECORDS.get(kind.__name__) is kind:
        found = (getattr(value, field.name) for field in fields(kind))
        return ["record", kind.__name__, *(_tree(x, keep) for x in found)]
    return _odd(value, keep)


def _odd(value: Any, keep: Keep) -> Any:
    """What is seldom said."""
    if isinstance(value, numpy.ndarray | numpy.generic):
        return _tree(value.tolist(), keep)
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if isinstance(value, Fraction):
        return ["fraction", _int(value.numerator), _int(value.denominator)]
    if isinstance(value, Decimal):
        return ["decimal", Decimal.__str__(value)]
    if isinstance(value, set | frozenset):
        kind = "set" if isinstance(value, set) else "frozenset"
        return [kind, *(_tree(x, keep) for x in list(value))]
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(memoryview(value))
    if isinstance(value, Mapping):
        return _pairs(value.items(), keep)
    if isinstance(value, _LISTED):
        items = list(islice(value, MOST_ITEMS + 1))
        if len(items) > MOST_ITEMS:
            name = type(value).__name__
            raise ValueError(f"a {name} of more than {MOST_ITEMS} items was returned")
        return ["list", *(_tree(x, keep) for x in items)]
    return ["handle", keep(value), describe(value)]


def _pairs(items: Any, keep: Keep) -> list[Any]:
    return ["dict", *(_tree(x, keep) for pair in items for x in pair)]


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()  # half a pair is no UTF-8


def _int(number: int) -> Any:
    if number in _INTS:
        return number
    digits = hex(number)
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits)} hexadecimal digits was returned")
    return ["int", digits]


def _tensor(tensor: torch.Tensor) -> list[Any]:
    if type(tensor) is AsyncCollectiveTensor:
        tensor = tensor.wait()
    if type(tensor) not in _TENSORS:
        raise TypeError(
            f"a {type(tensor).__name__} was returned; expected a torch.Tensor, no "
            "subclass of it"
        )
    shape, data = list(tensor.shape), None
    if type(tensor) is not FakeTensor and tensor.device.type != "meta":
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return ["tensor", str(tensor.dtype), shape, data]


def describe(value: object) -> str:
    """What stands for an object in messages."""
    try:
        return _text(str.__str__(repr(value))[:_MOST_TEXT])
    except BaseException as error:
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"


# -- here


def unpack(data: bytes, handle: MakeHandle) -> Any:
    """The value that `pack` wrote.

    Args:
        data: from a process that need not tell the truth.
        handle: called with number and text of each object that stayed there.

    Raises:
        NotPlainError: this is none.
    """
    try:
        return _value(_DECODER.decode(data), handle)
    except NotPlainError:
        raise
    except _WRONG as error:
        raise NotPlainError(f"no plain data ({type(error).__name__})") from None


def _value(tree: Any, handle: MakeHandle) -> Any:
    if type(tree) is not list:
        if tree is None or type(tree) in (bool, int, float, str, bytes):
            return tree
        raise NotPlainError(f"a {type(tree).__name__} is no plain data")
    match tree:
        case ["list", *items]:
            return [_value(item, handle) for item in items]
        case ["tuple", *items]:
            return tuple(_value(item, handle) for item in items)
        case ["dict", *items]:
            values = [_value(item, handle) for item in items]
            return dict(zip(values[::2], values[1::2], strict=True))
        case ["tensor", str(dtype), list(shape), data]:
            return _new_tensor(_DTYPES[dtype], shape, data)
        case ["typed", str(name), bytes(data)]:
            return _TYPED[name].decode(data)
        case ["record", str(name), *items]:
            return _RECORDS[name](*(_value(item, handle) for item in items))
        case ["handle", int(number), str(text)] if number >= 0:
            return handle(number, text[:_MOST_TEXT])
        case ["set", *items]:
            return {_value(item, handle) for item in items}
        case ["frozenset", *items]:
            return frozenset(_value(item, handle) for item in items)
        case ["int", str(digits)] if len(digits) <= _MOST_DIGITS:
            return int(digits, 16)
        case ["complex", float(real), float(imaginary)]:
            return complex(real, imaginary)
        case ["fraction", above, below]:
            return Fraction(_value(above, handle), _value(below, handle))
        case ["decimal", str(digits)] if len(digits) <= _MOST_DIGITS:
            return Decimal(digits)
    raise NotPlainError(f"no plain data: {str(tree)[:80]}")


def _new_tensor(dtype: torch.dtype, shape: list[int], data: object) -> torch.Tensor:
    if data is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    if not isinstance(data, bytes):
        raise NotPlainError("a tensor without its bytes")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
