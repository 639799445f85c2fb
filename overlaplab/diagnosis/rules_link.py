"""What messages pay on the link: too slow a link, or too many small messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from overlaplab.diagnosis.case import Case
from overlaplab.diagnosis.collectives import Collective, is_set_up
from overlaplab.diagnosis.findings import REMEDIES, Finding, finding
from overlaplab.diagnosis.steps import Step
from overlaplab.diagnosis.wording import count_of, gb_per_s, named
from overlaplab.errors import plural
from overlaplab.view.units import format_bytes, format_ns

LOW_BANDWIDTH = 0.5  # of the profile's: contention alone takes no more
LATENCY_NS = 80_000  # messages under this are latency's, not the wire's
BUCKET_BYTES = 25 * 2**20  # DDP's default: what the messages could be merged into
FEWEST_SMALL = 8
LATENCY_BYTES = 65_536  # a message of less is latency's on any link
SPREAD = 2  # of sizes, to know what a message costs whatever its size
# Who may have sent small messages, and the remedy for it; the first one counts.
_SENT_BY = (
    ("BucketedReducer", "small-messages, BucketedReducer"),
    ("DistributedDataParallel", "small-messages, DDP"),
    ("overlaplab's reducer", "small-messages, a reducer"),
    ("Zero3", "small-messages, Zero3"),
)


def slow_on_link(case: Case, step: Step) -> Sequence[Collective]:
    """A step's messages that take more than twice what the profile says.

    Where peers are not known a message may have waited for them: only if each of the
    step's long messages is as slow, it is the link.
    """
    if case.hardware is None or case.timeline.origin == "virtual":
        return ()
    long = [c for c in case.of(step) if _is_long(c)]
    slow = [c for c in long if _is_slow(c)]
    if len(slow) == len(long):
        return slow
    return [c for c in slow if c.knows_ready]


def low_bandwidth(case: Case, step: Step) -> Iterator[Finding]:
    """Exposed messages that take more than twice what the profile says."""
    hw = case.hardware
    slow = list(slow_on_link(case, step))
    cost_ns = sum(
        min(c.exposed_ns, c.moving_ns - c.alone_ns)
        for c in slow
        if c.alone_ns is not None
    )
    if hw is None or not step.worth_reporting(cost_ns):
        return
    slow.sort(key=lambda c: -c.span.bytes)
    rates = [r for c in slow if (r := c.bus_bytes_per_s) is not None]
    rate = round(median(rates))
    says = "guessed from the card's name" if case.is_guess else "as given"
    yield finding(
        "low-bandwidth",
        step,
        cost_ns,
        says=(
            f"{count_of(slow)} reach {gb_per_s(rate)} of bus bandwidth in the median "
            f"({named(slow[0].span)} took {format_ns(slow[0].moving_ns)}); the link of "
            f"{hw.name} ({says}) reaches {gb_per_s(hw.link.bytes_per_s)}."
        ),
        bus_bytes_per_s=rate,
        link_bytes_per_s=hw.link.bytes_per_s,
        hardware=hw.name,
        is_guess=case.is_guess,
        num_collectives=len(slow),
        bytes=sum(c.span.bytes for c in slow),
        spans=slow,
    )


def _is_long(collective: Collective) -> bool:
    known = collective.alone_ns is not None and collective.bus_bytes_per_s is not None
    return known and collective.moving_ns > LATENCY_NS


def _is_slow(collective: Collective) -> bool:
    assert collective.alone_ns is not None
    return collective.alone_ns < LOW_BANDWIDTH * collective.moving_ns


def small_messages(
    case: Case, step: Step, collectives: Sequence[Collective]
) -> Iterator[Finding]:
    """More is paid for starting messages than for their bytes; not in a set-up."""
    collectives = [c for c in collectives if not is_set_up(c.span)]
    sized, small, fixed_ns, spared = _small(collectives)
    if not small:
        return
    sent = sum(c.span.bytes for c in sized)
    # Hidden messages cost nothing, nor do launches that no device waited for.
    cost_ns = min(spared * fixed_ns, step.exposed_ns)
    cost_ns += min(spared * _launching_ns(case, small), step.parts["idle_cpu"])
    if not step.worth_reporting(cost_ns):
        return
    largest = max(c.span.bytes for c in small)
    remedies = (REMEDIES[key] for maker, key in _SENT_BY if case.made_by(maker))
    yield finding(
        "small-messages",
        step,
        cost_ns,
        says=(
            f"{len(small)} of {len(sized)} collectives carry {format_bytes(largest)} "
            f"or less, and each takes {format_ns(fixed_ns)} whatever its size. "
            f"{format_bytes(sent)} in buckets of {format_bytes(BUCKET_BYTES)} would be "
            f"{plural(max(1, -(-sent // BUCKET_BYTES)), 'message')}."
        ),
        remedy=next(remedies, REMEDIES["small-messages"]),
        num_small=len(small),
        num_collectives=len(sized),
        largest_small_bytes=largest,
        fixed_ns=fixed_ns,
        bytes=sent,
        num_spared=spared,
        spans=sorted(small, key=lambda c: -c.moving_ns),
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
    sizes = [c.span.bytes for c in sized]
    if max(sizes) > LATENCY_BYTES and max(sizes) < SPREAD * min(sizes):
        return sized, (), 0, 0  # equal ones do not tell latency from the wire
    limit = min(_half_speed_bytes(sized, fixed_ns), BUCKET_BYTES // 2)
    small = [c for c in sized if c.span.bytes <= limit]
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
