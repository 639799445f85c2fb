"""The record of one rank while it runs: operators, lanes, waits, labels.

Knows streams as *lanes*: what was launched on them last, and what their next operator
has to wait for. Knows no tensors' values and no other rank, except that an operator
may not run before the collectives that its lane waits for have met (`Lane.unmet`).
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from overlaplab.cluster.virtual.labels import Labels
from overlaplab.cluster.virtual.lanes import (
    DEFAULT_LANE,
    Frontier,
    GraphTask,
    Lane,
    Meets,
    Unseen,
)
from overlaplab.cluster.virtual.ranks import RankThread, Turns
from overlaplab.cluster.virtual.source import ForwardLines, user_line
from overlaplab.cluster.virtual.storage import NOT_PLACING, PAGEABLE, StorageTable
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


class Recorder(Labels):
    """One rank's record and its current position.

    Args:
        rank: global rank.
        turns: hands on the turn.
        thread: the rank's own thread.
    """

    def __init__(self, rank: int, turns: Turns, thread: RankThread) -> None:
        super().__init__()
        self.rank = rank
        self.turns = turns
        self.thread = thread
        self.ops: list[Op] = []
        self.waits: list[WorkWait] = []
        # Kept for C++, see work.py: futures that nobody has ended, and a work.
        self.futures: list[Any] = []
        self.noticed: Any = None
        self.storages = StorageTable(rank, self.ops)
        self.lanes: dict[str, Lane] = {}
        self.communicator_lanes: set[str] = set()
        self._num_streams = 0
        self.unseen: list[Unseen] = []  # in the order of launch
        self._others: dict[RankThread, Any] = {}  # what belongs to other threads
        self._begin_thread()

    def switch_to(self, thread: RankThread) -> None:
        """A thread of the rank goes on: its streams, labels and backward passes are
        its own."""
        if thread is not self.thread:
            self._others[self.thread] = self._own_state(), self.storages.own_state()
            mine = self._others.pop(thread, None)
            if mine is None:
                self._begin_thread()
            else:
                vars(self).update(mine[0])
                self.storages.set_own_state(mine[1])
            self.thread = thread

    def _own_state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OF_A_THREAD}

    def _begin_thread(self) -> None:
        """As a new thread of a process has it: outside of everything."""
        self._labels: list[Any] = []
        self.moving = ""  # the call that moves a tensor, while it does
        self.looks_away = False  # from what is not the program's
        self._forward_lines = ForwardLines()
        self._user_lane = self.lane(DEFAULT_LANE)
        # Autograd's sequence number counts up in the forward pass: from `_starts[i]`
        # on, nodes were made while `_start_lanes[i]` was current.
        self._starts: list[int] = [0]
        self._start_lanes: list[Lane] = [self._user_lane]
        self._task: GraphTask[Frontier] | None = None  # the innermost backward pass
        self._num_nodes = 0  # that were made until the last operator of one
        # A stream that a hook entered while its node runs.
        self._hook_lane: Lane | None = None
        self.storages.set_own_state(NOT_PLACING)

    def lane(self, name: str) -> Lane:
        """The lane called `name`, made at its first mention."""
        lane = self.lanes.get(name)
        if lane is None:
            lane = self.lanes[name] = Lane(name)
        return lane

    def new_lane(self, name: str = "") -> Lane:
        """A lane for a new stream: `name`, or "stream 1", "stream 2", ..."""
        if not name or name in self.lanes:
            self._num_streams += 1
            name = f"{name or 'stream'} {self._num_streams}"
        return self.lane(name)

    def current(self) -> Lane:
        """The lane of the next operator: in the backward pass, the forward's."""
        task = self._task
        if task is None or len(self._starts) == 1:  # one lane so far
            return self._user_lane
        node = torch._C._current_autograd_node()
        if node is task.outside:  # a callback
            self._end_backward(task)
            return self._user_lane
        lane = self._lane_of(task, node)
        lane = lane if self._hook_lane is None else self._hook_lane
        # What is recomputed in the backward pass; the first operator's node is there.
        self._mark(lane, self._num_nodes)
        self._num_nodes = _next_number()
        return lane

    def enter_stream(self, lane: Lane) -> Callable[[], None]:
        """Make `lane` current; the result makes current what was before."""
        node = torch._C._current_autograd_node()
        in_hook = self._task is not None and node is not self._task.outside
        self._mark(lane)
        if in_hook:
            outer, self._hook_lane = self._hook_lane, lane
        else:
            before, self._user_lane = self._user_lane, lane

        def leave() -> None:
            if in_hook:
                self._hook_lane = outer
            else:
                self._user_lane = before
            self._mark(self.current())

        return leave

    def _mark(self, lane: Lane, since: int | None = None) -> None:
        """Autograd nodes that are made from now on, or from the number `since` on,
        belong to `lane`."""
        if lane is not self._start_lanes[-1]:
            since = _next_number() if since is None else max(since, self._starts[-1])
            self._starts.append(since)
            self._start_lanes.append(lane)

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
    ) -> int:
        """Append one device operator on `lane`; returns its index.

        Args:
            differentiable: as in `phase`.
        """
        source_lane = lane if launched_from is None else launched_from
        index = len(self.ops)
        waits: Iterable[int] = lane.pending
        if launched_from is not None:
            waits = launched_from.frontier().ops | lane.pending
        phase, source = self.phase(differentiable), user_line()
        if differentiable and torch.is_grad_enabled():
            self._forward_lines.note(source)
        backward = phase == "backward" and collective is None  # which a hook launches
        if backward and (line := self._forward_lines.of_node()):
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
        """The CPU waits for `frontier`: blocks until its collectives have met.

        Args:
            reads: what it reads then; a hazard if somebody else may be writing it.
        """
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
        """The CPU reads and writes its own memory: at once, for it waits for nothing.

        How long it takes goes by bytes (`Hardware.cpu_bytes_per_s`).

        Args:
            is_free: somebody else did it.
        """
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
        waits for a kernel that wrote one."""
        lane = self.current().name
        for tensor in tensors:
            self.storages.access(tensor, lane)
            if self.storages.is_unplaced(tensor):
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
        """Of the operator that is being launched.

        Args:
            differentiable: an argument requires a gradient: with grad mode on, autograd
                notes the operator for the backward pass.
        """
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

    def run_backward(self, run: Callable[[], Any]) -> Any:
        """Run autograd's engine, `run`; on which streams, see lanes.py."""
        caller, node = self.current(), torch._C._current_autograd_node()
        outer = self._task, self._user_lane, self._hook_lane
        task = self._task = GraphTask(caller.frontier(), caller.name, node)
        self._user_lane, self._hook_lane = caller, None
        self._num_nodes = _next_number()
        try:
            result = run()
            self._end_backward(task)
            return result
        finally:
            self._task, self._user_lane, self._hook_lane = outer
            self._mark(caller)

    def _lane_of(self, task: GraphTask[Frontier], node: Any) -> Lane:
        """The lane of a node of the backward pass, see lanes.py."""
        lane = before = self.lanes[task.lane]
        if node is not task.node:
            made = node._sequence_nr()
            if made < 2**63:  # not an accumulation, which follows the node before it
                at = bisect.bisect_right(self._starts, made) - 1
                lane = self._start_lanes[at]
            for point in task.begin(node, lane.name, before.frontier()):
                lane.wait(point)
        return lane

    def wait_for_gradients(self, lane: Lane, reads: tuple[Access, ...]) -> None:
        """The engine adds the gradients of one tensor, from nodes of any stream."""
        for access in reads:
            writer = self.storages.last_writer(access)
            if writer is not None and by_autograd(self.ops[writer]):
                lane.pending.add(writer)

    def _end_backward(self, task: GraphTask[Frontier]) -> None:
        """Once: the caller's stream waits for those of the nodes."""
        if not task.has_ended:
            task.has_ended = True
            caller = self.lanes[task.caller]
            for name in task.lanes():
                caller.wait(self.lanes[name].frontier())
            self._mark(caller)


# What `_begin_thread` sets.
_OF_A_THREAD = (
    *("_labels", "moving", "looks_away", "_forward_lines", "_user_lane", "_starts"),
    *("_start_lanes", "_task", "_num_nodes", "_hook_lane"),
)


def _total(accesses: Iterable[Access]) -> int:
    return sum(map(num_bytes, accesses))


def _next_number() -> int:
    """Of the next autograd node that this thread makes."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
