"""Timelines for people: figures, text, tables, sliders. Units change only here."""

from overlaplab.view.picture import draw, draw_many
from overlaplab.view.share_bars import shares_bar
from overlaplab.view.units import format_bytes, format_ns

__all__ = [
    "draw",
    "draw_many",
    "format_bytes",
    "format_ns",
    "shares_bar",
]
