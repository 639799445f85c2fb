"""Laws: complete programs have no hazard, and no needed edge is missed."""

from dataclasses import replace

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from overlaplab.cluster.virtual import run_virtual
from overlaplab.program import Program, ProgramBuilder, find_findings
from overlaplab.program.graph import build_graph, compute_clocks
from overlaplab.program.hazards import find_unordered, touches_of
from tests.hazards.scripts import (
    edges,
    of_builder,
    of_torch,
    races,
    reachable,
    scripts,
)


def unordered_pairs(program: Program) -> set[tuple[int, int]]:
    graph = build_graph(program)
    clocks = compute_clocks(graph)
    found = find_unordered(graph, clocks, touches_of(graph, clocks))
    return {(hazard.one.g, hazard.other.g) for hazard in found}


def hazards(program: Program) -> list[str]:
    return [str(f) for f in find_findings(program) if f.kind == "hazard"]


@settings(max_examples=200)
@given(scripts)
def test_a_program_with_all_its_edges_has_no_hazard(script):
    assert hazards(of_builder(script)) == []


@settings(max_examples=200)
@given(scripts)
def test_without_an_edge_exactly_the_pairs_without_a_chain_are_hazards(script):
    for edge in edges(script):
        program = of_builder(script, left_out=edge)
        assert unordered_pairs(program) == races(program)
        assert bool(hazards(program)) == bool(races(program))


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(scripts, st.data())
def test_the_virtual_cluster_finds_the_missing_edge_of_a_program_that_runs(
    script, data
):
    needed = [e for e in edges(script) if races(of_builder(script, left_out=e))]
    assume(needed)
    edge = data.draw(st.sampled_from(needed))
    _, complete = run_virtual(of_torch, (script,), world_size=2)
    assert hazards(complete) == []
    _, program = run_virtual(of_torch, (script, edge), world_size=2)
    found = [f for f in find_findings(program) if f.kind == "hazard"]
    assert {f.rank for f in found} == {0, 1}
    assert {f.ops for f in found if f.rank == 0} <= races(program)


# -- memory

STREAMS = ("default", "side")
uses = st.lists(
    st.tuples(st.sampled_from(STREAMS), st.booleans(), st.booleans()), max_size=3
)


@settings(max_examples=300)
@given(
    before=uses,
    after=uses,
    recorded=st.lists(st.sampled_from(STREAMS), max_size=1),
    waits=st.tuples(st.booleans(), st.booleans()),
)
def test_reuse_is_a_hazard_exactly_where_owners_meet_without_a_chain(
    before, after, recorded, waits
):
    b = ProgramBuilder()
    ops: dict[str, list[tuple[int, bool, str]]] = {"old": [], "new": []}

    def use(name, access, uses):
        for stream, writes, is_behind in uses:
            if is_behind:
                b.wait_stream(0, stream, STREAMS[stream == STREAMS[0]])
            how = "writes" if writes else "reads"
            op = b.compute(0, name, stream=stream, **{how: (access,)})
            ops[name].append((op, writes, stream))

    old = b.storage(0, bytes=512, name="old")
    use("old", old, before)
    for stream in recorded:
        b.record_stream(0, old, stream)
    if waits[0]:
        b.wait_stream(0, "default", "side")
    b.free(0, old)
    new = b.storage(0, bytes=512, name="new")
    if waits[1]:
        b.wait_stream(0, "side", "default")
    use("new", new, after)
    program = b.build()

    ordered = reachable(program)
    # An event at the release, on the recorded stream, covers what it is behind.
    event = [op for stream in recorded for op, _, s in ops["old"] if s == stream]
    if recorded == ["default"] and waits[0]:
        event += [op for op, _, s in ops["old"] if s == "side"]
    kept_back = {op for op, _, _ in ops["old"] if op in event} | {
        op for op, _, _ in ops["old"] if any((op, e) in ordered for e in event)
    }
    # Whoever reads first reads something older than this program: no new memory.
    is_new = bool(ops["new"]) and ops["new"][0][1]
    expected = is_new and any(
        op not in kept_back
        and (writes or other_writes)
        and stream != other_stream
        and (op, other) not in ordered
        for op, writes, stream in ops["old"]
        for other, other_writes, other_stream in ops["new"]
    )
    own = [f for f in find_findings(program) if f.kind == "hazard"]
    reused = [f for f in own if {"old", "new"} == {o.name for o in two(program, f)}]
    assert bool(reused) == expected


def two(program, finding):
    return [program.ranks[0][index] for index in finding.ops]


def test_a_block_is_found_in_use_whatever_its_number():
    b = ProgramBuilder()
    old = b.storage(0, bytes=512, name="old")
    b.compute(0, "read", stream="side", reads=(old,))
    b.free(0, old)
    new = b.storage(0, bytes=512)
    b.compute(0, "write", writes=(new,))
    lives = tuple(replace(s, freed_before=None) for s in b.build().storages)
    (finding,) = find_findings(replace(b.build(), storages=lives))
    assert finding.name == "old"
