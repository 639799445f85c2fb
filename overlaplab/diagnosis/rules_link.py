"""A link far slower than the profile's: told before anything that it makes longer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from overlaplab.diagnosis.case import Case
from overlaplab.diagnosis.collectives import Collective
from overlaplab.diagnosis.findings import Finding
from overlaplab.diagnosis.rules_messages import worth_telling
from overlaplab.diagnosis.steps import Step
from overlaplab.diagnosis.wording import count_of, gb_per_s, named
from overlaplab.view.units import format_ns

LOW_BANDWIDTH = 0.5  # of the profile's: contention alone takes no more
LATENCY_NS = 80_000  # messages under this are latency's, not the wire's


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
    if hw is None or not worth_telling(cost_ns, step):
        return
    slow.sort(key=lambda c: -c.span.bytes)
    rates = [r for c in slow if (r := c.bus_bytes_per_s) is not None]
    rate = round(median(rates))
    says = "guessed from the card's name" if case.is_guess else "as given"
    yield Finding(
        kind="low-bandwidth",
        rank=step.rank,
        step=step.step,
        cost_ns=cost_ns,
        says=(
            f"{count_of(slow)} reach {gb_per_s(rate)} of bus bandwidth in the median "
            f"({named(slow[0].span)} took {format_ns(slow[0].moving_ns)}); the link of "
            f"{hw.name} ({says}) reaches {gb_per_s(hw.link.bytes_per_s)}."
        ),
        remedy=(
            "See what the bytes travel over: NCCL_DEBUG=INFO says so, and nvidia-smi "
            "topo -m what there is. Is peer-to-peer off (NCCL_P2P_DISABLE set, another "
            "container or IOMMU)? NCCL_IB_DISABLE and NCCL_SOCKET_IFNAME choose slow "
            "ways, too. If this is the link that you have, overlaplab calibrate "
            "measures it, for --hardware."
        ),
        evidence={
            "bus_bytes_per_s": rate,
            "link_bytes_per_s": hw.link.bytes_per_s,
            "hardware": hw.name,
            "is_guess": case.is_guess,
            "num_collectives": len(slow),
            "bytes": sum(c.span.bytes for c in slow),
        },
        spans=tuple(c.index for c in slow[:8]),
    )


def _is_long(collective: Collective) -> bool:
    known = collective.alone_ns is not None and collective.bus_bytes_per_s is not None
    return known and collective.moving_ns > LATENCY_NS


def _is_slow(collective: Collective) -> bool:
    assert collective.alone_ns is not None
    return collective.alone_ns < LOW_BANDWIDTH * collective.moving_ns
