"""A program and a hardware profile give a timeline: an event-driven resolver.

It knows no torch and no cluster. The idea of the clock is SimPy's: a heap of events,
ties broken by a running number, so that equal programs give equal timelines to the last
nanosecond. All arithmetic is in integers.

[Note: rates] An operator has an amount of *work*: its time alone, in units of which it
does `_FULL` a nanosecond while nothing slows it. Beside others it does less:

- k kernels on different streams of one rank run at 1/k each;
- a kernel runs at `compute_rate_permille` while a collective is on its rank's wire;
- a collective on the wire gets 1/k of the link, where k is the largest number of
  collectives on the wire of one of its ranks, and `wire_rate_permille` of that while a
  kernel runs on any of its ranks.

Rates change only where an operator starts or ends. Then the work done so far is taken
off, exactly, and the new end is the remaining work over the new rate, rounded up. A
collective's latency is not slowed; host-device copies run on their own engine and
neither slow nor are slowed.
"""

from __future__ import annotations

import heapq

from overlaplab.errors import MismatchError
from overlaplab.hardware import (
    Hardware,
    collective_ns,
    compute_ns,
    memcpy_ns,
    profile,
)
from overlaplab.program.deadlock import deadlock_error
from overlaplab.program.graph import Graph, Meeting, build_graph
from overlaplab.program.record import Op, Program
from overlaplab.program.spans import timeline_of
from overlaplab.timeline import Timeline

_SHARES = 2520  # divisible by 1 to 10: rates of up to ten sharers are exact
_FULL = 1000 * _SHARES

_Event = tuple[int, int, int, int, int]  # time, running number, what, id, version
_START, _LATENCY_OVER, _END = range(3)


def resolve(program: Program, hardware: str | Hardware) -> Timeline:
    """Assign integer nanoseconds to every operator of `program`.

    The CPU of each rank is a lane: launches cost `launch_ns` or `collective_launch_ns`
    one after the other, "host_wait" blocks it. A device operator starts at the latest
    of the end of its launch, of the operator before it on its lane (and communicator),
    and of those in `after`. A collective's span starts where its rank arrives; the
    latency begins when the last rank has (`ready_ns`), then the wire.

    Args:
        program: what was recorded; not changed.
        hardware: a profile or its name.

    Returns:
        A timeline with `causes`. Launches that cost nothing and waits that wait for
        nothing have no span. A collective that some rank never launched, and for which
        nothing waits, has none either (`find_findings` tells of it).

    Raises:
        DeadlockError: no rank can move.
        MismatchError: ranks meet in one collective with different operations.
        ProgramError: the program is not well-formed.
    """
    return Resolution(build_graph(program), profile(hardware)).timeline()


class Resolution:
    """The state of one `resolve`. Lists are indexed by operator id unless said."""

    def __init__(self, graph: Graph, hw: Hardware) -> None:
        self.graph = graph
        self.hw = hw
        ops, num, num_ranks = graph.ops, len(graph.ops), len(graph.program.ranks)
        self.now = 0
        self.heap: list[_Event] = []
        self.events = 0
        self.stack: list[tuple[int, int]] = []  # (what, id) that happens now

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

        self.work = [0] * num  # remaining, see [Note: rates]; a meeting's: first member
        self.rate = [0] * num
        self.since = [0] * num
        self.version = [0] * num
        self.alone = [0] * num
        self.kernels: list[dict[int, None]] = [{} for _ in range(num_ranks)]
        self.wires: list[dict[int, None]] = [{} for _ in range(num_ranks)]
        self.dirty: set[int] = set()

        self.arrived = [0] * len(graph.meetings)
        self.ready = [0] * len(graph.meetings)
        self.on_wire = [0] * len(graph.meetings)
        self.costs = [self._cost(m) for m in graph.meetings]
        self.ranks = [[ops[g].rank for g in m.members] for m in graph.meetings]
        self._kernel_costs: dict[tuple[int, str, int], int] = {}

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
                    self.stack.append((what, g))
            self._settle()
        self._check_all_ended()
        return timeline_of(self)

    def _push(self, time: int, what: int, g: int, version: int = 0) -> None:
        self.events += 1
        heapq.heappush(self.heap, (time, self.events, what, g, version))

    def _settle(self) -> None:
        """Do all that happens now, then set the rates once."""
        stack = self.stack
        while stack:
            what, g = stack.pop()
            if what == _START:
                self._start(g)
            elif what == _END:
                self._end(g)
            else:
                self._begin_wire(g)
        if self.dirty:
            self._set_rates()

    # -- the CPU of a rank

    def _run_cpu(self, rank: int) -> None:
        """Launch until the CPU has to wait; it runs ahead of the clock."""
        graph, hw, num = self.graph, self.hw, len(self.graph.ops)
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
                time += op.duration_ns
                self.end[g] = time
                if op.duration_ns:
                    last = g
            else:
                cost = (
                    hw.collective_launch_ns
                    if op.kind == "communication"
                    else hw.launch_ns
                )
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
            self.stack.append((_START, g))

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
        elif op.kind == "memcpy":
            self.alone[g] = memcpy_ns(self.hw, max(op.read_bytes, op.write_bytes))
            self._push_end(g, self.alone[g])
        else:
            self.alone[g] = self._kernel_cost(op)
            if self.alone[g] == 0:
                self.stack.append((_END, g))
                return
            self.work[g] = self.alone[g] * _FULL
            self.since[g] = self.now
            self.kernels[op.rank][g] = None
            self.dirty.add(op.rank)

    def _meet(self, m: int) -> None:
        """The last rank arrived."""
        self.ready[m] = self.now
        first = self.graph.meetings[m].members[0]
        latency = self.costs[m][0]
        if latency:
            self._push(self.now + latency, _LATENCY_OVER, first)
        else:
            self.stack.append((_LATENCY_OVER, first))

    def _begin_wire(self, first: int) -> None:
        m = self.graph.meeting[first]
        self.on_wire[m] = self.now
        wire = self.costs[m][1]
        if wire == 0:
            self.stack.append((_END, first))
            return
        self.work[first] = wire * _FULL
        self.since[first] = self.now
        for rank in self.ranks[m]:
            self.wires[rank][first] = None
            self.dirty.add(rank)

    def _end(self, g: int) -> None:
        op = self.graph.ops[g]
        if op.kind != "communication":
            self.end[g] = self.now
            if self.kernels[op.rank].pop(g, 0) is None:
                self.dirty.add(op.rank)
            self._release(g)
            return
        m = self.graph.meeting[g]
        members = self.graph.meetings[m].members
        for member, rank in zip(members, self.ranks[m], strict=True):
            self.end[member] = self.now
            if self.wires[rank].pop(g, 0) is None:
                self.dirty.add(rank)
        self._set_meeting_causes(m)
        for member in members:
            self._release(member)

    def _set_meeting_causes(self, m: int) -> None:
        """All spans of a collective began to move when the last rank arrived."""
        members, ready = self.graph.meetings[m].members, self.ready[m]
        last = [g for g in members if self.start[g] == ready]
        cause = self.cause[last[0]]
        for g in members:
            if self.start[g] != ready:  # who came last itself keeps its own cause
                self.cause[g] = cause

    # -- rates

    def _set_rates(self) -> None:
        hw, kernels, wires = self.hw, self.kernels, self.wires
        touched: dict[int, None] = {}
        for rank in sorted(self.dirty):
            running = kernels[rank]
            if running:
                slowed = hw.compute_rate_permille if wires[rank] else 1000
                rate = max(1, slowed * _SHARES // len(running))
                for g in running:
                    self._set_rate(g, rate)
            touched.update(wires[rank])
        self.dirty.clear()
        for first in touched:
            ranks = self.ranks[self.graph.meeting[first]]
            sharers = max(len(wires[rank]) for rank in ranks)
            beside = any(kernels[rank] for rank in ranks)
            slowed = hw.wire_rate_permille if beside else 1000
            self._set_rate(first, max(1, slowed * _SHARES // sharers))

    def _set_rate(self, g: int, rate: int) -> None:
        if self.rate[g] == rate:
            return
        self.work[g] -= self.rate[g] * (self.now - self.since[g])
        self.since[g], self.rate[g] = self.now, rate
        self._push_end(g, -(-self.work[g] // rate))

    def _push_end(self, g: int, duration: int) -> None:
        self.version[g] += 1
        self._push(self.now + max(duration, 0), _END, g, self.version[g])

    # -- costs

    def _kernel_cost(self, op: Op) -> int:
        key = (op.flops, op.dtype, op.read_bytes + op.write_bytes)
        cost = self._kernel_costs.get(key)
        if cost is None:
            cost = self._kernel_costs[key] = compute_ns(self.hw, *key)
        return cost

    def _cost(self, meeting: Meeting) -> tuple[int, int]:
        first = self.graph.ops[meeting.members[0]].collective
        assert first is not None
        payload = 0
        for g in meeting.members:
            op = self.graph.ops[g]
            assert op.collective is not None
            payload = max(payload, op.collective.bytes)
            pair = {first.operation, op.collective.operation}
            if len(pair) > 1 and pair != {"send", "recv"}:
                raise MismatchError(
                    f"in collective #{meeting.sequence} of {meeting.group!r} rank "
                    f"{self.graph.ops[meeting.members[0]].rank} launches "
                    f"{first.operation} and rank {op.rank} {op.collective.operation}; "
                    "all must launch the same, in the same order"
                )
        return collective_ns(self.hw, first.operation, len(first.ranks), payload)

    # -- the end

    def _check_all_ended(self) -> None:
        # Launched, never matched, and nothing waits for it: a finding, no deadlock.
        if any(
            end < 0 and not self.graph.unmatched(g) for g, end in enumerate(self.end)
        ):
            raise deadlock_error(self.graph, time_ns=max(self.now, *self.cpu_ns))
