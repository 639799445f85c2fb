"""Traces of torch.profiler, of any version and vendor, as spans.

batches  a file's bytes -> batches of events   chunks  text -> events, damaged or not
rows     one event, and what it says           tables  events by kind, in columns
names    what counts as communication          labels  step, label and phase of a time
device, cpu  rows -> spans                     file    one file
ranks    several files, on one clock           searching  patterns, within a limit
"""
