# %% [markdown]
# ## Primer: FX graphs in 15 minutes
#
# Other labs on compilers share this part. If you have done it in one of them, run its cells and go
# on.
#
# A compiler does not read your Python. It works on a **graph**: a list of operators, each with what
# it takes. PyTorch's own form of it is `torch.fx.Graph`. Here is a function, and its graph.

# %% name="fx-capture"
import torch
from torch.fx import GraphModule

from overlaplab.grading.kept import side_by_side
from overlaplab.techniques.compiler import capture_step, find_dependencies, show


def two_layers(x, w, v):
    return torch.relu(x @ w) @ v


inputs = torch.randn(4, 3), torch.randn(3, 2), torch.randn(2, 2)
graph = capture_step(two_layers, *inputs)
print(show(graph))

# %% [markdown]
# `capture_step` ran the function once, on tensors without values, and wrote down each operator.
# The function is not needed any more: no `@`, no call of a module is left, only the operators that
# PyTorch runs in the end (`mm`, `relu`), and names for what they give. Inputs got a number: `x` is
# `x_1`.
#
# A line is a **node**. These are its parts:

# %% name="fx-nodes"
for node in graph.nodes:
    takes = [one.name for one in node.all_input_nodes]
    used_by = [one.name for one in node.users]
    print(f"{node.name:<7} {node.op:<14} takes {takes!s:<16} used by {used_by}")

# %% [markdown]
# - `node.op`: `placeholder` is an input, `call_function` an operator, `output` the return.
# - `node.target`: which operator. `node.args`: what it is called with, nodes and numbers.
# - `node.all_input_nodes`: the nodes among its arguments. `node.users`: the other way round.
# - `node.meta["val"]`: a tensor without values, for shape and dtype.
#
# **The order is a choice.** A graph's nodes stand in one order, in which they run. Another order
# that respects "takes" computes the same. A captured backward pass shows it: a layer has two
# products, one for its weight and one for the layer below, and either may come first.


# %% name="fx-backward"
def backward(grad, x, w, y):
    grad = torch.where(y > 0, grad, 0.0)  # of the relu
    return grad @ w.t(), x.t() @ grad  # for the layer below, for the weight


y = torch.relu(inputs[0] @ inputs[1])
backward_inputs = torch.ones(4, 2), inputs[0], inputs[1], y
graph = capture_step(backward, *backward_inputs)
print(show(graph))

# %% [markdown]
# `t` is a transpose: a **view**. It moves no bytes and takes no time on a GPU.
#
# **Moving.** `a.append(b)` puts node `b` right behind node `a`, `a.prepend(b)` right before it.
# `graph.lint()` complains if a node stands before one that it takes.
#
# **Predict.** `mm_1` is the weight's product. The cell below first puts it behind `t_1`, where it
# stands already; `lint` has nothing to say. Then it puts `mm_1` right behind `where`. Does `lint`
# complain now? Type `True` or `False`.

# %% name="fx-predict-move" kind="lab-only"
complains = None

# %% name="fx-predicted-move" kind="solution-only"
complains = False

# %% name="fx-move" fold=true
nodes = {node.name: node for node in graph.nodes}


def lint_complains(graph):
    try:
        graph.lint()
    except RuntimeError as error:
        print("lint:", str(error).splitlines()[0])
        return True
    return False


nodes["t_1"].append(nodes["mm_1"])
assert not lint_complains(graph)
nodes["where"].append(nodes["mm_1"])
side_by_side("lint complains", complains, lint_complains(graph))

# %% [markdown]
# It does: `mm_1` takes `t_1`, which stands behind it now. Moving `t_1`, too, mends that. Then
# the weight's product comes first.

# %% name="fx-mend"
nodes["mm_1"].prepend(nodes["t_1"])
graph.lint()
print(show(graph))

# %% [markdown]
# **Running.** A `GraphModule` runs a graph. Two orders, the same values:

# %% name="fx-run"
run = GraphModule(torch.nn.Module(), graph)
for ours, mine in zip(backward(*backward_inputs), run(*backward_inputs), strict=True):
    print("largest difference:", (ours - mine).abs().max().item())

# %% [markdown]
# **What lint does not see.** Some operators write into memory that exists already; their names end
# in `_`. Then there is more to respect than "takes". In this function `z` is a view of `y`: `mul_` changes both.


# %% name="fx-in-place"
def doubled(x, w):
    y = x @ w
    z = y.t()
    y.mul_(2)
    return z.sum(0)


square = torch.randn(3, 3), torch.randn(3, 3)
graph = capture_step(doubled, *square)
print(show(graph))

# %% [markdown]
# **Predict.** Move `mul_` behind `sum_1`, and run. `lint` has nothing to say. Are the values right?

# %% name="fx-predict-in-place" kind="lab-only"
values_are_right = None

# %% name="fx-predicted-in-place" kind="solution-only"
values_are_right = True

# %% name="fx-in-place-moved" fold=true
before = find_dependencies(graph).needs  # see below
nodes = {node.name: node for node in graph.nodes}
nodes["sum_1"].append(nodes["mul_"])
graph.lint()
(moved,) = GraphModule(torch.nn.Module(), graph)(*square)
is_right = torch.allclose(moved, doubled(*square))
side_by_side("the values are right", values_are_right, is_right)

# %% [markdown]
# `sum_1` takes `t`, which takes `mm`. In between, `mul_` writes the same memory, and no argument
# says so. So it is not enough to look at what a node takes. `find_dependencies(graph).needs` has,
# for each node, the nodes that must stand before it, **directly**:
#
# - those whose value it takes;
# - those that write memory that it reads;
# - those that read or write memory that it writes.

# %% name="fx-needs"
for node, needs in before.items():
    print(f"{node.name:<6} needs {[need.name for need in needs]}")

# %% [markdown]
# `sum_1` needs `mul_`. That is all the law there is: **an order is right if each node stands behind
# everything it needs.** Which of the right orders is fast is another question: yours.
#
# **Putting nodes in.** `graph.create_node(...)` inside `with graph.inserting_after(node):` makes one;
# `old.replace_all_uses_with(new)` hands its result to all users; `graph.erase_node(old)` takes one
# out. You will not need these three here, but you will meet them in every pass that you read.
