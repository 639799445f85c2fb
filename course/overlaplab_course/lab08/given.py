"""What sections 1 to 3 of lab 08 work on: a loader, slots, a loop, and its clock.

Filling pinned memory is the CPU's work. The virtual cluster takes no time for what the
CPU computes, so a loop says what a fill takes, and the record is timed with that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.cluster.run import Run
from overlaplab.grading import origins
from overlaplab.grading.forms import Examined
from overlaplab.grading.stage import run
from overlaplab.program import Op, Program, resolve
from overlaplab.program.access import num_bytes
from overlaplab.timeline import Timeline
from overlaplab_course.lab03.jobs import SET_UP, SLOW, WIDTH, compute
from overlaplab_course.lab08 import lanes

Batch = tuple[torch.Tensor, ...]
Slot = tuple[torch.Tensor, ...]
# From a loader to the batches of it on the device.
Prefetch = Callable[[Iterable[Batch]], Iterator[Batch]]
DoubleBuffered = Callable[[Iterable[Batch], list[Slot], list[Slot]], Iterator[Batch]]

STEP = "step "  # before a step's number: its label


class Loop(NamedTuple):
    """A training loop to feed; a unit of a batch takes 1 ms to copy.

    Args:
        name: "every step reads its loss".
        num_batches: of which the last is half as long, rounded up.
        units: of the inputs and of the targets, each (64 * units, 64) in float32.
        fill_ms: what the CPU takes to fill a pinned slot with a batch.
        step_ms: what a step computes.
        reads_loss: a step ends with `loss.item()`, so that the CPU waits.
        num_ranks: each has batches of its own.
        slow_fills_ms: by batch, where its fill takes another time.
    """

    name: str
    num_batches: int = 5
    units: tuple[int, int] = (2, 1)
    fill_ms: int = 2
    step_ms: int = 4
    reads_loss: bool = True
    num_ranks: int = 2
    slow_fills_ms: tuple[tuple[int, int], ...] = ()

    @property
    def copy_ms(self) -> int:
        """Of a whole batch, from pinned memory."""
        return sum(self.units)

    def rows(self, number: int) -> tuple[int, ...]:
        """Of batch `number`, from 0."""
        last = number == self.num_batches - 1
        return tuple(
            WIDTH * (-(-units // 2) if last else units) for units in self.units
        )


LOOPS = (
    Loop("every step reads its loss"),
    Loop("no step reads its loss", num_batches=6, reads_loss=False, num_ranks=3),
    Loop("copies take longer than steps", units=(3, 2), step_ms=2),
    Loop("one batch", num_batches=1, units=(4, 1)),
    Loop("no batch", num_batches=0),
)
# Fills that take time: a fill and a copy in turn are longer than a step.
FILLED = (
    Loop("no step reads its loss", num_batches=6, reads_loss=False),
    Loop("every step reads its loss", units=(3, 2), step_ms=6, num_ranks=3),
    Loop("fills take longest", fill_ms=6, reads_loss=False),
    Loop("copies take longest", units=(4, 2), step_ms=3, reads_loss=False),
    Loop("one fill takes long", reads_loss=False, slow_fills_ms=((3, 8),)),
    Loop("one batch", num_batches=1),
    Loop("no batch", num_batches=0),
)


@dataclass(frozen=True)
class Fed(Examined):
    """A loop that was fed.

    `values`: by rank, (loss of each step, how far the loader was ahead in each step).
    """

    loop: Loop

    @cached_property
    def told(self) -> Program:
        """The record with a name for each fill, copy and step, and times of fills."""
        slow_ms = {f"fill {batch}": ms for batch, ms in self.loop.slow_fills_ms}

        def fill_ns(op: Op) -> int:
            fill_ms = slow_ms.get(op.label, self.loop.fill_ms)
            return int(fill_ms * 1e6 * _filled(op) / (16384 * self.loop.copy_ms))

        ranks = (
            tuple(
                replace(op, duration_ns=fill_ns(op))
                for op in lanes.named(self.program, rank)
            )
            for rank in range(len(self.program.ranks))
        )
        return replace(self.program, ranks=tuple(ranks))

    @cached_property
    def whole(self) -> Timeline:
        """All ranks'."""
        return resolve(self.told, SLOW)

    @property
    def timeline(self) -> Timeline:
        """Rank 0's, with a lane for each slot."""
        return lanes.with_slots(self.told, self.whole)

    @property
    def step_ns(self) -> int:
        """From the first fill to the end of the last step."""
        return self.whole.step_ns

    @property
    def gpu_idle_ns(self) -> int:
        """How long rank 0 computes nothing, until the last step ends."""
        spans = [s for s in self.whole.spans if s.rank == 0 and s.kind == "compute"]
        return self.step_ns - sum(span.duration_ns for span in spans)


def _filled(op: Op) -> int:
    """Bytes that the CPU writes."""
    if op.kind != "host" or op.label == SET_UP or op.label.startswith(STEP):
        return 0
    return sum(num_bytes(access) for access in op.writes)


def feed(prefetch: Prefetch, loop: Loop = LOOPS[0]) -> Fed:
    """Run `for batch in prefetch(loader): step(batch)`, batches being pinned."""
    return _run(loop, prefetch, True)


def feed_slots(double_buffered: DoubleBuffered, loop: Loop = FILLED[0]) -> Fed:
    """The same with `double_buffered(loader, pinned, device)`, batches pageable."""
    return _run(loop, double_buffered, False)


def _run(loop: Loop, feeder: Callable[..., Iterator[Batch]], pinned: bool) -> Fed:
    recorded: Run = run(
        _on_rank,
        loop,
        feeder,
        pinned,
        world_size=loop.num_ranks,
        hardware=SLOW,
        timeout_s=30,
    )
    return Fed(origins.release(recorded), loop)


def _on_rank(loop: Loop, feeder: Callable[..., Any], pinned: bool) -> origins.Held:
    with streams.annotate(SET_UP):
        batches = _batches(loop, pinned)
        slots = () if pinned else (_slots(loop, True), _slots(loop, False))
        streams.synchronize()
    taken = 0

    def loader() -> Iterator[Batch]:
        nonlocal taken
        while batches:
            taken += 1
            yield batches.pop(0)

    losses: list[torch.Tensor] = []
    ahead: list[int] = []
    notes = origins.given(batches)
    for batch in feeder(loader(), *slots):
        ahead.append(taken - len(losses) - 1)
        losses.append(_step(loop, batch, len(losses)))
        del batch
    return origins.Held((losses, ahead), (*notes, *origins.returned(losses)))


def _batches(loop: Loop, pinned: bool) -> list[Batch]:
    made = []
    for number in range(loop.num_batches):
        values = (10 * dist.get_rank() + number + part / 2 + 1 for part in range(2))
        rows = loop.rows(number)
        batch = tuple(
            torch.full((n, WIDTH), value, device="cpu", pin_memory=pinned)
            for n, value in zip(rows, values, strict=True)
        )
        for tensor in batch:
            streams.name_tensor(tensor, f"{lanes.BATCH}{number}")
        made.append(batch)
    return made


def _slots(loop: Loop, pinned: bool) -> list[Slot]:
    """Two slots with room for a whole batch, called "pinned A" and "device B"."""
    made = []
    for letter in "AB":
        place: dict[str, Any] = {"device": "cpu", "pin_memory": True}
        if not pinned:
            place = {"device": streams.device()}
        slot = tuple(torch.zeros(WIDTH * u, WIDTH, **place) for u in loop.units)
        for tensor in slot:
            streams.name_tensor(tensor, f"{'pinned' if pinned else 'device'} {letter}")
        made.append(slot)
    return made


def part(slot: Sequence[torch.Tensor], batch: Sequence[torch.Tensor]) -> Slot:
    """The first rows of each tensor of `slot`, as many as `batch` has: views."""
    return tuple(s[: len(b)] for s, b in zip(slot, batch, strict=True))


def _step(loop: Loop, batch: Batch, number: int) -> torch.Tensor:
    """Reads every byte of the batch, first and last; returns the loss."""
    with streams.annotate(f"{STEP}{number}"):
        out = torch.zeros(WIDTH, WIDTH, device=streams.device())
        whole = [t.view(-1, WIDTH, WIDTH).sum(0) for t in batch]
        compute(whole, out, loop.step_ms)
        # As the backward pass of a first layer does.
        loss = out.mean() + sum(t.mean() for t in batch)
        if loop.reads_loss:
            loss.item()
    return loss
