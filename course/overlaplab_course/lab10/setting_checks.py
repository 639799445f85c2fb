"""The grader of lab 10's extra on settings, 10.7: what they do is run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlaplab.errors import OverlaplabError
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.forms import as_number, need_dict
from overlaplab_course.lab10 import extras
from overlaplab_course.lab10.extras import NUM_LAYERS, WIDTH, Tried, deepspeed_ahead
from overlaplab_course.lab10.step_checks import LAB

USABLE, ONCE, NOTHING, AHEAD = LAB.sentences("10.7")
_TENSORS = [WIDTH * WIDTH, WIDTH] * NUM_LAYERS


@LAB.grader("10.7")
def grade_settings(sheet: Sheet, wishes: Mapping[str, Any]) -> None:
    """FSDP2 with what the learner chose; DeepSpeed's rule with their number."""
    need_dict(wishes, "wishes")
    sheet.ran("FSDP2, two steps of six layers on 2 ranks, for each wish")
    once = _try(sheet, wishes, "gathered once")
    idle = _try(sheet, wishes, "nothing to prefetch")
    bucket = as_number(wishes.get("two layers ahead"))
    seen = f"'two layers ahead' is {wishes.get('two layers ahead')!r:.60}"
    sheet.expect(USABLE, bucket is not None, seen=seen, expected="a number of elements")
    if once is not None:
        wrong = once.forward + once.backward != NUM_LAYERS
        LAB.refuse(sheet, ONCE, wrong, line=once, layers=NUM_LAYERS)
    if idle is not None:
        asked = wishes["nothing to prefetch"].get("backward", 0) > 0
        LAB.refuse(sheet, NOTHING, not asked or idle.backward > 0, line=idle)
    if bucket is not None:
        tensors = deepspeed_ahead(bucket, _TENSORS)
        facts = {"bucket": f"{bucket:g}", "tensors": str(tensors)}
        LAB.refuse(sheet, AHEAD, tensors != 4, **facts)


def _try(sheet: Sheet, wishes: Mapping[str, Any], wish: str) -> Tried | None:
    """The run with the settings of a wish; None, and a reason, where there is none."""
    settings = wishes.get(wish)
    if not isinstance(settings, Mapping):
        seen = f"{wish!r} is {settings!r:.60}"
        sheet.expect(USABLE, False, seen=seen, expected="a dict of settings")
        return None
    try:
        return extras.try_fsdp2(**settings)
    except (TypeError, ValueError, OverlaplabError) as error:
        cause = error.__cause__ or error
        seen = f"{wish!r}: {type(cause).__name__}: {cause!s:.100}"
        expected = "arguments of lab.try_fsdp2"
        sheet.expect(USABLE, False, seen=seen, expected=expected)
        return None
