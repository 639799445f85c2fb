"""The laws that graders hold a run to. Each returns its violations; none is "it holds".

Laws read evidence and numbers; they run nothing and know no exercise. When a bucket may
start is in law_overlap.py, where a result comes from in origins.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from overlaplab.grading.evidence import Evidence, GradientEvidence, SendEvidence
from overlaplab.grading.law_overlap import overlap_law as overlap_law
from overlaplab.grading.law_overlap import prompt_law as prompt_law
from overlaplab.grading.law_overlap import step_law as step_law
from overlaplab.grading.law_overlap import unblocked_law as unblocked_law
from overlaplab.grading.origins import origin_law as origin_law
from overlaplab.grading.violation import Violation as Violation
from overlaplab.grading.violation import broken, list_names
from overlaplab.program import Finding

# Tolerance relative to the element and to the largest of its tensor, by the coarsest
# dtype of the model: one layer in bfloat16 rounds what all others see. float32: sums of
# a few hundred terms in another order differ in the last bits. bfloat16 keeps 8 bits:
# a few roundings of 2**-8 each, of activations, gradients and their mean.
TOLERANCES: Mapping[torch.dtype, float] = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
}


# -- what a run leaves: values, findings, memory


def values_law(
    seen: Sequence[Mapping[str, torch.Tensor | None]],
    oracle: Mapping[str, torch.Tensor | None],
    *,
    what: str = "gradient",
    step: int | None = None,
    rank: int = 0,
) -> list[Violation]:
    """Each rank's tensors (`seen[rank][name]`) equal the one-process oracle's.

    None (no gradient) equals only None; a name that is missing counts as None.

    Args:
        seen: by rank.
        oracle: the right tensors; their coarsest dtype sets the tolerance.
        what: they are, for the message.
        step: they are of.
        rank: of the first in `seen`, where each rank has an oracle of its own.
    """
    where = f", step {step}" if step is not None else ""
    if not seen:
        return [broken("values nothing", step=step)]
    dtypes = {right.dtype for right in oracle.values() if right is not None}
    tolerance = max((TOLERANCES.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    found = []
    for here, tensors in enumerate(seen, start=rank):
        for name, right in oracle.items():
            problem = _difference(tensors.get(name), right, tolerance)
            if problem is None:
                continue
            was, should = problem
            facts = {"what": what, "name": name, "where": where}
            facts |= {"was": was, "should": should}
            found.append(broken("values", rank=here, step=step, **facts))
    return found


def _difference(
    seen: torch.Tensor | None, right: torch.Tensor | None, tolerance: float
) -> tuple[str, str] | None:
    if seen is None or right is None:
        if seen is right:
            return None
        return ("None", "a tensor") if seen is None else ("a tensor", "None")
    if seen.shape != right.shape or seen.dtype != right.dtype:
        return (
            f"{tuple(seen.shape)} of {seen.dtype}",
            f"{tuple(right.shape)} of {right.dtype}",
        )
    if right.numel() == 0:
        return None
    a, b = seen.detach().double().flatten(), right.detach().double().flatten()
    atol = tolerance * b.abs().max().item()
    wrong = ~torch.isclose(a, b, rtol=tolerance, atol=atol)
    if not bool(wrong.any()):
        return None
    worst = int(
        torch.where(wrong, (a - b).abs().nan_to_num(nan=torch.inf), -1).argmax()
    )
    note = ""
    big = b.abs() > atol
    if bool(big.any()):
        ratio = (a[big] / b[big]).median().item()
        if abs(ratio - 1) > 1e-3:
            note = f" (the median ratio to the right value is {ratio:.3g})"
    was, should = (_as_told(x.flatten()[worst].item(), ".6g") for x in (seen, right))
    if was == should:  # they differ further back
        was, should = (_as_told(x.flatten()[worst].item(), "") for x in (seen, right))
    return (
        f"element {worst} is {was}{note}; "
        f"{int(wrong.sum())} of {a.numel()} elements are wrong",
        should,
    )


def _as_told(number: float, spec: str) -> str:
    return format(number, spec) if spec or isinstance(number, float) else f"{number:,}"


def no_findings_law(
    findings: Sequence[Finding],
    *,
    kinds: Sequence[str] = ("hazard", "unwaited", "unmatched"),
) -> list[Violation]:
    """`Run.warnings` holds no finding of these kinds."""
    expected = {
        "hazard": "bytes that one stream writes are touched by another only after it",
        "unwaited": "every collective is waited for",
        "unmatched": "every collective is launched by all ranks",
    }
    return [
        Violation(f.kind, str(f), expected.get(f.kind, ""), rank=f.rank)
        for f in findings
        if f.kind in kinds
    ]


def leak_law(live_bytes: Sequence[Sequence[int]]) -> list[Violation]:
    """On every rank, no more bytes live at the end of the last step than of step 2.

    Args:
        live_bytes: `Evidence.live_bytes`, of three steps or more.
    """
    return [
        broken("leak", rank=rank, before=row[1], after=row[-1], last=len(row))
        for rank, row in enumerate(live_bytes)
        if len(row) < 3 or row[-1] > row[1]
    ]


# -- what is sent: each gradient once a step, nothing else, in one order on all ranks


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
                sizes = {"sent": g.sent_bytes, "size": g.bytes, "sends": len(g.sends)}
                why = "twice" if g.sent_bytes > g.bytes else "part"
                found.append(
                    broken(
                        "once bytes",
                        why=why if g.sent_bytes else "none",
                        rank=rank,
                        step=step,
                        name=g.name,
                        **sizes,
                    )
                )
            for send in evidence.sends_of(rank, step):
                old = [(n, b) for n, b in send.stale if not _sent_here(latest, n, send)]
                if old:
                    names = list_names([n for n, _ in old])
                    sent = {"size": sum(size for _, size in old), "names": names}
                    found.append(broken("once stale", rank=rank, step=step, **sent))
    return found


def updates_law(
    evidence: Evidence,
    *,
    sharded: bool = False,
    names: Sequence[str] | None = None,
    steps: Sequence[int] | None = None,
) -> list[Violation]:
    """Every byte of every parameter that trains is updated once a step.

    Args:
        evidence: of the run.
        sharded: by one rank of all; else by each.
        names: of what trains; None: what has a gradient in the step or is updated.
            Reducers that free a gradient in its hook leave none to be seen.
        steps: which steps to judge, all by default.
    """
    found = []
    for step in steps or range(1, evidence.num_steps + 1):
        rows = [u for u in evidence.updates if u.step == step]
        arrived = {g.name for g in evidence.gradients if g.step == step and g.bytes}
        seen = arrived | {u.name for u in rows if u.bytes}
        known = dict.fromkeys(u.name for u in rows)  # in the model's order
        for name in [n for n in known if n in seen] if names is None else names:
            own = [u for u in rows if u.name == name]
            where = {"step": step, "name": name, "size": own[0].size}
            often = [u for u in own if u.times > 1]
            wanted = own[0].size * (1 if sharded else len(own))
            if often:
                entry, facts = "updates often", {"times": often[0].times}
                found.append(broken(entry, rank=often[0].rank, **facts, **where))
            elif sum(u.bytes for u in own) != wanted:
                sizes = ", ".join(str(u.bytes) for u in own)
                who = "one rank" if sharded else "every rank"
                found.append(broken("updates", sizes=sizes, who=who, **where))
    return found


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

    A gradient that two parameters have in common counts for both, sent once.

    Args:
        evidence: of the run.
        steps: which steps to judge, all by default.
        extra_bytes: allowed for flags and counters.
        factor: 0.5 where float32 gradients travel as bfloat16.
    """
    found = []
    for rank in range(evidence.num_ranks):
        for step in steps or range(1, evidence.num_steps + 1):
            sends = evidence.sends_of(rank, step)
            sent = sum(s.bytes + s.shared_bytes for s in sends)
            latest = {g.name: g.bytes for g in evidence.gradients_of(rank, step)}
            wanted = int(factor * sum(latest.values()))
            if wanted <= sent <= wanted + extra_bytes:
                continue
            why = "more" if sent > wanted else "less"
            sizes = {"sent": sent, "wanted": wanted}
            found.append(broken("bytes", why=why, rank=rank, step=step, **sizes))
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
            there, here = _meetings(ranks[first]), _meetings(meetings)
            facts = {"name": name, "first": first, "there": there, "here": here}
            found.append(broken("order", rank=rank, step=step, **facts))
    return found


def _meetings(meetings: Sequence[tuple[str, int]]) -> str:
    """ "collective #0 of process group 'default'"; nobody takes it for a stream."""
    return ", ".join(
        f"collective #{number} of process group {group!r}" for group, number in meetings
    )


# -- what a learner says: choices by what they lose, diagnoses by what the run shows


def regret(choice_ns: int, best_ns: int, worst_ns: int) -> float:
    """What was lost relative to what there was to gain: 0 is the best, 1 the worst.

    Returns 0.0 where there was nothing to gain.
    """
    if worst_ns <= best_ns:
        return 0.0
    return (choice_ns - best_ns) / (worst_ns - best_ns)


def regret_law(
    regrets: Mapping[str, float], *, at_most: float = 0.20
) -> list[Violation]:
    """No case's regret passes `at_most`; the worst case comes first."""
    if not regrets:
        return [broken("regret nothing")]
    return [
        broken("regret", case=case, lost=value, at_most=at_most)
        for case, value in sorted(regrets.items(), key=lambda item: -item[1])
        if not value <= at_most  # also catches nan
    ]


def diagnosis_law(
    said: object,
    truth: Mapping[str, object],
    *,
    kinds: Sequence[str] = (),
) -> list[Violation]:
    """Every field of `truth` (kind, rank, step, span or tensor, number) was said right.

    A number in `truth` under a key that ends in "_ns", "_us" or "_ms" is met within
    3 %, one under "_share" or "_percent" within 3 points; strings by their words,
    without case; a set or frozenset by any of its members; everything else by ==.

    Args:
        said: the learner's; what is no mapping answers nothing.
        truth: what is right.
        kinds: what "kind" may be, for who says something else.
    """
    if not isinstance(said, Mapping):
        return [broken("diagnosis form", said=f"{said!r:.60}", keys=", ".join(truth))]
    found = []
    for key, right in truth.items():
        answer = said.get(key)
        if not _answers(key, answer, right):
            entry = "diagnosis" if key in said else "diagnosis nothing"
            entry = "diagnosis empty" if key in said and answer is None else entry
            violation = broken(entry, key=key, answer=answer)
            if key == "kind" and kinds:
                expected = f"one of: {', '.join(kinds)}"
                violation = replace(violation, expected=expected)
            found.append(violation)
    return found


def _answers(key: str, answer: object, right: object) -> bool:
    if isinstance(right, (set, frozenset)):
        return any(_answers(key, answer, one) for one in right)
    if isinstance(right, str):
        return isinstance(answer, str) and _words(answer) == _words(right)
    if isinstance(right, bool) or isinstance(answer, bool):
        return answer is right
    if isinstance(right, (int, float)):
        if not isinstance(answer, (int, float)):
            return False
        if key.endswith(("_ns", "_us", "_ms")):
            return abs(answer - right) <= 0.03 * abs(right)
        if key.endswith("_share"):
            return abs(answer - right) <= 0.03
        if key.endswith("_percent"):
            return abs(answer - right) <= 3
    return answer == right


def _words(text: str) -> list[str]:
    return text.casefold().replace("_", " ").replace("-", " ").split()
