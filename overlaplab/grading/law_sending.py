"""What is sent: each gradient once a step, nothing else, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlaplab.grading.evidence import Evidence, GradientEvidence, SendEvidence
from overlaplab.grading.violation import Violation, list_names


def once_law(
    evidence: Evidence, *, steps: Sequence[int] | None = None
) -> list[Violation]:
    """Every byte of every gradient is sent exactly once a step, by every rank."""
    found = []
    for rank in range(evidence.num_ranks):
        for step in steps or range(1, evidence.num_steps + 1):
            latest = {g.name: g for g in evidence.gradients_of(rank, step)}
            for g in latest.values():
                if g.sent_bytes == g.bytes:
                    continue
                found.append(
                    Violation(
                        "once",
                        f"rank {rank} sent {g.sent_bytes} bytes of the gradient of "
                        f"{g.name}, which has {g.bytes}, in step {step} "
                        f"({len(g.sends)} collectives)",
                        "every byte of every gradient is sent once a step",
                        _once_hint(g.sent_bytes, g.bytes),
                        rank=rank,
                        step=step,
                    )
                )
            for send in evidence.sends_of(rank, step):
                old = [(n, b) for n, b in send.stale if not _sent_here(latest, n, send)]
                if old:
                    found.append(
                        Violation(
                            "once",
                            f"in step {step} rank {rank} sent "
                            f"{sum(size for _, size in old)} bytes of an earlier "
                            f"step's gradients ({list_names([n for n, _ in old])})",
                            "each step sends its own gradients",
                            "what does the reducer still hold when a step begins?",
                            rank=rank,
                            step=step,
                        )
                    )
    return found


def _once_hint(sent_bytes: int, size: int) -> str:
    if sent_bytes == 0:
        return "does the collective get the gradient, or something else?"
    if sent_bytes > size:
        return "what tells the reducer that a bucket was launched already?"
    return "does the last bucket become full?"


def _sent_here(
    latest: Mapping[str, GradientEvidence], name: str, send: SendEvidence
) -> bool:
    """Sent twice within its step: reported by the count of bytes."""
    return name in latest and send.op in latest[name].sends


def bytes_law(
    evidence: Evidence,
    *,
    steps: Sequence[int] | None = None,
    extra_bytes: int = 0,
    factor: float = 1.0,
) -> list[Violation]:
    """Bytes on the wire = factor * gradient bytes, plus at most `extra_bytes` a step.

    Args:
        evidence: of the run.
        steps: which steps to judge, all by default.
        extra_bytes: allowed for flags and counters.
        factor: 0.5 where float32 gradients travel as bfloat16.
    """
    found = []
    for rank in range(evidence.num_ranks):
        for step in steps or range(1, evidence.num_steps + 1):
            sent = sum(s.bytes for s in evidence.sends_of(rank, step))
            latest = {g.name: g.bytes for g in evidence.gradients_of(rank, step)}
            wanted = int(factor * sum(latest.values()))
            if wanted <= sent <= wanted + extra_bytes:
                continue
            found.append(
                Violation(
                    "bytes",
                    f"rank {rank} sent {sent} bytes in step {step}",
                    f"{wanted} bytes, as many as its gradients have",
                    "which bytes are sent that are no gradient of this step?"
                    if sent > wanted
                    else "which gradients are not sent?",
                    rank=rank,
                    step=step,
                )
            )
    return found


def same_order_law(evidence: Evidence) -> list[Violation]:
    """Every gradient travels in the same collective of its communicator on all ranks.

    A rank that has no gradient for a parameter may send zeros in its place.
    """
    travels: dict[tuple[int, str], dict[int, list[tuple[str, int]]]] = {}
    for send in evidence.sends:
        for name, _ in send.covers:
            ranks = travels.setdefault((send.step, name), {})
            ranks.setdefault(send.rank, []).append((send.group, send.sequence))
    found = []
    for (step, name), ranks in travels.items():
        first = min(ranks)
        for rank, meetings in ranks.items():
            if meetings == ranks[first]:
                continue
            found.append(
                Violation(
                    "order",
                    f"in step {step} the gradient of {name} travels in "
                    f"{_meetings(ranks[first])} on rank {first}, in "
                    f"{_meetings(meetings)} on rank {rank}",
                    "every rank launches the same buckets in the same order",
                    "the order of arrival may differ between ranks",
                    rank=rank,
                    step=step,
                )
            )
    return found


def _meetings(meetings: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"collective {number} of {group!r}" for group, number in meetings)
