"""13.7: ranks that measured other times launch in one order, by the slowest."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import overlaplab as ol
from overlaplab.grading import find_exercise, judge, laws
from overlaplab_course import lab13 as lab
from overlaplab_course.lab13 import twin_checks as checks

NUMBER = 3


def said(number=NUMBER, **other):
    first, second = lab.twins(number).apart
    return {"kind": "mixed", "rank_0": first, "rank_1": second, **other}


def grade(program, number=NUMBER, diagnosis=None):
    diagnosis = said(number) if diagnosis is None else diagnosis
    return judge(find_exercise("13.7"), number, diagnosis, program)


def agreed(op=dist.ReduceOp.MAX, names=sorted):
    def plan_launches(times):
        keys = names(times)
        shared = torch.tensor([times[key] for key in keys], device=ol.device())
        dist.all_reduce(shared, op=op)
        told = dict(zip(keys, shared.tolist(), strict=True))
        return sorted(told, key=told.get)

    return plan_launches


def gathered(choose):
    def plan_launches(times):
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, dict(times))
        told = {name: choose([each[name] for each in every]) for name in sorted(times)}
        return sorted(told, key=told.get)

    return plan_launches


def as_given(times):
    return sorted(times, key=times.get)


def by_name(times):
    return sorted(times)


def as_the_graph_has_them(times):
    return ["dw3", "dw2", "dw1"]


def as_rank_0_has_them(times):
    order = [sorted(times, key=times.get)]
    dist.broadcast_object_list(order, src=0)
    return order[0]


def rank_0_alone(times):
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(3, device=ol.device()))
    return sorted(times)


WRONG = {
    "as given": (as_given, checks.ONE_ORDER),
    "numbers in the order of the dictionary": (agreed(names=list), checks.ONE_ORDER),
    "one rank sends alone": (rank_0_alone, checks.ONE_ORDER),
    "the fastest rank": (agreed(dist.ReduceOp.MIN), checks.SLOWEST),
    "the mean": (agreed(dist.ReduceOp.SUM), checks.SLOWEST),
    "rank 0's order": (as_rank_0_has_them, checks.SLOWEST),
    "by name": (by_name, checks.SLOWEST),
    "without the times": (as_the_graph_has_them, checks.SLOWEST),
    "the median": (gathered(lambda t: sorted(t)[len(t) // 2 - 1]), checks.SLOWEST),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_repair_is_refused_for_its_own_reason(wrong, faults):
    program, sentence = WRONG[wrong]
    assert set(faults(grade(program))) == {sentence}


@pytest.mark.parametrize(
    "other",
    [{"kind": "deadlock"}, {"rank_0": "dw1"}, {"rank_1": None}, {"kind": 3}],
    ids=str,
)
def test_a_wrong_diagnosis_is_refused(other, faults):
    verdict = grade(agreed(), diagnosis=said(**other))
    assert set(faults(verdict)) == {checks.DIAGNOSIS}
    assert next(iter(other)) in verdict.hint


@pytest.mark.parametrize("number", [1, 2, 17])
def test_the_largest_time_passes_for_every_number(number):
    verdict = grade(agreed(), number)
    assert verdict.passed, str(verdict)


def test_gathering_the_dictionaries_passes():
    verdict = grade(gathered(max))
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("number", [1, 2])
def test_nobody_notices_that_averages_are_mixed(number):
    played = lab.twins(number).play(as_given)
    assert played.num_findings == 0
    first, second = lab.twins(number).apart
    assert {name for _, name, _ in played.wrong()} == {first, second}


@pytest.mark.parametrize("diagnosis", [["mixed"], "mixed", object()])
def test_a_diagnosis_that_is_no_dictionary_is_called_so(diagnosis):
    verdict = grade(agreed(), diagnosis=diagnosis)
    kind = type(diagnosis).__name__
    assert verdict.error == f"the diagnosis is {kind}; expected a dict"
    (found,) = laws.diagnosis_law(diagnosis, {"kind": "mixed", "rank_0": "dw1"})
    assert found.expected == "a dictionary with the entries kind, rank_0"
