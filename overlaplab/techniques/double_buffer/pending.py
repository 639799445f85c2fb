"""An average that has not been given yet, as a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from overlaplab.techniques.data_parallel.agreement import Average
from overlaplab.techniques.model_facts import ParameterInfo

State = dict[str, dict[str, Tensor] | None]


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
