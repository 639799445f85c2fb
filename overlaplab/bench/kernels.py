"""The kernels of a profiled step, summed by class.

`Timeline.report` has the rest: this says which kernels pay for an overlap.
"""

from __future__ import annotations

import re
from typing import Any

from overlaplab.timeline import Span, Timeline
from overlaplab.timeline.intervals import merge, total

_CLASSES = (
    ("attention", re.compile(r"flash|fmha|attention", re.IGNORECASE)),
    ("gemm", re.compile(r"gemm|cutlass|nvjet|xmma|cublas", re.IGNORECASE)),
    ("copy", re.compile(r"catarray", re.IGNORECASE)),
)
_OTHER_KINDS = {"communication": "nccl", "memcpy": "copy", "memset": "copy"}
_SLEEP = "spin_kernel"  # torch.cuda._sleep, by which benchmarks let the CPU run ahead


def kernel_sums(timeline: Timeline) -> dict[str, Any]:
    """Milliseconds of one rank's device, as results keep them.

    Returns:
        `kernels` (their number), `span_ms`, `idle_ms`, `hidden_ms`, `exposed_ms` as
        `Report` defines them, the sum of durations of each class of kernels (`nccl_ms`,
        `gemm_ms`, ...), `last_compute_end_ms` and each stretch of communication as
        (start, end) from the first kernel on.
    """
    device = timeline.where(
        lambda s: s.kind not in ("launch", "host") and _SLEEP not in _kernel(s)
    )
    if not device.spans:
        return {"kernels": 0}
    report, begin_ns = device.report(), device.start_ns
    sums: dict[str, int] = {}
    for span in device.spans:
        kind = _class(span)
        sums[kind] = sums.get(kind, 0) + span.duration_ns
    busy_ns = total(merge((s.start_ns, s.end_ns) for s in device.spans))
    wire = merge(
        (s.start_ns, s.end_ns) for s in device.spans if s.kind == "communication"
    )
    computed_ns = [s.end_ns for s in device.spans if s.kind == "compute"]
    return {
        "kernels": len(device.spans),
        "span_ms": _ms(report.step_ns),
        "idle_ms": _ms(report.step_ns - busy_ns),
        "hidden_ms": _ms(report.hidden_ns),
        "exposed_ms": _ms(report.exposed_ns),
        **{f"{kind}_ms": _ms(ns) for kind, ns in sorted(sums.items())},
        "last_compute_end_ms": _ms(max(computed_ns, default=begin_ns) - begin_ns),
        "communication_ms": [(_ms(a - begin_ns), _ms(b - begin_ns)) for a, b in wire],
    }


def _class(span: Span) -> str:
    if span.kind in _OTHER_KINDS:
        return _OTHER_KINDS[span.kind]
    name = _kernel(span)
    return next((kind for kind, pattern in _CLASSES if pattern.search(name)), "other")


def _kernel(span: Span) -> str:
    return str(span.attributes.get("kernel", span.name))


def _ms(ns: int) -> float:
    return round(ns / 1e6, 4)
