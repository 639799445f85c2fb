"""The record of one rank while it runs: operators, lanes, waits, labels.

Knows streams as *lanes*: what was launched on them last, and what their next operator
has to wait for. Knows no tensors' values and no other rank, except that an operator
may not run before the collectives that its lane waits for have met (`Lane.unmet`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from overlaplab.cluster.virtual.lanes import Frontier, Lane, Meets, Unseen
from overlaplab.cluster.virtual.position import Position
from overlaplab.cluster.virtual.rank_thread import RankThread
from overlaplab.cluster.virtual.ranks import Turns
from overlaplab.cluster.virtual.source import place, user_line
from overlaplab.cluster.virtual.storage import PAGEABLE, PLACED, StorageTable
from overlaplab.program.access import num_bytes
from overlaplab.program.record import (
    Access,
    Collective,
    Op,
    OpKind,
    WorkWait,
    by_autograd,
)
from overlaplab.timeline.span import CPU_LANE, NO_ATTRIBUTES

rank_here = threading.local()  # what the calling thread is a rank of, see world.py


def current_recorder() -> Recorder | None:
    """The recorder of the calling rank thread, None in any other thread."""
    recorder: Recorder | None = getattr(rank_here, "recorder", None)
    return recorder


class Recorder(Position):
    """One rank's record and its current position."""

    def __init__(self, rank: int, turns: Turns, thread: RankThread) -> None:
        self.ops: list[Op] = []
        super().__init__(thread, StorageTable(rank, self.ops))
        self.rank = rank
        self.turns = turns
        self.waits: list[WorkWait] = []
        # Kept for C++, see work.py: futures that nobody has ended, and a work.
        self.futures: list[Any] = []
        self.noticed: Any = None
        self.communicator_lanes: set[str] = set()
        self.unseen: list[Unseen] = []  # in the order of launch

    def launch(
        self,
        kind: OpKind,
        name: str,
        lane: Lane,
        *,
        launched_from: Lane | None = None,
        reads: tuple[Access, ...] = (),
        writes: tuple[Access, ...] = (),
        flops: int = 0,
        dtype: str = "",
        read_bytes: int = 0,
        write_bytes: int = 0,
        collective: Collective | None = None,
        differentiable: bool = False,
        attributes: Mapping[str, Any] = NO_ATTRIBUTES,
        launches: int = 1,
    ) -> int:
        """Append one device operator on `lane`; returns its index."""
        source_lane = lane if launched_from is None else launched_from
        index = len(self.ops)
        waits: Iterable[int] = lane.pending
        if launched_from is not None:
            waits = launched_from.frontier().ops | lane.pending
        phase, (source, traced, trains) = self.phase(differentiable), place()
        if phase != "backward":
            source, phase = traced or source, "forward" if trains else phase
        if differentiable and torch.is_grad_enabled():
            self._forward_lines.note(source)
        backward = phase == "backward" and collective is None  # which a hook launches
        if backward and (line := traced or self._forward_lines.of_node()):
            attributes = {**self._of_step, **attributes, "forward": line}
        elif self._of_step:
            attributes = {**self._of_step, **attributes}
        if self._hook_lane is not None:
            attributes = {**attributes, "entered": True}
        self.ops.append(
            Op(
                index,
                self.rank,
                kind,
                name,
                lane.name,
                source_lane.name,
                self._after(lane, waits) if waits else (),
                flops,
                dtype,
                read_bytes,
                write_bytes,
                reads,
                writes,
                collective,
                0,
                self.label,
                phase,
                source,
                attributes,
                launches,
            )
        )
        lane.pending.clear()
        lane.last = index
        for access in writes:
            self.storages.wrote(access, index)
        self.thread.idle_polls = 0
        return index

    def host_wait(
        self, name: str, frontier: Frontier, reads: tuple[Access, ...] = ()
    ) -> None:
        """The CPU waits for `frontier`: blocks until its collectives have met. What it
        `reads` then is a hazard if somebody else may be writing it."""
        for meeting in frontier.unmet:
            self.meet(meeting)
        if frontier.ops or reads:
            self._on_cpu("host_wait", name, tuple(sorted(frontier.ops)), reads)

    def host(
        self,
        name: str,
        reads: tuple[Access, ...],
        writes: tuple[Access, ...] = (),
        *,
        is_free: bool = False,
    ) -> None:
        """The CPU, or somebody else if `is_free`, reads and writes its own memory: at
        once, for it waits for nothing. How long it takes goes by bytes
        (`Hardware.cpu_bytes_per_s`)."""
        moved = (0, 0) if is_free else (_total(reads), _total(writes))
        self._on_cpu("host", name, (), reads, writes, moved)

    def read_on_host(self, name: str, tensor: torch.Tensor) -> None:
        """The CPU reads `tensor`: it waits for a kernel that wrote it.

        The host's memory it reads without asking. A value that no operator made is on
        the host already.
        """
        lane = self.current()
        access = self.storages.access(tensor, lane.name)
        if access is None:
            return
        if self.storages.is_host(tensor):
            self.host(name, (access,))
        elif self.storages.last_writer(access) is not None:
            self.host_wait(name, lane.frontier(), (access,))

    def claim_for_host(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Those of which nobody said where they are can only be the host's: the CPU
        waits for a kernel that wrote one. In a loader, what was computed from the
        device's memory is there."""
        lane = self.current().name
        for tensor in tensors:
            access = self.storages.access(tensor, lane)
            if not self.storages.is_unplaced(tensor):
                continue
            if self.storages.is_loading and self.storages.is_from_device(access):
                self.storages.place(tensor, PLACED, lane)
            else:
                self.read_on_host(name, tensor)
                self.storages.place(tensor, PAGEABLE, lane)

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """What happens meanwhile is not the program's: nothing of it is recorded."""
        before, self.looks_away = self.looks_away, True
        try:
            with _disable_current_modes():
                yield
        finally:
            self.looks_away = before

    def _on_cpu(
        self,
        kind: OpKind,
        name: str,
        after: tuple[int, ...],
        reads: tuple[Access, ...],
        writes: tuple[Access, ...] = (),
        moved: tuple[int, int] = (0, 0),
    ) -> None:
        self.ops.append(
            Op(
                index=len(self.ops),
                rank=self.rank,
                kind=kind,
                name=name,
                stream=CPU_LANE,
                launch_stream=self.current().name,
                after=after,
                read_bytes=moved[0],
                write_bytes=moved[1],
                reads=reads,
                writes=writes,
                label=self.label,
                phase=self.phase(False),
                source=user_line(),
                attributes=self._of_step,
            )
        )

    def everything(self) -> Frontier:
        """The frontier of all lanes (torch.cuda.synchronize)."""
        ops = frozenset().union(*(lane.frontier().ops for lane in self.lanes.values()))
        return Frontier(ops, tuple(unseen.meeting for unseen in self.unseen))

    def settle(self, lane: Lane) -> None:
        """Block until the collectives that `lane` waits for have met."""
        self.turns.check()
        while lane.unmet:
            meeting = lane.unmet[0]
            try:
                self.meet(meeting)
            finally:  # an error of the collective is raised once
                # Another thread of the rank may have waited for it, too.
                lane.unmet = [one for one in lane.unmet if one is not meeting]

    def meet(self, meeting: Meets) -> None:
        """Block until all ranks of `meeting` have arrived: this rank sees its results
        from then on, and those of what comes before it on its communicator's stream.
        """
        places = [
            i for i, unseen in enumerate(self.unseen) if unseen.meeting is meeting
        ]
        if not places:
            return
        until = self.unseen[: places[0] + 1]
        due = [unseen for unseen in until if unseen.stream == until[-1].stream]
        for unseen in due:
            one = unseen.meeting
            self.turns.block(self.thread, partial(getattr, one, "complete"), one)
        with _disable_current_modes(), torch.no_grad():
            for unseen in due:
                if unseen in self.unseen:  # no other thread of the rank was faster
                    self.unseen.remove(unseen)
                    unseen.meeting.give(self.rank)

    def phase(self, differentiable: bool) -> str:
        """Of the operator that is being launched; `differentiable`: an argument
        requires a gradient, so with grad mode on autograd notes it for the backward
        pass."""
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "forward" if differentiable and torch.is_grad_enabled() else ""

    def _after(self, lane: Lane, waits: Iterable[int]) -> tuple[int, ...]:
        """`waits` without what stream order or an earlier wait implies already."""
        after = []
        for index in sorted(waits, reverse=True):
            other = self.ops[index].stream
            if other != lane.name and lane.ordered.get(other, -1) < index:
                lane.ordered[other] = index
                after.append(index)
        return tuple(reversed(after))

    def wait_for_gradients(self, lane: Lane, reads: tuple[Access, ...]) -> None:
        """The engine adds the gradients of one tensor, from nodes of any stream."""
        for access in reads:
            writer = self.storages.last_writer(access)
            if writer is not None and by_autograd(self.ops[writer]):
                lane.pending.add(writer)


def _total(accesses: Iterable[Access]) -> int:
    return sum(map(num_bytes, accesses))
