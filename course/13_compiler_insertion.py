# %% [markdown]
# # Who should decide when to send?
#
# **Lab 13: communication that a compiler puts in.** A primer of 15 minutes. Core: two sittings of
# 60 minutes, the first with the primer, and a door after section 4. Extras: 85 more. You need no
# GPU.
#
# After the core you can
#
# - say from a graph which operators could run beside a message, and why a list of module types cannot;
# - write two **passes** over such a graph, launch early and wait late, and plan which messages merge;
# - read the code that such a compiler writes, and say what it can do that hooks cannot;
# - say when "launch early, wait late" is the best there is, and break it where it is not.
#
# It builds on lab 04: a collective with `async_op=True` travels beside the computation, and `work.wait()`
# makes the stream wait. Lab 06, where hooks send gradients in buckets, is what we compare with.
#
# **How it works.** Run the cells from top to bottom. A check tells you what it saw, in
# numbers, and draws what *your* code did. No exercise needs the one before it: where
# yours is not finished, the course's own runs in its place and the cell says so.

# %% name="setup"
import contextlib
import itertools
import math

import torch
import torch.distributed as dist

import overlaplab as ol
from overlaplab import view
from overlaplab.grading import check, solved
from overlaplab.techniques.compiler import (
    find_dependencies,
    find_windows,
    generate,
    nine_operators,
    plan_decisions,
    plan_schedule,
    schedule,
    show,
)
from overlaplab_course import lab13 as lab

# %% include="primers/fx_graphs.py"

# %% [markdown]
# ## 1. The waste (6 minutes)
#
# Here is the backward pass of three layers, on two ranks. It has nine operators, three per layer:
#
# - a product `dx`, the gradient for the layer below;
# - a product `dw`, the gradient of the layer's own weight;
# - an all-reduce, which averages `dw` over the ranks.
#
# The last layer comes first. (The transposes `t` are views: they take no time.)

# %% name="nine"
serial = nine_operators()
print(show(serial))

# %% [markdown]
# In a graph a collective is *two* nodes. The **launch** (`>>`) hands the message over (`avg`: it is
# averaged; `0`: the name of the group of ranks). The **wait** (`<<`) gives a result that may be read.
# Here each wait stands right behind its launch, as in code that calls `dist.all_reduce(grad)` without `async_op`.
#
# Everything here is in slow motion. A product takes 2 ms. A message takes 5 ms: 1 ms of latency
# and 4 ms on the wire. Both ranks do the same at the same time, so only one is drawn.

# %% name="nine-drawn"
runs = {"waits at once": lab.timed(serial)}
view.draw_many(runs)

# %% [markdown]
# People also write it in another way: first the whole backward pass, then all messages.
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
# Either way, six products and three messages run in turn. The GPU and the wire are never busy at
# the same time. Yet nothing forces this: no layer needs the average of another layer's gradient.

# %% [markdown]
# ## 2. Which operators could run beside a message? (21 minutes)
#
# Texts on overlap answer with a list. One kind of list goes by **module type**: *a Linear is large
# enough to hide a message, a LayerNorm or an activation is not*. Another goes by **layer**: *while
# a layer's gradients travel, the layers below are computed*.
#
# This is what the two lists say about the nine operators. Each pair of rows is one message. `yes`
# means: the operator of this column could run beside it.

# %% name="lists"
print(lab.table_of({"by type": lab.by_type, "by layer": lab.by_layer}))

# %% [markdown]
# The lists disagree in many places. The graph has the answer. An operator can run beside a message
# if neither needs the other:
#
# - the message does not need the operator, neither directly nor through other nodes;
# - the operator does not need the message, neither directly nor through other nodes.
#
# **Exercise 13.1.** Write `beside(graph, needs, launch)`.
#
# - `needs[node]`: the nodes that must stand before `node`, directly (see the primer).
# - `launch`: the node that launches a message.
# - Return a list of the operators that could run beside this message, in any order. Where they
#   stand in the graph now does not matter.
# - `lab.operators(graph)` lists the nodes that compute.
#
# Begin with `everything_before`, which is begun for you: about 5 lines, and as many for `beside`.
#
# <details><summary>Hint: through other nodes</summary>
#
# As long as `todo` has nodes, take one from it. Put what it needs into both `found` and `todo`,
# unless it has been found already.
#
# </details>
# <details><summary>Hint: the other way round</summary>
#
# An operator needs the message if `launch` is in `everything_before(needs, operator)`.
#
# </details>


# %% name="beside" kind="exercise" exercise="13.1" reference=true
def everything_before(needs, node):
    """All nodes that must be over before `node`."""
    found, todo = set(), [node]  # todo: nodes that you have yet to look at
    ### BEGIN SOLUTION
    while todo:
        for need in needs[todo.pop()]:
            if need not in found:
                found.add(need)
                todo.append(need)
    ### END SOLUTION
    return found


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

# %% name="lists-again"
if solved("13.1"):
    answers = {"by type": lab.by_type, "by layer": lab.by_layer}
    answers["the graph (yours)"] = beside
    print(lab.table_of(answers))
    print(lab.wrong_of(answers))

# %% [markdown]
# The list by type *allows* what cannot be: `dw3` beside the message that carries `dw3`. The list
# by layer *misses* what could be: `dx3` belongs to the same layer as `dw3`, but the message does
# not need it.
#
# So a module is the wrong unit. Its backward pass is two operators, and only one of them makes the
# gradient that is sent.

# %% [markdown]
# ## 3. Launch early (9 minutes)
#
# Now you move nodes. A **pass** is a function that gets a graph and changes it. The first pass brings each
# launch to the earliest place where it may stand.
#
# **The API of this screen.** `a.append(b)` puts node `b` right behind `a`; it leaves its old
# place. `graph.nodes` is the order as it is now.
#
# **Exercise 13.2.** Write `launch_early(graph, needs)`. It changes `graph` and returns nothing.
#
# - Afterwards each launch stands right behind the last node that it needs. No operator and no wait
#   stands between them. (Other launches, and views, may stand there.)
# - Nothing else moves.
# - Each rank runs your pass by itself, but all must end with their launches in the same order.
#   Otherwise messages of different gradients would meet.
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
# A list has the same order on every rank. A set of nodes does not.
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
# The second pass moves waits the other way.
#
# **Exercise 13.3.** Write `wait_late(graph, needs)`. It changes `graph` and returns nothing.
#
# - Afterwards each wait stands right before the first node that needs it. No operator and no
#   launch stands between them. The `output` is a node, too: it needs what it returns.
# - Nothing else moves.
#
# About 4 lines. `lab.waits(graph)` lists the waits; `a.prepend(b)` puts `b` right before `a`.
#
# <details><summary>Hint: who needs it?</summary>
#
# Two kinds of nodes: those that take the wait's value, and those that overwrite what the message
# is still sending. `needs` knows both. Look for the wait in `needs[node]`.
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

# %% [markdown]
# ### One graph (2 minutes)
#
# Now both passes run on both programs of section 1. All four timelines have one scale.

# %% name="again"
launch_pass, wait_pass = lab.mine_or_ours("13.2"), lab.mine_or_ours("13.3")
for name, graph in (
    ("waits at once", nine_operators()),
    ("sends after it all", lab.graph_of(lab.AFTER)),
):
    launch_pass(graph, lab.needs_of(graph))
    wait_pass(graph, lab.needs_of(graph))
    runs[f"{name}, moved"] = lab.timed(graph)
view.draw_many(runs)

# %% [markdown]
# The last two pictures are equal. It does not matter how the program was written: the needs are
# the same, and the two passes look at nothing else.
#
# Some communication is still exposed. When the last product ends, the wire has more to send.
#
# **A door.** Your two passes move every message as far as its needs allow. This is a good place to
# stop for today. When you come back, run all cells once: what you solved is in the notebook.

# %% [markdown]
# ## 5. Which messages may travel together? (23 minutes)
#
# Each message begins with its latency, here 1 ms. Messages that travel together pay it once. In a
# graph such a **bucket** is one launch with several tensors, and one wait per tensor.
#
# In lab 06 only its size limited a bucket. A graph adds a second limit. Look at the second message
# here: what it sends was made with the result of the first.

# %% name="circle"
print(show(lab.plan_graph("one sends what another brought")))

# %% [markdown]
# Suppose that `all_reduce_0` and `all_reduce_1` shared a bucket. The bucket could leave only when
# `with_1_0` is ready. But `with_1_0` needs `wait_0`, a result of this bucket. That is a
# **circle**: no order is possible.
#
# If you only average gradients, there is never a circle. There can be one in a forward pass that
# sends messages. There can be one, too, if gradients are scaled before they are sent, by a norm
# that was itself summed over the ranks.
#
# **Exercise 13.4.** Write `plan_buckets(graph, needs, cap_bytes)`.
#
# - All messages are averages in one dtype. Each launch stands where it is ready.
# - Return a list of buckets. A bucket is a list of launches, in the order of the graph. Each
#   launch is in one bucket.
# - One bucket is open at a time, and the next launch joins it. It opens a new bucket instead in
#   two cases: together they would have more than `cap_bytes`; or the launch needs the result of
#   one in the bucket, directly or through other nodes.
# - A message that is larger than the cap travels alone.
#
# About 10 lines. `lab.sent_bytes(launch)` gives the bytes. `lab.all_before(needs, node)` gives the
# set of all nodes that must be over before `node`.
#
# <details><summary>Hint</summary>
#
# Keep the bytes of the open bucket in `size`. Then
# `too_large = size + lab.sent_bytes(launch) > cap_bytes`, and
# `circle = any(one in lab.all_before(needs, launch) for one in buckets[-1])`.
#
# </details>


# %% name="plan-buckets" kind="exercise" exercise="13.4" reference=true
def plan_buckets(graph, needs, cap_bytes):
    """Lists of launches that travel together."""
    ### BEGIN SOLUTION
    buckets, size = [[]], 0
    for launch in lab.launches(graph):
        before = lab.all_before(needs, launch)
        circle = any(member in before for member in buckets[-1])
        if buckets[-1] and (circle or size + lab.sent_bytes(launch) > cap_bytes):
            buckets.append([])
            size = 0
        buckets[-1].append(launch)
        size += lab.sent_bytes(launch)
    return buckets
    ### END SOLUTION


# %% name="check-plan-buckets" kind="check" exercise="13.4" points=3
_ = check("13.4", plan_buckets)
lab.keep("13.4", plan_buckets)

# %% [markdown]
# Your plan is data. `lab.merged` carries it out with our compiler's own pass, which puts nodes in
# and takes nodes out.
#
# **Predict.** The nine operators have three gradients. Let the cap be 1, 2 or 3 gradients: the first
# message carries as many, and those behind it the rest. With which cap is the step shortest? Guess
# for this link, with a latency of 1 ms, and for a link with a latency of 6 ms.

# %% name="predict-buckets" kind="lab-only"
best_near, best_far = None, None  # with 1 ms of latency, with 6 ms

# %% name="predicted-buckets" kind="solution-only"
best_near, best_far = 1, 3

# %% name="buckets" fold=true
bucket_pass = lab.mine_or_ours("13.4")


def compiled(cap_bytes):
    graph = lab.graph_of(lab.AFTER)
    launch_pass(graph, lab.needs_of(graph))
    graph = lab.merged(graph, bucket_pass(graph, lab.needs_of(graph), cap_bytes))
    wait_pass(graph, lab.needs_of(graph))
    return graph


steps = {
    latency_ms: {
        number: lab.timed(compiled(40_000 * number), lab.link(latency_ms)).step_ns / 1e6
        for number in (1, 2, 3)
    }
    for latency_ms in (1, 6)
}
shortest = {latency: min(each, key=each.get) for latency, each in steps.items()}
lab.side_by_side("latency 1 ms", best_near, shortest[1])
lab.side_by_side("latency 6 ms", best_far, shortest[6])
for latency_ms, each in steps.items():
    told = ", ".join(f"{number}: {ms:.0f} ms" for number, ms in each.items())
    print(f"latency {latency_ms} ms, gradients in the first message: {told}")
view.draw_many(
    {
        f"latency 6 ms, {number} in the first message": lab.timed(
            compiled(40_000 * number), lab.link(6)
        )
        for number in (1, 2, 3)
    }
)

# %% [markdown]
# A bucket leaves when its last gradient is ready. So the first gradient in it is delayed. With a
# short latency this delay costs more than the bucket saves. With a long latency it costs less. The
# graph says what *may* travel together. The link says what *should*, as in lab 06.
#
# Look at the last picture. Nothing overlaps in it, and yet it is the shortest of the three. The
# aim is a short step, and overlap is one way to get there.

# %% [markdown]
# ## 6. Read what it writes (9 minutes)
#
# In the end the graph becomes Python again. This is what our compiler writes for the graph that
# your passes made:

# %% name="code"
mine = compiled(40_000)
print(generate(mine, "backward"))

# %% [markdown]
# `average` launches one all-reduce in place and returns something to wait for. After
# `all_reduce_dw3.wait()`, `dw3` *is* the average. `args.clear()` and `del` let go of each tensor
# after its last use.
#
# This is eager PyTorch, in the order of the graph. Next it runs on two ranks of the virtual
# cluster, with real numbers. The same three layers also run as in lab 06: `backward()` with a
# reducer's hooks, one message per gradient.
#
# **Predict.** Which is shorter, and by how many ms?

# %% name="predict-hooks" kind="lab-only"
shorter, by_ms = None, None  # "hooks" or "code"

# %% name="predicted-hooks" kind="solution-only"
shorter, by_ms = "code", 4

# %% name="hooks" fold=true
# The course's own of lab 06. Yours: lab.with_hooks(plan_6_1, install_6_2, finish_6_3).
hooks = lab.with_hooks()
code = lab.run_graph(mine)
difference_ms = (hooks.step_ns - code.step_ns) / 1e6
lab.side_by_side("shorter", shorter, "code" if difference_ms > 0 else "hooks")
lab.side_by_side("by ms", by_ms, f"{abs(difference_ms):.1f}")
view.draw_many({"hooks of lab 06": hooks, "code from the graph": code})

# %% [markdown]
# There is next to no difference. What there is comes from the thin bars: the reducer copies
# gradients into its buckets and back. Hooks launch each message when its gradient is ready, and wait at the end. That
# *is* "launch early, wait late".
#
# So what can a compiler do that hooks cannot? In both pictures `dx3` runs before `dw3`, so the
# first message leaves only after 4 ms. In the upper picture, where each product is called
# `mm`, autograd chose this order, and hooks take it as it is. A compiler may change it:

# %% name="other-order"
graph = nine_operators()
plan = plan_schedule(graph, lab.COSTS)  # COSTS: the times of section 1
print(f"{plan.found.end_ns / 1e6:.0f} ms. Proven optimal: {plan.is_optimal}")
best = schedule(graph, plan)
view.draw_many(
    {"hooks of lab 06": hooks, "another order of computing": lab.timed(best)}
)

# %% [markdown]
# With `dw3` first, its message leaves 2 ms earlier, and so do all others. Our compiler searches
# for such an order. The line above the picture says that no order is shorter.
#
# So launching early and waiting late, in autograd's order, was not the best. When is it?

# %% [markdown]
# ## 7. When is "launch early, wait late" the best? (22 minutes)
#
# **Theorem.** Launch each message as soon as it is ready, and wait at the end. No other order of launches
# ends earlier, *if*
#
# 1. the **order of computing** is fixed,
# 2. **nothing reads** a message before the end,
# 3. **no limit** is set on how much may be in flight.
#
# Why? The wire is a queue. With these launches it is never idle while a message is ready. A queue
# that is never idle while there is work ends as early as it can.
#
# Try to break it. The next cell makes up 200 chains of four operators. Each operator has one
# message, and all times are random. The cell times the rule, and then *all* other orders of
# launches.

# %% name="try"
print(f"{lab.try_to_break()} of 200 chains have a better order of launches")

# %% [markdown]
# Now take away one condition at a time. Here are three shapes. Each is a row of operators and
# messages, in the order in which the program has them. `m of x` is a message that sends what `x`
# made. `x < m` is an operator `x` that reads message `m`.

# %% name="shapes"
for name, rows in lab.SHAPES.items():
    print(f"{name:<8}", "; ".join(rows))

# %% [markdown]
# - `order`: `dx` and `dw` may change places.
# - `reader`: operators keep their order, launches may move. `u2` reads `m2`, and `u1` reads `m1`.
# - `memory`: operators keep their order and read no message, launches may move. A message of 5 ms
#   has 5 units, and at most 10 units may be in flight. A launch that finds no room makes the
#   compute stream wait until a message has ended.
#
# **Exercise 13.5.** Break the rule three times. For each shape find times, in whole ms from 1 to
# 9, for which "launch early, wait late" takes longer than the best order:
#
# - in `order` by at least 60 %,
# - in `reader` by at least 30 %,
# - in `memory` by at least 10 %.
#
# You can think, try numbers in the cell, or let a loop try random ones (see the last hint). The
# cell below yours draws the rule and the best order for each shape.
#
# <details><summary>Hint: order</summary>
#
# What could hide behind `dx`, if it were ready earlier?
#
# </details>
# <details><summary>Hint: reader</summary>
#
# `m1` is ready first, so the rule sends it first. Make `m1` long, and let a long operator wait for `m2`.
#
# </details>
# <details><summary>Hint: memory</summary>
#
# Let `ma` nearly fill the limit. Then `mb` finds no room, and its launch makes everything wait. If
# `mb` is small, it could have gone *before* `ma`; the long `d` could then run beside `ma`.
#
# </details>
# <details><summary>Hint: a loop</summary>
#
# `lab.shape("order", dx=1, dw=1, m=1).loses_percent` is a number. Draw each time with
# `random.randint(1, 9)`, a few hundred times, and keep the times that lose most.
#
# </details>

# %% name="found" kind="exercise" exercise="13.5"
### BEGIN SOLUTION
found = {
    "order": {"dx": 9, "dw": 1, "m": 9},
    "reader": {"a": 1, "m1": 9, "b": 1, "m2": 1, "u2": 9, "u1": 1},
    "memory": {"a": 3, "ma": 9, "b": 1, "mb": 2, "c": 2, "mc": 1, "d": 9, "md": 8},
}
### END SOLUTION
### BEGIN STUB
# found = {
#     "order": {"dx": 1, "dw": 1, "m": 1},
#     "reader": {"a": 1, "m1": 1, "b": 1, "m2": 1, "u2": 1, "u1": 1},
#     "memory": {"a": 1, "ma": 1, "b": 1, "mb": 1, "c": 1, "mc": 1, "d": 1, "md": 1},
# }
### END STUB

# %% name="found-seen"
broken = {name: lab.shape(name, **times) for name, times in found.items()}
for one in broken.values():
    print(one)
view.draw_many({k: v for one in broken.values() for k, v in one.timelines.items()})

# %% name="check-found" kind="check" exercise="13.5" points=3
_ = check("13.5", found)

# %% [markdown]
# <details><summary>The surprise of this lab, when you have solved 13.5</summary>
#
# "Launch early, wait late" is a theorem, and real training breaks each of its conditions.
#
# - `order`: a linear layer has two products, and autograd's order of them is often not the best.
# - `reader`: tensor parallelism, gradient clipping, or an optimizer that updates bucket by bucket.
# - `memory`: a gradient in flight stays alive.
#
# Without the conditions no simple rule is always the best. So a compiler has to search, and to say
# how far from the best it may still be.
#
# </details>

# %% [markdown]
# ## Takeaways (2 minutes)

# %% name="takeaways" fold=true
allowed, missed = lab.count_wrong(lab.by_type)[0], lab.count_wrong(lab.by_layer)[1]
print(f"""1. Ask the graph, not a list: of 18 answers the list by module type allows {allowed} that cannot
   be, the list by layer misses {missed} that could be.
2. Launching early and waiting late shortens {runs["waits at once"].step_ns / 1e6:.0f} ms to {code.step_ns / 1e6:.0f}. Hooks get there, too: {hooks.step_ns / 1e6:.1f}.
   Another order of computing, which hooks cannot choose, makes it {lab.timed(best).step_ns / 1e6:.0f}.
3. The rule is optimal with a fixed order, no reader and no limit. Without the first it can take
   {lab.most_lost():.1f} times as long as the best.""")

# %% [markdown]
# ## Tomorrow, in your own training loop (3 minutes)
#
# Five lines around an unmodified model. There is no DDP around it: the compiled backward pass
# averages the gradients. Here the lines run on two ranks of the virtual cluster. On your GPUs they
# stand in the script that `torchrun` starts.


# %% name="tomorrow"
def train():
    torch.manual_seed(0)  # equal parameters on all ranks
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backend = ol.compiler.backend(hardware="h200-nvlink")  # 1: how your link is
    compiled = torch.compile(model, backend=backend)  # 2: the model stays as it is
    for _ in range(2):
        compiled(torch.randn(32, 64)).square().mean().backward()  # 3: averages
        optimizer.step()  # 4: as always
        optimizer.zero_grad()
    return backend.explain()  # 5: ask what it decided, and why


run = ol.run(train, world_size=2, hardware="h200-nvlink")
print(run.values[0])

# %% [markdown]
# Read it like this. The four gradients of this small model travel in one message. No computing is
# left that could run beside it, so it is `sync`: launched and waited for at once.
#
# Look first at the two lines above the last: the backward pass as predicted, and as it would be if the
# compiler had decided nothing. The difference is what you win. The last line adds the forward pass.
# The line with `order of` is about the search of section 6. A *task* is operators that the search
# moves together. Here there are two, and the order that the graph had is proven the best without
# looking at another (`0 states`).

# %% [markdown]
# ---
# **Stop line.** That is the core. You may close the laptop here.
#
# ---

# %% [markdown]
# # Extras
#
# Each stands alone. Take what you like.
#
# ## 8. The order of computing (16 minutes)
#
# Of the three conditions, a compiler can do most about the order of computing. Here a backward
# pass is written as three numbers per layer, in ms: the times of `dx`, of `dw`, and of the message
# with `dw`. The last layer comes first.
#
# `dx` and `dw` of a layer need the `dx` of the layer above. Each message is launched when its `dw`
# is ready, and all waits stand at the end.

# %% name="orders"
dx_first = ["dx3", "dw3", "dx2", "dw2", "dx1", "dw1"]
dw_first = ["dw3", "dx3", "dw2", "dx2", "dw1", "dx1"]
for layers in (lab.NINE, lab.CASES[1]):
    print(list(layers))
    print(f"  dx first {lab.end_ms(layers, dx_first)} ms,", end=" ")
    print(f"dw first {lab.end_ms(layers, dw_first)} ms,", end=" ")
    print(f"the best order {lab.best_ms(layers)} ms")

# %% [markdown]
# For the nine operators "`dw` first" is best. In the second case both rules are far from the best
# order. There `dw3` takes long but its message is short, and the two layers below have long
# messages.
#
# **Exercise 13.6.** Write `order(layers)`, for one to three layers. Return a list of names, such
# as `dw_first` above. No other order may end earlier.
#
# - `lab.names_of(layers)` has the names.
# - `lab.end_ms(layers, names)` is the time. It raises `ValueError` if an operator stands before
#   one that it needs.
#
# The check asks for twelve cases. We know no rule of thumb that passes them all. About 8 lines.
#
# <details><summary>Hint</summary>
#
# Three layers have six operators, so there are 720 lists to try. `itertools.permutations` has them.
#
# </details>


# %% name="order" kind="exercise" exercise="13.6" reference=true
def order(layers):
    """The names of the operators, in the best order of computing."""
    ### BEGIN SOLUTION
    best, best_ms = None, math.inf
    for names in itertools.permutations(lab.names_of(layers)):
        with contextlib.suppress(ValueError):
            if lab.end_ms(layers, names) < best_ms:
                best, best_ms = list(names), lab.end_ms(layers, names)
    return best
    ### END SOLUTION


# %% name="check-order" kind="check" exercise="13.6" points=3
_ = check("13.6", order)

# %% [markdown]
# A real backward pass has hundreds of operators: too many to try. So our compiler first joins
# operators that come before the same messages into one task. It starts with the best of three
# simple rules, and searches from there for a limited time. In the end it prints how far from the
# best it may still be.
#
# ## 9. Async or sync? (3 minutes)
#
# In eager mode, launching early is not free. It costs an event and a wait per message, and the
# message's memory stays alive longer. If nothing can run beside a message, it gains nothing.
#
# So for each message the compiler asks the question of 13.1. It adds up the times of the operators
# that could run beside it. Here a layer is *split over the ranks*: each rank has a part of its
# weights, and an all-reduce joins what they computed, `y` in the forward pass and `dx` in the
# backward pass.

# %% name="decide"
for name in ("forward", "backward"):
    print(f"{name} of a layer that is split over the ranks:")
    for decision in plan_decisions(lab.graph_of(name), lab.COSTS):
        print(f"  {decision.launch} is {decision}")

# %% [markdown]
# In the forward pass the next operator reads the result, so nothing is independent of the message.
# In the backward pass the weights' gradients are.
#
# ## 10. A limit of memory (5 minutes)
#
# A gradient in flight stays alive. So set a limit: only so many bytes may be launched and not yet
# waited for. Here are the nine operators again, each time in the best order within the limit. A
# gradient has 40,000 bytes.
#
# **Predict.** Without a limit the step takes 17 ms. How long is it with room for one gradient at a time?

# %% name="predict-limit" kind="lab-only"
limited_ms = None

# %% name="predicted-limit" kind="solution-only"
limited_ms = 27

# %% name="limit" fold=true
limited = {}
for limit in (None, 80_000, 40_000):
    graph = nine_operators()
    plan = plan_schedule(graph, lab.COSTS, limit_bytes=limit)
    graph = schedule(graph, plan, limit_bytes=limit)
    limited["no limit" if limit is None else f"{limit:,} bytes"] = lab.timed(graph)
lab.side_by_side("one at a time, ms", limited_ms, limited["40,000 bytes"].step_ns / 1e6)
view.draw_many(limited)

# %% [markdown]
# Room for one gradient is a third of the memory, and the step is as long as before. The compute
# stream has holes now. But the wire sets the length of this step, and it carries one message at a
# time anyway. A limit hurts where computing sets the length, as in shape `memory` of section 7.
#
# ## 11. Two ranks, two plans (14 minutes)
#
# Formulas are never exact. So people let the compiler *measure* when each gradient is ready, and
# launch in that order. Each rank measures by itself. Your number decides what the two ranks here
# have measured.
#
# Run the next four cells as they are. `plan_launches` is what each rank does now. The exercise
# stands below them.

# %% name="my-number"
my_number = 3  # any whole number: your day of birth, your desk

# %% name="twins-case"
case = lab.twins(my_number)
print(case)


# %% name="plan-launches" kind="exercise" exercise="13.7" broken=true reference=true
def plan_launches(times):
    """The names of the gradients, in the order in which this rank launches them."""
    ### BEGIN SOLUTION
    names = sorted(times)  # one order of the numbers on all ranks
    slowest = torch.tensor([times[name] for name in names], device=ol.device())
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    times = dict(zip(names, slowest.tolist(), strict=True))
    ### END SOLUTION
    ### BEGIN STUB
    ### END STUB
    return sorted(times, key=times.get)


# %% name="twins-seen"
print(case.play(plan_launches))

# %% [markdown]
# **Exercise 13.7.** Fill in what the program does *as given* (run the cell above before you repair it).
#
# - `"kind"`, one of four. `"deadlock"`: ranks wait for one another for ever; `"mixed"`: different
#   gradients are averaged with one another; `"race"`: a gradient is read while it is written;
#   `"unwaited"`: nobody waits for a message.
# - `"rank_0"`, `"rank_1"`: the two gradients that meet in the first message that goes wrong.
#
# Then repair `plan_launches`. All ranks must launch in one order. A message starts when the last
# rank arrives, so for each gradient take the time on the rank where it is ready *last*, and sort
# by these times.
#
# `plan_launches` runs on each rank before the backward pass, and may send something. `times` is a
# dictionary. Its order is not the same on all ranks. About 4 lines.
#
# <details><summary>Hint: agree</summary>
#
# `dist.all_reduce(tensor, op=dist.ReduceOp.MAX)` leaves the largest number of all ranks in each
# place of the tensor.
#
# </details>
# <details><summary>Hint: which place is which?</summary>
#
# Sort the names first. Then each place stands for one gradient on all ranks.
#
# </details>

# %% name="twins-diagnosis" kind="exercise" exercise="13.7"
### BEGIN SOLUTION
diagnosis = {"kind": "mixed", "rank_0": case.apart[0], "rank_1": case.apart[1]}
### END SOLUTION
### BEGIN STUB
# diagnosis = {"kind": None, "rank_0": None, "rank_1": None}
### END STUB

# %% name="check-twins" kind="check" exercise="13.7" points=3
_ = check("13.7", my_number, diagnosis, plan_launches)

# %% [markdown]
# If the gradients had different shapes, the ranks could have stopped with an error. With equal
# shapes nobody notices: only the loss gets worse. So in our compiler one rank plans for all. Before
# the first run the others take over its order, and compare what they would send with what it
# sends (`agreement.py`). PyTorch's scheduler lets all ranks agree on the median of their times
# (`_align_compute_nodes_runtime_estimations_across_all_distributed_ranks`).
#
# ## 12. Two streams (10 minutes)
#
# A bucket is copied into one message before it leaves. On the stream that computes, that copy
# holds up the products. So our compiler can give each operator a stream. Products go to `main`.
# Messages go to `side`, and so does what only prepares them.
#
# Now one stream must wait for the other. Wherever a node on one stream needs a node on the other
# (an **edge** that crosses), a line of code must **hold** the order:
#
# - From `main` to `side` an event holds it. `main` records the event behind the operator that
#   writes. `side` waits for it before it reads.
# - From `side` back to `main` the message's `wait()` holds it. From there on `main` may read the
#   average.
#
# This is what the compiler writes for the nine operators, with `dw3` and `dw2` in one bucket: `pack` copies
# both into one message, `average` sends it. For your number (the cell `my_number` of section 11) one
# line is gone.

# %% name="missing-case"
two = lab.cut(my_number)
print(two)
print(f"\n{len(two.play().warnings)} findings when it runs on two ranks")

# %% [markdown]
# **Exercise 13.8.** Read the code. Which line is missing, so that an order is no longer held?
#
# - `"kind"`: what goes wrong. `"race"`: something is read while it may still be written.
#   `"unwaited"`: nobody waits for a message.
# - `"put"`: the missing line, as a letter of the menu below the code.
# - `"line"`: a line's number. The missing line belongs right behind that line, in the same block;
#   behind a line `with ...:`, inside its block.
#
# The check runs the code with your line. Nothing may be read too early, and the CPU may not wait.
#
# <details><summary>Hint: which stream?</summary>
#
# `with streams.stream(side)` launches on `side`. `average` and `pack` read what `main` has written.
#
# </details>
# <details><summary>Hint: how does it show?</summary>
#
# `print(two.play().warnings[0])` tells what the virtual cluster has found, with both lines.
#
# </details>

# %% name="missing" kind="exercise" exercise="13.8"
### BEGIN SOLUTION
missing = {"kind": two.kind, "put": two.taken, "line": two.at}
### END SOLUTION
### BEGIN STUB
# missing = {"kind": None, "put": None, "line": None}
### END STUB

# %% name="check-missing" kind="check" exercise="13.8" points=2
_ = check("13.8", my_number, missing)

# %% [markdown]
# On a GPU such code runs without an error, and mostly with the right numbers: by chance the copy
# comes late enough. So our compiler refuses a plan in which an edge crosses and nothing holds it
# (`check_streams`).
#
# ## 13. "Compilers hide more than hands do" (9 minutes)
#
# You will meet two claims.
#
# - *If all ranks run the same code (SPMD), there is little to overlap. Asynchronous dependencies
#   win.* (That is: each operator waits for what it needs, and for nothing else.)
# - *Overlap made by hand reaches 60 to 80 % of the potential. Compilers reach 85 to 95 %.*
#
# You can measure both.
#
# The model is a GPT with two layers and one message per gradient. First, what the list by type of
# section 2 ("only a Linear's products hide messages") says of its graph:

# %% name="lists-gpt" fold=true
print(lab.by_type_on_a_gpt())

# %% [markdown]
# In a real model, then, the list also *misses* things: attention, norms and activations take time, too.
#
# Now the two claims. The GPT runs on eight GPUs, with two links and two batch sizes. The table has
# ms per step. Its first column says how long all messages take, as a multiple of all computing.
#
# - *Waits at once*: each gradient is sent and waited for.
# - *Hooks*: launch early and wait late in autograd's order, with the best of four bucket sizes.
# - *Compiler*: the same, and the order of computing is searched as well.
#
# In parentheses stands how much of the **potential** is won. The potential is the step that waits,
# minus an ideal step in which all overlaps. The ideal step is as long as computing alone, or as
# all gradients in one message, whichever is longer.
#
# **Predict.** Take the row in which the compiler is furthest ahead of the hooks. By how many
# percentage points?

# %% name="predict-thesis" kind="lab-only"
ahead = None

# %% name="predicted-thesis" kind="solution-only"
ahead = 20

# %% name="thesis" fold=true
print(lab.thesis_table())
hooks_least, hooks_most, least, most, lead = lab.spread()
lab.side_by_side("ahead by at most", ahead, f"{lead:.0f} points")
print(f"hooks {hooks_least:.0f} to {hooks_most:.0f} %,", end=" ")
print(f"the compiler {least:.0f} to {most:.0f} %")

# %% [markdown]
# The first claim is half right. Asynchronous dependencies win a lot over waiting at once. But SPMD
# is not the reason: all ranks run the same code in *every* column of this table.
#
# The second claim does not hold here. Both columns have a wide range, and it is the row that
# decides: how long messages take compared with computing. Within a row hooks and compiler are
# nearly equal, since hooks already know when a gradient is ready.
#
# A compiler pays where hooks cannot look: another order of computing, messages of the forward
# pass, limits of memory, fused operators. And a percentage means little unless the text says of
# which potential.
#
# ## 14. What a graph can see (11 minutes)
#
# So far hooks and compiler sent the same bytes. A hook on a parameter has to: it gets the gradient when it
# is complete. A graph also shows what a gradient is *made of*.
#
# Look at an embedding. Its weight is a table with a row for each word, and a batch looks up few of them:

# %% name="words"
torch.manual_seed(0)
table = torch.nn.Embedding(32_768, 64)
tokens = torch.randint(32_768, (2, 1024))  # two sequences
table(tokens).square().sum().backward()
used = (table.weight.grad != 0).any(dim=1).sum().item()
print(f"{used:,} of {len(table.weight):,} rows of the gradient are not zero")

# %% [markdown]
# An all-reduce sends the whole table, zeros included. And the embedding is the first layer, so its
# gradient comes last in the backward pass. Here are the last operators of a GPT's:

# %% name="last-operators"
print(lab.last_operators())

# %% [markdown]
# The first input of `embedding_dense_backward` has one row for each token of the batch. The second says for
# each of these rows where in the table it is added. It does not matter which rank adds. So each rank can
# divide its rows by the number of ranks, send them and its tokens to all others (an **all-gather**), and add up the
# rows of all ranks itself. That is the average, up to rounding.
#
# **Predict.** A table of 32,768 rows of 2,048 bfloat16 numbers (2 bytes each) has 128 MiB. Each rank's
# batch has 2,048 tokens. How many MiB of rows does one rank contribute? (One row per token, even if a word
# comes twice.)

# %% name="predict-rows" kind="lab-only"
rows_mib = None

# %% name="predicted-rows" kind="solution-only"
rows_mib = 8

# %% name="rows" fold=true
lab.side_by_side("MiB of rows", rows_mib, f"{2048 * 2048 * 2 / 2**20:.0f}")
print(lab.rows_table())

# %% [markdown]
# That is the GPT of section 13 on eight ranks, but with 32,768 words instead of 4,096. The MiB are what a rank
# receives. (An all-reduce brings it nearly twice the table: first parts of the sums, then the results.)
#
# With more tokens or more ranks, more rows arrive, while the table stays as large as it was. Each row travels
# with 8 bytes that say which word it is. At batch 16 rows are therefore just more than the table, and the pass leaves the
# table as it is.
#
# Messages must have equal sizes on all ranks, whatever their batches. So you say how many tokens the largest batch has:
# `ol.compiler.backend(embedding_rows=2048)`. A smaller batch is filled up with zeros.
#
# By hand you would write an embedding layer of your own. `sparse=True` sends rows, too, but Adam refuses sparse
# gradients. And where the head shares the table, as in GPT-2, the whole table has a gradient: nothing is won.
#
# On two GPUs (stored). P2P off is a slow link, through the host's memory. *Inserted* is this lab's compiler:

# %% name="rows-gpu" fold=true
print(lab.rows_on_gpus())

# %% [markdown]
# Over the slow link, at batch 2, the compiler's step is as long as DDP's, and rows take 6 ms off it. At batch 8
# it is 2 ms shorter than DDP's, and rows take off another 3. Over NVLink they take off about half a
# millisecond. An order can only hide messages behind computing. Fewer bytes need no hiding.
#
# ## 15. What PyTorch ships (4 minutes)
#
# Every pass of this lab is in PyTorch, too, most of them in **Inductor**, the compiler that
# `torch.compile` uses by default. The next cell looks them up in the version that you have
# installed:

# %% name="shipped"
print(lab.passes_table())
print()
print(lab.settings_table())

# %% [markdown]
# `torch.compile(DDP(model))` uses `DDPOptimizer` by default. A compiled backward pass returns all
# gradients at its end, so DDP's hooks could only send them then. `DDPOptimizer` therefore cuts the
# graph at the borders of DDP's buckets. Each piece is compiled by itself, and hooks run between
# the pieces. No collective is inserted.
#
# Inductor's passes move collectives that are in the graph already, such as those of FSDP and
# tensor parallelism. `raise_comms` is your 13.2, `sink_waits` your 13.3. The two that watch memory
# move one node at a time, and stop where the peak would grow. The second table says what is on by
# default: of Inductor's passes, none.
#
# ## 16. Training against inference (3 minutes)
#
# An inference compiler sees no gradients. Its messages are those of layers that are split over
# ranks, and the next operator reads each of them. A training compiler also sees the backward pass
# of such a layer. What could run beside the message in each? (In parentheses: the computing that must be
# over before the message.)

# %% name="inference"
for name in ("forward", "backward"):
    graph = lab.graph_of(name)
    for window in find_windows(find_dependencies(graph), lab.COSTS):
        print(f"{name}: {window}")

# %% [markdown]
# In the forward pass nothing could. To overlap anything, inference needs a second batch beside the
# first. Or it cuts products into pieces and sends each while the next is computed
# (`_micro_pipeline_tp` in Inductor's settings).
#
# A training compiler has two things more. Nobody reads `dw` before the optimizer, so its message
# has time. And the *joint* graph of forward and backward lets it choose what is kept and what is
# computed again.
#
# ## 17. On real GPUs (5 minutes)
#
# The virtual cluster is a model. Here is what GPUs did. The numbers are stored; nothing is measured now. A step is
# forward, backward and averages of a GPT with 738 million parameters in bfloat16, on two GPUs. *Inserted* is this lab's
# compiler: it runs the operators one by one, or lowers the whole graph through Inductor. A to D are machines of the same
# kind.

# %% name="gpu" fold=true
print(lab.gpu_table())
best_cap = lab.ms("B, batch 2", "ours 400") / lab.ms("B, batch 2", "our reducer")
small_cap = lab.ms("B, batch 2", "ours 25") / lab.ms("B, batch 2", "our reducer")
at_end = lab.ms("A, batch 2", "serial") / lab.ms("A, batch 2", "ours 400")
mixed = lab.ms("A, batch 2", "our reducer, inductor") / lab.ms("A, batch 2", "ours 400")
lowered = lab.ms("D, batch 8", "ours, inductor")
print(
    f"machine B, batch 2: inserted takes {best_cap:.2f} of the hooks' step with 400 MiB,"
)
print(f"and {small_cap:.2f} of it with 25 MiB")
print(f"machine A: hooks over Inductor take {mixed:.2f} of inserted with 400 MiB,")
print(f"and one message at the end, where nothing overlaps, {at_end:.2f}")
for way in ("our reducer, inductor", "ddp 100, inductor", "ours"):
    share = lowered / lab.ms("D, batch 8", way)
    print(f"machine D, batch 8: lowered takes {share:.2f} of {lab.NAMES[way]!r}")

# %% [markdown]
# Hooks and compiler are close on GPUs, too, if the compiler's buckets are large enough. At batch 2 the step waits for
# the CPU's launches. Each message is one more launch from Python, so 25 MiB is far too small. On machine A overlap wins
# nothing there: one message at the end is as short as the best cap. At batch 8 the GPU sets the pace, and all ways that
# compute alike are within a few percent.
#
# What matters most is who computes. Inductor's kernels are faster than eager ones, whoever sends the messages. On machine
# D, where this compiler's graph is lowered through Inductor, it has both, and is the fastest of all.
#
# Now the second claim of section 13, on GPUs. The potential is counted as there, but from the step with one message at
# the end, since a step that waits at once was not measured. Without P2P the ranks talk through the host's memory, which
# is a slow link. On machine C hooks had the best of four bucket sizes; on A and B the compiler
# had the best of three, and hooks one; on D both chose their size themselves.

# %% name="won" fold=true
print(lab.won_table())

# %% [markdown]
# Hooks come near "60 to 80 %" only on the slow link, with the best bucket size. Over NVLink they win less than half of the
# potential, and lose where the CPU is late. Nothing in this table comes near "85 to 95 %". Where both were measured on one
# machine, the compiler is ahead of the hooks by 1 to 19 points: the same kernels, sent at nearly the same times.
#
# ## 18. Where the model lies (1 minute)
#
# - Launching is free in sections 1 to 14. In eager mode each message costs CPU time: see the table
#   above.
# - The search uses formulas for what each operator and message takes *alone*. Kernels and messages
#   that run side by side slow one another. Only the prediction of the chosen plan counts that.
# - There is one wire. Several nodes have a second kind of link, and messages of two groups may
#   pass one another.
#
# **In production.** In PyTorch: `torch/_inductor/comms.py` and
# `torch/_inductor/fx_passes/overlap_scheduling.py`. XLA's latency-hiding scheduler does the same
# for JAX. This package: `overlaplab/techniques/compiler/`, one file per pass. Further reading:
# Ansel et al., *PyTorch 2*, ASPLOS 2024.
