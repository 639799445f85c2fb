"""The grader of lab 13's repair, 13.7: one order on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlaplab.grading import Sheet, laws
from overlaplab.grading.forms import need_dict
from overlaplab_course.lab13.apart import NAMES, PlanLaunches, Twins, twins
from overlaplab_course.lab13.pass_checks import LAB

DIAGNOSIS, ONE_ORDER, SLOWEST = LAB.sentences("13.7")
KINDS = LAB.cases("13.7", "kinds")[DIAGNOSIS]


def _several(*rows: tuple[float, float, float]) -> Twins:
    """Ranks whose dictionaries are ordered otherwise, each by one name further."""
    times = []
    for rank, row in enumerate(rows):
        named = dict(zip(NAMES, row, strict=True))
        first = rank % len(NAMES)
        times.append({n: named[n] for n in (*NAMES[first:], *NAMES[:first])})
    return Twins(tuple(times))


# No mean, median or least time, and no rank's own, gives the order of the slowest.
OTHERS = (
    _several((4, 8, 12), (13, 5, 6), (4, 9, 7)),
    _several((6, 8, 9), (6, 8, 10), (7, 11, 9), (20, 8, 10)),
)


@LAB.grader("13.7")
def grade_twins(
    sheet: Sheet,
    number: int,
    diagnosis: Mapping[str, object],
    plan_launches: PlanLaunches,
) -> None:
    """The diagnosis, then the repaired plan on 2, 3 and 4 ranks."""
    case = twins(number)
    first, second = case.apart
    truth = {"kind": "mixed", "rank_0": first, "rank_1": second}
    need_dict(diagnosis, "the diagnosis")
    found = laws.diagnosis_law(diagnosis, truth, kinds=KINDS)
    missed = (k for k in truth if laws.diagnosis_law(diagnosis, {k: truth[k]}))
    hint = LAB.hint(DIAGNOSIS, next(missed, ""))
    sheet.verify(DIAGNOSIS, found, hint=hint, settled=True)
    for one in (case, *OTHERS):
        sheet.ran(f"plan_launches on {len(one.times)} ranks:\n{one}")
        with sheet.meeting(ONE_ORDER, hint=LAB.hint(ONE_ORDER, "stuck")):
            played = one.play(plan_launches)
        told: dict[str, Any] = {
            "orders": "; ".join(", ".join(order) for order in played.orders),
            "right": ", ".join(one.right),
        }
        differ = len({tuple(order) for order in played.orders}) > 1
        LAB.refuse(sheet, ONE_ORDER, differ or bool(played.wrong()), **told)
        if differ:
            return
        LAB.refuse(sheet, SLOWEST, list(played.orders[0]) != one.right, **told)
