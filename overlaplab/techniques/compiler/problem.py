"""The scheduling problem without graphs: tasks on one stream, messages on one wire.

Operators run one after another, in the order that is to be found. A message starts when
all that was launched before it is over and the wire is free; first launched, first
sent. Who reads it waits for it. This is what `resolve(program, "chalk")` does, to the
nanosecond.

[Note: bytes in flight] Those of messages that were launched and not waited for. Under a
limit, a launch for which there is no room first waits for the oldest message, then for
the next, until there is. Waiting later would not help, waiting for another one takes
longer: the wire ends them in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Task:
    """An operator or a message.

    Args:
        name: for people.
        ns: how long it takes alone.
        needs: tasks, by position, that must be over before it.
        is_message: it runs on the wire.
        bytes: of a message, while it is in flight.
        is_sync: of a message: who launches it waits for it at once.
    """

    name: str
    ns: int
    needs: tuple[int, ...] = ()
    is_message: bool = False
    bytes: int = 0
    is_sync: bool = False


@dataclass(frozen=True)
class Problem:
    """Tasks, each behind what it needs, and how much may be in flight.

    Raises:
        ValueError: a task needs one that stands behind it, or a message alone is more
            than the limit.
    """

    tasks: tuple[Task, ...]
    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        for position, task in enumerate(self.tasks):
            if any(not 0 <= need < position for need in task.needs):
                raise ValueError(
                    f"task {position}, {task.name}, needs {task.needs}; expected "
                    "positions before its own"
                )
        largest = max((t.bytes for t in self.tasks), default=0)
        if self.limit_bytes is not None and largest > self.limit_bytes:
            raise ValueError(
                f"a message has {largest:,} bytes, and limit_bytes is "
                f"{self.limit_bytes:,}; the least that is possible is {largest:,}"
            )

    @cached_property
    def needs(self) -> tuple[int, ...]:
        """What each task needs directly, as bits."""
        return tuple(sum(1 << need for need in set(t.needs)) for t in self.tasks)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """All that must be over before each task, as bits."""
        found: list[int] = []
        for task in self.tasks:
            mask = 0
            for need in task.needs:
                mask |= found[need] | 1 << need
            found.append(mask)
        return tuple(found)

    @cached_property
    def tails(self) -> tuple[int, ...]:
        """The longest chain behind each task, without itself."""
        found = [0] * len(self.tasks)
        for position in reversed(range(len(self.tasks))):
            task = self.tasks[position]
            for need in task.needs:
                found[need] = max(found[need], found[position] + task.ns)
        return tuple(found)

    @cached_property
    def read(self) -> tuple[bool, ...]:
        """Of each task, whether it is a message that another task needs."""
        needed = {need for task in self.tasks for need in task.needs}
        return tuple(t.is_message and i in needed for i, t in enumerate(self.tasks))


@dataclass(frozen=True, slots=True)
class State:
    """Where computing and the wire stand.

    Args:
        compute_ns: when the stream is free.
        wire_ns: when the wire is.
        flying: (message, when it ends), those that may still be waited for.
    """

    compute_ns: int = 0
    wire_ns: int = 0
    flying: tuple[tuple[int, int], ...] = ()

    @property
    def end_ns(self) -> int:
        return max(self.compute_ns, self.wire_ns)


def step(problem: Problem, state: State, task: int) -> State:
    """The state behind one more task, all that it needs being launched."""
    own, needs = problem.tasks[task], problem.needs[task]
    compute, wire, flying = state.compute_ns, state.wire_ns, state.flying
    if own.is_message and problem.limit_bytes is not None:
        free = problem.limit_bytes - own.bytes
        flown = [(end, problem.tasks[m].bytes) for m, end in flying if end > compute]
        held = sum(size for _, size in flown)
        for end, size in flown:
            if held <= free:
                break
            compute, held = end, held - size
    for message, end in flying:
        if needs >> message & 1:
            compute = max(compute, end)
    if own.is_message:
        wire = max(compute, wire) + own.ns
        flying = (*flying, (task, wire))
        compute = wire if own.is_sync else compute
    else:
        compute += own.ns
    return State(compute, wire, _left(problem, flying, compute))


def _left(
    problem: Problem, flying: Iterable[tuple[int, int]], compute: int
) -> tuple[tuple[int, int], ...]:
    """Those that a later task may wait for, to read them or for their room."""
    limited = problem.limit_bytes is not None
    return tuple(
        f for f in flying if f[1] > compute and (limited or problem.read[f[0]])
    )


def end_of(problem: Problem, order: Sequence[int]) -> int:
    """When all is over if tasks are launched in `order`.

    >>> dx, dw = Task("dX", 1), Task("dW", 1)
    >>> late = Problem((dx, dw, Task("all_reduce", 1, (1,), is_message=True)))
    >>> end_of(late, [0, 1, 2]), end_of(late, [1, 2, 0])
    (3, 2)
    """
    state = State()
    for task in order:
        state = step(problem, state, task)
    return state.end_ns


@dataclass(frozen=True)
class Bounds:
    """What is left of a problem when some of its tasks are launched, as lower bounds.

    Args:
        compute_ns: all operators that are left.
        messages: (computing still to do before it, its time, the chain behind it) of
            each message that is left, the earliest first.
    """

    compute_ns: int
    messages: tuple[tuple[int, int, int], ...] = field(default=())

    def end_ns(self, state: State) -> int:
        """No order of what is left ends earlier."""
        compute, wire = state.compute_ns, state.wire_ns
        end = compute + self.compute_ns
        for work, ns, tail in self.messages:
            ready = compute + work
            end = max(end, max(ready, state.wire_ns) + ns + tail)
            wire = max(wire, ready) + ns
        return max(end, wire)


def bounds_of(problem: Problem, done: int) -> Bounds:
    """See `Bounds`; `done` has the bits of what is launched."""
    compute, messages = 0, []
    left = [i for i in range(len(problem.tasks)) if not done >> i & 1]
    computing = [
        (1 << i, problem.tasks[i].ns) for i in left if not problem.tasks[i].is_message
    ]
    compute = sum(ns for _, ns in computing)
    for i in left:
        if problem.tasks[i].is_message:
            before = problem.before[i]
            work = sum(ns for bit, ns in computing if before & bit)
            messages.append((work, problem.tasks[i].ns, problem.tails[i]))
    return Bounds(compute, tuple(sorted(messages)))
