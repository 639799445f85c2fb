"""Inductor's kernels in our order: backward graphs go through the passes, then to it.

Inductor moves nodes by itself, to where their readers are and to save memory, and so a
launch down to its wait. Both are switched off for graphs that were scheduled here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import Graph, GraphModule

from overlaplab.techniques.compiler.capture import (
    Fragment,
    Run,
    gradients_of,
    parameter_names,
)
from overlaplab.techniques.compiler.graphs import copied
from overlaplab.techniques.compiler.watching import noting
from overlaplab.torch_versions import inductor

# Of torch._inductor.config: what else would change the order.
KEEPS_ORDER: Mapping[str, Any] = {
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
}


def lower(
    module: GraphModule,
    inputs: Sequence[Any],
    passes: Callable[[Fragment], Graph],
    config: Mapping[str, Any] = KEEPS_ORDER,
) -> Run:
    """Compile a fragment by Inductor, its backward behind `passes`.

    Each rank must be a process of its own: it compiles for itself.

    Args:
        module: what Dynamo gives to a backend.
        inputs: the same.
        passes: from a backward graph to the one that is compiled.
        config: of `torch._inductor.config`, while a backward graph is compiled.
    """
    names = parameter_names(module.graph)
    compile_fx, compile_inner, patch = inductor()
    before: list[Graph] = []

    def inner(gm: GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Any:
        if not settings.get("is_backward"):
            if all("val" in n.meta for n in gm.graph.nodes if n.op == "call_function"):
                before[:] = [copied(gm.graph)]  # Inductor changes what it is given
            return compile_inner(gm, example_inputs, **settings)
        gradients = gradients_of(gm.graph, names)
        fragment = Fragment(gm.graph, gradients, True, *before)
        if fragment.gradients:  # a copy, too
            gm = GraphModule(gm, copied(passes(fragment)))
        with patch(dict(config)):
            made = compile_inner(gm, example_inputs, **settings)
        return noting(made, gradients, module.graph)

    run: Run = compile_fx(module, inputs, inner_compile=inner)
    return run
