"""Which collectives of a program reduce gradients, and in which buckets they could go.

A gradient has a *position*: its place among the tensors that a step's gradient
all-reduces carry, in the order in which rank 0 launched them, from 0 in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from overlaplab.errors import ProgramError
from overlaplab.program.graph import describe
from overlaplab.program.record import Access, Op, PayloadTensor, Program

Buckets = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Member:
    """One tensor of one gradient all-reduce."""

    part: PayloadTensor  # its size, dtype and readiness
    old: Op  # the all-reduce that carried it
    # position in its rank's program, in front of which the call was made (or could have
    # been, where it travelled with gradients that came later)
    launch: int
    # reads, writes: its bytes, as far as they are known apart from the others'
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]


@dataclass(slots=True)
class Step:
    """The gradient all-reduces of one step on one rank."""

    old: list[Op] = field(default_factory=list)  # the collectives
    members: list[Member] = field(default_factory=list)  # gradients, by position
    # what travels with them and is no gradient (a reducer's flags)
    riders: list[Member] = field(default_factory=list)


def is_gradient_all_reduce(op: Op) -> bool:
    """The default rule: an asynchronous all_reduce that says what its payload are."""
    c = op.collective
    return (
        c is not None and c.operation == "all_reduce" and c.async_op and bool(c.payload)
    )


def gradient_payload(
    program: Program, *, is_gradient: Callable[[Op], bool] | None = None
) -> tuple[tuple[PayloadTensor, ...], ...]:
    """The gradients of each step of rank 0, by position: what buckets are made of."""
    steps = gradient_steps(program, 0, is_gradient or is_gradient_all_reduce)
    return tuple(tuple(member.part for member in step.members) for step in steps)


def buckets_of_cap(
    payload: Sequence[PayloadTensor], cap_bytes: int
) -> tuple[tuple[int, ...], ...]:
    """Buckets of at most `cap_bytes`, greedily, in order of position.

    One bucket is open a dtype; it is closed before it would pass the cap, so a gradient
    larger than the cap travels alone. Buckets are ordered by their last position.

    Raises:
        ValueError: the cap is not a positive number of bytes.
    """
    if isinstance(cap_bytes, bool) or cap_bytes <= 0:
        raise ValueError(f"bucket cap is {cap_bytes} bytes; expected at least 1")
    closed: list[list[int]] = []
    opened: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    for position, part in enumerate(payload):
        bucket = opened.get(part.dtype)
        if bucket is None or filled[part.dtype] + part.bytes > cap_bytes:
            bucket = opened[part.dtype] = []
            closed.append(bucket)
            filled[part.dtype] = 0
        bucket.append(position)
        filled[part.dtype] += part.bytes
    return tuple(sorted(map(tuple, closed), key=lambda bucket: bucket[-1]))


def check_kind(buckets: object) -> None:
    """Refuse what is neither a cap in bytes nor lists of positions.

    Raises:
        TypeError: see above.
    """
    if isinstance(buckets, int):
        return
    lists = isinstance(buckets, Sequence) and not isinstance(buckets, str)
    for bucket in buckets if lists else (None,):  # type: ignore[attr-defined]
        if (
            not isinstance(bucket, Sequence)
            or isinstance(bucket, str)
            or not all(isinstance(position, int) for position in bucket)
        ):
            raise TypeError(
                f"buckets is {buckets!r}; expected a cap in bytes (a whole number), or "
                "the positions of gradients bucket by bucket, such as [[0, 1], [2]]"
            )


def check_buckets(
    payload: Sequence[PayloadTensor], buckets: Buckets, step: int
) -> None:
    """Refuse buckets that are no plan for `payload`.

    Raises:
        ValueError: a position is missing, twice, or not there; a bucket is empty or
            mixes dtypes.
    """
    seen: set[int] = set()
    for index, bucket in enumerate(buckets):
        if not bucket:
            raise ValueError(f"bucket {index} is empty; leave it out")
        for position in bucket:
            if not 0 <= position < len(payload):
                raise ValueError(
                    f"bucket {index} has position {position}; step {step} has "
                    f"{len(payload)} gradients, positions 0 to {len(payload) - 1}"
                )
            if position in seen:
                raise ValueError(f"position {position} is in the buckets twice")
            seen.add(position)
        dtypes = {payload[position].dtype for position in bucket}
        if len(dtypes) > 1:
            raise ValueError(
                f"bucket {index} mixes {', '.join(sorted(dtypes))}; a collective has "
                "one dtype, so give each its own bucket"
            )
    missing = sorted(set(range(len(payload))) - seen)
    if missing:
        raise ValueError(
            f"no bucket has position {missing[0]} ({len(missing)} missing of the "
            f"{len(payload)} gradients of step {step})"
        )


def gradient_steps(
    program: Program, rank: int, is_gradient: Callable[[Op], bool]
) -> list[Step]:
    """The gradient all-reduces of `rank`, step by step.

    A new step begins with the first all-reduce whose "step" attribute differs, or
    which carries a gradient of a name that the step had already; where gradients have
    no names, after all earlier ones have been waited for.

    Raises:
        ProgramError: there are none, or one is blocking.
    """
    waited = {w.op: w.before for w in program.waits if w.rank == rank}
    steps: list[Step] = []
    names: set[str] = set()
    seen_waiting = -1  # the last gradient all-reduce that an operator waited for
    gradients: set[int] = set()
    for op in program.ranks[rank]:
        if not is_gradient(op):
            seen_waiting = max(
                (a for a in op.after if a in gradients), default=seen_waiting
            )
            continue
        gradients.add(op.index)
        _check_is_asynchronous(op)
        members = _members(op)
        own = {m.part.name for m in members if m.part.name}
        if not steps or _begins(steps[-1], op, own, names, waited, seen_waiting):
            steps.append(Step())
            names = set()
        names |= own
        steps[-1].old.append(op)
        # In a reducer that names its gradients, what has no name is no gradient.
        steps[-1].members += [m for m in members if m.part.name or not own]
        steps[-1].riders += [m for m in members if own and not m.part.name]
    if not steps:
        raise ProgramError(
            f"rank {rank} launches no asynchronous all_reduce, so there are no "
            "gradients to put into other buckets. Record a step with HookReducer or "
            "BucketedReducer, or pass is_gradient="
        )
    return steps


def _check_is_asynchronous(op: Op) -> None:
    if op.collective is not None and not op.collective.async_op:
        raise ProgramError(
            f"{describe(op)} of rank {op.rank} has async_op=False: all that its stream "
            f"{op.stream!r} gets later comes after it, so it cannot move to another "
            "bucket. Record a step that launches its all-reduces with async_op=True"
        )


def _begins(
    step: Step,
    op: Op,
    own: set[str],
    names: set[str],
    waited: dict[int, int],
    seen_waiting: int,
) -> bool:
    last = step.old[-1]
    if "step" in op.attributes or "step" in last.attributes:
        return op.attributes.get("step") != last.attributes.get("step")
    if own and names:
        return bool(own & names)
    return seen_waiting >= last.index or all(
        waited.get(old.index, op.index + 1) <= op.index for old in step.old
    )


def _members(op: Op) -> list[Member]:
    collective = op.collective
    assert collective is not None
    payload = collective.payload
    named = [part for part in payload if part.name]
    last = max(_ready(part) for part in named or payload)
    found = []
    for place, part in enumerate(payload):
        # The gradient that came last is why the call was made here; the others could
        # have left as soon as they were written.
        launch = op.index if _ready(part) >= last else _ready(part) + 1
        found.append(
            Member(
                part,
                op,
                launch,
                op.reads[place : place + 1]
                if len(op.reads) == len(payload)
                else op.reads,
                op.writes[place : place + 1]
                if len(op.writes) == len(payload)
                else op.writes,
            )
        )
    return found


def _ready(part: PayloadTensor) -> int:
    return -1 if part.ready is None else part.ready
