"""Which bytes a tensor covers, where they are, who wrote them, how long they live.

One `StorageTable` a rank. A storage is known by the address of its C++ object while it
is alive and gets a new number when it is allocated anew (a fake tensor has no data
pointer, and addresses are used again), or takes other memory by `resize_`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from overlaplab.cluster.virtual.source import user_line
from overlaplab.errors import ReleasedMemoryError
from overlaplab.program.access import num_bytes as access_bytes
from overlaplab.program.access import overlap, runs
from overlaplab.program.record import Access, StorageLife, TensorName

# Where a storage is. "" is the GPU's memory, too: nobody said so.
PLACED = "device"
NUMBER = "number"  # made by torch.tensor(1.0): the CPU's, until a kernel writes it
PAGEABLE = "pageable"
PINNED = "pinned"
HOST = frozenset({PAGEABLE, PINNED})


_OF_A_THREAD = tuple(
    ["_placing", "placing_on_host", "placing_on_device", "is_loading", "is_arriving"]
)
NOT_PLACING = ("", False, False, False, False)  # `own_state` at the start of a thread


@dataclass(slots=True)
class _Storage:
    number: int
    bytes: int
    born: int
    stream: str
    freed: int | None = None
    freed_before: int | None = None
    name: str = ""
    kind: str = ""
    place: str = ""
    given_back: bool = False  # by `resize_`: its tensors live on
    has_none: bool = False  # ... and this is what they have since: no memory
    names: dict[Access, str] = field(default_factory=dict)
    recorded: list[tuple[str, int]] = field(default_factory=list)
    writes: list[tuple[Access, int]] = field(default_factory=list)
    # Ranges by what a tensor says of itself, with the bytes that they cover.
    known: dict[Any, tuple[Access, int]] = field(default_factory=dict)
    watch: Any = None

    def learn(self, key: Any) -> tuple[Access, int]:
        """The range of a tensor: (offset_bytes, run_bytes, dims), or (offset, size,
        stride, item size) in elements where that is not one run."""
        canonical = key
        if len(key) == 4:
            offset, size, stride, item = key
            canonical = (offset * item, *runs(size, stride, item))
        known = self.known.get(canonical)
        if known is None:
            start, run, dims = canonical
            access = Access(self.number, start, run, dims)
            known = self.known[canonical] = access, access_bytes(access)
        self.known[key] = known
        return known


class StorageTable:
    """The storages of one rank's program, whose operators so far are `ops`."""

    def __init__(self, rank: int, ops: list[Any]) -> None:
        self._rank = rank
        self._ops = ops
        self._alive: dict[int, _Storage] = {}
        self._all: list[_Storage] = []
        self._names: list[TensorName] = []
        self._placing: str
        self.placing_on_host: bool  # new storages are the host's
        self.placing_on_device: bool  # ... the GPU's, and somebody said so
        self.is_loading: bool  # what nobody places is the host's (loading.py)
        self.is_arriving: bool  # pinning takes no copy (loading.py)
        self.set_own_state(NOT_PLACING)
        self.has_numbers = False
        self.has_host = False
        self.has_resized = False  # a storage gave its memory back, and lives

    def accesses(
        self, tensors: Iterable[torch.Tensor], stream: str
    ) -> tuple[tuple[Access, ...], int]:
        """The bytes of `tensors`, each range once, in order; notes new storages.

        Ranges of one storage that are equal are one object.

        Returns:
            The ranges, and how many bytes they cover; what has none is left out.

        Raises:
            ReleasedMemoryError: one of them has given its memory back.
        """
        found: dict[int, Access] = {}
        total = 0
        for tensor in tensors:
            try:
                untyped = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):  # sparse: no storage
                continue
            storage = self._alive.get(untyped._cdata)
            if storage is None:
                if tensor.is_meta and not is_fake(tensor):  # memory of no device
                    continue
                storage = self._adopt(untyped, stream)
            num_bytes = tensor.nbytes
            if num_bytes == 0:
                continue
            offset = tensor.storage_offset()
            key: Any
            if tensor.is_contiguous():
                key = (offset * tensor.itemsize if offset else 0, num_bytes, ())
            else:
                key = (offset, tensor.size(), tensor.stride(), tensor.itemsize)
            known = storage.known.get(key)
            if known is None:
                if storage.has_none:
                    raise self._released(storage, num_bytes)
                if storage.bytes != untyped.nbytes():  # grown by `out=` or `resize_`
                    storage = self.renew(untyped, stream)
                known = storage.learn(key)
            access, num_bytes = known
            if id(access) not in found:
                found[id(access)] = access
                total += num_bytes
        return tuple(found.values()), total

    def access(self, tensor: torch.Tensor, stream: str) -> Access | None:
        """The bytes of `tensor`, or None if it has none; notes a new storage."""
        found, _ = self.accesses((tensor,), stream)
        return found[0] if found else None

    def wrote(self, access: Access, op: int) -> None:
        """Operator `op` writes `access`."""
        storage = self._all[access.storage]
        if storage.place == NUMBER:
            storage.place = ""
        if access.run_bytes == storage.bytes:  # all that was written before is gone
            storage.writes.clear()
        else:
            storage.writes = [w for w in storage.writes if w[0] is not access]
        storage.writes.append((access, op))

    def place(self, tensor: torch.Tensor, place: str, stream: str) -> None:
        """`tensor` is in this memory from now on."""
        self.access(tensor, stream)
        storage = self._find(tensor)
        if storage is not None:
            self._place(storage, place)

    def place_of(self, tensor: torch.Tensor) -> str:
        """Where `tensor` is, as far as anybody said."""
        storage = self._find(tensor)
        return "" if storage is None else storage.place

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether it was placed in the host's memory."""
        return self.has_host and self.place_of(tensor) in HOST

    def all_numbers(self, accesses: Iterable[Access]) -> bool:
        """Whether all of them, and at least one, are numbers of the CPU."""
        flags = [self._all[access.storage].place == NUMBER for access in accesses]
        return bool(flags) and all(flags)

    @contextlib.contextmanager
    def placing(self, place: str) -> Iterator[None]:
        """Storages that are new meanwhile are in this memory."""
        before = self._placing, self.placing_on_host, self.placing_on_device
        self._placing = place
        self.placing_on_host = place in HOST
        self.placing_on_device = place == PLACED
        try:
            yield
        finally:
            self._placing, self.placing_on_host, self.placing_on_device = before

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Meanwhile what nobody places is in the host's pageable memory."""
        before = self._placing, self.is_loading
        self._placing, self.is_loading, self.has_host = PAGEABLE, True, True
        try:
            yield
        finally:
            self._placing, self.is_loading = before

    def own_state(self) -> tuple[Any, ...]:
        """What belongs to the thread that runs."""
        return tuple(getattr(self, name) for name in _OF_A_THREAD)

    def set_own_state(self, state: tuple[Any, ...]) -> None:
        """Put back what `own_state` returned."""
        for name, value in zip(_OF_A_THREAD, state, strict=True):
            setattr(self, name, value)

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """Meanwhile `pin_memory` says what somebody else has done."""
        self.is_arriving = True
        try:
            yield
        finally:
            self.is_arriving = False

    def is_unplaced(self, tensor: torch.Tensor) -> bool:
        """Whether nobody said where `tensor` is; a loader's are the host's then."""
        return self.place_of(tensor) in ("", NUMBER)

    def is_from_device(self, access: Access | None) -> bool:
        """Whether a kernel computed these bytes from what was put on the device."""
        if access is None:
            return False
        seen, rest = {access.storage}, [access]
        while rest:
            op = self.last_writer(rest.pop())
            for read in () if op is None else self._ops[op].reads:
                if self._all[read.storage].place == PLACED:
                    return True
                if read.storage not in seen:
                    seen.add(read.storage)
                    rest.append(read)
        return False

    def record_stream(self, tensor: torch.Tensor, user: str, stream: str) -> None:
        """Stream `user` uses the memory of `tensor` up to here (`record_stream`)."""
        access = self.access(tensor, stream)
        if access is not None:
            recorded = self._all[access.storage].recorded
            recorded.append((user, len(self._ops)))

    def last_writer(self, access: Access) -> int | None:
        """The last operator that wrote any of these bytes."""
        for written, op in reversed(self._all[access.storage].writes):
            if written is access or overlap(written, access):
                return op
        return None

    def name(self, tensor: torch.Tensor, name: str, stream: str) -> None:
        """Call the bytes of `tensor` `name` from now on."""
        access = self.access(tensor, stream)
        if access is None:
            return
        storage = self._all[access.storage]
        if not access.dims and access.run_bytes == storage.bytes:
            storage.name = name
        self._call(storage, access, name)

    def suggest(
        self, tensor: torch.Tensor, name: str, stream: str, kind: str = ""
    ) -> None:
        """Call the storage of `tensor` so, if it is whole and has no name yet; it is of
        `kind`, if nobody said so yet (see `StorageLife`)."""
        storage = self._find(tensor)
        if storage is None:
            self.access(tensor, stream)
            storage = self._find(tensor)
        if storage is None:
            return
        storage.kind = storage.kind or kind
        if not storage.name and storage.bytes == tensor.numel() * tensor.itemsize:
            storage.name = name

    def suggested(self, tensor: torch.Tensor) -> str:
        """The name of the storage of `tensor`, "" if it has none."""
        storage = self._find(tensor)
        return "" if storage is None else storage.name

    def name_of(self, access: Access) -> str:
        """The name of exactly these bytes, or ""."""
        return self._all[access.storage].names.get(access, "")

    def lives(self) -> tuple[StorageLife, ...]:
        """Every allocation, in order of birth."""
        return tuple(
            StorageLife(
                self._rank,
                s.number,
                s.bytes,
                s.born,
                s.freed,
                s.stream,
                s.name,
                tuple(s.recorded),
                s.place in HOST,
                s.place == PINNED,
                s.freed_before,
                s.given_back,
                s.kind,
            )
            for s in self._all
        )

    def names(self) -> tuple[TensorName, ...]:
        return tuple(self._names)

    def note(self, untyped: torch.UntypedStorage, stream: str) -> None:
        """A storage that may be new."""
        if untyped._cdata not in self._alive:
            self._adopt(untyped, stream)

    def renew(
        self,
        untyped: torch.UntypedStorage,
        stream: str,
        copy: Callable[[Access, Access], None] | None = None,
    ) -> _Storage:
        """A storage that is known has other memory now, or none: what it had goes back
        to its stream, whoever refers to it, and what it has is `stream`'s. Its name and
        kind stay. `copy` is called with old and new bytes while both are there."""
        old = self._alive[untyped._cdata]
        new = self._adopt(untyped, stream)
        new.name, new.kind, new.place = old.name, old.kind, old.place
        new.has_none = not new.bytes
        for access, name in old.names.items():
            self._call(new, replace(access, storage=new.number), name)
        common = min(old.bytes, new.bytes)
        if copy and common and new.place not in HOST:
            copy(*(each.learn((0, common, ()))[0] for each in (old, new)))
        old.freed, old.freed_before = len(self._ops), len(self._all)
        old.given_back = self.has_resized = True
        old.watch = None
        old.known.clear()
        return new

    def close(self) -> None:
        """Stop watching; later frees are not of this run."""
        for storage in self._alive.values():
            storage.watch = None
        self._alive.clear()

    def _adopt(self, untyped: torch.UntypedStorage, stream: str) -> _Storage:
        number, address = len(self._all), untyped._cdata
        storage = _Storage(number, untyped.nbytes(), len(self._ops), stream)

        def freed(_: object) -> None:
            storage.known.clear()
            storage.freed = len(self._ops)
            storage.freed_before = len(self._all)
            if self._alive.get(address) is storage:
                del self._alive[address]

        storage.watch = weakref.ref(untyped, freed)
        self._alive[address] = storage
        self._all.append(storage)
        if self._placing:
            self._place(storage, self._placing)
        return storage

    def _call(self, storage: _Storage, access: Access, name: str) -> None:
        self._names.append(TensorName(self._rank, access, name, len(self._ops)))
        storage.names[access] = name

    def _released(self, storage: _Storage, num_bytes: int) -> ReleasedMemoryError:
        name, line = f" ({storage.name!r})" if storage.name else "", user_line()
        return ReleasedMemoryError(
            f"on rank {self._rank}, a tensor of {num_bytes} bytes{name} is used "
            f"after its storage gave its memory back by resize_(0)"
            f"{f', at {line}' if line else ''}.\n"
            "  On a GPU the kernel gets a null pointer: an illegal memory access.\n"
            "  Repair: call untyped_storage().resize_(bytes) and fill it before this "
            "use, or give the memory back after it."
        )

    def _find(self, tensor: torch.Tensor) -> _Storage | None:
        try:
            return self._alive.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse: no storage
            return None

    def _place(self, storage: _Storage, place: str) -> None:
        storage.place = place
        self.has_numbers |= place == NUMBER
        self.has_host |= place in HOST
