"""What is worth computing twice: activations under a budget of bytes.

`plan_checkpoints` finds, for a model and the memory that it may use, which block keeps
what for its backward and which computes some of it again; `frontier` draws the whole
curve of peaks and step times. `measure_costs` has what both are made of.

`chain` is the data and the sum that the peak is, `knapsack` the fastest of its
`choices`, `strategies` what people choose by rule, `policies` what a block may do, and
`plan` carries a choice out. Numbers are taken by `finding`, `cutting` and `meters`: of
a block `alone`, of what is `around` them, of the `whole` model; `costs` joins them.
"""

from overlaplab.techniques.memory.chain import Block, Chain, Option, Whole
from overlaplab.techniques.memory.choices import Costs
from overlaplab.techniques.memory.knapsack import BudgetError, Curve, find_curve
from overlaplab.techniques.memory.messages import Communication
from overlaplab.techniques.memory.plan import AppliedPlan, CheckpointPlan, Frontier
from overlaplab.techniques.memory.planner import (
    frontier,
    measure_costs,
    plan_checkpoints,
)
from overlaplab.techniques.memory.policies import EAGER, Policy, compiled
from overlaplab.techniques.memory.strategies import every, none

__all__ = [
    "EAGER",
    "AppliedPlan",
    "Block",
    "BudgetError",
    "Chain",
    "CheckpointPlan",
    "Communication",
    "Costs",
    "Curve",
    "Frontier",
    "Option",
    "Policy",
    "Whole",
    "compiled",
    "every",
    "find_curve",
    "frontier",
    "measure_costs",
    "none",
    "plan_checkpoints",
]
