"""Steps by launch, phases, and several ranks in one file or in many, by hand."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlaplab as ol
from overlaplab.errors import TraceError
from tests.profiling.traces_by_hand import COMM, annotation, kernel, launch, write

H200 = Path(__file__).parents[1] / "traces" / "h200"


@pytest.fixture
def read(tmp_path):
    def read(events, **fields):
        return ol.read_trace(write(tmp_path / "trace.json", events, **fields))

    return read


def fraction(timeline):
    return timeline.report().overlap_fraction


# --- steps ------------------------------------------------------------------------


def steps():
    return [
        annotation("ProfilerStep#1", 0, 15),
        annotation("ProfilerStep#2", 15, 60),
        launch(1, 0, 1),
        launch(2, 1, 2),
        launch(3, 16, 17),
        launch(4, 2, 3),
        kernel(COMM, 20, 0, 10, correlation=1),
        kernel("gemm", 7, 0, 10, correlation=2),
        kernel(COMM, 20, 20, 50, correlation=3),
        kernel("late", 7, 16, 18, correlation=4),
        kernel("unlaunched", 7, 18, 19, correlation=99),
    ]


def test_the_whole_is_the_ratio_of_sums_not_the_mean_of_ratios(read):
    assert fraction(read(steps())) == 0.25


def test_a_kernel_belongs_to_the_step_that_launched_it(read):
    timeline = read(steps())

    assert timeline.steps == (1, 2)
    assert [fraction(timeline.of_step(step)) for step in timeline.steps] == [1.0, 0.0]
    assert "late" in timeline.of_step(1).order()
    assert "late" not in timeline.of_step(2).order()


def test_kernels_without_a_launch_count_in_the_whole_and_are_reported(read):
    timeline = read(steps())

    assert timeline.report().compute_ns == 13_000
    assert sum(timeline.of_step(s).report().compute_ns for s in (1, 2)) == 12_000
    assert timeline.source.remarks == (
        "trace.json: GPU events without a launch record in the trace: 1 (left over "
        "from the warm-up, perhaps); they count in the whole and in no step",
    )


def test_kernels_that_were_launched_between_steps_are_reported(read):
    between = [launch(5, 61, 62), kernel("evaluation", 7, 62, 63, correlation=5)]

    timeline = read([*steps(), *between])

    assert timeline.source.remarks[1] == (
        "trace.json: GPU events that no step launched: 2; they count in the whole and "
        "in no step"
    )


def test_the_backward_is_what_autograd_s_thread_launched(read):
    engine = {
        **annotation("autograd::engine::evaluate_function: MmBackward0", 10, 20),
        "cat": "cpu_op",
        "tid": 101,
    }
    timeline = read(
        [
            annotation("ProfilerStep#1", 0, 40),
            annotation("train", 8, 22),
            engine,
            launch(1, 2, 3),
            launch(2, 12, 13, thread=101),
            launch(3, 30, 31),
            kernel("forward", 7, 4, 5, correlation=1),
            kernel("backward", 7, 14, 15, correlation=2),
            kernel("optimizer", 7, 32, 33, correlation=3),
        ]
    )

    spans = {s.name: s.attributes for s in timeline.spans if "stream" in s.attributes}
    assert {name: of.get("phase") for name, of in spans.items()} == {
        "forward": "forward",
        "backward": "backward",
        "optimizer": None,
    }
    assert spans["backward"]["label"] == "train"
    assert spans["backward"]["thread"] == 101


# --- ranks ------------------------------------------------------------------------


def test_a_single_file_needs_no_rank(read):
    for fields in ({}, {"distributedInfo": {"backend": "nccl"}}):
        assert read([kernel("gemm", 7, 0, 1)], **fields).spans[0].rank == 0


def test_two_files_of_one_rank_are_an_error_that_names_both(tmp_path):
    for name in ("a.json", "b.json"):
        fields = {"distributedInfo": {"rank": 0}}
        write(tmp_path / name, [kernel("gemm", 7, 0, 1)], **fields)

    with pytest.raises(TraceError, match=r"a\.json and .*b\.json .*rank 0"):
        ol.read_trace(tmp_path)


def test_files_without_ranks_are_numbered_by_their_names_or_order(tmp_path):
    for name in ("rank_3.json", "rank_11.json", "trace-x.json", "trace-y.json"):
        write(tmp_path / name, [kernel(f"of_{name[:-5]}", 7, 0, 1)])

    def ranks(*names):
        timeline = ol.read_trace([tmp_path / name for name in names])
        return {s.name: s.rank for s in timeline.spans}, timeline.source.remarks[0]

    assert ranks("rank_3.json", "rank_11.json") == (
        {"of_rank_3": 3, "of_rank_11": 11},
        "files that name no rank were numbered by their names: rank_3.json 3, "
        "rank_11.json 11",
    )
    assert ranks("trace-x.json", "trace-y.json")[0] == {
        "of_trace-x": 0,
        "of_trace-y": 1,
    }


def test_each_device_of_a_file_is_a_rank_of_its_own(read):
    timeline = read(
        [
            kernel(COMM, 20, 0, 10, device=0),
            kernel("gemm", 7, 0, 10, device=1),
            kernel(COMM, 20, 0, 10, device=1),
        ],
        deviceProperties=[{"id": 0, "name": "A"}, {"id": 1, "name": "B"}],
    )

    ratios = [(r.rank, r.overlap_fraction) for r in timeline.report().ranks]
    assert ratios == [(0, 0.0), (1, 1.0)]
    assert timeline.source.devices == ((0, "A"), (1, "B"))


def test_files_that_were_put_together_are_ranks_again(read):
    events = [
        launch(1, 0, 1),
        kernel("gemm", 7, 1, 5, correlation=1),
        {**launch(1, 10, 11), "pid": 200},
        {**kernel(COMM, 7, 11, 15, correlation=1), "pid": "rank 1: 0"},
    ]

    timeline = read(events)

    assert [
        (s.rank, s.kind, s.attributes["launch_ns"])
        for s in timeline.spans
        if "stream" in s.attributes
    ] == [(0, "compute", 0), (1, "communication", 10_000)]


def test_recordings_that_began_at_different_collectives_are_not_matched(tmp_path):
    for rank, begin in enumerate((0, 1000)):
        events = [kernel(COMM, 20, s + begin, s + begin + 10) for s in (0, 1000, 2000)]
        write(tmp_path / f"{rank}.json", events, distributedInfo={"rank": rank})

    timeline = ol.read_trace(tmp_path)

    assert not any("ready_ns" in span.attributes for span in timeline.spans)
    assert "clock" not in " ".join(timeline.source.remarks)


def test_ranks_of_one_clock_know_when_the_last_had_arrived(tmp_path):
    group = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
    for rank, starts in enumerate([(0, 20), (6, 25)]):
        events = [
            kernel(COMM, 20, s, e, **group)
            for s, e in zip(starts, (10, 30), strict=True)
        ]
        write(tmp_path / f"{rank}.json", events, distributedInfo={"rank": rank})

    timeline = ol.read_trace(tmp_path)

    assert [(s.rank, s.attributes["ready_ns"]) for s in timeline.spans] == [
        (0, 6_000),
        (1, 6_000),
        (0, 25_000),
        (1, 25_000),
    ]
    assert [r.waiting_ns for r in timeline.report().ranks] == [11_000, 0]


def meetings(timeline):
    """The spans of each collective of which it is known when all had arrived."""
    met = {}
    for span in timeline.spans:
        if "ready_ns" in span.attributes:
            met.setdefault(span.attributes["ready_ns"], []).append(span)
    return list(met.values())


def assert_the_last_start_is_ready(spans):
    (ready_ns,) = {span.attributes["ready_ns"] for span in spans}
    assert ready_ns == max(span.start_ns for span in spans)
    assert all(span.start_ns <= ready_ns <= span.end_ns for span in spans)


# The clocks are 20 us apart at times: one kernel ends before its peer starts.
@pytest.mark.parametrize(
    ("name", "num_unknown"), [("ours-100-b8", 0), ("ddp-default-b8", 2)]
)
def test_real_ranks_are_ready_when_the_last_one_starts(name, num_unknown):
    timeline = ol.read_trace(H200 / name)

    met = meetings(timeline)
    sent = [s for s in timeline.spans if s.kind == "communication"]
    assert len(sent) - sum(map(len, met)) == num_unknown
    for spans in met:
        assert sorted(span.rank for span in spans) == [0, 1]
        assert_the_last_start_is_ready(spans)
    assert "clock" not in " ".join(timeline.source.remarks)


def test_a_real_collective_is_ready_when_the_file_says_so():
    timeline = ol.read_trace(H200 / "ours-100-b8")
    (spans,) = [of for of in meetings(timeline) if of[0].start_ns == 10_961_955]

    assert [(s.rank, s.start_ns, s.end_ns) for s in spans] == [
        (1, 10_961_955, 11_893_024),
        (0, 11_374_455, 11_908_216),
    ]
    assert spans[0].attributes["ready_ns"] == 11_374_455


@given(
    starts=st.lists(st.tuples(*[st.integers(0, 900)] * 3), min_size=1, max_size=5),
    clocks=st.tuples(*[st.integers(-3_000, 3_000)] * 3),
)
def test_ready_is_the_last_start_whatever_the_clocks(tmp_path_factory, starts, clocks):
    folder = tmp_path_factory.mktemp("ranks")
    for rank, clock in enumerate(clocks):
        # Something that is no collective comes first, on each rank at another time.
        events = [kernel("gemm", 7, 5_000 + clock - rank, 5_001 + clock)]
        for number, of_ranks in enumerate(starts, 6):
            start, end = 1000 * number + of_ranks[rank] + clock, 1000 * number + 950
            events.append(kernel(COMM, 20, start, end + clock, Seq=number))
        write(folder / f"{rank}.json", events, distributedInfo={"rank": rank})

    timeline = ol.read_trace(folder)

    for spans in meetings(timeline):
        assert_the_last_start_is_ready(spans)


def test_where_the_clocks_cannot_be_right_nobody_knows_who_was_last(tmp_path):
    """One ends before the other starts: the middle of the differences is 0."""
    for rank, late in enumerate(((0, 0, 0), (0, 90, 0))):
        events = [
            kernel(COMM, 20, start + by, start + by + 10, Seq=number)
            for number, (start, by) in enumerate(zip((0, 200, 400), late, strict=True))
        ]
        write(tmp_path / f"{rank}.json", events, distributedInfo={"rank": rank})

    timeline = ol.read_trace(tmp_path)

    assert [s.start_ns for of in meetings(timeline) for s in of] == [
        0, 0, 400_000, 400_000,
    ]  # fmt: skip


def test_a_clock_that_drifts_is_not_trusted_where_it_is_off(tmp_path):
    for rank, late in enumerate(((0, 0, 0), (-300, 0, 300))):
        events = [
            kernel(COMM, 20, start + by, start + by + 900, Seq=number)
            for number, (start, by) in enumerate(
                zip((1000, 2000, 3000), late, strict=True)
            )
        ]
        write(tmp_path / f"{rank}.json", events, distributedInfo={"rank": rank})

    timeline = ol.read_trace(tmp_path)

    ((first, second),) = meetings(timeline)
    assert first.start_ns == second.start_ns == first.attributes["ready_ns"]


def test_a_clock_that_is_off_is_seen_by_the_ends_of_collectives(tmp_path):
    for rank, late in enumerate((0, 5_000)):
        events = [
            kernel(COMM, 20, start + late, start + late + 10, Seq=number)
            for number, start in enumerate((0, 20, 40))
        ]
        write(tmp_path / f"{rank}.json", events, distributedInfo={"rank": rank})

    timeline = ol.read_trace(tmp_path)

    assert timeline.of_rank(0).order() == timeline.of_rank(1).order().replace(
        "1 c", "0 c"
    )
    assert "clock of rank 1 is 5000 us ahead" in " ".join(timeline.source.remarks)


def test_a_folder_is_read_without_what_is_no_trace(tmp_path):
    write(tmp_path / "trace.json", [kernel("gemm", 7, 0, 1)])
    (tmp_path / "notes.txt").write_text("slow today")
    (tmp_path / "settings.json").write_text(json.dumps({"bucket": 25}))

    timeline = ol.read_trace(tmp_path)

    assert timeline.order() == "0 default gemm 0-1000"
    remarks = " ".join(timeline.source.remarks)
    assert "no traces, ignored: notes.txt, settings.json" in remarks
