"""Where programs run: `run.run`, the virtual cluster and the pool of processes."""
