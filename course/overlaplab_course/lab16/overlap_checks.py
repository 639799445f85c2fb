"""The grader of lab 16's step beside messages, 16.7: what the resolver says."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Sequence
from typing import Any

from overlaplab.grading import Sheet
from overlaplab.grading.answered import as_number
from overlaplab_course.lab16 import chains
from overlaplab_course.lab16.chain_checks import LAB
from overlaplab_course.lab16.chains import Block
from overlaplab_course.lab16.overlap import step

ALONE, BESIDE, LINE = LAB.sentences("16.7")
StepMs = Callable[[Sequence[Block], Sequence[int], Collection[int]], Any]


def _random(seed: int) -> tuple[tuple[Block, ...], tuple[int, ...], set[int]]:
    draw = random.Random(seed)
    count = draw.randint(2, 9)
    blocks = chains.random_chain(count, seed)
    messages = tuple(draw.randint(0, 30) for _ in range(count))
    return blocks, messages, set(draw.sample(range(count), draw.randint(0, count)))


_TWO = (Block(1, 1, 1, 5), Block(1, 1, 1, 3))
CASES: dict[str, tuple[tuple[Sequence[Block], Sequence[int], set[int]], ...]] = {
    ALONE: ((_TWO, (0, 0), set()), (_TWO, (0, 0), {0, 1})),
    BESIDE: ((_TWO, (4, 2), {0}), (_TWO, (4, 9), {1}), (_TWO, (1, 12), {0})),
    LINE: ((_TWO, (7, 40), {0}), *(_random(seed) for seed in range(12))),
}


@LAB.grader("16.7")
def grade_step_ms(sheet: Sheet, step_ms: StepMs) -> None:
    """Each answer beside the resolver's step of the same program."""
    for sentence, cases in CASES.items():
        for blocks, messages, again in cases:
            name = (
                f"blocks of {[b.ms for b in blocks]} ms, messages of {list(messages)}"
            )
            sheet.ran(f"step_ms() of {name} ms, again {sorted(again)}")
            timeline = step(blocks, messages, again)
            said = as_number(
                answer := step_ms(list(blocks), list(messages), set(again))
            )
            right = timeline.step_ns / 1e6
            wrong = said is None or not math.isclose(said, right, abs_tol=1e-3)
            told: dict[str, Any] = {"name": name, "again": sorted(again)}
            told |= {"said": f"{answer!r:.40}", "right": right}
            LAB.refuse(sheet, sentence, wrong, **told)
            sheet.show(timeline, title=f"the step, again {sorted(again)}")
            if wrong:
                break
        sheet.stop_if_wrong()
