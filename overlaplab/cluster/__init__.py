"""Where programs run: the virtual cluster and pools of processes."""

from overlaplab.cluster.run import CLUSTERS, Run, run

__all__ = ["CLUSTERS", "Run", "run"]
