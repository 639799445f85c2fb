"""Three shapes of small schedules, each without one condition of the theorem.

With the order of computing fixed, nothing that reads a message, and no limit of memory,
"launch early, wait late" is optimal. Here one condition at a time is gone: the rule's
time stands beside the best of all orders that the others leave.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from overlaplab.grading.answered import as_whole
from overlaplab.techniques.compiler import Problem, Task, end_of
from overlaplab.techniques.compiler.problem import State, step
from overlaplab.timeline import Span, Timeline

MS = 1_000_000
MOST = 9  # of a time in ms
LIMIT = 10  # that may be in flight at a time, in the bytes of a message of so many ms
# The operators in the given order, each behind the one before unless it says otherwise;
# "m of x": a message with what x gives; "x < m": x reads the result of m.
SHAPES: Mapping[str, tuple[str, ...]] = {
    "order": ("dx", "dw", "m of dw"),
    "reader": ("a", "m1 of a", "b", "m2 of b", "u2 < m2", "u1 < m1"),
    "memory": (*("a", "ma of a", "b", "mb of b", "c", "mc of c", "d", "md of d"),),
}


@dataclass(frozen=True)
class Shape:
    """A schedule of one shape, with its times.

    Args:
        name: "order", "reader" or "memory": which condition is gone.
        times: of each operator and message, in ms.
    """

    name: str
    times: tuple[tuple[str, int], ...]

    @cached_property
    def problem(self) -> Problem:
        """Tasks in the given order, each message launched as soon as it is ready."""
        return _problem(SHAPES[self.name], dict(self.times), self.name)

    @cached_property
    def rule(self) -> tuple[int, ...]:
        """Launch early, in order of readiness; compute in the given order."""
        return tuple(range(len(self.problem.tasks)))

    @cached_property
    def best(self) -> tuple[int, ...]:
        """The best of all orders: of everything, or of launches alone."""
        return best_order(self.problem, is_free=self.name == "order")

    @property
    def rule_ms(self) -> float:
        return end_of(self.problem, self.rule) / MS

    @property
    def best_ms(self) -> float:
        return end_of(self.problem, self.best) / MS

    @property
    def loses_percent(self) -> float:
        """How much longer the rule takes than the best."""
        return 100 * (self.rule_ms / self.best_ms - 1)

    @property
    def timelines(self) -> dict[str, Timeline]:
        """The rule's, and the best one's."""
        return {
            f"{self.name}: launch early, wait late": drawn(self.problem, self.rule),
            f"{self.name}: the best": drawn(self.problem, self.best),
        }

    def __str__(self) -> str:
        return (
            f"{self.name}: launch early, wait late {self.rule_ms:.0f} ms, "
            f"the best {self.best_ms:.0f} ms: {self.loses_percent:.0f} % lost"
        )


def shape(name: str, **times: float) -> Shape:
    """A shape with its times in ms; `lab.SHAPES[name]` has its operators.

    Raises:
        ValueError: a time is missing, unknown, or no whole number from 1 to 9.
    """
    wrong = problem_with(name, times)
    if wrong:
        raise ValueError(wrong)
    whole = {key: as_whole(time) or 0 for key, time in times.items()}
    return _shape(name, tuple(sorted(whole.items())))


def problem_with(name: str, times: object) -> str:
    """What is wrong with the times of a shape; "" if nothing."""
    names = [row.split()[0] for row in SHAPES[name]]
    if not isinstance(times, Mapping) or {*times} != {*names}:
        got = ", ".join(map(str, times)) if isinstance(times, Mapping) else times
        return f"{name!r} needs the times {', '.join(names)}; it has {got}"
    for key, time in times.items():
        whole = as_whole(time)
        if whole is None or not 1 <= whole <= MOST:
            return f"{name!r}: {key} is {time!r}; expected a whole number from 1 to 9"
    return ""


@lru_cache(maxsize=256)
def _shape(name: str, times: tuple[tuple[str, int], ...]) -> Shape:
    return Shape(name, times)


def _problem(rows: Sequence[str], times: Mapping[str, int], name: str) -> Problem:
    tasks, place = list[Task](), dict[str, int]()
    last: tuple[int, ...] = ()
    for row in rows:
        own, *rest = row.split()
        is_message = rest[:1] == ["of"]
        needs = tuple(place[word] for word in rest[1:])
        if not is_message:
            chained = name != "order" and own not in ("u1", "u2")
            needs = (*needs, *last) if chained else needs
            last = (len(tasks),)
        ns = times[own] * MS
        tasks.append(Task(own, ns, needs, is_message=is_message, bytes=ns))
        place[own] = len(tasks) - 1
    return Problem(tuple(tasks), LIMIT * MS if name == "memory" else None)


def best_order(problem: Problem, *, is_free: bool) -> tuple[int, ...]:
    """By trying them all.

    Args:
        problem: of up to about ten tasks.
        is_free: whether operators may change places, or launches alone.
    """
    return min(_orders(problem, is_free), key=lambda order: end_of(problem, order))


def _orders(problem: Problem, is_free: bool) -> Iterator[tuple[int, ...]]:
    tasks = problem.tasks
    computing = [i for i, task in enumerate(tasks) if not task.is_message]

    def more(order: tuple[int, ...], done: int) -> Iterator[tuple[int, ...]]:
        if len(order) == len(tasks):
            yield order
        first = next((i for i in computing if not done >> i & 1), -1)
        for i, task in enumerate(tasks):
            is_ready = not done >> i & 1 and not problem.needs[i] & ~done
            if is_ready and (is_free or task.is_message or i == first):
                yield from more((*order, i), done | 1 << i)

    return more((), 0)


def drawn(problem: Problem, order: Sequence[int]) -> Timeline:
    """The timeline of a problem whose tasks are launched in `order`."""
    spans, state = list[Span](), State()
    for i in order:
        task = problem.tasks[i]
        state = step(problem, state, i)
        end = state.wire_ns if task.is_message else state.compute_ns
        lane, kind = (
            ("comm", "communication") if task.is_message else ("default", "compute")
        )
        attributes: dict[str, Any] = {}
        spans.append(
            Span(0, lane, kind, task.name, end - task.ns, end, attributes=attributes)  # type: ignore[arg-type]
        )
    return Timeline.of(spans)


@lru_cache(maxsize=1)
def most_lost() -> float:
    """How many times as long as the best the rule can take without a fixed order."""
    times = itertools.product(range(1, MOST + 1), repeat=3)
    each = (shape("order", dx=dx, dw=dw, m=m) for dx, dw, m in times)
    return max(one.rule_ms / one.best_ms for one in each)


def random_chain(seed: int, num_operators: int = 4) -> Problem:
    """Operators in a row, a message of each: every condition holds."""
    draw = random.Random(seed)
    names = "abcdefgh"[:num_operators]
    rows = [row for name in names for row in (name, f"m{name} of {name}")]
    times = {row.split()[0]: draw.randint(1, MOST) for row in rows}
    return _problem(rows, times, "chain")


def try_to_break(
    make: Callable[[int], Problem] = random_chain, tries: int = 200
) -> int:
    """How many of so many problems have an order of launches that beats the rule."""
    found = 0
    for seed in range(tries):
        problem = make(seed)
        rule = end_of(problem, range(len(problem.tasks)))
        best = end_of(problem, best_order(problem, is_free=False))
        found += best < rule
    return found
