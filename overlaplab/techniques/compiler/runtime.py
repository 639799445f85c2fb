"""Generated code, and what it calls: averages over the ranks, packed or not."""

from __future__ import annotations

import itertools
import linecache
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from overlaplab import streams
from overlaplab.techniques.data_parallel.wire import AllReduce


class Averaging:
    """An average in flight. Until `wait` nobody may read or write its tensors.

    Args:
        tensors: averaged in place, of one dtype; held until `wait`.
        group: the ranks.
    """

    def __init__(self, tensors: list[Tensor], group: dist.ProcessGroup) -> None:
        self._wire = AllReduce(group)
        self._launched: Any = self._wire.launch(tensors)

    def wait(self) -> None:
        """Make the current stream wait for the averages; the CPU goes on."""
        launched, self._launched = self._launched, None
        if launched is not None:
            self._wire.finish(launched)


def average(tensors: list[Tensor], group: dist.ProcessGroup) -> Averaging:
    """Launch one all-reduce of `tensors`, behind the work of the current stream."""
    return Averaging(tensors, group)


def pack(tensors: Sequence[Tensor], flat: Tensor) -> tuple[Tensor, ...]:
    """Copy `tensors` into `flat`, one behind the other.

    Returns:
        Views of `flat`, of the shapes of `tensors`.
    """
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    views = [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)]
    torch._foreach_copy_(views, list(tensors))
    return tuple(views)


_sides: WeakKeyDictionary[dist.ProcessGroup, Any] = WeakKeyDictionary()


def side_stream_of(group: dist.ProcessGroup) -> Any:
    """The calling rank's stream for the messages of `group`, the same at each call."""
    side = _sides.get(group)
    if side is None:
        side = _sides[group] = streams.Stream()
    return side


_numbers = itertools.count()
GLOBALS: Mapping[str, Any] = {
    "torch": torch,
    "aten": torch.ops.aten,
    "operator": operator,
    "streams": streams,
    "average": average,
    "pack": pack,
}


@dataclass(frozen=True)
class Generated:
    """Code for a graph.

    Args:
        source: of a function of (args, group, device): a list of the graph's inputs,
            which it empties; the process group, or several by name; where it makes new
            tensors. With a plan of streams it takes one more, `side`: the stream of
            communication.
        run: that function; it returns a tuple.
        constants: what the source takes from the graph's module, by name.
    """

    source: str
    run: Callable[..., tuple[Any, ...]]
    constants: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.source


def load(source: str, name: str, constants: Mapping[str, Any]) -> Generated:
    """Make the function called `name` of `source`, which may be changed by hand."""
    filename = f"<overlaplab {name} {next(_numbers)}>"
    # So that tracebacks, and the record's source lines, show it.
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    names = {**GLOBALS, **constants}
    exec(compile(source, filename, "exec"), names)
    return Generated(source, names[name], constants)
