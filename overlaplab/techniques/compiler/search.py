"""An order for a scheduling problem: list schedules, then a search with a proof.

"Launch early, wait late" is optimal where the order of computing is fixed, nothing
reads a message before the end, and memory has no limit; in general the problem is hard
(two machines with precedence). So list schedules give a first answer, and an exact
search over sets of launched tasks improves it or proves it, within a budget of states.
Where that is used up, only the most promising states are followed on, and the gap to
the least possible end is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from overlaplab.techniques.compiler.problem import (
    Problem,
    State,
    bounds_of,
    end_of,
    step,
)
from overlaplab.techniques.compiler.words import count, time_text

DEFAULT_STATES = 10_000
_LEAST_STATES = 8  # followed on at each number of tasks when the budget is used up

# Which of the ready tasks goes first: the least key, messages before operators.
Key = Callable[[Problem, int, int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Found:
    """An order and what is known of it.

    Args:
        order: of tasks, by position.
        end_ns: when it ends.
        bound_ns: no order ends earlier.
        given_ns: when the given order ends, launched early and waited for late.
        how: which rule found it.
        num_states: that the search looked at.
    """

    order: tuple[int, ...]
    end_ns: int
    bound_ns: int
    given_ns: int
    how: str
    num_states: int = 0

    @property
    def is_optimal(self) -> bool:
        """Whether it is proven that nothing ends earlier."""
        return self.end_ns == self.bound_ns

    def __str__(self) -> str:
        if self.is_optimal:
            proof = "proven optimal"
        else:
            gap = 100 * (self.end_ns - self.bound_ns) / max(1, self.bound_ns)
            least = time_text(self.bound_ns)
            proof = f"no order ends before {least}: a gap of {gap:.1f} %"
        return (
            f"{time_text(self.end_ns)}, in the given order {time_text(self.given_ns)}; "
            f"by {self.how}, {proof} ({count(self.num_states, 'state')})"
        )


def _given(problem: Problem, task: int, done: int) -> tuple[int, ...]:
    return (task,)


def _tail(problem: Problem, task: int, done: int) -> tuple[int, ...]:
    own = problem.tasks[task]
    return (-problem.tails[task] - (0 if own.is_message else own.ns), task)


def _johnson(problem: Problem, task: int, done: int) -> tuple[int, ...]:
    """Those shorter than the messages behind them first, shortest first; then the
    others, the longest message first (Johnson 1954, for two machines in a row)."""
    own = problem.tasks[task]
    if own.is_message:
        return (-1, -problem.tails[task], task)
    message = sum(
        t.ns for i, t in enumerate(problem.tasks) if t.is_message and task in t.needs
    )
    if own.ns < message:
        return (0, own.ns, task)
    return (1, -message, task)


RULES: dict[str, Key] = {
    "the given order": _given,
    "the longest tail first": _tail,
    "Johnson's rule": _johnson,
}


def list_schedule(problem: Problem, key: Key, *, waits_for_room: bool) -> list[int]:
    """Launch what is ready, the least key first, messages before operators.

    Args:
        problem: what is to be ordered.
        key: of a ready task.
        waits_for_room: whether a message for which there is no room is launched all
            the same, behind a wait; if not, operators that are ready go before it.
    """
    state, done = State(), 0
    order: list[int] = []
    tasks = problem.tasks
    while len(order) < len(tasks):
        ready = _ready(problem, done)
        messages = [t for t in ready if tasks[t].is_message]
        if not waits_for_room and problem.limit_bytes is not None:
            held = sum(
                tasks[m].bytes for m, end in state.flying if end > state.compute_ns
            )
            free = problem.limit_bytes - held
            fit = [m for m in messages if tasks[m].bytes <= free]
            messages = fit if fit or len(messages) < len(ready) else messages
        computing = [t for t in ready if not tasks[t].is_message]
        task = min(messages or computing, key=lambda t: key(problem, t, done))
        state = step(problem, state, task)
        done |= 1 << task
        order.append(task)
    return order


def _ready(problem: Problem, done: int) -> list[int]:
    needs = problem.needs
    return [i for i in range(len(needs)) if not done >> i & 1 and not needs[i] & ~done]


def best_list(problem: Problem) -> Found:
    """The best of the rules, and what the given order would take."""
    found = []
    for how, key in RULES.items():
        for waits in (True, False) if problem.limit_bytes is not None else (True,):
            order = list_schedule(problem, key, waits_for_room=waits)
            found.append((end_of(problem, order), how, tuple(order)))
    given = found[0][0]
    end, how, best = min(found, key=lambda f: f[0])
    bound = bounds_of(problem, 0).end_ns(State())
    return Found(best, end, bound, given, how)


@dataclass(frozen=True, slots=True)
class _Partial:
    """A state that was reached, and through which tasks."""

    state: State
    last: int = -1
    earlier: _Partial | None = None

    def order(self) -> tuple[int, ...]:
        found, partial = [], self
        while partial.earlier is not None:
            found.append(partial.last)
            partial = partial.earlier
        return tuple(reversed(found))


def search(problem: Problem, max_states: int = DEFAULT_STATES) -> Found:
    """The best order that `max_states` states find.

    A dynamic programme over sets of launched tasks. Of a set only states are kept of
    which no other is ahead in computing, on the wire and in every message; and only
    those whose bound beats the best order so far.

    Args:
        problem: what is to be ordered.
        max_states: looked at before only the best are followed on.

    >>> from overlaplab.techniques.compiler.problem import Task
    >>> wire = dict(is_message=True)
    >>> tasks = [Task("a", 2), Task("m1", 4, (0,), **wire), Task("b", 1)]
    >>> tasks += [Task("m2", 2, (2,), **wire), Task("u1", 1, (1,)), Task("u2", 5, (3,))]
    >>> found = search(Problem(tuple(tasks)))  # m2 first, though a is ready first
    >>> found.end_ns, found.given_ns
    (9, 13)
    """
    first = best_list(problem)
    if first.is_optimal:
        return first
    best, order, how = first.end_ns, first.order, first.how
    dropped = best  # the least bound of what was not followed on
    layer: dict[int, list[_Partial]] = {0: [_Partial(State())]}
    seen, size = 0, len(problem.tasks)
    for depth in range(size):
        following: dict[int, list[_Partial]] = {}
        for done, partials in layer.items():
            for task in _choices(problem, done):
                reached = done | 1 << task
                known = following.setdefault(reached, [])
                for partial in partials:
                    state = step(problem, partial.state, task)
                    _keep(known, _Partial(state, task, partial))
        layer, bounded = {}, []
        for done, partials in following.items():
            bounds = bounds_of(problem, done)
            for partial in partials:
                bound = bounds.end_ns(partial.state)
                if bound < best:
                    bounded.append((bound, done, partial))
        seen += len(bounded)
        room = max(_LEAST_STATES, (max_states - seen) // (size - depth))
        if len(bounded) > room and seen + len(bounded) > max_states // 2:
            bounded.sort(key=lambda b: b[0])
            dropped = min(dropped, bounded[room][0])
            del bounded[room:]
        for _, done, partial in bounded:
            layer.setdefault(done, []).append(partial)
    for partials in layer.values():
        for partial in partials:
            if partial.state.end_ns < best:
                best, order, how = partial.state.end_ns, partial.order(), "search"
    bound = max(first.bound_ns, min(best, dropped))
    return Found(order, best, bound, first.given_ns, how, seen)


def _choices(problem: Problem, done: int) -> Iterable[int]:
    """What may come next; one message alone where that loses nothing.

    If no message that is left is read or synchronous, and memory has no limit, one that
    is ready leaves at once, unless it waits for another: it delays nobody.
    """
    ready, tasks = _ready(problem, done), problem.tasks
    if problem.limit_bytes is None:
        read = (i for i, its in enumerate(problem.read) if its or tasks[i].is_sync)
        if all(done >> i & 1 for i in read):
            for task in ready:
                own = tasks[task]
                if own.is_message and not any(tasks[n].is_message for n in own.needs):
                    return (task,)
    return ready


def _keep(known: list[_Partial], new: _Partial) -> None:
    """Add `new` unless one is ahead of it; drop those that it is ahead of."""
    if any(_is_ahead(old.state, new.state) for old in known):
        return
    known[:] = [old for old in known if not _is_ahead(new.state, old.state)]
    known.append(new)


def _is_ahead(one: State, other: State) -> bool:
    if one.compute_ns > other.compute_ns or one.wire_ns > other.wire_ns:
        return False
    if not one.flying:
        return True
    ends = dict(other.flying)
    return all(end <= ends.get(m, other.compute_ns) for m, end in one.flying)
