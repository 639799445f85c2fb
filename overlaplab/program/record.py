"""The record of a run: what each rank launched, in order, without any time.

A cluster writes it; `resolve` turns it into a timeline; `find_findings` and the memory
report read it. Imports no torch and knows no hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from overlaplab.timeline.span import NO_ATTRIBUTES

OpKind = Literal[
    "compute",  # a kernel on `stream`
    "communication",  # a collective, on its communicator's stream or on the current
    "memcpy",  # host <-> device
    "host_wait",  # the CPU waits for `after` (item, synchronize, event.synchronize)
    "host",  # the CPU computes for `duration_ns`
]


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes that an operator reads or writes.

    Args:
        storage: identity of the allocation, unique within its rank's program (a
            storage that is freed and allocated anew gets a new number).
        offset_bytes: first byte.
        dims: ((size, stride_bytes), ...), outermost first, () for one contiguous run;
            the access is the set of runs of `run_bytes` at every combination.
        run_bytes: length of each contiguous run.
    """

    storage: int
    offset_bytes: int
    run_bytes: int
    dims: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PayloadTensor:
    """One tensor of a collective, the unit that `replay` moves between buckets.

    Args:
        bytes: its payload.
        dtype: "float32", "bfloat16", ...
        ready: index (same rank) of the last operator that wrote it, None if nobody.
        name: as given by `name_tensor`, or "".
    """

    bytes: int
    dtype: str
    ready: int | None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Collective:
    """A meeting of the ranks of one communicator.

    Ranks meet where (group, sequence) is equal.

    Args:
        group: the communicator's name; "default" is the world's.
        ranks: its global ranks, in group order.
        sequence: zero-based index in this communicator.
        operation: "all_reduce", "all_gather", "reduce_scatter", "broadcast", ...
        reduce_op: "sum", "avg", "max", "min", "product" or "".
        root: global rank for broadcast, gather, scatter, reduce; -1 otherwise.
        bytes: payload of this rank as the cost formulas count it: the full tensor
            for all_reduce, broadcast, and for all_gather/reduce_scatter the gathered
            size (group size times the shard).
        payload: its tensors in order, at least one, bytes adding up to a rank's input.
        async_op: launched with async_op=True, on the communicator's stream; otherwise
            on the stream that launches it.
        high_priority: its blocks go before those of kernels that wait as well, see
            `overlaplab.streams.go_first`.
    """

    group: str
    ranks: tuple[int, ...]
    sequence: int
    operation: str
    reduce_op: str = ""
    root: int = -1
    bytes: int = 0
    payload: tuple[PayloadTensor, ...] = ()
    async_op: bool = False
    high_priority: bool = False


@dataclass(frozen=True, slots=True)
class Op:
    """One thing that a rank's CPU launched or did, in program order.

    A device operator starts when all of these have ended: its launch on the CPU, the
    previous operator of its stream, and every operator in `after`. The stream waits
    that the user wrote (`wait_stream`, `wait_event`, `Work.wait`) have been turned
    into `after` of the next operator on the waiting stream. An asynchronous collective
    runs on its communicator's lane, with the operators of the launching stream at the
    time of launch in `after`; with async_op=False it runs on the launching stream.

    Args:
        index: position in `Program.ranks[rank]`.
        rank: global rank.
        kind: see `OpKind`.
        name: "mm", "all_reduce", ...
        stream: the lane (`Span.lane`); "cpu" for host kinds.
        launch_stream: the stream that was current at the launch (for communication:
            whose work it waits for; otherwise equal to `stream`).
        after: indices of operators of the same rank that must have ended.
        flops: floating point operations, multiply and add counted as two.
        dtype: of the arithmetic.
        read_bytes, write_bytes: through device memory; of "host", through the host's.
        launches: of a kernel: how many CUDA launches for it.
        reads, writes: which bytes, for hazards and provenance.
        collective: for communication.
        duration_ns: for "host" only: CPU time, beside what its bytes take.
        label: innermost annotation at the launch.
        phase: "forward" (autograd notes it), "backward" (launched by its engine) or "".
        source: "file:line in function" of the user's code, "" if not recorded.
        attributes: anything else, JSON values. Of a "memcpy": "direction" ("h2d",
            "d2h") and "pinned" (whether the host's side is). Of the backward pass:
            "forward", the source of the operator whose gradient it computes, and
            "entered", true for what a hook launches on a stream that it entered.
    """

    index: int
    rank: int
    kind: OpKind
    name: str
    stream: str
    launch_stream: str
    after: tuple[int, ...] = ()
    flops: int = 0
    dtype: str = ""
    read_bytes: int = 0
    write_bytes: int = 0
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    collective: Collective | None = None
    duration_ns: int = 0
    label: str = ""
    phase: str = ""
    source: str = ""
    attributes: Mapping[str, Any] = field(default_factory=lambda: NO_ATTRIBUTES)
    launches: int = 1


def by_autograd(op: Op) -> bool:
    """Is it a kernel of the backward pass, on its node's stream? With these autograd
    orders the streams of gradients, and notes them for the allocator."""
    is_kernel = op.phase == "backward" and op.kind == "compute"
    return is_kernel and not op.attributes.get("entered")


@dataclass(frozen=True, slots=True)
class WorkWait:
    """`Work.wait()` was called: `stream` waits for operator `op`.

    Args:
        rank: who.
        op: index of the communication operator.
        stream: the stream that was current at the call, "cpu" for a blocking wait.
        before: index of the next operator of the rank in program order (the wait was
            called before that was launched).
    """

    rank: int
    op: int
    stream: str
    before: int


@dataclass(frozen=True, slots=True)
class StorageLife:
    """One allocation of one rank.

    Args:
        storage: the number used in `Access`.
        bytes: its size.
        born: index of the operator before which it was allocated (0: at the start).
        freed: index of the next operator when its last reference went, None: alive.
            Works hold their tensors until their `wait`.
        stream: the stream current at the allocation (the caching allocator's owner).
        name: as given by `name_tensor` ("layers.0.weight", "grad fc.bias"), or "".
        recorded: every `record_stream`: (stream, index of the next operator then).
        host: in the CPU's memory; `pinned`: and page-locked, so that copies need no
            help of the CPU.
        freed_before: number of the first storage that was allocated after the release.
            Where both stand before the same operator it says which came first; None:
            the release.
        given_back: it was not its last reference that went: its storage gave its memory
            back by `resize_`, whoever still refers to it, and has other or none since.
        kind: one of `MEMORY_KINDS` where the recorder knows it, see kinds.py; or "".
    """

    rank: int
    storage: int
    bytes: int
    born: int
    freed: int | None
    stream: str
    name: str = ""
    recorded: tuple[tuple[str, int], ...] = ()
    host: bool = False
    pinned: bool = False
    freed_before: int | None = None
    given_back: bool = False
    kind: str = ""


@dataclass(frozen=True, slots=True)
class TensorName:
    """From operator `since` on, these bytes are called `name` in reports."""

    rank: int
    access: Access
    name: str
    since: int


@dataclass(frozen=True, slots=True)
class Program:
    """Everything that a run recorded. Immutable; equal runs give equal programs.

    Args:
        ranks: the operators of each recorded rank, in the order of its CPU.
        world_size: ranks of the job.
        represents: how many ranks each recorded one stands for; of n recorded ones
            rank r for r + n, r + 2 n and so on.
        waits: every `Work.wait()`, in order, per rank.
        storages: every allocation, per rank.
        names: tensor names.
    """

    ranks: tuple[tuple[Op, ...], ...]
    world_size: int
    represents: int = 1
    waits: tuple[WorkWait, ...] = ()
    storages: tuple[StorageLife, ...] = ()
    names: tuple[TensorName, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a run should not have done; `str(finding)` is the report.

    Args:
        kind: "hazard", "unwaited", "unmatched".
        rank: where.
        message: what, both sides, missing edge, how to repair.
        ops: indices of the operators concerned (of `rank`), earlier first.
        storage: for hazards.
        name: of the tensor, where known.
    """

    kind: Literal["hazard", "unwaited", "unmatched"]
    rank: int
    message: str
    ops: tuple[int, ...] = ()
    storage: int | None = None
    name: str = ""

    def __str__(self) -> str:
        return self.message
