"""13.6: in which order to compute a few layers' backward, timed and searched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

from overlaplab.techniques.compiler import Problem, Task, end_of
from overlaplab.timeline import Timeline
from overlaplab_course.lab13 import breaking
from overlaplab_course.lab13.breaking import MS
from overlaplab_course.lab13.graphs import names_in

# Of each layer, the last one first: what dx, dw and the message of dw take, in ms.
Layers = tuple[tuple[int, int, int], ...]
NINE: Layers = ((2, 2, 5),) * 3
CASES: tuple[Layers, ...] = (
    NINE,
    ((1, 9, 1), (1, 1, 9), (1, 1, 9)),
    ((9, 1, 9), (9, 1, 9), (9, 1, 9)),
    ((1, 6, 2), (1, 2, 9), (4, 1, 3)),
    ((2, 7, 9), (2, 3, 1), (2, 1, 8)),
    ((5, 2, 1), (1, 4, 7), (3, 3, 3)),
    ((1, 3, 8), (6, 2, 2), (1, 5, 9)),
    ((3, 8, 2), (1, 1, 4), (2, 1, 9)),
    ((4, 4, 4), (2, 6, 1), (1, 1, 6)),
    ((1, 1, 1), (1, 9, 9), (1, 1, 7)),
    ((4, 3, 6), (2, 5, 3)),
    ((3, 2, 4),),
)


def names_of(layers: Layers) -> list[str]:
    """ "dx3", "dw3", "dx2", ...: as autograd orders them."""
    return [
        f"{what}{len(layers) - i}" for i in range(len(layers)) for what in ("dx", "dw")
    ]


def problem_of(layers: Layers, order: Sequence[str]) -> Problem:
    """The tasks in an order of computing, each message launched when it is ready.

    Raises:
        ValueError: an operator is missing, twice there, unknown, or before one that it
            needs.
    """
    if sorted(map(str, order)) != sorted(names_of(layers)):
        raise ValueError(
            f"the order is {', '.join(map(str, order)) or 'empty'}; expected each of "
            f"{', '.join(names_of(layers))} once"
        )
    tasks, place = list[Task](), dict[str, int]()
    for name in order:
        layer = len(layers) - int(name[2:])
        dx, dw, message = layers[layer]
        above = f"dx{int(name[2:]) + 1}" if layer else ""
        if above and above not in place:
            raise ValueError(f"{name} stands before {above}, whose result it takes")
        needs = (place[above],) if above else ()
        place[name] = len(tasks)
        tasks.append(Task(name, (dx if name[1] == "x" else dw) * MS, needs))
        if name[1] == "w":
            sent = Task(f"m{name[2:]}", message * MS, (place[name],), is_message=True)
            tasks.append(sent)
    return Problem(tuple(tasks))


def answered(order: Callable[[Layers], Iterable[str]], layers: Layers) -> list[str]:
    """The names that a learner's function returns."""
    return names_in(order(layers), "order", "a list of names")


def end_ms(layers: Layers, order: Sequence[str]) -> int:
    """When the last operator and the last message have ended, in ms."""
    problem = problem_of(layers, order)
    return end_of(problem, range(len(problem.tasks))) // MS


def drawn(layers: Layers, order: Sequence[str]) -> Timeline:
    """The timeline of an order."""
    problem = problem_of(layers, order)
    return breaking.drawn(problem, range(len(problem.tasks)))


@lru_cache(maxsize=32)
def best_ms(layers: Layers) -> int:
    """The end of the best order, by trying all."""
    return min(end_ms(layers, order) for order in _orders(layers, ()))


def _orders(layers: Layers, begun: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if len(begun) == 2 * len(layers):
        yield begun
    for name in names_of(layers):
        above = f"dx{int(name[2:]) + 1}"
        is_ready = int(name[2:]) == len(layers) or above in begun
        if name not in begun and is_ready:
            yield from _orders(layers, (*begun, name))
