"""Hardware profiles and cost formulas. Imports no torch."""

from overlaplab.hardware.collectives import OPERATIONS as OPERATIONS
from overlaplab.hardware.collectives import collective_ns as collective_ns
from overlaplab.hardware.cost import compute_ns as compute_ns
from overlaplab.hardware.cost import host_ns as host_ns
from overlaplab.hardware.cost import memcpy_ns as memcpy_ns
from overlaplab.hardware.cost import pcie_shares as pcie_shares
from overlaplab.hardware.kinds import contention_key as contention_key
from overlaplab.hardware.kinds import kernel_kind as kernel_kind
from overlaplab.hardware.model import Hardware as Hardware
from overlaplab.hardware.model import Link as Link
from overlaplab.hardware.points import interpolate as interpolate
from overlaplab.hardware.profiles import PROFILES as PROFILES
from overlaplab.hardware.profiles import find_hardware as find_hardware
from overlaplab.hardware.profiles import with_link as with_link
from overlaplab.hardware.store import read_profile as read_profile
from overlaplab.hardware.store import write_profile as write_profile
