"""The events of a Kineto trace, in nanoseconds, and the ranges that label them.

Knows the format of the file, and nothing of what its events mean for a timeline.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Ranges by which a measured run marks itself in its trace.
RUN_RANGE = "overlaplab::run"
WAIT_RANGE = "overlaplab::wait "
LAUNCH_RANGE = "overlaplab::launch "

# Events of the CPU that are no operators, and ranges that are no labels.
NOT_OPERATORS = (
    "autograd::",
    "torch::autograd::",
    "c10d::",
    "_c10d_functional::",
    "gloo:",
    "nccl:",
    "profiler::",
    "overlaplab::",
)


@dataclass(slots=True)
class Event:
    """One complete event of the trace, in nanoseconds."""

    category: str
    name: str
    thread: Any
    start_ns: int
    end_ns: int
    args: Mapping[str, Any]


class Events:
    """The complete events by category, and the ranges that label them."""

    def __init__(self, trace: Mapping[str, Any]) -> None:
        base_ns = int(trace.get("baseTimeNanoseconds") or 0)
        self._by_category: dict[str, list[Event]] = defaultdict(list)
        for raw in trace["traceEvents"]:
            if raw.get("ph") != "X" or raw.get("cat") is None:
                continue
            start_ns = base_ns + round(raw["ts"] * 1000)
            event = Event(
                raw["cat"],
                raw["name"],
                raw.get("tid"),
                start_ns,
                start_ns + round(raw.get("dur", 0) * 1000),
                raw.get("args", {}),
            )
            self._by_category[event.category].append(event)
        for of_category in self._by_category.values():
            # The outer of two events that start together comes first.
            of_category.sort(key=lambda e: (e.start_ns, -e.end_ns))
        self._label_ranges()

    def of(self, *categories: str) -> list[Event]:
        return [e for c in categories for e in self._by_category.get(c, ())]

    def label(self, thread: Any, at_ns: int) -> str:
        """The innermost range of `thread` around `at_ns`, "" if there is none."""
        ranges = self._labels.get(thread)
        return ranges.innermost(at_ns) if ranges else ""

    def step(self, at_ns: int) -> int | None:
        """N of the `ProfilerStep#N` around `at_ns`."""
        name = self._steps.innermost(at_ns)
        return int(name) if name else None

    def _label_ranges(self) -> None:
        self.window: tuple[int, int] | None = None
        labels: dict[Any, list[Event]] = defaultdict(list)
        steps: list[Event] = []
        for event in self.of("user_annotation"):
            if event.name == RUN_RANGE:
                self.window = event.start_ns, event.end_ns
            elif event.name.startswith("ProfilerStep#"):
                event.name = event.name.partition("#")[2]
                steps.append(event)
            elif not event.name.startswith(NOT_OPERATORS):
                labels[event.thread].append(event)
        self._labels = {thread: Ranges(of) for thread, of in labels.items()}
        self._steps = Ranges(steps)


class Ranges:
    """Nested ranges of one thread, flattened: which is innermost from when on."""

    def __init__(self, ranges: Sequence[Event]) -> None:
        self._from_ns: list[int] = []
        self._names: list[str] = []
        open_ranges: list[Event] = []
        for event in ranges:  # ordered by start, the outer first
            self._close(open_ranges, event.start_ns)
            open_ranges.append(event)
            self._mark(event.start_ns, event.name)
        self._close(open_ranges, None)

    def innermost(self, at_ns: int) -> str:
        index = bisect_right(self._from_ns, at_ns) - 1
        return self._names[index] if index >= 0 else ""

    def _close(self, open_ranges: list[Event], until_ns: int | None) -> None:
        while open_ranges and (until_ns is None or open_ranges[-1].end_ns <= until_ns):
            ended = open_ranges.pop()
            self._mark(ended.end_ns, open_ranges[-1].name if open_ranges else "")

    def _mark(self, from_ns: int, name: str) -> None:
        self._from_ns.append(from_ns)
        self._names.append(name)
