"""The average of a step: off the wire, in a checkpoint, in `.grad` and to be zeroed."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from overlaplab import streams
from overlaplab.errors import MismatchError
from overlaplab.techniques.arrivals import Arrivals
from overlaplab.techniques.data_parallel.agreement import Average
from overlaplab.techniques.data_parallel.guard import Guard
from overlaplab.techniques.groups import Group, exchange_texts
from overlaplab.techniques.in_flight import InFlight
from overlaplab.techniques.model_facts import ModelFacts, ParameterInfo

_ZERO = (
    "Zero the gradients in every step (optimizer.zero_grad()), and call "
    "reducer.wait() once a step."
)

State = dict[str, dict[str, Tensor] | None]


def of(in_flight: InFlight) -> list[Average]:
    """Of what had a gradient here, after `in_flight.finish()`."""
    return [
        pair
        for payload in in_flight.payloads
        for pair in zip(payload.holders, payload.grads, strict=True)
    ]


@dataclass(frozen=True)
class Given:
    """A gradient that was left in `.grad`; it is not kept alive.

    Args:
        info: of its parameter.
        grad: the gradient.
        version: autograd's count of writes, then.
    """

    info: ParameterInfo
    grad: weakref.ref[Tensor]
    version: int

    @classmethod
    def of(cls, average: list[Average]) -> Given:
        """One of those that arrive last: when a backward begins, it is as it was."""
        info, _ = min(average, key=lambda pair: pair[0].index)
        grad = info.parameter.grad
        assert grad is not None
        return cls(info, weakref.ref(grad), grad._version)

    @property
    def is_there(self) -> bool:
        """Whether it is in `.grad` and nobody has written it, to zero it for one."""
        grad = self._kept()
        return grad is not None and grad._version == self.version

    def doubt(self) -> Doubt | None:
        """If it is in `.grad` and was written: whether to zero it. Asks the GPU."""
        grad = self._kept()
        if grad is None or is_fake(grad):
            return None
        is_left, asked = grad.detach().any(), streams.Event()
        asked.record()
        return Doubt(self.info, is_left, asked)

    def _kept(self) -> Tensor | None:
        grad = self.info.parameter.grad
        return grad if grad is self.grad() else None


@dataclass(frozen=True)
class Doubt:
    """Whether a gradient that was written is zero: known on the GPU, a moment later.

    Args:
        info: of its parameter.
        is_left: one bool on the device: it is not zero.
        asked: an event after which that is known.
    """

    info: ParameterInfo
    is_left: Tensor
    asked: Any

    def holds(self, aside: Any) -> bool:
        """Whether it is not. The CPU waits for `asked`, and for nothing later.

        Args:
            aside: a stream on which nothing else runs.
        """
        aside.wait_event(self.asked)
        with streams.stream(aside):
            return bool(self.is_left.item())


class LateGuard(Guard):
    """Refuses also to send an average once more, and steps in a CUDA graph."""

    def __init__(self, facts: ModelFacts, group: Group) -> None:
        super().__init__(facts, group)
        self._first = facts.parameters[0].parameter
        self._given: Given | None = None
        self._doubt: Doubt | None = None
        self._aside: Any = None

    def gave(self, average: list[Average] | None) -> None:
        """It was left in `.grad`, and is to be zeroed before the next backward."""
        self._given = Given.of(average) if average else None

    def backward_begins(self, arrivals: Arrivals) -> None:
        if not arrivals.is_open:
            self._refuse_kept("this backward", by=arrivals.first)
        super().backward_begins(arrivals)

    def step_opens(self, number: int) -> None:
        if self._first.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a step of DoubleBufferedReducer cannot be captured in a CUDA graph: "
                "its messages are on the way when it ends. Use BucketedReducer, or run "
                "the step without a graph"
            )
        super().step_opens(number)

    def step_ends(self, arrivals: Arrivals) -> None:
        if not arrivals.is_open:
            self._refuse_kept("reducer.wait()", by=None)
        self._refuse_written()
        super().step_ends(arrivals)

    def _refuse_kept(self, what: str, by: int | None) -> None:
        """Raise if `.grad` still has an average as it was given.

        One that was written (zeroed or clipped) is looked at, unless the gradient of
        parameter `by`, which is there, is in it already.
        """
        given, self._doubt = self._given, None
        if given is not None and given.is_there:
            raise RuntimeError(
                f"{what} finds in .grad the average that reducer.wait() or flush() "
                f"left there, and would send it once more. {_ZERO}"
            )
        if given is not None and given.info.index != by:
            self._doubt = given.doubt()

    def _refuse_written(self) -> None:
        """Raise if what was written into an average did not zero it."""
        doubt, self._doubt = self._doubt, None
        if doubt is None:
            return
        self._aside = self._aside or streams.Stream()
        if doubt.holds(self._aside):
            raise RuntimeError(
                f"the gradient of {doubt.info.name} was added to the average that the "
                "last reducer.wait() or flush() left in .grad, which had been written "
                f"(clipped?) and not zeroed. {_ZERO}"
            )


def saved(average: list[Average] | None) -> State:
    """Copies, under "average"; None there if there is no average."""
    if average is None:
        return {"average": None}
    return {"average": {info.name: grad.detach().clone() for info, grad in average}}


def loaded(state: State, parameters: Sequence[ParameterInfo]) -> list[Average] | None:
    """Copies of what `saved` made, in the order of `parameters`.

    Raises:
        ValueError: not such a state; an unknown name; another shape or dtype than the
            parameter's.
    """
    if not isinstance(state, dict) or set(state) != {"average"}:
        found = (
            f"a dict of {sorted(map(str, state))}"
            if isinstance(state, dict)
            else repr(state)
        )
        raise ValueError(
            f"state is {found}; expected what the state_dict() of a "
            'DoubleBufferedReducer gives, with the one key "average"'
        )
    average = state["average"]
    if average is None:
        return None
    if not isinstance(average, dict):
        raise ValueError(
            f'the state has {average!r} under "average"; expected a dict of tensors by '
            "parameter name, or None"
        )
    if unknown := average.keys() - {info.name for info in parameters}:
        raise ValueError(
            f"the state has an average of {min(map(str, unknown))}, which is no "
            "parameter of this model. Load the state that was saved with it."
        )
    return [_loaded(i, average[i.name]) for i in parameters if i.name in average]


def agree_on(average: list[Average] | None, group: Group, call: str) -> None:
    """Raise MismatchError unless all ranks have averages of the same parameters.

    Through the store, by `call`, which is new each time. Collective; the CPU waits.
    """
    names = None if average is None else [info.name for info, _ in average]
    everyone = list(map(json.loads, exchange_texts(group, call, json.dumps(names))))
    for rank, its in enumerate(everyone):
        if its != everyone[0]:
            first, other = set(everyone[0] or ()), set(its or ())
            name = min(first ^ other, default="a step that no rank used")
            have, lack = (0, rank) if name in first or its is None else (rank, 0)
            raise MismatchError(
                f"{call}: rank {have} loads an average of {name}, rank {lack} does "
                "not. Load the same state on every rank."
            )


def _loaded(info: ParameterInfo, average: Tensor) -> Average:
    got, expected = _describe(average), _describe(info.parameter)
    if got != expected:
        raise ValueError(
            f"the average of {info.name} is {got}; its parameter is {expected}. Load "
            "the state that was saved with this model."
        )
    into = torch.empty_like(info.parameter, requires_grad=False)
    return info, into.copy_(average.detach())


def _describe(tensor: object) -> str:
    if not isinstance(tensor, Tensor):
        return repr(tensor)
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
