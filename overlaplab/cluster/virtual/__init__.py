"""The virtual cluster: ranks as threads, operators recorded, times resolved later."""

from overlaplab.cluster.virtual.run import run_virtual

__all__ = ["run_virtual"]
