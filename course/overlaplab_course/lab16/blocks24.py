"""The 24 blocks as a table for 16.3, and runs of plans beside what was predicted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from overlaplab import streams
from overlaplab.cluster.run import Run
from overlaplab.techniques.memory import BudgetError, Costs, measure_costs
from overlaplab.timeline import Memory, Timeline
from overlaplab_course import stored
from overlaplab_course.gpts import make_gpt
from overlaplab_course.lab16 import gpt, policies, trained
from overlaplab_course.lab16.chains import Block
from overlaplab_course.lab16.trained import NARROW, Model, Trained

MIB = 2**20
GPT24 = Model(24)


@lru_cache(maxsize=32)
def _run(again: frozenset[int]) -> Run:
    return trained.train(trained.again(sorted(again)), GPT24)


def train_24(again: Collection[int]) -> Trained:
    """One step of 24 blocks, of which these compute again."""
    return trained.seen(_run(frozenset(again)))


def timeline_of(run: Trained) -> Timeline:
    """To draw its memory."""
    memory = Memory(0, run.curve)
    return Timeline((), memory=(memory,))


@lru_cache(maxsize=1)
def costs() -> Costs:
    """One block is measured for all 24, and the rest once: nothing is trained."""
    return measure_costs(GPT24.make(), GPT24.sample(), hardware=NARROW)


def blocks_of_24() -> tuple[list[Block], int]:
    """The 24 blocks in bytes and ns, and the bytes that are always there."""
    chain = costs().chain
    found, inputs = [], 0
    for number, block in enumerate(chain.blocks):
        keep, again = (block.options[block.option(p)] for p in ("keep", "recompute"))
        own = block.forward_bytes - inputs
        inputs += own
        most = max(chain.need_bytes(number, option) for option in (keep, again))
        work = most - chain.resident_bytes - inputs - keep.kept_bytes
        extra_ns = again.step_ns - keep.step_ns
        found.append(Block(own, keep.kept_bytes, max(work, 0), extra_ns))
    return found, chain.resident_bytes


def budgets_table(fastest: Callable[..., Any], budgets_mib: Sequence[int]) -> str:
    """Of each budget: the choice, predicted and seen; and the planner's, of a menu."""
    blocks, always = blocks_of_24()
    plain_ns = _run(frozenset()).timeline.step_ns
    head = ("budget, MiB", "computed again", "peak, MiB", "step", "planner's step")
    rows: list[tuple[object, ...]] = []
    for mib in budgets_mib:
        chosen = fastest(list(blocks), mib * MIB - always)
        row: tuple[object, ...] = (mib, "nothing fits", "", "")
        if chosen is not None:
            timeline = _run(frozenset(chosen)).timeline
            extra = 100 * (timeline.step_ns / plain_ns - 1)
            peak = timeline.memory[0].peak_bytes / MIB
            row = (mib, f"{len(chosen)} blocks", f"{peak:.1f}", f"+{extra:.1f} %")
        rows.append((*row, _planned(mib * MIB)))
    return stored.text_table(head, rows)


def _planned(budget: int) -> str:
    try:
        plan = costs().fastest(budget)
    except BudgetError:
        return "nothing fits"
    return f"+{100 * (plan.step_ns / costs().none().step_ns - 1):.1f} %"


# -- section 5

_SHOWN = {
    "native_layer_norm": "norm",
    "addmm": "matmul",
    "gelu": "GELU",
    "add": "addition",
}


def _forward(width: int) -> None:
    model, tokens = make_gpt(1, width=width), torch.randint(256, (1, 1024))
    with streams.annotate("forward"):
        model(tokens, targets=tokens)


def _operators(width: int) -> Iterator[tuple[str, float, float]]:
    """(name, MiB of the result, us) of the operators of one block, in order."""
    recorded = gpt.record(_forward, width)
    inner = 1024 * width * 2 / MIB
    sizes = [inner, 3 * inner, inner, inner, inner, inner, 4 * inner, 4 * inner, inner]
    kernels = [s for s in recorded.timeline.spans if s.kind == "compute"]
    spans = [s for s in kernels if s.attributes.get("label") == "forward"][2:11]
    for span, mib in zip(spans, sizes, strict=True):
        name = "attention" if "attention" in span.name else _SHOWN[span.name]
        yield name, mib, span.duration_ns / 1e3


def operators_table(widths: Sequence[int] = (1024, 8192)) -> str:
    """What the operators of a block leave and take, for two widths."""
    columns = [list(_operators(width)) for width in widths]
    rows = [
        (
            operators[0][0],
            *(
                cell
                for _, mib, us in operators
                for cell in (f"{mib:.0f}", f"{us:.0f}", f"{us / mib:.1f}")
            ),
        )
        for operators in zip(*columns, strict=True)
    ]
    words = [(f"MiB at {w}", "us", "us per MiB") for w in widths]
    head = ("operator", *(word for group in words for word in group))
    return stored.text_table(head, rows)


def policies_table(policy: Callable[..., Any]) -> str:
    """Two wide blocks under four policies: the peak, and what is computed again."""
    name = next(iter(policies.CASES))
    plain = policies.runs(name, "plain")
    mine = trained.train(trained.selective(policy), policies.CASES[name], trained.WIDE)
    ways = {
        "no checkpoint": plain,
        "all computed again": policies.runs(name, "again"),
        "your policy": mine,
        "a policy that keeps all": policies.runs(name, "all"),
    }
    rows = [
        (
            way,
            f"{run.timeline.memory[0].peak_bytes / MIB:.2f}",
            f"+{100 * (run.timeline.step_ns / plain.timeline.step_ns - 1):.1f} %",
        )
        for way, run in ways.items()
    ]
    return stored.text_table(("two wide blocks", "peak, MiB", "step"), rows)
