"""The process group of a rank: launches are recorded and meet in memory.

`VirtualGroup` answers to every method that torch.distributed calls; `VirtualWork` is
what a launch returns. Its `wait` makes the current stream wait, as NCCL's does, and
does not block the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from overlaplab.cluster.virtual.compat import complete_group
from overlaplab.cluster.virtual.meeting import Arrival, Meeting
from overlaplab.cluster.virtual.modes import dtype_name
from overlaplab.cluster.virtual.recorder import Frontier, Recorder
from overlaplab.cluster.virtual.storage import covered_bytes
from overlaplab.program.record import Access, Collective, Part, WorkWait
from overlaplab.timeline.span import CPU_LANE

Tensors = Sequence[torch.Tensor]


class Meetings:
    """All meetings of a run, by communicator and sequence number.

    Args:
        representative: one recorded rank stands for all: it meets nobody.
    """

    def __init__(self, representative: bool) -> None:
        self.representative = representative
        self.open: dict[tuple[str, int], Meeting] = {}
        self.names: dict[tuple[str, tuple[int, ...]], str] = {}

    def at(self, group: str, ranks: tuple[int, ...], sequence: int) -> Meeting:
        """The meeting, made by the first rank that comes."""
        key = (group, sequence)
        meeting = self.open.get(key)
        if meeting is None:
            meeting = self.open[key] = Meeting(group, ranks, sequence)
        return meeting

    def group_name(self, torch_name: str, description: str, ranks: Any) -> str:
        """A communicator's name, the same on its ranks and unlike any other's."""
        if torch_name == "0":
            return "default"
        name = self.names.get((torch_name, ranks))
        if name is None:
            name = description or torch_name
            taken = set(self.names.values())
            if name in taken:
                name = f"{name} {list(ranks)}"
            if name in taken:
                name = f"{name} #{torch_name}"
            self.names[torch_name, ranks] = name
        return name


class VirtualWork(dist._Work):
    """A launched collective.

    `wait` makes the stream that is current at the call wait; waiting twice is waiting
    once. The tensors hold their results for whatever is launched on that stream next.
    """

    def __init__(
        self, recorder: Recorder, meeting: Meeting, op: int, outputs: Tensors
    ) -> None:
        super().__init__()
        self._recorder = recorder
        self._meeting = meeting
        self._op = op
        self._outputs = list(outputs)

    def wait(self, timeout: Any = None) -> bool:
        recorder = self._recorder
        recorder.turns.check()
        lane = recorder.current()
        self._note(lane.name)
        lane.wait(self._frontier())
        return True

    def is_completed(self) -> bool:
        recorder = self._recorder
        if not self._meeting.complete:
            recorder.turns.yield_turn(recorder.thread, self._meeting)
        return self._meeting.complete

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A finished future; the current stream waits, as with NCCL's futures."""
        self.wait()
        self._recorder.meet(self._meeting)
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._outputs)
        return future

    def _frontier(self) -> Frontier:
        unmet = () if self._meeting.complete else (self._meeting,)
        return Frontier(frozenset((self._op,)), unmet)

    def _note(self, stream: str) -> None:
        recorder = self._recorder
        recorder.waits.append(
            WorkWait(recorder.rank, self._op, stream, len(recorder.ops))
        )


class VirtualBarrier(VirtualWork):
    """A barrier blocks the CPU, as NCCL's does."""

    def wait(self, timeout: Any = None) -> bool:
        self._note(CPU_LANE)
        self._recorder.host_wait("barrier", self._frontier())
        return True


@complete_group
class VirtualGroup(dist.ProcessGroup):
    """One rank's member of a communicator.

    Args:
        recorder: the rank's.
        meetings: the run's.
        rank: in this group.
        ranks: the global ranks of the group, in group order.
        torch_name: torch's own name of the group, the same on every rank.
    """

    def __init__(
        self,
        recorder: Recorder,
        meetings: Meetings,
        rank: int,
        ranks: tuple[int, ...],
        torch_name: str,
    ) -> None:
        super().__init__(rank, len(ranks))
        self._recorder = recorder
        self._meetings = meetings
        self._my_rank = rank
        self._ranks = ranks
        self._torch_name = torch_name
        self._description = ""
        self._name = ""
        self._lane = ""
        self._sequence = 0
        self._pair_sequences: dict[tuple[int, int], int] = {}

    # What torch asks of a group.

    def getBackendName(self) -> str:
        return "virtual"

    def name(self) -> str:
        return "virtual"

    def size(self) -> int:
        return len(self._ranks)

    def rank(self) -> int:
        return self._my_rank

    @property
    def group_name(self) -> str:
        return self._torch_name

    @property
    def group_desc(self) -> str:
        return self._description or "undefined"

    @property
    def bound_device_id(self) -> None:
        return None

    def _set_group_name(self, name: str) -> None:
        self._torch_name = name
        super()._set_group_name(name)

    def _set_group_desc(self, description: str) -> None:
        if description not in ("undefined", "default_pg"):
            self._description = description
        super()._set_group_desc(description)

    def shutdown(self) -> None: ...
    def abort(self) -> None: ...
    def _set_sequence_number_for_group(self) -> None: ...
    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def __repr__(self) -> str:
        return f"<virtual group {self._communicator()!r}, rank {self._my_rank}>"

    # Collectives.

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> VirtualWork:
        opts = dist.AllreduceOptions() if opts is None else opts
        tensors = _as_list(tensors)
        return self._launch(
            "all_reduce", tensors, tensors, opts, reduce_op=_reduce_op(opts)
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> VirtualWork:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any) -> VirtualWork:
        tensors = _as_list(tensors)
        mine = opts.rootRank == self._my_rank
        return self._launch(
            "broadcast",
            tensors,
            tensors,
            opts,
            root=opts.rootRank,
            reads=mine,
            writes=not mine,
        )

    def reduce(self, tensors: Any, opts: Any) -> VirtualWork:
        tensors = _as_list(tensors)
        return self._launch(
            "reduce",
            tensors,
            tensors,
            opts,
            reduce_op=_reduce_op(opts),
            root=opts.rootRank,
            writes=opts.rootRank == self._my_rank,
        )

    def barrier(self, opts: Any = None) -> VirtualWork:
        opts = dist.BarrierOptions() if opts is None else opts
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
        opts = dist.ReduceScatterOptions() if opts is None else opts
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
        opts = dist.ReduceScatterOptions() if opts is None else opts
        return self._launch(
            "reduce_scatter",
            inputs,
            outputs,
            opts,
            reduce_op=_reduce_op(opts),
            split_inputs=True,
        )

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
        return self._launch(
            "all_to_all",
            [input],
            [output],
            opts,
            split_inputs=True if not input_splits else list(input_splits),
            split_outputs=True if not output_splits else list(output_splits),
        )

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

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> VirtualWork:
        return self._launch("send", tensors, [], None, pair=(self._my_rank, dst))

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> VirtualWork:
        return self._launch("recv", [], tensors, None, pair=(src, self._my_rank))

    def _launch(
        self,
        operation: str,
        sources: Tensors,
        targets: Tensors,
        opts: Any,
        *,
        reduce_op: str = "",
        root: int = -1,
        reads: bool = True,
        writes: bool = True,
        split_inputs: bool | list[int] = False,
        split_outputs: bool | list[int] = False,
        pair: tuple[int, int] | None = None,
    ) -> VirtualWork:
        """Record the launch, deposit copies of the inputs, and go on.

        Args:
            sources, targets: the user's tensors.
            reads, writes: whether this rank reads its sources, writes its targets.
            split_inputs, split_outputs: each tensor stands for one a rank: equal
                parts, or parts of these lengths, along dimension 0.
            pair: group ranks of sender and receiver.
        """
        recorder = self._recorder
        lane = recorder.current()
        recorder.settle(lane)
        meeting = self._meeting(pair)
        read = self._accesses(sources, lane.name) if reads else ()
        write = self._accesses(targets, lane.name) if writes else ()
        asynchronous = True if opts is None else bool(opts.asyncOp)
        root = -1 if root < 0 else self._ranks[root]
        payload = sources if sources else targets
        collective = Collective(
            group=meeting.group,
            ranks=meeting.ranks,
            sequence=meeting.sequence,
            operation=operation,
            reduce_op=reduce_op,
            root=root,
            bytes=self._payload_bytes(operation, sources, targets),
            parts=self._parts(payload, lane.name),
            async_op=asynchronous,
        )
        op = recorder.launch(
            "communication",
            operation,
            recorder.lane(self._lane if pair is None else _pair_lane(meeting)),
            launched_from=lane,
            reads=read,
            writes=write,
            dtype=dtype_name(payload[0].dtype) if payload else "",
            read_bytes=sum(map(covered_bytes, read)),
            write_bytes=sum(map(covered_bytes, write)),
            collective=collective,
        )
        if self._meetings.representative:
            meeting.complete = True
        else:
            with _disable_current_modes(), torch.no_grad():
                copies = [t.detach().clone() for t in sources]
                meeting.arrive(
                    Arrival(
                        rank=recorder.rank,
                        op=op,
                        operation=operation,
                        reduce_op=reduce_op,
                        root=root,
                        inputs=_split(copies, split_inputs, self.size()),
                        outputs=_split(targets, split_outputs, self.size()),
                        label=recorder.labels[-1] if recorder.labels else "",
                    )
                )
        kind = VirtualBarrier if operation == "barrier" else VirtualWork
        return kind(recorder, meeting, op, targets)

    def _communicator(self) -> str:
        """This communicator's name; settled at its first use."""
        if not self._name:
            self._name = self._meetings.group_name(
                self._torch_name, self._description, self._ranks
            )
            self._lane = _lane_name(self)
        return self._name

    def _meeting(self, pair: tuple[int, int] | None) -> Meeting:
        name = self._communicator()
        if pair is None:
            sequence = self._sequence
            self._sequence += 1
            return self._meetings.at(name, self._ranks, sequence)
        ranks = (self._ranks[pair[0]], self._ranks[pair[1]])
        sequence = self._pair_sequences.get(pair, 0)
        self._pair_sequences[pair] = sequence + 1
        return self._meetings.at(f"{name} {ranks[0]}->{ranks[1]}", ranks, sequence)

    def _accesses(self, tensors: Tensors, lane: str) -> tuple[Access, ...]:
        access = self._recorder.storages.access
        found = {access(tensor, lane): None for tensor in tensors}
        return tuple(a for a in found if a is not None)

    def _parts(self, tensors: Tensors, lane: str) -> tuple[Part, ...]:
        storages = self._recorder.storages
        parts = []
        for tensor in tensors:
            access = storages.access(tensor, lane)
            parts.append(
                Part(
                    bytes=tensor.numel() * tensor.itemsize,
                    dtype=dtype_name(tensor.dtype),
                    ready=None if access is None else storages.last_writer(access),
                    name="" if access is None else storages.name_of(access),
                )
            )
        return tuple(parts) or (Part(0, "", None),)

    def _payload_bytes(self, operation: str, sources: Tensors, targets: Tensors) -> int:
        """As the cost formulas count it: see `Collective.bytes`."""
        num_bytes = sum(t.numel() * t.itemsize for t in sources or targets)
        if operation in ("all_gather", "gather"):
            return num_bytes * self.size()
        if operation == "scatter" and targets:
            return sum(t.numel() * t.itemsize for t in targets) * self.size()
        return num_bytes


def _lane_name(group: VirtualGroup) -> str:
    """ "comm", or "comm:NAME" with the name that the user gave, unique in its rank."""
    name = group._name
    if name == "default":
        return "comm"
    lanes = group._recorder.groups
    short = f"comm:{group._description or name}"
    lane = short if lanes.get(short, group) is group else f"comm:{name}"
    lanes[lane] = group
    return lane


def _pair_lane(meeting: Meeting) -> str:
    return f"comm:{meeting.group}".replace("comm:default ", "comm:")


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _split(
    tensors: Tensors, how: bool | list[int], num_ranks: int
) -> tuple[torch.Tensor, ...]:
    if how is False:
        return tuple(t.detach() for t in tensors)
    pieces: list[torch.Tensor] = []
    for tensor in tensors:
        tensor = tensor.detach()
        if isinstance(how, list):
            pieces += tensor.split(how)
        elif tensor.numel() % num_ranks:
            raise ValueError(
                f"a tensor of {tuple(tensor.shape)} ({tensor.numel()} elements) does "
                f"not divide by {num_ranks} ranks; pad it"
            )
        elif tensor.is_contiguous():
            pieces += (
                tensor.view(-1).chunk(num_ranks)
                if tensor.numel()
                else ([tensor.view(-1)] * num_ranks)
            )
        else:
            raise ValueError(
                "a tensor that stands for one part a rank must be contiguous; got "
                f"strides {tensor.stride()} of shape {tuple(tensor.shape)}"
            )
    return tuple(pieces)


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
    for op, name in _REDUCE_OPS:
        if opts.reduceOp == op:
            return name
    raise NotImplementedError(
        f"reduce op {opts.reduceOp} is not supported on the virtual cluster; use SUM, "
        "AVG, MAX, MIN or PRODUCT"
    )
