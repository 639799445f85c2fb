"""Spans in few words, and random timelines, for the tests of this folder."""

from hypothesis import strategies as st

from overlaplab.timeline import Span, Timeline


def compute(start, end, name="mm", rank=0, lane="default", **attributes):
    return Span(rank, lane, "compute", name, start, end, attributes=attributes)


def send(start, end, rank=0, lane="comm", name="all_reduce", **attributes):
    return Span(rank, lane, "communication", name, start, end, attributes=attributes)


def launch(start, end, name="launch mm", rank=0):
    return Span(rank, "cpu", "launch", name, start, end)


def host(start, end, name="wait", rank=0):
    return Span(rank, "cpu", "host", name, start, end)


def resolved(*spans_and_causes, num_ranks=1):
    """A timeline with known causes: (span, index of its cause), in order."""
    spans, causes = zip(*spans_and_causes, strict=True)
    return Timeline(spans, causes, num_ranks=num_ranks)


@st.composite
def random_spans(draw):
    rank = draw(st.integers(0, 2))
    lane, kind = draw(
        st.sampled_from(
            [
                ("cpu", "launch"),
                ("cpu", "host"),
                ("default", "compute"),
                ("side", "compute"),
                ("comm", "communication"),
                ("copy", "memcpy"),
                ("default", "memset"),
            ]
        )
    )
    start = draw(st.integers(0, 60))
    length = draw(st.integers(0, 25))
    name = draw(st.sampled_from(["wait", "work"]))
    attributes = {}
    if kind == "communication" and draw(st.booleans()):
        waiting = draw(st.integers(0, length))
        latency = draw(st.integers(0, length - waiting))
        attributes = {
            "ready_ns": start + waiting,
            "latency_ns": latency,
            "wire_ns": length - waiting - latency,
        }
    return Span(rank, lane, kind, name, start, start + length, attributes=attributes)


@st.composite
def random_timelines(draw):
    """Measured (no causes) or with causes, right or wrong ones."""
    timeline = Timeline.of(draw(st.lists(random_spans(), max_size=14)))
    if not timeline.spans or draw(st.booleans()):
        return timeline
    index = st.none() | st.integers(0, len(timeline.spans) - 1)
    causes = draw(
        st.lists(index, min_size=len(timeline.spans), max_size=len(timeline.spans))
    )
    return Timeline(timeline.spans, tuple(causes), num_ranks=timeline.num_ranks)
