"""All ranks launch the same collectives in the same order: the first rank's.

What travels together, and in which order, goes by what computing takes. So it may
differ where ranks have batches of other sizes, or were given other machines. The first
rank of a group plans for all; the others are compiled to send as it does, and that they
do is compared. Where they cannot, since their gradients or settings are others, every
rank is told.

Asked when a backward graph first runs, not when it is compiled: ranks that share a
process share what one of them compiled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol, TypeVar

import torch.distributed as dist
from torch._subclasses.fake_tensor import is_fake
from torch.fx import Graph, Node

from overlaplab.errors import MismatchError
from overlaplab.operators import dtype_name, tensors_in
from overlaplab.techniques.compiler.graphs import launches, operation, payload
from overlaplab.techniques.groups import OfGroups, hear, say


@dataclass(frozen=True, slots=True)
class Sending:
    """What travels together, and in which order it leaves.

    Args:
        together: of each message, names of launches in a graph with one a gradient.
        order: in which messages leave, by position in `together`.
    """

    together: tuple[tuple[str, ...], ...]
    order: tuple[int, ...]


class Sends(Protocol):
    """A compiled graph, as far as ranks must agree on it."""

    @property
    def graph(self) -> Graph: ...
    @property
    def sending(self) -> Sending: ...


Compiled = TypeVar("Compiled", bound=Sends)


@dataclass
class _Agreed:
    """On a group: how often ranks compared, and what they send, by graph."""

    num_compared: int = 0
    sending: dict[Hashable, Sending] = field(default_factory=dict)


_agreed = OfGroups(_Agreed)


def agree(
    group: dist.ProcessGroup,
    backend: Hashable,
    wanted: str,
    compiled: Callable[[Sending | None], Compiled],
    args: Sequence[object],
) -> Compiled:
    """What a rank is to run, so that all ranks of a group send the same.

    Collective where `wanted` is new for this backend; the CPU waits for the others.

    Args:
        group: on which it is sent.
        backend: whose graph it is.
        wanted: its settings, and what is to be sent: equal on ranks that can agree.
        compiled: compiles the graph to send in some way; None: as is best here.
        args: what it is to run on. If fake, nobody waits for the other ranks: one may
            stand for several.

    Raises:
        MismatchError: ranks have other collectives; the same message on all of them.
        RuntimeError: a rank does not come.
    """
    known = _agreed[group]
    if (backend, wanted) in known.sending:
        return compiled(known.sending[backend, wanted])
    known.num_compared += 1
    number = known.num_compared
    backward = f"the backward of compiled graph {number}"
    outcome = f"what ranks differ in, in {backward},"
    waits = not any(map(is_fake, args))
    first, *others = dist.get_process_group_ranks(group)
    if dist.get_rank() == first:
        made = compiled(None)
        way, text = made.sending, collectives_text(made.graph)
        say(group, backward, json.dumps([wanted, text, way.together, way.order]))
        found = [hear(group, backward, rank) for rank in others] if waits else []
        difference = next(filter(None, found), "")
        say(group, outcome, difference)
    else:
        its_wanted, its_text, *its_way = json.loads(hear(group, backward, first))
        made = compiled(_sending(*its_way) if its_wanted == wanted else None)
        text = collectives_text(made.graph)
        difference = _difference(number, first, its_text, dist.get_rank(), text)
        say(group, backward, difference)
        if waits:
            difference = hear(group, outcome, first)
    if difference:
        raise MismatchError(difference)
    known.sending[backend, wanted] = made.sending
    return made


def forget_agreements() -> None:
    """Agree anew on all graphs, on every rank."""
    for known in _agreed:
        known.sending.clear()  # not the number, by which ranks find one another's texts


def _sending(together: list[list[str]], order: list[int]) -> Sending:
    return Sending(tuple(map(tuple, together)), tuple(order))


def wanted_text(settings: object, inserted: Graph) -> str:
    """What ranks must have in common to be able to send the same, in any order."""
    sent = (f"{n.name}: {_collective(n)}" for n in launches(inserted))
    return "\n".join([repr(settings), *sorted(sent)])


def collectives_text(graph: Graph) -> str:
    """A line for each collective: what must be equal on all ranks, in this order.

    With the names of what is sent, gradients' by parameter: in another order tensors of
    one shape would be averaged with each other.
    """
    return "\n".join(map(_collective, launches(graph)))


def _collective(launch: Node) -> str:
    sent = ", ".join(map(_sent, payload(launch)))
    settings = " ".join(map(str, launch.args[1:-1]))
    return f"{operation(launch)} {settings} of {sent}"


def _sent(node: Node) -> str:
    (tensor,) = tensors_in((node.meta["val"],))
    return f"{node.name} {dtype_name(tensor.dtype)}{[*tensor.shape]}"


def _difference(number: int, first: int, its: str, other: int, others: str) -> str:
    """Where the collectives of two ranks differ; "" if they do not."""
    if its == others:
        return ""
    lists = {first: its.splitlines(), other: others.splitlines()}
    at = next(i for i, (a, b) in enumerate(zip_longest(*lists.values())) if a != b)
    rows = (
        f"  rank {rank}: {lines[at] if at < len(lines) else 'no more collectives'}"
        for rank, lines in lists.items()
    )
    return (
        f"the collectives of compiled graph {number} differ between ranks, first in "
        f"collective #{at}:\n" + "\n".join(rows) + "\nEvery rank must launch the same "
        "collectives in the same order: give all ranks the same model, with the same "
        "parameters that train, and the same settings."
    )
