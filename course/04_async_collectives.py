# %% [markdown]
# # When is it done?
#
# **Lab 04: asynchronous collectives.** Core: 60 minutes. Extras: 60 more. You need no GPU.
#
# After the core you can
#
# - say what each collective leaves on each rank, and what it sends;
# - say who waits in each way of waiting: the CPU, a stream, or nobody;
# - order launches and place waits so that a message costs nothing;
# - bound the memory of messages in flight, and not pay for it in time.
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
# ## 1. The waste (7 minutes)
#
# One layer, cut over four GPUs. Each holds a slice of the matrices, so each has a *part*
# of a sum. The parts are added up over the ranks by an **all-reduce**. A side branch
# needs no sum.


# %% name="layer"
def layer(x, w):
    part = x @ w["in"]  # this rank's part
    dist.all_reduce(part)  # now the sum over all ranks
    y = part @ w["out"]
    side = (x @ w["side_in"]).relu() @ w["side_out"]  # needs no sum
    return y + side


# %% [markdown]
# You do not have four GPUs here. `lab.play` calls `layer(x, w)` on four ranks of the
# **virtual cluster**: values are real, times come from a machine with round numbers.

# %% name="board" fold=true
link = lab.BOARD.link
print(f"1 GFLOP takes {1e18 / lab.BOARD.flops_per_s['default'] / 1e3:.0f} us,", end=" ")
print(f"a launch {lab.BOARD.launch_ns / 1e3:.0f} us of the CPU,", end=" ")
print(f"of a collective {lab.BOARD.collective_launch_ns / 1e3:.0f} us")
print(f"a message: {link.latency_ns / 1e3:.0f} us, then", end=" ")
print(f"{1e3 / (link.bytes_per_s / 1e6):.2f} us for 1000 bytes that cross the link")

# %% name="waste"
inputs = lab.layer_inputs()
run = lab.play(layer, inputs)
view.draw(run.timeline.of_rank(0), title="layer")

# %% [markdown]
# `cpu` launches and runs ahead. `default` is the stream: the message stands in it, in line
# with the matmuls. Nothing computes while it travels, though the side branch was free to
# run. (Saved is compute + communication - step. Nothing is saved: -5 us is the first
# launch, for which all wait.)

# %% name="waste-numbers"
print(view.text(run.timeline.of_rank(0)))
report = run.timeline.report()
lost = report.exposed_ns / report.step_ns
print(f"\nexposed: {100 * lost:.0f} % of the step has nothing but the message in it")

# %% [markdown]
# **Predict.** With the side branch beside the message, how long is the step, in us?

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
# Unfold the cell above. Three things changed: `async_op=True`, which puts the message on
# a stream of its own (`comm`, the wire) and returns a **work**; the side branch is launched
# next; and only then stands `work.wait()`. This lab is about that line.

# %% [markdown]
# ## 2. What does each collective do? (5 minutes)
#
# Four ranks hold four numbers each:

# %% name="before" fold=true
for rank, numbers in enumerate(lab.after_each()["before"]):
    print(f"rank {rank}: {numbers}")

# %% [markdown]
# **Predict.** What does *rank 1* hold after each? Sums read well: 1 + 10 + 100 + 1000.
#
# - `broadcast` from rank 0;
# - `all_gather` of each rank's first number;
# - `reduce_scatter` of the four numbers: rank r gets the r-th sum;
# - `all_reduce` of the four numbers;
# - `all_to_all`: rank r sends its s-th number to rank s.

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
# How often do the four numbers cross one rank's link? In a ring of $n$ ranks (an all-to-all
# sends each part straight), and no way of adding on the GPUs needs fewer crossings. A
# switch that adds up in the network does:

# %% name="crossings" fold=true
for name in lab.after_each():
    if name != "before":
        print(f"{name:<15} {lab.crossings(name):.2f} times")

# %% [markdown]
# Read the last rows of the table again. Behind a reduce-scatter each rank has *one*
# finished sum. Behind an all-gather each has all. And the crossings add up.
#
# ### An all-reduce in two halves (9 minutes)
#
# **The API of this screen.** `lab.reduce_scatter(output, input)`: `input` is one
# contiguous tensor with as many elements as `output` has, times the number of ranks.
# `lab.all_gather(output, input)`: the other way round. (torch calls them
# `dist.reduce_scatter_tensor` and `dist.all_gather_into_tensor` up to 2.12,
# `dist.reduce_scatter_single` and `dist.all_gather_single` since.)
#
# **Exercise 4.1.** Write `all_reduce_in_two(tensor)`: sum `tensor` over all ranks, *in
# place*, without `all_reduce`.
#
# - `tensor` is contiguous, of any shape and size. Its size need not divide by
#   `dist.get_world_size()`: send a padded copy then. Pad as little as possible.
# - Bytes on the wire: as for an all-reduce of the padded tensor.
#
# About 8 lines.
#
# <details><summary>Hint: padding</summary>
#
# `per_rank = -(-tensor.numel() // n)` rounds up. `tensor.new_zeros(per_rank * n)` has
# room for all, and `flat[: tensor.numel()]` is where the tensor goes.
#
# </details>
# <details><summary>Hint: in place</summary>
#
# `tensor.copy_(flat[: tensor.numel()].view_as(tensor))`
#
# </details>


# %% name="in-two" kind="exercise" exercise="4.1"
def all_reduce_in_two(tensor):
    """Sum `tensor` over all ranks, in place."""
    ### BEGIN SOLUTION
    n = dist.get_world_size()
    per_rank = -(-tensor.numel() // n)
    flat = tensor.new_zeros(per_rank * n)
    flat[: tensor.numel()] = tensor.flatten()
    mine = tensor.new_empty(per_rank)
    lab.reduce_scatter(mine, flat)  # the sum of my part
    lab.all_gather(flat, mine)  # the sums of all parts
    tensor.copy_(flat[: tensor.numel()].view_as(tensor))
    ### END SOLUTION


# %% name="check-in-two" kind="check" exercise="4.1" points=2
_ = check("4.1", all_reduce_in_two)

# %% [markdown]
# So an all-reduce can be *stopped half way*. Between the halves each rank holds one
# finished part: that is where a sharded optimizer puts its step (lab 09). The price is
# a second latency:

# %% name="two-halves" fold=true
halves = lab.halves()
for name, timeline in halves.items():
    print(f"{name:<36} {timeline.step_ns / 1e3:6.1f} us")

# %% [markdown]
# ## 3. Four ways to wait (12 minutes)
#
# `dist.all_reduce(part, async_op=True)` returns at once. The message starts when what
# the *current stream* holds at that moment has ended. When may you read the sum?
#
# | | the CPU | the current stream |
# |---|---|---|
# | `all_reduce(part)`, not async | goes on | runs the message itself |
# | `work.wait()` | goes on | waits, from this line on |
# | `work.wait()` under `streams.stream(other)` | goes on | goes on; `other` waits |
# | `while not work.is_completed()`, `streams.synchronize()` | waits | runs dry |
#
# So `wait()` does *not* mean that the message has arrived. It means: what I launch on
# this stream from now on comes after it.


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
# **Predict.** Which of the five hide the message? Answer `True` or `False`.

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
# The first two hide nothing, each in its own way. With `async_op=False` the message is in
# `default`, in line with the matmuls. With `async_op=True` it is on `comm`, and `wait()` on
# the next line lets `default` stand still all the same. Waiting *on another stream* may
# come at once: only what is launched there waits. Where the two matmuls run side by side
# each is slower, so nothing is won over "wait late" here.
#
# Look at the `cpu` lane of the last one. The CPU waits, and loses its head start: when
# the message is there, the next matmul has yet to be launched.

# %% name="ways-table"
view.table(ways)

# %% [markdown]
# **Exercise 4.2.** Two sums. The launches below stand in a good order. The waits do not.
# Move them, so that the step is as short as the dependencies allow. Nothing may read a
# sum before it is there.
#
# A finding may say that a reader starts later "by luck". Right values prove nothing then:
# without a wait, some ranks see the tensor from before the sum, and the last rank to
# launch may see the sum.
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
# ## 4. What goes beside it? (10 minutes)
#
# A wait can only be late if there is something to launch before it. This layer has
# experts: a *routed* branch and a *gate*, both summed over the ranks, and a *shared*
# branch that needs no sum. Somebody wrote it in the order of the paper.


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
print(f"computing alone: {compute_us:.0f} us; no order is shorter")
view.draw(in_order.of_rank(0), title="in the order of the paper")

# %% [markdown]
# Messages of one communicator travel one after the other, in the order of their launch:
# all ranks must agree on it.
#
# **Exercise 4.3.** Write `experts(x, w)`: the same result, the same two messages, the
# shortest step. Reorder the launches and place the waits. About 10 lines.
#
# <details><summary>Hint: which message first?</summary>
#
# Which sum has more to compute behind it? It should set out first.
#
# </details>
# <details><summary>Hint: what is free?</summary>
#
# The shared branch, and the gate's own matmul, wait for no message. They can be launched
# while the routed message travels.
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
# ## 5. How many at once? (15 minutes)
#
# Every message in flight holds memory. A backward pass makes bfloat16 gradients; they
# are summed in float32, so each message is a *copy*, twice as large. All ten at once
# are a second, double set of gradients. You want at most `k` copies alive.
#
# `lab.backward(layer)` computes one gradient on the current stream. The board has a
# faster CPU here, so that launches are out of the picture. Below is a limit that people
# write. It works. What does it cost?


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
# **Predict.** With `k=10` nothing is limited. How much longer is the step with `k=2`, in
# percent?

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
# Look at `default`. `finish_oldest` waits on the *current* stream: the backward pass
# stops until a message is through, and with it all gradients that come later. A burst
# of cheap gradients is enough.
#
# The copy has to wait for a free place. The backward pass does not. So let another stream
# do the waiting: `send` and `finish_oldest` both run on it. Memory belongs to the stream
# that allocates it; with one of the two elsewhere, a message's memory would be handed out
# again while it is still read.
#
# **Exercise 4.4.** Repair `average_gradients(layers, k)`.
#
# - Returns the gradients in the order of `layers`. Each is the *mean* over the ranks for
#   whatever the caller launches next on the current stream.
# - Never are more than `k` messages (float32 copies) alive, counted in the order in which
#   your code runs, as an allocator counts. A pool of `k` buffers will do too.
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
# On this board `k=1` is as good: between two messages stand only copies, which take
# next to no time. On GPUs they take some, and a second message travels meanwhile.
#
# The other stream pays where `default` would stand still. On GPUs that depends on sizes:
# with those of section 10 it wins at `k=1` and loses at `k=2`.

# %% [markdown]
# ## Takeaways (1 minute)

# %% name="takeaways" fold=true
late, at_once = (ways[way].step_ns for way in ("wait late", "wait at once"))
kept = windows[f"{lab.whose('4.4')}, k=2"]
print(f"""1. async_op=True hides nothing by itself: with wait() on the next line the step takes
   {at_once / 1e3:.0f} us, with wait() before the first reader {late / 1e3:.0f}.
2. wait() holds a stream, not the CPU: the stream that is current at the call.
3. Launch first what most depends on, then what is free: {in_order.step_ns / 1e3:.0f} us became {mine.step_ns / 1e3:.0f}.
   A limit on memory need not cost time: with 2 messages alive instead of 10 the step
   is {100 * (kept.timeline.step_ns / free - 1):.0f} % longer, and {100 * (limited / free - 1):.0f} % if the backward pass does the waiting.
   Measure it: on two H200s, with larger gradients, it took {lab.number("windows", "side stream, k=2"):.2f} ms with a
   second stream and {lab.number("windows", "stalling, k=2"):.2f} without (section 10 says why).""")

# %% [markdown]
# **Tomorrow, in your own loop.** Search it for collectives whose result is not read at once:
# a loss for the log, a norm, a count. Launch each as soon as its input is known, and wait
# where the first reader stands:
#
# ```python
# total = loss.detach().clone()
# work = dist.all_reduce(total, async_op=True)
# loss.backward()
# work.wait()
# mean_loss = total / dist.get_world_size()  # still no .item(): look at the end of the epoch
# ```
#
# `ol.diagnose` names the others: `same-stream` and `launched-late`.
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
# ## 6. Many small tensors (10 minutes)
#
# A step also sums what is small: norms, losses, counts. Here are 38 tensors, float32 and
# int64, on the board *captured*: launches cost nothing, as in one CUDA graph.

# %% name="small"
small = lab.play_small(lab.one_by_one)
print(f"one by one: {small.timeline.step_ns / 1e3:.0f} us,", end=" ")
print(f"{lab.latencies(small.timeline):.0f} latencies in the critical path")
view.draw(small.timeline.of_rank(0), title="one by one")

# %% [markdown]
# Nearly all of it is latency. All asynchronous, and no faster for it: messages of one
# communicator follow one another.
#
# **Exercise 4.5.** Write `sum_all(tensors)`: sum each tensor over the ranks, in place,
# with at most one message per dtype. When it returns, what the caller launches next may
# read the sums.
#
# - float32 and int64; some tensors have no dimension. Counts are larger than float32
#   can hold exactly: do not cast.
# - No byte travels that nobody asked for.
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
# ## 7. Inside an all-reduce: the ring (12 minutes)
#
# $n$ ranks stand in a circle. Each tensor is cut into $n$ chunks. In each of $2(n-1)$
# steps every rank sends *one* chunk to its right neighbour and gets one from the left.
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
# Which chunk has a rank finished after n - 1 steps? Try your formula of the first half:
# it may go on.
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
# By hand each step pays the latency, and its launches and additions. NCCL's ring runs inside
# *one* kernel, which cuts chunks finer and keeps all links busy. Our model has one latency
# for the whole.
#
# ### What is a fast link? (6 minutes)
#
# **Bus bandwidth** is bytes that cross one rank's link, over time. It is the number to
# compare: size over time falls with the number of ranks, on the same link.
#
# **Exercise 4.7.** Write `bus_gbyte_per_s(operation, num_ranks, num_bytes, us)`, in 1e9
# bytes a second. `num_bytes` is the whole tensor (of an all-gather: what each rank has
# at the end). The operations are those of the table in section 2, each by the cheapest
# ring: there are the crossings of four ranks. Of `num_ranks`?


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
# With it, read what was measured. Which two rows use the same link nearly equally well?

# %% name="bus-seen" fold=true
print("ranks        bytes        us   size / time   bus bandwidth")
for num_ranks, num_bytes, us in lab.measured_points():
    bus = lab.bus_of_ours("all_reduce", num_ranks, num_bytes, us)
    print(f"{num_ranks:>5} {num_bytes:>12} {us:>9} ", end="")
    print(f"{num_bytes / us / 1e3:>8.1f} GB/s {bus:>10.1f} GB/s")
print(lab.points_machine())

# %% [markdown]
# The largest message on two ranks and on four: size over time differs by far, bus
# bandwidth hardly. And below 26,214,400 bytes (25 MiB) no link is fast: latency is most
# of the time.

# %% [markdown]
# ## 8. Two repairs (15 minutes)
#
# Two programs that people really write. Your number draws your own widths: what you find
# is not what your neighbour finds.

# %% name="my-number"
my_number = 7  # any whole number: your day of birth, your desk

# %% name="repair-case"
repair_case = lab.repair_case(my_number)
print(f"{len(repair_case.widths)} blocks with side branches of {repair_case.widths}")
print(f"{len(repair_case.tokens)} micro-batches of {repair_case.tokens} tokens")

# %% [markdown]
# **Exercise 4.8a.** On a quiet GPU this passes every test. Run it, read the finding.
# Diagnose first, then repair. Keep the side branch beside the message.


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
    print(finding)
view.draw(seen.timeline.of_rank(0), title="your blocks")

# %% [markdown]
# Fill in what the *broken* program did (run the cell above before you repair it).
#
# - `"kind"`, of what the *program* does wrong:
#   `"read before the wait"`: a kernel uses a sum that is not there yet;
#   `"sent again"`: what was summed once goes into another sum;
#   `"blocked"`: the ranks wait for one another;
#   `"never sent"`: something is in no sum.
# - `"messages"`: how many messages rank 0 launches.
# - `"luck_us"`: how long after the *first* message's end its unordered reader starts. On
#   this machine, by luck. The finding says it.

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
    print(f"on a link {1 + luck_us / wire_us:.1f} times slower half of a sum is added")

# %% [markdown]
# **Exercise 4.8b.** Gradient accumulation, with overlap. Run it, diagnose, repair.
#
# The repair: each rank's gradient travels once, and the step is as short as one message
# allows.


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
    print(finding)
view.draw(seen.timeline.of_rank(0), title="your accumulation")

# %% [markdown]
# Again for the *broken* program:
#
# - `"kind"`, as above;
# - `"messages_in_flight"`: how many messages of this one tensor are launched before the
#   first `wait()`;
# - `"weight_of_the_first"`: suppose that each message ends before the next line. How many
#   times is the first micro-batch's gradient in the result? (Once would be right.)
#
# <details><summary>Hint: the kind</summary>
#
# The finding names the first two that collide. What does the second `all_reduce` do to
# the tensor?
#
# </details>
# <details><summary>Hint: the weight</summary>
#
# After the first message *every* rank holds the sum over all ranks. The next message adds
# up four of those.
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
# DDP would launch the all-reduces of every `backward()` too. `with model.no_sync():` around
# all micro-batches but the last is its name for your repair; `ol.BucketedReducer` has the same.

# %% [markdown]
# ## 9. Async or sync? (7 minutes)
#
# What if nothing is free to go beside a message? Then cut the matmul itself. Each
# chunk's message travels beside the next chunk's matmul. In one chunk it is synchronous.
#
# Cut into $n$, a chunk computes for $c = T_c/n + o$ (every chunk adds an overhead $o$)
# and its message takes $m = \alpha + W/n$. The slower of the two sets the pace:
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
# **Exercise 4.9.** Write `choose_chunks(compute_us, overhead_us, latency_us, wire_us)`.
# Return 1, 2, 4, 8 or 16. It is asked for ten layers. On each you may lose 15 % of what
# there was to gain over the worst of the five. No constant answer passes.


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
# On one token (the decoding of an LLM) every answer but 1 loses: the message is latency,
# and nothing hides behind 20 us. That is why inference engines keep this all-reduce on
# the current stream.

# %% [markdown]
# ## 10. On real GPUs (10 minutes)
#
# The virtual cluster is a model. Here is what GPUs did, stored: nothing is measured now.
# First your layer of section 3, at a size that keeps a GPU busy.

# %% name="gpu-ways"
print(lab.ways_table(layer_waiting))
print(lab.machine())

# %% name="gpu-ways-saved" fold=true
at_once_ms, late_ms = (lab.number("ways", w) for w in ("wait at once", "wait late"))
expected_ms = [
    lab.predicted_ms(layer_waiting, w) for w in ("wait at once", "wait late")
]
print(f"waiting late saves {at_once_ms - late_ms:.2f} ms", end=" ")
print(f"of {lab.number('ways', 'the message alone'):.2f};", end=" ")
print(f"predicted {expected_ms[0] - expected_ms[1]:.2f}")

# %% [markdown]
# As on the board: the last column shows what a message costs in each way. Waiting late
# hides most of it. The CPU that waits at once pays more than the message; one that
# waits late, after it has launched the side branch, pays about half.
#
# The model promised nearly the same: it knows how fast a matmul and a message are beside
# one another. All its steps are a little too short, though, those that hide nothing too: the
# error is in what the matmuls take.

# %% [markdown]
# Now the window of section 5: ten gradients of 4096 x 4096.

# %% name="gpu-windows" fold=true
print(lab.windows_table())
alone_ms = lab.number("windows", "a message alone")
print(f"\nten messages alone: {10 * alone_ms:.1f} ms;", end=" ")
print(f"computing alone: {lab.number('windows', 'no message'):.1f} ms")

# %% [markdown]
# Compare *stalling, k=2* with no limit: half the peak, and it costs no time.
# *Stalling* does not stall here, and at k=2 the side stream *loses*. At k=1 it still
# wins. Why?
#
# Ten messages take longer than all computing, and between them stand the copies: into
# float32, the mean, back. Whoever waits, the GPU has other work that must be done
# anyway; the model says so too: with it, too, the side stream wins at k=1 and loses at k=2.
# What it overdoes: a message of its waits for the kernel that runs, even right behind
# another one, so most of its steps are too long. A stream pays where the compute stream would
# stand still. Look for that gap before you add one, and measure after.

# %% name="gpu-small" fold=true
print(lab.small_table())
each_us = 1e3 * lab.number("small", "one by one") / 64
print(f"one by one: {each_us:.0f} us each")

# %% [markdown]
# Joined is ten times faster than one by one. The group call copies nothing, and yet the
# flat tensor wins: the CPU prepares 64 tensors for NCCL, one after the other.

# %% name="gpu-sizes" fold=true
print(lab.by_size_table())
print()
print("captured: ten of each in one CUDA graph, one counted")
print(lab.by_size_table("captured_by_size"))
print()
print(lab.measure_it_here())

# %% [markdown]
# Compare the first rows of the two tables. A small message takes five times as long
# eager as captured: most of its latency is the *launch*. From 25 MiB on an all-reduce
# takes the same in both. Differences of 10 or 20 us are noise: 5 MiB under 1 MiB, say.
#
# And the two halves cost more than a second latency: in the last row a reduce-scatter and
# an all-gather reach less bus bandwidth than an all-reduce. Our model has one bandwidth
# for all three.

# %% [markdown]
# ## 11. Where the model lies
#
# On the board nothing slows anything: a hidden message is free. On GPUs the collective's
# kernel takes processors and memory bandwidth from the matmul beside it, and gets in only
# where a kernel ends.
#
# `is_completed()` on the virtual cluster answers yes once all ranks have come, and lets
# the CPU wait for the rest. On GPUs it answers at once, and a loop may do other things.
# And on gloo `wait()` blocks the *CPU*: code that forgets a wait may be right there, and
# wrong on NCCL.
#
# ## In production
#
# - PyTorch: `WorkNCCL::synchronizeStream` in
#   `torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp` is what `wait()` comes down to: the
#   *current* stream waits for an event of NCCL's stream, and the work lets go of the
#   tensors that it kept alive.
# - FSDP2: `post_backward` in `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`
#   limits reduce-scatters in flight as section 5 found it: the *current* stream waits for
#   the oldest one's event. The limit is 1, and 2.13 lets you raise it
#   (`set_reduce_scatter_max_input_buffers`).
# - Megatron-LM: `start_grad_sync` and `finish_grad_sync` in
#   `megatron/core/distributed/param_and_grad_buffer.py`: one coalescing manager around
#   all buckets of a group, one handle to wait for.
# - vLLM: `tensor_model_parallel_all_reduce` in `vllm/distributed/communication_op.py`: on
#   the current stream; for small messages a kernel of its own
#   (`custom_all_reduce.py`), since there only latency counts.
#
# Further reading: P. Patarasuk and X. Yuan, *Bandwidth Optimal All-reduce Algorithms for
# Clusters of Workstations*, JPDC 2009: the ring.
