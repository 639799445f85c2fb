"""Predicted against measured: how far the virtual cluster is to be trusted."""
