"""Which gradients travel together: the plan, without the execution.

Knows sizes and dtypes; no model, no hook, no rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that one all-reduce averages.

    Args:
        positions: of its parameters in the sequence that was planned, last first.
        bytes: their sum.
        dtype: the one that they share, "" if sizes were planned.
        names: of its parameters, in the same order.
    """

    positions: tuple[int, ...]
    bytes: int
    dtype: str = ""
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Buckets in the order in which they are launched, the same on every rank.

    Args:
        buckets: each parameter is in exactly one.
        cap_bytes: what a bucket of several parameters stays within.
    """

    buckets: tuple[Bucket, ...]
    cap_bytes: int

    def __len__(self) -> int:
        return len(self.buckets)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)

    def __getitem__(self, index: int) -> Bucket:
        return self.buckets[index]

    def __str__(self) -> str:
        head = f"{len(self)} buckets, cap {size_text(self.cap_bytes)}"
        rows = (
            f"bucket {i:<3} {size_text(b.bytes):>10} {b.dtype:<8} {' '.join(b.names)}"
            for i, b in enumerate(self.buckets)
        )
        return "\n".join((head, *(row.rstrip() for row in rows)))


def plan_buckets(
    parameters: Iterable[Tensor | int | tuple[str, Tensor | int]],
    cap_bytes: int,
    first_cap_bytes: int | None = None,
) -> BucketPlan:
    """Cut the parameters, last registered first, into buckets of up to a cap.

    The backward pass makes the last layer's gradients first, so the walk is in
    reverse. One bucket a dtype (and device) is open at a time; it is closed before a
    parameter would take it past the cap, and a parameter is never split, so one that
    is larger than the cap is alone in its bucket. Buckets are ordered by their last
    parameter: the order in which they become full when gradients arrive in reverse.
    The method is that of Li et al., PyTorch Distributed (VLDB 2020), section 3.2.3.

    Args:
        parameters: in registration order; tensors, sizes in bytes, or (name, either).
        cap_bytes: of a bucket of more than one parameter.
        first_cap_bytes: the cap of the first bucket of each dtype, `cap_bytes` if
            None. A small one puts the link to work early.

    Returns:
        The plan; pure data, equal for equal input.

    Raises:
        ValueError: a cap is not positive, or a size negative.
        TypeError: a cap is no number, or an entry neither a tensor nor a size.

    >>> print(plan_buckets([3, 10, 1, 1, 1, 6], cap_bytes=4))
    4 buckets, cap 4 B
    bucket 0          6 B          5
    bucket 1          3 B          4 3 2
    bucket 2         10 B          1
    bucket 3          3 B          0
    """
    first_cap = cap_bytes if first_cap_bytes is None else first_cap_bytes
    for name, cap in (("cap_bytes", cap_bytes), ("first_cap_bytes", first_cap)):
        if isinstance(cap, bool) or not isinstance(cap, Real):
            raise TypeError(f"{name} is {cap!r}; expected a number of bytes")
        if not 0 < cap < math.inf:
            raise ValueError(f"{name} is {cap}; expected a positive number of bytes")
    items = [_describe(i, entry) for i, entry in enumerate(parameters)]
    closed: list[Bucket] = []
    open_: dict[str, Bucket] = {}
    num_closed: dict[str, int] = {}
    for position in reversed(range(len(items))):
        name, size, key = items[position]
        bucket = open_.get(key, Bucket((), 0))
        cap = cap_bytes if num_closed.get(key) else first_cap
        if bucket.positions and bucket.bytes + size > cap:
            closed.append(bucket)
            num_closed[key] = num_closed.get(key, 0) + 1
            bucket = Bucket((), 0)
        open_[key] = Bucket(
            (*bucket.positions, position),
            bucket.bytes + size,
            key.partition("@")[0],
            (*bucket.names, name),
        )
    closed.extend(open_.values())
    closed.sort(key=lambda bucket: -bucket.positions[-1])
    return BucketPlan(tuple(closed), cap_bytes)


# What NVLink carries (300 GB/s) while a CPU launches one bucket in the middle of a
# backward (0.44 ms, measured beside eager layers of a GPT, on a slow host).
LAUNCH_BYTES = 128 * MIB


def default_cap_bytes(total_bytes: int) -> int:
    """A cap for `total_bytes` of gradients that nobody has tuned.

    With a cap c, the CPU launches total / c times and the last bucket, for which no
    computation is left, takes c / bandwidth: their sum is least at the square root of
    total x `LAUNCH_BYTES`. But at least a third of the gradients leaves early, and
    below 25 MiB a launch is not worth it.

    >>> [default_cap_bytes(total * MIB) // MIB for total in (10, 300, 1600, 6400)]
    [25, 100, 452, 905]
    """
    best = math.isqrt(total_bytes * LAUNCH_BYTES)
    return max(25 * MIB, min(total_bytes // 3, best))


def cap_bytes(name: str, mib: object) -> int:
    """A cap in bytes, at least 1, of a setting `name` in MiB.

    Raises:
        TypeError: it is no number.
        ValueError: it is not positive.
    """
    if isinstance(mib, bool) or not isinstance(mib, Real):
        raise TypeError(f"{name} is {mib!r}; expected a number of MiB")
    number: Any = mib
    if not 0 < number * MIB < math.inf:
        raise ValueError(f"{name} is {mib}; expected a finite number above 0 MiB")
    return max(1, int(number * MIB))


def _describe(
    position: int, entry: Tensor | int | tuple[str, Tensor | int]
) -> tuple[str, int, str]:
    """(name, bytes, what may share a bucket with it)."""
    name, item = str(position), entry
    if isinstance(entry, tuple) and len(entry) == 2:
        name, item = entry
    if isinstance(item, int):
        if item < 0:
            raise ValueError(f"size of parameter {name} is {item} bytes; expected >= 0")
        return name, item, ""
    if not isinstance(item, Tensor):
        raise TypeError(
            f"entry {position} is {entry!r}; expected a tensor, a size in bytes, or a "
            "tuple (name, either)"
        )
    dtype = str(item.dtype).removeprefix("torch.")
    return name, item.numel() * item.element_size(), f"{dtype}@{item.device}"


def size_text(num_bytes: int) -> str:
    """For people: in MiB, KiB or B."""
    if num_bytes >= MIB:
        return f"{num_bytes / MIB:.1f} MiB"
    if num_bytes >= 1024:
        return f"{num_bytes / 1024:.1f} KiB"
    return f"{num_bytes} B"
