"""torch.compile in the threads of ranks.

Dynamo keeps what it compiled at a code object. Ranks share those of imported modules
(a model's `forward`), so the first rank compiles for all, and what it compiled serves
every rank that passes its guards: parameters are inputs of a graph. A function of a
notebook is copied, code and all (copying.py), and compiles on each rank.

Two things would be wrong then that are right in processes. A rank's number, which
Dynamo takes for a constant, would be the first rank's on all: it becomes a guard. And
ranks would reach the limit of recompiles together, behind which torch goes on without
the compiler: what a backend put into the graph would be missing, without a word. So the
limit is higher, and an error.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch._guards import TracingContext
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules import module as modules

from overlaplab.cluster.virtual.naming import NAMING_HOOK
from overlaplab.cluster.virtual.patching import in_ranks, patched
from overlaplab.cluster.virtual.recorder import Recorder

_CONFIG = "torch._dynamo.config"
_A_RANK = 8  # compiles of one function: torch's limit for a process
_AT_LEAST = 64  # where there are few ranks
_IN_ALL = 32  # times as many, over all objects: torch's factor
_EVALUATES = "/torch/_dynamo/variables/"  # calls of a function that is traced


@contextlib.contextmanager
def compiling_ranks(num_ranks: int) -> Iterator[Callable[[], None]]:
    """While open, code that is compiled serves all ranks of a run.

    Args:
        num_ranks: that have a thread.

    Yields:
        What each thread of a rank has to call first: the compiler's settings belong to
        a thread (torch 2.13), or to the process (2.11): then they come back at the end.
    """
    most = max(_AT_LEAST, _A_RANK * num_ranks)
    limits = {
        "recompile_limit": most,
        "accumulated_recompile_limit": _IN_ALL * most,
        "fail_on_recompile_limit_hit": True,
    }
    has_any_global_hook = modules._has_any_global_hook
    config: Any = sys.modules.get(_CONFIG)
    before = {name: getattr(config, name) for name in limits if config is not None}

    def set_limits() -> None:
        config = sys.modules.get(_CONFIG)
        if config is not None:  # else it is not imported for this: that takes seconds
            for name, value in limits.items():
                setattr(config, name, value)

    def compile_on_ranks(_: Recorder, compile_: Any, *args: Any, **kwargs: Any) -> Any:
        if _CONFIG not in sys.modules:
            import torch._dynamo.config as config

            before.update((name, getattr(config, name)) for name in limits)
            set_limits()
        return compile_(*args, **kwargs)

    def has_others_hook() -> bool:
        """torch warns of hooks that a compiled module calls twice; ours may be."""
        hooks = modules._global_forward_pre_hooks
        ours = hooks.pop(NAMING_HOOK, None)
        try:
            return bool(has_any_global_hook())  # type: ignore[no-untyped-call]
        finally:
            if ours is not None:
                hooks[NAMING_HOOK] = ours

    patches = [
        in_ranks(torch, "compile", compile_on_ranks),
        (modules, "_has_any_global_hook", has_others_hook),
    ]
    try:
        with patched(patches):
            yield set_limits
    finally:
        config = sys.modules.get(_CONFIG)
        for name, value in before.items():
            if getattr(config, name) != value:
                setattr(config, name, value)


def guard_rank(asking: FrameType | None) -> None:
    """The frame `asking` asks for a rank's number: if it goes into what is being
    compiled, that is compiled anew for ranks of another number."""
    if TracingContext.try_get() is None:
        return
    while asking is not None and asking.f_code.co_filename == c10d.__file__:
        asking = asking.f_back
    if asking is None or _EVALUATES not in asking.f_code.co_filename:
        return  # torch names its files by rank, too
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource, ImportSource

    top, *rest = __name__.split(".")
    source: Any = ImportSource(top)
    for name in (*rest, rank_number.__name__):
        source = AttrSource(source, name)
    number = CallFunctionNoArgsSource(source)
    install_guard(number.make_guard(GuardBuilder.EQUALS_MATCH))


def rank_number() -> int:
    """The calling thread's rank, -1 outside of runs; asked by Dynamo's guards."""
    group: Any = getattr(c10d._world, "default_pg", None)
    communicator = getattr(group, "communicator", None)
    return -1 if communicator is None else int(communicator.rank)
