"""What the installed PyTorch has of these passes: looked up in its files."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

# What it does, where it stands under torch/, and its name there.
PASSES = (
    ("launch early", "_inductor/comms.py", "raise_comms"),
    ("wait late", "_inductor/comms.py", "sink_waits"),
    ("wait late, watching memory", "_inductor/comms.py", "sink_waits_iterative"),
    (
        "launch early, watching memory",
        "_inductor/comms.py",
        "reorder_communication_preserving_peak_memory",
    ),
    ("order of computing", "_inductor/comms.py", "reorder_compute_for_overlap"),
    ("buckets", "_inductor/fx_passes/bucketing.py", "bucket_all_reduce"),
    (
        "order and buckets together",
        "_inductor/fx_passes/overlap_scheduling.py",
        "schedule_overlap_bucketing",
    ),
    ("one graph per bucket", "_dynamo/backends/distributed.py", "DDPOptimizer"),
)
SETTINGS = (
    ("_dynamo/config.py", "optimize_ddp"),
    ("_inductor/config.py", "reorder_for_compute_comm_overlap"),
    ("_inductor/config.py", "reorder_for_compute_comm_overlap_passes"),
    ("_inductor/config.py", "bucket_all_reduces_fx"),
    ("_inductor/config.py", "enable_overlap_scheduling"),
)


def _tree_of(file: str) -> ast.Module:
    """A file of torch, parsed; an empty one where this version has no such file."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent / file
    return ast.parse(path.read_text("utf-8") if path.exists() else "")


def _name_of(node: ast.Assign | ast.AnnAssign) -> str:
    target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
    return ast.unparse(target)


def _left(rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns all begin at the left."""
    every = list(rows)
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in every)


def passes_table() -> str:
    """By file, each pass and the line where this PyTorch has it."""

    def rows() -> Iterator[tuple[str, ...]]:
        for what, file, name in PASSES:
            found = (
                f"line {node.lineno}"
                for node in _tree_of(file).body
                if isinstance(node, ast.FunctionDef | ast.ClassDef)
                and node.name == name
            )
            yield f"  {what}", name, next(found, "not in this version")

    shown: dict[str, list[str]] = {}
    for (_, file, _), row in zip(PASSES, _left(rows()).splitlines(), strict=True):
        shown.setdefault(f"torch/{file}", []).append(row)
    return "\n".join(line for file, rows in shown.items() for line in (file, *rows))


def settings_table() -> str:
    """Each setting that turns some of them on, and what it is by default."""

    def rows() -> Iterator[tuple[str, ...]]:
        for file, name in SETTINGS:
            found = (
                ast.unparse(node.value)
                for node in ast.walk(_tree_of(file))
                if isinstance(node, ast.Assign | ast.AnnAssign)
                and node.value is not None
                and _name_of(node) == name
            )
            yield name, next(found, "not in this version"), file

    return _left([("setting", "by default", "in torch/"), *rows()])
