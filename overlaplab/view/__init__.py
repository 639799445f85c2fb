"""Timelines for people: figures, text, tables, sliders. Units change only here."""

from overlaplab.view.ascii_lanes import text
from overlaplab.view.explore import Explorer, Knob, explorer
from overlaplab.view.picture import draw, draw_many
from overlaplab.view.running_table import Table, table
from overlaplab.view.share_bars import shares_bar
from overlaplab.view.show import show
from overlaplab.view.units import format_bytes, format_ns

__all__ = [
    "Explorer",
    "Knob",
    "Table",
    "draw",
    "draw_many",
    "explorer",
    "format_bytes",
    "format_ns",
    "shares_bar",
    "show",
    "table",
    "text",
]
