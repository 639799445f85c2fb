"""Names and kinds of parameters, gradients and optimizer states, given by nobody.

A module's parameters and buffers are known from its first call on, by the names that
the outermost module called gives them; a gradient from when autograd puts it into
`.grad`, or an optimizer steps with it; an optimizer's states from its step on, by its
names for them ("exp_avg fc.weight"). Names are of whole storages only: what shares one
buffer needs `name_tensor`, which also goes before these.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from overlaplab.cluster.virtual.recorder import Recorder, current_recorder
from overlaplab.streams import GRADIENT

# What puts a gradient into `.grad`: as it is, or a copy.
GRADIENT_OPERATORS = frozenset({"detach", "clone", "new_empty_strided"})


# Our hook's key among torch's, which count from 0. Dynamo guards on the hooks and their
# keys: a new key in each run would have everything compiled anew.
NAMING_HOOK = -1
_COMPILED = "_orig_mod."  # what torch.compile puts before the names of its module's


_seen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # in this run


def _before_forward(module: torch.nn.Module, _: Any) -> None:
    """`module` may be called for the first time, and not be part of another."""
    if torch.compiler.is_compiling():
        return
    rank = current_recorder()
    if rank is None or module in _seen:
        return
    for inner in module.modules():
        _seen.add(inner)
    lane = rank.current().name
    for name, parameter in module.named_parameters():
        _note_parameter(rank, parameter, name.replace(_COMPILED, ""))
    for name, buffer in module.named_buffers():
        name = name.replace(_COMPILED, "")
        rank.storages.suggest(_local(buffer), name, lane, "parameters")


@contextlib.contextmanager
def naming_parameters() -> Iterator[None]:
    """While open, the modules that a rank calls give their parameters' names."""
    modules._global_forward_pre_hooks[NAMING_HOOK] = _before_forward
    hooks = (
        register_optimizer_step_pre_hook(_note_gradients),
        register_optimizer_step_post_hook(_note_states),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        del modules._global_forward_pre_hooks[NAMING_HOOK]
        _seen.clear()


def _note_parameter(rank: Recorder, parameter: torch.Tensor, name: str = "") -> None:
    local = _local(parameter)
    kind = "parameters" if local is parameter else "shards"
    rank.storages.suggest(local, name, rank.current().name, kind)


def _note_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if (rank := current_recorder()) is None:
        return
    storages, lane = rank.storages, rank.current().name
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _note_parameter(rank, parameter)
            if parameter.grad is not None:
                name = storages.suggested(_local(parameter))
                name = GRADIENT + name if name else ""
                storages.suggest(_local(parameter.grad), name, lane, "gradients")


def _note_states(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if (rank := current_recorder()) is None:
        return
    storages, lane = rank.storages, rank.current().name
    for parameter, states in optimizer.state.items():
        if isinstance(parameter, torch.Tensor) and isinstance(states, Mapping):
            name = storages.suggested(_local(parameter))
            for key, value in states.items():
                if isinstance(value, torch.Tensor):
                    called = f"{key} {name}".strip()
                    storages.suggest(_local(value), called, lane, "states")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def name_gradient(recorder: Recorder, value: torch.Tensor) -> None:
    """`value` is made by one of GRADIENT_OPERATORS: is it a parameter's gradient?"""
    if torch._C._current_graph_task_id() == -1:
        return
    node = torch._C._current_autograd_node()
    variable = getattr(node, "variable", None)  # AccumulateGrad has one
    if variable is None:
        return
    if isinstance(variable, torch.nn.Parameter):
        _note_parameter(recorder, variable)
    name = recorder.storages.suggested(_local(variable))
    name = GRADIENT + name if name else ""
    recorder.storages.suggest(value, name, recorder.current().name, "gradients")
