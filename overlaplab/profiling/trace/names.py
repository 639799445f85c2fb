"""What the names in a trace mean: which kernel communicates, which row is what.

Names say whether a kernel communicates. They do not say reliably what it does (a
broadcast may run a kernel that is called all-gather): that stands in the arguments.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from overlaplab.profiling.trace.searching import LimitedSearch
from overlaplab.timeline.span import PROFILER_STEP

# Ranges by which a measured run marks itself in its trace.
RUN_RANGE = "overlaplab::run"
WAIT_RANGE = "overlaplab::wait "
LAUNCH_RANGE = "overlaplab::launch "

_TABLES: Mapping[str, Any] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text("utf-8")
)  # which says what each is
NOT_OPERATORS: tuple[str, ...] = tuple(_TABLES["not_operators"])
COMMUNICATION: tuple[str, ...] = tuple(_TABLES["communication"])
VIEWS = frozenset(_TABLES["views"].split())
COMPOSITES = frozenset(_TABLES["composites"].split())
_LOADING = re.compile("|".join(_TABLES["loading"]), re.IGNORECASE)
ITEM_BYTES: Mapping[str, int] = _TABLES["item_bytes"]

KERNEL, MEMCPY, MEMSET = "kernel", "memcpy", "memset"
RUNTIME, OPERATOR, RANGE = "runtime", "operator", "range"
_CATEGORIES: Mapping[str, str] = _TABLES["categories"]
_OPERATIONS: Mapping[str, str] = _TABLES["operations"]
# Rows that some versions file under kernels, and that occupy nothing.
_NO_KERNEL = re.compile(
    r"^(stream|context|event|device) (sync|wait)|^(nccl|gloo|rccl):|^" + PROFILER_STEP,
    re.IGNORECASE,
)
_COPIES = re.compile(r"^(memcpy\b|Copy(Host|Device)To(Host|Device)$)", re.IGNORECASE)
_SETS = re.compile(r"^(memset\b|FillBuffer$)", re.IGNORECASE)

# Calls of the runtime. What is on neither list may launch something: it is kept.
_HOST_WAITS = re.compile(
    r"^(cuda|hip|cu)(Stream|Device|Event|Ctx)Synchronize(_v\d+)?$|^(cuda|hip)Memcpy$"
)
_NO_LAUNCH = re.compile(
    r"Query|IsCapturing|CaptureInfo|Occupancy|Attribute|GetDevice|SetDevice|EventRecord"
    r"|EventCreate|EventDestroy|WaitEvent|Malloc|Free|GetLastError|PeekAtLastError"
    r"|GetPriority|Properties|CallConfiguration|HostRegister|StreamCreate|ElapsedTime"
    r"|ModuleLoad|ModuleGet|LibraryLoad|LibraryGet|KernelGet|FuncGet|PointerGet"
)
_LAUNCH = re.compile(r"Launch|Mem(cpy|set)")


class Communication:
    """Whether a kernel communicates, by patterns that can be extended and reported."""

    def __init__(self, more: Sequence[str] = ()) -> None:
        """Add `more` regular expressions.

        Raises:
            ValueError: one is none, or matches every name; the message has it. A search
            raises it, too, where a pattern would search without end.
            TypeError: one is no text.
        """
        if isinstance(more, str):
            more = (more,)
        if not isinstance(more, Sequence):
            raise TypeError(f"communication={more!r}: expected regular expressions")
        self.patterns = (*COMMUNICATION, *more)
        # Each alone: put into one, their groups and flags would mix.
        self._searches = [_searcher(pattern) for pattern in more]
        self._known: dict[str, bool] = {}

    def __contains__(self, kernel: str) -> bool:
        known = self._known.get(kernel)
        if known is None:
            small = kernel.lower()  # ours are: to search without regard to case is slow
            known = any(search(small) for search in _OURS) or any(
                search(kernel) for search in self._searches
            )
            self._known[kernel] = known
        return known


_OURS = [re.compile(pattern).search for pattern in COMMUNICATION]


def _searcher(pattern: object) -> LimitedSearch:
    if not isinstance(pattern, str):
        raise TypeError(
            f"communication={pattern!r} is {type(pattern).__name__}; expected the text "
            "of a regular expression"
        )
    try:
        search = LimitedSearch(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(
            f"communication={pattern!r} is no regular expression: {error}"
        ) from error
    if search(""):
        raise ValueError(
            f"communication={pattern!r} matches the empty text, so every kernel; "
            "expected a part of some kernels' names"
        )
    return search


def category_of(category: object, process: object) -> str | None:
    """What kind of row `cat` is; None for rows of which a timeline knows nothing."""
    if category is None:
        # Before Kineto (torch < 1.8.1) the process said so.
        return {"CPU functions": OPERATOR, "CUDA functions": KERNEL}.get(str(process))
    word = str(category).lower()
    if word.endswith(("_runtime", "_driver")):  # cuda_, hip_, xpu_
        return RUNTIME
    return _CATEGORIES.get(word)


def kind_of(category: str, name: str) -> str | None:
    """`category`, or what `name` makes of it; None for what no timeline uses: a view
    launches nothing, and a wait of one stream for another occupies nothing."""
    if category == RUNTIME:
        return RUNTIME if call_kind_of(name) else None
    if category == OPERATOR:
        return None if name.removeprefix("aten::") in VIEWS else OPERATOR
    if category != KERNEL:
        return category
    if _NO_KERNEL.match(name):
        return None
    if _COPIES.match(name):
        return MEMCPY
    return MEMSET if _SETS.match(name) else KERNEL


@lru_cache(4096)  # a trace has few names
def call_kind_of(name: str) -> str | None:
    """ "wait", "launch", "call" (may have launched something) or None (has not)."""
    if _HOST_WAITS.match(name):
        return "wait"
    if _LAUNCH.search(name):
        return "launch"
    return None if _NO_LAUNCH.search(name) else "call"


@lru_cache(4096)
def is_loading(name: str) -> bool:
    """Whether a range is one in which the CPU fetches a batch."""
    return _LOADING.search(name) is not None


@lru_cache(4096)
def operation_of(name: str) -> str:
    """'ncclDevKernel_AllReduce_Sum_f32_RING_LL' or 'all_reduce' -> 'all_reduce'.

    >>> operation_of("_reduce_scatter_base"), operation_of("ncclKernel_SendRecv_RING")
    ('reduce_scatter', 'send_recv')
    """
    word = name.lower().replace("_", "").removeprefix("nccl")
    for spelling, operation in _OPERATIONS.items():
        if spelling in word:
            return operation
    return short_name(name)


@lru_cache(4096)
def short_name(kernel: str) -> str:
    """A kernel's name without return type, namespaces and arguments.

    >>> short_name("void at::native::fill_kernel<float>(int, float)")
    'fill_kernel'
    """
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    head = re.split(r"[<(]", name, maxsplit=1)[0]
    return head.rpartition("::")[2] or kernel
