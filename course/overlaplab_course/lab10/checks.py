"""Graders of lab 10: of shards (10.1) and of the depth (10.4); others have files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab.grading import Violation, laws, origins, program_laws
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.forms import Examined, as_number
from overlaplab.grading.laws import regret_law
from overlaplab.grading.stage import run
from overlaplab.torch_versions import all_gather_single
from overlaplab_course.lab10 import (  # (register)
    given,
    repair_checks,  # noqa: F401
    setting_checks,  # noqa: F401
)
from overlaplab_course.lab10.depths import DepthCase
from overlaplab_course.lab10.given import BOARD, Shapes
from overlaplab_course.lab10.step_checks import LAB

# -- 10.1

PART, SIZE, ALONE, WHOLE, VIEWS = LAB.sentences("10.1")
# Odd sizes, a scalar, a weight without elements, one that spans several shards; and one
# alone that divides by 1, 2 and 4.
LISTS: Sequence[tuple[Shapes, torch.dtype]] = (
    (((31, 7), (7,), (), (0, 7), (3, 5, 2)), torch.float32),
    (((40, 30),), torch.float64),
)
Shard = Callable[[Sequence[Tensor]], Tensor]
Unshard = Callable[[Tensor, Shapes], Sequence[Tensor]]


@LAB.grader("10.1")
def grade_shards(sheet: Sheet, shard: Shard, unshard: Unshard) -> None:
    """Values and memory on 1 to 4 ranks; unshard gets the course's shards, gathered."""
    for shapes, dtype in LISTS:
        for n in (2, 3, 4, 1):
            sheet.ran(f"your functions on weights of shapes {list(shapes)}, {n} ranks")
            _judge_shards(sheet, shard, unshard, shapes, dtype, n)
            sheet.stop_if_wrong()


def _judge_shards(
    sheet: Sheet, shard: Shard, unshard: Unshard, shapes: Shapes, dtype: Any, n: int
) -> None:
    draw = torch.Generator().manual_seed(n)
    weights = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
    parts = given.split(weights, n)
    call = (weights, parts, shapes, shard, unshard)
    seen = Examined(origins.release(run(_on_rank, *call, world_size=n, hardware=BOARD)))
    total, wanted = sum(w.numel() for w in weights), parts[0].numel()
    wrong: list[Violation] = []
    for rank, (mine, held, views, is_view) in enumerate(seen.values):
        where: dict[str, Any] = {"rank": rank, "n": n}
        numel = _numel(mine)
        sizes: dict[str, Any] = {"seen": numel, "wanted": wanted, "total": total}
        LAB.refuse(sheet, SIZE, numel != wanted, **where, **sizes)
        if numel == wanted:
            right = {"the shard": parts[rank]}
            wrong += laws.values_law([{"the shard": mine}], right, what="the value")
            own = mine.numel() * mine.itemsize
            LAB.refuse(sheet, ALONE, held > own, **where, own=own, held=held)
        every = {f"weight {i}": w for i, w in enumerate(weights)}
        found = {f"weight {i}": v for i, v in enumerate(views)}
        sheet.verify(WHOLE, laws.values_law([found], every, what="the value"))
        copied = [i for i, same in enumerate(is_view) if not same]
        number = copied[0] if copied else 0
        shape = tuple(shapes[number]) if number < len(shapes) else ()
        LAB.refuse(sheet, VIEWS, bool(copied), number=number, shape=shape)
    what = "a shard or a weight"
    whole = all(_numel(mine) == wanted for mine, *_ in seen.values)
    if whole or wrong or laws.origin_law(seen.program, what=what):
        # Of another size its values were not looked at.
        program_laws.hold(sheet, seen.run, wrong=wrong, what=what)


def _numel(mine: object) -> int | None:
    return mine.numel() if isinstance(mine, Tensor) else None


def _on_rank(
    weights: list[Tensor],
    parts: list[Tensor],
    shapes: Shapes,
    shard: Shard,
    unshard: Unshard,
) -> origins.Held:
    """(shard, bytes of its memory, weights, whether each is a view of the slot)."""
    ours = parts[dist.get_rank()]
    notes = origins.given([weights, ours])
    mine = shard(weights)
    held = mine.untyped_storage().nbytes() if isinstance(mine, Tensor) else 0
    # As in a ring: with room for a larger layer.
    slot = ours.new_zeros(ours.numel() * dist.get_world_size() + 5)
    all_gather_single(slot[:-5], ours)
    views = list(unshard(slot, shapes))
    place = slot.untyped_storage().data_ptr()
    is_view = [not v.numel() or v.untyped_storage().data_ptr() == place for v in views]
    value = (mine, held, views, is_view)
    return origins.Held(value, (*notes, *origins.returned([mine, views])))


# -- 10.4

USABLE, FITS, REGRET, LEAST = LAB.sentences("10.4")
AT_MOST = 0.20


@lru_cache(maxsize=1)
def depth_cases() -> tuple[DepthCase, ...]:
    """Models and links on which each constant fails."""
    return tuple(map(DepthCase.of, LAB.cases("10.4", "models")[REGRET]))


@LAB.grader("10.4")
def grade_depth(sheet: Sheet, choose_depth: Callable[..., Any]) -> None:
    """By what the answer loses, in time and in memory."""
    sheet.ran(f"choose_depth on {len(depth_cases())} models and links")
    lost: dict[str, float] = {}
    for case in depth_cases():
        lists = list(case.gather_ms), list(case.compute_ms)
        answer = choose_depth(*lists, case.layer_mib, case.memory_mib)
        number = as_number(answer)
        whole = number is not None and number >= 0 and number == math.floor(number)
        LAB.refuse(sheet, USABLE, not whole, name=case.name, answer=answer)
        if not whole:
            return
        depth = int(number or 0)
        lost |= _judge_depth(sheet, case, depth)
    sheet.verify(REGRET, regret_law(lost, at_most=AT_MOST))


def _judge_depth(sheet: Sheet, case: DepthCase, depth: int) -> dict[str, float]:
    """Its memory is judged here; what it loses in time is returned, by description."""
    where: dict[str, Any] = {"name": case.name, "depth": depth}
    took, memory = (depth + 1) * case.layer_mib, case.memory_mib
    fits = depth <= case.most
    sizes: dict[str, Any] = {"took": took, "memory": memory, "most": case.most}
    LAB.refuse(sheet, FITS, not fits, **where, **sizes)
    step, best = case.step_ms(depth), case.best_ms
    less = case.least if case.least < depth else max(depth - 1, 0)
    facts: dict[str, Any] = {"step": step, "less": less, "less_ms": case.step_ms(less)}
    facts |= {"least": case.least, "best": best}
    wasted = fits and case.saves_nothing(depth)
    LAB.refuse(sheet, LEAST, wasted, **where, **facts)
    took_ms = f"depth {depth} takes {step:.1f} ms, the best that fits {best:.1f}"
    return {f"{case.name}: {took_ms}": case.regret(depth) if fits else 0.0}
