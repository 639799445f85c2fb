"""Kinds of wrong programs against exercises: matrix.tsv has a verdict in every cell.

A kind is a law of programs that is broken. Two kinds are made here of the course's own
solutions: the CPU waits when all is done, and a message that nobody waits for. For the
others the cell names the solution that breaks the law's sentence (sentences.tsv), and
where an exercise leaves the law out, its reason. Write it anew with WRITE_VERDICTS=1.
"""

from __future__ import annotations

import pytest

import overlaplab.streams as streams
from overlaplab.grading import find_exercise, judge
from overlaplab.grading.exercise import LAWS
from overlaplab_course.lab00 import reference as lab00
from overlaplab_course.lab03 import checks as lab03
from overlaplab_course.lab03 import reference as lab03_reference
from overlaplab_course.lab04 import checks_extra as lab04
from overlaplab_course.lab04 import reference as lab04_reference
from overlaplab_course.lab06 import reference as lab06_reference
from tests.labs.conftest import STORED, TABLE, WRITE
from tests.labs.test_alone import NUMBER, after, small_sums, truth, unwaited
from tests.labs.test_alone_reducers import (
    cpu_waits,
    mutant,
    not_waited_for,
    ordered,
    prompt,
)
from tests.labs.test_laws import EVERY
from tests.labs.test_sentences import NEVER_ALONE, alone

MATRIX = TABLE.with_name("matrix.tsv")
ENDS = {"cpu": streams.synchronize, "unwaited": unwaited}
STEPS = {
    "0.4": lab00.step,
    "3.1": lab03_reference.issue,
    "3.3a": lab03_reference.send_gradients,
    "3.3b": lab03_reference.look_up,
    "3.3c": lab03_reference.train,
    "4.2": lab04_reference.two_sums,
    "4.3": lab04_reference.experts,
    "4.5": small_sums,
    "4.8a": lab04_reference.blocks,
    "4.8b": lab04_reference.accumulate,
    "6.3": lab06_reference.finish,
}
REDUCERS = {"5.3": prompt, "5.4": ordered}
MADE = {
    f"{id} {law}": (after(step, end),)
    for id, step in STEPS.items()
    for law, end in ENDS.items()
} | {
    f"{id} {law}": (mutant(make, more),)
    for id, make in REDUCERS.items()
    for law, more in (("cpu", cpu_waits), ("unwaited", not_waited_for))
}
REPAIRS = {**lab03.REPAIRS, **lab04.REPAIRS}


@pytest.mark.parametrize("cell", MADE)
def test_a_kind_is_refused_by_the_sentence_that_carries_its_law(cell, faults):
    id, law = cell.split()
    exercise = find_exercise(id)
    solution = MADE[cell]
    if id in REPAIRS:
        solution = (NUMBER, truth(REPAIRS[id].truth), *solution)
    assert exercise.laws[law] in faults(judge(exercise, *solution))


def matrix() -> list[str]:
    """Exercise, law, verdict, and the test that has it."""
    made = {row.split("\t")[0]: row.split("\t")[2] for row in STORED}
    name = "test_kinds.py::" + (
        "test_a_kind_is_refused_by_the_sentence_that_carries_its_law[{} {}]"
    )
    shown, rows = alone(), []
    for e in EVERY:
        for law in LAWS:
            test, says = name.format(e.id, law), e.laws.get(law, "")
            if not says:
                test, verdict = "", f"left out: {e.left_out[law]}"
            elif test in made:
                verdict = made[test]
            else:
                test = shown.get((e.id, says), "")
                never = (
                    f"refused with another sentence: {NEVER_ALONE.get((e.id, says))}"
                )
                verdict = f"refused: {says}" if test else never
            rows.append("\t".join((e.id, law, verdict, test)))
    return rows


def test_the_matrix_is_what_the_verdicts_say_and_has_no_empty_cell():
    if WRITE:
        MATRIX.write_text("".join(f"{row}\n" for row in matrix()), "utf-8")
    assert MATRIX.read_text("utf-8").splitlines() == matrix()
    assert len(matrix()) == len(EVERY) * len(LAWS)
    assert all(row.split("\t")[2] not in ("", "passed") for row in matrix())
