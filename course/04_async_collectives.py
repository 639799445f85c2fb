# %% [markdown]
# # When is it done?
#
# **Lab 04: asynchronous collectives.** Core: two sittings of 28 and 36 minutes, with a door
# after section 2. Extras: 110 more. You need no GPU.
#
# After the core you can
#
# - say what each collective leaves on each rank, and how much it sends;
# - say who waits in each way of waiting: the CPU, a stream, or nobody;
# - launch in an order, and wait in places, where a message costs no time.
#
# The first extra bounds the memory of messages in flight.
#
# It builds on lab 03: a **stream** is a queue of a GPU whose work runs in order; an
# **event**, or `wait_stream`, orders two streams. A **rank** is one of the processes of
# a job, one GPU each.
#
# **How it works.** Run the cells from top to bottom. A check tells you what it saw, in
# numbers, and draws what *your* code did. No exercise needs the one before it.

# %% name="setup"
import torch
import torch.distributed as dist

import overlaplab as ol
from overlaplab import streams, view
from overlaplab.grading import check, solved
from overlaplab_course import lab04 as lab

# %% [markdown]
# ## 1. The waste (9 minutes)
#
# One layer is cut over four GPUs. Each holds a slice of the matrices, so each computes a
# *part* of a sum. An **all-reduce** adds up the parts of all ranks. A side branch needs no
# sum.


# %% name="layer"
def layer(x, w):
    part = x @ w["in"]  # this rank's part
    dist.all_reduce(part)  # now the sum over all ranks
    y = part @ w["out"]
    side = (x @ w["side_in"]).relu() @ w["side_out"]  # needs no sum
    return y + side


# %% [markdown]
# You don't have four GPUs here. `lab.play` calls `layer(x, w)` on four ranks of the **virtual
# cluster**: the values are real, and the times are those of a machine with round numbers.

# %% name="board" fold=true
link = lab.BOARD.link
print(f"1 GFLOP: {1e18 / lab.BOARD.flops_per_s['default'] / 1e3:.0f} us of the GPU")
print(f"to launch an operator: {lab.BOARD.launch_ns / 1e3:.0f} us of the CPU")
print(f"to launch a message: {lab.BOARD.collective_launch_ns / 1e3:.0f} us of the CPU")
print(f"a message: {link.latency_ns / 1e3:.0f} us, then", end=" ")
print(f"{1e3 / (link.bytes_per_s / 1e6):.2f} us for 1000 bytes that cross the link")

# %% name="waste"
inputs = lab.layer_inputs()
run = lab.play(layer, inputs)
view.draw(run.timeline.of_rank(0), title="layer")

# %% [markdown]
# `cpu` launches and runs ahead. `default` is the stream. The message is in it, between the
# matmuls, so nothing computes while it travels, although the side branch could have run.
#
# *Saved*, over the figure, is compute + communication - step. Nothing overlaps, so nothing is
# saved. It is even -5 us: the step begins with a launch, in which the GPU does nothing.

# %% name="waste-numbers"
report = run.timeline.report()
lost = report.exposed_ns / report.step_ns
print(f"exposed: in {100 * lost:.0f} % of the step only the message is under way")

# %% [markdown]
# **Predict.** Suppose that the side branch runs while the message travels. How long is the
# step then, in us?

# %% name="predict-step" kind="lab-only"
step_us = None

# %% name="predicted-step" kind="solution-only"
step_us = 240


# %% name="predicted-waste" fold=true
def layer_beside(x, w):
    part = x @ w["in"]
    work = dist.all_reduce(part, async_op=True)
    side = (x @ w["side_in"]).relu() @ w["side_out"]
    work.wait()
    return part @ w["out"] + side


beside = lab.play(layer_beside, inputs)
lab.side_by_side("the step in us", step_us, f"{beside.timeline.step_ns / 1e3:.0f}")
view.draw_many(
    {
        "layer": run.timeline.of_rank(0),
        "side branch beside the message": beside.timeline.of_rank(0),
    }
)

# %% [markdown]
# Unfold the cell above. Three things changed. `async_op=True` puts the message on a stream of
# its own (`comm`, the wire) and returns a **work**. The side branch is launched next. And
# `work.wait()` comes only after that. This lab is about that line.

# %% [markdown]
# ## 2. What does each collective do? (8 minutes)
#
# Each of four ranks holds four numbers:

# %% name="before" fold=true
for rank, numbers in enumerate(lab.after_each()["before"]):
    print(f"rank {rank}: {numbers}")

# %% [markdown]
# **Predict.** What does *rank 1* hold after each of these? Type a list for each. A sum over
# the ranks is easy to read: 1 + 10 + 100 + 1000 is 1111.
#
# - `broadcast` from rank 0;
# - `all_gather` of each rank's first number;
# - `reduce_scatter` of the four numbers: rank r gets only the sum of their number r, counted
#   from 0;
# - `all_reduce` of the four numbers;
# - `all_to_all`: rank r sends its number s to rank s.

# %% name="predict-collectives" kind="lab-only"
rank_1_holds = {
    "broadcast": None,
    "all_gather": None,
    "reduce_scatter": None,
    "all_reduce": None,
    "all_to_all": None,
}

# %% name="predicted-collectives" kind="solution-only"
rank_1_holds = {
    "broadcast": [1, 2, 3, 4],
    "all_gather": [1, 10, 100, 1000],
    "reduce_scatter": [2222],
    "all_reduce": [1111, 2222, 3333, 4444],
    "all_to_all": [2, 20, 200, 2000],
}

# %% name="collectives" fold=true
lab.compare_predictions(rank_1_holds)
print()
print(lab.collectives_table())

# %% [markdown]
# How much does each rank send? The next cell counts the **crossings**: what leaves one rank
# over its link, as a multiple of its four numbers. 1.50 times means six numbers. The GPUs stand
# in a ring, and each sends to its neighbour only (section 7 shows how). An all-to-all sends each
# number straight to its receiver.
#
# As long as the GPUs do the adding, no other way sends less. A switch that adds up inside the
# network can do with less.

# %% name="crossings" fold=true
for name in lab.after_each():
    if name != "before":
        print(f"{name:<15} {lab.crossings(name):.2f} times")

# %% [markdown]
# Now compare the rows of the table once more. After a reduce-scatter each rank has *one*
# finished sum. After an all-gather of these sums each rank has all of them: that is an
# all-reduce. Their crossings add up to those of an all-reduce, too.
#
# ### An all-reduce in two halves (10 minutes)
#
# **The API of this screen.** In both, the output comes first.
#
# | | |
# |---|---|
# | `lab.reduce_scatter(part, whole)` | reads `whole`, one part per rank; writes into `part`, on rank r, the sum of all ranks' part r |
# | `lab.all_gather(whole, part)` | reads `part`; writes the parts of all ranks into `whole`, in the order of the ranks |
#
# `whole` and `part` are contiguous. (torch calls them `dist.reduce_scatter_tensor` and
# `dist.all_gather_into_tensor` up to 2.12, `dist.reduce_scatter_single` and
# `dist.all_gather_single` since.)
#
# **Exercise 4.1.** Write `all_reduce_in_two(tensor)`: sum `tensor` over all ranks, *in
# place*, without `all_reduce`.
#
# - `tensor` is contiguous, of any shape and size. The given lines copy it into `flat`, with
#   zeros behind it, so that `flat` has `per_rank` elements for each rank. Send `flat`.
# - As many bytes cross the link as in an all-reduce of `flat`.
#
# 4 lines are missing.
#
# <details><summary>Hint: in place</summary>
#
# `tensor.copy_(flat[: tensor.numel()].view_as(tensor))`
#
# </details>


# %% name="in-two" kind="exercise" exercise="4.1"
def all_reduce_in_two(tensor):
    """Sum `tensor` over all ranks, in place."""
    n = dist.get_world_size()
    per_rank = -(-tensor.numel() // n)  # rounded up
    flat = tensor.new_zeros(per_rank * n)
    flat[: tensor.numel()] = tensor.flatten()
    ### BEGIN SOLUTION
    mine = tensor.new_empty(per_rank)
    lab.reduce_scatter(mine, flat)  # the sum of my part
    lab.all_gather(flat, mine)  # the sums of all parts
    tensor.copy_(flat[: tensor.numel()].view_as(tensor))
    ### END SOLUTION


# %% name="check-in-two" kind="check" exercise="4.1" points=2
_ = check("4.1", all_reduce_in_two)

# %% [markdown]
# So an all-reduce can be *stopped half way*. Between the halves each rank holds one finished
# part. That is where a sharded optimizer updates its part of the weights, before it gathers
# all of them. It costs a second latency:

# %% name="two-halves" fold=true
halves = lab.halves()
for name, timeline in halves.items():
    print(f"{name:<36} {timeline.step_ns / 1e3:6.1f} us")

# %% [markdown]
# **A door.** You know what each collective leaves on each rank. This is a good place to stop
# for today. When you come back, run all cells once: what you solved is in the notebook.

# %% [markdown]
# ## 3. Four ways to wait (18 minutes)
#
# `dist.all_reduce(part, async_op=True)` returns at once. The message starts when everything
# that is on the *current stream* at that moment has ended. When may you read the sum?
#
# | | the CPU | the current stream |
# |---|---|---|
# | `all_reduce(part)`, not async | goes on | runs the message itself |
# | `work.wait()` | goes on | waits, from this line on |
# | `work.wait()` under `streams.stream(other)` | goes on | goes on; `other` waits |
# | `while not work.is_completed()`, `streams.synchronize()` | waits | gets no new work |
#
# So `wait()` does *not* mean that the message has arrived. It means: what I launch on this
# stream from now on starts after the message.


# %% name="ways"
def layer_waiting(x, w, way):
    current, other = streams.current_stream(), streams.Stream()
    part = x @ w["in"]
    work = dist.all_reduce(part, async_op=(way != "async_op=False"))
    if way == "wait at once":
        work.wait()
    if way == "CPU waits at once":
        while not work.is_completed():
            pass
    if way == "wait at once, on another stream":
        with streams.stream(other):
            work.wait()
            y = part @ w["out"]
    side = (x @ w["side_in"]).relu() @ w["side_out"]
    if way == "wait late":
        work.wait()
    if way == "wait at once, on another stream":
        current.wait_stream(other)
    else:
        y = part @ w["out"]
    return y + side


# %% [markdown]
# **Predict.** Which of these five hide the message? Answer `True` or `False`.

# %% name="predict-ways" kind="lab-only"
hides = {
    "async_op=False": None,
    "wait at once": None,
    "wait late": None,
    "wait at once, on another stream": None,
    "CPU waits at once": None,
}

# %% name="predicted-ways" kind="solution-only"
hides = {
    "async_op=False": False,
    "wait at once": False,
    "wait late": True,
    "wait at once, on another stream": True,
    "CPU waits at once": False,
}

# %% name="ways-seen" fold=true
ways = {way: lab.play(layer_waiting, inputs, way).timeline.of_rank(0) for way in hides}
for way, timeline in ways.items():
    hidden = timeline.report().hidden_ns
    lab.side_by_side(way, hides[way], f"{hidden > 0}, {hidden / 1e3:.0f} us hidden")
view.draw_many(ways)

# %% [markdown]
# The first two hide nothing, each for its own reason. With `async_op=False` the message is in
# `default`, between the matmuls. With `async_op=True` it is on `comm`, but `wait()` on the
# next line makes `default` stand still all the same. If another stream waits, it may do so
# at once: only what is launched there is held up. It gains nothing over "wait late" here,
# because two matmuls that run side by side slow each other down.
#
# Look at the `cpu` lane of the last one. The CPU waits and loses its head start: when the
# message is there, the next matmul has not been launched yet.

# %% name="ways-table"
view.table(ways)

# %% [markdown]
# **Exercise 4.2.** There are two sums. The launches below are in a good order, but the waits
# are in bad places. Move the waits, so that the step is as short as the dependencies allow.
# Nothing may read a sum before it is there.
#
# The check may report that a reader starts later "by luck". In this run it came late enough,
# but nothing makes it wait: on a GPU such a program is right on one day and wrong on the next.
#
# <details><summary>Hint</summary>
#
# A wait belongs right before the first launch that reads *its* sum. Two sums have two
# first readers.
#
# </details>


# %% name="two-sums" kind="exercise" exercise="4.2" reference=true
def two_sums(x, w):
    ### BEGIN SOLUTION
    a = x @ w["a"]
    sum_a = dist.all_reduce(a, async_op=True)
    b = x @ w["b"]
    sum_b = dist.all_reduce(b, async_op=True)
    c = x @ w["c"]
    sum_a.wait()
    y = a @ w["d"]  # reads the sum of a
    sum_b.wait()
    z = b @ w["e"]  # reads the sum of b
    return y + z + c
    ### END SOLUTION
    ### BEGIN STUB
    # a = x @ w["a"]
    # sum_a = dist.all_reduce(a, async_op=True)
    # sum_a.wait()
    # b = x @ w["b"]
    # sum_b = dist.all_reduce(b, async_op=True)
    # sum_b.wait()
    # c = x @ w["c"]
    # y = a @ w["d"]  # reads the sum of a
    # z = b @ w["e"]  # reads the sum of b
    # return y + z + c
    ### END STUB


# %% name="check-two-sums" kind="check" exercise="4.2" points=2
_ = check("4.2", two_sums)

# %% [markdown]
# ## 4. What goes beside it? (16 minutes)
#
# You can only wait late if there is something to launch before the wait. This layer has
# experts: a *routed* branch and a *gate*, which are both summed over the ranks, and a
# *shared* branch, which needs no sum. Somebody wrote it down in the order in which a paper
# describes it.


# %% name="experts-given"
def experts_in_order(x, w):
    shared = (x @ w["shared_in"]).relu() @ w["shared_out"]
    gate = x @ w["gate"]
    dist.all_reduce(gate)
    routed = x @ w["routed_in"]
    dist.all_reduce(routed)
    y = routed @ w["routed_out"]
    return (y + shared) * gate


# %% name="experts-seen" fold=true
experts_inputs = lab.experts_inputs()
in_order = lab.play(experts_in_order, experts_inputs).timeline
for name, bytes_ in (("gate", 320_000), ("routed", 800_000)):
    print(f"the message of {name}: {lab.message_ns(bytes_) / 1e3:.0f} us")
compute_us = in_order.report().compute_ns / 1e3
print(f"the computation alone: {compute_us:.0f} us; no order is shorter than that")
view.draw(in_order.of_rank(0), title="in the order of the paper")

# %% [markdown]
# Ranks that meet in collectives form a **communicator**; here it is all four. Its messages
# travel one after the other, in the order of their launch. All ranks must launch them in the
# same order.
#
# **Exercise 4.3.** Write `experts(x, w)`: the same result, the same two messages, the
# shortest step. Reorder the launches and place the waits. About 10 lines.
#
# <details><summary>Hint: which message first?</summary>
#
# Which sum is needed for more of the computation? Launch that one first.
#
# </details>
# <details><summary>Hint: what is free?</summary>
#
# The shared branch and the gate's own matmul need no message. They can run while the routed
# message travels.
#
# </details>


# %% name="experts" kind="exercise" exercise="4.3" reference=true
def experts(x, w):
    ### BEGIN SOLUTION
    routed = x @ w["routed_in"]
    sum_routed = dist.all_reduce(routed, async_op=True)
    gate = x @ w["gate"]
    sum_gate = dist.all_reduce(gate, async_op=True)
    shared = (x @ w["shared_in"]).relu() @ w["shared_out"]
    sum_routed.wait()
    y = routed @ w["routed_out"]
    sum_gate.wait()
    return (y + shared) * gate
    ### END SOLUTION


# %% name="check-experts" kind="check" exercise="4.3" points=3
_ = check("4.3", experts)
lab.keep("4.3", experts)

# %% name="experts-again"
mine = lab.play(lab.mine_or_ours("4.3"), experts_inputs).timeline
steps = {"in the order of the paper": in_order.of_rank(0), "now": mine.of_rank(0)}
print(f"{100 * (1 - mine.step_ns / in_order.step_ns):.0f} % shorter", end=", ")
print(f"{mine.report().exposed_ns / 1e3:.0f} us still exposed")
view.draw_many(steps)

# %% [markdown]
# ## Takeaways (2 minutes)

# %% name="takeaways" fold=true
late, at_once = (ways[way].step_ns for way in ("wait late", "wait at once"))
print(f"""1. async_op=True hides nothing by itself: with wait() on the next line the step takes
   {at_once / 1e3:.0f} us, with wait() right before the first reader {late / 1e3:.0f}.
2. wait() holds up a stream, not the CPU: the stream that is current at the call.
3. Launch first what most of the computation needs, then what needs no message:
   {in_order.step_ns / 1e3:.0f} us became {mine.step_ns / 1e3:.0f}.""")

# %% [markdown]
# **Tomorrow, in your own loop.** Look for collectives whose result is not read at once: a loss
# for the log, a norm, a count. Launch each one as soon as its input is known, and wait right
# before the first line that reads its result:
#
# ```python
# total = loss.detach().clone()
# work = dist.all_reduce(total, async_op=True)
# loss.backward()
# work.wait()
# mean_loss = total / dist.get_world_size()  # .item() after the epoch
# ```
#
# `ol.diagnose` finds such places in a trace and calls them `same-stream` and `launched-late`.
#
# ---
# **Stop line.** That is the core. You may close the laptop here.
#
# ---

# %% [markdown]
# # Extras
#
# Each stands alone. Take what you like.
#
# ## 5. How many at once? (24 minutes)
#
# Every message in flight holds memory. A backward pass makes bfloat16 gradients. They are
# summed in float32, so each message is a *copy*, twice as large. If all ten travel at once,
# the copies take twice the memory of the gradients. You want at most `k` copies alive.
#
# `lab.backward(layer)` computes one gradient on the current stream. The CPU of this board is
# faster, so that launches do not matter. Below is a limit that people really write. It
# works. What does it cost?


# %% name="window-given" reference=true
def stalling(layers, k):
    grads, in_flight = [], []

    def send(grad):
        message = grad.float()
        work = dist.all_reduce(message, async_op=True)
        in_flight.append((grad, message, work))

    def finish_oldest():
        grad, message, work = in_flight.pop(0)
        work.wait()
        grad.copy_(message / dist.get_world_size())

    for layer in layers:
        grad = lab.backward(layer)
        grads.append(grad)
        if len(in_flight) == k:
            finish_oldest()
        send(grad)
    while in_flight:
        finish_oldest()
    return grads


# %% name="window-parts" fold=true
print("us to compute each gradient:", *lab.backward_us())
print(f"us of a message: {lab.message_ns(400_000, num_ranks=2) / 1e3:.0f}")

# %% [markdown]
# **Predict.** With `k=10` nothing is limited. By how many percent is the step longer with
# `k=2`?

# %% name="predict-window" kind="lab-only"
longer_percent = None

# %% name="predicted-window" kind="solution-only"
longer_percent = 10

# %% name="window-seen" fold=true
windows = {
    f"{name}, k={k}": lab.play_window(function, k)
    for name, function, k in (("no limit", stalling, 10), ("stalling", stalling, 2))
}
free, limited = (run.timeline.step_ns for run in windows.values())
lab.side_by_side("longer, in %", longer_percent, f"{100 * (limited / free - 1):.0f}")
for name, run in windows.items():
    print(f"{name}: messages alive at most: {lab.messages_alive(run.program):.0f}")
view.draw_many({name: run.timeline.of_rank(0) for name, run in windows.items()})

# %% [markdown]
# Look at `default`. `finish_oldest` makes the *current* stream wait. So the backward pass stops
# until a message has arrived, and all later gradients are late, too. A few cheap gradients
# in a row are enough for that.
#
# Only the copy has to wait for a free place, not the backward pass. So let another stream do
# the waiting. Run both `send` and `finish_oldest` on it: memory belongs to the stream that
# allocates it. If one of the two ran on another stream, the memory of a message could be
# handed out again while it is still being read.
#
# **Exercise 4.4.** Repair `average_gradients(layers, k)`.
#
# - Return the gradients in the order of `layers`. What the caller launches next on the
#   current stream must see the *mean* over the ranks in each.
# - At most `k` messages (float32 copies) may be alive at any line of your code. A message is
#   alive until its last reference is dropped. A pool of `k` buffers will do, too.
# - The backward pass waits for no message, and the step is as short as `k` allows.
#
# `send` and `finish_oldest` can stay as they are: they work on the stream that is
# current when you call them. About 6 lines change.
#
# <details><summary>Hint: which stream?</summary>
#
# Call both under `with streams.stream(side):`. The copy in `send` reads the gradient, so
# first `side.wait_stream(compute)`.
#
# </details>
# <details><summary>Hint: the end</summary>
#
# The caller uses the gradients on the current stream: `compute.wait_stream(side)`.
#
# </details>


# %% name="window" kind="exercise" exercise="4.4" reference=true
def average_gradients(layers, k):
    grads, in_flight = [], []
    compute, side = streams.current_stream(), streams.Stream()

    def send(grad):
        message = grad.float()
        work = dist.all_reduce(message, async_op=True)
        in_flight.append((grad, message, work))

    def finish_oldest():
        grad, message, work = in_flight.pop(0)
        work.wait()
        grad.copy_(message / dist.get_world_size())

    ### BEGIN SOLUTION
    for layer in layers:
        grads.append(lab.backward(layer))
        side.wait_stream(compute)
        with streams.stream(side):
            if len(in_flight) == k:
                finish_oldest()
            send(grads[-1])
    with streams.stream(side):
        while in_flight:
            finish_oldest()
    compute.wait_stream(side)
    return grads
    ### END SOLUTION
    ### BEGIN STUB
    # for layer in layers:
    #     grad = lab.backward(layer)
    #     grads.append(grad)
    #     if len(in_flight) == k:
    #         finish_oldest()
    #     send(grad)
    # while in_flight:
    #     finish_oldest()
    # return grads
    ### END STUB


# %% name="check-window" kind="check" exercise="4.4" points=3
_ = check("4.4", average_gradients)
lab.keep("4.4", average_gradients)

# %% name="window-again"
for k in (1, 2):
    windows[f"{lab.whose('4.4')}, k={k}"] = lab.play_window(lab.mine_or_ours("4.4"), k)
for name, run in windows.items():
    print(f"{name:<16} {run.timeline.step_ns / 1e3:4.0f} us,", end=" ")
    print(f"messages alive: {lab.messages_alive(run.program):2.0f}")
view.draw_many({name: run.timeline.of_rank(0) for name, run in windows.items()})

# %% [markdown]
# On this board `k=1` is as good as `k=2`, because the copies between two messages take next to
# no time. On GPUs they take some time, and a second message can travel meanwhile.

# %% name="window-gave" fold=true
kept = windows[f"{lab.whose('4.4')}, k=2"]
print(f"""With 2 messages alive instead of 10 the step is {100 * (kept.timeline.step_ns / free - 1):.0f} % longer, and {100 * (limited / free - 1):.0f} % longer if
the backward pass does the waiting. Measure it before you believe it: on two H200s, with
larger gradients, the step took {1e3 * lab.number("windows", "side stream, k=2"):.0f} us with a second stream and {1e3 * lab.number("windows", "stalling, k=2"):.0f} without.
Section 10 says why.""")

# %% [markdown]
# ## 6. Many small tensors (15 minutes)
#
# A step also sums small things: norms, losses, counts. Here are 38 tensors, float32 and int64.
# On this board launches cost nothing, as in a CUDA graph.

# %% name="small"
small = lab.play_small(lab.one_by_one)
print(f"one by one: {small.timeline.step_ns / 1e3:.0f} us,", end=" ")
print(f"{lab.latencies(small.timeline):.0f} latencies in the critical path")
view.draw(small.timeline.of_rank(0), title="one by one")

# %% [markdown]
# Nearly all of it is latency. `async_op=True` would make it no faster, since messages of one
# communicator travel one after the other.
#
# **Exercise 4.5.** Write `sum_all(tensors)`: sum each tensor over the ranks, in place,
# with at most one message per dtype. When it returns, what the caller launches next may
# read the sums.
#
# - The dtypes are float32 and int64, and some tensors have no dimension. Some counts are
#   larger than float32 can hold exactly, so do not cast.
# - Send no byte that is not asked for.
#
# About 8 lines: join, sum, cut. Or 5, without a copy: see the second hint.
#
# <details><summary>Hint: one flat tensor</summary>
#
# `torch.cat([t.reshape(-1) for t in chosen])`, one all-reduce, and each part back with
# `t.copy_(part.view_as(t))`.
#
# </details>
# <details><summary>Hint: no copy at all</summary>
#
# `with dist._coalescing_manager(async_ops=True) as manager:` collects the all-reduces
# inside into one group call; wait with `manager.wait()`. One dtype per group.
#
# </details>


# %% name="sum-all" kind="exercise" exercise="4.5"
def sum_all(tensors):
    ### BEGIN SOLUTION
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        with dist._coalescing_manager(async_ops=True) as manager:
            for t in tensors:
                if t.dtype == dtype:
                    dist.all_reduce(t)
        manager.wait()
    ### END SOLUTION


# %% name="check-sum-all" kind="check" exercise="4.5" points=2
_ = check("4.5", sum_all)

# %% [markdown]
# ## 7. Inside an all-reduce: the ring (17 minutes)
#
# $n$ ranks stand in a circle. Each one's tensor is cut into $n$ chunks. In each of $2(n-1)$
# steps every rank sends *one* chunk to its right neighbour and gets one from its left.
#
# - In the first $n-1$ steps what arrives is **added**: that is the reduce-scatter.
# - In the others it is **copied**: the all-gather.
#
# **Exercise 4.6.** Write `chunk_to_send(rank, step, num_ranks)`: which chunk (0 to
# n - 1) does a rank send in a step (0 to 2n - 3)? One line is enough.
#
# <details><summary>Hint: hand on</summary>
#
# In step 1 a rank hands on the chunk that it has just added to. Its left neighbour sent
# that in step 0.
#
# </details>
# <details><summary>Hint: the second half</summary>
#
# Which chunk has a rank finished after n - 1 steps? Try whether your formula for the first
# half is right for the second half, too.
#
# </details>


# %% name="chunk" kind="exercise" exercise="4.6" reference=true
def chunk_to_send(rank, step, num_ranks):
    ### BEGIN SOLUTION
    return (rank - step) % num_ranks
    ### END SOLUTION


# %% name="ring-seen"
print(lab.ring_text(chunk_to_send))

# %% name="check-chunk" kind="check" exercise="4.6" points=2
_ = check("4.6", chunk_to_send)

# %% name="ring-cost" fold=true
ring = lab.play_ring(lab.ring_of_ours).timeline
whole = lab.play(dist.all_reduce, lab.ring_inputs()).timeline
print(f"by hand, six sends: {ring.step_ns / 1e3:.0f} us, of it latency", end=" ")
print(f"{ring.critical_path().shares_ns['latency'] / 1e3:.0f} us")
print(f"one all_reduce:     {whole.step_ns / 1e3:.0f} us, of it latency", end=" ")
print(f"{whole.critical_path().shares_ns['latency'] / 1e3:.0f} us")

# %% [markdown]
# By hand, each of the steps pays for its latency, its launches and its additions. NCCL's ring
# runs inside *one* kernel, which cuts finer chunks and keeps all links busy. Our model has
# one latency for the whole all-reduce.
#
# ### What is a fast link? (9 minutes)
#
# **Bus bandwidth** is the number of bytes that cross one rank's link, divided by the time. Use
# it to compare links: size divided by time gets smaller with more ranks, on the same link.
#
# **Exercise 4.7.** Write `bus_gbyte_per_s(operation, num_ranks, num_bytes, us)`, in 1e9
# bytes per second. `num_bytes` is the size of the whole tensor (for an all-gather, what each
# rank has at the end). The operations are those of section 2, each done by the cheapest
# ring. Section 2 counts the crossings for four ranks. How many are there for `num_ranks`?


# %% name="bus" kind="exercise" exercise="4.7"
def bus_gbyte_per_s(operation, num_ranks, num_bytes, us):
    ### BEGIN SOLUTION
    crossings = (num_ranks - 1) / num_ranks
    if operation == "all_reduce":
        crossings *= 2
    elif operation == "broadcast":
        crossings = 1
    return crossings * num_bytes / (us * 1e3)
    ### END SOLUTION


# %% name="check-bus" kind="check" exercise="4.7" points=1
_ = check("4.7", bus_gbyte_per_s)

# %% [markdown]
# Now read what was measured. Which two rows use the link nearly equally well?

# %% name="bus-seen" fold=true
print("ranks        bytes        us   size / time   bus bandwidth")
for num_ranks, num_bytes, us in lab.measured_points():
    bus = lab.bus_of_ours("all_reduce", num_ranks, num_bytes, us)
    print(f"{num_ranks:>5} {num_bytes:>12} {us:>9} ", end="")
    print(f"{num_bytes / us / 1e3:>8.1f} GB/s {bus:>10.1f} GB/s")
print(lab.points_machine())

# %% [markdown]
# Compare the largest message on two ranks and on four: size / time differs a lot, the bus
# bandwidth hardly. And below 26,214,400 bytes (25 MiB) no link is fast, because most of the
# time is latency.

# %% [markdown]
# ## 8. Two repairs (22 minutes)
#
# Here are two programs that people really write. The number that you type decides their
# sizes, so your neighbour's answers are not yours.

# %% name="my-number"
my_number = 7  # any whole number: your day of birth, your desk

# %% name="repair-case"
repair_case = lab.repair_case(my_number)
print(f"{len(repair_case.widths)} blocks with side branches of {repair_case.widths}")
print(f"{len(repair_case.tokens)} micro-batches of {repair_case.tokens} tokens")

# %% [markdown]
# **Exercise 4.8a.** This program passes every test on a quiet GPU. Run it and read the finding.
# Diagnose it first, then repair it. The side branch must still run beside the message.


# %% name="blocks" kind="exercise" exercise="4.8a" reference=true broken=true
def blocks(x, weights):
    for w in weights:
        part = x @ w["in"]
        work = dist.all_reduce(part, async_op=True)
        side = (x @ w["side"]).relu() @ w["back"]
        ### BEGIN SOLUTION
        work.wait()
        x = x + part
        ### END SOLUTION
        ### BEGIN STUB
        # x = x + part
        # work.wait()
        ### END STUB
        x = x + side
    return x


# %% name="blocks-seen"
seen = repair_case.play_blocks(blocks)
print(f"{len(seen.warnings)} findings")
for finding in seen.warnings[:1]:
    lab.print_finding(finding)
view.draw(seen.timeline.of_rank(0), title="your blocks")

# %% [markdown]
# Fill in what the *broken* program did (run the cell above before you repair it).
#
# - `"kind"`, of what the *program* does wrong:
#   - `"read before the wait"`: a kernel uses a sum that is not there yet;
#   - `"sent again"`: what was summed once goes into another sum;
#   - `"blocked"`: the ranks wait for one another;
#   - `"never sent"`: something is in no sum.
# - `"messages"`: how many messages rank 0 launches.
# - `"luck_us"`: in this run the first message has ended before its reader starts, by luck.
#   How many us before? The finding says it.

# %% name="first-diagnosis" kind="exercise" exercise="4.8a"
### BEGIN SOLUTION
first_diagnosis = {
    "kind": "read before the wait",
    "messages": len(repair_case.widths),
    "luck_us": lab.luck_us(repair_case.play_blocks(lab.broken_blocks)),
}
### END SOLUTION
### BEGIN STUB
# first_diagnosis = {"kind": None, "messages": None, "luck_us": None}
### END STUB

# %% name="check-blocks" kind="check" exercise="4.8a" points=2
_ = check("4.8a", my_number, first_diagnosis, blocks)

# %% [markdown]
# How much slower may the link be before the luck is gone?

# %% name="luck" fold=true
if solved("4.8a"):
    luck_us = lab.luck_us(repair_case.play_blocks(lab.broken_blocks))
    wire_us = lab.message_ns(200 * 400 * 4) / 1e3 - lab.BOARD.link.latency_ns / 1e3
    print(
        f"the message takes {wire_us:.0f} us on the wire and is {luck_us:.0f} us early:"
    )
    print(f"on a link {1 + luck_us / wire_us:.1f} times slower, half of a sum is read")

# %% [markdown]
# **Exercise 4.8b.** This program accumulates gradients, with overlap. Run it, diagnose it, repair
# it. In your repair each rank's gradient travels once, and the step is as short as one
# message allows.


# %% name="accumulate" kind="exercise" exercise="4.8b" reference=true broken=true
def accumulate(micros):
    grad = torch.zeros(250, 400)
    works = []
    ### BEGIN SOLUTION
    for a, b in micros:
        grad += a @ b
    works.append(dist.all_reduce(grad, async_op=True))  # now it is whole
    ### END SOLUTION
    ### BEGIN STUB
    # for a, b in micros:
    #     grad += a @ b
    #     works.append(dist.all_reduce(grad, async_op=True))
    ### END STUB
    for work in works:
        work.wait()
    return grad


# %% name="accumulate-seen"
seen = repair_case.play_micros(accumulate)
print(f"{len(seen.warnings)} findings")
for finding in seen.warnings[:1]:
    lab.print_finding(finding)
view.draw(seen.timeline.of_rank(0), title="your accumulation")

# %% [markdown]
# Again for the *broken* program:
#
# - `"kind"`, as above;
# - `"messages_in_flight"`: how many messages of this one tensor are launched before the
#   first `wait()`;
# - `"weight_of_the_first"`: suppose that each message ends before the next line runs. How many
#   times is the gradient of the first micro-batch in the result? (Once would be right.)
#
# <details><summary>Hint: the kind</summary>
#
# The finding names the first two that collide. What does the second `all_reduce` do to
# the tensor?
#
# </details>
# <details><summary>Hint: the weight</summary>
#
# After the first message *every* rank holds the sum over all ranks. The next message adds up
# four of these sums.
#
# </details>

# %% name="second-diagnosis" kind="exercise" exercise="4.8b"
### BEGIN SOLUTION
second_diagnosis = {
    "kind": "sent again",
    "messages_in_flight": len(repair_case.tokens),
    "weight_of_the_first": 4 ** (len(repair_case.tokens) - 1),
}
### END SOLUTION
### BEGIN STUB
# second_diagnosis = {
#     "kind": None,
#     "messages_in_flight": None,
#     "weight_of_the_first": None,
# }
### END STUB

# %% name="check-accumulate" kind="check" exercise="4.8b" points=2
_ = check("4.8b", my_number, second_diagnosis, accumulate)

# %% [markdown]
# DDP launches all-reduces in every `backward()`, too, unless you tell it not to. Put all
# micro-batches but the last into `with model.no_sync():`. `ol.BucketedReducer` has the same.

# %% [markdown]
# ## 9. Async or sync? (11 minutes)
#
# What if there is nothing that could run beside a message? Then cut the matmul itself. The
# message of one chunk travels while the next chunk is computed. With a single chunk this is
# the synchronous program.
#
# The whole matmul takes $T_c$, its message $\alpha + W$: the latency, and the time on the
# wire. Cut into $n$ chunks, each chunk computes for $c = T_c/n + o$, where $o$ is an overhead
# per chunk, and its message takes $m = \alpha + W/n$. The slower of the two sets the pace:
#
# $$c + (n-1)\,\max(c, m) + m$$

# %% name="chunks-drawn" fold=true
case = lab.CASES[0]
print(case)
chunked = {
    f"{n} chunk{'s' if n > 1 else ''}": ol.resolve(case.program(n), case.hardware())
    for n in (1, 4, 16)
}
view.draw_many(chunked)

# %% [markdown]
# **Exercise 4.9.** Write `choose_chunks(compute_us, overhead_us, latency_us, wire_us)`. Return
# 1, 2, 4, 8 or 16. The check asks about ten layers. On each, the best of the five takes less
# time than the worst. Your answer may lose at most 15 % of that gain. No constant answer passes.


# %% name="choose" kind="exercise" exercise="4.9"
def choose_chunks(compute_us, overhead_us, latency_us, wire_us):
    ### BEGIN SOLUTION
    def step_us(n):
        compute = compute_us / n + overhead_us
        message = latency_us + wire_us / n
        return compute + (n - 1) * max(compute, message) + message

    return min((1, 2, 4, 8, 16), key=step_us)
    ### END SOLUTION


# %% name="check-choose" kind="check" exercise="4.9" points=2
_ = check("4.9", choose_chunks)

# %% name="choose-table" fold=true
if solved("4.9"):
    print(
        f"{'us with this many chunks':<36}"
        + "".join(f"{n:>7}" for n in (1, 2, 4, 8, 16))
    )
    for case in lab.CASES:
        steps_us = [case.step_us(n) for n in (1, 2, 4, 8, 16)]
        print(f"{case.name:<36}" + "".join(f"{us:>7.0f}" for us in steps_us))

# %% [markdown]
# With a single token (an LLM that decodes) every answer but 1 loses: the message is all
# latency, and 20 us of computing are too short to hide it. That is why inference engines
# keep this all-reduce on the current stream.

# %% [markdown]
# ## 10. On real GPUs (12 minutes)
#
# Here is what GPUs did, stored; nothing is measured now. Sections 3 and 5 run at sizes that
# keep a GPU busy. *Captured* is the time of one of ten messages in a CUDA graph, which the
# CPU launches as a whole.

# %% name="gpu-table"
print(lab.gpus_table(layer_waiting))
print(lab.machine())
ways_us = {
    name: 1e3 * lab.number("ways", name) for name in ("wait at once", "wait late")
}
expected_us = [1e3 * lab.predicted_ms(layer_waiting, way) for way in ways_us]
print(
    f"\nwaiting late saves {ways_us['wait at once'] - ways_us['wait late']:.0f} us",
    end=" ",
)
print(f"of {1e3 * lab.number('ways', 'the message alone'):.0f};", end=" ")
print(f"predicted {expected_us[0] - expected_us[1]:.0f}")
print(
    f"ten messages of section 5 take {1e4 * lab.number('windows', 'a message alone'):.0f} us"
)
print(lab.measure_it_here())

# %% [markdown]
# *Section 3.* It is as on the board: waiting late hides most of the message. If the CPU waits
# at once, the message costs more than it takes alone. If the CPU waits late, after it has
# launched the side branch, it costs about half. The model predicts nearly the same saving.
# But all its steps are a little too short, because its matmuls are.
#
# *Section 5.* Compare *stalling, k=2* with no limit: half the peak, and no time lost. On the
# board the side stream won; here it *loses* at `k=2` and wins at `k=1`. Why? Ten messages take
# longer than all the computing, and there are copies between them: into float32, the mean,
# back. Whoever waits, the GPU has other work that it must do anyway. The model says so too.
# A second stream pays where the compute stream would stand still. Look for that gap before
# you add a stream, and measure after.
#
# *Section 6.* One flat tensor is ten times as fast as one by one. The group call copies
# nothing, and still the flat tensor wins: the CPU prepares 64 tensors for NCCL, one after
# the other.
#
# *Section 7.* A small message takes five times as long eager as captured: most of its latency
# is the *launch*. From 25 MiB on both take the same. And the two halves of an all-reduce
# cost more than a second latency: the model has one bandwidth for all three collectives,
# and a reduce-scatter and an all-gather reach less.

# %% [markdown]
# ## 11. Where the model lies
#
# On the board nothing slows anything else down, so a hidden message is free. On GPUs the
# collective's kernel takes processors and memory bandwidth from the matmul beside it, and it
# can only start where another kernel ends.
#
# On the virtual cluster `is_completed()` says yes once all ranks have launched the message,
# and makes the CPU wait for the rest. On GPUs it answers at once, so a loop may do other
# things. And on gloo `wait()` blocks the *CPU*: code that forgets a wait may be right there,
# and wrong on NCCL.
#
# ## In production
#
# - PyTorch: `WorkNCCL::synchronizeStream` in
#   `torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp` is what `wait()` comes down to: the
#   *current* stream waits for an event of NCCL's stream, and the work lets go of the
#   tensors that it kept alive.
# - FSDP2: `post_backward` in `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`
#   limits the reduce-scatters in flight like `stalling` in section 5: the *current* stream
#   waits for the oldest one's event. The limit is 1, and 2.13 lets you raise it
#   (`set_reduce_scatter_max_input_buffers`).
# - Megatron-LM: `start_grad_sync` and `finish_grad_sync` in
#   `megatron/core/distributed/param_and_grad_buffer.py`: one coalescing manager for all
#   buckets of a group, and one handle to wait for.
# - vLLM: `tensor_model_parallel_all_reduce` in `vllm/distributed/communication_op.py` runs on
#   the current stream. For small messages it has a kernel of its own
#   (`custom_all_reduce.py`), because only latency counts there.
#
# Further reading: P. Patarasuk and X. Yuan, *Bandwidth Optimal All-reduce Algorithms for
# Clusters of Workstations*, JPDC 2009: the ring.
