"""One step of one rank: its window, its numbers, its account. Knows no peers.

[Note: window] Between steps that follow one another the CPU runs ahead: it launches
step 4 while the device computes step 3. A step's window is therefore the device's: from
the end of what came before to the end of the step's last device span. Where the step
with the number before is not in the timeline, it begins with its own first span, the
CPU's included; and with its first kernel, if that was queued behind something that the
timeline does not have. Windows of one rank do not overlap, and the time between two
steps (in which the next batch is loaded) belongs to the later one. A timeline without
steps is one window from first start to last end, as in `Timeline.report`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from overlaplab.diagnosis.account import Entry, Stretch, account, sums
from overlaplab.diagnosis.lookup import Lookup
from overlaplab.timeline import Span
from overlaplab.timeline.intervals import Interval
from overlaplab.timeline.report import Report, report

_OPTIMIZERS = ("optimizer", "adam", "sgd", "lamb", "foreach", "multi_tensor")
LEAST_SHARE = 0.005  # of a step: what costs less is not reported
PROMPT_NS = 20_000  # a device starts what is ready within this time
_MOST_EPILOGUE = 0.35  # of a step's computation; more is no optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Report):
    """What one rank did in one step: the `Report` of its own spans in its window."""

    step: int | None  # its number, None where the timeline has no steps
    compute: tuple[int, ...]  # indices of its spans, by start
    communication: tuple[int, ...]
    stretches: tuple[Stretch, ...]  # its account, see `overlaplab.diagnosis.account`
    # nanoseconds of each entry of the account; they add up to `step_ns`
    parts: Mapping[Entry, int]
    backward_end_ns: int  # end of the last computation that is no optimizer's
    knows_launches: bool  # whether the launch of any of its device spans is known

    @property
    def idle_ns(self) -> int:
        parts = self.parts
        return sum(ns for entry, ns in parts.items() if entry.startswith("idle"))

    @property
    def cpu_bound_ns(self) -> int | None:
        """The device is idle and the next kernel not launched yet; None: not known."""
        if not self.knows_launches:
            return None
        return self.idle_ns - self.parts["idle_other"]

    def worth_reporting(self, cost_ns: int) -> bool:
        """Whether a cost is large enough, in this step, to be a finding."""
        return cost_ns > 0 and cost_ns >= LEAST_SHARE * self.step_ns


def steps_of(lookup: Lookup) -> tuple[Step, ...]:
    """Every step of every rank, by step and rank."""
    numbers = _numbers(lookup)
    found = [
        step
        for rank in lookup.ranks
        for number in numbers
        for step in _step(lookup, rank, number)
    ]
    return tuple(sorted(found, key=lambda s: (s.step or 0, s.rank)))


def _numbers(lookup: Lookup) -> Sequence[int | None]:
    """Of steps; none where no device span says its step: launches were not recorded."""
    spans = lookup.spans
    device = [spans[i] for rank in lookup.ranks for i in lookup.device(rank)]
    if device and all("step" not in span.attributes for span in device):
        return (None,)
    return lookup.timeline.steps or (None,)


def _step(lookup: Lookup, rank: int, number: int | None) -> Iterator[Step]:
    spans = lookup.spans

    def own(indices: Sequence[int]) -> list[int]:
        if number is None:
            return list(indices)
        return [i for i in indices if spans[i].attributes.get("step") == number]

    device, cpu = own(lookup.device(rank)), own(lookup.cpu(rank))
    if not device and not (number is None and cpu):
        return
    start, end = _window(lookup, rank, number, device, cpu)
    compute = tuple(i for i in device if spans[i].kind == "compute")
    communication = tuple(i for i in device if spans[i].kind == "communication")
    backward_end_ns, epilogue_ns = _epilogue(lookup, compute, communication, end)
    stretches = account(lookup, rank, (start, end), epilogue_ns)
    numbers = asdict(report(spans[i] for i in device))
    yield Step(
        **numbers | {"rank": rank, "start_ns": start, "end_ns": end, "ranks": ()},
        step=number,
        compute=compute,
        communication=communication,
        stretches=stretches,
        parts=sums(stretches),
        backward_end_ns=backward_end_ns,
        # On the virtual cluster a launch that costs nothing leaves no span.
        knows_launches=lookup.timeline.origin == "virtual"
        or any(lookup.launch(i) is not None for i in device),
    )


def _window(
    lookup: Lookup,
    rank: int,
    number: int | None,
    device: Sequence[int],
    cpu: Sequence[int],
) -> Interval:
    spans = lookup.spans
    first_ns = min(spans[i].start_ns for i in [*device, *cpu])
    if number is None:
        return first_ns, max(spans[i].end_ns for i in [*device, *cpu])
    first_on_device_ns = spans[device[0]].start_ns
    before = [
        spans[i]
        for i in lookup.device(rank)
        if spans[i].start_ns < first_on_device_ns
        and spans[i].attributes.get("step") != number
    ]
    before_ns = [s.end_ns for s in before]
    if any(s.attributes.get("step") == number - 1 for s in before):
        first_ns = 0  # the time between the two is this one's
    launch = lookup.launch(device[0])
    queued = launch is not None and first_on_device_ns - launch[1] > PROMPT_NS
    if queued and not before_ns:
        first_ns = first_on_device_ns
    end_ns = max(spans[i].end_ns for i in device)
    return min(max([first_ns, *before_ns]), end_ns), end_ns


def _epilogue(
    lookup: Lookup,
    compute: Sequence[int],
    communication: Sequence[int],
    end_ns: int,
) -> tuple[int, int]:
    """End of the computation that could hide, and start of what only uses the result.

    Where the backward pass is known, that is its end. Else what follows the last
    collective is an optimizer, if it says so by its label or name, or was launched by
    another thread than what came before (autograd's). It is the smaller part of a step.
    """
    spans = [lookup.spans[i] for i in compute]
    last_ns = max((s.end_ns for s in spans), default=end_ns)
    if not communication:
        return last_ns, end_ns + 1
    backward = [s for s in spans if s.attributes.get("phase") == "backward"]
    if backward:
        end_of_backward_ns = max(s.end_ns for s in backward)
        after = [s for s in spans if s.start_ns >= end_of_backward_ns]
        if _is_smaller(after, spans):
            return end_of_backward_ns, min(
                (s.start_ns for s in after), default=end_ns + 1
            )
    large = _large([lookup.spans[i] for i in communication])
    sent_ns = max(s.end_ns for s in large)
    after = [s for s in spans if s.start_ns >= sent_ns]
    before = [s for s in spans if s.start_ns < sent_ns]
    if not after or not before or not _only_uses(before, after):
        return last_ns, end_ns + 1
    return max(s.end_ns for s in before), min(s.start_ns for s in after)


def _large(spans: Sequence[Span]) -> Sequence[Span]:
    """Without a loss's average or a barrier: a hundredth of the bytes or more."""
    whole = sum(s.bytes for s in spans)
    return [s for s in spans if 100 * s.bytes >= whole] or spans


def _only_uses(before: Sequence[Span], after: Sequence[Span]) -> bool:
    if not _is_smaller(after, [*before, *after]):
        return False
    named = sum(s.duration_ns for s in after if _is_optimizer(s))
    if 2 * named >= sum(s.duration_ns for s in after):
        return True
    phases = [{s.attributes.get("phase") for s in spans} for spans in (before, after)]
    if phases[1] == {None} and phases[0] != {None}:
        return True
    thread = before[-1].attributes.get("thread")
    threads = {s.attributes.get("thread") for s in after}
    return thread is not None and thread not in threads and None not in threads


def _is_smaller(part: Sequence[Span], whole: Sequence[Span]) -> bool:
    busy_ns = sum(s.duration_ns for s in part)
    return busy_ns <= _MOST_EPILOGUE * sum(s.duration_ns for s in whole)


def _is_optimizer(span: Span) -> bool:
    words = f"{span.attributes.get('label', '')} {span.name}".lower()
    return any(word in words for word in _OPTIMIZERS)
