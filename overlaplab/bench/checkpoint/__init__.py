"""Checkpoint plans beside what people choose by hand, and torch's activation budget."""
