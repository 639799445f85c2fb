"""Kinds of wrong programs against exercises: matrix.tsv has a verdict in every cell.

A kind is a law of programs that is broken; "values" are wrong results, whoever
computed them. Where one sentence carries several laws, or a solution of the labs' own
tests breaks it in another way, the wrong one is made here of the course's own. For the
others the cell names the solution that breaks the law's sentence alone; of a sentence
that carries several laws, one that somebody has seen to be of this kind. A cell whose
exercise leaves the law out says why; so does one whose kind cannot be written there.
Write it anew with WRITE_VERDICTS=1.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import overlaplab.streams as streams
from overlaplab.grading import find_exercise, judge
from overlaplab.grading.exercise import LAWS, Exercise
from overlaplab_course.lab00 import reference as lab00
from overlaplab_course.lab03 import checks as lab03
from overlaplab_course.lab03 import reference as lab03_reference
from overlaplab_course.lab04 import checks_extra as lab04
from overlaplab_course.lab04 import reference as lab04_reference
from overlaplab_course.lab06 import reference as lab06_reference
from overlaplab_course.lab08 import reference as lab08_reference
from overlaplab_course.lab08 import weights_checks as lab08
from overlaplab_course.lab10 import reference as lab10_reference
from overlaplab_course.lab10 import repairs as lab10
from tests.labs import other_kinds
from tests.labs.conftest import STORED, TABLE, WRITE
from tests.labs.repairs import Reducer, first_diagnosis
from tests.labs.test_alone import NUMBER, after, small_sums, truth, unwaited
from tests.labs.test_alone_reducers import (
    cpu_waits,
    mutant,
    not_waited_for,
    nothing,
    ordered,
    prompt,
    read_in_a_hook,
    repaired_05,
    repaired_06,
    sent_again,
)
from tests.labs.test_lab10_shards import shard, unshard
from tests.labs.test_laws import EVERY
from tests.labs.test_off_the_record import NOT_RECORDED
from tests.labs.test_sentences import NEVER_ALONE
from tests.labs.unusual_programs import halves_functional

MATRIX = TABLE.with_name("matrix.tsv")
KINDS = (*LAWS, "values")
ENDS = {"cpu": streams.synchronize, "unwaited": unwaited}
STEPS = {
    "0.4": lab00.step,
    "3.1a": lab03_reference.send_beside,
    "3.1": lab03_reference.issue,
    "3.3a": lab03_reference.send_gradients,
    "3.3b": lab03_reference.look_up,
    "3.3c": lab03_reference.train,
    "3.4": lab03_reference.feed,
    "4.1": halves_functional,
    "4.2": lab04_reference.two_sums,
    "4.3": lab04_reference.experts,
    "4.4": lab04_reference.average_gradients,
    "4.5": small_sums,
    "4.8a": lab04_reference.blocks,
    "4.8b": lab04_reference.accumulate,
    "6.3": lab06_reference.finish,
    "8.4": lab08_reference.train_two,
    "8.6": lab08_reference.serve,
    "10.5": lab10_reference.backward,
}
# What yields: a message that nobody waits for comes first.
FEEDERS = {
    "8.1": lab08_reference.prefetch,
    "8.2": lab08_reference.double_buffered,
    "10.2": lab10_reference.on_demand,
    "10.3": lab10_reference.prefetched,
}


def begun(feeder):
    def both(*args):
        unwaited()
        yield from feeder(*args)

    return both


def late(more):
    """Right, but for what comes after each wait."""

    class Late:
        def __init__(self, model):
            self.own = lab08_reference.LateReducer(model)
            self.flush = self.own.flush

        def wait(self):
            self.own.wait()
            more()

    return Late


def sends_again():
    dist.all_reduce(torch.ones(8))


class ReadsWhatTravels(Reducer):
    """Of 6.5: a bucket is read while it is being summed."""

    def send(self, bucket):
        super().send(bucket)
        self.state.buffers[bucket].sum()


def wide_and_hasty(more):
    own = lab10.repair_case(NUMBER)
    said = {"kind": own.kind, "layer": own.layer}
    return NUMBER, said, more(lab10_reference.wide), more(lab10_reference.hasty)


OTHERS = {
    "5.4 once": (mutant(ordered, sent_again),),
    "5.6a hazard": repaired_05(0, nothing, hook=read_in_a_hook),
    "5.6b hazard": repaired_05(1, nothing, hook=read_in_a_hook),
    "6.5a hazard": (NUMBER, first_diagnosis(NUMBER), ReadsWhatTravels),
    "6.5a cpu": repaired_06("6.5a", cpu_waits),
    "6.5b unwaited": repaired_06("6.5b", not_waited_for),
    "8.3 unwaited": (late(unwaited),),
    "8.3 once": (late(sends_again),),
    "10.6 unwaited": wide_and_hasty(begun),
}
BY_NUMPY = {
    **other_kinds.RECORDED,
    "5.3": (mutant(prompt, other_kinds.left),),
    "5.4": (mutant(ordered, other_kinds.left),),
    "5.6a": repaired_05(0, other_kinds.left),
    "5.6b": repaired_05(1, other_kinds.left),
    "6.5a": repaired_06("6.5a", other_kinds.left),
    "6.5b": repaired_06("6.5b", other_kinds.left),
    "10.1": (other_kinds.returned(shard), unshard),
    "10.6": wide_and_hasty(other_kinds.yielded),
}
MADE = {
    **{
        f"{id} {law}": (after(step, end),)
        for id, step in STEPS.items()
        for law, end in ENDS.items()
        if law in find_exercise(id).laws
    },
    **{f"{id} unwaited": (begun(feeder),) for id, feeder in FEEDERS.items()},
    **OTHERS,
    **{f"{id} recorded": solution for id, solution in BY_NUMPY.items()},
    **{f"{id} order": (solution,) for id, solution in other_kinds.ORDER.items()},
}
SAYS = {"recorded": NOT_RECORDED, "order": "a set, id() or hash()"}
REPAIRS = {**lab03.REPAIRS, **lab04.REPAIRS, "8.4": lab08.REPAIR}
OFF_THE_RECORD = "test_off_the_record.py::"
# Whose sentence carries other laws, too: the solution that was seen to break this one.
SEEN = {
    "hazard": {
        "0.4": "[0.4 read early]",
        "3.1": "[NoBegin]",
        "3.1a": "[no wait]",
        "3.3a": "Flat'>]",
        "3.3b": "WaitsForTheLast'>]",
        "3.3c": "Train'>]",
        "3.4": "[NoWait]",
        "4.1": "[wholly_on_a_side_stream",
        "4.4": "[only_finishes_on_the_side",
        "4.5": "[4.5 read early]",
        "4.8a": "[4.8a read early]",
        "4.8b": "[4.8b read early]",
        "6.5b": "::test_record_stream_alone_is_no_repair",
        "8.1": "[NobodyWaits]",
        "8.2": "[FillsTooEarly]",
        "8.3": "[FromAStreamThatWaitsForNobody]",
        "8.4": "[no_edges]",
        "8.6": "[no_wait_before]",
        "10.2": "[overwrites_while_the_layer_reads",
        "10.3": "[one_slot_too_few",
        "10.5": "[overwrites_what_is_sent",
        "10.6": "[the_event_before_the_gather",
        "13.2": "[behind_its_tensor]",
        "13.3": "[before_its_users]",
    },
    "unwaited": {
        "5.6a": "[5.6a not_waited_for]",
        "5.6b": "[5.6b not_waited_for]",
        "6.5a": "[6.5a one is not waited for]",
    },
    "once": {"3.1": "[ForgetsTheLast]", "5.3": "[SentTwice]"},
    "order": {"4.1": "[in_two_halves_by_id"},
}
_KEPT = "the grader runs code of its own, made of the nodes that it handed out: "
_WAITS = f"cannot be: {_KEPT}a pass that drops a wait is refused for that"
_NODES = f"cannot be: {_KEPT}a pass that puts in what computes is refused for that"
CANNOT_BE = {
    **dict.fromkeys((("13.2", "unwaited"), ("13.3", "unwaited")), _WAITS),
    **dict.fromkeys((("13.2", "recorded"), ("13.3", "recorded")), _NODES),
}


@pytest.mark.parametrize("cell", MADE)
def test_a_kind_is_refused_by_the_sentence_that_carries_its_law(cell, faults):
    id, law = cell.split()
    exercise = find_exercise(id)
    solution = MADE[cell]
    if id in REPAIRS:
        solution = (NUMBER, truth(REPAIRS[id].truth), *solution)
    wrong = faults(judge(exercise, *solution))
    assert SAYS.get(law, "") in wrong[exercise.laws[law]]


def matrix() -> list[str]:
    """Exercise, kind, verdict, and the test that has it."""
    return ["\t".join((e.id, kind, *cell(e, kind))) for e in EVERY for kind in KINDS]


def cell(e: Exercise, kind: str) -> tuple[str, str]:
    """The verdict on the solution of this kind, and its test."""
    law = "recorded" if kind == "values" else kind
    says = e.laws.get(law, "")
    if not says:
        return f"left out: {e.left_out[law]}", ""
    if (e.id, kind) in CANNOT_BE:
        return CANNOT_BE[e.id, kind], ""
    name = "test_kinds.py::" + (
        f"test_a_kind_is_refused_by_the_sentence_that_carries_its_law[{e.id} {kind}]"
    )
    rows = [row.split("\t") for row in STORED if f"\t{e.id}\trefused: " in row]
    breaking = [(verdict, test) for test, _, verdict in rows if says in verdict]
    if made := [found for found in breaking if found[1] == name]:
        return made[0]
    by_numpy = [found for found in breaking if found[1].startswith(OFF_THE_RECORD)]
    if kind == "recorded" and by_numpy:
        return by_numpy[0]
    if looked_at := SEEN.get(kind, {}).get(e.id):
        return next(found for found in breaking if looked_at in found[1])
    alone = [
        (verdict, test)
        for verdict, test in breaking
        if verdict == f"refused: {says}" and (verdict, test) not in by_numpy
    ]
    if alone and kind != "recorded" and not (kind in LAWS and others(e, kind)):
        return alone[0]
    if why := NEVER_ALONE.get((e.id, says)):
        return f"refused with another sentence: {why}", ""
    return "", ""


def others(e: Exercise, law: str) -> list[str]:
    """The other laws that its sentence carries."""
    return [other for other in e.laws if e.laws[other] == e.laws[law] and other != law]


def test_the_matrix_is_what_the_verdicts_say_and_has_no_empty_cell():
    if WRITE:
        MATRIX.write_text("".join(f"{row}\n" for row in matrix()), "utf-8")
    assert MATRIX.read_text("utf-8").splitlines() == matrix()
    assert len(matrix()) == len(EVERY) * len(KINDS)
    empty = [row for row in matrix() if row.split("\t")[2] in ("", "passed")]
    assert not empty, "no solution of this kind, nor a reason in CANNOT_BE"
