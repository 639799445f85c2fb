"""Many small messages: more is paid for starting them than for their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from overlaplab.diagnosis.case import LEAST_SHARE, Case
from overlaplab.diagnosis.collectives import Collective
from overlaplab.diagnosis.findings import Finding
from overlaplab.diagnosis.steps import Step
from overlaplab.diagnosis.wording import plural
from overlaplab.view.units import format_bytes, format_ns

BUCKET_BYTES = 25 * 2**20  # DDP's default: what the messages could be merged into
FEWEST_SMALL = 8


def worth_telling(cost_ns: int, step: Step) -> bool:
    """Whether a cost is large enough, in its step, to be a finding."""
    return cost_ns > 0 and cost_ns >= LEAST_SHARE * step.step_ns


def small_messages(
    case: Case, step: Step, collectives: Sequence[Collective]
) -> Iterator[Finding]:
    """More is paid for starting messages than for their bytes."""
    sized, small, fixed_ns, spared = _small(collectives)
    if not small:
        return
    sent = sum(c.span.bytes for c in sized)
    # Hidden messages cost nothing, nor do launches that no device waited for.
    cost_ns = min(spared * fixed_ns, step.exposed_ns)
    cost_ns += min(spared * _launching_ns(case, small), step.parts["idle_cpu"])
    if not worth_telling(cost_ns, step):
        return
    largest = max(c.span.bytes for c in small)
    yield Finding(
        kind="small-messages",
        rank=step.rank,
        step=step.step,
        cost_ns=cost_ns,
        says=(
            f"{len(small)} of {len(sized)} collectives carry {format_bytes(largest)} "
            f"or less, and each takes {format_ns(fixed_ns)} whatever its size. "
            f"{format_bytes(sent)} in buckets of {format_bytes(BUCKET_BYTES)} would be "
            f"{plural(max(1, -(-sent // BUCKET_BYTES)), 'message')}."
        ),
        remedy=(
            "Send gradients in buckets instead of one by one: DistributedDataParallel "
            "(bucket_cap_mb), overlaplab.BucketedReducer, or "
            "torch.distributed's coalescing for your own."
        ),
        evidence={
            "num_small": len(small),
            "num_collectives": len(sized),
            "largest_small_bytes": largest,
            "fixed_ns": fixed_ns,
            "bytes": sent,
            "num_spared": spared,
        },
        spans=tuple(c.index for c in sorted(small, key=lambda c: -c.moving_ns)[:8]),
    )


def _small(
    collectives: Sequence[Collective],
) -> tuple[Sequence[Collective], Sequence[Collective], int, int]:
    """Messages, the small ones, what each costs whatever its size, and how many less.

    No small ones where they are few, or less than half of all.
    """
    sized = [c for c in collectives if c.span.bytes]
    if len(sized) < FEWEST_SMALL:
        return sized, (), 0, 0
    fixed_ns = _fixed_ns(sized)
    sent = sum(c.span.bytes for c in sized)
    small = [c for c in sized if c.span.bytes <= _half_speed_bytes(sized, fixed_ns)]
    spared = len(sized) - max(1, -(-sent // BUCKET_BYTES))
    if len(small) < FEWEST_SMALL or 2 * len(small) < len(sized) or spared <= 0:
        return sized, (), fixed_ns, 0
    return sized, small, fixed_ns, spared


def merging_saves_ns(collectives: Sequence[Collective]) -> int:
    """What all would take less in buckets, hidden or not; 0 where few are small."""
    _, _, fixed_ns, spared = _small(collectives)
    return fixed_ns * spared


def _fixed_ns(collectives: Sequence[Collective]) -> int:
    """What a message costs whatever its size: the quickest tenth of them."""
    ordered = sorted(c.moving_ns for c in collectives)
    return ordered[len(ordered) // 10]


def _half_speed_bytes(collectives: Sequence[Collective], fixed_ns: int) -> int:
    """A message of so many bytes is on the wire as long as it takes to start."""
    largest = max(collectives, key=lambda c: c.span.bytes)
    wire_ns = max(1, largest.moving_ns - fixed_ns)
    return largest.span.bytes * fixed_ns // wire_ns


def _launching_ns(case: Case, collectives: Sequence[Collective]) -> int:
    """Median CPU time of launching one, 0 where it is not known."""
    known = [case.lookup.launch(c.index) for c in collectives]
    times = sorted(launch[1] - launch[0] for launch in known if launch is not None)
    return times[len(times) // 2] if times else 0
