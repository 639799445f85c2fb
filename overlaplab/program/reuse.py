"""Memory that is handed out again while a stream may still use it.

The caching allocator gives a block back to the stream that allocated it as soon as its
last reference goes, whatever other streams still do with it, and hands it out at the
next allocation of that stream that fits. Right is whoever makes the new owner's first
use come after the old owner's last: by any chain, or by `record_stream`, for which the
allocator keeps the block back.

The allocator's model: a pool for each stream and for blocks of up to 1 MiB and larger
ones; sizes are rounded up to 512 bytes; the smallest block that fits is taken and the
rest of it stays. A free block that fits may be the one that is taken: all are judged.
Memory of the host has no streams and is not looked at.

A process group holds the tensors of a collective until its work is waited for; of one
that nobody waits for, until it is done. It does not hold the memory of a storage that
gives it back by `resize_`. autograd records the streams of the gradients
that cross from one to another.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from overlaplab.program.graph import Clocks, Graph, StreamOrder
from overlaplab.program.hazards import Hazard, Key, Touch, Use
from overlaplab.program.record import StorageLife, by_autograd
from overlaplab.timeline.span import CPU_LANE

_ROUND_BYTES = 512
_SMALL_BYTES = 2**20

# A free block is (size, running number, block): the pool is sorted by size.
_Entry = tuple[int, int, "_Block"]


class _Last(NamedTuple):
    """The last operators of a lane that used and that wrote a block; -1 for none."""

    used: int
    storage: int
    wrote: int
    storage_written: int


@dataclass(slots=True)
class _Block:
    """Memory, and what each lane did last with it, under any owner."""

    size: int
    uses: dict[int, _Last] = field(default_factory=dict)


@dataclass(slots=True)
class _Pool:
    """Free blocks by size."""

    free: list[_Entry] = field(default_factory=list)  # all of them
    # those that another stream may still use, as far as the allocating stream knows
    strange: list[_Entry] = field(default_factory=list)

    def take(self, entry: _Entry) -> _Block:
        del self.free[bisect_left(self.free, entry)]
        self.know(entry)
        return entry[2]

    def know(self, entry: _Entry) -> None:
        """The allocating stream is behind all uses of the block."""
        at = bisect_left(self.strange, entry)
        if self.strange[at : at + 1] == [entry]:
            del self.strange[at]


def find_reuses(
    graph: Graph, clocks: Clocks, touches: dict[Key, dict[int, Touch]]
) -> Iterator[Hazard]:
    """Uses of old and new owners of one block that nothing orders."""
    for rank in range(len(graph.program.ranks)):
        allocator = _Allocator(graph, clocks, touches, rank)
        if allocator.has_strangers():
            yield from allocator.judge()


class _Allocator:
    """The caching allocator of one rank."""

    def __init__(
        self,
        graph: Graph,
        clocks: Clocks,
        touches: dict[Key, dict[int, Touch]],
        rank: int,
    ) -> None:
        self._graph = graph
        self._clocks = clocks
        self._touches = touches
        self._rank = rank
        self._base = graph.base[rank]
        self._lives = [
            life
            for life in graph.program.storages
            if life.rank == rank and life.bytes and not life.host
        ]
        self._lanes = {
            graph.ops[g].stream: clocks.lane[g] for g in graph.rank_ids(rank)
        }
        # What the CPU reads is over when it goes on: no use that can come too late.
        self._cpu = self._lanes.get(CPU_LANE, -1)
        self._pools: dict[tuple[str, bool], _Pool] = defaultdict(_Pool)
        self._blocks: dict[int, _Block] = {}  # storage -> what it lives in
        self._number = 0
        self._order = StreamOrder(graph.program.ranks[rank])
        self._waits: dict[int, list[tuple[str, int]]] = defaultdict(list)
        for wait in graph.program.waits:
            if wait.rank == rank:
                self._waits[self._base + wait.op].append((wait.stream, wait.before))

    def has_strangers(self) -> bool:
        """Is memory used on a stream that did not allocate it?"""
        for life in self._lives:
            lanes = self._touches.get((self._rank, life.storage))
            if lanes is not None:
                own = self._lanes.get(life.stream, -1)
                if any(lane != own and lane != self._cpu for lane in lanes):
                    return True
        return False

    def judge(self) -> Iterator[Hazard]:
        lives = self._lives
        events: list[tuple[int, int, int, int]] = []
        for number, life in enumerate(lives):
            events.append((life.born, life.storage, 0, number))
            if life.freed is not None:
                before = -1 if life.freed_before is None else life.freed_before
                if life.freed == life.born:
                    before = max(before, life.storage + 1)
                events.append((life.freed, before, -1, number))
        for _, _, what, number in sorted(events):
            if what < 0:
                self._free(lives[number])
            else:
                yield from self._allocate(lives[number])

    def _allocate(self, life: StorageLife) -> Iterator[Hazard]:
        size, pool = self._place(life)
        own = self._lanes.get(life.stream, -1)
        touches = self._touches_of(life)
        if self._was_there(life):
            self._blocks[life.storage] = _Block(size)
            return
        earlier = self._before(life.stream, life.born)
        if self._comes_after(earlier, touches, own):
            at = bisect_left(pool.strange, (size,))
            judged = pool.strange[at:]
            for entry in judged:
                if self._is_known(entry[2], earlier, own):
                    pool.know(entry)
                else:
                    yield from self._meet(entry[2], life, touches)
        else:
            for _, _, block in pool.free[bisect_left(pool.free, (size,)) :]:
                yield from self._meet(block, life, touches)
        block = _Block(size)
        at = bisect_left(pool.free, (size,))
        if at < len(pool.free):
            block = pool.take(pool.free[at])
            rest = block.size - size
            if rest >= (_ROUND_BYTES if size <= _SMALL_BYTES else _SMALL_BYTES):
                self._put(pool, _Block(rest, dict(block.uses)), own)
                block.size = size
        self._blocks[life.storage] = block

    def _was_there(self, life: StorageLife) -> bool:
        """Is it older than its record: noted when an operator read what it held?"""
        ops = self._graph.program.ranks[self._rank]
        return life.born < len(ops) and any(
            access.storage == life.storage for access in ops[life.born].reads
        )

    def _comes_after(
        self, earlier: int | None, touches: dict[int, Touch], own: int
    ) -> bool:
        """Is every use after `earlier`, the last operator of the allocating stream?"""
        return earlier is None or all(
            lane == own or self._clocks.before(earlier, touch.first)
            for lane, touch in touches.items()
        )

    def _is_known(self, block: _Block, earlier: int | None, own: int) -> bool:
        """Is `earlier`, the last operator of the allocating stream, after all uses?"""
        return earlier is not None and all(
            lane == own or self._clocks.before(last.used, earlier)
            for lane, last in block.uses.items()
        )

    def _meet(
        self, block: _Block, new: StorageLife, touches: dict[int, Touch]
    ) -> Iterator[Hazard]:
        before = self._clocks.before
        for lane, old in block.uses.items():
            for other, touch in touches.items():
                if lane == other:
                    continue
                write = touch.first_write
                if write >= 0 and not before(old.used, write):
                    one = self._use(old.used, old.storage)
                    yield Hazard(one, self._use(write, new.storage))
                elif old.wrote >= 0 and not before(old.wrote, touch.first):
                    one = self._use(old.wrote, old.storage_written)
                    yield Hazard(one, self._use(touch.first, new.storage))

    def _free(self, life: StorageLife) -> None:
        block = self._blocks.pop(life.storage)
        touches = self._touches_of(life)
        if any(self._is_held(touch.last, life) for touch in touches.values()):
            return
        for lane, touch in touches.items():
            if self._is_kept_back(touch.last, life):
                continue
            wrote, written = touch.last_write, life.storage
            if wrote < 0 and lane in block.uses:
                _, _, wrote, written = block.uses[lane]
            block.uses[lane] = _Last(touch.last, life.storage, wrote, written)
        own = self._lanes.get(life.stream, -1)
        self._put(self._place(life)[1], block, own)

    def _is_held(self, g: int, life: StorageLife) -> bool:
        """By a process group: until nobody can be seen to wait for its work."""
        collective = self._graph.ops[g].collective
        if collective is None or not collective.async_op or life.given_back:
            return False
        assert life.freed is not None
        freed = life.freed
        return not any(before <= freed for _, before in self._waits.get(g, ()))

    def _is_kept_back(self, g: int, life: StorageLife) -> bool:
        """Does the allocator itself wait for this use?"""
        op, ops = self._graph.ops[g], self._graph.program.ranks[self._rank]
        crosses = by_autograd(op) and op.stream != life.stream
        if crosses and ops[min(life.born, op.index)].phase == "backward":
            return True
        return any(self._has_seen(s, life.freed or 0, g) for s, _ in life.recorded)

    def _has_seen(self, stream: str, freed: int, g: int) -> bool:
        """Does an event on `stream`, recorded at the release, come after `g`?"""
        before = self._clocks.before
        if self._graph.ops[g].stream == stream:
            return True
        for waited, waits in self._waits.items():
            is_noted = any(s == stream and at <= freed for s, at in waits)
            if is_noted and (waited == g or before(g, waited)):
                return True
        # The next operator there knows also the waits that no operator followed yet.
        following = self._after(stream, freed)
        if following is None:
            following = self._before(stream, freed)
        return following is not None and before(g, following)

    def _before(self, stream: str, index: int) -> int | None:
        """The last operator of `stream` that was launched before op `index`."""
        found = self._order.before(stream, index)
        return None if found is None else self._base + found

    def _after(self, stream: str, index: int) -> int | None:
        found = self._order.after(stream, index)
        return None if found is None else self._base + found

    def _place(self, life: StorageLife) -> tuple[int, _Pool]:
        size = -(-life.bytes // _ROUND_BYTES) * _ROUND_BYTES
        return size, self._pools[life.stream, size <= _SMALL_BYTES]

    def _put(self, pool: _Pool, block: _Block, own: int) -> None:
        self._number += 1
        entry = (block.size, self._number, block)
        insort(pool.free, entry)
        if block.uses.keys() - {own}:
            insort(pool.strange, entry)

    def _touches_of(self, life: StorageLife) -> dict[int, Touch]:
        touches = self._touches.get((self._rank, life.storage), {})
        if self._cpu in touches:
            return {lane: t for lane, t in touches.items() if lane != self._cpu}
        return touches

    def _use(self, g: int, storage: int) -> Use:
        op = self._graph.ops[g]
        for accesses, writes in ((op.writes, True), (op.reads, False)):
            for access in accesses:
                if access.storage == storage:
                    return Use(g, access, writes)
        raise AssertionError(f"op {op.index} does not use storage {storage}")
