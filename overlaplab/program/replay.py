"""Re-time a recorded program with other buckets, another link, another launch cost.

Nothing is run again: `rebucket` moves the gradients of a record into other collectives
and `resolve` does the rest, in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from overlaplab.errors import ProgramError
from overlaplab.hardware import Hardware
from overlaplab.program.garbage import no_collections
from overlaplab.program.gradients import (
    Buckets,
    Member,
    Step,
    buckets_of_cap,
    check_buckets,
    check_kind,
    gradient_steps,
    is_gradient_all_reduce,
)
from overlaplab.program.graph import StreamOrder, check_program
from overlaplab.program.record import (
    Op,
    PayloadTensor,
    Program,
    StorageLife,
    TensorName,
    WorkWait,
)
from overlaplab.program.resolve import resolve
from overlaplab.timeline import Timeline


def replay(
    program: Program,
    *,
    hardware: str | Hardware,
    buckets: Buckets | int | None = None,
    is_gradient: Callable[[Op], bool] | None = None,
) -> Timeline:
    """`program` on other hardware, with other gradient buckets, or both.

    Args:
        program: a record; not changed.
        hardware: a profile or its name; edit one with `with_link` or
            `dataclasses.replace`.
        buckets: see `rebucket`; None keeps the recorded ones.
        is_gradient: see `rebucket`.

    Raises:
        ValueError, TypeError, ProgramError, DeadlockError: see `rebucket` and
            `resolve`.
    """
    if buckets is not None:
        program = rebucket(program, buckets, is_gradient=is_gradient)
    return resolve(program, hardware)


def rebucket(
    program: Program,
    buckets: Buckets | int,
    *,
    is_gradient: Callable[[Op], bool] | None = None,
) -> Program:
    """`program` with its gradients in other coalesced all-reduces, every step alike.

    A new bucket is launched where its last gradient was (in a record of one all-reduce
    a parameter: exactly there; gradients that travelled with later ones: right behind
    the operator that wrote them). Buckets leave in the order in which rank 0 completes
    them, on all ranks. Whoever waited for an old collective waits for the new ones that
    carry what had been launched until then.

    Args:
        program: a record whose gradient collectives carry `payload`; not changed.
        buckets: positions of gradients (see `gradients`), each exactly once; or a cap
            in bytes, filled greedily.
        is_gradient: which operators reduce gradients; by default every asynchronous
            all_reduce.

    Raises:
        ValueError: `buckets` is no plan for the gradients of some step.
        TypeError: `buckets` is neither a cap nor lists of positions, `program` is no
            program, or `is_gradient` cannot be called.
        ProgramError: the program reduces no gradients asynchronously; ranks differ in
            them; one is blocking; a bucket would mix communicators or reduce
            operations; or something waits for a gradient before its new bucket can
            leave.
    """
    check_program(program)
    check_kind(buckets)
    if is_gradient is not None and not callable(is_gradient):
        raise TypeError(
            f"is_gradient is {is_gradient!r}; expected a function that takes an Op"
        )
    rule = is_gradient or is_gradient_all_reduce
    by_rank = [
        gradient_steps(program, rank, rule) for rank in range(len(program.ranks))
    ]
    _check_ranks_agree(by_rank)
    plans: list[list[tuple[int, tuple[int, ...]]]] = []
    for number, step in enumerate(by_rank[0]):
        payload = [member.part for member in step.members]
        plan: Buckets
        plan = buckets_of_cap(payload, buckets) if isinstance(buckets, int) else buckets
        check_buckets(payload, plan, number)
        ready = [max(step.members[p].launch for p in bucket) for bucket in plan]
        order = sorted(range(len(plan)), key=lambda index: (ready[index], index))
        plans.append([(index, tuple(plan[index])) for index in order])
    with no_collections():
        edits = [_Edit(program, rank, own, plans) for rank, own in enumerate(by_rank)]
        return replace(
            program,
            ranks=tuple(edit.ops() for edit in edits),
            waits=tuple(wait for edit in edits for wait in edit.waits()),
            storages=tuple(edits[life.rank].storage(life) for life in program.storages),
            names=tuple(edits[name.rank].name(name) for name in program.names),
        )


def _check_ranks_agree(by_rank: list[list[Step]]) -> None:
    first = [[(m.part.bytes, m.part.dtype) for m in s.members] for s in by_rank[0]]
    for rank, steps in enumerate(by_rank):
        own = [[(m.part.bytes, m.part.dtype) for m in s.members] for s in steps]
        if own != first:
            raise ProgramError(
                f"rank {rank} reduces other gradients than rank 0 ({[*map(len, own)]} "
                f"a step, rank 0 {[*map(len, first)]}), or in another order; buckets "
                "by position need the same on all ranks"
            )


@dataclass(slots=True)
class _New:
    """A new bucket, in front of old operator `at`."""

    at: int
    members: list[Member]
    label: str
    index: int = -1  # in the new program


class _Edit:
    """One rank's program, edited. "Old" and "new" are indices before and after."""

    def __init__(
        self,
        program: Program,
        rank: int,
        steps: list[Step],
        plans: list[list[tuple[int, tuple[int, ...]]]],
    ) -> None:
        self.rank = rank
        self.old = program.ranks[rank]
        self.old_waits = [w for w in program.waits if w.rank == rank]
        self.order = StreamOrder(self.old)
        self.new: list[_New] = []
        # Of each old gradient collective: the new ones with its payload, and the last
        # one that must have ended where it had.
        self.carriers: dict[int, list[_New]] = {}
        self.carried: dict[int, _New] = {}
        for step, plan in zip(steps, plans, strict=True):
            self._plan_step(step, plan)
        self._place()

    def _plan_step(self, step: Step, plan: list[tuple[int, tuple[int, ...]]]) -> None:
        places: dict[int, set[int]] = {}  # of an old collective, in `self.new`
        at = self.new[-1].at if self.new else 0
        for index, bucket in plan:
            members = [step.members[position] for position in bucket]
            at = max(at, *(member.launch for member in members))
            for member in members:
                places.setdefault(member.old.index, set()).add(len(self.new))
            self.new.append(_New(at, members, f"bucket {index}"))
        for rider in step.riders:
            # Its gradients are the reason for its call: it goes with the last of them.
            place = max(places[rider.old.index])
            self.new[place].members.append(rider)
            self.new[place].at = max(self.new[place].at, rider.launch)
            for later, earlier in zip(
                self.new[place + 1 :], self.new[place:], strict=False
            ):
                later.at = max(later.at, earlier.at)
        # A stream is in order: who waits for a collective waits for those before it.
        last: dict[str, int] = {}
        for op in step.old:
            own = sorted(places[op.index])
            last[op.stream] = max(last.get(op.stream, 0), *own)
            self.carriers[op.index] = [self.new[place] for place in own]
            self.carried[op.index] = self.new[last[op.stream]]

    def _place(self) -> None:
        """New indices of all that stays, and of the new buckets."""
        self.index = [-1] * len(self.old)
        self.first_at = [0] * (len(self.old) + 1)  # in front of an old operator
        count, pending = 0, 0
        for old in range(len(self.old) + 1):
            self.first_at[old] = count
            while pending < len(self.new) and self.new[pending].at <= old:
                self.new[pending].index = count
                count, pending = count + 1, pending + 1
            if old < len(self.old) and old not in self.carried:
                self.index[old] = count
                count += 1

    def _moved(self, old: int) -> int:
        """New index of what does the work of an old operator."""
        carrier = self.carried.get(old)
        return self.index[old] if carrier is None else carrier.index

    def ops(self) -> tuple[Op, ...]:
        placed: list[Op] = []
        pending = 0
        for op in self.old:
            while pending < len(self.new) and self.new[pending].index == len(placed):
                placed.append(self._launch(self.new[pending]))
                pending += 1
            if op.index in self.carried:
                continue
            placed.append(self._keep(op, len(placed)))
        placed += [self._launch(new) for new in self.new[pending:]]
        return _renumbered(placed)

    def _keep(self, op: Op, index: int) -> Op:
        after = tuple(dict.fromkeys(self._moved(a) for a in op.after))
        collective = op.collective
        if collective is not None and collective.payload:
            collective = replace(collective, payload=self._payload(collective.payload))
        if index == op.index and after == op.after and collective is op.collective:
            return op
        if after and max(after) >= index:
            late = next(self.carried[a] for a in op.after if self._moved(a) >= index)
            self._refuse(late, op.index)
        return replace(op, index=index, after=after, collective=collective)

    def _launch(self, new: _New) -> Op:
        """The coalesced all-reduce of a bucket, launched where its last one was."""
        model = max(new.members, key=lambda m: (m.launch, m.old.index)).old
        like = model.collective
        assert like is not None
        for member in new.members:
            other = member.old.collective
            assert other is not None
            for what in ("group", "reduce_op"):
                if getattr(other, what) != getattr(like, what):
                    raise ProgramError(
                        f"{new.label} mixes {what} {getattr(other, what)!r} and "
                        f"{getattr(like, what)!r}; keep them in buckets of their own"
                    )
        payload = tuple(member.part for member in new.members)
        num_bytes = sum(part.bytes for part in payload)
        collective = replace(like, bytes=num_bytes, payload=self._payload(payload))
        return replace(
            model,
            index=new.index,
            after=self._new_after(new, model),
            read_bytes=num_bytes if model.read_bytes else 0,
            write_bytes=num_bytes if model.write_bytes else 0,
            reads=tuple(dict.fromkeys(a for m in new.members for a in m.reads)),
            writes=tuple(dict.fromkeys(a for m in new.members for a in m.writes)),
            collective=collective,
            label=new.label,
        )

    def _new_after(self, new: _New, model: Op) -> tuple[int, ...]:
        """What its stream waits for: the launching stream (and others that the old
        calls waited for) as it is now, and whoever wrote its gradients."""
        streams = {model.launch_stream}
        for member in new.members:
            streams.update(self.old[a].stream for a in member.old.after)
        last: dict[str, int] = {}
        for stream in streams:
            before = self.order.before(stream, new.at)
            if before is not None:
                last[stream] = before
        for member in new.members:
            ready = member.part.ready
            if ready is not None and ready < new.at:
                stream = self.old[ready].stream
                last[stream] = max(ready, last.get(stream, ready))
        last.pop(model.stream, None)  # its own stream is in order anyway
        moved = {self._moved(old) for old in last.values()}
        return tuple(sorted(index for index in moved if index < new.index))

    def _payload(self, payload: tuple[PayloadTensor, ...]) -> tuple[PayloadTensor, ...]:
        return tuple(
            one if one.ready is None else replace(one, ready=self._moved(one.ready))
            for one in payload
        )

    def waits(self) -> list[WorkWait]:
        """Each old wait becomes one for each new bucket with some of its gradients."""
        found: dict[tuple[int, str], WorkWait] = {}
        for wait in self.old_waits:
            before = self.first_at[wait.before]
            for new in self.carriers.get(wait.op, ()):
                if new.index >= before:
                    self._refuse(new, wait.before)
            works = [new.index for new in self.carriers.get(wait.op, ())]
            for work in works or [self.index[wait.op]]:
                key = (work, wait.stream)
                found.setdefault(key, WorkWait(self.rank, work, wait.stream, before))
        return sorted(found.values(), key=lambda w: (w.before, w.op))

    def storage(self, life: StorageLife) -> StorageLife:
        born = self.first_at[life.born]
        freed = None if life.freed is None else self.first_at[life.freed]
        recorded = tuple((stream, self.first_at[at]) for stream, at in life.recorded)
        if (born, freed, recorded) == (life.born, life.freed, life.recorded):
            return life
        return replace(life, born=born, freed=freed, recorded=recorded)

    def name(self, name: TensorName) -> TensorName:
        since = self.first_at[name.since]
        if since == name.since:
            return name
        return TensorName(self.rank, name.access, name.name, since)

    def _refuse(self, late: _New, waiting: int) -> None:
        raise ProgramError(
            f"{late.label} cannot leave before op {waiting} of rank {self.rank}, which "
            f"waits for one of its gradients: its last gradient comes at op {late.at}. "
            "Put what is waited for early into an earlier bucket"
        )


def _renumbered(ops: list[Op]) -> tuple[Op, ...]:
    """Sequence numbers of each communicator, counted anew in launch order."""
    sequence: dict[str, int] = {}
    for place, op in enumerate(ops):
        collective = op.collective
        if collective is None:
            continue
        number = sequence.get(collective.group, 0)
        sequence[collective.group] = number + 1
        if number != collective.sequence:
            ops[place] = replace(op, collective=replace(collective, sequence=number))
    return tuple(ops)
