"""The grader of lab 16's comparison, 16.5: pairs of runs, some of them unlike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from overlaplab.grading import Sheet
from overlaplab.grading.answered import as_answer, as_number
from overlaplab_course.lab16 import trained
from overlaplab_course.lab16.chain_checks import LAB
from overlaplab_course.lab16.trained import Model, Trained

SAVED, EXTRA, EQUAL = LAB.sentences("16.5")
MIB = 2**20
Compare = Callable[[Trained, Trained], Any]
Pair = tuple[str, Trained, Trained, bool]


@lru_cache(maxsize=1)
def pairs() -> tuple[Pair, ...]:
    """(what they are, one run, another, whether their gradients are equal)."""
    return tuple(_pairs())


def _pairs() -> Iterator[Pair]:
    six = Model(6)
    plain = trained.seen(trained.train(None, six))
    every = trained.seen(trained.train(trained.again(range(6)), six))
    yield "six blocks, each computed again", plain, every, True
    yield "the same two the other way round", every, plain, True
    large = Model(2, vocab_size=2048)
    plain, again = (
        trained.seen(trained.train(how, large)) for how in (None, trained.again([0]))
    )
    yield "a large vocabulary, the first of two blocks again", plain, again, True
    *names, last = again.grads
    off = again.grads[last].clone()
    off.view(-1)[0] = torch.nextafter(off.view(-1)[0], torch.tensor(math.inf))
    yield "one number off in its last bit", plain, _with(again, {last: off}), False
    less = {name: again.grads[name] for name in names}
    yield "one without a gradient", plain, replace(again, grads=less), False
    more = {**again.grads, "more": torch.zeros(2)}
    yield "one with a gradient more", plain, replace(again, grads=more), False
    none = torch.full_like(off, math.nan)
    yield "one with a NaN", plain, _with(again, {last: none}), False


def _with(run: Trained, grads: Mapping[str, Tensor]) -> Trained:
    return replace(run, grads={**run.grads, **grads})


@LAB.grader("16.5")
def grade_compare(sheet: Sheet, compare: Compare) -> None:
    """Three numbers of each pair."""
    for case, plain, other, equal in pairs():
        sheet.ran(f"compare() of {case}")
        answer = compare(plain, other)
        saved, extra, same = _three(answer)
        most = [max(size for _, size in run.curve) for run in (plain, other)]
        rights = (
            (most[0] - most[1]) / MIB,
            100 * (other.step_ns / plain.step_ns - 1),
        )
        for sentence, said, right in zip(
            (SAVED, EXTRA), (saved, extra), rights, strict=True
        ):
            number = as_number(said)
            good = number is not None and math.isclose(
                number, right, rel_tol=1e-3, abs_tol=5e-3
            )
            told: dict[str, Any] = {
                "case": case,
                "said": f"{said!r:.40}",
                "right": right,
            }
            LAB.refuse(sheet, sentence, not good, **told)
        wrong = same is not equal
        LAB.refuse(
            sheet, EQUAL, wrong, case=case, said=f"{same!r:.40}", right=str(equal)
        )
    sheet.stop_if_wrong()


def _three(answer: object) -> tuple[Any, Any, Any]:
    """What was returned, as Python's own.

    Raises:
        ValueError: it is no three things.
    """
    given = as_answer(answer)
    is_row = isinstance(given, Iterable) and not isinstance(given, str | Mapping)
    three = tuple(islice(given, 4)) if is_row else ()
    if len(three) != 3:
        raise ValueError(
            f"compare returned {answer!r:.100}; expected (saved MiB, extra %, equal)"
        )
    saved, extra, same = map(as_answer, three)
    return saved, extra, same
