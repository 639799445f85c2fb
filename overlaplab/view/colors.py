"""What each kind of time looks like: for pictures and legends.

Colours are those of Okabe and Ito ("Color Universal Design", 2008), which people with
any kind of colour blindness distinguish; hatching says the same once more. A figure has
no background: what stands on the page itself has one ink that light and dark paper both
set off (4.5 and 4.2 to 1), and pale areas are thin washes of grey.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from matplotlib.patches import Patch

from overlaplab.timeline import MEMORY_KINDS, Share, Span
from overlaplab.timeline.critical_path import is_wait

INK = "#767676"  # lines and words on the page
PATH = INK
EXPOSED = "#BE2026"  # darker than the bar under it for any eyes
LABEL = "#FFF6E0"  # behind words on hatching, and between a bar and its strip
BAND = "#80808026"
TEXT = "#222222"  # words on something bright


@dataclass(frozen=True, slots=True)
class Color:
    """How one kind of time is painted."""

    face: str
    edge: str  # of the outline and of the hatching
    label: str  # for the legend
    hatch: str = ""  # matplotlib's code
    text: str = TEXT  # of a name written on it

    def patch(self) -> Patch:
        """The entry of a legend."""
        return Patch(
            facecolor=self.face,
            edgecolor=self.edge,
            hatch=2 * self.hatch,
            label=self.label,
            linewidth=0.6,
        )


COLORS: Mapping[str, Color] = {
    "compute": Color("#0072B2", "#5BA6D0", "compute", text="#FFFFFF"),
    "forward": Color("#56B4E9", "#A6D8F5", "compute, forward"),
    "wire": Color("#E69F00", "#7A4F00", "communication: wire", hatch="///"),
    "latency": Color("#F0E442", "#7A4F00", "communication: latency", hatch="..."),
    "waiting": Color("#E69F0026", "#E69F00", "communication: waits for peers"),
    "memcpy": Color("#009E73", "#66C5AB", "copy", text="#FFFFFF"),
    "memset": Color("#66C4A8", "#B5E3D6", "memset"),
    "launch": Color("#7F7F7F", "#B3B3B3", "CPU launches", text="#FFFFFF"),
    "host": Color("#565656", "#949494", "CPU computes", text="#FFFFFF"),
    "wait": Color("#B8B8B8", "#9A9A9A", "CPU waits"),
}

SHARE_COLORS: Mapping[Share, Color] = {
    "compute": COLORS["compute"],
    "wire": replace(COLORS["wire"], label="wire"),
    "latency": replace(COLORS["latency"], label="latency"),
    "launch": replace(COLORS["launch"], label="launch"),
    "idle": Color(BAND, "#7F7F7F", "idle", text=INK),
}

# Paul Tol's nine light colours, which people with any kind of colour blindness tell
# from each other and from the bars, and a darker grey for what nobody asked for.
_LIGHT = (
    *("#77AADD", "#99DDFF", "#44BB99", "#BBCC33", "#EE8866"),
    *("#EEDD88", "#FFAABB", "#AAAA00", "#BBBBBB", "#DDDDDD"),
)
_IN_WORDS = {
    "states": "optimizer states",
    "gathered": "gathered parameters",
    "communication": "buffers of collectives",
}
MEMORY_COLORS: Mapping[str, Color] = {
    kind: Color(face, "none", _IN_WORDS.get(kind, kind))
    for kind, face in zip(MEMORY_KINDS, _LIGHT, strict=True)
}


def colors_of(span: Span) -> list[tuple[str, int, int]]:
    """The parts of a span as (color, start_ns, end_ns), in order, tiling it."""
    if span.kind == "communication":
        ready_ns = span.attributes.get("ready_ns", span.start_ns)
        ready_ns = min(max(ready_ns, span.start_ns), span.end_ns)
        wire_ns = min(ready_ns + span.attributes.get("latency_ns", 0), span.end_ns)
        parts = [
            ("waiting", span.start_ns, ready_ns),
            ("latency", ready_ns, wire_ns),
            ("wire", wire_ns, span.end_ns),
        ]
        return [part for part in parts if part[1] < part[2]]
    color: str = span.kind
    if is_wait(span):
        color = "wait"
    elif span.kind == "compute" and span.attributes.get("phase") == "forward":
        color = "forward"
    return [(color, span.start_ns, span.end_ns)]
