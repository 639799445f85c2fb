"""Communication that a compiler puts in, moves and merges: passes on graphs.

Each pass is a file: a plan, which is data and prints, and a function that carries it
out, graph in, graph out. `insertion` lets gradients leave a backward graph as averages,
`bucketing` lets messages travel together, `decision` says which are worth launching
early, `scheduling` orders computing, launches and waits. `dependencies` says what may
move where, `checks` refuses a pass that changed what a graph means.
"""

from overlaplab.techniques.compiler.bucketing import Merge, merge, plan_merges
from overlaplab.techniques.compiler.checks import check_same, graph_pass
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.decision import Decision, decide, plan_decisions
from overlaplab.techniques.compiler.dependencies import (
    Dependencies,
    Window,
    find_dependencies,
    find_windows,
)
from overlaplab.techniques.compiler.example import nine_operators
from overlaplab.techniques.compiler.graphs import GraphError, show
from overlaplab.techniques.compiler.insertion import insert_all_reduces
from overlaplab.techniques.compiler.problem import Problem, Task, end_of
from overlaplab.techniques.compiler.scheduling import (
    Schedule,
    peak_in_flight,
    plan_schedule,
    schedule,
)
from overlaplab.techniques.compiler.search import Found, best_list, search

__all__ = [
    "Costs",
    "Decision",
    "Dependencies",
    "Found",
    "GraphError",
    "Merge",
    "Problem",
    "Schedule",
    "Task",
    "Window",
    "best_list",
    "check_same",
    "decide",
    "end_of",
    "find_dependencies",
    "find_windows",
    "graph_pass",
    "insert_all_reduces",
    "merge",
    "nine_operators",
    "peak_in_flight",
    "plan_decisions",
    "plan_merges",
    "plan_schedule",
    "schedule",
    "search",
    "show",
]
