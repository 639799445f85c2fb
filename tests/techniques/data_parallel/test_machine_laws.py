"""Random steps: ranks never differ without a word (hypothesis).

Beside the model each rank trains a twin without a reducer, on the same values: the
mean of the twins' gradients is what `wait` must leave in `.grad` on every rank.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from overlaplab.errors import OverlaplabError
from overlaplab.techniques.data_parallel import BucketedReducer
from tests.ranks import values_of
from tests.techniques.data_parallel.misuse import Stop, weight

Action = tuple[str, tuple[int, ...]]  # what, and on which ranks (or which layer)
BOTH = ((0, 1),)
ONE_OR_BOTH = ((0, 1), (0,), (1,))
RIGHT: dict[str, tuple[tuple[int, ...], ...]] = {
    "micro": BOTH,
    "forward": ONE_OR_BOTH,
    "backward": BOTH,
    "wait": BOTH,
    "update": BOTH,
    "zero": BOTH,
    "none": BOTH,
    "freeze": BOTH,
    "thaw": BOTH,
}
WRONG = {
    "fail": ONE_OR_BOTH,
    "abandon": BOTH,
    "freeze": ONE_OR_BOTH,
    "backward": ONE_OR_BOTH,
    "update": ONE_OR_BOTH,
    "zero": ONE_OR_BOTH,
    "replace": ONE_OR_BOTH,
    "remove": BOTH,
}


def actions(kinds: dict[str, tuple[tuple[int, ...], ...]]) -> st.SearchStrategy[Action]:
    return st.sampled_from(sorted(kinds)).flatmap(
        lambda kind: st.tuples(st.just(kind), st.sampled_from(kinds[kind]))
    )


STEP = st.lists(st.sampled_from(["micro", "forward"]), max_size=2)
EVERYTHING = {
    kind: tuple(dict.fromkeys((*RIGHT.get(kind, ()), *WRONG.get(kind, ()))))
    for kind in (*RIGHT, *WRONG)
}


def net() -> nn.Sequential:
    return nn.Sequential(weight(), Stop(), weight(), weight())


def play(script: list[Action]) -> list[list[tuple[float | None, float]]]:
    """For each `wait`: (what `.grad` is, what it was here alone), by parameter."""
    model, twin, rank = net(), net(), dist.get_rank()
    reducer = BucketedReducer(model, bucket_mib=1e-6)
    params, alone = list(model.parameters()), list(twin.parameters())
    optimizer = torch.optim.SGD(params, lr=0.01)
    seen: list[list[tuple[float | None, float]]] = []

    def backward(number: int, fails: bool = False) -> None:
        for mine, other in zip(alone, params, strict=True):
            mine.data.copy_(other.data)
            mine.requires_grad_(other.requires_grad)
        x = torch.full((1, 1), 1.0 + rank + number)
        for each in (model, twin):
            each[1].now = fails
            out = each(x).sum()
            if out.requires_grad:
                with contextlib.suppress(ZeroDivisionError):
                    out.backward()

    for number, (kind, ranks) in enumerate(script):
        if kind in ("wait", "abandon", "remove"):
            if kind == "abandon":
                reducer.abandon()
                model.zero_grad()  # as it asks for
            elif kind == "remove":
                reducer.remove()
                return seen
            else:
                reducer.wait()
                seen.append(
                    [
                        (
                            None if p.grad is None else p.grad.item(),
                            0.0 if t.grad is None else t.grad.item(),
                        )
                        for p, t in zip(params, alone, strict=True)
                    ]
                )
            for mine, other in zip(alone, params, strict=True):
                mine.grad = None if other.grad is None else other.grad.clone()
        elif rank not in ranks:
            continue
        elif kind == "backward":
            backward(number)
        elif kind == "fail":
            backward(number, fails=True)
        elif kind == "micro":
            with reducer.no_sync():
                backward(number)
        elif kind == "forward":
            model(torch.ones(1, 1))
        elif kind == "update":
            optimizer.step()
        elif kind in ("zero", "none"):
            for each in (model, twin):
                each.zero_grad(set_to_none=kind == "none")
        elif kind == "replace" and params[0].grad is not None:
            params[0].grad = params[0].grad.clone()
        elif kind in ("freeze", "thaw"):
            params[1].requires_grad_(kind == "thaw")
    return seen


def check(script: list[Action]) -> None:
    """Equal and right on both ranks."""
    first, second = values_of(play, script)
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        for (mine, alone), (theirs, their_own) in zip(one, other, strict=True):
            assert mine == theirs
            if mine is not None:
                assert abs(mine - (alone + their_own) / 2) <= 1e-4 * abs(mine) + 1e-6


# A step as it should be: anything before, one backward, wait, update, zero.
right_steps = st.lists(
    st.tuples(
        st.lists(actions({k: RIGHT[k] for k in ("micro", "forward")}), max_size=3),
        st.sampled_from(["backward", "micro"]),
        st.lists(actions({"forward": ONE_OR_BOTH}), max_size=1),
        st.sampled_from(["zero", "none", "update"]),
        st.sampled_from(["", "freeze", "thaw"]),
    ),
    min_size=1,
    max_size=4,
)


def script_of(steps: Any) -> list[Action]:
    script: list[Action] = []
    for before, last, after, then, change in steps:
        script += [*before, (last, (0, 1)), *after, ("wait", (0, 1))]
        script += [("update", (0, 1)), (then, (0, 1))]
        if then == "update":
            script.append(("none", (0, 1)))
        if change:
            script.append((change, (0, 1)))
    return script


@given(right_steps)
@settings(max_examples=350)
def test_steps_in_order_are_right_on_every_rank(steps: Any) -> None:
    check(script_of(steps))


@given(st.lists(actions(EVERYTHING), max_size=12))
@example([("backward", (0, 1)), ("freeze", (0,)), ("abandon", (0, 1))])
@settings(max_examples=650)
def test_steps_in_any_order_are_right_or_refused(script: list[Action]) -> None:
    with contextlib.suppress(OverlaplabError):
        check([*script, ("wait", (0, 1))])
