"""Timelines of real devices: `ol.profile`, `ol.read_trace`, `ol.nvtx`."""
