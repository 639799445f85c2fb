"""ZeRO: parameters, gradients and optimizer states are spread over ranks.

The way of a weight: `partition` says which part of it is whose, `Ring.launch` gathers
its unit into a slot, `Gathering`'s hooks say when, by the `plan` of a step. The way of
its gradient: autograd accumulates it into `.grad`, `Scatters` copies it into the unit's
slot when its backward is over, and reduce-scatters it; after `wait()` this rank's part
is in `.grad` of a piece that the optimizer updates. What is saved and loaded, in full
or in pieces, begins in `saving`.
"""

from overlaplab.techniques.zero.memory import Memory, plan_memory
from overlaplab.techniques.zero.partition import Partition, plan_partition
from overlaplab.techniques.zero.plan import PlanError, StepPlan, Use, plan_step
from overlaplab.techniques.zero.stage3 import Zero3

__all__ = [
    "Memory",
    "Partition",
    "PlanError",
    "StepPlan",
    "Use",
    "Zero3",
    "plan_memory",
    "plan_partition",
    "plan_step",
]
