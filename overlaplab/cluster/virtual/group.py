"""The face of a communicator that torch.distributed sees: a Python ProcessGroup.

Each method names the operation, the tensors that are read and written, and hands on to
`Communicator.launch`. torch_versions.py adds the names of other torch versions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from overlaplab.cluster.virtual.communicator import Communicator
from overlaplab.cluster.virtual.compiling import guard_rank
from overlaplab.cluster.virtual.work import VirtualWork
from overlaplab.torch_versions import BaseGroup, complete_group

Tensors = Sequence[torch.Tensor]


@complete_group
class VirtualGroup(BaseGroup):  # type: ignore[misc]
    """torch's handle of one rank's member of a communicator."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator.rank, communicator.size)
        self.communicator = communicator

    # What torch asks of a group.

    def getBackendName(self) -> str:
        return "virtual"

    def name(self) -> str:
        return "virtual"

    def size(self) -> int:
        return self.communicator.size

    def rank(self) -> int:
        guard_rank(sys._getframe(1))
        return self.communicator.rank

    @property
    def group_name(self) -> str:
        return self.communicator.torch_name

    @property
    def group_desc(self) -> str:
        return self.communicator.description or "undefined"

    @property
    def bound_device_id(self) -> None:
        return None

    def _set_group_name(self, name: str) -> None:
        self.communicator.torch_name = name
        super()._set_group_name(name)

    def _set_group_desc(self, description: str) -> None:
        if description not in ("undefined", "default_pg"):
            self.communicator.description = description
        super()._set_group_desc(description)

    def shutdown(self) -> None: ...
    def abort(self) -> None: ...
    def _set_sequence_number_for_group(self) -> None: ...
    def _get_sequence_number_for_group(self) -> int:
        return self.communicator.sequence

    def __repr__(self) -> str:
        return (
            f"<virtual group {self.communicator.name!r}, rank {self.communicator.rank}>"
        )

    def _launch(
        self, operation: str, sources: Tensors, targets: Tensors, opts: Any, **how: Any
    ) -> VirtualWork:
        return self.communicator.launch(
            operation,
            sources,
            targets,
            async_op=True if opts is None else bool(opts.asyncOp),
            **how,
        )

    # Collectives.

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> VirtualWork:
        tensors = _as_list(tensors)
        return self._launch(
            "all_reduce", tensors, tensors, opts, reduce_op=_reduce_op(opts)
        )

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any) -> VirtualWork:
        tensors, root = _as_list(tensors), opts.rootRank
        mine = root == self.communicator.rank
        how = {"root": root, "reads": mine, "writes": not mine}
        return self._launch("broadcast", tensors, tensors, opts, **how)

    def reduce(self, tensors: Any, opts: Any) -> VirtualWork:
        tensors, root = _as_list(tensors), opts.rootRank
        how = {"root": root, "writes": root == self.communicator.rank}
        how["reduce_op"] = _reduce_op(opts)
        return self._launch("reduce", tensors, tensors, opts, **how)

    def barrier(self, opts: Any = None) -> VirtualWork:
        return self._launch("barrier", [], [], opts)

    def allgather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> VirtualWork:
        flat = [t for per_input in outputs for t in per_input]
        return self._launch("all_gather", inputs, flat, opts)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> VirtualWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> VirtualWork:
        return self._launch("all_gather", inputs, outputs, opts, split_outputs=True)

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
    ) -> VirtualWork:
        flat = [t for per_output in inputs for t in per_output]
        return self._launch(
            "reduce_scatter", flat, outputs, opts, reduce_op=_reduce_op(opts)
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> VirtualWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> VirtualWork:
        how = {"reduce_op": _reduce_op(opts), "split_inputs": True}
        return self._launch("reduce_scatter", inputs, outputs, opts, **how)

    def alltoall(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> VirtualWork:
        return self._launch("all_to_all", inputs, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> VirtualWork:
        how = {"split_inputs": list(input_splits or ()) or True}
        how["split_outputs"] = list(output_splits or ()) or True
        return self._launch("all_to_all", [input], [output], opts, **how)

    def gather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any
    ) -> VirtualWork:
        flat = [t for per_input in outputs for t in per_input]
        return self._launch("gather", inputs, flat, opts, root=opts.rootRank)

    def scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any
    ) -> VirtualWork:
        flat = [t for per_output in inputs for t in per_output]
        return self._launch("scatter", flat, outputs, opts, root=opts.rootRank)

    # Point to point: see [Note: point to point] in communicator.py.

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> VirtualWork:
        pair = (self.communicator.rank, dst)
        batch = _batch_size(sys._getframe(1))
        return self.communicator.launch(
            "send", tensors, [], True, pair=pair, tag=tag, batch=batch
        )

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> VirtualWork:
        pair = (src, self.communicator.rank)
        batch = _batch_size(sys._getframe(1))
        return self.communicator.launch(
            "recv", [], tensors, True, pair=pair, tag=tag, batch=batch
        )

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> VirtualWork:
        raise NotImplementedError(
            "recv without a source: NCCL has no such thing, so the virtual cluster has "
            "none; name the rank with src="
        )


def _batch_size(frame: FrameType | None) -> int:
    """How many calls the `batch_isend_irecv` has to which this one belongs; 0: none.

    torch calls `isend` and `irecv` for each of a batch: only the stack shows.
    """
    for _ in range(3):
        if frame is None:
            break
        if frame.f_code is _BATCH:
            return len(frame.f_locals["p2p_op_list"])
        frame = frame.f_back
    return 0


_BATCH = c10d.batch_isend_irecv.__code__


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


_REDUCE_OPS: tuple[tuple[Any, str], ...] = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.BAND, "band"),
    (dist.ReduceOp.BOR, "bor"),
    (dist.ReduceOp.BXOR, "bxor"),
)


def _reduce_op(opts: Any) -> str:
    if opts is None:
        return "sum"
    for op, name in _REDUCE_OPS:
        if opts.reduceOp == op:
            return name
    raise NotImplementedError(
        f"reduce op {opts.reduceOp} is not supported on the virtual cluster; use SUM, "
        "AVG, MAX, MIN or PRODUCT"
    )
