"""Where the threads of one rank stand in its program: streams, labels, backwards."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import torch

from overlaplab.cluster.virtual.labels import Labels
from overlaplab.cluster.virtual.lanes import DEFAULT_LANE, Frontier, GraphTask, Lane
from overlaplab.cluster.virtual.rank_thread import RankThread
from overlaplab.cluster.virtual.source import ForwardLines
from overlaplab.cluster.virtual.storage import NOT_PLACING, StorageTable


class Position(Labels):
    """What is current in the thread of a rank that has the turn."""

    def __init__(self, thread: RankThread, storages: StorageTable) -> None:
        super().__init__()
        self.thread = thread
        self.storages = storages
        self.lanes: dict[str, Lane] = {}
        self._num_streams = 0
        self._others: dict[RankThread, Any] = {}  # what belongs to other threads
        self._begin_thread()

    def switch_to(self, thread: RankThread) -> None:
        """A thread of the rank goes on: its streams, labels and backward passes are
        its own."""
        if thread is not self.thread:
            if not self.thread.finished:
                own = self._own_state(), self.storages.own_state()
                self._others[self.thread] = own
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


def _next_number() -> int:
    """Of the next autograd node that this thread makes."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
