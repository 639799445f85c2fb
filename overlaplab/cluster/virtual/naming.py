"""Names of parameters and their gradients, for reports: nobody has to give them.

A module's parameters are known from its first call on, by the names that the outermost
module called gives them; a gradient from when autograd puts it into `.grad`. Whole
storages only: what shares one buffer needs `name_tensor`, which also goes before these.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from overlaplab.cluster.virtual.recorder import Recorder
from overlaplab.streams import GRADIENT

# What puts a gradient into `.grad`: as it is, or a copy.
GRADIENT_OPERATORS = frozenset({"detach", "clone", "new_empty_strided"})


@contextlib.contextmanager
def naming_parameters(recorder: Callable[[], Recorder | None]) -> Iterator[None]:
    """While open, the modules that a rank calls give their parameters' names.

    Args:
        recorder: the calling thread's, None where it is no rank.
    """
    seen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def note(module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or module in seen:
            return
        rank = recorder()
        if rank is None:
            return
        for inner in module.modules():
            seen.add(inner)
        lane = rank.current().name
        for name, parameter in module.named_parameters():
            local = getattr(parameter, "_local_tensor", parameter)  # of a DTensor
            rank.storages.suggest(local, name, lane)

    hook = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        hook.remove()


def name_gradient(recorder: Recorder, value: torch.Tensor) -> None:
    """`value` is made by one of GRADIENT_OPERATORS: is it a parameter's gradient?"""
    if torch._C._current_graph_task_id() == -1:
        return
    node = torch._C._current_autograd_node()
    variable = getattr(node, "variable", None)  # AccumulateGrad has one
    if variable is None:
        return
    variable = getattr(variable, "_local_tensor", variable)
    name = recorder.storages.suggested(variable)
    if name:
        recorder.storages.suggest(value, GRADIENT + name, recorder.current().name)
