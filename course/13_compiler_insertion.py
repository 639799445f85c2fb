# %% [markdown]
# # Who should decide when to send?
#
# **Lab 13: communication that a compiler puts in.** Primer: 15 minutes. Core: 35 minutes. You need no
# GPU.
#
# After the core you can
#
# - say from a graph which operators could run beside a message, and why a list of module types cannot;
# - write two **passes** over such a graph: launch early, and wait late.
#
# It builds on lab 04: a collective with `async_op=True` travels beside the computation, and `work.wait()`
# makes the stream wait. Lab 06, where hooks send gradients in buckets, is what we compare with.
#
# **How it works.** Run the cells from top to bottom. A check tells you what it saw, in
# numbers, and draws what *your* code did. No exercise needs the one before it: where
# yours is not finished, the course's own runs in its place and the cell says so.

# %% name="setup"
from overlaplab import view
from overlaplab.grading import check
from overlaplab.techniques.compiler import nine_operators, show
from overlaplab_course import lab13 as lab

# %% include="primers/fx_graphs.py"

# %% [markdown]
# ## 1. The waste (5 minutes)
#
# Three layers, their backward pass, and two ranks. The nine operators of this graph: each layer has a
# product `dx` for the layer below, a product `dw` for its own weight, and an all-reduce that averages
# `dw` over the ranks. The last layer comes first. (Transposes are views: they take no time.)

# %% name="nine"
serial = nine_operators()
print(show(serial))

# %% [markdown]
# In a graph a collective is *two* nodes. The **launch** (`>>`) hands the message over. The **wait** (`<<`)
# gives a result that may be read. Here each wait stands right behind its launch, as in code
# that calls `dist.all_reduce(grad)` without `async_op`.
#
# All is in slow motion: a product of this size takes 2 ms and a message 5, 1 of latency and 4 of wire.

# %% name="nine-drawn"
runs = {"waits at once": lab.timed(serial)}
view.draw_many(runs)

# %% [markdown]
# The other way in which people write it: first the whole backward pass, then all messages.
#
# **Predict.** How long is that step, in ms?

# %% name="predict-after" kind="lab-only"
after_ms = None

# %% name="predicted-after" kind="solution-only"
after_ms = 27

# %% name="after" fold=true
after = lab.graph_of(lab.AFTER)
runs["sends after it all"] = lab.timed(after)
lab.side_by_side("the step in ms", after_ms, runs["sends after it all"].step_ns / 1e6)
view.draw_many(runs)

# %% [markdown]
# Six products and three messages in turn, either way: nothing overlaps. The wire and the GPU are never
# busy at the same time, and nobody had to write it so: no layer needs the average of another
# layer's gradient.

# %% [markdown]
# ## 2. Which operators could run beside a message? (10 minutes)
#
# Texts on overlap answer with a list. One kind goes by **module type**: *a Linear is large enough to
# hide a message, a LayerNorm or an activation is not*. Another goes by **layer**: *while a layer's gradients
# travel, the layers below are computed*. Here is what the two say of the nine operators.

# %% name="lists"
print(lab.table_of({"by type": lab.by_type, "by layer": lab.by_layer}))

# %% [markdown]
# `yes`: this operator could run beside that message. The two disagree in half of the table. The graph
# knows better. An operator can run beside a message if
#
# - the message does not need it, however far back: it makes nothing of what is sent; and
# - it does not need the message, however indirectly.
#
# **Exercise 13.1.** Write `beside(graph, needs, launch)`.
#
# - `needs[node]`: the nodes that must stand before `node`, directly (see the primer).
# - `launch`: the node that launches a message.
# - Return a list of the operators that could run beside it, in any order, wherever they
#   stand in the graph now. `lab.operators(graph)` lists the graph's operators: those nodes that compute.
#
# About 9 lines, two functions.
#
# <details><summary>Hint: however far back</summary>
#
# Keep a list of nodes to look at, and a set of those found. Take one from the list; put what it needs
# into both, unless it has been found already.
#
# </details>
# <details><summary>Hint: the other way round</summary>
#
# An operator needs the message if `launch` is among all that the operator needs, however far back.
#
# </details>


# %% name="beside" kind="exercise" exercise="13.1" reference=true
def everything_before(needs, node):
    """All nodes that must be over before `node`."""
    ### BEGIN SOLUTION
    found, todo = set(), [node]
    while todo:
        for need in needs[todo.pop()]:
            if need not in found:
                found.add(need)
                todo.append(need)
    return found
    ### END SOLUTION


def beside(graph, needs, launch):
    """The operators that could run beside the message."""
    ### BEGIN SOLUTION
    before = everything_before(needs, launch)
    return [
        operator
        for operator in lab.operators(graph)
        if operator not in before and launch not in everything_before(needs, operator)
    ]
    ### END SOLUTION


# %% name="check-beside" kind="check" exercise="13.1" points=2
_ = check("13.1", beside)
lab.keep("13.1", beside)

# %% name="lists-again"
answers = {"by type": lab.by_type, "by layer": lab.by_layer}
answers[f"the graph ({lab.whose('13.1')})"] = lab.mine_or_ours("13.1")
print(lab.table_of(answers))
print(lab.wrong_of(answers))

# %% [markdown]
# The list by type *allows* what cannot be: `dw3` beside the message that carries `dw3`. The list by layer
# *misses* what could: `dx3` is of the same layer as `dw3`, and yet nothing of it is sent. A module is the wrong unit.
# Its backward pass is two operators, and only one of them is in the message's way.

# %% [markdown]
# ## 3. Launch early (7 minutes)
#
# Now move nodes. A **pass** is a function that gets a graph and changes it. The first brings each launch
# to the earliest place where it may stand.
#
# **The API of this screen.** `a.append(b)` puts node `b` right behind `a`; it leaves its old place. `graph.nodes` is
# the order as it is now.
#
# **Exercise 13.2.** Write `launch_early(graph, needs)`. It changes `graph` and returns nothing.
#
# - Each launch ends right behind the last node that it needs: no operator and no wait between them. (Other launches and views may stand there.)
# - Nothing else moves.
# - Every rank runs your pass on its own, and all must send in the same order.
#
# About 4 lines. `lab.launches(graph)` lists the launches.
#
# <details><summary>Hint: the last node that it needs</summary>
#
# Walk over `graph.nodes` and remember the last that is in `needs[launch]`.
#
# </details>
# <details><summary>Hint: the same order</summary>
#
# A list has one order. A set of nodes has another one in every process.
#
# </details>


# %% name="launch-early" kind="exercise" exercise="13.2" reference=true
def launch_early(graph, needs):
    ### BEGIN SOLUTION
    for launch in lab.launches(graph):
        last = [node for node in graph.nodes if node in needs[launch]][-1]
        last.append(launch)
    ### END SOLUTION


# %% name="check-launch-early" kind="check" exercise="13.2" points=3
_ = check("13.2", launch_early)
lab.keep("13.2", launch_early)

# %% [markdown]
# ## 4. Wait late (7 minutes)
#
# The second pass does the opposite with waits.
#
# **Exercise 13.3.** Write `wait_late(graph, needs)`. It changes `graph` and returns nothing.
#
# - Each wait ends right before the first node that needs it: no operator and no launch between them.
#   The `output` is a node, too, and needs what it returns.
# - Nothing else moves.
#
# About 4 lines. `lab.waits(graph)` lists the waits; `a.prepend(b)` puts `b` right before `a`.
#
# <details><summary>Hint: who needs it?</summary>
#
# Not only those that take its value: who writes memory that the message sends needs the wait as well. `needs` has both:
# look for the wait in `needs[node]`.
#
# </details>


# %% name="wait-late" kind="exercise" exercise="13.3" reference=true
def wait_late(graph, needs):
    ### BEGIN SOLUTION
    for wait in lab.waits(graph):
        reader = next(node for node in graph.nodes if wait in needs[node])
        reader.prepend(wait)
    ### END SOLUTION


# %% name="check-wait-late" kind="check" exercise="13.3" points=3
_ = check("13.3", wait_late)
lab.keep("13.3", wait_late)

# %% name="again"
for name, graph in (("waits at once", serial), ("sends after it all", after)):
    lab.mine_or_ours("13.2")(graph, lab.needs_of(graph))
    lab.mine_or_ours("13.3")(graph, lab.needs_of(graph))
    runs[f"{name}, moved"] = lab.timed(graph)
view.draw_many(runs)

# %% [markdown]
# Both graphs have become the same one. However the program was written, launching early and waiting late
# finds the same schedule.
