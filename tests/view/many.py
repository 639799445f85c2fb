"""A timeline of as many spans as one wants, uneven, without a cluster."""

import random

from overlaplab.timeline import Span, Timeline

LANES = (("cpu", "launch"), ("default", "compute"), ("comm", "communication"))


def many(num_spans, num_ranks=4):
    """So many spans on three lanes a rank, of 0.5 to 40 us, with gaps."""
    draw = random.Random(0)
    spans = []
    for rank in range(num_ranks):
        for lane, kind in LANES:
            time_ns = 0
            for number in range(num_spans // (num_ranks * len(LANES))):
                time_ns += draw.randrange(1, 4_000)
                length_ns = draw.randrange(500, 40_000)
                parts = {}
                if kind == "communication":
                    parts = {
                        "ready_ns": time_ns + length_ns // 10,
                        "latency_ns": length_ns // 5,
                    }
                spans.append(
                    Span(
                        rank,
                        lane,
                        kind,
                        f"{kind} {number % 60}",
                        time_ns,
                        time_ns + length_ns,
                        bytes=number * 4096,
                        attributes={"label": f"bucket {number % 40}", **parts},
                    )
                )
                time_ns += length_ns
    return Timeline.of(spans)
