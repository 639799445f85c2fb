"""From a trace on disk to its overlap: ours beside HTA's (Holistic Trace Analysis)."""
