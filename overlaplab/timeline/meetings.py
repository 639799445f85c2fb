"""Which spans of all ranks are the same collective, where the spans do not say it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from overlaplab.timeline.span import Span


def find_meetings(
    spans: Sequence[Span], of: Iterable[int], key: Callable[[int], Hashable]
) -> Iterator[tuple[int, ...]]:
    """Indices of one collective, one for each rank: the n-th of its key, by start.

    Where ranks have not equally many of a key, who meets whom is unknown, and spans of
    two names do not meet. A rank alone meets itself. `of`: those that communicate.
    """
    queues: dict[Hashable, dict[int, list[int]]] = defaultdict(dict)
    for i in sorted(of, key=lambda i: (spans[i].start_ns, spans[i].end_ns)):
        queues[key(i)].setdefault(spans[i].rank, []).append(i)
    for of_rank in queues.values():
        if len({len(queue) for queue in of_rank.values()}) == 1:
            for together in zip(*of_rank.values(), strict=True):
                if len({spans[i].name for i in together}) == 1:
                    yield together
