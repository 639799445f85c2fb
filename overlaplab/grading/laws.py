"""The laws that graders hold a run to. Each returns its violations; none is "it holds".

Laws read evidence and numbers; they run nothing and know no exercise.
"""

from overlaplab.grading.law_answers import diagnosis_law, regret, regret_law
from overlaplab.grading.law_origin import origin_law
from overlaplab.grading.law_overlap import (
    overlap_law,
    prompt_law,
    step_law,
    unblocked_law,
)
from overlaplab.grading.law_results import (
    TOLERANCES,
    leak_law,
    no_findings_law,
    values_law,
)
from overlaplab.grading.law_sending import bytes_law, once_law, same_order_law
from overlaplab.grading.violation import Violation

__all__ = [
    "TOLERANCES",
    "Violation",
    "bytes_law",
    "diagnosis_law",
    "leak_law",
    "no_findings_law",
    "once_law",
    "origin_law",
    "overlap_law",
    "prompt_law",
    "regret",
    "regret_law",
    "same_order_law",
    "step_law",
    "unblocked_law",
    "values_law",
]
