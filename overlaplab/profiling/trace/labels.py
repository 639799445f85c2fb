"""Where in a step the CPU was at a given time: step, label, phase, operator."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from overlaplab.profiling.trace.names import (
    LAUNCH_RANGE,
    NOT_OPERATORS,
    RUN_RANGE,
    WAIT_RANGE,
    is_loading,
)
from overlaplab.profiling.trace.rows import integer
from overlaplab.profiling.trace.tables import Ranges, Tables
from overlaplab.timeline.span import PROFILER_STEP, step_number

_ENGINE = "autograd::engine::"
_OPTIMIZER = "Optimizer."
# Where something changes on a thread, and what holds before, between and after.
_Periods = tuple[list[int], list[Mapping[str, Any] | None]]


class Innermost:
    """Nested ranges of one thread, flattened: which is innermost from when on.

    Attributes:
        borders: the times from which on another one is.
    """

    def __init__(self, ranges: Ranges, order: Iterable[int]) -> None:
        """Of the rows `order`, by start and the outer before the inner."""
        self.borders: list[int] = []
        self._index: list[int] = []
        self._outer: dict[int, int] = {}
        starts, ends = ranges.start, ranges.end
        open_rows: list[int] = []
        for i in order:
            start = starts[i]
            while open_rows and ends[open_rows[-1]] <= start:
                self._close(ends[open_rows.pop()], open_rows)
            if open_rows:
                self._outer[i] = open_rows[-1]
            open_rows.append(i)
            self.borders.append(start)
            self._index.append(i)
        while open_rows:
            self._close(ends[open_rows.pop()], open_rows)

    def at(self, at_ns: int) -> int:
        """The row around `at_ns`, -1 if there is none."""
        position = bisect_right(self.borders, at_ns) - 1
        return self._index[position] if position >= 0 else -1

    def chain(self, at_ns: int) -> list[int]:
        """The rows around `at_ns`, the outermost first."""
        row, chain = self.at(at_ns), []
        while row >= 0:
            chain.append(row)
            row = self._outer.get(row, -1)
        return chain[::-1]

    def _close(self, end: int, open_rows: Sequence[int]) -> None:
        # A range that overlaps its outer one without lying in it ends late.
        if self.borders and end < self.borders[-1]:
            return
        self.borders.append(end)
        self._index.append(open_rows[-1] if open_rows else -1)


class Labels:
    """The ranges of one file.

    Attributes:
        window: (start, end) of the run that marked itself, else None.
        has_steps: whether the profiler marked steps, or a run of ours did.
        repeated: numbers of steps that one thread began twice -> how often.
        is_own: whether the run that was profiled marked itself.
    """

    def __init__(self, tables: Tables) -> None:
        self.window: tuple[int, int] | None = None
        self.is_own = False
        self._operators = tables.operators
        self._annotations = annotations = tables.annotations
        steps, labels, calls = [], defaultdict(list), defaultdict(list)
        self._number_of: dict[int, int] = {}
        own_steps: list[tuple[int, int]] = []  # of our run: (row, number)
        begun: Counter[tuple[Hashable, int]] = Counter()
        main_threads: set[Hashable] = set()
        for i in annotations.in_order():
            name, thread = annotations.name[i], annotations.thread[i]
            if name == RUN_RANGE:
                self.window = annotations.start[i], annotations.end[i]
                self.is_own = True
            elif name.startswith((LAUNCH_RANGE, WAIT_RANGE)):
                self.is_own = True
            elif name.startswith(PROFILER_STEP):
                number = step_number(name)
                if number is not None:
                    begun[thread, number] += 1
                    self._number_of[i] = number
                    steps.append(i)
                    main_threads.add(thread)
            elif name.startswith("nccl:"):
                calls[thread].append(i)
            elif not name.startswith(NOT_OPERATORS):
                labels[thread].append(i)
                last, number_before = own_steps[-1] if own_steps else (-1, 0)
                number_here = step_number(name, number_before)
                nested = last >= 0 and annotations.start[i] < annotations.end[last]
                if number_here is not None and not nested:
                    own_steps.append((i, number_here))
        if self.is_own and not steps:
            self._number_of = dict(own_steps)
            steps = [row for row, _ in own_steps]
            main_threads = {annotations.thread[row] for row in steps}
        self.has_steps = bool(steps)
        self.repeated = {step: num for (_, step), num in begun.items() if num > 1}
        self._steps = Innermost(annotations, steps)
        self._labels = {t: Innermost(annotations, of) for t, of in labels.items()}
        self._collectives = {t: Innermost(annotations, of) for t, of in calls.items()}
        self._operators_of: dict[Hashable, Innermost] | None = None
        self._periods: dict[Hashable, _Periods] = {}
        self._find_backward(main_threads)

    def _find_backward(self, main_threads: set[Hashable]) -> None:
        operators = self._operators
        engine = defaultdict(list)
        names = {name for name in set(operators.name) if name.startswith(_ENGINE)}
        rows = [i for i, name in enumerate(operators.name) if name in names]
        rows.sort(key=lambda i: (operators.start[i], -operators.end[i]))
        for i in rows:
            engine[operators.thread[i]].append(i)
        self._backward_starts = [operators.start[i] for i in rows]
        self._backward_steps = [self.step(start) for start in self._backward_starts]
        self._engine = {t: Innermost(operators, of) for t, of in engine.items()}
        self._backward_threads = {
            thread for thread in engine if not _is_main(thread)
        } - main_threads
        self._main_thread = next(iter(main_threads)) if len(main_threads) == 1 else None

    def step(self, at_ns: int) -> int | None:
        """N of the `ProfilerStep#N`, or of our run's "step N", around `at_ns`."""
        return self._number_of.get(self._steps.at(at_ns))

    def ranges(self, thread: Hashable, at_ns: int) -> list[str]:
        """Ranges around, the outermost first: those of the thread; of a backward thread
        that has none, those in which the main thread waits for it."""
        of_thread = self._labels_around(thread, at_ns)
        chain = of_thread.chain(at_ns) if of_thread else []
        return [self._annotations.name[row] for row in chain]

    def label(self, thread: Hashable, at_ns: int) -> str:
        """The innermost of `ranges`, "" if there is none."""
        of_thread = self._labels_around(thread, at_ns)
        found = of_thread.at(at_ns) if of_thread else -1
        return self._annotations.name[found] if found >= 0 else ""

    def _labels_around(self, thread: Hashable, at_ns: int) -> Innermost | None:
        of_thread = self._labels.get(thread)
        if thread in self._backward_threads and (
            of_thread is None or of_thread.at(at_ns) < 0
        ):
            return self._labels.get(self._main_thread)
        return of_thread

    def attributes(self, thread: Hashable, at_ns: int) -> Mapping[str, Any]:
        """ "label", "step", "phase" of what the CPU did then, those that are known, and
        "thread". Times between two borders share one mapping."""
        periods = self._periods.get(thread)
        if periods is None:
            periods = self._periods[thread] = self._periods_of(thread)
        borders, known = periods
        i = bisect_right(borders, at_ns)
        found = known[i]
        if found is None:
            found = known[i] = MappingProxyType(self._attributes(thread, at_ns))
        return found

    def _periods_of(self, thread: Hashable) -> _Periods:
        borders = {start + 1 for start in self._backward_starts}
        for ranges in (
            self._steps,
            self._labels.get(thread),
            self._labels.get(self._main_thread),
            self._engine.get(thread),
        ):
            if ranges:
                borders.update(ranges.borders)
        return sorted(borders), [None] * (len(borders) + 1)

    def _attributes(self, thread: Hashable, at_ns: int) -> dict[str, Any]:
        attributes: dict[str, Any] = {}
        label = self.label(thread, at_ns)
        if label:
            attributes["label"] = label
        step = self.step(at_ns)
        if step is not None:
            attributes["step"] = step
        if phase := self._phase(thread, at_ns, label, step):
            attributes["phase"] = phase
        number = thread[1] if isinstance(thread, tuple) else thread
        attributes["thread"] = number if integer(number) is not None else str(number)
        return attributes

    def _phase(self, thread: Hashable, at_ns: int, label: str, step: int | None) -> str:
        """ "backward" where autograd's engine was at work; "forward" where it was not
        and still had to begin in this step; else "" (the optimizer, say)."""
        if thread in self._backward_threads:
            return "backward"
        engine = self._engine.get(thread)
        if engine and engine.at(at_ns) >= 0:
            return "backward"
        following = bisect_left(self._backward_starts, at_ns)
        if following == len(self._backward_starts) or label.startswith(_OPTIMIZER):
            return ""
        return "forward" if self._backward_steps[following] == step else ""

    def loading(self) -> Iterator[tuple[int, int, int, str, Hashable]]:
        """Rows of the ranges in which the CPU fetches a batch."""
        annotations = self._annotations
        rows = [i for i, name in enumerate(annotations.name) if is_loading(name)]
        return annotations.rows(rows)

    def collective(self, thread: Hashable, at_ns: int) -> int:
        """The annotation "nccl:..." around, -1 if there is none."""
        of_thread = self._collectives.get(thread)
        return of_thread.at(at_ns) if of_thread else -1

    def operator(self, thread: Hashable, at_ns: int) -> int:
        """The innermost operator around, -1 if there is none."""
        if self._operators_of is None:
            by_thread: dict[Hashable, list[int]] = defaultdict(list)
            for i in self._operators.in_order():
                by_thread[self._operators.thread[i]].append(i)
            self._operators_of = {
                thread: Innermost(self._operators, of)
                for thread, of in by_thread.items()
            }
        of_thread = self._operators_of.get(thread)
        return of_thread.at(at_ns) if of_thread else -1


def _is_main(thread: Hashable) -> bool:
    return isinstance(thread, tuple) and thread[0] == thread[1]
