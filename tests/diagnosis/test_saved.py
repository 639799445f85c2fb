"""Hidden is not saved: what overlap gained, against what things take alone."""

from __future__ import annotations

import overlaplab as ol
from overlaplab.diagnosis.text import text
from tests.diagnosis.hand import compute, send, timeline

MS = 1000  # microseconds


def overlapped(**alone: int):
    """Computation of 145 ms over communication of 95: alone 100 and 50."""
    more = [{"alone_ns": ns * 1_000_000} for ns in alone.values()] or [{}, {}]
    return timeline(compute(0, 145 * MS, **more[0]), send(0, 95 * MS, **more[1]))


def saved(made, **more):
    found = ol.diagnose(made, **more)
    (step,) = found.to_dict()["steps"]
    return tuple(
        step[key] if step[key] is None else step[key] // 1_000_000
        for key in ("hidden_ns", "exposed_ns", "saved_of_alone_ns", "possible_ns")
    )


def test_all_is_hidden_and_5_of_the_possible_50_ms_are_saved_against_the_serial_run():
    serial = timeline(compute(0, 100 * MS), send(100 * MS, 150 * MS))
    assert saved(overlapped(), serial=serial) == (95, 0, 5, 50)
    said = text(ol.diagnose(overlapped(), serial=serial))
    assert "hidden 95 of 95 ms" in said and "Saved 5 of 50 ms possible" in said
    assert "measured in the serial run" in " ".join(said.split())


def test_spans_that_know_what_they_take_alone_say_the_same():
    assert saved(overlapped(compute=100, communication=50)) == (95, 0, 5, 50)


def test_one_run_whose_times_alone_are_not_known_saves_nothing_that_can_be_said():
    made = overlapped()
    assert saved(made) == (95, 0, None, None)
    said = " ".join(str(ol.diagnose(made)).split())
    assert "What that saved, one run cannot show" in said and "--serial" in said
    assert ol.diagnose(made).to_dict()["steps"][0]["saved_ns"] is None


def test_contention_is_the_finding_and_costs_what_computation_grew_by():
    found = ol.diagnose(overlapped(compute=100, communication=50)).findings
    assert [(one.kind, one.cost_ns) for one in found] == [("contention", 45_000_000)]


def test_a_serial_step_saves_nothing_of_what_it_could():
    made = timeline(compute(0, 100 * MS), send(100 * MS, 150 * MS))
    assert saved(made) == (0, 50, None, None)
    assert "hidden 0 of 50 ms" in str(ol.diagnose(made))
    assert "So overlap saved nothing" in str(ol.diagnose(made))


def test_idle_time_can_cost_more_than_overlap_gives_and_is_said_in_words():
    made = timeline(
        compute(0, 10 * MS, alone_ns=10 * MS * 1000),
        send(5 * MS, 10 * MS, alone_ns=5 * MS * 1000),
        compute(90 * MS, 100 * MS),
    )
    assert saved(made)[2] == -75
    assert "75 ms longer than the two alone" in " ".join(str(ol.diagnose(made)).split())


def test_waiting_for_peers_is_not_communication_that_could_have_hidden():
    ranks = [
        span
        for rank, end in ((0, 10), (1, 90))
        for span in (
            compute(0, end * MS, rank=rank),
            send(end * MS, 100 * MS, rank=rank),
        )
    ]
    found = ol.diagnose(timeline(*ranks))
    assert [s.communication_alone_ns for s in found.saved.values()] == [10_000_000] * 2
