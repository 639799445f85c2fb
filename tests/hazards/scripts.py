"""Random programs over streams, events, works and the CPU, and the edges they need.

A script is data: what is launched where and uses what, and how it would wait. Two
interpreters make the same program of it: by hand (`of_builder`) and as a function for
the virtual cluster (`of_torch`). `reachable` says slowly who comes before whom.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from overlaplab import streams
from overlaplab.program import Access, Program, ProgramBuilder

NUM_STREAMS = 3
NUM_PARTS = 3  # of one buffer
PART = 16  # elements

HOWS = ("stream", "event", "third", "cpu", "work")


@dataclass(frozen=True)
class Launch:
    """One operator on one part of a buffer.

    Args:
        stream: on which, or for a collective from which; 0 is the default.
        part: of the buffer.
        writes: whether it writes it or only reads.
        collective: whether it is an all-reduce, which writes.
        how: the kind of each edge that it needs.
    """

    stream: int
    part: int
    writes: bool
    collective: bool
    how: str

    @property
    def lane(self) -> object:
        return "comm" if self.collective else self.stream


Edge = tuple[int, int]  # number of the earlier launch, of the later one

scripts = st.lists(
    st.builds(
        Launch,
        stream=st.integers(0, NUM_STREAMS - 1),
        part=st.integers(0, NUM_PARTS - 1),
        writes=st.booleans(),
        collective=st.sampled_from([False, False, True]),
        how=st.sampled_from(HOWS),
    ),
    min_size=2,
    max_size=8,
)


def edges(script: list[Launch]) -> list[Edge]:
    """An edge for each pair of launches on two lanes that may not change places."""
    return [
        (i, j)
        for j, later in enumerate(script)
        for i, earlier in enumerate(script[:j])
        if earlier.part == later.part
        and earlier.lane != later.lane
        and (earlier.writes or earlier.collective or later.writes or later.collective)
    ]


def of_builder(script: list[Launch], left_out: Edge | None = None) -> Program:
    b = ProgramBuilder()
    names = ["default", "1", "2"]
    ops: list[int] = []
    needed = edges(script)
    for number, launch in enumerate(script):
        own = names[launch.stream]
        for edge in needed:
            if edge[1] != number or edge == left_out:
                continue
            earlier, op = script[edge[0]], ops[edge[0]]
            if launch.how == "cpu":
                b.host_wait(0, [op])
            elif earlier.collective and launch.how == "work":
                b.wait(0, op, stream=own)
            elif launch.how == "third":
                b.wait_event(0, "third", [op])
                b.wait_stream(0, own, "third")
            elif launch.how == "stream" and not earlier.collective:
                b.wait_stream(0, own, names[earlier.stream])
            else:
                b.wait_event(0, own, [op])
        part = (Access(0, 4 * PART * launch.part, 4 * PART),)
        if launch.collective:
            op = b.collective(0, "all_reduce", reads=part, writes=part, stream=own)
        else:
            reads = {"reads": part} if not launch.writes else {"writes": part}
            op = b.compute(0, "op", stream=own, **reads)
        ops.append(op)
    return b.build()


def of_torch(script: list[Launch], left_out: Edge | None = None) -> None:
    """The same program, for every rank of the virtual cluster."""
    flat = torch.zeros(NUM_PARTS * PART)
    streams.synchronize()
    own = [streams.current_stream(), streams.Stream(), streams.Stream()]
    third = streams.Stream()
    done: list[tuple[object, object]] = []  # event, work
    needed = edges(script)
    for number, launch in enumerate(script):
        stream = own[launch.stream]
        for edge in needed:
            if edge[1] != number or edge == left_out:
                continue
            earlier, (event, work) = script[edge[0]], done[edge[0]]
            if launch.how == "cpu":
                event.synchronize()
            elif earlier.collective and launch.how == "work":
                with streams.stream(stream):
                    work.wait()
            elif launch.how == "third":
                third.wait_event(event)
                stream.wait_stream(third)
            elif launch.how == "stream" and not earlier.collective:
                stream.wait_stream(own[earlier.stream])
            else:
                stream.wait_event(event)
        part = flat[PART * launch.part : PART * (launch.part + 1)]
        work = None
        with streams.stream(stream):
            if launch.collective:
                work = dist.all_reduce(part, async_op=True)
                aside = streams.Stream()
                with streams.stream(aside):
                    work.wait()
                    event = aside.record_event()
            else:
                if launch.writes:
                    part.fill_(1)
                else:
                    part.sum()
                event = stream.record_event()
        done.append((event, work))
    streams.synchronize()


def reachable(program: Program) -> set[tuple[int, int]]:
    """All (earlier, later) pairs of rank 0 with a chain: by transitive closure."""
    before: dict[int, set[int]] = {}
    last: dict[str, int] = {}
    host: int | None = None
    for op in program.ranks[0]:
        direct = set(op.after)
        if op.stream in last:
            direct.add(last[op.stream])
        if host is not None:
            direct.add(host)
        before[op.index] = direct.union(*(before[d] for d in direct))
        last[op.stream] = op.index
        if op.kind == "host_wait":
            host = op.index
    return {(a, b) for b, known in before.items() for a in known}


def races(program: Program) -> set[tuple[int, int]]:
    """Pairs of operators of two lanes that meet in a byte with no chain: slowly."""
    ordered = reachable(program)
    return {
        (one.index, other.index)
        for other in program.ranks[0]
        for one in program.ranks[0][: other.index]
        if one.stream != other.stream
        and (one.index, other.index) not in ordered
        and any(
            a == b
            for mine, theirs in (
                (one.writes, (*other.reads, *other.writes)),
                (one.reads, other.writes),
            )
            for a in mine
            for b in theirs
        )
    }
