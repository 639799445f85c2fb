"""What overlap saved, against what computing and sending take alone.

`Report.saved_ns` adds up kernels as they ran: two that slow each other down look as if
overlap had saved what they cost each other. Here each is taken as long as it is alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median_low

from overlaplab.diagnosis.case import Case
from overlaplab.diagnosis.collectives import total_moving_ns
from overlaplab.diagnosis.contention import Contention
from overlaplab.diagnosis.rules_link import slow_on_link
from overlaplab.diagnosis.steps import Step
from overlaplab.diagnosis.wording import of_whole
from overlaplab.timeline import Span
from overlaplab.timeline.intervals import intersect, merge
from overlaplab.view.units import format_bytes, format_ns

SAME_BYTES = 1.05  # a loss's average more or less is the same work
SAME_TIME = 2.0  # contention makes no kernel twice as long in the whole of a step
SAME_LINK = 4.0  # small messages, and what computes beside them, cost more than bytes


@dataclass(frozen=True, slots=True)
class Saved:
    """Of one rank's step."""

    step_ns: int  # how long it took
    compute_alone_ns: int  # what its computation takes with nothing beside it
    communication_alone_ns: int
    basis: str  # how these two are known, in words
    # the step without overlap, None without a serial run
    serial_step_ns: int | None = None
    # whether a serial step, or all spans' own times alone, stand beside it
    is_known: bool = True

    @property
    def saved_ns(self) -> int:
        """The serial step, less this one; without a serial run one after the other.

        Negative where other things cost more than overlap gains.
        """
        if self.serial_step_ns is not None:
            return self.serial_step_ns - self.step_ns
        return self.compute_alone_ns + self.communication_alone_ns - self.step_ns

    @property
    def possible_ns(self) -> int:
        """The shorter of the two: no schedule saves more."""
        return min(self.compute_alone_ns, self.communication_alone_ns)


def saved_of(case: Case, serial: Case | None) -> dict[tuple[int, int | None], Saved]:
    """By (rank, step); `serial` is a run in which the two did not overlap."""
    return {
        (step.rank, step.step): (
            _by_twins(case, step) if serial is None else _by_serial(serial, step)
        )
        for step in case.steps
    }


def _by_serial(serial: Case, step: Step) -> Saved:
    own = _of_rank(serial, step)
    return Saved(
        step.step_ns,
        _median(s.compute_ns for s in own),
        _median(_moving_ns(serial, s) for s in own),
        "measured in the serial run",
        _median(s.step_ns for s in own),
    )


def check_serial(case: Case, serial: Case) -> None:
    """Refuse a serial run of other work: what overlap saved is the difference of two.

    Raises:
        ValueError: it sends other bytes, or computes or sends for quite another time.
    """
    step = case.described
    if step is None:
        return
    own = _of_rank(serial, step)
    sent = [sum(c.span.bytes for c in case.of(step))]
    sent.append(_median(sum(c.span.bytes for c in serial.of(s)) for s in own))
    computed = step.compute_ns, _median(s.compute_ns for s in own)
    moved = _moving_ns(case, step), _median(_moving_ns(serial, s) for s in own)
    differs = ""
    if not all(moved) or not all(computed):
        if any(moved) and not all(moved):
            differs = "one of the two does not communicate"
    elif all(sent) and max(sent) > SAME_BYTES * min(sent):
        differs = (
            f"it sends {format_bytes(sent[1])} a step, this {format_bytes(sent[0])}"
        )
    elif max(computed) > SAME_TIME * min(computed):
        differs = f"it computes {format_ns(computed[1])}, this {format_ns(computed[0])}"
    elif max(moved) > SAME_LINK * min(moved):
        differs = f"it sends for {format_ns(moved[1])}, this for {format_ns(moved[0])}"
    if differs:
        raise ValueError(
            f"the serial run is not of the same work: {differs}; give the trace of the "
            "same model, batch, ranks and link, without overlap"
        )


def _of_rank(serial: Case, step: Step) -> list[Step]:
    return [s for s in serial.steps if s.rank == step.rank] or list(serial.steps)


def _by_twins(case: Case, step: Step) -> Saved:
    contention = case.contention_of(step)
    alone = [c.alone_ns for c in case.of(step)]
    known = [ns for ns in alone if ns is not None]
    # A guessed profile may be another link's: what was measured is nearer.
    by_model = bool(known) and len(known) == len(alone) and not case.is_guess
    # Nor does a link far slower than the profile's become fast by computing first.
    if by_model and slow_on_link(case, step):
        by_model = False
    return Saved(
        step.step_ns,
        step.compute_ns - contention.cost_ns,
        sum(known) if by_model else _moving_ns(case, step),
        _basis(case, contention, by_model),
        is_known=all("alone_ns" in s.attributes for s in _beside(case, step)),
    )


def _beside(case: Case, step: Step) -> Iterator[Span]:
    """The collectives, and the computation that any of them overlaps."""
    sent = [c.span for c in case.of(step)]
    yield from sent
    sending = merge((s.start_ns, s.end_ns) for s in sent)
    for span in (case.lookup.spans[i] for i in step.compute):
        if intersect([(span.start_ns, span.end_ns)], sending):
            yield span


def _basis(case: Case, contention: Contention, by_model: bool) -> str:
    if case.timeline.origin == "virtual":
        return "by the hardware model"
    compared, beside = contention.compared_ns, contention.beside_ns
    basis = "computation as it ran"
    if beside and compared >= beside // 2:
        basis = (
            f"computation by the same kernels without communication beside them, which "
            f"{of_whole(compared, beside)} have"
        )
    elif beside:
        basis += ": too few of its kernels also ran without communication beside them"
    if not by_model:
        return f"{basis}; communication as it ran, once all ranks were there"
    name = "spans" if case.hardware is None else case.hardware.name
    return f"{basis}; communication by {name}"


def _moving_ns(case: Case, step: Step) -> int:
    return total_moving_ns(case.of(step))


def _median(values: Iterable[int]) -> int:
    found = list(values)
    return median_low(found) if found else 0
