# %% [markdown]
# # Who should decide when to send?
#
# **Lab 13: communication that a compiler puts in.** A primer: 15 minutes. Core: 60 minutes. Extras: 39
# more. You need no GPU.
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

import overlaplab as ol
from overlaplab import view
from overlaplab.grading import check
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
# ## 1. The waste (4 minutes)
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

# %% [markdown]
# ### One graph (1 minute)
#
# Both passes, on both programs of section 1. One scale.

# %% name="again"
launch_pass, wait_pass = lab.mine_or_ours("13.2"), lab.mine_or_ours("13.3")
for name, graph in (("waits at once", serial), ("sends after it all", after)):
    launch_pass(graph, lab.needs_of(graph))
    wait_pass(graph, lab.needs_of(graph))
    runs[f"{name}, moved"] = lab.timed(graph)
view.draw_many(runs)

# %% [markdown]
# They have become the same program. However it was written, the needs are the same, and so is what the two
# passes make of them. Exposed is now only what the wire has left to do when the last product is over.

# %% [markdown]
# ## 5. Which messages may travel together? (9 minutes)
#
# Each message begins with its latency: 1 ms here, three times. Messages that travel together pay it once. A
# bucket is then one launch with several tensors, and a wait for each.
#
# In lab 06 a bucket was limited by its size alone. In a graph there is something else. Look at this one: the
# second message sends something that was made with the first one's result.

# %% name="circle"
print(show(lab.plan_graph("one sends what another brought")))

# %% [markdown]
# If `all_reduce_0` and `all_reduce_1` shared a bucket, it would have to be launched behind `with_1_0`, which needs
# its result. That is a **circle**: no order is possible. Gradients among themselves never do that. Messages
# of a forward pass do, those of a clipped norm, or those of two kinds of parallelism.
#
# **Exercise 13.4.** Write `plan_buckets(graph, needs, cap_bytes)`.
#
# - The graph's launches stand where they are ready. All are averages in one dtype.
# - Return a list of buckets, each a list of launches, in the order of the graph. Each launch is in one.
# - One bucket is open at a time. The next launch joins it unless the bytes would be more than
#   `cap_bytes`, or it needs the result of one that is in it, however far back. Then it opens the next bucket.
# - A message that is larger than the cap travels alone.
#
# About 10 lines. `lab.sent_bytes(launch)` has the bytes; `lab.all_before(needs, node)` is a set of all that must be
# over before `node`.
#
# <details><summary>Hint</summary>
#
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
# Carrying a plan out is surgery on nodes; `lab.merged` does it with our compiler's own pass.
#
# **Predict.** On this link (latency 1 ms), which is shortest for the nine operators: a message each, two and one, or all
# three in one? And on a link with a latency of 6 ms? Type 1, 2 or 3: how many gradients in the first message.

# %% name="predict-buckets" kind="lab-only"
best_near, best_far = None, None

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

# %% [markdown]
# A bucket leaves when its last gradient is ready. With a short latency that delay costs more than it saves;
# with a long one it is the other way round. It is lab 06 again: the graph says what *may* travel together, the
# link what *should*.

# %% [markdown]
# ## 6. Read what it writes (7 minutes)
#
# A graph becomes Python again. This is what our compiler writes for the graph that your passes made:

# %% name="code"
mine = compiled(40_000)
print(generate(mine, "backward"))

# %% [markdown]
# `average` launches one all-reduce and returns something to wait for. `args.clear()` and `del` let go of each tensor after
# its last use.
#
# **Predict.** How many messages are launched and not waited for, at the most? And which is the first line that
# makes the stream wait: the number of the layer?

# %% name="predict-code" kind="lab-only"
in_flight, first_wait = None, None

# %% name="predicted-code" kind="solution-only"
in_flight, first_wait = 3, 3

# %% name="code-answers" fold=true
lab.side_by_side("in flight", in_flight, lab.most_in_flight(mine))
lab.side_by_side(
    "first wait", first_wait, lab.waits(mine)[0].name.removeprefix("wait_dw")
)

# %% [markdown]
# It is eager PyTorch, in the order of the graph. It runs, here on two ranks of the virtual cluster, with real numbers. Beside it
# the same three layers as in lab 06: `loss.backward()` with hooks, a message for each gradient. One scale.
#
# **Predict.** Which is shorter, and by how many ms?

# %% name="predict-hooks" kind="lab-only"
shorter, by_ms = None, None  # "hooks" or "code"

# %% name="predicted-hooks" kind="solution-only"
shorter, by_ms = "code", 4

# %% name="hooks" fold=true
hooks = (
    lab.with_hooks()
)  # or lab.with_hooks(plan_buckets, install_hooks, finish): yours
code = lab.run_graph(mine)
difference_ms = (hooks.step_ns - code.step_ns) / 1e6
lab.side_by_side("shorter", shorter, "code" if difference_ms > 0 else "hooks")
lab.side_by_side("by ms", by_ms, f"{abs(difference_ms):.1f}")
view.draw_many({"hooks of lab 06": hooks, "code from the graph": code})

# %% [markdown]
# Next to nothing: what differs are the copies into the buckets. The hooks launch each message when its gradient is
# there, and wait at the end. Launch early, wait late: that *is* a reducer.
#
# So what could a compiler do that hooks cannot? In both pictures layer 3's `dx` runs before its `dw`, and the
# first message leaves after 4 ms. Autograd computes in the order that it has. A compiler may change it:

# %% name="other-order"
graph = nine_operators()
plan = plan_schedule(graph, lab.COSTS)
print(str(plan).partition("\n")[0])
best = schedule(graph, plan)
view.draw_many(
    {"hooks of lab 06": hooks, "another order of computing": lab.timed(best)}
)

# %% [markdown]
# `dw3` first: its message leaves 2 ms earlier, and all that follow with it. The last line before the picture says
# that nothing is shorter. How does it know? And was launching early, then, not the best? Next section.

# %% [markdown]
# ## 7. When is "launch early, wait late" the best? (14 minutes)
#
# **Theorem.** Launch every message when it is ready, first ready first, and wait at the end. No
# order of launches is shorter, *if*
#
# 1. the **order of computing** is fixed,
# 2. **nothing reads** a message before the end,
# 3. **no limit** says how much may be in flight.
#
# Why: so launched, the wire is never idle while a message is ready. A queue that never idles while there is work
# ends as early as a queue can.
#
# Try to break it. Here are 200 chains of four operators with a message each and times by chance; each is timed by the rule, and in
# *all* orders of launches.

# %% name="try"
print(f"{lab.try_to_break()} of 200 chains have a better order of launches")

# %% [markdown]
# Now take away one condition at a time. Three shapes; the operators in the order in which they are given, `m of x` a message with
# what `x` made, `x < m` an operator that reads message `m`:

# %% name="shapes"
for name, rows in lab.SHAPES.items():
    print(f"{name:<8}", "; ".join(rows))

# %% [markdown]
# - `order`: operators may change places.
# - `reader`: operators keep their order, but `u2` and `u1` each read a message.
# - `memory`: operators keep their order and nobody reads, but only 10 units may be in flight; a message of 5 ms
#   has 5. A launch for which there is no room waits, and the compute stream with it, until a message has ended.
#
# **Exercise 13.5.** Break the rule three times. Find times (whole numbers of ms from 1 to 9) for each shape, so that
# "launch early, wait late" takes longer than the best order: by 60 % in `order`, 30 % in `reader`, 10 % in
# `memory`. Think, try, or write a loop: `lab.shape("order", dx=1, dw=1, m=1).loses_percent`.
#
# <details><summary>Hint: order</summary>
#
# What could hide behind `dx`, if it were ready earlier?
#
# </details>
# <details><summary>Hint: reader</summary>
#
# `m1` is ready first. Let `m2` be urgent: a long `u2` waits for it, behind a long `m1`.
#
# </details>
# <details><summary>Hint: memory</summary>
#
# `ma` nearly fills the limit. `mb` does not fit beside it: the launch waits. A small `mc` would fit, and a long `d` could
# run meanwhile.
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
# The rule that every text gives is a theorem, and each of its conditions is broken in real training. `order`: a linear
# layer has two products, and the framework's order of them is not the best. `reader`: tensor parallelism, clipping by the
# norm, an optimizer that runs bucket by bucket. `memory`: a large gradient in flight is a large gradient alive. In general the
# problem is as hard as scheduling two machines. So a compiler searches, and says what it could not prove.
#
# </details>

# %% [markdown]
# ## Takeaways (1 minute)

# %% name="takeaways" fold=true
worst = lab.shape("order", dx=9, dw=1, m=9)
print(f"""1. Ask the graph, not a list: by module type 6 of 18 answers allow what cannot be, by layer
   6 miss what could.
2. Launch early and wait late, and {runs["waits at once"].step_ns / 1e6:.0f} ms become {code.step_ns / 1e6:.0f}. Hooks get there, too: {hooks.step_ns / 1e6:.1f}.
   Another order of computing, which hooks cannot choose, makes it {lab.timed(best).step_ns / 1e6:.0f}.
3. The rule is optimal with a fixed order, no reader and no limit. Without the first it can take
   {worst.rule_ms / worst.best_ms:.1f} times as long as the best.""")

# %% [markdown]
# ---
# **Stop line.** That is the core. You may close the laptop here. (If you want to use it tomorrow: the last screen has five
# lines.)
#
# ---

# %% [markdown]
# # Extras
#
# Each stands alone. Take what you like.
#
# ## 8. The order of computing (10 minutes)
#
# The first condition of the theorem is the one that a compiler can do most about. Here is a backward pass as three numbers
# per layer, the last layer first: what `dx`, `dw` and the message of `dw` take, in ms. Each `dx` and `dw` needs the `dx` of the
# layer above. Each message is launched when its `dw` is ready; all waits stand at the end.

# %% name="orders"
dx_first = ["dx3", "dw3", "dx2", "dw2", "dx1", "dw1"]
dw_first = ["dw3", "dx3", "dw2", "dx2", "dw1", "dx1"]
for layers in (lab.NINE, lab.CASES[1]):
    print(list(layers))
    print(f"  dx first {lab.end_ms(layers, dx_first)} ms,", end=" ")
    print(f"dw first {lab.end_ms(layers, dw_first)} ms")

# %% [markdown]
# For the nine operators `dw` first is best. In the second case it is not: the last layer's `dw` is long and its message
# short, and there are large messages below.
#
# **Exercise 13.6.** Write `order(layers)`. Return a list of names such as `dw_first` above, for one to three layers, so
# that nothing ends earlier. `lab.names_of(layers)` has the names; `lab.end_ms(layers, names)` is the time, and
# raises `ValueError` for an order in which an operator stands before what it needs.
#
# It is asked for twelve cases, and no rule of thumb that we know passes them all. About 8 lines.
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
# A real backward pass has hundreds of operators, and cannot be tried out. Our compiler puts operators together that stand before
# the same messages, takes three rules as a start, and searches the rest within a budget. It prints what it could not prove.
#
# ## 9. Async or sync? (3 minutes)
#
# Launching early and waiting late is not free in eager mode: an event and a wait per message, and the message's memory
# stays alive. Where nothing can run beside a message, it buys nothing. The compiler asks for each message what you asked in
# 13.1, in ms:

# %% name="decide"
for name in ("forward", "backward"):
    print(f"{name} of a layer that is split over the ranks:")
    for decision in plan_decisions(lab.graph_of(name), lab.COSTS):
        print(f"  {decision.launch} is {decision}")

# %% [markdown]
# In the forward pass the next operator reads the sum at once: nothing is independent of it, so it is waited for at once. In
# the backward pass the weight's gradient has time for it.
#
# ## 10. A limit of memory (4 minutes)
#
# A gradient in flight is a gradient alive. The nine operators with their best order, and at most so many bytes launched and not yet waited for.
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
# A third of the memory costs next to nothing here, since the wire can carry one message at a time anyway. What the limit takes away is the
# queue. It hurts where a message has to wait for room *and* the compute stream with it: shape `memory` of section 7.
#
# ## 11. "Compilers hide more than hands do" (8 minutes)
#
# You will meet two sentences. *Code in which all ranks do the same leaves little to overlap; asynchronous dependencies win.* And:
# *hand-made overlap reaches 60 to 80 % of the potential, compilers 85 to 95 %.* Measure both.
#
# A GPT of two layers on eight GPUs, its graph captured with `capture_gradients`, timed on two links with two batch sizes. *Waits
# at once*: each gradient is sent and waited for. *Hooks*: the order of autograd, launch early, wait late, the best of four bucket
# sizes. *Compiler*: the same, and the order of computing searched. In parentheses: what of the potential is won. The **potential** is the
# step that waits, minus a step that is as long as its computing alone or as all gradients in one message, whichever takes
# longer.
#
# **Predict.** By how many percentage points is the compiler ahead, where it is ahead most?

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
# The first sentence is half right. *Waiting at once* wins nothing, and asynchronous dependencies win a lot. But that is no matter of
# who writes them: all ranks run the same code in every row of this table.
#
# The second is wrong as a rule. The range is wide for *both*, and what decides is the row: the ratio of messages to
# computing, and the latency. Between the columns there is next to nothing, since in this graph hooks have the needs right already
# and the order of computing matters little. A compiler is worth it where hooks cannot look: another order, messages of
# the forward pass, a limit of memory, and operators that it fuses. And a percentage needs its potential beside it; most texts do not say theirs.
#
# ## 12. What PyTorch ships (4 minutes)
#
# Every pass of this lab is in PyTorch. Here is where the one that you have installed has it, looked up now:

# %% name="shipped"
print(lab.passes_table())
print()
print(lab.settings_table())

# %% [markdown]
# `DDPOptimizer` is what `torch.compile(DDP(model))` uses by default. A compiled backward pass gives all its gradients at its end, so
# the hooks of DDP would send all of them then. It cuts the graph at the borders of DDP's buckets: one graph per
# bucket, and hooks between them. Nothing is inserted.
#
# Inductor's passes move collectives that are in the graph already, such as FSDP's and those of tensor parallelism. `raise_comms` is your
# 13.2 and `sink_waits` your 13.3. Those two that watch memory move one node at a time and stop where the peak would grow. All of it is off
# by default: look at the second table.
#
# ## 13. Training against inference (3 minutes)
#
# An inference compiler meets no gradient, so it meets no message that nobody reads. Its collectives are those of a split
# layer, and the next operator reads them. What could run beside each of the two, in our measure of 13.1?

# %% name="inference"
for name in ("forward", "backward"):
    graph = lab.graph_of(name)
    for window in find_windows(find_dependencies(graph), lab.COSTS):
        print(f"{name}: {window}")

# %% [markdown]
# Zero in the forward pass. Overlap for inference needs something else: another batch beside this one, or a product cut into
# pieces, each sent while the next is computed (`_micro_pipeline_tp` in Inductor's settings). What only a training
# compiler sees is the joint graph: what the forward pass keeps for the backward pass, what can be computed again, and `dw`, which
# nobody needs before the optimizer.
#
# ## 14. On real GPUs (4 minutes)
#
# The virtual cluster is a model. Here is what GPUs did, stored: nothing is measured now. A GPT with 738 million parameters in
# bfloat16, forward, backward and averages. *Inserted* is this lab's compiler; its code is eager. Two machines of the same kind.

# %% name="gpu" fold=true
print(lab.gpu_table())
best_cap = lab.ms("B, batch 2", "ours 400") / lab.ms("B, batch 2", "our reducer")
small_cap = lab.ms("B, batch 2", "ours 25") / lab.ms("B, batch 2", "our reducer")
mixed = lab.ms("A, batch 2", "our reducer, inductor") / lab.ms("A, batch 2", "ours 400")
print(
    f"machine B, batch 2: inserted takes {best_cap:.2f} of the hooks' step with 400 MiB,"
)
print(
    f"and {small_cap:.2f} with 25; machine A: hooks over Inductor {mixed:.2f} of inserted"
)

# %% [markdown]
# On these GPUs, too, hooks and the compiler are close where each has its best cap. At batch 2 the CPU's launches bind, and each message
# is a launch from Python: 25 MiB is far too small. At batch 8 the GPU is busy from end to end, and all rows lie within a
# few percent. The shortest step of machine A is a mixture: hooks send, and Inductor's kernels compute. Who decides when to send
# matters less there than who makes the computing fast.
#
# ## 15. Where the model lies (1 minute)
#
# - Launching is free in sections 1 to 11. In eager mode each message costs the CPU time: see the table above.
# - A compiler's costs are formulas. Contention is not in them while it searches; the timeline that it predicts has it.
# - One wire, one stream for computing: on several nodes there are two wires, and messages of two groups may pass each other.
#
# **In production.** `torch/_inductor/comms.py` and `torch/_inductor/fx_passes/overlap_scheduling.py` in PyTorch; the
# latency-hiding scheduler of XLA does the same for JAX. This package: `overlaplab/techniques/compiler/`, one file per
# pass. Further reading: Ansel et al., *PyTorch 2*, ASPLOS 2024.
#
# ## Tomorrow, in your own training loop (2 minutes)
#
# Five lines around an unmodified model. Here they run on two ranks of the virtual cluster; on your GPUs they stand in the script that
# `torchrun` starts.


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
