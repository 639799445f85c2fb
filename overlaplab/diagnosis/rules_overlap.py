"""Why communication is exposed: each rule looks at one step of one rank.

Each yields at most one finding, and none where the cost is under `LEAST_SHARE` of the
step. What they rest on is the account of the step (`overlaplab.diagnosis.account`) and
what each collective waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from overlaplab.diagnosis.account import Entry
from overlaplab.diagnosis.case import Case
from overlaplab.diagnosis.collectives import Collective, total_moving_ns
from overlaplab.diagnosis.findings import REMEDIES, Finding, finding
from overlaplab.diagnosis.rules_link import (
    merging_saves_ns,
    slow_on_link,
    small_messages,
)
from overlaplab.diagnosis.steps import Step
from overlaplab.diagnosis.wording import (
    count_of,
    gb_per_s,
    is_16_bit,
    named,
    of_whole,
    short,
)
from overlaplab.errors import plural
from overlaplab.view.units import format_bytes, format_ns

MOST_OF_IT = 0.9  # of the bytes: the rest is a loss's average, or a first small bucket
HARDLY = 50  # computation of a fiftieth of the communication hides nothing
FEWEST_OTHERS = 3  # to know what is usual
_FROM_HOOKS = ("BucketedReducer", "HookReducer", "DistributedDataParallel")
LARGER = 2  # times the other buckets: a cap closes a bucket before that


def overlap_rules(case: Case, step: Step) -> Iterator[Finding]:
    """The findings of one rank's step that concern the order of its communication."""
    collectives = case.of(step)
    if not collectives or not step.compute:
        return
    yield from _same_stream(case, step, collectives)
    yield from _end_of_step(case, step, collectives)
    yield from small_messages(case, step, collectives)


def _same_stream(
    case: Case, step: Step, collectives: Sequence[Collective]
) -> Iterator[Finding]:
    """The computation is launched, and stands still until the collective ends."""
    held = [c for c in collectives if c.exposed.get("sending_awaited", 0)]
    cost_ns = sum(_moved(c, "sending_awaited") for c in held)
    if not step.worth_reporting(cost_ns):
        return
    held.sort(key=lambda c: -c.exposed["sending_awaited"])
    shared = sorted({str(c.span.lane) for c in held if _shares_stream(case, c)})
    if shared:
        how = (
            f"It runs on a stream that computes ({', '.join(shared)}), in its order, "
            "as with async_op=False."
        )
    else:
        how = (
            "It is waited for at once: async_op=False, or work.wait() right behind "
            "the launch."
        )
    remedy = REMEDIES["same-stream"]
    if not shared and step.step is None and case.timeline.origin == "trace":
        how = (
            "It is waited for at once, or launched behind a backward pass: without "
            "marks of steps the trace does not say which."
        )
        remedy = f"{REMEDIES['same-stream, no steps']} {remedy}"
    if case.made_by("DistributedDataParallel"):
        remedy = f"{REMEDIES['same-stream, DDP']} {remedy}"
    if any("gather" in c.span.name for c in held):
        remedy += f" {REMEDIES['same-stream, gathers']}"
    yield finding(
        "same-stream",
        step,
        cost_ns,
        says=(
            f"Computation that is already launched stands still until communication "
            f"ends ({count_of(held)}), for "
            f"{of_whole(cost_ns, step.communication_ns)} of it. {how}"
        ),
        remedy=remedy,
        num_collectives=len(held),
        awaited_ns=cost_ns,
        communication_ns=step.communication_ns,
        shared_lanes=shared,
        spans=held,
    )


def _shares_stream(case: Case, collective: Collective) -> bool:
    """Whether the step computes on the stream of the collective, too."""
    spans = case.lookup.spans
    own = collective.span
    stream = own.attributes.get("stream")
    return any(
        spans[i].lane == own.lane
        or (stream is not None and spans[i].attributes.get("stream") == stream)
        for i in collective.step.compute
    )


def _end_of_step(
    case: Case, step: Step, collectives: Sequence[Collective]
) -> Iterator[Finding]:
    """Nothing is left to hide behind: launched late, one bucket, too much, or last."""
    tail = [c for c in collectives if c.exposed.get("sending_last", 0)]
    cost_ns = sum(_moved(c, "sending_last") for c in tail)
    if not tail or not step.worth_reporting(cost_ns):
        return
    if 2 * cost_ns < sum(c.exposed["sending_last"] for c in tail):
        return  # mostly waiting for peers: a straggler's, whatever is in the buckets
    large = _large(collectives)
    in_tail = [c for c in large if c in tail]
    # What merging small messages would save is no want of bandwidth.
    moving_ns = max(0, total_moving_ns(large) - merging_saves_ns(collectives))
    unhidden = [c for c in in_tail if HARDLY * c.remaining_ns <= moving_ns]
    sent, late = (sum(c.span.bytes for c in of) for of in (large, unhidden))
    all_late = late >= MOST_OF_IT * sent if sent else len(unhidden) == len(large)
    biggest = max(large, key=lambda c: c.span.bytes)
    is_alone = biggest.span.bytes >= MOST_OF_IT * sent
    queued = [c for c in in_tail if c.waited_for == "the previous collective"]
    hideable_ns = large[0].remaining_ns
    evidence: dict[str, Any] = {
        "exposed_ns": step.exposed_ns,
        "hidden_ns": step.hidden_ns,
        "communication_ns": step.communication_ns,
        "num_collectives": len(large),
        "bytes": sent,
        "exposed_at_the_end_ns": cost_ns,
    }
    if not all_late:
        if step.parts["sending_awaited"] > step.parts["sending_last"]:
            return  # each is waited for at once, the last one too
        if queued and moving_ns > hideable_ns:
            bound = moving_ns, hideable_ns
            yield _communication_bound(case, step, large, *bound, evidence)
        elif 2 * len(in_tail) <= max(4, len(large)):  # else a queue, and no last one
            yield _last_bucket(case, step, tail, cost_ns, evidence)
        return
    # At best all of it hides, or all computation has some beside it.
    cost_ns = min(cost_ns, step.compute_ns)
    if is_alone and not _after_backward(case, step, unhidden):
        yield _one_bucket(step, biggest, cost_ns, evidence)
    elif _in_time(case, step, unhidden, moving_ns):
        yield _last_bucket(case, step, tail, cost_ns, evidence)
    else:
        yield _launched_late(case, step, unhidden, cost_ns, evidence)
    if moving_ns > step.compute_ns:
        bound = moving_ns, step.compute_ns
        yield _communication_bound(case, step, large, *bound, evidence)


def _in_time(
    case: Case, step: Step, late: Sequence[Collective], moving_ns: int
) -> bool:
    """Whether one of those that started too late was launched early enough."""
    if _after_backward(case, step, late):
        return False
    return any(HARDLY * (c.later_ns or 0) > moving_ns for c in late)


def _large(collectives: Sequence[Collective]) -> Sequence[Collective]:
    """Without barriers and averages of a loss: a hundredth of the largest or more."""
    most = max(c.span.bytes for c in collectives)
    return [c for c in collectives if 100 * c.span.bytes >= most]


def _moved(collective: Collective, entry: Entry) -> int:
    """Of an exposed part, what its bytes took; the rest is waiting for peers."""
    return min(collective.exposed.get(entry, 0), collective.moving_ns)


def _after_backward(
    case: Case, step: Step, collectives: Sequence[Collective]
) -> str | None:
    """How the trace shows that the backward pass had returned; None if it does not.

    Autograd's hooks launch on autograd's thread (CUDA) or in its phase (virtual).
    """
    spans = case.lookup.spans
    computed = [spans[i] for i in step.compute]
    computed = [s for s in computed if s.start_ns < step.backward_end_ns]
    own = [c.span.attributes for c in collectives]
    threads = [s.attributes.get("thread") for s in computed]
    if own and all(a.get("thread") not in (None, *threads) for a in own):
        return None  # gloo's own thread runs it: who launched it, and when?
    if any(s.attributes.get("phase") == "backward" for s in computed):
        if all(a.get("phase") != "backward" for a in own):
            return "they lie outside the backward pass"
        return None
    if not threads or threads[0] is None or threads[-1] in (None, threads[0]):
        return None
    if all(a.get("thread") == threads[0] for a in own):
        return "the thread that ran the forward launched them, not autograd's"
    return None


def _launched_late(
    case: Case,
    step: Step,
    late: Sequence[Collective],
    cost_ns: int,
    evidence: Mapping[str, Any],
) -> Finding:
    how = _after_backward(case, step, late)
    known = f" ({how})" if how else ""
    first = min(late, key=lambda c: c.span.start_ns)
    by_hooks = how is None and any(map(case.made_by, _FROM_HOOKS))
    return finding(
        "launched-late",
        step,
        cost_ns,
        remedy=REMEDIES["launched-late, from hooks" if by_hooks else "launched-late"],
        says=(
            f"{count_of(late)}{_sized(late)} "
            f"started when the backward pass was over{known}: nothing was left to hide "
            f"behind, and {of_whole(step.hidden_ns, step.communication_ns)} of "
            "communication are hidden."
        ),
        **evidence,
        after_backward=how,
        start_after_backward_ns=first.span.start_ns - step.backward_end_ns,
        spans=late,
    )


def _sized(collectives: Sequence[Collective]) -> str:
    """' of 25 MiB', '' where sizes are not known."""
    sent = sum(c.span.bytes for c in collectives)
    return f" of {format_bytes(sent)}" if sent else ""


def _one_bucket(
    step: Step, only: Collective, cost_ns: int, evidence: Mapping[str, Any]
) -> Finding:
    return finding(
        "one-bucket",
        step,
        cost_ns,
        says=(
            f"All gradients travel in one {named(only.span)}. It could start only when "
            f"the last of them was there, at the end of the backward pass: "
            f"{of_whole(step.hidden_ns, step.communication_ns)} of communication are "
            "hidden."
        ),
        **evidence,
        bucket_bytes=only.span.bytes,
        spans=(only,),
    )


def _communication_bound(
    case: Case,
    step: Step,
    large: Sequence[Collective],
    moving_ns: int,
    hideable_ns: int,
    evidence: Mapping[str, Any],
) -> Finding:
    cost_ns = moving_ns - hideable_ns
    sent = sum(c.span.bytes for c in large)
    compress = "compress (ddp_comm_hooks.default_hooks.bf16_compress_hook), "
    if is_16_bit(large) or not case.made_by("DistributedDataParallel"):
        compress = "" if is_16_bit(large) else "send bf16 gradients, "
    no_sync = " under no_sync()" if case.made_by("DistributedDataParallel") else ""
    more = "or a faster link. Buckets and streams cannot help further."
    if slow_on_link(case, step):
        more = "but first see low-bandwidth: the link is far slower than it could be."
    return finding(
        "communication-bound",
        step,
        cost_ns,
        says=(
            f"Sending{f' {format_bytes(sent)}' if sent else ''} takes "
            f"{format_ns(moving_ns)}, and only {format_ns(hideable_ns)} of computation "
            f"can hide it, what runs once the first bucket is ready: "
            f"{format_ns(cost_ns)} stay exposed in any order."
        ),
        remedy=(
            f"Send less or less often: accumulate gradients{no_sync}, {compress}"
            f"a larger batch a step; {more}"
        ),
        **evidence,
        moving_ns=moving_ns,
        hideable_ns=hideable_ns,
        spans=sorted(large, key=lambda c: -c.exposed_ns),
    )


def _last_bucket(
    case: Case,
    step: Step,
    tail: Sequence[Collective],
    cost_ns: int,
    evidence: Mapping[str, Any],
) -> Finding:
    """Whose bytes, ready when, what was left to compute, what half of it would save."""
    worst = max(tail, key=lambda c: _moved(c, "sending_last"))
    span = worst.span
    sent = f" (of {format_bytes(evidence['bytes'])} sent)" if span.bytes else ""
    after_ns = span.start_ns - step.backward_end_ns
    writer = case.lookup.writer(worst.index)
    name = "" if writer is None else case.lookup.spans[writer].name
    when = (
        f"{format_ns(after_ns)} after the last kernel of the backward pass"
        if after_ns >= 0
        else f"{format_ns(-after_ns)} before the backward pass ends"
    )
    if -1000 < after_ns < 0:
        when = "as the backward pass ends"
    if name and after_ns > -1000:
        when += f" ({short(name)})"
    rate = worst.algorithm_bytes_per_s
    half_ns = min(worst.moving_ns // 2, _moved(worst, "sending_last"))
    saves = ""
    uncut = _uncut(case, step, worst)
    remedy = "last-bucket" if "reduce" in span.name else "last-bucket, a result"
    if uncut:
        remedy = "last-bucket, one tensor"
        saves = f" {uncut}"
    elif rate is not None and "reduce" in span.name:
        unknown = "" if worst.knows_ready else ", if it waited for no peer"
        saves = (
            f" At its {gb_per_s(rate)} a bucket of half the size would save about "
            f"{format_ns(half_ns)}{unknown}."
        )
    if worst.waited_for == "the previous collective":
        when += ", behind the one before it"
    others = ""
    if len(tail) > 1:
        others = f" (with {plural(len(tail) - 1, 'other')}, {format_ns(cost_ns)})"
    return finding(
        "last-bucket",
        step,
        cost_ns,
        says=(
            f"The last {named(span)}{sent} starts {when}: "
            f"{format_ns(worst.remaining_ns)} of computation are left to hide it, and "
            f"{of_whole(worst.exposed.get('sending_last', 0), span.duration_ns)} are "
            f"exposed{others}.{saves}"
        ),
        remedy=REMEDIES[remedy],
        **evidence,
        last_bytes=span.bytes,
        start_after_backward_ns=after_ns,
        last_kernel=name,
        remaining_computation_ns=worst.remaining_ns,
        waited_for=worst.waited_for,
        bytes_per_s=rate,
        half_would_save_ns=half_ns if rate is not None and not uncut else None,
        is_one_tensor=bool(uncut),
        spans=(worst, *(c for c in tail if c is not worst)),
        most_spans=None,
    )


def _uncut(case: Case, step: Step, last: Collective) -> str:
    """Why the last message is one tensor that no cap splits; "" where it is not."""
    if "reduce" not in last.span.name or not last.span.bytes:
        return ""
    if case.made_by("HookReducer"):
        return "Each message is one tensor."
    others = [c.span.bytes for c in _large(case.of(step)) if c is not last]
    usual = round(median(others)) if len(others) >= FEWEST_OTHERS else 0
    if usual and last.span.bytes >= LARGER * usual:
        return (
            f"The others have {format_bytes(usual)} in the median: a bucket so much "
            "larger is one tensor, such as an embedding."
        )
    writer = case.lookup.writer(last.index)
    name = "" if writer is None else case.lookup.spans[writer].name
    if usual and last.span.bytes > 1.2 * max(others[1:]) and "embedding" in name:
        return "It ends with the gradient of an embedding, which no cap splits."
    return ""
