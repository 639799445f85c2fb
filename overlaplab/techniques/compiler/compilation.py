"""All passes in a row, from a backward graph to code, and what each decided."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.fx import Graph, Node

from overlaplab.program.garbage import no_collections
from overlaplab.techniques.buckets import size_text
from overlaplab.techniques.compiler.agreement import Sending
from overlaplab.techniques.compiler.bucketing import (
    Merge,
    merge,
    merge_of,
    plan_merges,
)
from overlaplab.techniques.compiler.codegen import generate
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.decision import Decision, decide, plan_decisions
from overlaplab.techniques.compiler.graphs import (
    check_graph,
    launches,
    sent_bytes,
    show,
)
from overlaplab.techniques.compiler.insertion import insert_all_reduces
from overlaplab.techniques.compiler.predict import predict
from overlaplab.techniques.compiler.runtime import Generated
from overlaplab.techniques.compiler.scheduling import Schedule, plan_schedule, schedule
from overlaplab.techniques.compiler.search import DEFAULT_STATES
from overlaplab.techniques.compiler.side_stream import StreamPlan, plan_streams
from overlaplab.techniques.compiler.simplification import simplify
from overlaplab.techniques.compiler.sizing import Sizes, plan_sizes
from overlaplab.techniques.compiler.updates import divide_updates, plan_updates
from overlaplab.techniques.compiler.words import count, time_text
from overlaplab.timeline import Timeline

LOWERINGS = ("eager", "inductor")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the passes are asked for.

    Args:
        cap_bytes: of a bucket of more than one gradient; None: see `plan_sizes`.
        max_delay_ns: how long the first gradient of a bucket may wait for the last, in
            computing; None: as long as the cap allows.
        least_gain_ns: what hiding a message must save for it to be asynchronous.
        limit_bytes: that may be in flight at a time, so no bucket is larger; None: no
            limit.
        max_states: the budget of the search for an order.
        side_stream: whether messages are packed and sent beside the computing.
        lowering: who makes the kernels: "eager", one by one, or "inductor".
        embedding_rows: of an embedding's gradient that a rank sends, at most; None:
            the whole gradient is averaged. See `embeddings`.
    """

    cap_bytes: int | None = None
    max_delay_ns: int | None = None
    least_gain_ns: int = 0
    limit_bytes: int | None = None
    max_states: int = DEFAULT_STATES
    side_stream: bool = False
    lowering: str = "eager"
    embedding_rows: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no pass can use.

        Raises:
            TypeError, ValueError: which, and what was expected.
        """
        least = {"cap_bytes": 1, "limit_bytes": 1, "max_states": 1}
        least |= {"embedding_rows": 1, "max_delay_ns": 0, "least_gain_ns": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is None and name not in ("max_states", "least_gain_ns"):
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}; expected a whole number")
            if value < smallest:
                raise ValueError(f"{name} is {value}; expected at least {smallest}")
        if not isinstance(self.side_stream, bool):
            raise TypeError(
                f"side_stream is {self.side_stream!r}; expected True or False"
            )
        if self.lowering not in LOWERINGS:
            raise ValueError(
                f"lowering is {self.lowering!r}; expected one of {LOWERINGS}"
            )
        for name in ("side_stream", "embedding_rows"):
            value = getattr(self, name)
            if self.lowering == "inductor" and value:
                raise ValueError(
                    f"{name}={value!r} is for lowering='eager': leave one out"
                )


@dataclass(frozen=True)
class Compilation:
    """A backward graph, before and after, and every decision in between.

    Args:
        inserted: with an all-reduce and a wait behind each gradient: nothing overlaps.
        graph: merged, decided and in the order in which it runs.
        merges: what travels together.
        decisions: of each message.
        plan: the order.
        code: that runs it.
        costs: by which was decided.
        sizes: of messages that were tried, the chosen first; none if it was said what
            travels together, or how much.
        streams: what runs beside computing, if anything does.
        forward: what runs before it, if that is known.
    """

    inserted: Graph
    graph: Graph
    merges: list[Merge]
    decisions: list[Decision]
    plan: Schedule
    code: Generated
    costs: Costs
    sizes: Sequence[Sizes] = ()
    streams: StreamPlan | None = None
    forward: Graph | None = None

    @property
    def sending(self) -> Sending:
        """What travels together, and in which order it leaves."""
        number = {merge.name_of(i): i for i, merge in enumerate(self.merges)}
        return Sending(
            tuple(merge.launches for merge in self.merges),
            tuple(number[launch.name] for launch in launches(self.graph)),
        )

    @cached_property
    def undecided(self) -> Timeline:
        """Predicted, of the graph with one serial message for each gradient."""
        return predict(self.inserted, self.costs)

    @cached_property
    def predicted(self) -> Timeline:
        """Predicted, of the graph that runs."""
        return predict(self.graph, self.costs, self.streams)

    @cached_property
    def forward_ns(self) -> int:
        """Predicted, of the forward; 0 where it is in `graph` or not known."""
        if self.forward is None:
            return 0
        return predict(self.forward, self.costs).report().step_ns

    @property
    def step_ns(self) -> int:
        """Predicted, of the forward and of the graph that runs."""
        return self.forward_ns + self.predicted.step_ns

    def __str__(self) -> str:
        before, after = self.undecided.report(), self.predicted.report()
        found = launches(self.graph)
        number = count(len(launches(self.inserted)), "tensor")
        sent = size_text(sum(map(sent_bytes, found)))
        lines = [f"{number} in {count(len(found), 'message')}, {sent} in all"]
        for launch, carried in self._messages():
            decision = launch.meta["decision"]
            lines.append(f"  {launch.name}: {carried.what}; {decision}")
        if len(self.sizes) > 1:
            lines.append("sizes that were tried, of which the first is taken:")
            lines += [f"  {sizes}" for sizes in self.sizes]
        lines += [
            "order of " + str(self.plan).splitlines()[0],
            f"predicted on {self.costs.hardware.name}{self.costs.how}: "
            f"{time_text(after.step_ns)}, "
            f"{time_text(after.exposed_ns)} of it exposed communication",
            "with a message per tensor, each waited for at once: "
            f"{time_text(before.step_ns)}, {time_text(before.exposed_ns)} exposed",
        ]
        if self.forward is not None:
            lines.append(f"forward and backward: {time_text(self.step_ns)}")
        return "\n".join(lines)

    def _messages(self) -> Iterator[tuple[Node, Merge]]:
        """The messages in the order in which they leave, and what they carry."""
        merges = (self.merges[number] for number in self.sending.order)
        return zip(launches(self.graph), merges, strict=True)

    def graphs(self) -> str:
        """Both graphs, one below the other, as `show` prints them."""
        return f"{show(self.inserted)}\n\nbecomes\n\n{show(self.graph)}"


@no_collections()  # a third of the time
def compile_graph(
    graph: Graph,
    gradients: Mapping[int, str],
    group: str,
    costs: Costs,
    settings: Settings,
    *,
    name: str = "backward",
) -> Compilation:
    """Simplify, insert, merge, decide, order, and write code.

    Args:
        graph: a backward pass, or forward and backward in one.
        gradients: position in what it returns -> name of the parameter.
        group: name of the process group.
        costs: of its nodes.
        settings: of the passes.
        name: of the function that is written.

    Raises:
        GraphError: a pass would change what the graph means.
        ValueError: `settings` have no solution; the message says what is possible.
    """
    inserted = insert_all_reduces(simplify(graph), gradients, group)
    return compile_inserted(inserted, costs, settings, name=name)


@no_collections()
def compile_inserted(
    inserted: Graph,
    costs: Costs,
    settings: Settings,
    *,
    name: str = "backward",
    sending: Sending | None = None,
) -> Compilation:
    """As `compile_graph`, of a graph whose collectives somebody else has put in.

    It may be a whole step, optimizer included, as `capture_step` follows it; its code
    is to be run under `torch.no_grad()`.

    Args:
        inserted, costs, settings, name: see `compile_graph`.
        sending: what travels together, and in which order it leaves, if that is
            settled: ranks differ in what they compile (for a last batch, say), and must
            not in what they send.
    """
    check_graph(inserted)
    cap_bytes, limit_bytes = settings.cap_bytes, settings.limit_bytes
    max_delay_ns = settings.max_delay_ns
    sizes: Sequence[Sizes] = ()
    sent: list[str] = []
    if sending is not None:
        named = {launch.name: launch for launch in launches(inserted)}
        merges = [
            merge_of([named[n] for n in names], 0, "what ranks agreed on")
            for names in sending.together
        ]
        sent = [merges[number].name_of(number) for number in sending.order]
    elif cap_bytes is None:
        sizes = plan_sizes(
            inserted, costs, limit_bytes=limit_bytes, max_delay_ns=max_delay_ns
        )
        merges = list(sizes[0].merges)
    else:
        merges = plan_merges(
            inserted,
            cap_bytes if limit_bytes is None else min(cap_bytes, limit_bytes),
            max_delay_ns=max_delay_ns,
            node_ns=costs,
        )
    merged = merge(inserted, merges)
    divided = divide_updates(merged, plan_updates(merged))
    decisions = plan_decisions(divided, costs, least_gain_ns=settings.least_gain_ns)
    decided = decide(divided, decisions)
    plan = plan_schedule(
        decided,
        costs,
        limit_bytes=limit_bytes,
        max_states=settings.max_states,
        sent=sent,
    )
    final = schedule(decided, plan, limit_bytes=limit_bytes)
    streams = plan_streams(final) if settings.side_stream else None
    code = generate(final, name, streams)
    return Compilation(
        inserted, final, merges, decisions, plan, code, costs, sizes, streams
    )
