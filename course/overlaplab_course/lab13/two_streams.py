"""13.8: code on two streams from which the compiler's line for one edge is gone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.cluster.run import Run
from overlaplab.grading import stage
from overlaplab.techniques.compiler import (
    generate,
    merge,
    nine_operators,
    plan_merges,
    plan_schedule,
    plan_streams,
    schedule,
)
from overlaplab.techniques.compiler.runtime import load
from overlaplab_course.lab13.graphs import WIDTH
from overlaplab_course.lab13.moves import COSTS, SLOW

RACE, UNWAITED = "race", "unwaited"
# What a learner may put in, by letter.
LINES = {
    "a": "side.wait_event(ready_0)",
    "b": "side.wait_event(ready_1)",
    "c": "main.wait_event(ready_0)",
    "d": "bucket_0.wait()",
    "e": "all_reduce_dw1.wait()",
    "f": "streams.synchronize()",
}
_TAKEN = {"a": RACE, "b": RACE, "e": UNWAITED}  # after "e" the wait of "d" is over


@lru_cache(maxsize=1)
def _whole() -> tuple[str, ...]:
    """The compiler's code, line by line: dw3 and dw2 are packed, dw1 travels alone."""
    graph = nine_operators()
    merged = merge(graph, plan_merges(graph, 80_000))
    ordered = schedule(merged, plan_schedule(merged, COSTS))
    source = generate(ordered, "backward", plan_streams(ordered)).source
    lines = (line.partition("#")[0].rstrip() for line in source.splitlines())
    return tuple(line for line in lines if line)


@dataclass(frozen=True)
class Cut:
    """The code of one learner's number.

    Args:
        taken: the letter of the line that is gone.
    """

    taken: str

    @property
    def kind(self) -> str:
        """What the virtual cluster finds when it runs."""
        return _TAKEN[self.taken]

    @cached_property
    def at(self) -> int:
        """The number of the line behind which it stood."""
        return next(i for i, line in enumerate(_whole()) if LINES[self.taken] in line)

    @cached_property
    def lines(self) -> tuple[str, ...]:
        return (*_whole()[: self.at], *_whole()[self.at + 1 :])

    def mended(self, line: int, put: str) -> str:
        """The code with a line of the menu behind its `line`-th, the first being 1."""
        before = self.lines[line - 1]
        indent = before[: len(before) - len(before.lstrip())]
        indent += "    " * before.endswith(":")
        own = f"{indent}{LINES[put]}"
        return "\n".join((*self.lines[:line], own, *self.lines[line:])) + "\n"

    def play(self, source: str = "") -> Run:
        """Run `source` on two ranks, or the code as it is printed."""
        return _run(source or "\n".join(self.lines) + "\n")

    @property
    def whole(self) -> Run:
        """With the compiler's line in its place."""
        return _run("\n".join(_whole()) + "\n")

    def __str__(self) -> str:
        code = (f"{i:>2} {line}" for i, line in enumerate(self.lines, 1))
        menu = (f"{letter}: {line}" for letter, line in LINES.items())
        return "\n".join((*code, "", *menu))


def cut(number: int) -> Cut:
    """What belongs to a learner's number."""
    return Cut(random.Random(f"streams {number}").choice(sorted(_TAKEN)))


@lru_cache(maxsize=16)
def _run(source: str) -> Run:
    ran: Run = stage.run(_on_rank, source, world_size=2, hardware=SLOW, timeout_s=30)
    return ran


def _on_rank(source: str) -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(dist.get_rank())
    inputs: list[Any] = [torch.randn(WIDTH, WIDTH, generator=make) for _ in range(7)]
    inputs = [(x / 10).to(streams.device()) for x in inputs]
    streams.synchronize()
    run = load(source, "backward", {}).run
    results = run(inputs, dist.group.WORLD, streams.device(), streams.Stream())
    return [result.cpu() for result in results]
