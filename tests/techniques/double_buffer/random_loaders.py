"""Random loaders, and what a random program sees of one: items, ends and errors.

`python -m tests.techniques.double_buffer.random_loaders 10000` compares so many.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import overlaplab as ol
from tests.techniques.double_buffer.late_copies import late_copies

Pair = namedtuple("Pair", "x y")
OPAQUE = tuple(object() for _ in range(4))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


@dataclass
class Data:
    x: Any
    label: str


class Words(list):  # type: ignore[type-arg]
    pass


class LoaderError(Exception):
    """Raised by loaders."""


class Make:
    """Makes items on the host.

    Args:
        pin: makes pinned memory of a tensor of the host.
    """

    def __init__(self, seed: int, pin: Callable[[Tensor], Tensor]) -> None:
        self._random = random.Random(seed)
        self._pin = pin

    def item(self, depth: int = 0) -> Any:
        pick = self._random.randrange(14 if depth < 3 else 4)
        if pick < 3:
            return self._tensor()
        if pick == 3:
            return self._random.choice((*OPAQUE, None, "text", 7, b"", 2.5))
        children = [self.item(depth + 1) for _ in range(self._random.randrange(4))]
        if pick == 4 and children:
            return [*children, children[0]]  # the same object twice
        if pick in (4, 5):
            return children
        if pick == 6:
            return Words(children)
        if pick == 7:
            return deque(children, maxlen=5)
        if pick in (8, 9):
            return tuple(children)
        if pick == 10:
            return Pair(self.item(depth + 1), self.item(depth + 1))
        if pick == 11:
            return Data(children, "label")
        kind = dict if pick == 12 else OrderedDict
        return kind(zip("abcd", children, strict=False))

    def _tensor(self) -> Tensor:
        rng = self._random
        shape = [rng.choice((0, 1, 2, 3, 5)) for _ in range(rng.randrange(4))]
        dtype = rng.choice(DTYPES)
        numel = 1
        for size in shape:
            numel *= size
        values = [rng.randrange(-9, 9) for _ in range(numel)]
        made = torch.tensor(values, device="cpu").to(dtype).reshape(shape)
        layout = rng.randrange(8)
        if layout == 0 and len(shape) > 1:
            made = made.transpose(0, -1)
        elif layout == 1:
            made = made.unsqueeze(0).expand(3, *made.shape)
        elif layout == 2 and shape:
            made = made[::2]
        elif layout == 3 and dtype.is_floating_point:
            made.requires_grad_()
        elif layout == 4:
            made = self._pin(made)
        elif layout == 5 and shape:
            made = self._pin(made)[::2]
        return made


@dataclass(frozen=True)
class Plan:
    """What a loader yields and how it is used."""

    kind: str
    script: tuple[str, ...]  # of each place: "item" or "error"
    loops: tuple[int, ...]  # after how many items each loop is left
    resumes: bool  # asks on behind an error
    depth: int
    seed: int


KINDS = ("list", "fresh", "generator", "rewinding", "lasting", "DataLoader", "buffer")


def plan(seed: int) -> Plan:
    rng = random.Random(seed)
    places = rng.choices(("item", "error"), (12, 1), k=rng.choice((0, 1, 2, 3, 5, 8)))
    loops = [rng.choice((0, 1, 2, 3, 99, 99)) for _ in range(rng.choice((1, 2, 3)))]
    return Plan(
        rng.choice(KINDS),
        tuple(places),
        tuple(loops),
        rng.random() < 0.5,
        rng.choice((1, 2, 2, 2, 3)),
        seed,
    )


class Rewinding:
    """Its own iterator, which begins anew; it goes on behind an error."""

    def __init__(self, take: Callable[[int], Any], num: int) -> None:
        self._take, self._num, self._at = take, num, 0

    def __iter__(self) -> Iterator[Any]:
        self._at = 0
        return self

    def __next__(self) -> Any:
        if self._at == self._num:
            raise StopIteration
        self._at += 1
        return self._take(self._at - 1)

    def __len__(self) -> int:
        return self._num


class Lasting(Rewinding):
    """Its own iterator, which goes on where it was."""

    def __iter__(self) -> Iterator[Any]:
        return self


class Fresh:
    """Another iterator for each loop."""

    def __init__(self, take: Callable[[int], Any], num: int) -> None:
        self._take, self._num = take, num

    def __iter__(self) -> Iterator[Any]:
        return (self._take(at) for at in range(self._num))

    def __len__(self) -> int:
        return self._num


class Items(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, take: Callable[[int], Any], num: int) -> None:
        self._take, self._num = take, num

    def __getitem__(self, index: int) -> Any:
        return self._take(index)

    def __len__(self) -> int:
        return self._num


def first(items: list[Any]) -> Any:
    return items[0]


def make_loader(plan: Plan, pin: Callable[[Tensor], Tensor]) -> Any:
    """The loader of `plan`; two that are made of one plan yield equal items."""
    num = len(plan.script)

    def take(at: int) -> Any:
        if plan.script[at] == "error":
            raise LoaderError(plan.seed, at)
        return Make(plan.seed * 100 + at, pin).item()

    if plan.kind == "list":
        return [take(at) for at in range(num) if plan.script[at] == "item"]
    if plan.kind == "fresh":
        return Fresh(take, num)
    if plan.kind == "generator":
        return iter(Fresh(take, num))
    if plan.kind == "rewinding":
        return Rewinding(take, num)
    if plan.kind == "lasting":
        return Lasting(take, num)
    if plan.kind == "DataLoader":
        return DataLoader(Items(take, num), batch_size=1, collate_fn=first)
    buffer = torch.zeros(5, device="cpu")  # one tensor, filled again and again

    def fill(at: int) -> Any:
        buffer.fill_(float(at))
        if plan.script[at] == "error":
            raise LoaderError(plan.seed, at)
        return {"buffer": buffer, "at": at}

    return Fresh(fill, num)


def watch(loader: Any, plan: Plan) -> list[Any]:
    """What a program sees that iterates over `loader` as `plan` has it."""
    seen: list[Any] = []
    for wanted in plan.loops:
        iterator, num, num_ends = iter(loader), 0, 0
        while num < wanted and num_ends < 2:
            try:
                seen.append(describe(next(iterator)))
                num += 1
            except StopIteration:
                seen.append("end")
                num_ends += 1
            except LoaderError as error:
                names = []
                trace = error.__traceback__
                while trace is not None:
                    names.append(trace.tb_frame.f_code.co_name)
                    trace = trace.tb_next
                seen.append((type(error), error.args, names[-1]))
                if not plan.resumes:
                    break
        seen.append("left")
    return seen


def describe(value: Any, known: dict[int, int] | None = None) -> Any:
    """All of a batch that may be compared: types, values, strides, what is shared."""
    known = {} if known is None else known
    if isinstance(value, Tensor):
        place = known.setdefault(id(value), len(known))
        plain = value.detach()
        return (
            *(place, type(value), value.dtype, tuple(value.shape), plain.tolist()),
            *(strides_elsewhere(plain), value.requires_grad, value.is_leaf),
        )
    if isinstance(value, Mapping):
        return type(value), [(k, describe(v, known)) for k, v in value.items()]
    if isinstance(value, Data):
        return Data, describe(value.x, known), value.label
    if isinstance(value, (list, tuple, deque)):
        place = known.setdefault(id(value), len(known)) if value else -1
        return type(value), place, [describe(child, known) for child in value]
    return value


def strides_elsewhere(value: Tensor) -> list[int]:
    """Those that `Tensor.to` gives, but that what is expanded stays so."""
    expanded = [
        dim for dim, step in enumerate(value.stride()) if not step and value.numel()
    ]
    for dim in expanded:
        value = value.narrow(dim, 0, 1)
    strides = torch.empty_like(value).stride() if value.numel() else ()
    return [0 if dim in expanded else step for dim, step in enumerate(strides)]


def compare(seed: int, pin: Callable[[Tensor], Tensor]) -> None:
    """Iterate with and without a prefetcher, and compare what is seen."""
    made = plan(seed)
    expected = watch(make_loader(made, lambda tensor: tensor), made)
    loader = make_loader(made, pin)
    found = watch(ol.BatchPrefetcher(loader, depth=made.depth), made)
    assert found == expected, f"{made}:\n{found}\n{expected}"


def compare_many(seeds: range) -> None:
    """`compare` each on a device whose copies come late; nothing pinned is left."""
    for seed in seeds:
        with late_copies() as device:
            compare(seed, device.pin)
            assert not device.pinned, f"seed {seed} leaves pinned memory"


if __name__ == "__main__":
    compare_many(range(int(sys.argv[1])))
    print(f"{sys.argv[1]} loaders: the same items, order and errors")
