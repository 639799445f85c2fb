"""Do all ranks launch the same collectives in the same order? Asked before they do.

One rank may compile for all, so nothing may be asked while compiling: it would wait for
ever. Instead each rank leaves the list of a graph's collectives in the store when it
first runs that graph, and compares it with those that are there already. Nobody waits;
the rank that comes second sees the difference.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.fx import Graph, Node

from overlaplab.errors import MismatchError
from overlaplab.operators import dtype_name, tensors_in
from overlaplab.techniques.compiler.graphs import launches, operation, payload

# Of each group, the lists of collectives that ran on it, by their first run.
_ran: WeakKeyDictionary[dist.ProcessGroup, list[str]] = WeakKeyDictionary()


def collectives_text(graph: Graph, group: str = "") -> str:
    """A line for each collective: what must be equal on all ranks, in this order.

    With the names of what is sent, gradients' by parameter: the order goes by what
    computing takes, so it may differ where ranks have batches of other sizes, and
    tensors of one shape would be averaged with each other.

    Args:
        group: where they are sent, if there is a choice.
    """
    lines = [f"on {group}"] if group and launches(graph) else []
    for launch in launches(graph):
        sent = ", ".join(map(_sent, payload(launch)))
        settings = " ".join(map(str, launch.args[1:-1]))
        lines.append(f"{operation(launch)} {settings} of {sent}")
    return "\n".join(lines)


def _sent(node: Node) -> str:
    (tensor,) = tensors_in((node.meta["val"],))
    return f"{node.name} {dtype_name(tensor.dtype)}{[*tensor.shape]}"


def check_agreement(text: str, group: dist.ProcessGroup) -> None:
    """Compare the collectives of a graph with those of other ranks. Waits for nobody.

    Args:
        text: of `collectives_text`; a graph without any is not compared.
        group: on which they are launched.

    Raises:
        MismatchError: another rank's graph, the first or second or so that ran on the
            group there as well, has other collectives.
    """
    ran = _ran.setdefault(group, [])
    if not text or text in ran:
        return
    ran.append(text)
    number = len(ran)
    store: Any = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()

    def key(its_rank: int) -> str:
        return f"collectives {number} of rank {its_rank} on {group.group_name!r}"

    store.set(key(rank), text)
    for other in dist.get_process_group_ranks(group):
        if other == rank or not store.check([key(other)]):
            continue
        theirs = store.get(key(other)).decode()
        if theirs != text:
            raise MismatchError(_difference(number, rank, text, other, theirs))


def _difference(number: int, rank: int, mine: str, other: int, theirs: str) -> str:
    own, its = mine.splitlines(), theirs.splitlines()
    at = 0
    while at < min(len(own), len(its)) and own[at] == its[at]:
        at += 1
    rows = (
        f"  rank {r}: {lines[at] if at < len(lines) else 'no more collectives'}"
        for r, lines in ((rank, own), (other, its))
    )
    return (
        f"the collectives of compiled graph {number} differ between ranks, first in "
        f"collective #{at}:\n" + "\n".join(rows) + "\nEvery rank must launch the same "
        "collectives in the same order: give all ranks the same model, settings and "
        "hardware. What computing takes decides as well: give them batches of one size."
    )
