"""The numbers that a timeline reports."""

from hypothesis import given

from overlaplab.timeline import Span, Timeline
from tests.timeline.spans import compute, host, launch, random_timelines, send


def test_eighty_ms_of_compute_and_120_of_communication_in_140_hide_60():
    timeline = Timeline.of([compute(0, 80), send(20, 140)])
    report = timeline.report()
    assert (report.hidden_ns, report.exposed_ns, report.saved_ns) == (60, 60, 60)
    assert (report.serial_ns, report.bound_ns, report.step_ns) == (200, 120, 140)
    assert report.overlap_fraction == 0.5
    assert report.efficiency == 0.75


def test_all_can_be_hidden_and_next_to_nothing_saved():
    # Alone: compute 100, communication 50. Side by side they slow each other down.
    report = Timeline.of([compute(0, 145), send(0, 95)]).report()
    assert report.overlap_fraction == 1.0
    assert report.saved_ns == 95  # of the times as they became, not as they were alone
    assert report.step_ns == 145


def test_two_kernels_side_by_side_count_once():
    spans = [compute(0, 10), compute(5, 12, lane="side"), send(0, 4, lane="comm:tp")]
    report = Timeline.of(spans).report()
    assert report.compute_ns == 12
    assert report.hidden_ns == 4


def test_communication_behind_a_copy_or_a_memset_is_exposed():
    copy = Span(0, "copy", "memcpy", "copy", 0, 10)
    memset = Span(0, "default", "memset", "memset", 10, 13)
    report = Timeline.of([copy, memset, send(0, 13)]).report()
    assert (report.compute_ns, report.memcpy_ns, report.memset_ns) == (0, 10, 3)
    assert report.exposed_ns == 13


def test_a_collective_that_spins_for_its_peers_is_communication():
    report = Timeline.of([send(10, 50, ready_ns=30), compute(0, 10)]).report()
    assert report.communication_ns == 40
    assert report.waiting_ns == 20


def test_the_step_counts_from_the_first_launch_on_the_cpu():
    report = Timeline.of([launch(0, 5), compute(5, 25), host(5, 30)]).report()
    assert report.step_ns == 30


def test_the_whole_run_reports_its_slowest_rank():
    fast = [compute(0, 10), send(10, 20)]
    slow = [compute(0, 30, rank=1), send(10, 35, rank=1)]
    report = Timeline.of(fast + slow).report()
    assert (report.rank, report.step_ns, report.hidden_ns) == (1, 35, 20)
    assert [r.rank for r in report.ranks] == [0, 1]
    assert [r.step_ns for r in report.ranks] == [20, 35]


def test_a_ratio_over_nothing_is_none_and_not_zero():
    report = Timeline.of([compute(0, 10)]).report()
    assert report.overlap_fraction is None
    assert report.saved_fraction is None
    assert report.efficiency is None


def test_an_empty_timeline_reports_zeros():
    report = Timeline(()).report()
    assert (report.step_ns, report.serial_ns, report.ranks) == (0, 0, ())


@given(random_timelines())
def test_exposed_and_hidden_make_up_communication_and_no_union_passes_the_step(line):
    for rank in line.report().ranks:
        assert rank.exposed_ns + rank.hidden_ns == rank.communication_ns
        assert 0 <= rank.hidden_ns <= min(rank.compute_ns, rank.communication_ns)
        assert rank.bound_ns <= rank.step_ns
        assert rank.saved_ns <= rank.hidden_ns
        assert 0 <= rank.waiting_ns <= rank.communication_ns


@given(random_timelines())
def test_the_step_of_a_timeline_is_its_report_s(line):
    assert line.step_ns == line.report().step_ns
