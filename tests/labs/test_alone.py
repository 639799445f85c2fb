"""Mutants of right solutions that make one promised sentence false, and no other.

Here are those that the labs' own tests do not have; sentences.tsv lists one for each
sentence of each exercise, see test_sentences.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType

import pytest
import torch
import torch.distributed as dist

import overlaplab.streams as streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab00 import reference as lab00
from overlaplab_course.lab03 import checks as lab03
from overlaplab_course.lab03 import reference as lab03_reference
from overlaplab_course.lab04 import checks_extra as lab04
from overlaplab_course.lab04 import reference as lab04_reference
from tests.labs.test_lab01_ratios import solve as right_ratios
from tests.labs.test_lab01_share import FOUND
from tests.labs.test_lab01_share import solve as right_share
from tests.labs.test_lab02_profiler import by_words
from tests.labs.test_lab02_repairs import repaired as repaired_profile
from tests.labs.test_lab02_repairs import summary
from tests.labs.test_lab02_traces import find_gaps

NUMBER = 4


def unwaited():
    """A message that carries nothing of the exercise's, and nobody waits for."""
    dist.all_reduce(torch.zeros(1), async_op=True)


class EarlyReader:
    """torch.distributed, but what is launched is read before it is waited for."""

    def __getattr__(self, name):
        return getattr(dist, name)

    def all_reduce(self, tensor, *rest, **options):
        work = dist.all_reduce(tensor, *rest, **options)
        if options.get("async_op"):
            tensor.sum()
        return work


def waiting_later(step):
    """`step` with another `dist`."""
    space = {**step.__globals__, "dist": EarlyReader(), "__name__": __name__}
    return FunctionType(step.__code__, space, step.__name__)


def after(step, more):
    """`step`, then `more()`."""

    def both(*args):
        result = step(*args)
        more()
        return result

    return both


def first(more, step):
    """`more()`, then `step`."""

    def both(*args):
        more()
        return step(*args)

    return both


def wait_for_little():
    torch.zeros(1)
    streams.synchronize()


def works_on():
    with streams.annotate("more"):
        torch.ones(400, 400) @ torch.ones(400, 400)


# -- labs 00, 03, 04: steps


def small_sums(tensors):
    for dtype in (torch.float32, torch.int64):
        chosen = [t for t in tensors if t.dtype is dtype]
        flat = torch.cat([t.reshape(-1) for t in chosen])
        dist.all_reduce(flat, async_op=True).wait()
        parts = flat.split([t.numel() for t in chosen])
        for tensor, part in zip(chosen, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def takes_the_shared_branch_away(x, w):
    routed = x @ w["routed_in"]
    sum_routed = dist.all_reduce(routed, async_op=True)
    gate = x @ w["gate"]
    sum_gate = dist.all_reduce(gate, async_op=True)
    shared = (x @ w["shared_in"]).relu() @ w["shared_out"]
    sum_routed.wait()
    y = routed @ w["routed_out"]
    sum_gate.wait()
    return (y - shared) * gate


def another_schedule_in_a_run(rank, step, num_ranks):
    if dist.is_initialized():
        return rank
    return (rank - step) % num_ranks


def truth(case, number=NUMBER):
    told = dict(case(number))
    return {k: min(v) if isinstance(v, frozenset) else v for k, v in told.items()}


@dataclass
class Alone:
    """A solution, and the only sentence that it makes false."""

    exercise: str
    sentence: str
    solution: tuple


def repaired(exercise, sentence, number, case, program):
    said = truth(case, number)
    return Alone(exercise, sentence, (number, said, program))


STEPS = {
    "0.4 read early": Alone(
        "0.4",
        "the message is waited for, before its result is used",
        (waiting_later(lab00.step),),
    ),
    **{
        f"{exercise} the CPU waits, and loses nothing": repaired(
            exercise,
            "the CPU waits for nothing",
            NUMBER,
            lab03.REPAIRS[exercise].truth,
            first(wait_for_little, step),
        )
        for exercise, step in (
            ("3.3a", lab03_reference.send_gradients),
            ("3.3b", lab03_reference.look_up),
            ("3.3c", lab03_reference.train),
        )
    },
    "3.3a works on": repaired(
        "3.3a",
        "the overlap is kept: the step is as short as the reference's",
        NUMBER,
        lab03.REPAIRS["3.3a"].truth,
        after(lab03_reference.send_gradients, works_on),
    ),
    "4.2 read early": Alone(
        "4.2",
        "nothing reads a tensor while it is being summed",
        (waiting_later(lab04_reference.two_sums),),
    ),
    "4.3 read early": Alone(
        "4.3",
        "nothing reads a tensor while it is being summed",
        (waiting_later(lab04_reference.experts),),
    ),
    "4.3 another sum": Alone(
        "4.3", "the result is right on every rank", (takes_the_shared_branch_away,)
    ),
    "4.3 one is not waited for": Alone(
        "4.3",
        "every message is waited for",
        (after(lab04_reference.experts, unwaited),),
    ),
    "4.5 read early": Alone(
        "4.5", "nothing reads a sum before it is there", (waiting_later(small_sums),)
    ),
    "4.6 otherwise in a run": Alone(
        "4.6",
        "sent by four ranks: right sums, and 2 (n - 1)/n of the tensor leaves each",
        (another_schedule_in_a_run,),
    ),
    "4.8a read early": repaired(
        "4.8a",
        "nothing touches a tensor while it is being summed, and all is waited for",
        NUMBER,
        lab04.REPAIRS["4.8a"].truth,
        waiting_later(lab04_reference.blocks),
    ),
    "4.8b read early": repaired(
        "4.8b",
        "nothing touches a tensor while it is being summed, and all is waited for",
        NUMBER,
        lab04.REPAIRS["4.8b"].truth,
        waiting_later(lab04_reference.accumulate),
    ),
}


# -- labs 01 and 02: numbers


def half_a_bound(below, above):
    """(serial, bound, speed-up), the bound scaled on either side of Tc = Tm."""
    return lambda c, m: (
        c + m,
        max(c, m) * (below if m <= c else above),
        (c + m) / max(c, m),
    )


def ratios(tc, tm, sent, hidden, step):
    overlap, saved, efficiency = right_ratios(tc, tm, sent, hidden, step)
    return overlap, saved and saved / 2, efficiency


def settings(name, instead):
    return (right_share, {**FOUND, name: FOUND[instead]})


def no_nccl(row):
    return by_words(row) and not row.name.startswith("nccl")


def of_any_category(row):
    return by_words(row) or (row.category != "kernel" and "nccl" in row.name)


def small_gaps(timeline):
    """Reads no more than an example needs."""
    return find_gaps(timeline) if len(timeline.spans) < 100 else []


def small_summary(rows):
    said = summary(rows)
    return said if len(rows) < 12 else said | {"busy_ns": said["busy_ns"] - 1}


def longer_message(compute, send):
    said = repaired_profile(compute, send)
    return said | {"communication_ms": 1.2 * said["communication_ms"]}


def one_more_product(compute, send):
    said = repaired_profile(compute, send)
    torch.ones(4000, 4000) @ torch.ones(4000, 4000)
    return said


NUMBERS = {
    "1.2 half below": Alone(
        "1.2",
        "bound: the step if all that can be is hidden, with less to send than compute",
        (half_a_bound(0.5, 1),),
    ),
    "1.2 half above": Alone(
        "1.2",
        "and with more to send than to compute",
        (half_a_bound(1, 0.5),),
    ),
    "1.4 half saved": Alone(
        "1.4", "saved fraction: what the step is shorter than serial, of Tm", (ratios,)
    ),
    "1.7 not less": Alone(
        "1.7", "far less: the share is under 5 %", settings("far less", "claim holds")
    ),
    "1.7 not more": Alone(
        "1.7", "far more: the share is over 80 %", settings("far more", "claim holds")
    ),
    "2.4 no NCCL": Alone("2.4", "NCCL's kernels, of every version", (no_nccl,)),
    "2.4 no kernels": Alone("2.4", "what is no kernel is none", (of_any_category,)),
    "2.6 small ones": Alone("2.6", "all steps of both stored traces", (small_gaps,)),
    "2.8a longer": Alone(
        "2.8a",
        "communication_ms is the time of the message, however much of it is hidden",
        (longer_message,),
    ),
    "2.8a works on": Alone(
        "2.8a", "the step is as long as without a profiler", (one_more_product,)
    ),
    "2.8b small ones": Alone(
        "2.8b", "and so on 40 timelines that nobody has seen", (small_summary,)
    ),
}


@pytest.mark.parametrize("name", [*NUMBERS, *STEPS])
def test_one_sentence_is_false_and_no_other(name, faults):
    alone = {**NUMBERS, **STEPS}[name]
    verdict = judge(find_exercise(alone.exercise), *alone.solution)
    assert {*faults(verdict)} == {alone.sentence}, str(verdict)
    assert not verdict.error or alone.sentence in faults(verdict)
