"""Who made the collectives, from what the trace says of itself: ranges and operators.

Evidence only: a trace that says nothing is of an unknown maker.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from overlaplab.diagnosis.collectives import Collective
from overlaplab.errors import plural
from overlaplab.timeline import Span, Timeline

UNKNOWN = "unknown"
_OURS = re.compile(r"\b(BucketedReducer|HookReducer|SerialReducer)\b")
_BUCKET = re.compile(r"\bbucket (\d+)$")


@dataclass(frozen=True, slots=True)
class Maker:
    """Who launched a step's collectives."""

    # "DistributedDataParallel", "FSDP", "Zero3", a reducer of overlaplab, or "unknown"
    name: str
    # how often the trace says so, by what it says
    evidence: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        said = [f"{what} ({plural(n, 'span')})" for what, n in self.evidence.items()]
        return f"{self.name}: {', '.join(said)}" if said else self.name


def makers_of(
    timeline: Timeline, collectives: Sequence[Collective]
) -> tuple[Maker, ...]:
    """All makers that left evidence, `UNKNOWN` alone if there is none."""
    found: dict[str, Counter[str]] = {}
    for span in timeline.spans:
        for name, what in _named_by(span):
            found.setdefault(name, Counter())[what] += 1
    for name, what in (*_bucket_labels(collectives), *_zero_labels(collectives)):
        found.setdefault(name, Counter())[what] += 1
    ours = [name for name in found if _OURS.fullmatch(name)]
    if ours and "overlaplab's reducer" in found:
        # The class says more than its buckets do.
        found[ours[0]].update(found.pop("overlaplab's reducer"))
    ordered = sorted(found.items(), key=lambda item: -item[1].total())
    makers = tuple(Maker(name, dict(by.most_common(3))) for name, by in ordered)
    return makers or (Maker(UNKNOWN),)


def _named_by(span: Span) -> Iterator[tuple[str, str]]:
    label = str(span.attributes.get("label", ""))
    operator = str(span.attributes.get("operator", ""))
    if label.startswith("DistributedDataParallel"):
        yield "DistributedDataParallel", f"range {label}"
    for word in ("torch::distributed::reducer", "torch.distributed.ddp.reducer"):
        if operator.startswith(word):
            yield "DistributedDataParallel", f"operator {operator}"
    if span.name == "copy_bucket_to_grad" and not operator:
        yield "DistributedDataParallel", f"operator {span.name}"
    if label.startswith("FSDP::"):
        yield "FSDP", f"range {label.split(' ')[0]}"
    if operator.startswith("fsdp::"):
        yield "FSDP", f"operator {operator}"
    ranges = span.attributes.get("ranges", ())
    for word in (label, *map(str, ranges)):
        if match := _OURS.search(word):
            yield match[1], f"range {match[1]}"
            break


def _bucket_labels(collectives: Sequence[Collective]) -> Iterator[tuple[str, str]]:
    """Our reducers label each bucket's collective, on a group of their own."""
    for collective in collectives:
        if not _BUCKET.search(str(collective.span.attributes.get("label", ""))):
            continue
        raw = str(collective.span.attributes.get("collective", ""))
        how = "coalesced " if "coalesced" in raw else ""
        yield "overlaplab's reducer", f"{how}collectives labelled 'bucket N'"


def _zero_labels(collectives: Sequence[Collective]) -> Iterator[tuple[str, str]]:
    """`Zero3` labels units that it gathers and scatters, and one all-reduce a step."""
    labels = [str(c.span.attributes.get("label", "")) for c in collectives]
    if "who has gradients" not in labels:
        return
    for word in (label.partition(" ")[0] for label in labels):
        if word in ("gather", "scatter"):
            yield "Zero3", f"collectives labelled '{word} UNIT'"
