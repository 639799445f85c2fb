"""Hide communication behind computation: a course and the library it uses.

Public names load when they are first used, so that `import overlaplab` takes
milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from overlaplab.timeline.timeline import set_page_writer

if TYPE_CHECKING:
    __version__: str
    from overlaplab.capture import capture_step as capture_step
    from overlaplab.checkup import doctor as doctor
    from overlaplab.cluster.run import Run as Run
    from overlaplab.cluster.run import run as run
    from overlaplab.diagnosis import diagnose as diagnose
    from overlaplab.errors import CaptureError as CaptureError
    from overlaplab.errors import DeadlockError as DeadlockError
    from overlaplab.errors import EventError as EventError
    from overlaplab.errors import MismatchError as MismatchError
    from overlaplab.errors import OverlaplabError as OverlaplabError
    from overlaplab.errors import ProfileError as ProfileError
    from overlaplab.errors import RankError as RankError
    from overlaplab.errors import RunTimeoutError as RunTimeoutError
    from overlaplab.hardware import PROFILES as PROFILES
    from overlaplab.hardware import Hardware as Hardware
    from overlaplab.hardware import Link as Link
    from overlaplab.profiling.nvtx import nvtx as nvtx
    from overlaplab.profiling.profile import profile as profile
    from overlaplab.profiling.read import read_trace as read_trace
    from overlaplab.program import Program as Program
    from overlaplab.program import find_findings as find_findings
    from overlaplab.program import replay as replay
    from overlaplab.program import resolve as resolve
    from overlaplab.streams import annotate as annotate
    from overlaplab.streams import device as device
    from overlaplab.streams import name_tensor as name_tensor
    from overlaplab.techniques import compiler as compiler
    from overlaplab.techniques.data_parallel import BucketedReducer as BucketedReducer
    from overlaplab.techniques.data_parallel import HookReducer as HookReducer
    from overlaplab.techniques.data_parallel import SerialReducer as SerialReducer
    from overlaplab.techniques.data_parallel import plan_buckets as plan_buckets
    from overlaplab.techniques.double_buffer import BatchPrefetcher as BatchPrefetcher
    from overlaplab.techniques.double_buffer import (
        DoubleBufferedReducer as DoubleBufferedReducer,
    )
    from overlaplab.techniques.double_buffer import (
        DoubleBufferedWeights as DoubleBufferedWeights,
    )
    from overlaplab.techniques.memory import frontier as frontier
    from overlaplab.techniques.memory import plan_checkpoints as plan_checkpoints
    from overlaplab.techniques.zero import Zero3 as Zero3
    from overlaplab.timeline import Span as Span
    from overlaplab.timeline import Timeline as Timeline

# Module of this package -> the public names that it has.
_HOMES = {
    "capture": "capture_step",
    "checkup": "doctor",
    "cluster.run": "Run run",
    "diagnosis": "diagnose",
    "errors": "CaptureError DeadlockError EventError MismatchError OverlaplabError "
    "ProfileError RankError RunTimeoutError",
    "grading": "check",
    "hardware": "PROFILES Hardware Link",
    "profiling.nvtx": "nvtx",
    "profiling.profile": "profile",
    "profiling.read": "read_trace",
    "program": "Program find_findings replay resolve",
    "streams": "annotate device name_tensor",
    "techniques.data_parallel": "BucketedReducer HookReducer SerialReducer "
    "plan_buckets",
    "techniques.double_buffer": "BatchPrefetcher DoubleBufferedReducer "
    "DoubleBufferedWeights",
    "techniques.memory": "frontier plan_checkpoints",
    "techniques.zero": "Zero3",
    "timeline": "Span Timeline",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
_ROOMS = (
    *("calibrate", "capture", "checkup", "cluster", "diagnosis", "grading", "hardware"),
    *("models", "profiling", "program", "streams", "techniques", "timeline", "view"),
)
_TECHNIQUES = ("compiler",)

__all__ = sorted(_HOME)


def _write_page(timeline: Timeline, path: Any, beside: Any, title: Any) -> Any:
    from overlaplab.view import show

    return show(timeline, beside, title=title).save_html(path)


set_page_writer(_write_page)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f"overlaplab.{_HOME[name]}"), name)
    elif name in _ROOMS:
        value = import_module(f"overlaplab.{name}")
    elif name in _TECHNIQUES:
        value = import_module(f"overlaplab.techniques.{name}")
    elif name == "__version__":
        value = import_module("overlaplab.version").find_version()
    else:
        raise AttributeError(f"module 'overlaplab' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_ROOMS, *_TECHNIQUES})
