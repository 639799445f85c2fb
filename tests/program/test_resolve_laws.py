"""Laws of the resolver, on random programs of several ranks, streams and groups."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from overlaplab.hardware import Hardware, find_hardware
from overlaplab.program import ProgramBuilder, find_deadlock, resolve
from overlaplab.timeline import Span, Timeline

CHALK = find_hardware("chalk")
STREAMS = ("default", "side")
GROUPS = ("default", "other")

few = settings(max_examples=60)  # random programs are large enough to count twice

hardwares = st.builds(
    lambda launch, collective, compute, wire, latency, nodes, by_kind: replace(
        CHALK,
        name="drawn",
        launch_ns=launch,
        collective_launch_ns=collective,
        compute_rate_permille=compute,
        wire_rate_permille=wire,
        link=replace(CHALK.link, latency_ns=latency),
        gpus_per_node=nodes,
        network=replace(CHALK.link, bytes_per_s=5 * 10**9) if nodes else None,
        network_staged=nodes == 1,
        waits_for_room=nodes == 1,
        contention={"matmul": by_kind} if by_kind else {},
    ),
    st.sampled_from((0, 3, 50)),
    st.sampled_from((0, 7, 90)),
    st.sampled_from((1000, 667, 300)),
    st.sampled_from((1000, 501, 250)),
    st.sampled_from((0, 100)),
    st.sampled_from((0, 1, 2)),  # all on one link; staged nodes of one; nodes of two
    st.sampled_from(((), (1000, 333), (840, 1000))),
)
actions = st.one_of(
    st.tuples(st.just("compute"), st.sampled_from(STREAMS), st.integers(0, 200)),
    st.tuples(st.just("reduce"), st.sampled_from(GROUPS), st.integers(0, 3_000)),
    st.tuples(st.just("wait"), st.sampled_from(STREAMS), st.just(0)),
    st.tuples(st.just("host_wait"), st.just(""), st.just(0)),
    st.tuples(st.just("host"), st.just(""), st.integers(0, 60)),
    st.tuples(
        st.sampled_from(("h2d", "d2h")), st.sampled_from(STREAMS), st.integers(0, 2_000)
    ),
)


@st.composite
def programs(draw, streams=STREAMS, groups=GROUPS, copies=True):
    """All ranks do the same; kernels and host work take longer on some."""
    num_ranks = draw(st.integers(1, 3))
    script = draw(st.lists(actions, min_size=1, max_size=14))
    slower = draw(st.lists(st.integers(0, 40), min_size=num_ranks, max_size=num_ranks))
    b = ProgramBuilder(num_ranks)
    for rank in range(num_ranks):
        work = None
        for what, where, amount in script:
            if what == "compute":
                stream = where if where in streams else streams[0]
                b.compute(rank, "mm", ns=amount + slower[rank], stream=stream)
            elif what == "reduce":
                group = where if where in groups else groups[0]
                work = b.collective(rank, "all_reduce", bytes=amount, group=group)
            elif what == "wait" and work is not None:
                b.wait(rank, work, stream=where if where in streams else streams[0])
            elif what == "host_wait":
                b.host_wait(rank)
            elif what == "host":
                b.host(rank, "think", amount + slower[rank])
            elif what in ("h2d", "d2h") and copies:
                pinned = amount % 2 == 0
                b.copy(rank, what, bytes=amount, stream=where, pinned=pinned)
    return b.build()


def device(timeline: Timeline) -> list[Span]:
    return [s for s in timeline.spans if s.kind not in ("launch", "host")]


def length(timeline: Timeline) -> int:
    return max((s.end_ns for s in timeline.spans), default=0)


@few
@given(programs(), hardwares)
def test_a_program_in_one_order_on_all_ranks_has_no_deadlock(program, hw):
    assert find_deadlock(program) is None
    resolve(program, hw)


@few
@given(programs(), hardwares)
def test_resolving_again_gives_the_same_timeline(program, hw):
    assert resolve(program, hw) == resolve(program, hw)


@few
@given(programs(), hardwares)
def test_every_operator_of_the_device_has_exactly_one_span(program, hw):
    launched = [
        (op.rank, op.index)
        for rank in program.ranks
        for op in rank
        if op.kind in ("compute", "communication", "memcpy")
    ]
    spans = device(resolve(program, hw))
    assert sorted((s.rank, s.attributes["op"]) for s in spans) == launched


@few
@given(programs(), hardwares)
def test_nothing_is_faster_than_alone(program, hw):
    for span in device(resolve(program, hw)):
        start = span.attributes.get("ready_ns", span.start_ns)
        assert span.end_ns - start >= span.attributes["alone_ns"]


@few
@given(programs(), hardwares)
def test_spans_of_one_lane_do_not_overlap(program, hw):
    ends: dict[tuple[int, str], int] = {}
    for span in resolve(program, hw).spans:
        lane = (span.rank, span.lane)
        assert span.start_ns >= ends.get(lane, 0)
        ends[lane] = span.end_ns


@few
@given(programs(), hardwares)
def test_copies_of_one_direction_take_turns_in_the_order_of_their_spans(program, hw):
    ends: dict[tuple[int, str], int] = {}
    for span in resolve(program, hw).spans:
        if span.kind == "memcpy":
            engine = (span.rank, span.attributes["direction"])
            assert span.start_ns >= ends.get(engine, 0)
            ends[engine] = span.end_ns


@few
@given(programs(), hardwares)
def test_a_step_is_never_under_its_bound(program, hw):
    timeline = resolve(program, hw)
    for rank in range(timeline.num_ranks):
        own = [s for s in device(timeline) if s.rank == rank]
        kernels = sum(s.attributes["alone_ns"] for s in own if s.kind == "compute")
        wires = sum(
            s.attributes["alone_ns"] - s.attributes["latency_ns"]
            for s in own
            if s.kind == "communication"
        )
        assert length(timeline) >= max(kernels, wires)


@few
@given(programs(), hardwares)
def test_latency_and_wire_fill_a_collective_from_the_last_arrival_on(program, hw):
    timeline = resolve(program, hw)
    latest: dict[tuple[str, int], int] = {}
    for span in device(timeline):
        if span.kind == "communication":
            op = program.ranks[span.rank][span.attributes["op"]]
            key = (span.lane, op.collective.sequence)
            latest[key] = max(latest.get(key, 0), span.start_ns)
            a = span.attributes
            assert a["ready_ns"] + a["latency_ns"] + a["wire_ns"] == span.end_ns
    for span in device(timeline):
        if span.kind == "communication":
            op = program.ranks[span.rank][span.attributes["op"]]
            key = (span.lane, op.collective.sequence)
            assert span.attributes["ready_ns"] == latest[key]


@few
@given(programs(), hardwares)
def test_a_cause_ends_where_what_it_caused_begins_to_move(program, hw):
    timeline = resolve(program, hw)
    assert len(timeline.causes) == len(timeline.spans)
    for span, cause in zip(timeline.spans, timeline.causes, strict=True):
        if span.kind == "host" and span.name.startswith("wait"):
            moves = span.end_ns
        else:
            moves = span.attributes.get("ready_ns", span.start_ns)
        assert (0 if cause is None else timeline.spans[cause].end_ns) == moves


@few
@given(programs(("default",), ("default",), copies=False), hardwares)
def test_removing_contention_makes_nothing_slower_where_nothing_is_shared(program, hw):
    free = replace(
        hw,
        compute_rate_permille=1000,
        wire_rate_permille=1000,
        contention={},
        waits_for_room=False,
    )
    slowed, faster = resolve(program, hw), resolve(program, free)
    ends = {(s.rank, s.lane, s.attributes["op"]): s.end_ns for s in device(slowed)}
    for span in device(faster):
        assert span.end_ns <= ends[span.rank, span.lane, span.attributes["op"]]


@few
@given(programs(("default",), ("default",), copies=False), hardwares)
def test_a_faster_link_makes_no_step_slower_without_contention(program, hw):
    hw = replace(
        hw,
        compute_rate_permille=1000,
        wire_rate_permille=1000,
        contention={},
        waits_for_room=False,
    )
    fast: Hardware = replace(hw, link=replace(hw.link, bytes_per_s=20 * 10**9))
    assert length(resolve(program, fast)) <= length(resolve(program, hw))


@few
@given(programs(), hardwares)
def test_exposed_and_hidden_communication_add_up_and_a_step_is_not_under_its_bound(
    program, hw
):
    for report in resolve(program, hw).report().ranks:
        assert report.exposed_ns + report.hidden_ns == report.communication_ns
        assert report.step_ns >= report.bound_ns


@few
@given(programs(), hardwares)
def test_the_critical_path_fills_the_step_without_a_gap(program, hw):
    timeline = resolve(program, hw)
    path = timeline.critical_path()
    assert sum(path.shares_ns.values()) == length(timeline)
