"""What operators do: memory, floating point operations, randomness, launches.

`operator(overload)` has what holds for every call, `written`, `read` and `aliased` what
one call does with its arguments, and `node_facts` the same for a node of an FX graph.
"Launches" is what CUDA does: one kernel for an operator that records, none for a view.
"""

from overlaplab.operators.calls import aliased as aliased
from overlaplab.operators.calls import read as read
from overlaplab.operators.calls import tensors_in as tensors_in
from overlaplab.operators.calls import waits_for_mask as waits_for_mask
from overlaplab.operators.calls import written as written
from overlaplab.operators.facts import COLLECTIVES as COLLECTIVES
from overlaplab.operators.facts import Operator as Operator
from overlaplab.operators.facts import dtype_name as dtype_name
from overlaplab.operators.facts import operator as operator
from overlaplab.operators.facts import python_body as python_body
from overlaplab.operators.nodes import NodeFacts as NodeFacts
from overlaplab.operators.nodes import node_facts as node_facts
from overlaplab.operators.nodes import tensor_bytes as tensor_bytes
