"""What a learner says: choices by what they lose, diagnoses by what the run shows."""

from __future__ import annotations

from collections.abc import Mapping

from overlaplab.grading.violation import Violation


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
        return [Violation("regret", "no case was judged")]
    return [
        Violation(
            "regret",
            f"{case}: your choice loses {value:.0%} of what there was to gain",
            f"at most {at_most:.0%}",
        )
        for case, value in sorted(regrets.items(), key=lambda item: -item[1])
        if not value <= at_most  # also catches nan
    ]


def diagnosis_law(
    said: Mapping[str, object], truth: Mapping[str, object]
) -> list[Violation]:
    """Every field of `truth` (kind, rank, step, span or tensor, number) was said right.

    A number in `truth` under a key that ends in "_ns", "_us" or "_ms" is met within
    3 %, one under "_share" or "_percent" within 3 points; strings by their words,
    without case; a set or frozenset by any of its members; everything else by ==.
    """
    found = []
    for key, right in truth.items():
        answer = said.get(key)
        if not _answers(key, answer, right):
            found.append(
                Violation(
                    "diagnosis",
                    f"{key}: {answer!r} is not what the run shows"
                    if key in said
                    else f"{key}: no answer",
                    f"the right {key} of this run",
                )
            )
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
