"""What a run of the learner's code left, and how results and steps are judged.

seen = Examined.of(hold_step, sum_all, world_size=4, hardware=BOARD)
seen.draw_on(sheet, best_ns)
program_laws.hold(sheet, seen.run, wrong=wrong_sums(seen.values))
sheet.stop_if_wrong()
judge_step(sheet, SHORT, seen, best_ns)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from overlaplab.cluster.run import Run
from overlaplab.grading import laws, origins, stage
from overlaplab.grading.exercise import Sheet
from overlaplab.program import Finding, Program
from overlaplab.timeline import Timeline


@dataclass(frozen=True)
class Examined:
    """A run on the virtual cluster, as graders and figures look at it.

    A lab that shows more of its runs (names on the spans, exposed copies) derives from
    it.

    Args:
        run: what the virtual cluster recorded.
    """

    run: Run

    @property
    def values(self) -> tuple[Any, ...]:
        """What is graded of each rank."""
        return self.run.values

    @property
    def program(self) -> Program:
        """The record."""
        assert self.run.program is not None, "the virtual cluster records"
        return self.run.program

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Races and the like, in the order of ranks."""
        return self.run.warnings

    @property
    def timeline(self) -> Timeline:
        """Rank 0's."""
        return self.run.timeline.of_rank(0)

    @property
    def step_ns(self) -> int:
        """The slowest rank's step."""
        return self.run.timeline.step_ns

    @classmethod
    def of(cls, on_rank: Callable[..., Any], *args: Any, **options: Any) -> Self:
        """Run `on_rank(*args)`, which returns `origins.Held`, on every rank.

        Args:
            options: of `overlaplab.run`: world_size, hardware, timeout_s.
        """
        return cls(origins.release(stage.run(on_rank, *args, **options)))

    def draw_on(self, sheet: Sheet, best_ns: int, title: str = "your run") -> None:
        """Keep the timeline for the verdict, the step beside `best_ns`."""
        sheet.show(self.timeline, step_ns=self.step_ns, target_ns=best_ns, title=title)


def judge_step(
    sheet: Sheet, sentence: str, seen: Examined, best_ns: int, *, hint: str = ""
) -> None:
    """The step is at most 2 % longer than the reference's."""
    slow = laws.step_law(seen.step_ns, best_ns, factor=1.02)
    sheet.verify(sentence, slow, hint=hint)


def need_dict(said: object, name: str) -> Mapping[str, Any]:
    """`said`, if it is a dict.

    Raises:
        TypeError: it is something else; `name` is what the learner calls it.
    """
    if not isinstance(said, Mapping):
        raise TypeError(f"{name} is {type(said).__name__}; expected a dict")
    return said
