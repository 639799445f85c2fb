"""Communication that a compiler puts in, moves and merges: passes on graphs.

`torch.compile(model, backend=backend(...))` runs all of them; `capture`, `capture_step`
and `capture_gradients` give graphs to look at and to try passes on.

Each pass is a file: a plan, which is data and prints, and a function that carries it
out, graph in, graph out. `simplification` takes out what autograd alone needed,
`insertion` lets gradients leave a backward graph as averages, `embeddings` sends the
rows of tables that were looked up, `sharding` gathers and scatters what each rank has
rows of, `bucketing` lets messages travel together and `sizing` says how many, `updates`
divides the optimizer by them, `decision` says which are worth launching early,
`scheduling` orders computing, launches and waits, `side_stream` gives each operator a
stream. `dependencies` says what may move where, `costs` (`fusing`, for Inductor's
kernels) what each node takes. `checks` refuses a pass that changed what a graph means,
`codegen` writes Python, `predict` its timeline, and `compilation` has all of it in a
row. `agreement` has all ranks send as one does, and `watching` refuses gradients of
code that Dynamo left out.
"""

from overlaplab.techniques.compiler.agreement import Sending
from overlaplab.techniques.compiler.backend import Backend, backend, forget
from overlaplab.techniques.compiler.bucketing import Merge, merge, plan_merges
from overlaplab.techniques.compiler.capture import (
    Fragment,
    capture,
    capture_gradients,
    capture_step,
)
from overlaplab.techniques.compiler.checks import check_same, graph_pass
from overlaplab.techniques.compiler.codegen import generate
from overlaplab.techniques.compiler.compilation import (
    Compilation,
    Settings,
    compile_graph,
    compile_inserted,
)
from overlaplab.techniques.compiler.costs import Costs
from overlaplab.techniques.compiler.decision import Decision, decide, plan_decisions
from overlaplab.techniques.compiler.dependencies import (
    Dependencies,
    Window,
    find_dependencies,
    find_windows,
)
from overlaplab.techniques.compiler.embeddings import (
    Lookup,
    gather_lookups,
    insert_averages,
    plan_lookups,
)
from overlaplab.techniques.compiler.example import nine_operators
from overlaplab.techniques.compiler.fusing import FusedCosts
from overlaplab.techniques.compiler.graphs import GraphError, show
from overlaplab.techniques.compiler.insertion import insert_all_reduces
from overlaplab.techniques.compiler.placing import peak_in_flight
from overlaplab.techniques.compiler.predict import predict, program_of
from overlaplab.techniques.compiler.problem import Problem, Task, end_of
from overlaplab.techniques.compiler.regathering import peak_whole
from overlaplab.techniques.compiler.runtime import Generated
from overlaplab.techniques.compiler.scheduling import (
    Schedule,
    plan_schedule,
    schedule,
)
from overlaplab.techniques.compiler.search import Found, best_list, search
from overlaplab.techniques.compiler.sharding import insert_shards
from overlaplab.techniques.compiler.side_stream import (
    StreamPlan,
    check_streams,
    plan_streams,
)
from overlaplab.techniques.compiler.simplification import simplify
from overlaplab.techniques.compiler.sizing import Sizes, plan_sizes
from overlaplab.techniques.compiler.updates import divide_updates, plan_updates
from overlaplab.techniques.compiler.watching import NotAveragedError, watch

__all__ = [
    "Backend",
    "Compilation",
    "Costs",
    "Decision",
    "Dependencies",
    "Found",
    "Fragment",
    "FusedCosts",
    "Generated",
    "GraphError",
    "Lookup",
    "Merge",
    "NotAveragedError",
    "Problem",
    "Schedule",
    "Sending",
    "Settings",
    "Sizes",
    "StreamPlan",
    "Task",
    "Window",
    "backend",
    "best_list",
    "capture",
    "capture_gradients",
    "capture_step",
    "check_same",
    "check_streams",
    "compile_graph",
    "compile_inserted",
    "decide",
    "divide_updates",
    "end_of",
    "find_dependencies",
    "find_windows",
    "forget",
    "gather_lookups",
    "generate",
    "graph_pass",
    "insert_all_reduces",
    "insert_averages",
    "insert_shards",
    "merge",
    "nine_operators",
    "peak_in_flight",
    "peak_whole",
    "plan_decisions",
    "plan_lookups",
    "plan_merges",
    "plan_schedule",
    "plan_sizes",
    "plan_streams",
    "plan_updates",
    "predict",
    "program_of",
    "schedule",
    "search",
    "show",
    "simplify",
    "watch",
]
