"""Exercise 3.4: batches go to the device from pinned memory, beside the compute.

Two training loops: in one every step reads its loss, so that the CPU waits; in the
other the CPU runs far ahead. What the one forgives, the other does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.cluster.run import Run, run
from overlaplab.grading import laws, origins
from overlaplab.grading.exercise import Sheet, exercise
from overlaplab.grading.violation import Violation
from overlaplab.program import Op
from overlaplab.timeline import Timeline
from overlaplab.timeline.intervals import merge, subtract, total
from overlaplab_course.lab03 import reference
from overlaplab_course.lab03.play import NUM_RANKS, SLOW, WIDTH, by_label, compute
from overlaplab_course.lab03.waiting import crowded

VALUES = "every step gets its own batch, in order, on every rank"
SAFE = "no stream, nor the CPU, touches bytes that another may still use"
LEAN = "Python holds at most three batches at a time"
SHORT = "the steps are as short as the reference's: only the first copy is exposed"

Step = Callable[[torch.Tensor], object]
Feed = Callable[[Sequence[torch.Tensor], Step], object]


@dataclass(frozen=True)
class Loop:
    """A training loop to feed.

    Args:
        name: for messages.
        num_batches: how many samples.
        copy_ms, step_ms: how long a copy from pinned memory and a step take.
        reads_loss: `step` ends with `loss.item()`.
    """

    name: str
    num_batches: int
    copy_ms: int
    step_ms: int
    reads_loss: bool


LOOPS = (
    Loop("every step reads its loss", 5, 3, 4, True),
    Loop("no step reads its loss", 6, 3, 4, False),
    Loop("copies take longer than steps", 5, 4, 2, True),
    Loop("one batch", 1, 2, 3, True),
)


@dataclass(frozen=True, slots=True)
class Fed:
    """A loop that was fed.

    Args:
        run: what the virtual cluster recorded.
        losses: by rank, what each step computed.
    """

    run: Run
    losses: tuple[Sequence[torch.Tensor], ...]

    @property
    def timeline(self) -> Timeline:
        """Rank 0, with the steps' names on the spans."""
        return by_label(self.run.timeline).of_rank(0)

    @property
    def step_ns(self) -> int:
        return self.run.timeline.step_ns

    @property
    def exposed_copy_ns(self) -> int:
        """How long rank 0 copies with no kernel beside it."""
        spans = [s for s in self.run.timeline.spans if s.rank == 0]
        copies = merge((s.start_ns, s.end_ns) for s in spans if s.kind == "memcpy")
        kernels = merge((s.start_ns, s.end_ns) for s in spans if s.kind == "compute")
        return total(subtract(copies, kernels))


def feed_loop(feed: Feed, loop: Loop = LOOPS[0]) -> Fed:
    """Run `feed(samples, step)` on two ranks."""
    recorded = run(_on_rank, feed, loop, world_size=NUM_RANKS, hardware=SLOW)
    recorded = origins.release(recorded)
    return Fed(recorded, recorded.values)


def _on_rank(feed: Feed, loop: Loop) -> origins.Held:
    rank = dist.get_rank()
    shape = (WIDTH * loop.copy_ms, WIDTH)
    samples = [
        torch.full(shape, 10.0 * rank + i, device="cpu")
        for i in range(1, loop.num_batches + 1)
    ]
    for i, sample in enumerate(samples, start=1):
        streams.name_tensor(sample, f"sample {i}")
    losses: list[torch.Tensor] = []

    def step(batch: torch.Tensor) -> float | None:
        number = len(losses) + 1
        streams.name_tensor(batch, f"batch {number}")
        out = torch.zeros(WIDTH, WIDTH, device=streams.device())
        with streams.annotate(f"step {number}"):
            compute([batch[:WIDTH], batch[-WIDTH:]], out, loop.step_ms)
            loss = out.mean()
            losses.append(loss)
            return loss.item() if loop.reads_loss else None

    before = origins.given(samples)
    feed(samples, step)
    return origins.Held(losses, (*before, *origins.returned(losses)))


@lru_cache(maxsize=8)
def reference_run(loop: Loop) -> Fed:
    """The course's own."""
    return feed_loop(reference.feed, loop)


@exercise(
    "3.4",
    title="a batch to the device",
    solution="feed",
    verifies=(SAFE, VALUES, LEAN, SHORT),
    points=3,
    timeout_s=60.0,
)
def grade_feed(sheet: Sheet, feed: Feed) -> None:
    """Feed each loop; the first that goes wrong is told and drawn."""
    for loop in LOOPS:
        sheet.ran(
            f"{loop.num_batches} batches ({loop.name}), copies of {loop.copy_ms} ms, "
            f"steps of {loop.step_ms} ms, {NUM_RANKS} ranks"
        )
        fed, right = feed_loop(feed, loop), reference_run(loop)
        _show(sheet, fed, right, loop)
        sheet.verify(SAFE, laws.no_findings_law(fed.run.warnings))
        sheet.verify(VALUES, wrong_losses(fed, right))
        assert fed.run.program is not None
        sheet.verify(VALUES, laws.origin_law(fed.run.program, what="a loss"))
        sheet.verify(LEAN, crowded(fed.run, 3))
        sheet.stop_if_wrong()
        sheet.verify(SHORT, _slow(fed, right, loop))
        sheet.stop_if_wrong()
    sheet.ran(f"{len(LOOPS)} loops on {NUM_RANKS} ranks")
    _show(sheet, feed_loop(feed), reference_run(LOOPS[0]), LOOPS[0])


def _show(sheet: Sheet, fed: Fed, right: Fed, loop: Loop) -> None:
    sheet.show(
        fed.timeline,
        step_ns=fed.step_ns,
        target_ns=right.step_ns,
        title=f"your run ({loop.name})",
    )


def wrong_losses(fed: Fed, right: Fed) -> list[Violation]:
    """Every rank's losses are those of its own batches, in order."""
    found = []
    for rank, (mine, ours) in enumerate(zip(fed.losses, right.losses, strict=True)):
        if len(mine) != len(ours):
            found.append(
                Violation(
                    "values",
                    f"rank {rank} ran {len(mine)} steps",
                    f"{len(ours)}, one for each sample",
                    rank=rank,
                )
            )
            continue
        for number, (a, b) in enumerate(zip(mine, ours, strict=True), start=1):
            if not torch.allclose(a, b, rtol=1e-5):
                found.append(
                    Violation(
                        "values",
                        f"step {number} on rank {rank} saw another batch",
                        f"sample {number}",
                        "in which order are the samples copied, and into what?",
                        rank=rank,
                        step=number,
                    )
                )
    return found


def _slow(fed: Fed, right: Fed, loop: Loop) -> list[Violation]:
    exposed = f"{fed.exposed_copy_ns / 1e6:.1f} ms of copies are exposed"
    hint = "launch the next copy before the step: the CPU waits in step for its loss"
    if any(op.attributes.get("pinned") is False for op in _copies(fed)):
        hint = "some copies are from memory that is not pinned: the CPU waits for them"
    elif len({op.stream for op in _copies(fed)} - {"default"}) == 0:
        hint = "copies on the stream of the steps run in turn with them"
    return [
        replace(
            violation, message=f"{loop.name}: {violation.message}; {exposed}", hint=hint
        )
        for violation in laws.step_law(fed.step_ns, right.step_ns)
    ]


def _copies(fed: Fed) -> list[Op]:
    assert fed.run.program is not None
    return [op for op in fed.run.program.ranks[0] if op.kind == "memcpy"]
