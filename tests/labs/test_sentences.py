"""Each promised sentence has a wrong solution that makes it false, and no other.

sentences.tsv has a row for each sentence of each exercise: a test of tests/labs whose
solution is refused for that sentence alone (verdicts.tsv), or why none can be. Write it
anew with WRITE_VERDICTS=1.
"""

from __future__ import annotations

from tests.labs.conftest import STORED, TABLE, WRITE
from tests.labs.test_laws import EVERY

SENTENCES = TABLE.with_name("sentences.tsv")
# A sentence that no solution breaks alone, and why.
NEVER_ALONE = {
    ("2.8a", "there is one message, as without a profiler"): (
        "a message more lengthens the step, too"
    ),
    ("3.2", "every result is right on every rank"): (
        "a list of waits makes a result wrong only where a stream does not wait"
    ),
    ("3.2", "the step is as short as with every wait, 2 % more at most"): (
        "a wait that lengthens the step is one that the others do not need"
    ),
    ("3.6", "the CPU reads the sum only when it is there"): (
        "who reads early has gone on early"
    ),
    ("3.6", "the CPU goes on when the collective has ended, and not before"): (
        "who goes on early reads early"
    ),
    ("6.2", "each gradient is sent once a step, in steps 1, 2 and 3"): (
        "a gradient that is sent twice is a byte too many, one left out is wrong"
    ),
}


def alone() -> dict[tuple[str, str], str]:
    """By exercise and sentence, the first test that breaks it alone."""
    found: dict[tuple[str, str], str] = {}
    for row in STORED:
        test, exercise, verdict = row.split("\t")
        reason = verdict.removeprefix("refused: ")
        if reason != verdict:
            found.setdefault((exercise, reason), test)
    return found


def table() -> list[str]:
    """The rows as they should be."""
    shown = alone()
    return [
        "\t".join((e.id, says, shown.get(key) or f"never: {NEVER_ALONE.get(key, '')}"))
        for e in EVERY
        for says in e.verifies
        if (key := (e.id, says))
    ]


def test_the_table_of_sentences_is_what_the_verdicts_say():
    if WRITE:
        SENTENCES.write_text("".join(f"{row}\n" for row in table()), "utf-8")
    assert SENTENCES.read_text("utf-8").splitlines() == table()


def test_no_sentence_goes_without_a_solution_that_breaks_it_alone():
    assert not [row for row in table() if row.endswith("never: ")]


def test_a_reason_stands_only_where_no_solution_breaks_the_sentence_alone():
    promised = {(e.id, says) for e in EVERY for says in e.verifies}
    assert {*NEVER_ALONE} <= promised
    assert not {*NEVER_ALONE} & {*alone()}
