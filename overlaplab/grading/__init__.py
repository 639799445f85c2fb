"""Grading rests on evidence: values on every rank, the program, the timeline.

For learners: `check("6.3", BucketedReducer)`. For instructors: `grade_notebook(path)`.

How to declare an exercise:

    from overlaplab.grading import Sheet, exercise
    from overlaplab.grading import fixtures, laws

    @exercise(
        "90.1",                       # LAB.NUMBER, of a lab that nobody else has
        title="The reducer",
        solution="make_reducer",      # the name in the notebook; several: a tuple
        verifies=(                    # every sentence that the grader must write
            "gradients equal one process on the whole batch",
            "no operator races another",
        ),
        points=3,
    )
    def grade_reducer(sheet: Sheet, make_reducer: fixtures.MakeReducer) -> None:
        fixture = fixtures.clean_fixture()
        sheet.ran("3 steps of 8 layers on 2 ranks, chalk")
        trained = fixtures.train(fixture, make_reducer, steps=3, world_size=2)
        sheet.show(trained.run.timeline, step_ns=trained.evidence.step_ns[1])
        grads, _ = fixtures.oracle(fixture, steps=3, world_size=2)
        for step in (1, 3):
            sheet.verify(
                "gradients equal one process on the whole batch",
                laws.values_law(trained.gradients[step - 1], grads[step - 1],
                                step=step),
            )
        sheet.verify("no operator races another",
                     laws.no_findings_law(trained.run.warnings, kinds=("hazard",)))

What is text or data may stand in a file instead: see `overlaplab.grading.declared`.
For settings of knobs, broken programs and results of a run there are `forms`.

A lab of your own needs nothing in this repository. Its package names the module with
the graders in pyproject.toml, and is installed (`pip install -e .`) beside this one:

    [project.entry-points."overlaplab.labs"]
    lab90 = "my_course.checks"

Its notebook defines `make_reducer` in one cell and checks it in another:

    from overlaplab.grading import check, solved
    check("90.1", make_reducer)
    if solved("90.1"):  # a cell that shows the answer
        draw_the_reference()

`overlaplab grade NOTEBOOK` knows the lab by the numbers in these calls, and marks every
exercise of it. A function of an installed course is no answer: a learner's own must be
defined in the notebook, or in a module beside it.

Rules: an exercise passes only if every sentence of `verifies` was written and true
(written twice: both times). A grader that raises is a fail, and so is one that forgets.
Exceptions of the learner's code need no care: let them pass, they become the verdict.
Graders run where no object of the learner's is: see `overlaplab.grading.stage`.
`check(id, *objects)` calls `grade(sheet, *objects)`, in the order of `solution`.

Evidence (`Trained.evidence`; or `reading.collect_evidence(program, timeline)` of a run
that called `watch(model)` before the reducer was made, steps in `streams.step(k)`):
`.gradients` (ready_ns, sent_bytes, sends), `.sends` (covers, stale_bytes, pack),
`.bucket(names, step)` (ready, armed, pack, previous end, start), `.step_ns`, `.updates`
(bytes of each parameter that each rank's optimizer updated, and how often).

Laws return lists of `Violation` (empty: it holds): prompt_law, step_law, once_law,
bytes_law, updates_law, same_order_law, no_findings_law, leak_law, values_law,
regret_law, diagnosis_law; `regret` is a number. `overlap_law` is what an exercise on
overlap asks: prompt, and no wait in the backward pass, or else a step as fast as the
reference's.
"""

from typing import TYPE_CHECKING

from overlaplab.grading.exercise import Exercise as Exercise
from overlaplab.grading.exercise import Sheet as Sheet
from overlaplab.grading.exercise import exercise as exercise
from overlaplab.grading.exercise import exercises as exercises
from overlaplab.grading.exercise import find_exercise as find_exercise
from overlaplab.grading.kept import import_later
from overlaplab.grading.kept import solved as solved
from overlaplab.grading.verdict import CheckResult as CheckResult
from overlaplab.grading.verdict import Verdict as Verdict
from overlaplab.grading.violation import Violation as Violation

if TYPE_CHECKING:
    from overlaplab.grading.judging import CheckFailed as CheckFailed
    from overlaplab.grading.judging import check as check
    from overlaplab.grading.judging import judge as judge

# `judging` imports torch; who grades in other processes need not.
__getattr__ = import_later(
    __name__, {name: f"judging:{name}" for name in ("CheckFailed", "check", "judge")}
)
