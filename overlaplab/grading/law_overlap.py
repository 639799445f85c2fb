"""When a bucket may start: the prompt law, and what goes with it.

Reads evidence; runs nothing. A bucket is a set of parameters, never a collective's
number or name.
"""

from __future__ import annotations

from collections.abc import Sequence

from overlaplab.grading.evidence import BucketEvidence, Evidence
from overlaplab.grading.violation import Violation, broken, list_names, ms
from overlaplab.timeline.intervals import merge


def prompt_law(
    evidence: Evidence,
    buckets: Sequence[Sequence[str]],
    *,
    steps: Sequence[int] | None = None,
    slack_ns: int | None = None,
) -> list[Violation]:
    """Every bucket starts when it is full and the wire is free, not earlier or later.

        ready(b) <= start(b) <= max(ready(b) + pack(b), free) + slack

    ready(b) is the end of the last operator that wrote any gradient of b, pack(b) the
    learner's own copies for b; see `BucketEvidence`. If the wire is busy at that time,
    free is when it is through with what it has, collective after collective. A bucket
    that only waits for others is late where those set out after it was full and the
    wire idle: all at the end, the last one first. What nobody could avoid is granted:
    operators that autograd launched between the gradient and its hook, and the CPU's
    launches.

    Times in messages count from the beginning of their step.

    Args:
        evidence: of the run.
        buckets: names of the parameters of each bucket, as the *reference* plans them;
            the first is bucket 0. Finer collectives satisfy the law, coarser do not.
        steps: which steps to judge, all by default.
        slack_ns: tolerance; 1 % of the step by default, at least 2 us.
    """
    found = []
    for step in steps or range(1, evidence.num_steps + 1):
        slack = _slack_ns(evidence, step) if slack_ns is None else slack_ns
        busy = merge((s.start_ns, s.end_ns + slack) for s in evidence.sends)
        for index, names in enumerate(buckets):
            bucket = evidence.bucket(names, step)
            if bucket is not None:
                found += _prompt(evidence, bucket, index, slack, busy)
        found += _early(evidence, buckets, step)
    return found


def _prompt(
    evidence: Evidence,
    bucket: BucketEvidence,
    index: int,
    slack_ns: int,
    busy: Sequence[tuple[int, int]],
) -> list[Violation]:
    zero = evidence.begin_ns(bucket.step)
    full = f"bucket {index} was full at {ms(bucket.ready_ns - zero)}"
    where = {"rank": bucket.rank, "step": bucket.step, "bucket": index}
    names = list_names(bucket.names)
    if bucket.start_ns is None:
        return [broken("prompt never", full=full, names=names, **where)]
    packed = max(_could_ns(bucket), bucket.launched_ns)
    until = next((end - slack_ns for start, end in busy if start <= packed < end), 0)
    # It may be among what keeps the wire busy.
    could = max(packed, min(until, bucket.start_ns))
    if bucket.start_ns <= could + slack_ns:
        return []
    what = "" if _overlaps(evidence, bucket.step) else "right gradients, no overlap: "
    passed_by = any(could < s.start_ns < bucket.start_ns for s in evidence.sends)
    why = "order" if passed_by else "late"
    free = "the wire was free"
    if until > packed:
        free += f" from {ms(until - zero)}"
    start, last = ms(bucket.start_ns - zero), ms(could + slack_ns - zero)
    facts = {"what": what, "full": full, "free": free, "names": names, "why": why}
    return [broken("prompt", start=start, could=last, **facts, **where)]


def _overlaps(evidence: Evidence, step: int) -> bool:
    """Whether any collective starts before the step's last gradient is complete."""
    last = max((g.ready_ns for g in evidence.gradients if g.step == step), default=0)
    return any(s.step == step and s.start_ns < last for s in evidence.sends)


def _early(
    evidence: Evidence, buckets: Sequence[Sequence[str]], step: int
) -> list[Violation]:
    bucket_of = {name: i for i, names in enumerate(buckets) for name in names}
    found = []
    for rank in range(evidence.num_ranks):
        gradients = {g.name: g for g in evidence.gradients_of(rank, step)}
        zero = evidence.begin_ns(step)
        for send in evidence.sends_of(rank, step):
            for name, _ in send.covers:
                gradient = gradients[name]
                if send.own_start_ns >= gradient.origin_ns:
                    continue
                facts = {
                    "start": ms(send.own_start_ns - zero),
                    "complete": ms(gradient.origin_ns - zero),
                    "bucket": bucket_of.get(name),
                }
                found.append(broken("early", rank=rank, step=step, name=name, **facts))
    return found


def unblocked_law(
    evidence: Evidence, *, steps: Sequence[int] | None = None
) -> list[Violation]:
    """No gradient's computation waits for a collective of the same step.

    A reducer that waits in its hooks launches each bucket promptly and hides nothing.
    """
    found = []
    for rank in range(evidence.num_ranks):
        for step in steps or range(1, evidence.num_steps + 1):
            waited = evidence.collectives_waited_for(rank, step)
            gradients = evidence.gradients_of(rank, step)
            zero = evidence.begin_ns(step)
            for g in sorted(gradients, key=lambda g: g.writer or 0):
                sent = None if g.writer is None else waited.get(g.writer)
                if sent is None:
                    continue
                start, end = evidence.times.wire(sent.group, sent.sequence)
                times = {"start": ms(start - zero), "end": ms(end - zero)}
                where = {"rank": rank, "step": step, "name": g.name}
                found.append(broken("blocked", **times, **where))
                break
    return found


def _slack_ns(evidence: Evidence, step: int) -> int:
    return max(2_000, evidence.step_ns[step - 1] // 100)


def _could_ns(bucket: BucketEvidence) -> int:
    """When it is full and packed, and its hook has run."""
    return max(bucket.ready_ns, bucket.armed_ns) + bucket.pack_ns


def step_law(
    step_ns: int, reference_ns: int, *, factor: float = 1.02
) -> list[Violation]:
    """The blunt alternative to `prompt_law`: step <= factor * the reference's step."""
    if step_ns <= factor * reference_ns:
        return []
    limit, reference = ms(int(factor * reference_ns)), ms(reference_ns)
    facts = {"limit": limit, "factor": factor, "reference": reference}
    return [broken("step", took=ms(step_ns), **facts)]


def overlap_law(
    evidence: Evidence,
    buckets: Sequence[Sequence[str]],
    reference_ns: Sequence[int],
    *,
    steps: Sequence[int] | None = None,
    slack_ns: int | None = None,
    strict: bool = False,
) -> list[Violation]:
    """Prompt and unblocked, or (whatever the design) as fast as ours.

    Args:
        evidence: of the run.
        buckets: as in `prompt_law`.
        reference_ns: the reference's `Evidence.step_ns` on the same fixture.
        steps: which steps to judge, all by default.
        slack_ns: as in `prompt_law`.
        strict: a step that is longer than ours is refused, also where no bucket is to
            blame.
    """
    judged = list(steps or range(1, evidence.num_steps + 1))
    slow = [
        step
        for step in judged
        if step_law(evidence.step_ns[step - 1], reference_ns[step - 1])
    ]
    found = []
    for step in judged:
        if step in slow:
            found += unblocked_law(evidence, steps=[step])
            found += prompt_law(evidence, buckets, steps=[step], slack_ns=slack_ns)
            if strict:
                found += step_law(evidence.step_ns[step - 1], reference_ns[step - 1])
        else:
            found += _early(evidence, buckets, step)
    return found
