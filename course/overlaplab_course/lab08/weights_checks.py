"""The grader of lab 08's repair, 8.4."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from overlaplab.grading import Violation
from overlaplab.grading.forms import Examined, Repair
from overlaplab_course.lab03.jobs import EAGER, SET_UP, WIDTH
from overlaplab_course.lab08 import reference
from overlaplab_course.lab08.alternating import TwoSets, two_sets
from overlaplab_course.lab08.feed_checks import LAB

DIAGNOSIS, SAFE, ONE_MODEL, FREE_CPU, KEPT = LAB.sentences("8.4")


def _truth(number: int) -> Mapping[str, object]:
    case = two_sets(number)
    return {
        "kind": "drift",
        "gradients": case.num_gradients,
        "first_missing": case.first_missing,
    }


def _cases(number: int) -> tuple[TwoSets, TwoSets]:
    own = two_sets(number)
    return own, TwoSets(own.num_batches - 1, num_ranks=2, rows=4 * WIDTH)


def _wrong(case: TwoSets, seen: Examined, right: Examined) -> list[Violation]:
    expected = "front minus the new gradient, step after step"
    return [
        Violation(
            "values",
            f"the weights that rank {rank} returns are not those of one model",
            expected,
            rank=rank,
        )
        for rank, (mine, ours) in enumerate(zip(seen.values, right.values, strict=True))
        if not isinstance(mine, torch.Tensor)
        or mine.shape != ours.shape
        or not torch.allclose(mine, ours, rtol=1e-4, atol=1e-5)
    ]


REPAIR = Repair(
    diagnosis=DIAGNOSIS,
    kept=KEPT,
    truth=_truth,
    cases=_cases,
    play=TwoSets.play,
    clock=EAGER,
    reference=reference.train_two,
    wrong=_wrong,
    ran="your training on the batches of number {number}, 3 ranks",
    but=(SET_UP,),
    hints={"cpu": "work.wait() makes a stream wait, synchronize makes the CPU wait"},
    where=LAB.cases("8.4", "where")[DIAGNOSIS],
    kinds=LAB.cases("8.4", "kinds")[DIAGNOSIS],
    what="the weights",
    title="your repair",
)
LAB.grader("8.4")(REPAIR.grade)
