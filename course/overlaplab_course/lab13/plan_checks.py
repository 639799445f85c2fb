"""The graders of lab 13's plans: buckets, 13.4, and schedules, 13.5 and 13.6."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from overlaplab.grading import Sheet, stage
from overlaplab_course.lab13 import breaking, graphs, ordering, plans
from overlaplab_course.lab13.pass_checks import LAB

ONCE, CAP, NO_CIRCLE, FULL = LAB.sentences("13.4")
TIMES, *BROKEN = LAB.sentences("13.5")
POSSIBLE, SHORTEST = LAB.sentences("13.6")


@LAB.grader("13.4")
def grade_buckets(sheet: Sheet, plan_buckets: Callable[..., Any]) -> None:
    """Laws of a plan, on five graphs with three caps each."""
    for plan in plans.PLANS:
        for cap in plans.CAPS:
            sheet.ran(f"plan_buckets on {plan!r} with cap_bytes={cap:,}")
            made = stage.job(plans.planned, plan_buckets, plan, cap)
            if not _judge_plan(sheet, plan, cap, made):
                return
    num_plans, num_caps = len(plans.PLANS), len(plans.CAPS)
    sheet.ran(f"plan_buckets on {num_plans} graphs, each with {num_caps} caps")


def _judge_plan(sheet: Sheet, plan: str, cap: int, made: list[list[str]]) -> bool:
    """Whether the buckets are those of this graph at all."""
    graph = plans.plan_graph(plan)
    needs = graphs.needs_of(graph)
    named = {node.name: node for node in graphs.launches(graph)}
    told: dict[str, Any] = {"case": f"{plan}, cap {cap:,}"}
    seen = [name for bucket in made for name in bucket]
    is_all = seen == [*named] and all(made)
    told |= {"seen": _text(made), "expected": ", ".join(named)}
    LAB.refuse(sheet, ONCE, not is_all, **told)
    if not is_all:
        return False
    before = {name: graphs.all_before(needs, node) for name, node in named.items()}
    for position, bucket in enumerate(made):
        size = sum(plans.sent_bytes(named[name]) for name in bucket)
        told |= {"bucket": ", ".join(bucket), "size": size, "cap": cap}
        LAB.refuse(sheet, CAP, len(bucket) > 1 and size > cap, **told)
        circles = [(a, b) for a in bucket for b in bucket if named[b] in before[a]]
        pair = circles[0] if circles else ("", "")
        told |= {"launch": pair[0], "need": pair[1]}
        LAB.refuse(sheet, NO_CIRCLE, bool(circles), **told)
        if position + 1 < len(made):
            following = made[position + 1][0]
            both = size + plans.sent_bytes(named[following])
            fits = both <= cap and not any(
                named[name] in before[following] for name in bucket
            )
            told |= {"launch": following, "size": both}
            LAB.refuse(sheet, FULL, fits, **told)
    return True


def _text(made: list[list[str]]) -> str:
    return " | ".join(", ".join(bucket) or "nothing" for bucket in made) or "nothing"


@LAB.grader("13.5")
def grade_broken(sheet: Sheet, found: Mapping[str, Any]) -> None:
    """Each shape is timed by the rule, and by all orders that its conditions leave.

    The first that holds is drawn, else the last.
    """
    holds = False
    sheet.ran("the three schedules, by the rule and by all orders")
    if not isinstance(found, Mapping):
        what = f"found is {found!r}"[:80]
        LAB.refuse(sheet, TIMES, True, what=what)
        return
    for table in LAB.tables("13.5")[1:]:
        name, times = table["name"], found.get(table["name"])
        wrong = breaking.problem_with(name, times)
        LAB.refuse(sheet, TIMES, bool(wrong), what=wrong)
        if wrong:
            continue
        mine = breaking.shape(name, **dict(times or {}))
        loses = mine.loses_percent + 1e-9 >= table["most"]
        if not holds:
            sheet.show(mine.timelines[f"{name}: launch early, wait late"], title=name)
        holds = holds or not loses
        LAB.refuse(sheet, table["says"], not loses, said=str(mine))


@LAB.grader("13.6")
def grade_order(sheet: Sheet, order: Callable[..., Any]) -> None:
    """Twelve backward passes, beside the best of all orders."""
    for layers in sorted(ordering.CASES, key=lambda one: one == ordering.NINE):
        sheet.ran(f"order({list(layers)})")
        mine = stage.job(ordering.answered, order, layers)
        told: dict[str, Any] = {"layers": list(layers)}
        try:
            took, what = ordering.end_ms(layers, mine), ""
        except ValueError as error:
            took, what = 0, str(error)
        LAB.refuse(sheet, POSSIBLE, bool(what), what=what, **told)
        if what:
            continue
        best = ordering.best_ms(layers)
        told |= {"mine": ", ".join(mine), "took": took, "best": best}
        sheet.show(
            ordering.drawn(layers, mine),
            step_ns=took * breaking.MS,
            target_ns=best * breaking.MS,
        )
        LAB.refuse(sheet, SHORTEST, took > best, **told)
        sheet.stop_if_wrong()
