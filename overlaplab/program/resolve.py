"""A program and a hardware profile give a timeline: an event-driven resolver.

It knows no torch and no cluster. The idea of the clock is SimPy's: a heap of events,
ties broken by a running number, so that equal programs give equal timelines to the last
nanosecond. All arithmetic is in integers.

How operators slow one another: `overlaplab.program.rates`; what each costs alone:
`overlaplab.program.costs`.
"""

from __future__ import annotations

import heapq
from collections import deque

from overlaplab.hardware import Hardware, find_hardware
from overlaplab.program.costs import Costs, copy_direction, engine, is_pinned
from overlaplab.program.deadlock import deadlock_error
from overlaplab.program.garbage import no_collections
from overlaplab.program.graph import HOST_KINDS, Graph, build_graph
from overlaplab.program.memory import memory_over_time
from overlaplab.program.rates import Rates, Room
from overlaplab.program.record import Program
from overlaplab.timeline import CPU_LANE, Kind, Span, Timeline

_Event = tuple[int, int, int, int, int]  # time, running number, what, id, version
_START, _LATENCY_OVER, _END = range(3)


def resolve(program: Program, hardware: str | Hardware) -> Timeline:
    """Assign integer nanoseconds to every operator of `program`.

    The CPU of each rank is a lane: launches cost `launch_ns` (in the backward pass
    `backward_launch_ns`) or, for a collective, `collective_launch_ns` and
    `collective_part_launch_ns` for each tensor after the first, one after the other;
    "host" takes its `duration_ns` and, by `cpu_bytes_per_s`, its bytes; "host_wait"
    blocks it. A device operator starts at the latest of the end of its
    launch, of the operator before it on its lane (and communicator), and of those in
    `after`. A collective's span starts where its rank arrives; the latency begins when
    the last rank has (`ready_ns`), then the wire. Copies between host and device take
    turns on the GPU's copy engine of their direction, first come, first served: their
    span starts when it is their turn.

    Args:
        program: what was recorded; not changed.
        hardware: a profile or its name.

    Returns:
        A timeline with `causes`. Launches that cost nothing and waits that wait for
        nothing have no span. A collective that some rank never launched, and for which
        nothing waits, has none either (`find_findings` reports it).

    Raises:
        DeadlockError: no rank can move; the message has the time.
        MismatchError: ranks meet in one collective with different operations.
        ProgramError: the program is not well-formed.
        TypeError: `program` is none, or `hardware` neither a profile nor a name.
        ValueError: nobody knows the name.
    """
    hardware = find_hardware(hardware)
    with no_collections():
        return _Resolution(build_graph(program), hardware).timeline()


class _Resolution:
    """The state of one `resolve`. Lists are indexed by operator id unless said."""

    def __init__(self, graph: Graph, hw: Hardware) -> None:
        self.graph = graph
        self.hw = hw
        num, num_ranks = len(graph.ops), len(graph.program.ranks)
        self.now = 0
        self.heap: list[_Event] = []
        self.events = 0
        self.due: deque[tuple[int, int]] = deque()  # (what, id) that happens now

        self.dependents: list[list[int]] = [[] for _ in range(num)]
        for g, deps in enumerate(graph.deps):
            for d in deps:
                self.dependents[d].append(g)
        # A device operator also waits for its launch, a host wait for the CPU.
        self.waits_for = [len(deps) + 1 for deps in graph.deps]
        self.launch_ns = [0] * num  # start of the launch
        self.launched = [0] * num  # end of the launch
        self.start = [-1] * num
        self.end = [-1] * num
        self.released_by = [-1] * num  # the dependency that ended last
        # What let it start: an id, or id + num for the launch of that id, or -1.
        self.cause = [-1] * num

        self.cpu_at = [0] * num_ranks  # by rank: where in its program the CPU is
        self.cpu_ns = [0] * num_ranks
        self.cpu_last = [-1] * num_ranks  # the last CPU span, coded as in `cause`
        self.cpu_cause = [-1] * num  # of each CPU span, the one before it

        self.costs = Costs(graph, hw)
        self.rates = Rates(hw, num, num_ranks)
        self.version = [0] * num  # of the end that is in the heap
        self.alone = [0] * num
        # Copies of one direction take turns: the first of its queue runs.
        self.turns: list[deque[int]] = [deque() for _ in range(2 * num_ranks)]

        # Of meetings. What happens to one is noted for its first member.
        self.arrived = [0] * len(graph.meetings)
        self.ready = [0] * len(graph.meetings)
        self.on_wire = [0] * len(graph.meetings)
        self.room = Room()

    # -- the clock

    def timeline(self) -> Timeline:
        for rank in range(len(self.cpu_at)):
            self._run_cpu(rank)
        self._settle()
        heap = self.heap
        while heap:
            self.now = heap[0][0]
            while heap and heap[0][0] == self.now:
                _, _, what, g, version = heapq.heappop(heap)
                if what != _END or version == self.version[g]:
                    self.due.append((what, g))
            self._settle()
        self._check_all_ended()
        return self._timeline()

    def _push(self, time: int, what: int, g: int, version: int = 0) -> None:
        self.events += 1
        heapq.heappush(self.heap, (time, self.events, what, g, version))

    def _settle(self) -> None:
        """Do all that happens now, then set the rates once."""
        due = self.due
        while due:
            what, g = due.popleft()
            if what == _START:
                self._start(g)
            elif what == _END:
                self._end(g)
            else:
                self._begin_wire(g)
        for g, end in self.rates.changes(self.now):
            self.version[g] += 1
            self._push(end, _END, g, self.version[g])

    # -- the CPU of a rank

    def _run_cpu(self, rank: int) -> None:
        """Launch until the CPU has to wait; it runs ahead of the clock."""
        graph, costs, num = self.graph, self.costs, len(self.graph.ops)
        g = graph.base[rank] + self.cpu_at[rank]
        stop = graph.base[rank] + len(graph.program.ranks[rank])
        time, last = self.cpu_ns[rank], self.cpu_last[rank]
        while g < stop:
            op = graph.ops[g]
            self.launch_ns[g] = time
            self.cpu_cause[g] = last
            self.waits_for[g] -= 1
            if op.kind == "host_wait":
                if self.waits_for[g]:
                    break  # `_release` goes on from here
                blocked = self.released_by[g] >= 0 and self.now > time
                time = max(time, self.now) if blocked else time
                self.start[g], self.end[g] = self.launch_ns[g], time
                self.cause[g] = self.released_by[g] if blocked else last
                if blocked:
                    last = g
            elif op.kind == "host":
                self.start[g], self.cause[g] = time, last
                cost = costs.host_ns(op)
                time += cost
                self.end[g] = time
                if cost:
                    last = g
            else:
                cost = costs.launch_ns(op)
                time += cost
                if cost:
                    last = g + num
                self.launched[g] = time
                self.cause[g] = last
                if not self.waits_for[g]:
                    self._schedule(g)
            g += 1
        self.cpu_at[rank] = g - graph.base[rank]
        self.cpu_ns[rank], self.cpu_last[rank] = time, last

    # -- operators of the device

    def _schedule(self, g: int) -> None:
        """All dependencies ended and it is launched: start now, or when launched."""
        if self.launched[g] > self.now:
            self._push(self.launched[g], _START, g)
        else:
            self.due.append((_START, g))

    def _release(self, g: int) -> None:
        graph = self.graph
        for d in self.dependents[g]:
            self.waits_for[d] -= 1
            self.released_by[d] = g
            if self.waits_for[d] == 0:
                if graph.ops[d].kind == "host_wait":
                    # The CPU stands at it: it was counted down when the CPU came.
                    self.waits_for[d] = 1
                    self._run_cpu(graph.ops[d].rank)
                else:
                    self._schedule(d)

    def _start(self, g: int) -> None:
        op = self.graph.ops[g]
        if op.kind == "memcpy" and not self._takes_turn(g):
            return
        self.start[g] = self.now
        # Where both end now, the launch is not what it waited for.
        if (
            self.released_by[g] >= 0
            and self.end[self.released_by[g]] >= self.launched[g]
        ):
            self.cause[g] = self.released_by[g]
        if op.kind == "communication":
            m = self.graph.meeting[g]
            self.arrived[m] += 1
            if self.arrived[m] == self.graph.meetings[m].expected:
                self._meet(m)
            return
        copies = op.kind == "memcpy"
        alone = self.costs.copy_ns(op) if copies else self.costs.kernel_ns(op)
        self.alone[g] = alone
        if alone == 0:
            self.due.append((_END, g))
        elif copies:
            self.rates.start_copy(
                g, op.rank, copy_direction(op), alone, self.now, pinned=is_pinned(op)
            )
        else:
            speeds = self.costs.speeds(op)
            self.rates.start_kernel(g, op.rank, alone, self.now, speeds)

    def _takes_turn(self, g: int) -> bool:
        """Is the copy engine free for `g`? If not, it queues."""
        op = self.graph.ops[g]
        queue = self.turns[engine(op.rank, copy_direction(op))]
        if not queue or queue[0] != g:
            queue.append(g)
        return queue[0] == g

    def _meet(self, m: int) -> None:
        """The last rank arrived."""
        self.ready[m] = self.now
        first = self.graph.meetings[m].members[0]
        latency = self.costs.meetings[m][0]
        if latency:
            self._push(self.now + latency, _LATENCY_OVER, first)
        else:
            self.due.append((_LATENCY_OVER, first))

    def _begin_wire(self, first: int) -> None:
        m = self.graph.meeting[first]
        if self.hw.waits_for_room:
            ranks = {self.graph.ops[g].rank for g in self.graph.meetings[m].members}
            if self.room.waits(m, self.rates.kernels(ranks)):
                return  # `_end` of a kernel goes on from here
        self.on_wire[m] = self.now
        wire = self.costs.meetings[m][1]
        if wire:
            high = self.costs.high_priority[m]
            ports = self.costs.ports[m]
            self.rates.start_wire(first, ports, wire, self.now, high_priority=high)
        else:
            self.due.append((_END, first))

    def _end(self, g: int) -> None:
        op = self.graph.ops[g]
        if op.kind == "communication":
            m = self.graph.meeting[g]
            members = self.graph.meetings[m].members
            self.rates.end_wire(g)
            for member in members:
                self.end[member] = self.now
            self._set_meeting_causes(m)
            for member in members:
                self._release(member)
            return
        self.end[g] = self.now
        if op.kind == "memcpy":
            self._end_copy(g)
        else:
            self.rates.end_kernel(g, op.rank)
            for m in self.room.made_by(g):
                self.due.append((_LATENCY_OVER, self.graph.meetings[m].members[0]))
        self._release(g)

    def _end_copy(self, g: int) -> None:
        """The next one's turn; this one is what it waited for."""
        op = self.graph.ops[g]
        direction = copy_direction(op)
        self.rates.end_copy(op.rank, direction)
        queue = self.turns[engine(op.rank, direction)]
        queue.popleft()
        if queue:
            self.released_by[queue[0]] = g
            self.due.append((_START, queue[0]))

    def _set_meeting_causes(self, m: int) -> None:
        """All spans of a collective began to move when the last rank arrived."""
        members, ready = self.graph.meetings[m].members, self.ready[m]
        last = [g for g in members if self.start[g] == ready]
        cause = self.cause[last[0]]
        for g in members:
            if self.start[g] != ready:  # who came last itself keeps its own cause
                self.cause[g] = cause

    # -- the end

    def _check_all_ended(self) -> None:
        # Launched, never matched, and nothing waits for it: a finding, no deadlock.
        if any(
            end < 0 and not self.graph.unmatched(g) for g, end in enumerate(self.end)
        ):
            raise deadlock_error(self.graph, time_ns=max(self.now, *self.cpu_ns))

    def _timeline(self) -> Timeline:
        """Spans in the order that `Timeline` promises, and their causes."""
        graph, num = self.graph, len(self.graph.ops)
        # (start, rank, lane, end, code); the code is an id, or id + num for its launch.
        rows: list[tuple[int, int, str, int, int]] = []
        for g, op in enumerate(graph.ops):
            start, end = self.start[g], self.end[g]
            if op.kind in HOST_KINDS:
                if end > start:
                    rows.append((start, op.rank, CPU_LANE, end, g))
                continue
            if self.launched[g] > self.launch_ns[g]:
                launch = self.launch_ns[g], op.rank, CPU_LANE, self.launched[g], g + num
                rows.append(launch)
            if end >= 0:
                rows.append((start, op.rank, op.stream, end, g))
        rows.sort()
        place = {row[4]: index for index, row in enumerate(rows)}
        causes = (
            self.cpu_cause[code - num] if code >= num else self.cause[code]
            for *_, code in rows
        )
        program = graph.program
        starts_ns = [
            [self.start[g] for g in graph.rank_ids(r)] for r in range(len(graph.base))
        ]
        return Timeline(
            tuple(self._span(*row) for row in rows),
            tuple(map(place.get, causes)),
            num_ranks=len(program.ranks),
            represents=program.represents,
            origin="virtual",
            hardware=self.hw.name,
            memory=memory_over_time(program, starts_ns, max([0, *self.end]), self.hw),
        )

    def _span(self, start: int, rank: int, lane: str, end: int, code: int) -> Span:
        num = len(self.graph.ops)
        g = code - num if code >= num else code
        op = self.graph.ops[g]
        attributes: dict[str, object] = {"op": op.index, "label": op.label}
        if op.phase:
            attributes["phase"] = op.phase
        attributes.update(op.attributes)
        name, moved, flops = op.name, 0, 0
        kind: Kind
        if code >= num:
            kind, name = "launch", f"launch {name}"
        elif op.kind in HOST_KINDS:
            kind = "host"
            if op.kind == "host_wait" and not name.startswith("wait"):
                name = f"wait {name}"
        elif op.collective is not None:
            kind, moved = "communication", op.collective.bytes
            m = self.graph.meeting[g]
            attributes["ready_ns"] = self.ready[m]
            if self.graph.program.represents > 1:  # its peers have no spans
                attributes["group_size"] = len(op.collective.ranks)
            attributes["latency_ns"] = self.on_wire[m] - self.ready[m]
            attributes["wire_ns"] = end - self.on_wire[m]
            attributes["alone_ns"] = sum(self.costs.meetings[m])
        else:
            kind = "memcpy" if op.kind == "memcpy" else "compute"
            attributes["alone_ns"] = self.alone[g]
            # What a copy reads here it writes there.
            join = max if kind == "memcpy" else sum
            moved, flops = join((op.read_bytes, op.write_bytes)), op.flops
        return Span(rank, lane, kind, name, start, end, moved, flops, attributes)
