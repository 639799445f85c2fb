"""What is worth computing twice: activations under a budget of bytes.

`plan_checkpoints` finds, for a model and the memory that it may use, which block keeps
what for its backward and which computes some of it again; `frontier` draws the whole
curve of peaks and step times. `measure_costs` has what both are made of.

`chain` is the data and the sum that the peak is, `knapsack` the fastest of its
`choices`, `strategies` what people choose by rule, `policies` what a block may do, and
`plan` carries a choice out. Numbers are taken by `finding`, `cutting` and `meters`: of
a block `alone`, of what is `around` them, of the `whole` model; `costs` joins them.
"""

from overlaplab.techniques.memory.chain import Block as Block
from overlaplab.techniques.memory.chain import Chain as Chain
from overlaplab.techniques.memory.chain import Option as Option
from overlaplab.techniques.memory.chain import Whole as Whole
from overlaplab.techniques.memory.choices import Costs as Costs
from overlaplab.techniques.memory.knapsack import BudgetError as BudgetError
from overlaplab.techniques.memory.knapsack import Curve as Curve
from overlaplab.techniques.memory.knapsack import find_curve as find_curve
from overlaplab.techniques.memory.messages import Communication as Communication
from overlaplab.techniques.memory.plan import AppliedPlan as AppliedPlan
from overlaplab.techniques.memory.plan import CheckpointPlan as CheckpointPlan
from overlaplab.techniques.memory.plan import Frontier as Frontier
from overlaplab.techniques.memory.planner import frontier as frontier
from overlaplab.techniques.memory.planner import measure_costs as measure_costs
from overlaplab.techniques.memory.planner import plan_checkpoints as plan_checkpoints
from overlaplab.techniques.memory.policies import EAGER as EAGER
from overlaplab.techniques.memory.policies import Policy as Policy
from overlaplab.techniques.memory.policies import compiled as compiled
from overlaplab.techniques.memory.strategies import every as every
from overlaplab.techniques.memory.strategies import none as none
