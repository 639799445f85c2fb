"""Exercise 6.6: what each setting of DistributedDataParallel does, by running it.

torch's own DDP runs on the virtual cluster; a setting is known by its messages, its
copies and its step, not by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from overlaplab.cluster.run import run
from overlaplab.errors import RankError
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.laws import regret
from overlaplab.hardware import Link, find_hardware
from overlaplab.models import Transformer, TransformerConfig
from overlaplab.program import only_step, resolve
from overlaplab.streams import annotate
from overlaplab_course.lab06.runs import MIB

STEPS = 3  # DDP cuts its buckets anew after the first, or (static_graph) the second
LAYERS = 2
WIDTH = 128
TOKENS = 64
WISHES = ("one message", "no copies", "unused parameter", "short step")

# A small model in slow motion: the backward pass and the messages take equally long.
SLOW = replace(
    find_hardware("chalk"),
    name="chalk in slow motion",
    flops_per_s={"default": 10**11},
    memory_bytes_per_s=10**12,
    link=Link(latency_ns=250_000, bytes_per_s=3 * 10**8, source="round numbers"),
)

KNOWN = "every wish has keyword arguments that DDP takes"
ONE = "'one message': the third step sends all its gradients in one message"
NO_COPIES = "'no copies': the third step copies no gradient into a bucket"
UNUSED = "'unused parameter': a layer that gets no gradient does not stop the training"
SHORT = "'short step': at most a fifth of what there was to gain is lost"


class _Net(nn.Module):
    """The transformer, and a layer that one of two settings of the net leaves out."""

    def __init__(self, uses_all: bool) -> None:
        super().__init__()
        self.uses_all = uses_all
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.body = Transformer(
            TransformerConfig(
                num_layers=LAYERS,
                d_model=WIDTH,
                num_heads=4,
                vocab_size=64,
                max_tokens=TOKENS,
            )
        )

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.body(tokens, tokens)
        if self.uses_all:
            loss = loss + self.extra(self.extra.bias).square().mean()
        return loss


@dataclass(frozen=True, slots=True)
class DdpRun:
    """The third step of a run of DDP; it prints as one line.

    Args:
        settings: keyword arguments of DDP.
        messages: bytes of each all-reduce.
        copies: gradients copied into buckets.
        step_ns: its duration.
        error: why there was no third step, "" if there was.
    """

    settings: Mapping[str, Any]
    messages: tuple[int, ...] = ()
    copies: int = 0
    step_ns: int = 0
    error: str = ""

    def __str__(self) -> str:
        typed = ", ".join(f"{k}={v}" for k, v in self.settings.items()) or "default"
        if self.error:
            return f"{typed:<44} {self.error}"
        sizes = " ".join(f"{size / MIB:.2f}" for size in self.messages[:4])
        plural = "s" if len(self.messages) > 1 else ""
        more = " ..." if len(self.messages) > 4 else ""
        return (
            f"{typed:<44} step {self.step_ns / 1e6:5.1f} ms, {self.copies:>3} copies, "
            f"{len(self.messages):>2} message{plural} (MiB: {sizes}{more})"
        )


def try_ddp(**settings: Any) -> DdpRun:
    """Train three steps with DDP and these settings on two ranks.

    With `find_unused_parameters` one layer is left out, as the setting is for.
    """
    uses_all = not settings.get("find_unused_parameters")
    return _try_ddp(tuple(sorted(settings.items())), uses_all)


@lru_cache(maxsize=64)
def _try_ddp(items: tuple[tuple[str, Any], ...], uses_all: bool) -> DdpRun:
    settings = dict(items)
    try:
        recorded = run(_train, settings, uses_all, world_size=2, hardware=SLOW)
    except RankError as error:
        cause = error.__cause__ or error
        first = str(cause).strip().partition(". ")[0]
        return DdpRun(settings, error=f"{type(cause).__name__}: {first:.60}")
    assert recorded.program is not None
    program = only_step(recorded.program, STEPS)
    ops = program.ranks[0]
    return DdpRun(
        settings,
        messages=tuple(
            op.collective.bytes
            for op in ops
            if op.collective is not None and op.collective.operation == "all_reduce"
        ),
        copies=sum(op.name == "copy_" and op.phase == "backward" for op in ops),
        step_ns=resolve(program, SLOW).step_ns,
    )


def _train(settings: Mapping[str, Any], uses_all: bool) -> None:
    model = _Net(uses_all)
    parallel = DistributedDataParallel(model, **settings)
    for step in range(1, STEPS + 1):
        tokens = torch.randint(64, (8, TOKENS))
        model.zero_grad(set_to_none=True)
        with annotate(f"step {step}"):
            parallel(tokens).backward()


@exercise(
    "6.6",
    title="settings of DDP",
    solution="wishes",
    verifies=(KNOWN, ONE, NO_COPIES, UNUSED, SHORT),
    points=1,
    optional=True,
    timeout_s=120.0,
)
def grade_settings(sheet: Sheet, wishes: Mapping[str, Mapping[str, Any]]) -> None:
    """Run DDP with what the learner chose for each wish."""
    sheet.ran("DDP, three steps of a small transformer on 2 ranks, for each wish")
    runs = {}
    for wish in WISHES:
        settings = wishes.get(wish) if isinstance(wishes, Mapping) else None
        if not isinstance(settings, Mapping):
            sheet.expect(KNOWN, False, seen=f"no settings for {wish!r}")
            continue
        items = tuple(sorted(settings.items()))
        runs[wish] = _try_ddp(items, wish != "unused parameter")
        seen = _told(runs[wish])
        usable = not runs[wish].error or wish == "unused parameter"
        sheet.expect(KNOWN, usable, seen=f"{wish!r}: {seen}")
    sheet.stop_if_wrong()
    one, copies, unused, short = (runs[wish] for wish in WISHES)
    total = sum(p.numel() * p.element_size() for p in _Net(True).parameters())
    sheet.expect(
        ONE,
        len(one.messages) == 1 and one.messages[0] >= total,
        seen=_told(one),
        expected=f"one message of {total / MIB:.2f} MiB",
    )
    sheet.expect(NO_COPIES, copies.copies == 0, seen=_told(copies), expected="0 copies")
    sheet.expect(
        UNUSED,
        not unused.error,
        seen=_told(unused),
        expected="three steps",
        hint="DDP has to look for parameters without gradient, if you ask it to",
    )
    lost = regret(short.step_ns, best_ns(), worst_ns())
    sheet.expect(
        SHORT,
        lost <= 0.20,
        seen=f"{_told(short)}; the best size takes {best_ns() / 1e6:.1f} ms",
        expected=f"at most {(best_ns() + 0.2 * (worst_ns() - best_ns())) / 1e6:.1f} ms",
        hint="n* = sqrt(Tb / alpha), then M / n*",
    )


def _told(found: DdpRun) -> str:
    """The line without its columns."""
    return " ".join(str(found).split())


# A test holds these to a longer list of sizes.
GOOD_MB = 0.3
BAD_MB = 25


def best_ns() -> int:
    """The step with buckets of a good size."""
    return try_ddp(bucket_cap_mb=GOOD_MB).step_ns


def worst_ns() -> int:
    """The step with one message, the worse end."""
    return try_ddp(bucket_cap_mb=BAD_MB).step_ns
