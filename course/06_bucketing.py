# %% [markdown]
# # How large should a message be?
#
# **Lab 06: gradient bucketing.** Core: three sittings of 50, 52 and 38 minutes, with doors
# after sections 3 and 5. Extras: 70 more. You need no GPU.
#
# After the core you can
#
# - say what a message costs, from two numbers;
# - write a **reducer**, which averages the gradients over the ranks, and sends them while the
#   backward pass still runs;
# - choose a bucket size for a model and a link, and name what bounds the step.
#
# You know a PyTorch training loop. A **rank** is one of the processes that train together, one
# process per GPU. An all-reduce adds up the tensors of all ranks. You need nothing else,
# though labs 00 to 05 help.
#
# **How it works.** Run the cells from top to bottom. A check tells you what it saw, in
# numbers, and draws what *your* code did. No exercise needs the one before it: where
# yours is not finished, the course's own runs in its place and the cell says so.

# %% name="setup"
import math
from dataclasses import replace

import torch
import torch.distributed as dist
from IPython.display import display

import overlaplab as ol
from overlaplab import streams, view
from overlaplab.grading import check, solved
from overlaplab.hardware import collective_ns
from overlaplab.models import Transformer, TransformerConfig
from overlaplab_course import lab06 as lab
from overlaplab_course.lab06.given import ReducerState

MIB = 2**20

# %% [markdown]
# ## 1. The waste (13 minutes)
#
# Four GPUs hold the same transformer: 24 layers, 1024 wide, in bfloat16. Each works on other
# data. After the backward pass every gradient must be summed over the four.
#
# The step below sends each gradient as soon as it is complete: one **message** per gradient.


# %% name="train-step"
def train_step(sequences, vocabulary=256):
    config = TransformerConfig(
        num_layers=24, d_model=1024, num_heads=16, vocab_size=vocabulary
    )
    with lab.in_bfloat16():
        model = Transformer(config)
    lab.name_gradients(model)  # so that reports can call them by name

    works = []

    def send(param):  # runs when the gradient of `param` is complete
        works.append(dist.all_reduce(param.grad, async_op=True))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(send)

    tokens = torch.randint(vocabulary, (sequences, 1024))
    with ol.annotate("step"):
        model(tokens, targets=tokens).backward()
        for work in works:
            work.wait()


# %% [markdown]
# You don't have four GPUs here. The **virtual cluster** runs this very code. It computes shapes
# only (`fake=True`), and writes down what each GPU was told to do: a **program**. A hardware
# profile then says how long each operator takes.
#
# The link between the four nodes is Ethernet with 100 Gbit/s and 0.1 ms of latency. Each GPU
# works on 10 sequences of 1024 tokens.

# %% name="record-ethernet"
run = ol.run(train_step, 10, world_size=4, hardware=lab.ETHERNET, fake=True)
program = lab.cut(run.program)  # only what is labelled "step", without making the model

each = ol.replay(program, hardware=lab.ETHERNET)
sizes = lab.gradient_bytes(program)
print(f"{len(sizes)} gradients, together {sum(sizes) / MIB:.0f} MiB")
print(f"compute alone: {each.report().compute_ns / 1e6:.1f} ms")

latency_ms = lab.ETHERNET.link.latency_ns / 1e6
sent_ns = 1.5 * sum(sizes) * 1e9 / lab.ETHERNET.link.bytes_per_s  # 1.5: section 2
print(f"count: {len(sizes)} messages x {latency_ms:.1f} ms of latency,", end=" ")
print(f"{sum(sizes) / MIB:.0f} MiB at {sum(sizes) / sent_ns:.1f} GB/s")

# %% [markdown]
# The program can be timed again with other messages, without running it. `buckets=n` puts
# gradients that follow one another into one message of at most `n` bytes. With a large `n`
# there is one message for everything, at the end of the backward pass.
#
# **Predict.** One message per gradient, or one message for all: which step is longer? And how
# long is it, in ms? The last two lines above have the numbers. A step is as long as its
# computation, plus the communication that has no computation beside it. Type your guess.
# Nobody marks it.

# %% name="predict-waste" kind="lab-only"
longer = None  # "each" or "all"
longer_ms = None

# %% name="predicted-waste" kind="solution-only"
longer = "each"
longer_ms = 100

# %% name="waste" fold=true
one = ol.replay(program, hardware=lab.ETHERNET, buckets=sum(sizes))
worse = "each" if each.step_ns > one.step_ns else "all"
lab.side_by_side("the longer one", longer, worse)
lab.side_by_side(
    "its step in ms", longer_ms, f"{max(each.step_ns, one.step_ns) / 1e6:.0f}"
)
ends = {"one message per gradient": each, "one message for all": one}
view.draw_many(ends)

# %% [markdown]
# `default` is the GPU's compute **stream**: a queue whose work runs in order. `comm` is
# the **wire**. All four ranks do the same, so one is drawn.
#
# Above, the wire is busy from early on. Below, look at the empty (pale) space: the
# wire is idle while the GPU computes, then the GPU is idle while the wire works.
#
# Why is the upper step so long, then? Here is one message out of its middle.

# %% name="waste-zoom"
zoom, window = lab.one_message(each, program)
view.draw(zoom, title="one message per gradient, one of them", window=window)

# %% [markdown]
# The message has its gradient's name. It begins with 0.1 ms in which nothing moves (dotted), and
# so does every other message.
#
# Communication with no computation beside it is **exposed**; the rest is **hidden**. **Saved**
# is compute + communication - step. The table has these numbers, and the shares of the
# **critical path**: the chain of computing, sending and waiting for latency that sets the
# length of the step.

# %% name="waste-numbers"
view.table(ends)

# %% name="waste-lost"
best = min(lab.sweep(program, lab.ETHERNET, [10, 25, 50, 100]).values())
for name, timeline in ends.items():
    print(f"{name}: {100 * (1 - best / timeline.step_ns):.0f} % of the step is wasted")

# %% [markdown]
# Wasted compared with what? With the best of four sizes between the two ends. You will reach
# it by the end of this lab.
#
# **Predict.** Now the same model runs on one host with NVLink (7 us of latency, 340 GB/s), and
# each GPU works on 1 sequence. Which of the two ends is longer now?

# %% name="predict-nvlink" kind="lab-only"
longer_on_nvlink = None  # "each" or "all"

# %% name="predicted-nvlink" kind="solution-only"
longer_on_nvlink = "all"

# %% name="nvlink" fold=true
short_program = lab.cut(
    ol.run(train_step, 1, world_size=4, hardware=lab.NVLINK, fake=True).program
)
ends_on_nvlink = {
    "one message per gradient, NVLink": ol.replay(short_program, hardware=lab.NVLINK),
    "one message for all, NVLink": ol.replay(
        short_program, hardware=lab.NVLINK, buckets=sum(sizes)
    ),
}
each_ms, one_ms = (t.step_ns / 1e6 for t in ends_on_nvlink.values())
lab.side_by_side(
    "the longer one", longer_on_nvlink, "each" if each_ms > one_ms else "all"
)
print(f"one per gradient: {each_ms:.1f} ms; one for all: {one_ms:.1f} ms")
view.draw_many(ends_on_nvlink)

# %% [markdown]
# The answer flips. On the slow wire one late message costs most. On the fast wire many small
# messages do. No size is right everywhere. What decides?

# %% [markdown]
# ## 2. Warm-up: what does a message cost? (8 minutes)
#
# The simplest model has two numbers. A message of $m$ bytes takes
#
# $$T(m) = \alpha + \beta\, m$$
#
# **alpha** ($\alpha$) is its **latency**: what it costs to send nothing. **beta** ($\beta$) is
# the time that a byte takes, and $1/\beta$ is the **bandwidth**.
#
# Which bandwidth? The GPUs stand in a ring, and each sends to its neighbour only. To sum $m$
# bytes over $N$ ranks, each rank sends $2 (N-1)/N$ times $m$ bytes: with four ranks, 2 x 3/4
# = 1.5 times. So a link of 12 GB/s sums 8 GB of gradients per second. From here on
# $1/\beta$ is the speed of *gradients*.

# %% name="picture-ring" fold=true
lab.ring_all_reduce()

# %% [markdown]
# Here are three ranks, so 2 x 2/3 = 4/3. Count the arrows that leave rank 0: four, with a third
# of its gradients each.

# %% name="ring"
for name, hardware in (("Ethernet", lab.ETHERNET), ("NVLink", lab.NVLINK)):
    link_gbyte = hardware.link.bytes_per_s / 1e9
    print(f"{name}: the link moves {link_gbyte:.1f} GB/s", end=", ")
    print(f"{link_gbyte / 1.5:.1f} GB/s of gradients")

# %% [markdown]
# Here are five all-reduces, each measured alone on real GPUs.

# %% name="points"
points = lab.message_points()
for mib, us in points.items():
    print(f"{mib:>4} MiB {us:>5} us")
print(lab.machine("all_reduce_alone"))

# %% [markdown]
# **Exercise 6.0.** Find a line through these points. Type alpha in microseconds and the bandwidth
# in GB/s (1e9 bytes of gradients per second). The line must be within 10 % of the points at
# 0, 25 and 100 MiB. Then type which of the five sizes your line misses most.
#
# <details><summary>Hint: where is alpha?</summary>
#
# An empty message moves no bytes. The time that it takes is alpha.
#
# </details>
# <details><summary>Hint: where is the bandwidth?</summary>
#
# From 25 to 100 MiB there are 75 MiB more. How many microseconds more?
#
# </details>

# %% name="fit" kind="exercise" exercise="6.0"
### BEGIN SOLUTION
gbyte_per_s = 75 * MIB / ((points[100] - points[25]) * 1e3)  # bytes a ns
latency_us = points[100] - 100 * MIB / (gbyte_per_s * 1e3)
missed_mib = 1
### END SOLUTION
### BEGIN STUB
# latency_us = None
# gbyte_per_s = None
# missed_mib = None
### END STUB

# %% name="fit-drawn"
for mib, us in points.items():
    if latency_us is not None and gbyte_per_s is not None:
        line_us = latency_us + mib * MIB / (gbyte_per_s * 1e3)
        print(f"{mib:>4} MiB: measured {us:>5} us, your line {line_us:>5.0f} us")

# %% name="check-fit" kind="check" exercise="6.0" points=1
_ = check("6.0", latency_us, gbyte_per_s, missed_mib)

# %% [markdown]
# The virtual NVLink of this lab follows no line. It follows a measured curve, of all-reduces in
# a **CUDA graph**: a recorded step that the GPU repeats without the CPU. Here it is beside
# the same points.

# %% name="fit-profile" fold=true
if solved("6.0"):
    for mib, us in points.items():
        here_us = sum(collective_ns(lab.NVLINK, "all_reduce", 4, mib * MIB)) / 1e3
        print(
            f"{mib:>4} MiB: measured {us:>5} us, NVLink here {here_us:>5.0f} us",
            f"({here_us - us:+.0f})",
        )

# %% [markdown]
# Your line is good at four of the sizes, and too short at one. Remember which: a line is too
# kind to small messages.
#
# Why is a small message so much shorter in this lab? The points were measured **eager**: the
# CPU launched each message, and most of a small one is the time of that launch. In this lab
# a step is one CUDA graph, and launches cost nothing. Section 12 counts them. (The curve is of
# two GPUs, the points are of four. So large messages differ a little, too.)

# %% [markdown]
# ## 3. The plan: which gradients share a message? (27 minutes)
#
# The backward pass makes the *last* layer's gradients first. A **bucket** is a set of
# gradients that travel together. It can leave when its last gradient is there.

# %% name="picture-bucket" fold=true
lab.bucket_fills()

# %% [markdown]
# Look at the third frame: what does not fit opens the next bucket; nothing is split.
#
# **Exercise 6.1.** Write `plan_buckets(params, cap_bytes)`.
#
# - `params` are parameters in the order of registration. Their gradients arrive in *reverse*
#   order. A parameter with `requires_grad` False has no gradient: leave it out.
# - The gradients of a bucket are at most `cap_bytes` together. A gradient that is larger
#   than the cap is alone in its bucket. Never split a gradient.
# - A bucket has one dtype. Keep one open bucket per dtype. When the next gradient of that
#   dtype does not fit, close the bucket and open another.
# - Return a list of buckets. Each is a list of positions in `params`, in the order of
#   arrival. Buckets stand in the order in which they become full. A bucket is full when its
#   *last* gradient arrives.
# - Raise `ValueError` if `cap_bytes` is zero or less.
#
# About 15 lines. A gradient has `param.numel() * param.element_size()` bytes.
#
# <details><summary>Hint: one open bucket per dtype</summary>
#
# Keep a dictionary from dtype to the open bucket. Put each bucket into the result when you
# *open* it: then the last ones cannot get lost.
#
# </details>
# <details><summary>Hint: the order of the buckets</summary>
#
# Gradients arrive from high positions to low ones, so a bucket is full at its lowest position.
# Sort by that.
#
# </details>


# %% name="plan" kind="exercise" exercise="6.1" reference=true
def plan_buckets(params, cap_bytes):
    """Buckets of positions in `params`, in the order in which they become full."""
    ### BEGIN SOLUTION
    if cap_bytes <= 0:
        raise ValueError(f"cap_bytes is {cap_bytes}; expected 1 or more")
    buckets, open_bucket, room = [], {}, {}
    for position in reversed(range(len(params))):
        param = params[position]
        if not param.requires_grad:
            continue
        size = param.numel() * param.element_size()
        if param.dtype not in open_bucket or size > room[param.dtype]:
            open_bucket[param.dtype] = []
            room[param.dtype] = cap_bytes
            buckets.append(open_bucket[param.dtype])
        open_bucket[param.dtype].append(position)
        room[param.dtype] -= size
    return sorted(buckets, key=min, reverse=True)
    ### END SOLUTION


# %% name="check-plan" kind="check" exercise="6.1" points=2
_ = check("6.1", plan_buckets)
lab.keep("6.1", plan_buckets)

# %% [markdown]
# **A door.** You know what a message costs, and you have a plan of buckets. This is a good
# place to stop for today. When you come back, run all cells once: what you solved is in the
# notebook.

# %% [markdown]
# ## 4. The hook: send while you compute (26 minutes)
#
# A reducer has two halves: a hook, and a finish. Both work on one small object:
#
# | `ReducerState` | |
# |---|---|
# | `params` | the trainable parameters |
# | `plan` | `plan[b]`: positions in `params` of the gradients in bucket b; buckets leave in this order |
# | `buffers` | `buffers[b]`: a flat tensor with room for the gradients of b |
# | `missing` | `missing[b]`: how many gradients of b have not arrived in this step |
# | `works` | `works[b]`: what the launch of b returned; `None` before it is launched |
# | `bucket_of(param)` | the number of its bucket |
# | `pairs(b)` | for each gradient of b: its parameter, and its place in the buffer |
#
# The place is a view of the buffer, in the parameter's shape. `place.copy_(...)` writes into the
# buffer.

# %% [markdown]
# **The API of this screen.** After `param.register_post_accumulate_grad_hook(hook)` each backward
# pass calls `hook(param)` once, when `param.grad` is complete. The hook gets the *parameter*,
# not the gradient, and must return `None`.
#
# `dist.all_reduce(tensor, async_op=True)` sums `tensor` over all ranks. It returns a `Work` at
# once. The message starts when the current stream's earlier work and the message before it
# have ended.
#
# **Exercise 6.2a.** Begin with the simple case, in which all ranks fill their buckets in the
# same order. A hook counts down how many gradients of its bucket are missing. What must it do
# when the bucket is full? Add three lines:
#
# - copy each gradient of the bucket into its place (2 lines);
# - launch one all-reduce of the buffer, asynchronously, and keep its work in
#   `state.works[bucket]`. The default operation, the SUM, is right. Do not wait.


# %% name="simple-hook" kind="exercise" exercise="6.2a"
def install_simple_hooks(state: ReducerState) -> None:
    def hook(param):
        bucket = state.bucket_of(param)
        state.missing[bucket] -= 1
        if state.missing[bucket] == 0:
            ### BEGIN SOLUTION
            for member, place in state.pairs(bucket):
                place.copy_(member.grad)
            full = state.buffers[bucket]
            state.works[bucket] = dist.all_reduce(full, async_op=True)
            ### END SOLUTION

    for param in state.params:
        handle = param.register_post_accumulate_grad_hook(hook)
        state.handles.append(handle)


# %% name="check-simple-hook" kind="check" exercise="6.2a" points=1
_ = check("6.2a", install_simple_hooks)

# %% [markdown]
# The check ran your hooks, and then the course's `finish`, which you write in section 5. A
# reducer that sends everything after the backward pass has the right gradients, too. But this
# check refuses it, because it hides nothing.
#
# Now let the data of a rank decide which layers run first. Then rank 0 may fill bucket 1
# first, and rank 1 bucket 0. Messages pair up in the order of their launch: the first of
# rank 0 with the first of rank 1. With these hooks they would carry different buckets.
#
# **Exercise 6.2.** Write the hook for that case, inside `install_hooks`. What you do with a full
# bucket stays the same. Three rules:
#
# - Launch buckets in the order of the plan, on every rank, whatever arrives first.
# - Never wait in a hook.
# - Launch a bucket once, as early as that order allows. Mostly that is in the hook that fills
#   it. Where an earlier bucket is still missing something, it is in the hook that fills that one.
#
# About 10 lines.
#
# <details><summary>Hint: the order of the plan</summary>
#
# In each hook, go through the buckets from the first. Skip those that are launched. Stop at the
# first one that still misses a gradient. Launch the others.
#
# </details>
# <details><summary>Hint: full, but when?</summary>
#
# Count down: `state.missing[state.bucket_of(param)] -= 1`. A bucket is full at zero.
#
# </details>


# %% name="hook" kind="exercise" exercise="6.2" reference=true
def install_hooks(state: ReducerState) -> None:
    def hook(param):
        ### BEGIN SOLUTION
        state.missing[state.bucket_of(param)] -= 1
        for bucket, work in enumerate(state.works):
            if work is not None:
                continue
            if state.missing[bucket] > 0:
                return
            for p, place in state.pairs(bucket):
                place.copy_(p.grad)
            buffer = state.buffers[bucket]
            state.works[bucket] = dist.all_reduce(buffer, async_op=True)
        ### END SOLUTION

    for param in state.params:
        handle = param.register_post_accumulate_grad_hook(hook)
        state.handles.append(handle)


# %% name="check-hook" kind="check" exercise="6.2" points=3
_ = check("6.2", install_hooks)
lab.keep("6.2", install_hooks)

# %% [markdown]
# ## 5. The finish: wait, but only now (26 minutes)
#
# The backward pass is over. Some messages are still on the wire. And some buckets may never
# have been launched: a parameter that the loss does not use gets no gradient, so its hook
# never runs, and its bucket is never full.
#
# **The API of this screen.** `work.wait()` makes the GPU's *current stream* wait for the message.
# The CPU goes on. What you launch after it sees the sum; what you launched before it may not.
#
# **Exercise 6.3.** Write `finish(state)`. It is called on every rank after each backward pass.
# When it returns:
#
# - every bucket has been sent, in the order of the plan. A parameter whose `.grad` is `None` on
#   this rank contributes zeros;
# - every message has been waited for;
# - `param.grad` is the *mean* over the ranks (there are `dist.get_world_size()`);
# - the state is as it was before the backward pass: `missing[b]` counts all gradients of b
#   again, and each `works[b]` is `None`.
#
# A parameter that no rank used may end with zeros or with `None`. About 15 lines.
#
# <details><summary>Hint: buckets that were not launched</summary>
#
# Go through `state.works`. Where it is `None`, fill the buffer (`place.zero_()` where there is
# no gradient) and launch. Every rank does this, so no rank waits for ever.
#
# </details>
# <details><summary>Hint: writing back</summary>
#
# `param.grad = place / num_ranks` makes a new tensor. `param.grad.copy_(place)` writes into the
# old one, which must exist.
#
# </details>


# %% name="finish" kind="exercise" exercise="6.3" reference=true
def finish(state: ReducerState) -> None:
    ### BEGIN SOLUTION
    for bucket, work in enumerate(state.works):
        if work is None:  # some gradient never came
            for param, place in state.pairs(bucket):
                if param.grad is None:
                    place.zero_()
                else:
                    place.copy_(param.grad)
            buffer = state.buffers[bucket]
            state.works[bucket] = dist.all_reduce(buffer, async_op=True)
    for bucket, work in enumerate(state.works):
        work.wait()
        for param, place in state.pairs(bucket):
            param.grad = place / dist.get_world_size()
    state.missing = [len(bucket) for bucket in state.plan]
    state.works = [None] * len(state.plan)
    ### END SOLUTION


# %% name="check-finish" kind="check" exercise="6.3" points=3
_ = check("6.3", finish)
lab.keep("6.3", finish)

# %% [markdown]
# ### The same timeline again
#
# Plan, hooks and finish make a reducer. Here it trains the 24 layers on the Ethernet of section
# 1, with buckets of 25 MiB. The figure has the two ends of section 1 above it, on the same
# scale. Watch the gap.

# %% name="again"
mine = lab.record_reducer(
    lab.mine_or_ours("6.1"),
    lab.mine_or_ours("6.2"),
    lab.mine_or_ours("6.3"),
    sequences=10,
    bucket_mib=25,
)
whose = lab.whose("6.1", "6.2", "6.3")
so_far = {**ends, f"{whose}, 25 MiB": ol.replay(mine, hardware=lab.ETHERNET)}
view.draw_many(so_far)

# %% name="again-numbers"
view.table(so_far)

# %% [markdown]
# **A door.** Your reducer is whole. This is a good place to stop for today. What is left is to
# choose the size of its buckets. When you come back, run all cells once.

# %% [markdown]
# ## 6. Choose: how large, then? (35 minutes)
#
# Cut $M$ bytes into $n$ equal buckets. The backward pass takes $T_b$, so the first bucket is
# full after $T_b/n$. If the wire is slower than the backward pass, the messages then follow
# one another without a gap. From the start of the backward pass to the last byte it takes
#
# $$\frac{T_b}{n} + n\,\alpha + \beta M$$
#
# With few buckets the wire starts late. With many, each one pays alpha. The sum is smallest where
# the first two terms are equal, at
#
# $$n^* = \sqrt{T_b/\alpha}$$


# %% name="n-star"
def n_star(program, hardware):
    """Best number of equal buckets, by the formula; and their size in MiB."""
    timeline = ol.replay(program, hardware=hardware)
    backward_ns = lab.backward_ns(timeline)
    number = math.sqrt(backward_ns / hardware.link.latency_ns)
    return number, sum(lab.gradient_bytes(program)) / number / MIB


number, star_mib = n_star(program, lab.ETHERNET)
print(f"Ethernet: n* = {number:.0f}, buckets of {star_mib:.0f} MiB")

# %% [markdown]
# **Predict.** For which sizes, in MiB, is the step on Ethernet within 2 % of the best? Type the
# smallest and the largest.

# %% name="predict-valley" kind="lab-only"
valley_from_mib, valley_to_mib = None, None

# %% name="predicted-valley" kind="solution-only"
valley_from_mib, valley_to_mib = 20, 40

# %% name="sweep" fold=true
caps = [1, 2, 5, 10, 15, 20, 25, 32, 40, 50, 64, 80, 100, 150, 200, 300, 600]
wide = lab.three_runs()["C"].program  # a GPT with a vocabulary of 32,768; see below
cases = {
    "Ethernet, 10k tokens": (program, lab.ETHERNET),
    "NVLink, 1k tokens": (short_program, lab.NVLINK),
    "NVLink, 10k tokens": (program, lab.NVLINK),
    "InfiniBand, 8k tokens, GPT": (wide, lab.INFINIBAND),
}
sweeps = {name: lab.sweep(*case, caps) for name, case in cases.items()}
stars = {}
for name, case in cases.items():
    size_mib = n_star(*case)[1]
    stars[name] = size_mib, lab.sweep(*case, [size_mib])[size_mib]
lab.side_by_side(
    "within 2 % of the best, in MiB",
    (valley_from_mib, valley_to_mib),
    lab.valley(sweeps["Ethernet, 10k tokens"]),
)
lab.draw_valleys(sweeps, stars)

# %% [markdown]
# Each curve is relative to its own best step. The grey band is the best and 2 % more. A star is
# the size $M/n^*$.

# %% name="sweep-numbers" fold=true
for name, steps in sweeps.items():
    low, high = lab.valley(steps)
    best_mib = min(steps, key=steps.get)
    size_mib, at_star = stars[name]
    print(
        f"{name:<27} best {best_mib:>3} MiB, within 2 %: {low} to {high} MiB; "
        f"M/n* = {size_mib:.0f} MiB loses {100 * (at_star / steps[best_mib] - 1):.1f} %"
    )
link = lab.INFINIBAND.link
print(f"\nInfiniBand here: {link.latency_ns / 1e3:.0f} us,", end=" ")
print(
    f"{link.bytes_per_s / 1e9:.0f} GB/s ({link.bytes_per_s / 1.5e9:.1f} of gradients)"
)

# %% [markdown]
# On Ethernet the valley is wide: if you miss the best size by a factor of two, you lose little.
# On NVLink with many tokens there is hardly a valley: nearly every size is good.
#
# Where does the formula fail? On NVLink with 1k tokens the star lies above the band. The formula
# has equal buckets and the line of section 2. Here no gradient is cut in two, and small
# messages cost more than the line says.
#
# With InfiniBand the wire is faster than the backward pass. It has gaps, so it does not matter
# that the first bucket leaves late. Only what is sent *after* the last gradient counts. So
# smaller buckets than $M/n^*$ are better, as long as their latencies do not fill the gaps.
# Even so, the formula loses a few percent at most.

# %% [markdown]
# **Exercise 6.4a.** Write `choose_cap` for a model and a link that you have not seen.
#
# - `grad_bytes`: size of each gradient, in the order of arrival.
# - `ready_ns`: when each is complete, in ns from the start of the backward pass. The last is
#   $T_b$.
# - `latency_ns`: alpha. `bytes_per_s`: of gradients, as in 6.0; `1e9 / bytes_per_s` is
#   beta in ns.
# - Return the cap in bytes. Buckets are made from it as in 6.1.
#
# The check asks for 12 pairs of a model and a link. What there is to gain on a pair is the time
# of the worse end (one message per gradient, or one for all) minus the time of the best cap.
# Your cap may lose at most a fifth of that. No constant answer passes. Use the formula
# (2 lines), or time the messages yourself for a list of caps (about 12).
#
# <details><summary>Hint: time the messages</summary>
#
# A bucket starts when its last gradient is ready and the bucket before it has ended. It takes
# alpha plus beta times its bytes. Add up these times for caps in powers of two.
#
# </details>


# %% name="choose" kind="exercise" exercise="6.4a"
def choose_cap(grad_bytes, ready_ns, latency_ns, bytes_per_s):
    """The bucket size in bytes with the shortest time to the last byte."""
    ### BEGIN SOLUTION

    def end_ns(cap):
        end, bucket = 0.0, 0
        for i, size in enumerate(grad_bytes):
            bucket += size
            is_last = i + 1 == len(grad_bytes)
            if is_last or bucket + grad_bytes[i + 1] > cap:
                wire_ns = bucket * 1e9 / bytes_per_s
                end = max(end, ready_ns[i]) + latency_ns + wire_ns
                bucket = 0
        return end

    return min((2**k for k in range(10, 36)), key=end_ns)
    ### END SOLUTION


# %% name="check-choose" kind="check" exercise="6.4a" points=2
_ = check("6.4a", choose_cap)

# %% [markdown]
# ### What bounds the step?
#
# A percentage of overlap does not tell you what to do. The critical path does: try to halve its
# largest share first. Here are three runs.

# %% name="three-runs"
runs = lab.three_runs()
view.draw_many(
    {f"{letter}: {given.name}": given.timeline() for letter, given in runs.items()}
)

# %% [markdown]
# **Exercise 6.4b.** Fill in `reading`.
#
# - `"largest"`: the largest share of the run's critical path: `"compute"`, `"wire"`,
#   `"latency"`, `"launch"` or `"idle"`. See `runs["A"].timeline().critical_path().shares`.
# - `"half_latency_saves_percent"`: how much of the step half the latency would save, in
#   percent, within 3 points. The share does not tell you: something else may come onto the
#   path. Time the step again: `runs["A"].timeline(latency=0.5).step_ns`.
# - `"tail"`: the **tail** is what is sent after the last computation. *Whose* gradient is the
#   last on the wire in run C? Type the name of the parameter. To see the messages:
#   `print(*lab.messages(runs["C"]), sep="\n")`.
#
# <details><summary>Hint: percent</summary>
#
# 100 * (1 - new step / old step).
#
# </details>


# %% name="reading" kind="exercise" exercise="6.4b"
### BEGIN SOLUTION
def saves_percent(given):
    return 100 * (1 - given.timeline(latency=0.5).step_ns / given.timeline().step_ns)


def largest(given):
    shares = given.timeline().critical_path().shares
    return max(shares, key=shares.get)


reading = {
    letter: {
        "largest": largest(given),
        "half_latency_saves_percent": saves_percent(given),
    }
    for letter, given in runs.items()
}
reading["tail"] = lab.messages(runs["C"])[-1].names[-1]
### END SOLUTION
### BEGIN STUB
# reading = {
#     "A": {"largest": None, "half_latency_saves_percent": None},
#     "B": {"largest": None, "half_latency_saves_percent": None},
#     "C": {"largest": None, "half_latency_saves_percent": None},
#     "tail": None,
# }
### END STUB

# %% name="check-reading" kind="check" exercise="6.4b" points=2
_ = check("6.4b", reading)

# %% name="three-shares" fold=true
if solved("6.4b"):
    for letter, given in runs.items():
        half = 1 - given.timeline(latency=0.5).step_ns / given.timeline().step_ns
        twice = 1 - given.timeline(bandwidth=2).step_ns / given.timeline().step_ns
        print(
            f"{letter} {lab.shares_text(given.timeline())}; half the latency saves",
            end=" ",
        )
        print(f"{100 * half:.0f} %, twice the bandwidth {100 * twice:.0f} %")
    display(view.shares_bar({key: given.timeline() for key, given in runs.items()}))

# %% [markdown]
# Look at C. The little that is exposed is in the tail. Which cap removes it?

# %% name="tail" fold=true
exposed_ms = {}
for mib in (1, 5, 10, 25, 64):
    timeline = replace(runs["C"], bucket_mib=mib).timeline()
    exposed_ms[mib] = timeline.report().exposed_ns / 1e6
    print(f"cap {mib:>2} MiB: {exposed_ms[mib]:.1f} ms exposed")
tail = lab.messages(runs["C"])[-1]
if solved("6.4b"):
    for message in lab.messages(runs["C"])[-3:]:
        print(message)
    print(f"{tail.names[-1]} takes {tail.duration_ns / 1e6:.1f} ms on the wire")

# %% [markdown]
# <details><summary>The surprise of this lab, when you have solved 6.4b</summary>
#
# Latency is B's largest share, and yet half the latency saves little, for two reasons. Something
# that was hidden comes onto the critical path. And on NVLink a message starts only when the
# kernel that is running has ended. That wait counts as latency, but a better link does not
# shorten it.
#
# Nearly all of C's step is compute. Neither half the latency nor twice the bandwidth saves more
# than a few percent. A GPT's first layer is its embedding: one huge parameter, whose gradient
# arrives last. No cap splits a parameter, so no bucket size removes this tail. Another order,
# another layout or sharding would.
#
# </details>

# %% [markdown]
# ## Takeaways (3 minutes)

# %% name="takeaways" fold=true
low, high = lab.valley(sweeps["Ethernet, 10k tokens"])
fast_low, fast_high = lab.valley(sweeps["NVLink, 10k tokens"])
print(f"""1. With a slow wire, cut the gradients into n* = sqrt(Tb / alpha) buckets: {number:.0f} here,
   of {star_mib:.0f} MiB. The wrong end wasted up to {100 * (1 - best / one.step_ns):.0f} % of the step.
2. The valley is wide: {low} to {high} MiB on Ethernet, {fast_low} to {fast_high} MiB on NVLink
   with 10k tokens. Sweep before you tune.
3. Ask whose bytes are in the tail: in run C one gradient alone is {tail.bytes / MIB:.0f} MiB, and
   no cap brings the exposed time below {min(exposed_ms.values()):.1f} ms.""")

# %% [markdown]
# **Tomorrow, in your own loop.** Sweep the cap once, on your link, with your model:
#
# ```python
# for mib in (10, 25, 50, 100, 400):
#     ddp = DistributedDataParallel(deepcopy(model), bucket_cap_mb=mib)
#     print(mib, time_step(lambda: loss_of(ddp, batch).backward()))  # time_step: lab 02
# ```
#
# `ol.BucketedReducer(model)` chooses a cap by the size of the model. Print
# `ol.plan_buckets(parameters, cap_bytes)` to see which gradients share a message.
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
# ## 7. Two rules that you will meet (7 minutes)
#
# Texts on overlap give two rules for the size of a bucket. Try both on the runs of this lab.
#
# The first is a formula. With buckets of size $B$, some fraction of the communication is
# hidden: $\mathrm{overlap}(B)$. From that fraction the formula subtracts the latency per byte:
#
# $$B^* = \underset{B}{\mathrm{argmax}} \left[ \mathrm{overlap}(B) - \frac{\alpha}{B} \right]$$
#
# First look at the units: it subtracts seconds per byte from a fraction, which has no unit.
# (Section 6 divides seconds by seconds and takes the root of a plain number.)
#
# **Predict.** To calculate all the same, you must choose units. Take the 24 layers on Ethernet
# again. Which size is best by the formula with alpha in seconds and $B$ in bytes? And which
# with microseconds and MiB?

# %% name="predict-rule" kind="lab-only"
seconds_and_bytes_mib, microseconds_and_mib = None, None

# %% name="predicted-rule" kind="solution-only"
seconds_and_bytes_mib, microseconds_and_mib = 25, 25

# %% name="rule-tried" fold=true
hides = {
    mib: ol.replay(program, hardware=lab.ETHERNET, buckets=min(mib * MIB, sum(sizes)))
    .report()
    .overlap_fraction
    for mib in caps
}
alpha_s = lab.ETHERNET.link.latency_ns / 1e9
by_rule = {}
for alpha_unit, per_second in (("s", 1), ("ms", 1e3), ("us", 1e6)):
    for size_unit, per_mib in (("bytes", MIB), ("MiB", 1), ("GiB", 1 / 1024)):

        def score(mib, per_second=per_second, per_mib=per_mib):
            return hides[mib] - alpha_s * per_second / (mib * per_mib)

        by_rule[alpha_unit, size_unit] = max(caps, key=score)
lab.side_by_side("seconds and bytes", seconds_and_bytes_mib, by_rule["s", "bytes"])
lab.side_by_side("microseconds and MiB", microseconds_and_mib, by_rule["us", "MiB"])
for (alpha_unit, size_unit), mib in by_rule.items():
    print(f"alpha in {alpha_unit:<2}, B in {size_unit:<5}: B* = {mib:>3} MiB")
steps = sweeps["Ethernet, 10k tokens"]
print(f"the shortest step: {min(steps, key=steps.get)} MiB")

# %% [markdown]
# There is one model and one link, and there are three answers: the units alone decide which.
# Where the second term is very small, the formula asks for the largest hidden fraction. That
# is not the shortest step either. Smaller buckets bring more latency. Where it is hidden, the
# hidden fraction grows, and no time is saved. You want a short *time*, and each term of the sum
# in section 6 is a time.
#
# The second rule says that *25 to 50 MB work well for most.* Exercise 6.4a has twelve pairs of a
# model and a link. On how many of them does the rule hold?

# %% name="rule-counted" fold=true
pairs = lab.unseen_pairs()


def num_good(sizes_mib):
    """On how many pairs one of the sizes is within 2 % of the best."""
    return sum(
        min(pair.step_ns(mib * MIB) for mib in sizes_mib)
        <= 1.02 * pair.step_ns(pair.best_cap_bytes)
        for pair in pairs
    )


rules = {"25 MiB": [25], "50 MiB": [50], "some size from 25 to 50 MiB": range(25, 51)}
for rule, sizes_mib in rules.items():
    print(f"{rule}: good on {num_good(sizes_mib)} of {len(pairs)} pairs")
constant_mib = max(range(1, 501), key=lambda mib: num_good([mib]))
print(f"the best constant, {constant_mib} MiB: good on {num_good([constant_mib])}")
print()
for pair in pairs:
    lost = pair.step_ns(25 * MIB) / pair.step_ns(pair.best_cap_bytes) - 1
    best_mib = pair.best_cap_bytes / MIB
    print(f"{pair.name:<58} best {best_mib:5.1f} MiB, 25 MiB loses {100 * lost:3.0f} %")

# %% [markdown]
# The times go from the start of the backward pass to the last byte, and *good* is within 2 % of
# the best of 120 sizes. *Most* is too much to say, even for the best constant: the pair
# decides. Where you do not know, sweep.

# %% [markdown]
# ## 8. Two repairs (22 minutes)
#
# Here are two reducers that people really write. The number that you type decides which net you
# get, so your neighbour's answers are not yours.

# %% name="my-number"
my_number = 6  # any whole number: your day of birth, your desk

# %% name="repair-case"
case = lab.repair_case(my_number)
for bucket, names in enumerate(case.buckets()):
    print(f"bucket {bucket}: {', '.join(names)}")

# %% [markdown]
# **Exercise 6.5a.** This reducer gets slow after a while. Run it and look. Diagnose it first, then
# repair it, and keep the overlap: do not send everything at the end.


# %% name="first-reducer" kind="exercise" exercise="6.5a" broken=true
class FirstReducer:
    def __init__(self, state):
        self.state = state
        self.arrived = set()
        self.in_flight = []
        for param in state.params:
            param.register_post_accumulate_grad_hook(self.hook)

    def hook(self, param):
        self.arrived.add(param)
        bucket = self.state.bucket_of(param)
        members = [self.state.params[i] for i in self.state.plan[bucket]]
        if all(member in self.arrived for member in members):
            for member, place in self.state.pairs(bucket):
                if member.grad is not None:
                    place.copy_(member.grad)
            buffer = self.state.buffers[bucket]
            work = dist.all_reduce(buffer, async_op=True)
            self.in_flight.append((bucket, work))

    def wait(self):
        for bucket, work in self.in_flight:
            work.wait()
            for member, place in self.state.pairs(bucket):
                member.grad = place / dist.get_world_size()
        self.in_flight.clear()
        ### BEGIN SOLUTION
        self.arrived.clear()  # the next step's gradients have not arrived
        ### END SOLUTION
        ### BEGIN STUB
        ### END STUB


# %% name="first-seen"
trained = case.train(FirstReducer)
for step in (1, 2, 3):
    sent = trained.evidence.sends_of(rank=0, step=step)
    print(f"step {step}: rank 0 sent {len(sent)} messages")
view.draw(trained.evidence.step_timeline(2), title="your run, step 2")

# %% [markdown]
# Fill in what the *broken* reducer did (run the cell above before you repair it).
#
# - `"kind"`: `"sent again"`, `"never sent"`, `"race"` or `"blocked"`.
# - `"step"`: the first step in which it shows; steps count from 1.
# - `"messages"`: how many messages rank 0 sent in that step.
#
# <details><summary>Hint</summary>
#
# What does the reducer know about the second step's gradients before they arrive?
#
# </details>

# %% name="first-diagnosis" kind="exercise" exercise="6.5a"
### BEGIN SOLUTION
num_gradients = sum(len(names) for names in case.buckets())
first_diagnosis = {"kind": "sent again", "step": 2, "messages": num_gradients}
### END SOLUTION
### BEGIN STUB
# first_diagnosis = {"kind": None, "step": None, "messages": None}
### END STUB

# %% name="check-first" kind="check" exercise="6.5a" points=2
_ = check("6.5a", my_number, first_diagnosis, FirstReducer)

# %% [markdown]
# **Exercise 6.5b.** This one packs large buckets on a stream of its own, beside the backward pass.
# On a quiet GPU its numbers are right. On a busy one they are sometimes wrong. The virtual
# cluster knows who touches which bytes, and what comes before what.


# %% name="second-reducer" kind="exercise" exercise="6.5b"
class SecondReducer:
    def __init__(self, state):
        self.state = state
        self.packing = streams.Stream()
        for param in state.params:
            param.register_post_accumulate_grad_hook(self.hook)

    def hook(self, param):
        bucket = self.state.bucket_of(param)
        self.state.missing[bucket] -= 1
        if self.state.missing[bucket] > 0:
            return
        pairs = self.state.pairs(bucket)
        if len(pairs) == 1:  # nothing to pack together
            pairs[0][1].copy_(param.grad)
        else:
            self.packing.wait_stream(streams.current_stream())
            with streams.stream(self.packing):
                for member, place in pairs:
                    place.copy_(member.grad)
        buffer = self.state.buffers[bucket]
        ### BEGIN SOLUTION
        # Launched from the packing stream, the message starts after the copies; the
        # backward pass on its own stream does not wait for them.
        with streams.stream(
            self.packing if len(pairs) > 1 else streams.current_stream()
        ):
            self.state.works[bucket] = dist.all_reduce(buffer, async_op=True)
        ### END SOLUTION
        ### BEGIN STUB
        # self.state.works[bucket] = dist.all_reduce(buffer, async_op=True)
        ### END STUB

    def wait(self):
        for bucket, work in enumerate(self.state.works):
            work.wait()
            for member, place in self.state.pairs(bucket):
                member.grad = place / dist.get_world_size()
        self.state.missing = [len(bucket) for bucket in self.state.plan]
        self.state.works = [None] * len(self.state.plan)


# %% name="second-seen"
trained = case.train(SecondReducer)
print(f"{len(trained.run.warnings)} findings")
for finding in trained.run.warnings[:1]:
    lab.print_finding(finding)
view.draw(trained.evidence.step_timeline(2), title="your run, step 2")

# %% [markdown]
# Again for the *broken* reducer:
#
# - `"kind"`, as above;
# - `"bucket"`: the number of the first bucket concerned;
# - `"written_on"`: the stream that writes its buffer, as the finding calls it.
#
# <details><summary>Hint: the missing edge</summary>
#
# A collective starts after what is on the *current* stream at its launch. Which stream is
# current there, and which one does the copying?
#
# </details>
# <details><summary>Hint: not too much</summary>
#
# `streams.current_stream().wait_stream(...)` repairs the race, and passes here, too. But with
# large buckets the backward pass waits for the copies. Is there a stream from which you can
# launch without a wait?
#
# </details>

# %% name="second-diagnosis" kind="exercise" exercise="6.5b"
### BEGIN SOLUTION
first_packed = next(b for b, names in enumerate(case.buckets()) if len(names) > 1)
second_diagnosis = {"kind": "race", "bucket": first_packed, "written_on": "stream 1"}
### END SOLUTION
### BEGIN STUB
# second_diagnosis = {"kind": None, "bucket": None, "written_on": None}
### END STUB

# %% name="check-second" kind="check" exercise="6.5b" points=2
_ = check("6.5b", my_number, second_diagnosis, SecondReducer)

# %% [markdown]
# ## 9. The settings of DDP (12 minutes)
#
# `torch.nn.parallel.DistributedDataParallel` is such a reducer, and it runs on the virtual
# cluster, too. Here each of its settings is tried on a small transformer in slow motion. You
# see the third step, because DDP plans its buckets again after the first or the second.

# %% name="ddp"
for settings in (
    {},
    {"bucket_cap_mb": 25},
    {"bucket_cap_mb": 0.5},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
):
    print(lab.try_ddp(**settings))

# %% [markdown]
# Compare the first two lines. 25 is the default, and yet the run changes if you type it. Only if
# you do *not* type a cap, the first bucket is cut at 1 MiB, so that the wire starts early.
# The last message of `find_unused_parameters` says which parameters were used: a few bytes.
#
# **Exercise 6.6.** Choose DDP's keyword arguments for four wishes. The check runs DDP with them on
# this model and link.
#
# - `"one message"`: all gradients of the third step in one message;
# - `"no copies"`: no gradient is copied into a bucket;
# - `"unused parameter"`: a layer that gets no gradient does not stop the training;
# - `"short step"`: the step is nearly as short as the best size makes it. Try sizes of your own
#   with `print(lab.try_ddp(bucket_cap_mb=...))`.

# %% name="wishes" kind="exercise" exercise="6.6"
### BEGIN SOLUTION
wishes = {
    "one message": {"bucket_cap_mb": 100},
    "no copies": {"gradient_as_bucket_view": True},
    "unused parameter": {"find_unused_parameters": True},
    "short step": {"bucket_cap_mb": 0.3},
}
### END SOLUTION
### BEGIN STUB
# wishes = {
#     "one message": {},
#     "no copies": {},
#     "unused parameter": {},
#     "short step": {},
# }
### END STUB

# %% name="check-wishes" kind="check" exercise="6.6" points=1
_ = check("6.6", wishes)

# %% [markdown]
# ## 10. Knobs (15 minutes)
#
# Here are the 24 layers again, now with knobs. Below the timeline are the shares of its critical
# path, and what half the latency or twice the bandwidth would save. Without knobs, type
# `knobs.set(latency_us=500)`.

# %% name="knobs"
names = ("latency", "bandwidth", "neither", "25 MiB loses")
knobs = view.explorer(lab.turn, lab.KNOBS, what_if=lab.WHAT_IF, keep=names)
knobs

# %% [markdown]
# **Exercise 6.7.** Find four settings. Turn the knobs, and keep what you found with the button of
# its name (or type `knobs.keep("latency")`). Then `found = dict(knobs.kept)`. What you kept
# is gone when the kernel stops, so paste what `print(dict(knobs.kept))` shows before you hand
# it in. Or type the numbers.
#
# - `"latency"`: half the latency saves 15 % or more, twice the bandwidth under 8 %;
# - `"bandwidth"`: the other way round;
# - `"neither"`: neither saves 2 %;
# - `"25 MiB loses"`: buckets of 25 MiB take 10 % longer than the best size.
#
# <details><summary>Hint: latency</summary>
#
# Many messages, a fast wire, little to compute.
#
# </details>

# %% name="found" kind="exercise" exercise="6.7"
### BEGIN SOLUTION
start = {name: knob.default for name, knob in lab.KNOBS.items()}
found = {
    "latency": {**start, "bucket_mib": 1, "latency_us": 200, "gbyte_per_s": 340},
    "bandwidth": {**start, "bucket_mib": 25, "gbyte_per_s": 12.5, "ktokens": 8},
    "neither": {**start, "gbyte_per_s": 340, "latency_us": 10, "ktokens": 16},
    "25 MiB loses": {**start, "latency_us": 1000, "gbyte_per_s": 12.5},
}
found["latency"]["ktokens"] = 2
### END SOLUTION
### BEGIN STUB
# found = {
#     "latency": None,
#     "bandwidth": None,
#     "neither": None,
#     "25 MiB loses": None,
# }
### END STUB

# %% name="found-seen" fold=true
for name, settings in found.items():
    if settings is not None:
        timeline = lab.turn(**settings)
        print(f"{name}: step {timeline.step_ns / 1e6:.1f} ms;", end=" ")
        print(lab.shares_text(timeline))

# %% name="check-found" kind="check" exercise="6.7" points=2
_ = check("6.7", found)

# %% [markdown]
# ## 11. On real GPUs (12 minutes)
#
# Here is what GPUs did, stored; nothing is measured now. All variants of the table ran one
# after the other on one machine. `serial` is one message for all, after the backward pass.

# %% name="gpu-table" fold=true
for line in lab.stored_benchmarks():
    print(line)
print()
for batch in (1, 2, 8):
    serial_ms = lab.stored_ms("serial", batch)
    saved_ms = serial_ms - lab.stored_ms("ours captured", batch)
    captured_ms = lab.stored_ms("compute captured", batch)
    print(f"batch {batch}: compute alone {captured_ms:.1f} ms captured;", end=" ")
    print(f"overlap and capturing save {saved_ms:.1f} of {serial_ms:.1f}")
num_launched = len(lab.gradient_bytes(lab.measured_step(2)))
print(f"per parameter: {num_launched} messages")
print(lab.measure_it_here())

# %% [markdown]
# At batch 1 and 2 one message per parameter is the slowest. In eager mode the CPU pays for each
# launch, and here the hooks launch one message for each parameter: their number stands below
# the table. The CPU bounds all eager steps there: compute alone takes much longer eager than
# captured in a CUDA graph, and hooks are Python. So most of what is saved is launches. Overlap
# comes second.
#
# `ours` has *no flat buffer at all*: it hands the gradients themselves to one grouped
# all-reduce per bucket, and copies nothing. In eager rows a difference of a few ms at batch 1
# or 2 says little, because launches are noisy.
#
# At batch 8 overlap is worth little. Why? Here is one step of batch 8, taken apart on two
# other GPUs, and what the virtual cluster predicts for them.

# %% name="gpu-hidden" fold=true
h200 = ol.PROFILES["h200-nvlink"]
captured = replace(h200, launch_ns=0, collective_launch_ns=0)
hidden, table = lab.measured("hidden"), lab.measured("data_parallel")
row = "hooks, coalesced"
sent_ms = hidden.number("all-reduce alone", "step")
saved_ms = hidden.number("compute alone", "step") + sent_ms - hidden.number(row, "step")
print(f"measured, batch 8: alone the messages take {sent_ms} ms; beside the", end=" ")
print(
    f"backward pass {hidden.number(row, 'hidden')} ms are hidden, {saved_ms:.1f} saved"
)
for batch in (2, 8):
    gpt = lab.measured_step(batch)
    timeline = ol.replay(gpt, hardware=captured, buckets=100 * MIB)
    late = ol.replay(gpt, hardware=captured, buckets=sum(lab.gradient_bytes(gpt)))
    step_ms = timeline.step_ns / 1e6
    seen_ms = table.number("the same, whole step captured", f"batch {batch}")
    print(f"predicted, batch {batch}: hidden", end=" ")
    print(f"{timeline.report().hidden_ns / 1e6:.1f} ms, saved", end=" ")
    print(f"{(late.step_ns - timeline.step_ns) / 1e6:.1f} over one message for all;")
    print(f"    step {step_ms:.1f} ms, measured {seen_ms:.1f}", end=" ")
    print(f"({100 * (step_ms / seen_ms - 1):+.0f} %)")
print(lab.machine("hidden"))

# %% [markdown]
# **Hidden is not saved.** Nearly all of the communication has computation beside it, and yet
# the step gains little. NCCL's kernels take processors, memory bandwidth and power from the
# matmuls, which get slower. The messages take longer, too: more ms are hidden than they take
# alone. This **contention** is in the profiles of NVLink machines, but not in this lab's
# Ethernet.
#
# The predicted steps are too short. Most of that is compute: the model's matmuls are too
# fast. The rest is contention. The model has one factor for each kind of kernel, and a whole
# step at the card's power limit loses more.

# %% [markdown]
# ## 12. Where the model lies (2 minutes)
#
# In this lab launching costs nothing, as if each step were one CUDA graph. In eager mode the
# CPU's launches are on the critical path. Here is the short step on NVLink:

# %% name="lies" fold=true
eager = ol.PROFILES["h100-nvlink"]
captured = replace(eager, launch_ns=0, collective_launch_ns=0)
for mib in (1, 25, 600):
    timeline = ol.replay(short_program, hardware=eager, buckets=mib * MIB)
    share = timeline.critical_path().shares["launch"]
    graph = ol.replay(short_program, hardware=captured, buckets=mib * MIB)
    print(f"{mib:>3} MiB: eager {timeline.step_ns / 1e6:.1f} ms,", end=" ")
    print(f"{100 * share:.0f} % launch; captured {graph.step_ns / 1e6:.1f} ms")

# %% [markdown]
# The eager step waits for launches nearly all the time, and it takes twice as long with small
# messages. So capture the step. Where you cannot, send few messages.
#
# Small messages cost more than alpha + beta m (section 2). For NVLink this lab has a measured
# curve, of two GPUs; for Ethernet and InfiniBand it has a line. The ranks never differ here, so
# nobody waits for a late one. And a real link is shared with others.
#
# ## In production
#
# - PyTorch DDP: `torch/csrc/distributed/c10d/reducer.cpp`, `mark_variable_ready` and
#   `finalize_backward`. It also rebuilds its buckets in the order of arrival, has a
#   first bucket of 1 MiB, and handles unused parameters.
# - Megatron-LM: `_ParamAndGradBuffer` in
#   `megatron/core/distributed/param_and_grad_buffer.py`. All gradients live in one
#   contiguous buffer from the start; a bucket is a slice of it, so nothing is copied.
# - This package: `overlaplab/techniques/data_parallel/` sends the gradients themselves; its
#   `__init__.py` says in which files to follow one.
#
# Further reading: Li et al., *PyTorch Distributed: Experiences on Accelerating Data
# Parallel Training*, VLDB 2020.
