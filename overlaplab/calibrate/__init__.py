"""Calibration: measure this machine, and make a hardware profile of it."""
