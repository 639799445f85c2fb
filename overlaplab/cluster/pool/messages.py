"""What a worker of the pool and its parent say to one another, as plain tuples' types.

Parent to worker: `Call`, `Locate`. Worker to parent: once `Ready`; in each call
`Started`, `Printed`, `Located`, `Answer`.
All are pickled by `multiprocessing.connection`; user data travels inside as bytes that
only the side that needs it unpickles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from overlaplab.cluster.pool.collective_log import Launch
from overlaplab.cluster.pool.frames import Frame
from overlaplab.timeline import Span

Stage = Literal["start", "function", "result"]


@dataclass(frozen=True, slots=True)
class World:
    """One process group; workers keep it from call to call while it stays equal."""

    backend: str  # "gloo" or "nccl"
    size: int  # number of ranks
    port: int  # of the parent's TCPStore on 127.0.0.1
    generation: int  # keeps the keys of one world in the store from another's


@dataclass(frozen=True, slots=True)
class Call:
    """Run a pickled (fn, args, kwargs) as `rank` of `world`."""

    number: int
    world: World
    rank: int
    payload: bytes
    measure: bool
    working_directory: str
    search_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Locate:
    """Say what the rank has not finished."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker serves; `main_thread` will run the user's functions."""

    main_thread: int


@dataclass(frozen=True, slots=True)
class Started:
    """All ranks have met, and the user's function is about to be called."""


@dataclass(frozen=True, slots=True)
class Printed:
    """Whole lines that the rank printed; `stream` is "stdout" or "stderr"."""

    stream: str
    text: str


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of the rank's function."""

    type_name: str  # "ValueError"
    text: str  # `str(exception)`
    frames: tuple[Frame, ...]  # those of the user and of techniques, outermost first
    pickled: bytes | None  # the exception itself, None if it cannot be pickled
    at_ns: int  # when, on the monotonic clock that all processes of a machine share
    # what failed: "start", "function" (the user's) or "result"
    stage: Stage = "function"


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of a call."""

    number: int  # of the call
    value: bytes | None  # the pickled result, None after a failure
    spans: tuple[Span, ...]  # the measured timeline of the rank
    failure: Failure | None  # None after a success
    unwaited: tuple[Launch, ...]  # collectives whose end nobody took care of
    clean: bool  # nothing is in flight; if not, the process cannot be used again
    kept: bool  # the process group is as it was, and may serve another call
    # collectives launched in each group; ranks that differ here need a new process
    # group
    sequences: dict[str, int]


@dataclass(frozen=True, slots=True)
class Located:
    """Answer to `Locate`: the collectives in flight that have not ended."""

    unfinished: tuple[Launch, ...]
