"""Functional collectives of fake tensors.

With values, the C++ of `_c10d_functional` calls the process group. On fake tensors only
its shape rule runs: here the group is called as that C++ would.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from overlaplab.cluster.virtual.work import VirtualWork

NAMESPACE = "_c10d_functional"


class FakeCollectives:
    """Launches one rank's functional collectives, and keeps their works."""

    def __init__(self) -> None:
        self._works: dict[int, VirtualWork] = {}  # by the result's storage

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of `func` on fake tensors, its collective launched or waited for.

        Raises:
            NotImplementedError: it is none that is known here.
        """
        name = func._schema.name.removeprefix(f"{NAMESPACE}::")
        if name == "wait_tensor":
            work = self._works.pop(_address(args[0]), None)
            if work is not None:
                work.wait()
            return args[0]  # the same tensor, as its C++ gives back
        out = func(*args, **kwargs)
        outputs = list(out) if isinstance(out, (list, tuple)) else [out]
        inputs = list(args[0]) if isinstance(args[0], (list, tuple)) else [args[0]]
        work = _launch(name, _group(args[-1]), inputs, outputs, args)
        for tensor in outputs:
            self._works[_address(tensor)] = work
        return out


def _launch(name: str, group: Any, inputs: Any, outputs: Any, args: Any) -> VirtualWork:
    kind = name.removesuffix("_").removesuffix("_coalesced")
    if kind == "all_reduce":
        opts: Any = dist.AllreduceCoalescedOptions()
        opts.reduceOp = _reduce_op(args[1])
        work = group.allreduce_coalesced(outputs, opts)
    elif kind == "broadcast":
        opts = dist.BroadcastOptions()
        opts.rootRank = args[1]
        work = group.broadcast(outputs, opts)
    elif kind == "all_gather_into_tensor":
        work = group.all_gather_single_coalesced(outputs, inputs)
    elif kind == "reduce_scatter_tensor":
        opts = dist.ReduceScatterOptions()
        opts.reduceOp = _reduce_op(args[1])
        work = group.reduce_scatter_single_coalesced(outputs, inputs, opts)
    elif kind == "all_to_all_single":
        opts = dist.AllToAllOptions()
        work = group.all_to_all_single(outputs[0], inputs[0], *args[1:3], opts)
    else:
        raise NotImplementedError(
            f"{NAMESPACE}.{name} is not supported with fake=True; run with fake=False"
        )
    made: VirtualWork = work
    return made


def _group(given: Any) -> Any:
    c10d: Any = dist.distributed_c10d
    return c10d._resolve_process_group(given) if isinstance(given, str) else given


def _reduce_op(name: str) -> Any:
    return getattr(dist.ReduceOp, name.upper())


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
