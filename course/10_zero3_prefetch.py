# %% [markdown]
# # When should weights arrive?
#
# **Lab 10: ZeRO stage 3 and prefetch.** Core: two sittings of 49 and 47 minutes, with a
# door after section 3. Extras: 80 more. You need no GPU.
#
# After the core you can
#
# - say what stage 3 moves, when, and which bytes it frees;
# - write a **prefetcher**, which gathers weights while others compute, in a ring of buffers;
# - choose its depth for a model, a link and a memory.
#
# In the extras you send gradients while the backward pass goes on, and repair a prefetcher.
#
# It builds on lab 04: a collective with `async_op=True` travels beside the computation,
# and `work.wait()` makes the *current stream* wait. Nothing of FSDP is needed.
#
# **How it works.** Run the cells from top to bottom. A check tells you what it saw, in
# numbers, and draws what *your* code did. No exercise needs the one before it: where
# yours is not finished, the course's own runs in its place and the cell says so.

# %% name="setup"
import math

import torch
import torch.distributed as dist

import overlaplab as ol
from overlaplab import streams, view
from overlaplab.grading import check
from overlaplab_course import lab10 as lab

MIB = 2**20

# %% [markdown]
# ## 1. The waste (12 minutes)
#
# Four GPUs train one GPT. With data parallelism each holds *all* parameters, gradients
# and optimizer states. With **stage 3** of ZeRO (FSDP is another name for it) each rank keeps
# only a quarter of them: its **shards**. The weights of a layer are gathered when it computes,
# and given back afterwards.


# %% name="train"
def train(sharded, prefetch=0, layers=6):
    model = lab.make_gpt(layers)  # 1024 wide, bfloat16
    if sharded:
        trainer = ol.Zero3(model, prefetch=prefetch)
        parameters = trainer.shards()
    else:
        trainer = ol.BucketedReducer(model)  # averages gradients, as DDP does
        parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, fused=True)
    tokens = torch.randint(256, (4, 1024))
    for step in range(2):
        with streams.step(step):
            model(tokens, targets=tokens).backward()
            trainer.wait()
            optimizer.step()
            optimizer.zero_grad()


# %% [markdown]
# The virtual cluster runs it and writes down what each GPU holds, by kind. Here is data
# parallelism. The link is InfiniBand between four nodes.

# %% name="replicated"
replicated = lab.record(train, False)
kept = ("parameters", "gradients", "states")
held = lab.held_mib(replicated)
print(lab.kinds_table({"data parallel": replicated}))
print(f"\n{' + '.join(kept)}: {sum(held[kind] for kind in kept):.0f} MiB")

# %% [markdown]
# Activations are the same either way. So are `workspaces`, memory that the library for matrix
# products keeps for itself. Sharding is about the other kinds.
#
# **Predict.** With stage 3 over four ranks, how many MiB does a rank hold in the place of
# the sum above? A quarter of the sum is always there. Add what one layer needs while it
# computes: its gathered weights, its full gradient, and the buffer from which that gradient
# leaves. Nearly all parameters are in six equal layers.

# %% name="predict-held" kind="lab-only"
held_mib = None

# %% name="predicted-held" kind="solution-only"
held_mib = round(583 / 4 + 3 * 145 / 6)

# %% name="sharded" fold=true
on_demand_run = lab.record(train, True)
both = {"data parallel": replicated, "stage 3, on demand": on_demand_run}
lab.side_by_side("MiB", held_mib, f"{lab.all_but_activations(on_demand_run):.0f}")
print(lab.kinds_table(both))

# %% [markdown]
# The number is the sum of the column without activations and workspaces. Read it by kind:
#
# - `shards` and `states` are a quarter of what they were.
# - `gathered` is *one* layer: all that is left of the full weights.
# - `gradients` is a quarter, and besides most of one layer's full gradient.
# - `communication` is the buffer from which that gradient leaves.
# - `parameters` is the table of positions. It is not trained, and every rank has it whole.
#
# So memory is won. What does that cost?

# %% name="moved"
for name, run in both.items():
    print(f"{name:<20} {lab.wire_mib(run):5.0f} MiB cross each link in a step")
ratio = lab.wire_mib(on_demand_run) / lab.wire_mib(replicated)
print(
    f"{ratio:.2f} times as many: weights come twice, for the forward and the backward"
)

# %% [markdown]
# A gather is half an all-reduce, and so is a **reduce-scatter**, which adds up all ranks' gradients
# and leaves each rank its part of the sum (lab 04). Data parallelism sends two halves. Stage 3 sends
# three: gather, gather again, reduce-scatter. That would be 1.5 times as many bytes. It is a little
# less, because the last layer is still there when the backward pass begins.
#
# And here is *when* they travel:

# %% name="waste"
view.draw(lab.step_of(on_demand_run), title="stage 3, on demand", memory=True)

# %% name="waste-numbers"
view.table({name: lab.step_of(run) for name, run in both.items()})

# %% [markdown]
# `default` computes, `comm:1` gathers, `comm:2` sends gradients. Look at the empty space
# in `default`: each layer waits for its own weights, though everybody knew which layer
# comes next.

# %% [markdown]
# ## 2. Shards (24 minutes)
#
# All weights of a layer travel in one message. So they lie flat in a row, one behind the other.
# Each rank has an equal part of that row. A part may end in the middle of a weight:

# %% name="row" fold=true
print(lab.cut_text([("W", (5, 3)), ("b", (5,)), ("scale", ())], num_ranks=4))

# %% [markdown]
# So you cannot find a weight's full shape from its shard. "Shard times ranks" is wrong as soon as
# something does not divide. You have to keep the shapes.
#
# **Exercise 10.1.** Write both ends.
#
# - `shard(weights)`: a list of whole tensors of one dtype. Return this rank's part of the row,
#   flat. All parts have the same size, the smallest that holds the row; fill the end of the row
#   with zeros. The whole weights are freed afterwards, so the shard must not keep them alive.
# - `unshard(slot, shapes)`: `slot` is flat. The gathered row stands at its beginning, and the slot
#   may be longer than the row. Return the weights as **views** of the slot, in `shapes`. Nothing
#   is copied.
#
# You need `dist.get_rank()` and `dist.get_world_size()`. About 6 lines and 6 lines. Some weights
# have shape `()`, and some have no elements.
#
# <details><summary>Hint: rounding up</summary>
#
# `size = -(-flat.numel() // n)`. Make a row of `n * size` zeros and copy into its front.
#
# </details>
# <details><summary>Hint: what keeps memory alive</summary>
#
# A slice shares the memory of the whole row. `.clone()` has its own.
#
# </details>


# %% name="shards" kind="exercise" exercise="10.1"
def shard(weights):
    """This rank's part of `weights`: flat, as large as every other rank's."""
    ### BEGIN SOLUTION
    flat = torch.cat([weight.flatten() for weight in weights])
    size = -(-flat.numel() // dist.get_world_size())
    row = flat.new_zeros(size * dist.get_world_size())
    row[: flat.numel()] = flat
    return row[dist.get_rank() * size :][:size].clone()
    ### END SOLUTION


def unshard(slot, shapes):
    """The weights in the gathered row at the beginning of `slot`: views of it."""
    ### BEGIN SOLUTION
    views, begin = [], 0
    for shape in shapes:
        end = begin + math.prod(shape)
        views.append(slot[begin:end].view(shape))
        begin = end
    return views
    ### END SOLUTION


# %% name="check-shards" kind="check" exercise="10.1" points=2
_ = check("10.1", shard, unshard)

# %% [markdown]
# Views are the trick of the fast implementations: the weights *are* part of the slot. When a gather
# has filled the slot, the layer has its weights, with no copy and no allocation.

# %% [markdown]
# ## 3. One layer at a time (13 minutes)
#
# From here on you work with a small stack of equal layers, on a board with round numbers. A gather
# takes 2 ms, and a layer's forward 8 ms. Each layer is a `unit`:
#
# | `unit`: one layer on this rank | |
# |---|---|
# | `unit.shard` | this rank's part of its weights, flat |
# | `unit.numel` | how many elements a gather brings: all ranks' parts together |
# | `unit.forward(x, slot)` | computes with the gathered weights in `slot` |
# | `unit.backward(grad, slot, full_grad)` | for section 6, an extra |
# | `unit.grad` | this rank's part of its gradient, for section 6 |
#
# The forward pass asks for weights, one layer after the other. `weights` is an iterator: `next`
# gives a slot, and whatever is launched next on the current stream may read the weights in it.


# %% name="forward" reference=true
def forward(x, units, weights):
    for unit in units:
        slot = next(weights)  # the gathered weights of this unit
        x = unit.forward(x, slot)
        del slot  # so that nothing here keeps it alive
    return x


# %% [markdown]
# **The API of this screen.** `lab.all_gather(output, input)` puts all ranks' `input` one
# behind the other into `output`. It runs on the current stream, in line with the
# computation. (torch: `dist.all_gather_into_tensor`, since 2.13 `dist.all_gather_single`.)
# `lab.new_slots(units, number)`: a list of flat tensors, each with room for the largest
# unit.
#
# **Exercise 10.2.** Write `on_demand(units)`, a generator.
#
# - `units` are in the order of their use; one that is used twice is there twice.
# - For each, gather its weights and `yield` a slot. Its first `unit.numel` elements are the
#   weights.
# - At most *one* layer's gathered weights exist at any time.
#
# `yield` hands out the slot. Your function stops there until the next slot is asked for. About 4
# lines.
#
# <details><summary>Hint: one slot</summary>
#
# Make it before the loop. All layers share it.
#
# </details>
# <details><summary>Hint: the gather</summary>
#
# `lab.all_gather(slot[: unit.numel], unit.shard)`
#
# </details>


# %% name="on-demand" kind="exercise" exercise="10.2" reference=true
def on_demand(units):
    """Yield the gathered weights of each unit, one layer at a time."""
    ### BEGIN SOLUTION
    (slot,) = lab.new_slots(units, 1)
    for unit in units:
        lab.all_gather(slot[: unit.numel], unit.shard)
        yield slot
    ### END SOLUTION


# %% name="check-on-demand" kind="check" exercise="10.2" points=2
_ = check("10.2", on_demand)
lab.keep("10.2", on_demand)

# %% name="on-demand-seen" fold=true
demand = lab.play(lab.mine_or_ours("10.2"), stack=lab.SMALL)
view.draw(lab.drawn(demand), title="on demand, the forward of 6 layers")

# %% [markdown]
# How to read it: `cpu` launches and runs ahead; `default` computes; `slot 0` shows when the
# slot is filled and when it is used. G2 gathers layer 2, and F2 is its forward. A gap behind a G
# means: the slot is full and waits for its layer. `saved` in the title is computing +
# communication - step. Nothing overlaps here, and the step has its first launch besides: so it is
# a little below zero.
#
# The figure of the check has a backward, too, the course's own: B0 is that of layer 0, and
# `buffer 0` and `buffer 1` hold gradients on their way.
#
# And the forward of 24 layers:

# %% name="on-demand-24"
demand_ms = lab.play(lab.mine_or_ours("10.2"), stack=lab.EQUAL).step_ns / 1e6
print(f"24 x (2 + 8) ms: the step takes {demand_ms:.0f} ms")

# %% [markdown]
# **A door.** You can shard weights and gather them when a layer needs them. Nothing overlaps yet.
# This is a good place to stop for today. When you come back, run all cells once: what you solved
# is in the notebook.

# %% [markdown]
# ## 4. Prefetch (26 minutes)
#
# While one layer computes, the weights of the next can travel, into another slot. A prefetcher of
# **depth** d gathers d layers ahead. It needs d + 1 slots: one for the layer that computes, and d
# for those that come. The slots are used in turn: they are a **ring**.
#
# **Predict.** The forward of 24 layers again, 2 ms per gather and 8 ms per layer. How long is
# it with depth 1? And with depth 5?

# %% name="predict-depths" kind="lab-only"
depth_1_ms, depth_5_ms = None, None

# %% name="predicted-depths" kind="solution-only"
depth_1_ms, depth_5_ms = 194, 190

# %% name="depths-seen" fold=true
seen_ms = {d: lab.play_ours(d, lab.EQUAL).step_ns / 1e6 for d in (0, 1, 2, 5)}
lab.side_by_side("depth 1, in ms", depth_1_ms, f"{seen_ms[1]:.0f}")
lab.side_by_side("depth 5, in ms", depth_5_ms, f"{seen_ms[5]:.0f}")

# %% [markdown]
# Depth 1 hides every gather but the first: 2 + 24 x 8 ms. There is nothing left for depth
# 5 to hide. Here is what you are about to build, at depth 1: CPU, two streams, the ring.

# %% name="picture-ring" fold=true
lab.ring_of_slots()

# %% [markdown]
# Look at the two arrows. A forward waits until its weights are there, and a gather waits until
# the slot that it fills has been read. Now the same as it runs:

# %% name="target" fold=true
target = lab.play_ours(1, lab.SMALL)
view.draw(lab.drawn(target), title="depth 1: the next layer travels while one computes")

# %% [markdown]
# Read a slot from left to right: filled, used, filled again. G2 overwrites F0's weights, so it
# cannot start before F0 has ended. But then it can start at once.
#
# **The API of this screen.** `lab.all_gather(output, input, async_op=True)` returns a
# `Work` at once. The gather starts when two things are over: all that was launched on the *current
# stream* before it, and the messages before it. After `work.wait()`, whatever you launch on the
# current stream runs after the gather.
#
# **Exercise 10.3.** Finish `prefetched(units, depth)`, a generator like `on_demand`. The ring is
# there. Three places are yours:
#
# 1. `launch(i)` launches the gather of use number i into its slot, and keeps its work. (2 lines)
# 2. Before the loop: launch the gathers that come before the first turn. (2 lines)
# 3. In the loop, turn i: launch one gather more, wait for the gather of use i, and `yield` its
#    slot. Which gather is the one more? And in which order do you do the three? (3 lines)
#
# What the check asks for:
#
# - `units` as before, in the order of their use. For a whole step that is one list: the units of the
#   forward, then those of the backward.
# - At most `depth + 1` layers' gathered weights exist at any time.
# - Each gather starts as soon as both its slot and the wire are free. `depth` may be 0, and it may
#   be larger than the number of units.
# - The CPU never waits.
#
# <details><summary>Hint: which slot?</summary>
#
# Use number i takes slot `i % (depth + 1)`.
#
# </details>
# <details><summary>Hint: one gather more</summary>
#
# When the generator is asked for use i, layer i - 1 has just been launched. A gather that you
# launch *now* starts after layer i - 1, so it may fill the slot of use i - 1. The next use of that
# slot is use i + depth.
#
# </details>
# <details><summary>Hint: in which order?</summary>
#
# Launch it *before* the `yield` of use i. A gather that is launched behind layer i waits for
# layer i, beside which it should travel.
#
# </details>
# <details><summary>Hint: before the loop</summary>
#
# Turn 0 launches the gather of use `depth`. Those of the `depth` uses before it have no turn.
#
# </details>


# %% name="prefetched" kind="exercise" exercise="10.3" reference=true
def prefetched(units, depth):
    """Yield the gathered weights of each unit; `depth` units ahead are on their way."""
    slots = lab.new_slots(units, depth + 1)
    works = {}  # by number of the use

    def launch(i):
        if i < len(units):
            ### BEGIN SOLUTION
            full = slots[i % len(slots)][: units[i].numel]
            works[i] = lab.all_gather(full, units[i].shard, async_op=True)
            ### END SOLUTION

    ### BEGIN SOLUTION
    for i in range(depth):
        launch(i)
    ### END SOLUTION
    for i in range(len(units)):
        ### BEGIN SOLUTION
        launch(i + depth)  # its slot: what was in it has been launched before
        works.pop(i).wait()
        yield slots[i % len(slots)]
        ### END SOLUTION


# %% name="check-prefetched" kind="check" exercise="10.3" points=4
_ = check("10.3", prefetched)
lab.keep("10.3", prefetched)

# %% [markdown]
# The check ran forward and backward on stacks that you have not seen, with a fast link and with a
# slow one. On the slow link every late launch makes the step longer. A prefetcher that gathers
# everything at once is as fast, so the check counts bytes, too.

# %% name="again"
whose = lab.whose("10.3")
steps = {"on demand": lab.drawn(demand)}
for depth in (1, 2):
    run = lab.play(lab.mine_or_ours("10.3"), depth, stack=lab.SMALL)
    steps[f"{whose}, depth {depth}"] = lab.drawn(run)
view.draw_many(steps)

# %% [markdown]
# ## 5. How deep? (19 minutes)
#
# With equal layers the answer is short. Let a gather take $T_m$ and a layer $T_c$. With
# depth 0 the forward of $L$ layers takes $L\,(T_m + T_c)$. With any depth from 1 on,
#
# $$\max(T_m + L\,T_c,\; L\,T_m + T_c)$$
#
# In the first term the GPU sets the pace: once the first gather is over, it never waits. In the second
# the wire sets the pace: it never waits, and the last layer computes after the last gather.


# %% name="closed-form"
def closed_form_ms(layers, gather_ms, compute_ms):
    return max(
        gather_ms + layers * compute_ms,  # the GPU sets the pace
        layers * gather_ms + compute_ms,  # the wire does
    )


print(f"by the formula {closed_form_ms(24, 2, 8)} ms")
for depth, ms in seen_ms.items():
    slots = lab.slots_alive(lab.play_ours(depth, lab.EQUAL))
    print(f"depth {depth}: {ms:.0f} ms, {slots:.0f} layers in memory")

# %% [markdown]
# So for equal layers depth 1 is enough. But in real models layers differ: there may be a large
# embedding, a layer with many experts, a few cheap layers in a row. Here two of eight layers hold a
# table. It takes long to gather and costs nothing to compute:

# %% name="uneven-layers" fold=true
print(lab.layers_table(lab.play_ours(0, lab.UNEVEN)))

# %% [markdown]
# **Predict.** From which depth on does the step get no shorter?

# %% name="predict-least" kind="lab-only"
least_depth = None

# %% name="predicted-least" kind="solution-only"
least_depth = 3

# %% name="uneven" fold=true
uneven = {d: lab.play_ours(d, lab.UNEVEN) for d in range(6)}
uneven_ms = {d: run.step_ns / 1e6 for d, run in uneven.items()}
least = min(d for d in uneven_ms if uneven_ms[d] < 1.001 * min(uneven_ms.values()))
lab.side_by_side("the least depth", least_depth, least)
lab.draw_depths({"24 equal layers": seen_ms, "two of eight with a table": uneven_ms})

# %% name="uneven-drawn" fold=true
view.draw_many({f"depth {d}": lab.drawn(uneven[d]) for d in (1, least)})

# %% [markdown]
# At depth 1 the long gather starts one layer ahead, which is too late. At depth 2 it starts earlier,
# with two layers to compute beside it. The price is memory: each slot has room for the *largest*
# layer.
#
# **Exercise 10.4.** Write `choose_depth` for models and links that you have not seen.
#
# - `gather_ms[i]`, `compute_ms[i]`: how long use number i gathers, and how long it computes.
# - `layer_mib`: what one slot takes. `memory_mib`: what all slots together may take.
# - A depth counts if its slots fit; 0 always does. Of those, return the *least* that reaches the
#   shortest step.
#
# The check allows a step that loses up to a fifth of what there was to gain. It does not allow a
# slot that saves nothing. No constant passes. The loop that times a depth is begun for you: about 4
# lines there and 2 at the end.
#
# <details><summary>Hint: time a depth</summary>
#
# Go through the uses in order. The gather of use i starts when the gather before it has ended *and*
# use i - depth - 1 has computed, whose slot it fills. Use i computes when its gather and use i - 1
# have ended.
#
# </details>
# <details><summary>Hint: the least</summary>
#
# `min(depths, key=step_ms)` takes the first of several that are equal. (`step_ms` rounds, so that
# the last digit of a sum does not decide.)
#
# </details>


# %% name="choose-depth" kind="exercise" exercise="10.4"
def choose_depth(gather_ms, compute_ms, layer_mib, memory_mib):
    """The least depth with the shortest step that fits into the memory."""

    def step_ms(depth):
        wire, computed = 0, 0  # when the last gather ends, and the last layer
        ends = []  # when each layer so far has computed
        for i, (gather, compute) in enumerate(zip(gather_ms, compute_ms, strict=True)):
            ### BEGIN SOLUTION
            free = ends[i - depth - 1] if i > depth else 0
            wire = max(wire, free) + gather
            computed = max(computed, wire) + compute
            ### END SOLUTION
            ends.append(computed)
        return round(computed, 6)

    ### BEGIN SOLUTION
    most_slots = min(int(memory_mib // layer_mib), len(gather_ms))
    return min(range(most_slots), key=step_ms)
    ### END SOLUTION


# %% name="check-choose-depth" kind="check" exercise="10.4" points=2
_ = check("10.4", choose_depth)

# %% [markdown]
# ## Takeaways (2 minutes)

# %% name="takeaways" fold=true
full_mib, part_mib = map(lab.all_but_activations, (replicated, on_demand_run))
first_ms = lab.drawn(target).report().exposed_ns / 1e6
print(f"""1. Stage 3 over four ranks holds {part_mib:.0f} MiB instead of {full_mib:.0f}, and sends {ratio:.1f} times
   as many bytes. Gathered weights are depth + 1 layers of it.
2. With equal layers depth 1 reaches the best step: {seen_ms[1]:.0f} ms instead of {seen_ms[0]:.0f}, and depth 5
   no less. With two large layers of eight it takes depth {least}: {uneven_ms[least]:.0f} ms instead of
   {uneven_ms[1]:.0f} at depth 1. Compute it; do not guess.
3. In the forward only the first gather is exposed: {first_ms:.0f} of {target.step_ns / 1e6:.0f} ms. A gather starts
   after all that was launched before it, so launch it before the layer.""")

# %% [markdown]
# **Tomorrow, in your own loop.** Stage 3 with the prefetch of this lab:
#
# ```python
# zero = ol.Zero3(model)
# optimizer = torch.optim.AdamW(zero.shards(), fused=True)
# loss_of(model, batch).backward()
# zero.wait()
# optimizer.step()
# ```
#
# `print(zero.summary())` tells you the bytes before you run. With FSDP 2 you choose the depth by the
# modules that you give to `set_modules_to_forward_prefetch`.
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
# ## 6. The backward pass (30 minutes)
#
# The backward pass needs the weights again, in reverse. Your prefetcher can do that already: you
# give it the units, and then the units reversed. (The last layer stands there twice in a row and is
# gathered twice. `ol.Zero3` spares the second gather, as you saw in section 1.)
#
# Gradients go the other way. Each rank computes the *whole* gradient of a layer from its own data,
# and a reduce-scatter leaves each rank its part of the sum.
#
# **The API of this screen.** `unit.backward(grad, slot, full_grad)` takes the gradient of the
# layer's output, writes the weights' gradient into `full_grad` (flat, `unit.numel`
# elements) and returns the gradient of its input.
# `lab.reduce_scatter(unit.grad, full_grad, async_op=True)` returns a `Work`. Until it has
# ended, nobody may write `full_grad`.
#
# **Predict.** A layer's backward takes 16 ms, and a reduce-scatter 2. A whole step has 24 layers,
# forward and backward. How many ms does it take, if everything is hidden that can be?

# %% name="predict-step" kind="lab-only"
step_ms = None

# %% name="predicted-step" kind="solution-only"
step_ms = 576

# %% name="step-seen" fold=true
whole = lab.play_ours(1, lab.EQUAL, backward=True)
lab.side_by_side("the step in ms", step_ms, f"{whole.step_ns / 1e6:.0f}")
exposed_ms = lab.drawn(whole).report().exposed_ns / 1e6
print(f"24 x (8 + 16) ms of computing; exposed: {exposed_ms:.0f} ms")

# %% [markdown]
# Two messages cannot be hidden: the first gather has nothing before it, the last
# reduce-scatter nothing behind it.
#
# **Exercise 10.5.** Write `backward(grad, units, weights)`.
#
# - `units`: in the order of the backward pass. `next(weights)` gives their slots in turn;
#   `del` a slot when its unit has computed, as `forward` does.
# - Afterwards each `unit.grad` holds this rank's part of the *mean* over the ranks, for
#   whatever is launched next on the current stream.
# - At most *two* layers' full gradients exist at any time. The computation goes on while they
#   travel. The CPU never waits.
#
# About 14 lines.
#
# <details><summary>Hint: two buffers in turn</summary>
#
# `buffers = lab.new_slots(units, 2)`. Unit number i writes `buffers[i % 2][: unit.numel]`.
# Before it does, what that buffer sent two units ago must have left.
#
# </details>
# <details><summary>Hint: the mean</summary>
#
# A reduce-scatter adds up. Divide `unit.grad` by `dist.get_world_size()` when you have
# waited for it.
#
# </details>


# %% name="backward" kind="exercise" exercise="10.5" reference=true
def backward(grad, units, weights):
    """Fill each `unit.grad` with this rank's part of the mean gradient."""
    ### BEGIN SOLUTION
    buffers, works = lab.new_slots(units, 2), [None, None]
    for i, unit in enumerate(units):
        full = buffers[i % 2][: unit.numel]
        slot = next(weights)
        if works[i % 2] is not None:
            works[i % 2].wait()  # the buffer has been sent
        grad = unit.backward(grad, slot, full)
        del slot
        works[i % 2] = lab.reduce_scatter(unit.grad, full, async_op=True)
    for work in works:
        if work is not None:
            work.wait()
    for unit in units:
        unit.grad /= dist.get_world_size()
    ### END SOLUTION


# %% name="check-backward" kind="check" exercise="10.5" points=3
_ = check("10.5", backward)
lab.keep("10.5", backward)

# %% [markdown]
# Prefetcher and backward together are a stage 3. Here is a whole step of both on three layers: yours
# where they passed. S2 sends the gradient of layer 2. A backward is two matrix products, so
# `default` has B2 twice. B2 writes `buffer 0`, and nobody may write it again until S2 has ended.

# %% name="whole-step"
step = lab.play(
    lab.mine_or_ours("10.3"),
    1,
    stack=lab.THREE,
    backward=lab.mine_or_ours("10.5"),
)
view.draw(lab.drawn(step), title="forward and backward, depth 1")

# %% [markdown]
# ## 7. Repair (17 minutes)
#
# Here are two prefetchers with faults that people really make. Your number picks one of them, and a
# stack in which one layer has a table. Run it and look. A finding is two operators that touch the
# same memory and that nothing orders (lab 03). If a layer starts before its weights are there, the
# figure shows each slot in two lanes: one for filling it, one for reading it.

# %% name="my-number"
my_number = 6  # any whole number: your day of birth, your desk

# %% name="repair-case"
case = lab.repair_case(my_number)
print(case)


# %% name="wide" kind="exercise" exercise="10.6" broken=true reference=true
def wide(units, depth):
    ahead, coming = iter(units), []
    ### BEGIN SOLUTION
    free = lab.new_slots(units, depth + 1)
    ### END SOLUTION
    ### BEGIN STUB
    # rank, n = dist.get_rank(), dist.get_world_size()
    # free = [s.new_empty(n * s.numel()) for s in lab.new_slots(units, depth + 1)]
    ### END STUB

    def fetch():
        unit = next(ahead, None)
        if unit is None:
            return
        slot = free.pop(0)
        ### BEGIN SOLUTION
        work = lab.all_gather(slot[: unit.numel], unit.shard, async_op=True)
        ### END SOLUTION
        ### BEGIN STUB
        # mine = unit.shard.new_zeros(n, unit.shard.numel())
        # mine[rank] = unit.shard  # my part in its place, zeros elsewhere
        # full = slot[: n * unit.numel]
        # work = lab.all_gather(full, mine.flatten(), async_op=True)
        ### END STUB
        coming.append((slot, work))

    for _ in range(depth):
        fetch()
    for unit in units:
        fetch()
        slot, work = coming.pop(0)
        work.wait()
        ### BEGIN SOLUTION
        yield slot[: unit.numel]
        ### END SOLUTION
        ### BEGIN STUB
        # yield slot[: n * unit.numel].view(n, unit.numel).sum(0)
        ### END STUB
        free.append(slot)


# %% name="hasty" kind="exercise" exercise="10.6" broken=true reference=true
def hasty(units, depth):
    ahead, coming = iter(units), []
    free, gathering = lab.new_slots(units, depth + 1), streams.Stream()

    def fetch():
        unit = next(ahead, None)
        if unit is None:
            return
        slot = free.pop(0)
        gathering.wait_stream(streams.current_stream())  # who used the slot is done
        with streams.stream(gathering):
            lab.all_gather(slot[: unit.numel], unit.shard)
        ### BEGIN SOLUTION
        coming.append((slot, gathering.record_event()))
        ### END SOLUTION
        ### BEGIN STUB
        # coming.append(slot)
        ### END STUB

    for _ in range(depth):
        fetch()
    for _ in units:
        fetch()
        ### BEGIN SOLUTION
        slot, arrived = coming.pop(0)
        streams.current_stream().wait_event(arrived)
        ### END SOLUTION
        ### BEGIN STUB
        # slot = coming.pop(0)
        ### END STUB
        yield slot
        free.append(slot)


# %% name="repair-seen"
broken = case.play({"wide": wide, "hasty": hasty}[case.name])
print(f"{len(broken.findings)} findings")
print(case.gathers_text(broken))
view.draw(lab.drawn(broken), title=f"{case.name}, as you have it now")

# %% [markdown]
# The times in the title do not tell right from wrong. A race exposes hardly any communication,
# *because* nobody waits for it.
#
# **Exercise 10.6.** Fill in what *yours* does as given (run the cell above before you
# repair it). Then repair it, and leave the other one alone. Repaired, each layer gets its weights,
# no byte too many is sent, and gathers still travel beside the computing.
#
# - `"kind"`: `"race"`, `"too many bytes"`, `"late"` or `"never gathered"`.
# - `"layer"`: a race: the *last* layer that starts to compute before its weights are there
#   (compare its F with its G). Too many bytes: the layer whose gather brings most.
#
# <details><summary>Hint: wide</summary>
#
# What has to be sent of a layer by one rank? What does this one send?
#
# </details>
# <details><summary>Hint: hasty</summary>
#
# There are two streams, and two waits are needed between them. One is there: a gather waits for the
# layer before it. Which one is missing? `wait_stream` would wait for all that the other stream
# holds, also for the gather that was just launched. An event marks one place in a stream:
# `gathering.record_event()`, then `streams.current_stream().wait_event(event)`.
#
# </details>

# %% name="diagnosis" kind="exercise" exercise="10.6"
### BEGIN SOLUTION
diagnosis = {"kind": case.kind, "layer": case.layer}
### END SOLUTION
### BEGIN STUB
# diagnosis = {"kind": None, "layer": None}
### END STUB

# %% name="check-repair" kind="check" exercise="10.6" points=2
_ = check("10.6", my_number, diagnosis, wide, hasty)

# %% [markdown]
# ## 8. The settings, in these terms (12 minutes)
#
# | | depth | keep weights for the backward | bound on what is gathered |
# |---|---|---|---|
# | `ol.Zero3` | `prefetch` | `reshard_after_forward=False` | the ring |
# | FSDP 2 | `set_modules_to_forward_prefetch`, `..._backward_prefetch`; default: 1 | `reshard_after_forward=False` | freed when used |
# | FSDP 1 | `forward_prefetch`, `backward_prefetch` | `SHARD_GRAD_OP` | `limit_all_gathers` |
# | DeepSpeed | `stage3_prefetch_bucket_size` | `stage3_max_reuse_distance` | `stage3_max_live_parameters` |
#
# Names promise little, so here is what the first two do. There are six equal layers on two ranks. A
# gather takes 2 ms, a forward 8 ms, and a launch nothing. Each line has the gathers of the forward +
# those of the backward, the most layers whose gathered weights exist at a time, and the step. The
# backward needs fewer than six gathers where weights are still in the ring when it begins. (FSDP 1
# refuses to run without a GPU.)

# %% name="settings"
for settings in ({"prefetch": 0}, {"prefetch": 1}, {"prefetch": 2}):
    print(lab.try_ours(**settings))
print(lab.try_ours(reshard_after_forward=False), end="\n\n")
for settings in ({}, {"forward": 2}, {"reshard_after_forward": False}):
    print(lab.try_fsdp2(**settings))

# %% [markdown]
# On equal layers no setting beats depth 1 by much. What differs is the memory. FSDP 2 holds
# more layers at the same depth: it gathers into one buffer and copies into another, and
# for a moment a layer is there twice.
#
# There are two traps in such settings. One: if weights are kept from the forward to the backward, a
# prefetch in the backward pass has nothing to gather. Two: DeepSpeed counts *elements*, not bytes
# and not layers. It takes the next tensors until they have that many elements.

# %% name="deepspeed-default"
sizes = [64 * 64, 64] * 6  # elements of the tensors to come: matrices and biases
print(f"a layer: {lab.LAYER_ELEMENTS} elements")
for bucket in (1, 64 * 64, 50_000_000):
    ahead = lab.deepspeed_ahead(bucket, sizes)
    print(f"stage3_prefetch_bucket_size {bucket}: {ahead} tensors ahead")
print(f"50_000_000, the default, is {50_000_000 * 2 / MIB:.0f} MiB in bfloat16")

# %% [markdown]
# **Exercise 10.7.** Fill in three wishes for the six layers above.
#
# - `"gathered once"`: settings of `lab.try_fsdp2` with which each layer is gathered once a step;
# - `"nothing to prefetch"`: settings that ask for a prefetch in the *backward* pass
#   (`backward=...`), where none is left to gather;
# - `"two layers ahead"`: the `stage3_prefetch_bucket_size` with which DeepSpeed gathers exactly
#   two of these layers ahead.
#
# <details><summary>Hint</summary>
#
# Print `lab.try_fsdp2(...)` and `lab.deepspeed_ahead(..., sizes)` for what you think. A layer is
# two tensors.
#
# </details>

# %% name="wishes" kind="exercise" exercise="10.7"
### BEGIN SOLUTION
wishes = {
    "gathered once": {"reshard_after_forward": False},
    "nothing to prefetch": {"reshard_after_forward": False, "backward": 2},
    "two layers ahead": 2 * lab.LAYER_ELEMENTS,
}
### END SOLUTION
### BEGIN STUB
# wishes = {
#     "gathered once": {},
#     "nothing to prefetch": {},
#     "two layers ahead": None,
# }
### END STUB

# %% name="check-wishes" kind="check" exercise="10.7" points=1
_ = check("10.7", wishes)

# %% [markdown]
# ## 9. Where does the time of a real step go? (6 minutes)
#
# Here are three layers of the GPT of section 1, with FSDP 2 and with `ol.Zero3`. On paper both
# prefetch in the same way. The table has what each does besides computing, and the step that the
# profile of an H200 predicts, launches included.


# %% name="two-of-a-kind"
def train_fsdp2(layers):
    model = lab.make_gpt(layers)
    lab.shard_with_fsdp2(model, list(model.blocks))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(256, (4, 1024))
    for step in range(2):
        with streams.step(step):
            model(tokens, targets=tokens).backward()
            optimizer.step()
            optimizer.zero_grad()


pair = {
    "FSDP 2": lab.record(train_fsdp2, 3),
    "ol.Zero3, prefetch=1": lab.record(train, True, 1, 3),
}
print(lab.costs_table(pair, ol.PROFILES["h200-nvlink"]))

# %% [markdown]
# Where `ol.Zero3` is ahead of FSDP 2, there are three reasons:
#
# - **copies**: FSDP 2 copies what it gathered into the parameters. With `ol.Zero3` parameters
#   are views of the slot, so it copies no weights. Half of what it does copy is gradients, on their
#   way into the buffers from which they leave. The other half is in the backward of attention, and
#   FSDP 2 has that too. The virtual cluster charges a copy what its bytes take.
# - **allocations**: FSDP 2 gives memory back and takes it anew for each layer; a ring is
#   made once. The virtual cluster counts them and charges *nothing*.
# - **CPU time**: hooks are Python. The virtual cluster charges each launch the same price and
#   the Python between launches *nothing*.
#
# So on GPUs expect a larger lead than in the table where the CPU sets the pace, and a smaller one
# where the GPU does.

# %% [markdown]
# ## 10. On real GPUs (7 minutes)
#
# Here is what GPUs did, stored: nothing is measured now. It is a whole step of a GPT: forward,
# backward, the averages of the gradients over the ranks, and the optimizer. `batch` is sequences on each rank. `ddp` shards nothing. `fsdp2` is FSDP 2 with its
# own prefetch, `fsdp2 prefetch 2` is told to gather two layers ahead in both passes. `ours` is
# `ol.Zero3`, depth 1; `ours kept` is `reshard_after_forward=False`.

# %% name="gpu-steps" fold=true
print(lab.gpu_table("median ms"), lab.gpu_table("peak GiB"), sep="\n\n")
print(f"\n{lab.gpu_machine()}")

# %% [markdown]
# `ddp` is the fastest in nearly every column: stage 3 buys memory, not time. Read the columns from
# right to left. With many sequences the GPU is busy all the time: the ways come close to one
# another, and stage 3 holds less.
#
# With few sequences the CPU sets the pace, and its times vary from run to run. That is why
# `fsdp2 prefetch 2` seems faster with two sequences than with one; do not believe it. Nor do we know
# why `ddp` holds less with two than with one.
#
# Here is the prediction beside it, launches included:

# %% name="gpu-predicted" fold=true
for batch in (2, 8):
    for way in ("fsdp2 prefetch 2", "ours"):
        seen = lab.gpu_number("median ms", way, batch)
        said = lab.gpu_number("predicted ms", way, batch)
        print(f"batch {batch}, {way}: predicted {said:.1f} ms,", end=" ")
        print(f"measured {seen:.1f}: {seen - said:+.1f} ms")
    said, seen = (
        lab.gpu_number(name, "fsdp2 prefetch 2", batch)
        - lab.gpu_number(name, "ours", batch)
        for name in ("predicted ms", "median ms")
    )
    print(f"batch {batch}, lead of ours: predicted {said:.1f} ms,", end=" ")
    print(f"measured {seen:.1f}: {seen / said:.2f} times as much\n")

# %% [markdown]
# At batch 8 the GPU sets the pace, and there is little to save. The prediction of FSDP 2 is a little
# too high, and ours is a few ms too low. So the measured lead is less than a quarter of the
# predicted one.
#
# At batch 2 both steps take longer than predicted, FSDP 2 by far. The virtual cluster does not
# charge the CPU time of hooks and of the allocator. So the measured lead is nearly four times the
# predicted one. Prefetch, the subject of this lab, makes no difference here: both have it.

# %% [markdown]
# ## 11. Where the model lies (3 minutes)
#
# The board's gathers and computations do not slow each other down; on GPUs they do, so
# hidden is not saved (lab 06). All ranks are equally fast here: nobody waits for a late one.
# Gathers and reduce-scatters queue in one communicator here; `ol.Zero3` has one for each.
# The board counts memory as the program asks for it. The profiles of GPUs (section 1) count the
# blocks of an allocator, but not the gaps between them. And a model must also fit while it is
# *made*: `ol.Zero3` can make it layer by layer, from the meta device.
#
# ## In production
#
# - FSDP 2: `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`, `unshard`,
#   `wait_for_unshard`, `_backward_prefetch`. It knows no list of uses: the order of the forward is
#   recorded, and the backward walks back along it.
# - DeepSpeed: `deepspeed/runtime/zero/partitioned_param_coordinator.py`, `fetch_sub_module`. It
#   records a trace in the first step, as `ol.Zero3` does, and follows it by elements.
# - Megatron-LM: `--overlap-param-gather` of its distributed optimizer gathers updated weights by
#   buckets, before the forward needs them; between steps every rank has them whole.
# - This package: `overlaplab/techniques/zero/plan.py` is 10.3 as data, `ring.py` the slots. Print
#   `zero.plan` after a step.
#
# Further reading: Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data
# Parallel*, VLDB 2023.
