"""Names that differ between torch 2.11 and 2.13: kept here and nowhere else."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _python_dispatch

# torch's stubs do not know how its C++ classes are subclassed.
BaseGroup: Any = dist.ProcessGroup
BaseStore: Any = torch._C._distributed_c10d.Store
BaseStream: Any = torch.Stream
BaseWork: Any = dist._Work  # type: ignore[attr-defined]

# Name in 2.13 -> the names by which 2.11, C++ and older callers reach the same.
_OLDER_NAMES = {
    "all_gather_single": ("_allgather_base",),
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced",),
    "reduce_scatter_single": ("_reduce_scatter_base",),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced",),
    "all_to_all_single": ("alltoall_base",),
}

# Of `dist.ProcessGroup`: what a group must answer to; a missing one would otherwise
# end in "No backend type associated with device type cpu".
_COLLECTIVES = (
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "merge_remote_group",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "split_group",
)

Group = TypeVar("Group", bound=type)


def complete_group(cls: Group) -> Group:
    """Give a ProcessGroup class the older names, and a refusal for what it lacks."""
    for name, older_names in _OLDER_NAMES.items():
        for older in older_names:
            setattr(cls, older, getattr(cls, name))
    for name in _COLLECTIVES:
        if name not in cls.__dict__ and hasattr(dist.ProcessGroup, name):
            setattr(cls, name, _refusal(name))
    return cls


def _refusal(name: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"ProcessGroup.{name} is not supported on the virtual cluster yet; "
            'run it with cluster="gloo" or cluster="nccl"'
        )

    refuse.__name__ = name
    return refuse


def fake_mode() -> FakeTensorMode:
    """A new fake mode that may be entered in a thread.

    Where torch is built for CUDA and there is no GPU, the first fake mode of a process
    sets a stand-in for the device that dies with its thread; entering another one then
    crashes (2.11). So the stand-in is set here, in the caller's thread.
    """
    with FakeTensorMode():
        return FakeTensorMode(allow_non_fake_inputs=True)


def mode_flags() -> dict[str, Any]:
    """torch's process-wide notes of which dispatch modes are on."""
    names = [n for n in vars(_python_dispatch) if n.startswith("_is_in_")]
    return {name: getattr(_python_dispatch, name) for name in names}


def set_mode_flags(flags: dict[str, Any]) -> None:
    """Put back what `mode_flags` returned."""
    for name, value in flags.items():
        setattr(_python_dispatch, name, value)
    name = "is_in_mode_without_ignore_compile_internals"
    tell_dynamo = getattr(_python_dispatch, f"set_{name}", None)  # not in 2.11
    if tell_dynamo is not None:
        tell_dynamo(
            flags.get("_is_in_any_mode_without_ignore_compile_internals", False)
        )
