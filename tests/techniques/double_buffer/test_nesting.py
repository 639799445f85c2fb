"""C05: whatever holds the tensors of a batch, its type and all else in it stay."""

from __future__ import annotations

import copy
import dataclasses
from array import array
from collections import (
    OrderedDict,
    UserDict,
    UserList,
    UserString,
    defaultdict,
    deque,
    namedtuple,
)
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import attr
import numpy as np
import pytest
import torch
from torch import Tensor

from overlaplab.techniques.double_buffer.nesting import replace_leaves

Pair = namedtuple("Pair", "x y")
Edge = namedtuple("Edge", "frm to")


class Typed(NamedTuple):
    x: Any
    name: str = "typed"


class Named(Pair):
    """A namedtuple with a state of its own, and another `__new__`."""

    def __new__(cls, both: Any) -> Named:
        return super().__new__(cls, both, both)


class Words(list):  # type: ignore[type-arg]
    def __init__(self, *words: Any) -> None:
        super().__init__(words)
        self.language = "en"


class Record(dict):  # type: ignore[type-arg]
    def __init__(self, name: str, **fields: Any) -> None:
        super().__init__(**fields)
        self.name = name

    def shout(self) -> str:
        return self.name.upper()


class Frozen(Mapping):  # type: ignore[type-arg]
    def __init__(self, content: Any) -> None:
        self._content = dict(content)

    def __getitem__(self, key: Any) -> Any:
        return self._content[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)


class Table(Frozen, MutableMapping):  # type: ignore[type-arg]
    """A shallow copy of it shares its content with it."""

    def __setitem__(self, key: Any, value: Any) -> None:
        self._content[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._content[key]


class Row(Sequence):  # type: ignore[type-arg]
    def __init__(self, items: Any) -> None:
        self._items = list(items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


@dataclasses.dataclass
class Data:
    x: Any
    label: str = "data"
    derived: Any = dataclasses.field(init=False, default=None)
    made: int = 0

    def __post_init__(self) -> None:
        self.made += 1


@dataclasses.dataclass(frozen=True, slots=True)
class Sealed:
    x: Any
    label: str = "sealed"


@attr.s(auto_attribs=True)
class Attrs:
    x: Any
    label: str = "attrs"


@attr.s(auto_attribs=True, frozen=True, slots=True)
class SealedAttrs:
    x: Any
    label: str = "attrs"


def tensor() -> Tensor:
    return torch.ones(2)


def negated(leaf: Any) -> Any:
    return -leaf if isinstance(leaf, Tensor) else leaf


def named() -> Named:
    made = Named(tensor())
    made.note = "kept"  # type: ignore[attr-defined]
    return made


def defaults() -> defaultdict[str, Any]:
    return defaultdict(list, x=tensor())


BATCHES: Mapping[str, Any] = {
    "tensor": tensor,
    "tuple": lambda: (tensor(), 1),
    "list": lambda: [tensor(), "a"],
    "namedtuple": lambda: Pair(tensor(), "y"),
    "namedtuple with a field `to`": lambda: Edge(tensor(), tensor()),
    "typing.NamedTuple": lambda: Typed(tensor()),
    "a subclass of a namedtuple": named,
    "torch.return_types": lambda: torch.ones(2, 3).max(0),
    "a subclass of list": lambda: Words(tensor(), "b"),
    "UserList": lambda: UserList([tensor()]),
    "deque": lambda: deque([tensor()], maxlen=3),
    "a Sequence": lambda: Row([tensor(), 2]),
    "dict": lambda: {"x": tensor(), 2: "b"},
    "OrderedDict": lambda: OrderedDict(b=tensor(), a=1),
    "defaultdict": defaults,
    "UserDict": lambda: UserDict(x=tensor()),
    "a subclass of dict": lambda: Record("record", x=tensor()),
    "a mapping proxy": lambda: MappingProxyType({"x": tensor()}),
    "a Mapping": lambda: Frozen({"x": tensor()}),
    "a MutableMapping": lambda: Table({"x": tensor()}),
    "dataclass": lambda: Data(tensor()),
    "frozen dataclass with slots": lambda: Sealed(tensor()),
    "attrs": lambda: Attrs(tensor()),
    "frozen attrs with slots": lambda: SealedAttrs(tensor()),
    "nested": lambda: {"a": [(tensor(), Data({"b": (tensor(),)}))], "c": "d"},
}


def content(value: Any) -> Any:
    """All that is in a batch, with types, but for the signs of its numbers."""
    if isinstance(value, Tensor):
        return type(value), value.abs().tolist()
    if isinstance(value, Mapping):
        inside: Any = [(key, content(child)) for key, child in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, str):
        inside = [content(child) for child in value]
    else:
        inside = value if not hasattr(value, "x") else content(value.x)
    state = {
        name: content(child)
        for name, child in getattr(value, "__dict__", {}).items()
        if name not in ("_content", "_items", "data", "x")
    }
    return type(value), inside, state


def signs(value: Any) -> list[float]:
    """The first number of each tensor in a batch."""
    found: list[float] = []
    replace_leaves(value, lambda leaf: found.append(float(leaf.flatten()[0])) or leaf)
    return found


@pytest.mark.parametrize("kind", BATCHES)
def test_the_same_nesting_comes_out_and_the_batch_is_not_changed(kind: str) -> None:
    batch, same = BATCHES[kind](), BATCHES[kind]()
    out = replace_leaves(batch, negated)
    assert type(out) is type(batch)
    assert content(batch) == content(same)
    assert content(out) == content(batch)
    assert signs(out) == [-sign for sign in signs(batch)]
    assert signs(batch) == signs(same)


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_in_which_nothing_changes_is_itself(kind: str) -> None:
    batch = BATCHES[kind]()
    assert replace_leaves(batch, lambda leaf: leaf) is batch


class Text(str):
    """What it consists of is text again, without end."""

    def __iter__(self) -> Iterator[str]:
        return iter([self])


UNKNOWN = (
    *(None, True, 1, 2.0, 1j, "text", b"bytes", bytearray(b"x"), range(3), object),
    *(torch.float32, torch.device("cpu"), torch.Size([2]), torch.Tensor, print),
    *(np.ones(2), SimpleNamespace(x=tensor()), {1, 2}, frozenset({tensor()})),
    *(UserString("text"), memoryview(b"abcd").cast("B", [2, 2]), array("f", [1.0])),
    *(Text("text"), ["a", ("b", {"c": 1})], Data, Data("no tensor"), Pair(1, 2)),
)


@pytest.mark.parametrize("value", UNKNOWN, ids=lambda value: type(value).__name__)
def test_everything_else_is_passed_by_identity(value: Any) -> None:
    (out, _) = replace_leaves((value, tensor()), negated)
    assert out is value


def test_what_does_not_change_beside_a_tensor_is_the_same_object() -> None:
    beside = [object(), ["no tensor"]]
    out = replace_leaves({"x": tensor(), "beside": beside}, negated)
    assert out["beside"] is beside


def test_the_same_tensor_twice_stays_one_tensor() -> None:
    x = tensor()
    shared = [x]
    out = replace_leaves({"a": x, "b": (x, shared), "c": shared}, negated)
    assert out["a"] is out["b"][0] is out["c"][0]
    assert out["b"][1] is out["c"]


def test_items_that_exist_only_while_they_are_looked_at_are_not_mixed_up() -> None:
    class Fresh(Row):
        def __getitem__(self, index: Any) -> Any:
            if index >= 50:
                raise IndexError(index)
            return torch.tensor([float(index)])

        def __len__(self) -> int:
            return 50

    seen, other = [], tensor()
    replace_leaves(Fresh([]), lambda leaf: seen.append(leaf.item()) or other)
    assert seen == [float(i) for i in range(50)]


class Moves:
    """As a batch class of a graph library."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: Any) -> Moves:
        return Moves(self.x)


def test_an_object_with_a_method_to_is_a_leaf_and_one_with_a_field_is_not() -> None:
    leaf, field = Moves(tensor()), SimpleNamespace(to=lambda device: None)
    seen: list[Any] = []
    batch = {"leaf": leaf, "field": field, "class": Moves}
    replace_leaves(batch, lambda found: seen.append(found) or found)
    assert seen == [leaf]


class Encoding(UserDict):  # type: ignore[type-arg]
    """As what tokenizers give."""

    def to(self, device: Any) -> Encoding:
        raise AssertionError


class Pinning(Encoding):
    def pin_memory(self) -> Pinning:
        return self


def test_a_dict_with_a_method_to_is_looked_into_unless_it_pins_itself() -> None:
    x = tensor()
    plain, pinning, seen = Encoding(x=x), Pinning(x=tensor()), []
    replace_leaves([plain, pinning], lambda found: seen.append(found) or found)
    assert len(seen) == 2 and seen[0] is x and seen[1] is pinning
    moved = replace_leaves(plain, negated)
    assert type(moved) is Encoding and moved["x"].tolist() == [-1.0, -1.0]
    assert plain["x"] is x


def test_a_container_that_cannot_be_made_anew_is_refused() -> None:
    class Odd(Frozen):
        def __init__(self, one: Any, other: Any) -> None:
            super().__init__({"x": one, "y": other})

    with pytest.raises(TypeError) as caught:
        replace_leaves([Odd(tensor(), 1)], negated)
    said = str(caught.value)
    assert "Odd in a batch" in said and "Odd(content) failed" in said
    assert "to(device, non_blocking=False)" in said


def test_what_holds_itself_is_kept_or_refused() -> None:
    """As a tree of parts that know their parents."""
    batch: Any = {"children": [{"name": "a"}]}
    batch["children"][0]["parent"] = batch
    assert replace_leaves(batch, negated) is batch
    for holder in (batch, batch["children"][0]):
        holder["x"] = tensor()
        with pytest.raises(
            TypeError, match=r"a dict in a batch holds tensors and.*itself"
        ):
            replace_leaves(batch, negated)
        del holder["x"]
    beside = [batch, tensor()]
    assert replace_leaves(beside, negated)[0] is batch


def test_dataclass_code_does_not_run_again() -> None:
    batch = Data(tensor())
    batch.derived = tensor()
    out = replace_leaves(batch, negated)
    assert out.made == 1 and out.derived.tolist() == [-1.0, -1.0]
    assert batch.derived.tolist() == [1.0, 1.0]


def test_a_copy_is_shallow() -> None:
    """Nothing in a batch is copied that does not change."""
    big = [0] * 1000
    out = replace_leaves(Record("big", x=tensor(), big=big), negated)
    assert out["big"] is big and out.shout() == "BIG"
    assert copy.copy(out).name == "big"
