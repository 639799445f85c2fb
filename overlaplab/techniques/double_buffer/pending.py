"""An average that has not been given yet, in a checkpoint; and one that has been."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from overlaplab.techniques.data_parallel.agreement import Average
from overlaplab.techniques.model_facts import ParameterInfo

State = dict[str, dict[str, Tensor] | None]


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
        grad = self.info.parameter.grad
        return (
            grad is not None and grad is self.grad() and grad._version == self.version
        )


def saved(average: list[Average] | None) -> State:
    """Copies, under "average"; None there if there is no average."""
    if average is None:
        return {"average": None}
    return {"average": {info.name: grad.detach().clone() for info, grad in average}}


def loaded(state: State, parameters: Sequence[ParameterInfo]) -> list[Average] | None:
    """Copies of what `saved` made, for the `parameters` with those names.

    Raises:
        ValueError: not such a state; an unknown name; another shape or dtype than the
            parameter's.
    """
    if not isinstance(state, dict) or set(state) != {"average"}:
        found = f"a dict of {sorted(state)}" if isinstance(state, dict) else repr(state)
        raise ValueError(
            f"state is {found}; expected what the state_dict() of a "
            'DoubleBufferedReducer gives, with the one key "average"'
        )
    if state["average"] is None:
        return None
    known = {info.name: info for info in parameters}
    return [_loaded(known.get(name), name, t) for name, t in state["average"].items()]


def _loaded(info: ParameterInfo | None, name: str, average: Tensor) -> Average:
    if info is None:
        raise ValueError(
            f"the state has an average of {name}, which is no parameter of this model. "
            "Load the state that was saved with it."
        )
    got, expected = _describe(average), _describe(info.parameter)
    if got != expected:
        raise ValueError(
            f"the average of {name} is {got}; its parameter is {expected}. Load the "
            "state that was saved with this model."
        )
    into = torch.empty_like(info.parameter, requires_grad=False)
    return info, into.copy_(average.detach())


def _describe(tensor: object) -> str:
    if not isinstance(tensor, Tensor):
        return repr(tensor)
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
