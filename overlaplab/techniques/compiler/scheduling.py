"""The pass that orders a graph: what is computed, launched and waited for when.

A graph becomes a scheduling problem, whose answer becomes an order of nodes again.
Waits are lazy: a wait, and what only finishes a result on its way out, stands before
the first operator that needs it, or last.

[Note: contraction] Operators that precede exactly the same messages, and are behind
exactly the same ones, become one task. If nothing reads a message and memory has no
limit, that keeps the optimum: running them together delays no message, since every one
of those needs all of them. Else it is a rule of thumb, used for large graphs only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch.fx import Graph, Node

from overlaplab.techniques.compiler.checks import graph_pass
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.dependencies import (
    Dependencies,
    find_dependencies,
    sorted_by,
)
from overlaplab.techniques.compiler.graphs import (
    GraphError,
    is_launch,
    is_view,
    reorder,
    sent_bytes,
)
from overlaplab.techniques.compiler.placing import Placing, is_sync
from overlaplab.techniques.compiler.problem import Problem, Task
from overlaplab.techniques.compiler.search import DEFAULT_STATES, Found, search
from overlaplab.techniques.compiler.words import count, time_text

_FINISHING = frozenset({"div", "mul"})
_SMALL = 24  # nodes up to which nothing is contracted that might lose the optimum


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of a graph, as data.

    Args:
        found: the order of tasks and what is known of it.
        problem: what was searched.
        members: of each task, the names of its nodes.
        is_exact: whether the problem's optimum is the graph's, too.
    """

    found: Found
    problem: Problem
    members: tuple[tuple[str, ...], ...]
    is_exact: bool = True

    @property
    def is_optimal(self) -> bool:
        """Whether it is proven that no order of the graph ends earlier."""
        return self.is_exact and self.found.is_optimal

    def __str__(self) -> str:
        tasks = self.problem.tasks
        head = f"{count(sum(map(len, self.members)), 'operator')} as "
        head += f"{count(len(tasks), 'task')}: "
        head += str(self.found)
        if not self.is_exact:
            head += "; of tasks, operators were put together by a rule of thumb"
        return "\n".join(
            (
                head,
                *(
                    f"  {tasks[t].name} ({time_text(tasks[t].ns)})"
                    for t in self.found.order
                ),
            )
        )


def plan_schedule(
    graph: Graph,
    costs: Costs,
    *,
    limit_bytes: int | None = None,
    max_states: int = DEFAULT_STATES,
    find: Callable[[Problem, int], Found] = search,
    sent: Sequence[str] = (),
) -> Schedule:
    """Find an order for a graph. Nothing is moved: see `schedule`.

    Args:
        graph: whose collectives have one wire.
        costs: of its nodes.
        limit_bytes: that may be in flight at a time; None: no limit.
        max_states: the budget of the search.
        find: what orders a problem.
        sent: names of messages that leave in this order, wherever they stand.

    Raises:
        ValueError: a message alone is larger than the limit.
    """
    dependencies = find_dependencies(graph)
    problem, members, is_exact = _problem(dependencies, costs, limit_bytes, sent)
    found = find(problem, max_states)
    names = tuple(tuple(node.name for node in nodes) for nodes in members)
    return Schedule(found, problem, names, is_exact)


@graph_pass
def schedule(graph: Graph, plan: Schedule, *, limit_bytes: int | None = None) -> None:
    """The graph in the order of a plan, waits as late as it allows.

    Args:
        graph: the one that was planned.
        plan: of `plan_schedule`.
        limit_bytes: the limit that was planned for.

    Raises:
        GraphError: the plan is of another graph, or would change what this computes.
    """
    dependencies = find_dependencies(graph)
    named = {node.name: node for node in graph.nodes}
    try:
        order = [named[n] for t in plan.found.order for n in plan.members[t]]
    except KeyError as missing:
        raise GraphError(
            f"the plan names {missing}, which this graph does not have. Plan the graph "
            "that you schedule."
        ) from None
    reorder(graph, Placing(dependencies, limit_bytes).all(order))


def find_lazy(dependencies: Dependencies) -> set[Node]:
    """Waits, views of results, and what only finishes a result on its way out."""
    nodes, facts = dependencies.nodes, dependencies.facts
    behind_launch = dependencies.before(n for n in nodes if is_launch(n))
    lazy: set[Node] = set()
    finishing: set[Node] = {node for node in nodes if node.op == "output"}
    for node in reversed(nodes):
        if node.op != "call_function" or is_launch(node) or not behind_launch[node]:
            continue
        own = facts[node]
        if own.writes or own.draws:
            continue
        shows = is_view(node)
        divides = own.operator.name in _FINISHING and len(node.all_input_nodes) == 1
        if (shows or divides) and all(user in finishing for user in node.users):
            finishing.add(node)
        if shows or node in finishing:
            lazy.add(node)
    return lazy


def _problem(
    dependencies: Dependencies,
    costs: Costs,
    limit_bytes: int | None,
    sent: Sequence[str],
) -> tuple[Problem, list[list[Node]], bool]:
    """The problem, the nodes of each of its tasks, and whether nothing was lost."""
    lazy = find_lazy(dependencies)
    nodes = [
        node
        for node in dependencies.nodes
        if node.op == "call_function" and node not in lazy
    ]
    messages = [node for node in nodes if is_launch(node)]
    behind, before = dependencies.behind(messages), dependencies.before(messages)
    is_exact = limit_bytes is None and not any(before[node] for node in nodes)
    groups: dict[object, list[Node]] = {}
    for node in nodes:
        alone = is_launch(node) or (not is_exact and len(nodes) <= _SMALL)
        groups.setdefault(node if alone else (behind[node], before[node]), []).append(
            node
        )
    is_exact = is_exact or len(nodes) <= _SMALL
    needs = _needs_of(groups, dependencies, lazy)
    named = {message.name: message for message in messages}
    for one, following in pairwise(sent):  # on one wire it waits for it anyway
        needs[named[following]].add(named[one])
    # The given order: a group stands where the last of its nodes does.
    place = {node: i for i, node in enumerate(nodes)}
    last = {key: place[group[-1]] for key, group in groups.items()}
    keys = sorted_by({key: tuple(before) for key, before in needs.items()}, last)
    number = {key: i for i, key in enumerate(keys)}
    tasks, members = [], []
    for key in keys:
        group = groups[key]
        task = Task(
            group[0].name
            if len(group) == 1
            else f"{group[0].name} .. {group[-1].name}",
            sum(map(costs, group)),
            tuple(sorted(number[need] for need in needs[key])),
        )
        if is_launch(group[0]):
            task = replace(
                task,
                is_message=True,
                bytes=sent_bytes(group[0]),
                is_sync=is_sync(group[0]),
            )
        tasks.append(task)
        members.append(group)
    return Problem(tuple(tasks), limit_bytes), members, is_exact


def _needs_of(
    groups: Mapping[object, list[Node]], dependencies: Dependencies, lazy: set[Node]
) -> dict[object, set[object]]:
    """What each group needs of others, through lazy nodes."""
    group_of = {node: key for key, group in groups.items() for node in group}
    through: dict[Node, set[object]] = {}  # of lazy nodes
    needs: dict[object, set[object]] = {key: set() for key in groups}
    for node in dependencies.nodes:
        found: set[object] = set()
        for need in dependencies.needs[node]:
            if need in group_of:
                found.add(group_of[need])
            else:
                found |= through.get(need, set())
        if node in group_of:
            needs[group_of[node]] |= found - {group_of[node]}
        elif node in lazy:
            through[node] = found
    return needs
