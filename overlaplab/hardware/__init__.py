"""Hardware profiles and cost formulas. Imports no torch."""

from overlaplab.hardware.profile import Hardware, Link

__all__ = ["Hardware", "Link"]
