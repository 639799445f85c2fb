"""The graders of lab 13's questions and passes: 13.1, 13.2 and 13.3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Graph, Node

from overlaplab.grading import Sheet, laws, program_laws, stage
from overlaplab.grading.declared import Declared
from overlaplab_course.lab13 import graphs, moves, reference
from overlaplab_course.lab13.graphs import AFTER, SERIAL
from overlaplab_course.lab13.moves import SLOW, Moved

LAB = Declared(__file__)
OPERATORS, MAKERS, READERS, COMPLETE = LAB.sentences("13.1")
MOVES_ONLY, EARLY, AT_ONCE, SAME_ORDER = LAB.sentences("13.2")
WAITS_ONLY, WAITED, LATE = LAB.sentences("13.3")
# What is run: all messages of these are averages.
RUN = (SERIAL, AFTER, "updates inside", "one buffer for two")
EVERY = (SERIAL, *graphs.CASES)
# On so many ranks, with matrices of such a width: one for each of `RUN`.
WORLDS = ((3, 40), (2, 100), (3, 100), (2, 60))
CLOCKS = (SLOW, program_laws.slower(SLOW, launch_ns=300_000))
Pass = Callable[[Graph, graphs.Needs], Any]


@LAB.grader("13.1")
def grade_beside(sheet: Sheet, beside: Callable[..., Any]) -> None:
    """Each message of every graph, by sets."""
    for case in EVERY:
        sheet.ran(f"beside() of each message of {case!r}")
        graph = graphs.graph_of(case)
        needs = graphs.needs_of(graph)
        computing = [node.name for node in graphs.operators(graph)]
        known = {node.name: node for node in graph.nodes}
        views = {n.name for n in graph.nodes if _is_view(n, computing)}
        for launch_name, answer in stage.job(graphs.answered, beside, case):
            named, launch = set(answer) - views, known[launch_name]
            makers = {node.name for node in graphs.all_before(needs, launch)}
            readers = {
                n.name for n in graph.nodes if launch in graphs.all_before(needs, n)
            }
            right = [n for n in computing if n not in makers | readers]
            facts: dict[str, Any] = {"case": case, "launch": launch_name}
            for sentence, wrong in (
                (OPERATORS, [n for n in answer if n in named - {*computing}]),
                (MAKERS, [n for n in computing if n in named & makers]),
                (READERS, [n for n in computing if n in named & readers]),
                (COMPLETE, [n for n in right if n not in named]),
            ):
                facts["names"] = ", ".join(dict.fromkeys(wrong))
                facts["operators"] = ", ".join(computing)
                LAB.refuse(sheet, sentence, bool(wrong), **facts)
    sheet.ran(f"beside() of each message of {len(EVERY)} graphs")


def _is_view(node: Node, computing: Sequence[str]) -> bool:
    launched = node.op == "call_function" and node.name not in computing
    return launched and "all_reduce" not in node.name and "wait" not in node.name


@LAB.grader("13.2")
def grade_launch_early(sheet: Sheet, launch_early: Pass) -> None:
    """Laws over graphs, then the code that is made of them."""
    for case in EVERY:
        moved = _moved(sheet, launch_early, case, graphs.launches, MOVES_ONLY, EARLY)
        if moved is None:
            return
        for launch in graphs.launches(moved.before):
            last = max(moved.needs[launch], key=lambda n: moved.place[n.name])
            kinds = [*graphs.operators(moved.before), *graphs.waits(moved.before)]
            between = moved.between(last, launch, kinds)
            LAB.refuse(
                sheet,
                AT_ONCE,
                bool(between),
                case=case,
                need=last.name,
                launch=launch.name,
                between=", ".join(between),
            )
    for case in ("ready together", AFTER):
        first, second = moves.orders(launch_early, case)
        told = {"first": ", ".join(first), "second": ", ".join(second)}
        LAB.refuse(sheet, SAME_ORDER, first != second, case=case, **told)
    sheet.stop_if_wrong()
    _run(sheet, launch_early, reference.launch_early, AT_ONCE, AFTER)


@LAB.grader("13.3")
def grade_wait_late(sheet: Sheet, wait_late: Pass) -> None:
    """The same for waits."""
    for case in EVERY:
        moved = _moved(sheet, wait_late, case, graphs.waits, WAITS_ONLY, WAITED)
        if moved is None:
            return
        for wait in graphs.waits(moved.before):
            reader = next(n for n in moved.before.nodes if wait in moved.needs[n])
            kinds = [*graphs.operators(moved.before), *graphs.launches(moved.before)]
            between = moved.between(wait, reader, kinds)
            LAB.refuse(
                sheet,
                LATE,
                bool(between),
                case=case,
                launch=wait.name,
                need=reader.name,
                between=", ".join(between),
            )
    sheet.stop_if_wrong()
    _run(sheet, wait_late, reference.wait_late, LATE, SERIAL)


def _moved(
    sheet: Sheet,
    graph_pass: Pass,
    case: str,
    may_move: Callable[[Graph], list[Node]],
    same: str,
    ordered: str,
) -> Moved | None:
    """The case behind the pass; None where it is no order of the same nodes."""
    sheet.ran(f"{graph_pass_name(sheet)} on {case!r}")
    moved = Moved(case, stage.job(graphs.passed, graph_pass, case))
    changed = moved.changed(may_move)
    LAB.refuse(sheet, same, bool(changed), case=case, what=changed)
    if sorted(moved.names) != sorted(n.name for n in moved.before.nodes):
        return None
    pair = moved.early()
    if pair is not None:
        node, need = pair
        why = "value" if need in node.all_input_nodes else "memory"
        told = {"case": case, "node": node.name, "need": need.name}
        LAB.refuse(sheet, ordered, True, why=why, **told)
        return None
    sheet.show(moved.timeline, title=f"your graph: {case}")
    return moved


def graph_pass_name(sheet: Sheet) -> str:
    return {"13.2": "launch_early", "13.3": "wait_late"}[sheet.exercise]


def _run(sheet: Sheet, graph_pass: Pass, ours: Pass, prompt: str, shown: str) -> None:
    """The code made of the learner's graphs, beside that of ours, on two clocks."""
    cases = sorted(RUN, key=lambda case: case == shown)
    for case, (num_ranks, width) in zip(cases, WORLDS, strict=True):
        sheet.ran(f"the code made of your graph of {case!r}, on {num_ranks} ranks")
        moved = Moved(case, stage.job(graphs.passed, graph_pass, case))
        run = moves.run_code(moved.after(width), num_ranks)
        handed_out = moves.as_handed_out(case, num_ranks, width)
        program_laws.hold(sheet, run, wrong=_wrong(run.values, handed_out.values))
        best = graphs.graph_of(case, width)
        ours(best, graphs.needs_of(best))
        right = moves.run_code(best, num_ranks)
        for clock in CLOCKS:
            took, target = (moves.step_ns(one, clock) for one in (run, right))
            sheet.verify(prompt, laws.step_law(took, target))
        best = graphs.graph_of(case)
        ours(best, graphs.needs_of(best))
        times = (moved.timeline.step_ns, moves.timed(best).step_ns)
        title = f"your graph: {case}"
        sheet.show(moved.timeline, title=title, step_ns=times[0], target_ns=times[1])


def _wrong(values: Sequence[Any], rights: Sequence[Any]) -> list[laws.Violation]:
    """Results of the ranks that are not those of the graph as it was handed out."""
    found: list[laws.Violation] = []
    for rank, (mine, right) in enumerate(zip(values, rights, strict=True)):
        seen, oracle = (
            {f"result {i}": tensor for i, tensor in enumerate(results)}
            for results in (mine, right)
        )
        found += laws.values_law([seen], oracle, what="the value", rank=rank)
    return found
