"""Write a program by hand, in a few lines: for tests, lessons and estimates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from overlaplab.program.record import (
    Access,
    Collective,
    Op,
    OpKind,
    PayloadTensor,
    Program,
    StorageLife,
    WorkWait,
)


@dataclass(slots=True)
class _Rank:
    ops: list[Op] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)  # lane -> index
    pending: dict[str, list[int]] = field(default_factory=dict)  # stream -> waits
    sequence: dict[str, int] = field(default_factory=dict)  # group -> next number
    # Works that nobody waited for yet, and the storages that each holds.
    held: dict[int, set[int]] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)  # freed once no work holds them


class ProgramBuilder:
    """Builds a `Program` call by call, in the order of each rank's CPU.

    Methods that launch return the operator's index in its rank, which is what
    `after`, `wait` and `host_wait` take. Durations are those on the profile `chalk`
    (1000 FLOP a ns, no launch cost).

    Args:
        num_ranks: ranks to write; all are of the communicator "default".
        represents: with `num_ranks=1`: how many ranks the one stands for.

    >>> from overlaplab.program import ProgramBuilder, resolve
    >>> b = ProgramBuilder(num_ranks=2)
    >>> for rank in (0, 1):
    ...     _ = b.compute(rank, "backward 1", ns=2_000)
    ...     work = b.collective(rank, "all_reduce", bytes=10_000)
    ...     _ = b.compute(rank, "backward 0", ns=3_000)
    ...     b.wait(rank, work)
    ...     _ = b.compute(rank, "step", ns=500)
    >>> for s in resolve(b.build(), "chalk").spans:
    ...     if s.rank == 0:
    ...         print(s.lane, s.name, s.start_ns, s.end_ns)
    default backward 1 0 2000
    comm all_reduce 2000 4000
    default backward 0 2000 5000
    default step 5000 5500
    """

    def __init__(self, num_ranks: int = 1, *, represents: int = 1) -> None:
        if num_ranks < 1 or represents < 1 or (represents > 1 and num_ranks > 1):
            raise ValueError(
                f"num_ranks is {num_ranks} and represents {represents}; expected at "
                "least 1 each, and one of them 1"
            )
        self.world_size = num_ranks * represents
        self._represents = represents
        self._ranks = [_Rank() for _ in range(num_ranks)]
        self._waits: list[WorkWait] = []
        self._storages: list[StorageLife] = []

    def compute(
        self,
        rank: int,
        name: str,
        *,
        ns: int = 0,
        flops: int = 0,
        stream: str = "default",
        **fields: Any,
    ) -> int:
        """Launch a kernel of `flops` operations, or of `ns` on `chalk`.

        `fields` are those of `Op`: reads, writes, label, read_bytes, after, ...
        """
        if ns and flops:
            raise ValueError(f"{name}: give ns or flops, not both")
        _check_amounts(name, ns=ns, flops=flops)
        return self._launch(
            rank, "compute", name, stream, flops=flops or ns * 1000, **fields
        )

    def collective(
        self,
        rank: int,
        operation: str,
        *,
        bytes: int = 0,
        payload: Sequence[PayloadTensor] = (),
        group: str = "default",
        ranks: Sequence[int] | None = None,
        async_op: bool = True,
        stream: str = "default",
        lane: str | None = None,
        root: int = -1,
        reduce_op: str = "",
        high_priority: bool = False,
        **fields: Any,
    ) -> int:
        """Launch a collective of `group` while `stream` is current.

        Its lane is "comm" for the default group and "comm:NAME" for another, whose
        `ranks` are all unless given. With `async_op=False` it is `stream`.
        """
        _check_amounts(operation, bytes=bytes)
        own = self._own(rank)
        sequence = own.sequence.get(group, 0)
        own.sequence[group] = sequence + 1
        collective = Collective(
            group=group,
            ranks=tuple(range(self.world_size) if ranks is None else ranks),
            sequence=sequence,
            operation=operation,
            reduce_op=reduce_op,
            root=root,
            bytes=bytes or sum(part.bytes for part in payload),
            payload=tuple(payload),
            async_op=async_op,
            high_priority=high_priority,
        )
        own_lane = "comm" if group == "default" else f"comm:{group}"
        lane = lane or (own_lane if async_op else stream)
        index = self._launch(
            rank,
            "communication",
            operation,
            lane,
            launch_stream=stream,
            collective=collective,
            **fields,
        )
        if async_op:
            op = own.ops[index]
            own.held[index] = {a.storage for a in (*op.reads, *op.writes)}
        elif lane != stream:
            self._wait(rank, stream, index)
        return index

    def copy(
        self,
        rank: int,
        direction: str,
        *,
        bytes: int,
        pinned: bool = True,
        stream: str = "default",
        name: str = "copy",
        **fields: Any,
    ) -> int:
        """Launch a copy between host and device on `stream`.

        `direction` is "h2d" or "d2h". From or to memory that is not `pinned` the CPU
        takes part: let a `host_wait` for it follow.
        """
        _check_amounts(name, bytes=bytes)
        if direction not in ("h2d", "d2h"):
            raise ValueError(f"{name}: direction is {direction!r}; expected h2d or d2h")
        fields["write_bytes" if direction == "h2d" else "read_bytes"] = bytes
        attributes = {"direction": direction, "pinned": pinned}
        return self._launch(
            rank, "memcpy", name, stream, attributes=attributes, **fields
        )

    def wait(self, rank: int, work: int, *, stream: str = "default") -> None:
        """`Work.wait()`: what is launched on `stream` next waits for `work`, which
        holds its tensors no longer."""
        own = self._own(rank)
        ops = own.ops
        if not 0 <= work < len(ops) or ops[work].kind != "communication":
            raise ValueError(
                f"rank {rank} waits for op {work}; expected what `collective` returned"
            )
        self._wait(rank, stream, work)
        self._waits.append(WorkWait(rank, work, stream, len(ops)))
        own.held.pop(work, None)
        self._release(rank)

    def wait_stream(self, rank: int, waiting: str, waited: str) -> None:
        """`waiting.wait_stream(waited)`: for what was launched there until now."""
        self.wait_event(rank, waiting, self.record_event(rank, waited))

    def record_event(self, rank: int, stream: str = "default") -> tuple[int, ...]:
        """An event: all that `stream` has until now, for `wait_event`."""
        own = self._own(rank)
        last = own.last.get(stream)
        return (*own.pending.get(stream, ()), *(() if last is None else (last,)))

    def wait_event(self, rank: int, stream: str, event: Iterable[int]) -> None:
        """What is launched on `stream` next waits for `event`."""
        for index in event:
            self._wait(rank, stream, index)

    def host_wait(
        self, rank: int, after: Iterable[int] | None = None, *, name: str = "wait"
    ) -> int:
        """The CPU waits for `after`; without it, for all that the rank launched."""
        own = self._own(rank)
        if after is None:
            after = set(own.last.values())
        return self._append(rank, "host_wait", name, "cpu", after=tuple(after))

    def host(self, rank: int, name: str, ns: int) -> int:
        """The CPU computes for `ns`."""
        _check_amounts(name, ns=ns)
        return self._append(rank, "host", name, "cpu", duration_ns=ns)

    def storage(
        self,
        rank: int,
        *,
        bytes: int,
        name: str = "",
        born: int | None = None,
        stream: str = "default",
    ) -> Access:
        """Allocate while `stream` is current; returns an access of all its bytes, for
        `reads` and `writes`."""
        number = len(self._storages)
        now = len(self._own(rank).ops) if born is None else born
        self._storages.append(StorageLife(rank, number, bytes, now, None, stream, name))
        return Access(number, 0, bytes)

    def free(self, rank: int, access: Access) -> None:
        """Drop the last reference to the storage of `access`. A collective that nobody
        waited for yet holds one, too."""
        self._own(rank).dropped.add(access.storage)
        self._release(rank)

    def resize(
        self, rank: int, access: Access, *, bytes: int, stream: str = "default"
    ) -> Access:
        """The storage of `access` gives its memory back, whoever refers to it, and
        takes `bytes` of `stream`'s instead; returns an access of these."""
        old = self._storages[access.storage]
        new = self.storage(rank, bytes=bytes, name=old.name, stream=stream)
        self._storages[access.storage] = replace(
            old,
            freed=len(self._own(rank).ops),
            freed_before=len(self._storages),
            given_back=True,
        )
        return new

    def record_stream(self, rank: int, access: Access, stream: str) -> None:
        """`tensor.record_stream(stream)`: its memory is kept back until what `stream`
        has at the time of the release is done."""
        life = self._storages[access.storage]
        recorded = (*life.recorded, (stream, len(self._own(rank).ops)))
        self._storages[access.storage] = replace(life, recorded=recorded)

    def _release(self, rank: int) -> None:
        own = self._own(rank)
        held = set().union(*own.held.values())
        for storage in sorted(own.dropped - held):
            own.dropped.remove(storage)
            self._storages[storage] = replace(
                self._storages[storage],
                freed=len(own.ops),
                freed_before=len(self._storages),
            )

    def build(self) -> Program:
        """The program as it is now; the builder can go on."""
        return Program(
            ranks=tuple(tuple(own.ops) for own in self._ranks),
            world_size=self.world_size,
            represents=self._represents,
            waits=tuple(sorted(self._waits, key=lambda w: (w.rank, w.before))),
            storages=tuple(sorted(self._storages, key=lambda s: (s.rank, s.storage))),
        )

    def _own(self, rank: int) -> _Rank:
        if not 0 <= rank < len(self._ranks):
            raise ValueError(
                f"rank is {rank}; this program has ranks 0 to {len(self._ranks) - 1}"
            )
        return self._ranks[rank]

    def _launch(
        self,
        rank: int,
        kind: OpKind,
        name: str,
        stream: str,
        *,
        launch_stream: str | None = None,
        after: Iterable[int] = (),
        **fields: Any,
    ) -> int:
        own = self._own(rank)
        launch_stream = launch_stream or stream
        waits = [*own.pending.get(launch_stream, ()), *after]
        if launch_stream != stream:
            # The communicator's stream waits for the launching one; what that waits
            # for stays pending there, for its own next operator.
            waits += [own.last[launch_stream]] if launch_stream in own.last else []
        else:
            own.pending.pop(stream, None)
        index = self._append(
            rank,
            kind,
            name,
            stream,
            launch_stream=launch_stream,
            after=tuple(sorted(set(waits))),
            **fields,
        )
        own.last[stream] = index
        return index

    def _append(
        self,
        rank: int,
        kind: OpKind,
        name: str,
        stream: str,
        *,
        launch_stream: str = "cpu",
        **fields: Any,
    ) -> int:
        ops = self._own(rank).ops
        ops.append(Op(len(ops), rank, kind, name, stream, launch_stream, **fields))
        return len(ops) - 1

    def _wait(self, rank: int, stream: str, index: int) -> None:
        self._own(rank).pending.setdefault(stream, []).append(index)


def _check_amounts(name: str, **amounts: int) -> None:
    for what, amount in amounts.items():
        if not isinstance(amount, int) or amount < 0:
            raise ValueError(
                f"{name}: {what} is {amount!r}; expected an int, 0 or more"
            )
