"""What operators do: memory, floating point operations, randomness, launches.

`operator(overload)` has what holds for every call, `written`, `read` and `aliased` what
one call does with its arguments, and `node_facts` the same for a node of an FX graph.
"Launches" is what CUDA does: one kernel for an operator that records, none for a view.
"""

from overlaplab.operators.calls import (
    aliased,
    read,
    tensors_in,
    waits_for_mask,
    written,
)
from overlaplab.operators.facts import (
    COLLECTIVES,
    Operator,
    dtype_name,
    operator,
    python_body,
)
from overlaplab.operators.nodes import NodeFacts, node_facts, tensor_bytes

__all__ = [
    "COLLECTIVES",
    "NodeFacts",
    "Operator",
    "aliased",
    "dtype_name",
    "node_facts",
    "operator",
    "python_body",
    "read",
    "tensor_bytes",
    "tensors_in",
    "waits_for_mask",
    "written",
]
