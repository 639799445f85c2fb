"""Hardware profiles and cost formulas. Imports no torch."""

from overlaplab.hardware.cost import OPERATIONS, collective_ns, compute_ns, memcpy_ns
from overlaplab.hardware.profile import Hardware, Link
from overlaplab.hardware.profiles import PROFILES, profile, with_link

__all__ = [
    "OPERATIONS",
    "PROFILES",
    "Hardware",
    "Link",
    "collective_ns",
    "compute_ns",
    "memcpy_ns",
    "profile",
    "with_link",
]
