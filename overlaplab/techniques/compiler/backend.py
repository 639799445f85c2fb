"""`torch.compile(model, backend=...)`: an unmodified model, trained data parallel.

Gradients leave the backward as averages over the ranks. Each backward averages what it
adds to `.grad`: two backwards before a step give the right sum and send twice. Ranks
must begin with equal parameters, as one seed gives them; their batches may differ in
size, and their machines: all send as the group's first rank does.

What Dynamo does not compile is not averaged; `watch` refuses its gradients. Where it
has compiled some code as often as `torch._dynamo.config.recompile_limit` says, it
raises instead of doing without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.fx import Graph, GraphModule

from overlaplab import streams
from overlaplab.hardware import Hardware, find_hardware
from overlaplab.techniques.buckets import cap_bytes
from overlaplab.techniques.compiler.agreement import (
    Sending,
    agree,
    forget_agreements,
    wanted_text,
)
from overlaplab.techniques.compiler.capture import (
    Capturing,
    Fragment,
    Run,
    sameness,
)
from overlaplab.techniques.compiler.codegen import generate
from overlaplab.techniques.compiler.compilation import (
    Compilation,
    Settings,
    compile_inserted,
)
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.embeddings import Lookup, insert_averages
from overlaplab.techniques.compiler.fusing import FusedCosts
from overlaplab.techniques.compiler.lowering import lower
from overlaplab.techniques.compiler.runtime import side_stream_of
from overlaplab.techniques.compiler.simplification import simplify
from overlaplab.techniques.compiler.watching import noting
from overlaplab.techniques.groups import checked_group, own_group

_KEPT = 64  # compilations of equal backends that can be explained


class Backend:
    """See `backend`.

    Two of equal settings are equal: Dynamo compiles once for all of them, so that ranks
    which share a process share one compile. So nothing of a rank is in it; the process
    group is found by its name whenever the code runs. What is compiled again, for other
    sizes, sends in the messages and the order that ranks agreed on: they need not all
    compile again, and must go on sending the same.
    """

    def __init__(
        self, group: str, world_size: int, hardware: Hardware, settings: Settings
    ) -> None:
        self._group = group
        self._world_size = world_size
        self._hardware = hardware
        self._settings = settings

    def _key(self) -> tuple[Any, ...]:
        return self._group, self._world_size, self._hardware.name, self._settings

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Backend)
            and self._key() == other._key()
            and self._hardware == other._hardware
        )

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"ol.compiler.backend of {self._world_size} ranks, {self._settings}"

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Run:
        """Compile one fragment; what Dynamo calls."""
        _refuse_at_the_limit()
        if self._settings.lowering == "inductor":
            return lower(module, inputs, self._ordered)
        same = sameness(module)
        known = _runs.setdefault(self, {})
        if same is None or same not in known:
            run = Capturing(self._compile)(module, inputs)
            if same is None:
                return run
            known[same] = run
            for oldest in list(known)[:-_KEPT]:
                del known[oldest]
        return known[same]

    @property
    def compilations(self) -> list[Compilation]:
        """Of each backward that was compiled with these settings, the oldest first.

        A backward is compiled when it first runs.
        """
        return list(_compilations.get(self, ()))

    def explain(self) -> str:
        """What was decided for each backward graph, and why.

        A parameter that is used in two fragments, which a graph break leaves, is sent
        by each. Of each of `compilations`, `graphs()` gives the graph before and after
        all passes as text; `undecided` and `predicted` are both timelines, which
        `view.draw_many` draws.

        Raises:
            ValueError: no backward ran yet, so none was compiled.
        """
        found = self.compilations
        if not found:
            raise ValueError(
                "no backward was compiled yet: run a forward and a backward first"
            )
        parts = (f"backward graph {i}: {c}" for i, c in enumerate(found))
        return "\n\n".join(parts)

    def _compile(self, fragment: Fragment) -> Run:
        if not fragment.gradients:
            name = "backward" if fragment.is_backward else "forward"
            code = generate(fragment.graph, name).run
            return lambda args: code(args, None, streams.device())
        inserted, lookups = self._inserted(fragment)
        agreed = self._agreeing(inserted, fragment.forward)

        def backward(args: list[Any]) -> Any:
            for lookup in lookups:
                lookup.check(args)
            group = resolve_group(self._group)
            run = agreed(group, args).code.run
            if self._settings.side_stream:
                return run(args, group, streams.device(), side_stream_of(group))
            return run(args, group, streams.device())

        assert fragment.forward is not None, "a backward has gradients"
        return noting(backward, fragment.gradients, fragment.forward)

    def _ordered(self, fragment: Fragment) -> Graph:
        """What Inductor is given. Each rank compiles for itself, and asks here."""
        inserted, _ = self._inserted(fragment)
        agreed = self._agreeing(inserted, fragment.forward)
        return agreed(resolve_group(self._group), ()).graph

    def _inserted(self, fragment: Fragment) -> tuple[Graph, list[Lookup]]:
        """A backward graph that sends, and what it sends as rows."""
        return insert_averages(
            simplify(fragment.graph),
            fragment.gradients,
            self._group,
            self._world_size,
            self._settings.embedding_rows,
        )

    def _agreeing(
        self, inserted: Graph, forward: Graph | None
    ) -> Callable[[dist.ProcessGroup, Sequence[Any]], Compilation]:
        """A backward graph as the ranks of a group agree to send; see `agree`."""
        wanted = wanted_text(self._settings, inserted)
        known: dict[Sending, Compilation] = {}

        def compiled(sending: Sending | None) -> Compilation:
            if sending is None:  # it is free, so as before
                sending = next(iter(known), None)
            if sending is None or sending not in known:
                made = self._keep(inserted, sending, forward)
                sending = made.sending
                known[sending] = made
            return known[sending]

        return lambda group, args: agree(group, self, wanted, compiled, args)

    def _keep(
        self, inserted: Graph, sending: Sending | None, forward: Graph | None
    ) -> Compilation:
        """All other passes on a backward graph; remembered for `explain`."""
        fuses = self._settings.lowering == "inductor"
        costs = (FusedCosts if fuses else Costs)(self._hardware, self._world_size)
        made = compile_inserted(inserted, costs, self._settings, sending=sending)
        kept = _compilations.setdefault(self, [])
        kept.append(replace(made, forward=forward))
        del kept[:-_KEPT]
        return kept[-1]


def _refuse_at_the_limit() -> None:
    """From now on Dynamo raises where it would compile some code once too often.

    By default it then runs that code as it is, and nothing averages its gradients.
    """
    from torch._dynamo import config  # who calls us has imported it; it takes seconds

    config.fail_on_recompile_limit_hit = True


_compilations: dict[Backend, list[Compilation]] = {}
_runs: dict[Backend, dict[Hashable, Run]] = {}


def forget() -> None:
    """Plan anew, and agree anew, what is compiled from now on.

    A model sends as an earlier one of equal parameters and settings did, even if its
    batches are larger. Call this on every rank, beside `torch._dynamo.reset()` and not
    during a run on the virtual cluster, to let it have a plan of its own.
    """
    _runs.clear()
    forget_agreements()


def resolve_group(name: str) -> dist.ProcessGroup:
    """The calling rank's process group of that name."""
    c10d: Any = dist.distributed_c10d
    group: dist.ProcessGroup = c10d._resolve_process_group(name)
    return group


def backend(
    process_group: dist.ProcessGroup | None = None,
    *,
    bucket_mib: float | None = None,
    hardware: str | Hardware = "h100-nvlink",
    max_delay_ms: float | None = None,
    limit_mib: float | None = None,
    least_gain_us: float = 0,
    max_states: int | None = None,
    side_stream: bool = False,
    lowering: str = "eager",
    embedding_rows: int | None = None,
) -> Backend:
    """A backend for `torch.compile` that trains a model data parallel.

    The backward graph gets an all-reduce for each gradient, merged into buckets, each
    launched as early and waited for as late as a search over orders finds best. Nothing
    of the model or of the training loop changes:

        model = torch.compile(model, backend=ol.compiler.backend())

    Args:
        process_group: the ranks; by default all.
        bucket_mib: of gradients that travel together; None: `BucketedReducer`'s, or
            what is ready whenever the wire is free, if that ends sooner on `hardware`:
            see `plan_sizes`. `explain()` says what was tried.
        hardware: a profile, or its name: what sizes and orders are compared by. Where
            launches set the pace, one of your machine: `overlaplab calibrate`.
        max_delay_ms: how long the first gradient of a bucket may wait for the last.
        limit_mib: of gradients that may be in flight at a time.
        least_gain_us: what hiding a message must save for it to be asynchronous.
        max_states: the budget of the search; by default what takes about a second.
        side_stream: whether each bucket is copied into one message, and sent, on a
            stream beside the computing; else gradients are averaged in their own
            memory, which costs no copy and half the memory. Pays for many small ones.
        lowering: "eager": operators run as they are, one by one; "inductor": as its
            kernels, in our order. The latter is for ranks that are processes.
        embedding_rows: how many tokens a rank's batch has, at most. Then the gradient
            of an embedding travels as a row for each token, not as a whole table,
            where that is less: see `embeddings`. Sums are in the order of tokens, so
            they are rounded otherwise than an average. A larger batch is refused, on
            its rank. For lowering="eager".

    Returns:
        The backend; `explain()` says what it decided.

    Raises:
        ValueError, TypeError: an argument is wrong, or there is no process group.
    """
    group = own_group() if process_group is None else checked_group(process_group)
    settings = Settings(
        cap_bytes=None if bucket_mib is None else cap_bytes("bucket_mib", bucket_mib),
        max_delay_ns=None
        if max_delay_ms is None
        else _ns("max_delay_ms", max_delay_ms),
        least_gain_ns=_ns("least_gain_us", least_gain_us),
        limit_bytes=None if limit_mib is None else cap_bytes("limit_mib", limit_mib),
        side_stream=side_stream,
        lowering=lowering,
        embedding_rows=embedding_rows,
        **({} if max_states is None else {"max_states": max_states}),
    )
    size = dist.get_world_size(group)
    return Backend(group.group_name, size, find_hardware(hardware), settings)


def _ns(name: str, value: object) -> int:
    """The time of a setting, whose unit ends its name."""
    unit_ns = {"ms": 1e6, "us": 1e3}[name[-2:]]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; expected a number of {name[-2:]}")
    if not 0 <= value < math.inf:
        raise ValueError(
            f"{name} is {value}; expected a finite number of at least 0 {name[-2:]}"
        )
    return int(value * unit_ns)
