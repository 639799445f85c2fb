"""Random steps, a thousand and more: ranks never differ without a word (hypothesis).

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
from tests.ranks import On, everywhere, values_on
from tests.techniques.data_parallel.misuse import Stop, weight

Ranks = tuple[int, ...] | None  # None: all
Action = tuple[str, Ranks]  # what, and on which ranks
ALL: tuple[Ranks, ...] = (None,)
SOME_OR_ALL: tuple[Ranks, ...] = (None, (0,), (1,))
KINDS = (
    *("micro", "forward", "backward", "wait", "update", "zero", "none"),
    *("freeze", "thaw", "fail", "abandon", "replace", "remove"),
)
ALIKE = dict.fromkeys(KINDS, ALL)
# Calls that all ranks must make are made by all.
EVERYTHING = ALIKE | dict.fromkeys(
    ("forward", "backward", "update", "zero", "freeze", "fail", "replace"), SOME_OR_ALL
)


def actions(kinds: dict[str, tuple[Ranks, ...]]) -> st.SearchStrategy[Action]:
    return st.sampled_from(sorted(kinds)).flatmap(
        lambda kind: st.tuples(st.just(kind), st.sampled_from(kinds[kind]))
    )


def net() -> nn.Sequential:
    return nn.Sequential(weight(), Stop(), weight(), weight())


Seen = tuple[float | None, float | None, bool]


def values(parameters: list[nn.Parameter]) -> list[float | None]:
    return [None if p.grad is None else p.grad.item() for p in parameters]


def play(script: list[Action]) -> list[list[Seen]]:
    """For each `wait`, by parameter: `.grad`, what it was alone, whether that travels.

    Of what is frozen and was not reached in the step it is an old one and stays here.
    """
    model, twin, rank = net(), net(), dist.get_rank()
    reducer = BucketedReducer(model, bucket_mib=1e-6)
    params, alone = list(model.parameters()), list(twin.parameters())
    optimizer = torch.optim.SGD(params, lr=0.01)
    seen: list[list[Seen]] = []
    reached = [False] * len(params)  # by a backward of this step

    def backward(number: int, fails: bool = False) -> None:
        for mine, other in zip(alone, params, strict=True):
            mine.data.copy_(other.data)
            mine.requires_grad_(other.requires_grad)
        reached[:] = [
            was or p.requires_grad for was, p in zip(reached, params, strict=True)
        ]
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
                sends = [
                    was or p.requires_grad
                    for was, p in zip(reached, params, strict=True)
                ]
                seen.append(
                    list(zip(values(params), values(alone), sends, strict=True))
                )
            reached[:] = [False] * len(params)
            for mine, other in zip(alone, params, strict=True):
                mine.grad = None if other.grad is None else other.grad.clone()
        elif ranks is not None and rank not in ranks:
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


def check(on: On, script: list[Action]) -> None:
    """Equal on all ranks, and right; what none of them sent is left alone."""
    seen = values_on(on, play, script)
    assert len(set(map(len, seen))) == 1
    for waits in zip(*seen, strict=True):
        for of_ranks in zip(*waits, strict=True):
            sent = [alone for _, alone, sends in of_ranks if sends]
            if not sent:
                assert all(found == alone for found, alone, _ in of_ranks)
                continue
            (found,) = {found for found, *_ in of_ranks}
            gradients = [alone for alone in sent if alone is not None]
            assert (found is None) == (not gradients)
            if found is not None:
                right = sum(gradients) / on.ranks
                assert abs(found - right) <= 1e-4 * abs(found) + 1e-6


# A step as it should be: anything before, one backward, wait, update, zero.
right_steps = st.lists(
    st.tuples(
        st.lists(actions({"micro": ALL, "forward": SOME_OR_ALL}), max_size=3),
        st.sampled_from(["backward", "micro"]),
        st.lists(actions({"forward": SOME_OR_ALL}), max_size=1),
        st.sampled_from(["zero", "none", "update"]),
        st.sampled_from(["", "freeze", "thaw"]),
    ),
    min_size=1,
    max_size=4,
)


def script_of(steps: Any) -> list[Action]:
    script: list[Action] = []
    for before, last, after, then, change in steps:
        script += [*before, (last, None), *after, ("wait", None)]
        script += [("update", None), (then, None)]
        if then == "update":
            script.append(("none", None))
        if change:
            script.append((change, None))
    return script


# How many scripts; in gloo's processes few: the order of calls is the same there.
IN_ORDER = {"virtual-2": 200, "virtual-3": 100, "gloo-2": 30, "gloo-3": 30}
IN_ANY = {"virtual-2": 375, "virtual-3": 325, "gloo-2": 30, "gloo-3": 30}


@everywhere
def test_steps_in_order_are_right_on_every_rank(on: On) -> None:
    @given(right_steps)
    @settings(max_examples=IN_ORDER[str(on)])
    def law(steps: Any) -> None:
        check(on, script_of(steps))

    law()


@everywhere
def test_steps_in_any_order_are_right_or_refused(on: On) -> None:
    """Where one process alone is refused, the others are waited for: all are alike."""
    kinds = EVERYTHING if on.cluster == "virtual" else ALIKE

    @given(st.lists(actions(kinds), max_size=12))
    @example([("backward", None), ("freeze", kinds["freeze"][-1]), ("abandon", None)])
    @example([("micro", None), ("freeze", kinds["freeze"][-1]), ("wait", None)])
    @settings(max_examples=IN_ANY[str(on)])
    def law(script: list[Action]) -> None:
        with contextlib.suppress(OverlaplabError):
            check(on, [*script, ("wait", None)])

    law()
