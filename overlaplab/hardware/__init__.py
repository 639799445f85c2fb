"""Hardware profiles and cost formulas. Imports no torch."""

from overlaplab.hardware.collectives import OPERATIONS, collective_ns
from overlaplab.hardware.cost import compute_ns, host_ns, memcpy_ns, pcie_shares
from overlaplab.hardware.kinds import contention_key, kernel_kind
from overlaplab.hardware.model import Hardware, Link
from overlaplab.hardware.points import interpolate
from overlaplab.hardware.profiles import PROFILES, find_hardware, with_link
from overlaplab.hardware.store import read_profile, write_profile

__all__ = [
    "OPERATIONS",
    "PROFILES",
    "Hardware",
    "Link",
    "collective_ns",
    "compute_ns",
    "contention_key",
    "find_hardware",
    "host_ns",
    "interpolate",
    "kernel_kind",
    "memcpy_ns",
    "pcie_shares",
    "read_profile",
    "with_link",
    "write_profile",
]
