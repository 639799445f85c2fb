"""A communicator as one rank sees it: launches are recorded and meet in memory.

Knows the lane, the sequence numbers and the bytes; `VirtualGroup` (group.py) is the
face that torch.distributed sees, `Meeting` does the arithmetic.

[Note: point to point] As PyTorch's NCCL backend has it where no `device_id` is bound:

- two ranks that send and receive get a communicator and a stream of their own, for
  both directions, in the order of the calls. So [isend, irecv] on both of them never
  ends: each send holds up the receive behind it, however small (tests/gpu/test_p2p.py:
  1 KiB as 64 MiB on two H200s; a transport that buffers might let some pass);
- `batch_isend_irecv` is one call on the group's own stream, in which all sends and
  receives go on beside one another, each direction in order;
- a receive meets the next send of its peer, whatever the tag.

With `device_id` everything of a group is on one stream, which is stricter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import _disable_current_modes

from overlaplab.cluster.virtual.arithmetic import Arrival, fill, of_all_alike
from overlaplab.cluster.virtual.lanes import Frontier, Lane, Unseen
from overlaplab.cluster.virtual.meeting import Meeting, Meetings, WeakTensor
from overlaplab.cluster.virtual.recorder import Recorder
from overlaplab.cluster.virtual.work import VirtualBarrier, VirtualWork
from overlaplab.operators import dtype_name
from overlaplab.program.access import num_bytes as access_bytes
from overlaplab.program.access import overlap, runs
from overlaplab.program.record import Access, Collective, PayloadTensor

Tensors = Sequence[torch.Tensor]
Splits = bool | list[int]


class Communicator:
    """One rank's member of a communicator.

    Args:
        recorder: the rank's.
        meetings: the run's.
        rank: in this group.
        ranks: the global ranks of the group, in group order.
        torch_name: torch's own name of the group, the same on every rank.
        world: 1, or more after a `destroy_process_group`: names are given again then.
    """

    def __init__(
        self,
        recorder: Recorder,
        meetings: Meetings,
        rank: int,
        ranks: tuple[int, ...],
        torch_name: str,
        world: int = 1,
    ) -> None:
        self.recorder = recorder
        self.rank = rank
        self.ranks = ranks
        self.torch_name = torch_name
        self._world = world
        self.description = ""
        self.high_priority = False
        self.sequence = 0
        self._meetings = meetings
        self._name = ""
        self._lane = ""
        self._pair_sequences: dict[tuple[int, int], int] = {}
        # Of an open batch: calls to come, and what its parts have to wait for.
        self._batch_left = 0
        self._batch_after = Frontier()

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def name(self) -> str:
        """Unlike any other communicator's; settled at its first use."""
        if not self._name:
            self._name = self._meetings.group_name(
                self.torch_name, self.description, self.ranks, self._world
            )
            self._lane = self._lane_name()
        return self._name

    def launch(
        self,
        operation: str,
        sources: Tensors,
        targets: Tensors,
        async_op: bool,
        *,
        reduce_op: str = "",
        root: int = -1,
        reads: bool = True,
        writes: bool = True,
        split_inputs: Splits = False,
        split_outputs: Splits = False,
        pair: tuple[int, int] | None = None,
        tag: int = 0,
        batch: int = 0,
    ) -> VirtualWork:
        """Record the launch, deposit copies of the inputs, and go on.

        Args:
            operation: as in `Collective`.
            sources, targets: the user's tensors.
            async_op: as given by the caller.
            root: in this group, -1 where there is none.
            reads, writes: whether this rank reads its sources, writes its targets.
            split_inputs, split_outputs: each tensor stands for one a rank: equal
                parts, or parts of these lengths, along dimension 0.
            pair: group ranks of sender and receiver.
            tag: of a send or receive; the peer's must be equal.
            batch: calls of the `batch_isend_irecv` that this one is of, 0: of none.
        """
        recorder = self.recorder
        lane = recorder.current()
        recorder.settle(lane)
        for tensor in (*sources, *targets):
            _check_dense(operation, tensor)
            if recorder.storages.is_host(tensor):
                raise ValueError(
                    f"{operation} got a tensor of shape {tuple(tensor.shape)} in the "
                    "host's memory; like NCCL, the virtual cluster sends what is on "
                    "the GPU: move it with tensor.to(ol.device())"
                )
        if operation == "reduce_scatter" and split_inputs:
            _check_parts(operation, sources, targets, self.size)
        if operation == "all_gather" and split_outputs:
            _check_parts(operation, targets, sources, self.size)
        meeting = self._meeting(pair)
        read = self._accesses(sources, lane.name) if reads else ()
        write = self._accesses(targets, lane.name) if writes else ()
        root = -1 if root < 0 else self.ranks[root]
        payload = sources if sources else targets
        collective = Collective(
            group=meeting.group,
            ranks=meeting.ranks,
            sequence=meeting.sequence,
            operation=operation,
            reduce_op=reduce_op,
            root=root,
            bytes=self._payload_bytes(operation, sources, targets),
            payload=self._parts(payload, lane.name),
            async_op=async_op,
            high_priority=self.high_priority,
        )
        own = self._stream(meeting, batch)
        op = recorder.launch(
            "communication",
            operation,
            own if async_op else lane,
            launched_from=lane,
            reads=read,
            writes=write,
            dtype=dtype_name(payload[0].dtype) if payload else "",
            read_bytes=sum(map(access_bytes, read)),
            write_bytes=sum(map(access_bytes, write)),
            collective=collective,
        )
        if batch:  # what comes next on the group's stream comes after
            recorder.lane(self._lane).wait(Frontier(frozenset((op,))))
        fakes = self._meetings.num_representatives and any(map(is_fake, payload))
        alone = self._meetings.num_representatives and meeting.expected <= 1
        if alone:
            meeting.complete = True
            if pair is not None:
                distance = (pair[1] - pair[0]) % self.size
                sign = 1 if operation == "send" else -1
                key = (self.name, distance, collective.bytes)
                self._meetings.messages[key] += sign
        with _disable_current_modes(), torch.no_grad():
            copies = [] if fakes else [t.detach().clone() for t in sources]
            inputs: Any
            outputs: Any = tuple(targets)
            if fakes:
                inputs = tuple(map(WeakTensor, sources))  # their shapes
            else:
                inputs = _split(copies, split_inputs, self.size)
                outputs = _split(targets, split_outputs, self.size)
                _check_counts(operation, inputs, outputs, self.size)
            arrival = Arrival(
                rank=recorder.rank,
                op=op,
                operation=operation,
                reduce_op=reduce_op,
                root=root,
                inputs=inputs,
                outputs=outputs,
                label=recorder.label,
                tag=tag,
            )
            if not alone:
                if pair is None and not fakes:
                    self._read_after_earlier(sources, copies, read)
                meeting.arrive(arrival)
                recorder.unseen.append(Unseen(meeting, own.name, write))
            elif not fakes:  # objects have values
                for output, value in zip(
                    arrival.outputs, of_all_alike(arrival, self.size), strict=False
                ):
                    fill(output, value)
        kind = VirtualBarrier if operation == "barrier" else VirtualWork
        if not async_op:  # the lane itself is behind it
            lane.wait(Frontier(unmet=(meeting,)))
        held = (*sources, *targets) if async_op else ()
        return kind(recorder, meeting, op, targets, held)

    def _read_after_earlier(
        self, sources: Tensors, copies: Tensors, read: tuple[Access, ...]
    ) -> None:
        """Copy the inputs again once an earlier collective has written them.

        A communicator runs its collectives one after the other: one may read what those
        before it write although nobody has waited. All ranks meet in these first, so
        the copy is made in time.
        """
        rank, views = self.recorder.rank, [t.detach() for t in sources]
        earlier: list[Any] = [
            unseen.meeting
            for unseen in self.recorder.unseen
            if unseen.stream == self._lane
            and any(overlap(r, w) for r in read for w in unseen.writes)
        ]

        def copy_again() -> None:
            with contextlib.ExitStack() as lent:
                for meeting in earlier:
                    lent.enter_context(meeting.lend(rank))
                torch._foreach_copy_(list(copies), views)

        if not earlier:
            return
        if earlier[-1].complete:
            copy_again()
        else:
            earlier[-1].on_complete.append(copy_again)

    def _meeting(self, pair: tuple[int, int] | None) -> Meeting:
        name = self.name
        if pair is None:
            sequence = self.sequence
            self.sequence += 1
            return self._meetings.at(name, self.ranks, sequence)
        ranks = (self.ranks[pair[0]], self.ranks[pair[1]])
        sequence = self._pair_sequences.get(pair, 0)
        self._pair_sequences[pair] = sequence + 1
        pair_name = f"{ranks[0]}->{ranks[1]}"
        if name != "default":
            pair_name = f"{name} {pair_name}"
        return self._meetings.at(pair_name, ranks, sequence, point_to_point=True)

    def _stream(self, meeting: Meeting, batch: int) -> Lane:
        """Where NCCL runs it: see [Note: point to point]."""
        recorder = self.recorder
        own = recorder.lane(self._lane)
        if not meeting.point_to_point:
            return own
        if not batch:
            low, high = sorted(meeting.ranks)
            arrow = "->".join(map(str, meeting.ranks))
            both = meeting.group.replace(arrow, f"{low}<->{high}")
            return recorder.lane(f"comm:{both}")
        if not self._batch_left:
            self._batch_left = batch
            self._batch_after = Frontier(own.frontier().ops)
            own.pending.clear()  # each part waits for it, and what follows for them
        self._batch_left -= 1
        part = recorder.lane(f"comm:{meeting.group}")
        part.wait(self._batch_after)
        return part

    def _accesses(self, tensors: Tensors, lane: str) -> tuple[Access, ...]:
        access = self.recorder.storages.access
        found = {access(tensor, lane): None for tensor in tensors}
        return tuple(a for a in found if a is not None)

    def _parts(self, tensors: Tensors, lane: str) -> tuple[PayloadTensor, ...]:
        storages = self.recorder.storages
        parts = []
        for tensor in tensors:
            access = storages.access(tensor, lane)
            parts.append(
                PayloadTensor(
                    bytes=tensor.numel() * tensor.itemsize,
                    dtype=dtype_name(tensor.dtype),
                    ready=None if access is None else storages.last_writer(access),
                    name="" if access is None else storages.name_of(access),
                )
            )
        return tuple(parts) or (PayloadTensor(0, "", None),)

    def _payload_bytes(self, operation: str, sources: Tensors, targets: Tensors) -> int:
        """As the cost formulas count it: see `Collective.bytes`."""
        num_bytes = sum(t.numel() * t.itemsize for t in sources or targets)
        if operation in ("all_gather", "gather"):
            return num_bytes * self.size
        if operation == "scatter" and targets:
            return sum(t.numel() * t.itemsize for t in targets) * self.size
        return num_bytes

    def _lane_name(self) -> str:
        """ "comm", or "comm:NAME" with the user's name, unique in its rank."""
        if self._name == "default":
            return "comm"
        lanes = self.recorder.communicator_lanes
        lane = f"comm:{self.description or self._name}"
        if lane in lanes:
            lane = f"comm:{self._name}"
        lanes.add(lane)
        return lane


def _check_dense(operation: str, tensor: torch.Tensor) -> None:
    """The wire takes one block of memory: NCCL and gloo refuse anything else."""
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{operation} got a tensor of layout {tensor.layout}; the virtual cluster "
            "sends dense tensors only: send tensor.to_dense()"
        )
    if tensor.is_contiguous():
        return
    run_bytes, _ = runs(tensor.size(), tensor.stride(), tensor.itemsize)
    if run_bytes != tensor.numel() * tensor.itemsize:
        raise ValueError(
            f"{operation} got a tensor of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}, which is not one block of memory; send a contiguous "
            "copy and copy the result back"
        )


def _check_counts(
    operation: str, inputs: Tensors, outputs: Tensors, num_ranks: int
) -> None:
    """Lists that hold one tensor a rank; who is not the root has an empty one."""
    for which, given, expected in (
        ("outputs", outputs, {"all_gather": len(inputs), "gather": 1, "all_to_all": 1}),
        (
            "inputs",
            inputs,
            {"reduce_scatter": len(outputs), "scatter": 1, "all_to_all": 1},
        ),
    ):
        each = expected.get(operation)
        at_root = operation in ("gather", "scatter")
        if each is None or (at_root and not given):
            continue
        if len(given) != each * num_ranks:
            raise ValueError(
                f"{operation} got {len(given)} {which}; expected {each * num_ranks}, "
                f"one for each of {num_ranks} ranks"
            )


def _check_parts(
    operation: str, wholes: Tensors, parts: Tensors, num_ranks: int
) -> None:
    """One tensor holds a part per rank, the other one part: NCCL compares them."""
    large, small = ("input", "output")
    if operation == "all_gather":
        large, small = small, large
    for whole, part in zip(wholes, parts, strict=True):
        if whole.numel() != part.numel() * num_ranks:
            raise ValueError(
                f"{operation} got an {large} of {whole.numel()} elements and an "
                f"{small} of {part.numel()}; expected an {large} of {num_ranks} parts, "
                f"one per rank, each as long as the {small}. The output is the first "
                "argument; what does not divide must be padded"
            )


def _split(tensors: Tensors, how: Splits, num_ranks: int) -> tuple[torch.Tensor, ...]:
    if how is False:
        return tuple(t.detach() for t in tensors)
    pieces: list[torch.Tensor] = []
    for tensor in tensors:
        tensor = tensor.detach()
        if isinstance(how, list):
            pieces += torch.split(tensor, how)
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
