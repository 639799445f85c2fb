"""What may be said to the judge: it comes back equal, of plain types, or is refused."""

from __future__ import annotations

import enum
import itertools
from array import array
from collections import Counter, OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import overlaplab as ol
from overlaplab.grading.origins import Held
from overlaplab.grading.plain import NotPlainError, pack, unpack
from overlaplab.program import Access, TensorName


def refuse(*_: object) -> Any:
    raise AssertionError("this has a plain form")


def there_and_back(value: object) -> Any:
    return unpack(pack(value, refuse), refuse)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.fractions()
    | st.decimals(allow_nan=False)
)
KEYS = st.recursive(SCALARS, lambda one: st.tuples(one, one), max_leaves=3)
VALUES = st.recursive(
    SCALARS,
    lambda one: (
        st.lists(one)
        | st.tuples(one, one)
        | st.dictionaries(KEYS, one)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
    ),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same types at every depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return bool(a == b)


@given(VALUES)
@example(-(2**63))
@example(2**64)
@example(-0.0)
def test_every_plain_value_comes_back_with_its_types(value: Any) -> None:
    assert same(there_and_back(value), value)


@given(st.text(alphabet=st.characters(categories=["Cs", "L"])))
def test_half_a_surrogate_pair_is_written_out(text: str) -> None:
    assert there_and_back(text) == text.encode("utf-8", "backslashreplace").decode()


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (4, 1, 2)])
def test_a_tensor_comes_back_as_it_is_wherever_its_bytes_lay(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    numbers = torch.arange(max(1, torch.Size(shape).numel()))
    tensor = (numbers[: torch.Size(shape).numel()] % 3).to(dtype).reshape(shape)
    for given_one in (
        tensor,
        tensor.T.contiguous().T,
        torch.nn.Parameter(tensor, False),
    ):
        back = there_and_back(given_one)
        assert type(back) is torch.Tensor and back.dtype is dtype
        assert back.shape == tensor.shape and torch.equal(back, tensor)


def test_a_view_of_much_sends_only_its_own_bytes() -> None:
    big = torch.zeros(10**6)
    assert len(pack(big[5:7], refuse)) < 200
    assert there_and_back(torch.ones(3, requires_grad=True) * 2).tolist() == [2, 2, 2]
    assert there_and_back(torch.empty(5, 2, device="meta")).shape == (5, 2)


class LyingInt(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__

    def __int__(self) -> int:
        return 42

    __index__ = __trunc__ = __int__


class LyingFloat(float):
    def __float__(self) -> float:
        return 42.0

    def __abs__(self) -> float:
        return 0.0


class LyingStr(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "right"

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


class LyingList(list):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([42])


class LyingDict(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        return [("a", 42)]

    def get(self, *_: object) -> Any:
        return 42


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "base"),
    [
        (LyingInt(7), 7),
        (LyingFloat(7.5), 7.5),
        (LyingStr("wrong"), "wrong"),
        (LyingList([1, 2]), [1, 2]),
        (LyingDict(a=1), {"a": 1}),
        (Pair(1, 2), (1, 2)),
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(x=1), {"x": 1}),
        (UserDict(x=1), {"x": 1}),
        (enum.IntEnum("E", "one").one, 1),
        (np.int64(3), 3),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.array([[1, 2]]), [[1, 2]]),
        (torch.Size([2, 3]), (2, 3)),
        (range(3), [0, 1, 2]),
        (deque([1]), [1]),
        (array("d", [0.5]), [0.5]),
        ({1: 2}.keys(), [1]),
        (map(str, [1]), ["1"]),
        (bytearray(b"a"), b"a"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_subclass_goes_by_what_its_base_holds(value: Any, base: Any) -> None:
    assert same(there_and_back(value), base)


class LyingTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        return True


@dataclass
class Plain:
    value: int


def test_a_tensor_of_a_subclass_is_refused() -> None:
    with pytest.raises(TypeError, match="LyingTensor was returned; expected a torch"):
        pack([torch.zeros(2).as_subclass(LyingTensor)], refuse)


def test_an_iterator_without_end_and_a_huge_integer_are_refused() -> None:
    with pytest.raises(ValueError, match="a count of more than 10000 items"):
        pack(itertools.count(), refuse)
    with pytest.raises(ValueError, match="hexadecimal digits"):
        pack(1 << 10**5, refuse)


def test_what_has_no_plain_form_stays_and_a_number_stands_for_it() -> None:
    class Shy:
        def __repr__(self) -> str:
            raise SystemExit

    held: list[Any] = []

    def keep(thing: Any) -> int:
        held.append(thing)
        return len(held) - 1

    things = [len, int, Shy(), torch.nn.ReLU(), Plain(1), torch.float32]
    said = unpack(pack({"things": things}, keep), lambda number, text: (number, text))
    assert held == things
    assert [number for number, _ in said["things"]] == [0, 1, 2, 3, 4, 5]
    assert said["things"][2][1] == "<Shy, whose repr raises SystemExit>"
    assert said["things"][3][1] == "ReLU()"


def test_a_record_and_its_notes_come_back_equal() -> None:
    def on_rank() -> Any:
        model = torch.nn.Linear(8, 8)
        ol.streams.name_gradients(model)
        model(torch.randn(4, 8)).square().mean().backward()
        torch.distributed.all_reduce(model.weight.grad)
        side = torch.ones(4, device="cpu").pin_memory().to(ol.streams.device())
        return side.sum().item()

    program = ol.run(on_rank).program
    assert there_and_back(program) == program
    note = TensorName(0, Access(1, 0, 4), "overlaplab given", 3)
    assert there_and_back(Held({"a": 1}, (note,))) == Held({"a": 1}, (note,))


def encoded(tree: object) -> bytes:
    return msgspec.msgpack.encode(tree)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        pack([1, 2, 3], refuse)[:-1],
        encoded({"a": 1}),
        encoded(["no such kind", 1]),
        encoded([]),
        encoded([["list"]]),
        encoded(["typed", "Program", b"{}"]),
        encoded(["typed", "Sheet", b""]),
        encoded(["record", "Verdict", True]),
        encoded(["record", "Held", 1]),
        encoded(["handle", -1, "x"]),
        encoded(["handle", "0", "x"]),
        encoded(["dict", 1]),
        encoded(["dict", ["list"], 1]),
        encoded(["tensor", "torch.float32", [3], b"1234"]),
        encoded(["tensor", "torch.float32", [-1], b""]),
        encoded(["tensor", "torch.load", [1], b"1234"]),
        encoded(["tensor", "torch.float32", [1], "1234"]),
        encoded(["int", "f" * 5000]),
        encoded(["int", "x"]),
        encoded(["fraction", 1, 0]),
        encoded(["decimal", "x"]),
        encoded(msgspec.msgpack.Ext(1, b"x")),
        b"\x92\xa4list" * 5000 + b"\xc0",
    ],
    ids=range(25),
)
def test_what_is_no_plain_data_is_refused(message: bytes) -> None:
    with pytest.raises(NotPlainError):
        unpack(message, lambda number, text: number)


@given(VALUES, st.data())
def test_a_message_with_one_byte_changed_is_refused_or_is_plain(
    value: Any, data: st.DataObject
) -> None:
    message = bytearray(pack(value, refuse))
    place = data.draw(st.integers(0, len(message) - 1))
    message[place] ^= data.draw(st.integers(1, 255))
    made: Callable[..., Any] = lambda number, text: number  # noqa: E731
    try:
        found = unpack(bytes(message), made)
    except NotPlainError:
        return
    pack(found, refuse)  # nothing in it is an object of any other kind


def test_digits_of_a_decimal_are_kept() -> None:
    assert there_and_back((Decimal("0.1"), Fraction(1, 3))) == (
        Decimal("0.1"),
        Fraction(1, 3),
    )
