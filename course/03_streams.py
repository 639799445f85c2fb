# %% [markdown]
# # Who waits for whom?
#
# **Lab 03: streams and events.** Core: three sittings of 57, 40 and 33 minutes, with
# doors after sections 3 and 4. Extras: 60 more. You need no GPU.
#
# After the core you can
#
# - let independent work run side by side, and put the rest in order with events;
# - say which waits a schedule needs, and which follow from others;
# - find a race from its report, and repair it without losing the overlap;
# - bring batches to the GPU while it computes.
#
# You know PyTorch. From lab 00 you need one sentence: a **launch** is not a start. The CPU
# hands an operator to the GPU and goes on.
#
# **How it works.** Run the cells from top to bottom. A check tells you what it saw, in
# numbers, and draws what *your* code did. No exercise needs the one before it.

# %% name="setup"
import re

import torch
import torch.distributed as dist
from IPython.display import display

import overlaplab as ol
from overlaplab import streams, view
from overlaplab.grading import check, solved
from overlaplab_course import lab03 as lab

# %% [markdown]
# ## 1. The waste (10 minutes)
#
# A training step of four layers: for each layer its backward pass, the message that sums
# its gradients over two GPUs, and its optimizer step (`opt`). Everything is in slow motion:
# a unit of work takes 1 ms, so that you can add up the times in your head.

# %% name="job"
job = lab.backward_job()
job

# %% [markdown]
# A **stream** is a queue of the GPU. What is in one stream runs in order. PyTorch puts
# everything on one stream unless you say otherwise. A task's `run()` launches it on the
# stream that is current.


# %% name="one-stream"
def one_stream(tasks):
    for task in tasks:
        task.run()


so_far = {"one stream": lab.play(job, one_stream).timeline}
view.draw_many(so_far)

# %% [markdown]
# `default` is the stream. While it computes, the wire is idle; while a message is in it
# (hatched), nothing computes. Communication with no computation beside it is **exposed**.
#
# The bars without a name take 1 ms each: `input` at the beginning, which makes what the job
# reads; each `opt`; and `collect` at the end, which reads the results. The tasks of the job add up
# to 27 ms. With `input` and `collect` the step takes 29.

# %% name="one-stream-numbers"
view.table(so_far)

# %% [markdown]
# A stream is a queue, not an engine. The engines are the GPU's processors, which compute,
# and the wire, which sends. They can work at the same time, but a single queue feeds them
# one after the other.
#
# **The API of this screen.** The names and their meaning are torch.cuda's.
#
# | | |
# |---|---|
# | `s = streams.Stream()` | a second stream |
# | `with streams.stream(s):` | launch what is inside on `s` |
# | `a.wait_stream(b)` | what is launched on `a` from now on starts after all that is on `b` *by now* |
#
# So here are two streams. Before each task, its stream waits for the other one.


# %% name="two-streams"
def two_streams(tasks):
    compute, wire = streams.current_stream(), streams.Stream()
    for task in tasks:
        if task.on == "compute":
            own, other = compute, wire
        else:
            own, other = wire, compute
        own.wait_stream(other)
        with streams.stream(own):
            task.run()
    compute.wait_stream(wire)


# %% [markdown]
# **Predict.** The table says how long the step takes on one stream. How long does it take
# on these two, in ms? Type your guess. Nobody marks it.

# %% name="predict-two" kind="lab-only"
two_streams_ms = None

# %% name="predicted-two" kind="solution-only"
two_streams_ms = 20

# %% name="two" fold=true
two = lab.play(job, two_streams)
lab.side_by_side("two streams, ms", two_streams_ms, f"{two.step_ns / 1e6:.0f}")
so_far["two streams that wait for each other"] = two.timeline
view.draw_many(so_far)

# %% [markdown]
# Nothing is gained. Every task waits for everything that was launched before it: two queues
# that wait for each other are one queue. What overlaps is what does *not* wait.
#
# So let nobody wait.


# %% name="no-waits"
def no_waits(tasks):
    compute, wire = streams.current_stream(), streams.Stream()
    for task in tasks:
        with streams.stream(compute if task.on == "compute" else wire):
            task.run()


racing = lab.play(job, no_waits)
print(
    f"step {racing.step_ns / 1e6:.0f} ms, {len(racing.findings)} findings. One of them:"
)
lab.print_finding(next(f for f in racing.findings if f.name == "b4"))
view.draw(racing.timeline, title="two streams and no waits")

# %% [markdown]
# Fast, and wrong: the messages leave before their gradients are there. A **race** (the
# report says *hazard*): two streams touch the same bytes, at least one writes, and nothing
# orders them. Here they are `b4`, which the task `back 4` writes, and which `send 4` copies
# into the message's buffer (`copy_`). A report's times are in us: 1000 us are 1 ms.
#
# A GPU does not report a race. Whether its numbers are wrong depends on how busy it is. The
# virtual cluster finds the race in the program itself: it knows who touches which bytes,
# and what comes before what. The shortest step that is right lies somewhere between
# everybody waiting and nobody waiting. Who must wait for whom?

# %% [markdown]
# ## 2. Wait for one task, not for a stream (29 minutes)
#
# **The API of this screen.** An **event** is a bookmark in a stream.
#
# | | |
# |---|---|
# | `event = s.record_event()` | puts a mark behind everything that is on `s` by now |
# | `t.wait_event(event)` | what is launched on `t` from now on starts after the mark |
# | `event = streams.Event()`, `event.record()` | the same in two steps; `record()` marks the stream that is current |
#
# All return at once. The CPU waits for nothing; a *stream* waits.
#
# **Exercise 3.1a.** Begin with three tasks, launched in this order: `first`, `second`,
# `message`. The message needs `first` only. If its stream waited for the whole compute
# stream, it would wait for `second` too. Put one line in each of the three places:
#
# 1. a mark behind `first`;
# 2. the wire's stream waits for that mark;
# 3. the caller (whoever calls your function) reads all results when you return, on the
#    stream that was current: let that stream wait for everything on the wire's.


# %% name="beside" kind="exercise" exercise="3.1a" reference=true
def send_beside(first, second, message):
    """Launch three tasks; `message` starts behind `first`, beside `second`."""
    compute, wire = streams.current_stream(), streams.Stream()
    wire.wait_stream(compute)  # behind the caller's input
    first.run()
    ### BEGIN SOLUTION
    ended = compute.record_event()
    ### END SOLUTION
    ### BEGIN STUB
    # ...  # 1.
    ### END STUB
    second.run()
    ### BEGIN SOLUTION
    wire.wait_event(ended)
    ### END SOLUTION
    ### BEGIN STUB
    # ...  # 2.
    ### END STUB
    with streams.stream(wire):
        message.run()
    ### BEGIN SOLUTION
    streams.current_stream().wait_stream(wire)
    ### END SOLUTION
    ### BEGIN STUB
    # ...  # 3.
    ### END STUB


# %% name="check-beside" kind="check" exercise="3.1a" points=1
_ = check("3.1a", send_beside)

# %% [markdown]
# A mark, a wait, and an end behind both streams: that is all there is. Now for a list of
# tasks that you have not seen.
#
# **Exercise 3.1.** Write `issue(tasks)`. A task has `name`, `on` (`"compute"` or
# `"wire"`), `needs` (names of tasks that must have ended before it starts) and `run()`.
#
# - Run every task once, in the order of the list. Tasks on `"compute"` go to the stream
#   that is current when you are called, tasks on `"wire"` to one stream of your own.
# - A task waits for the tasks that it needs, and for no others.
# - The caller has just launched what fills the input, and reads every result after you
#   return, both on its own stream. So begin and end as `send_beside` does.
# - The CPU waits for nothing: no `synchronize`.
#
# About 12 lines. It is played on this job and on four that you have not seen.
#
# <details><summary>Hint: what to keep</summary>
#
# A dictionary from a task's name to the event that you recorded right after its `run()`.
#
# </details>
# <details><summary>Hint: record where?</summary>
#
# On the stream that the task ran on, after the task. An event that is recorded earlier
# marks only what was there earlier.
#
# </details>
# <details><summary>Hint: begin and end</summary>
#
# Use `wait_stream` there: you want to wait for everything.
#
# </details>


# %% name="issue" kind="exercise" exercise="3.1" reference=true
def issue(tasks):
    """Launch the tasks on two streams, each behind those that it needs."""
    ### BEGIN SOLUTION
    compute, wire = streams.current_stream(), streams.Stream()
    wire.wait_stream(compute)
    ended = {}
    for task in tasks:
        own = compute if task.on == "compute" else wire
        for name in task.needs:
            own.wait_event(ended[name])
        with streams.stream(own):
            task.run()
        ended[task.name] = own.record_event()
    compute.wait_stream(wire)
    ### END SOLUTION


# %% name="check-issue" kind="check" exercise="3.1" points=3
_ = check("3.1", issue)
lab.keep("3.1", issue)

# %% [markdown]
# ### The same timeline again

# %% name="again"
best = lab.play(job, lab.mine_or_ours("3.1"))
so_far[f"an event per task ({lab.whose('3.1')})"] = best.timeline
view.draw_many(so_far)

# %% name="again-numbers"
view.table(so_far)

# %% [markdown]
# The thin lines on `stream 1` are the copies into the messages' buffers. Half of the last
# message is still exposed, because only `opt 2` is left to compute beside it.
#
# Every scheduler that spreads a graph over streams has these few lines at its heart.

# %% [markdown]
# ## 3. The fewest waits (17 minutes)
#
# Each wait costs the CPU some microseconds. And whoever reads the code cannot tell the waits
# that matter from those that do not. How few are enough?
#
# Waits form chains. If `b` waits for `a`, then everything that comes after `b`, in its
# stream or through other waits, comes after `a` too.
#
# Here is a pipeline on *three* streams: batches are loaded, worked on, and sent. There
# are two buffers of each kind, A and B, which take turns. The number that you type decides
# which job you get.

# %% name="my-number"
my_number = 3  # any whole number: your day of birth, your desk

# %% name="my-job"
mine = lab.pipeline(my_number)
mine

# %% [markdown]
# The last column says who makes what a task reads. But it says more. `load 3` writes the
# buffer that `load 1` filled, so it must come after every task that *reads* that batch.
#
# The order of its own stream meets some needs of a task. It is enough to wait for those
# on other streams. Here are these waits, as pairs (who must have ended, who waits for it).
# In the figure `stream 1` sends and `stream 2` loads.

# %% name="every-wait"
full = mine.play(mine.every_wait)
print(f"{len(mine.every_wait)} waits, step {full.step_ns / 1e6:.0f} ms, no findings")
for pair in mine.every_wait:
    print(f"    {pair},")
view.draw(full.timeline, title="every wait")

# %% [markdown]
# **Predict.** How many of them are needed?

# %% name="predict-waits" kind="lab-only"
needed = None

# %% name="predicted-waits" kind="solution-only"
needed = 13

# %% [markdown]
# **Exercise 3.2.** Take out of `my_waits` as many pairs as you can. There must be no race,
# and the step must not get longer. Each task runs on the stream of its kind, and the
# wait of a pair is launched right before the pair's second task.
#
# Do it by hand, with the table, or let the findings tell you: `mine.play(pairs).findings`
# is empty where nothing is missing.
#
# <details><summary>Hint: one stream waits once</summary>
#
# `load 2` comes after `load 1` in its stream. A task that waits for `load 2` need not wait
# for `load 1`.
#
# </details>
# <details><summary>Hint: the long way round</summary>
#
# Is there another way from the first task to the second, through a third? `work 1`, then
# `send 1`, then ...
#
# </details>
# <details><summary>Last resort: let the report work</summary>
#
# A loop can do it: if there is no finding without a pair, that pair is not needed.
#
# </details>

# %% name="waits" kind="exercise" exercise="3.2"
### BEGIN SOLUTION
my_waits = list(mine.every_wait)
for pair in mine.every_wait:
    fewer = [wait for wait in my_waits if wait != pair]
    if not mine.play(fewer).findings:
        my_waits = fewer
### END SOLUTION
### BEGIN STUB
# my_waits = list(mine.every_wait)  # too many: which can go?
### END STUB

# %% name="waits-seen"
played = mine.play(my_waits)
print(f"{len(my_waits)} waits, step {played.step_ns / 1e6:.0f} ms,", end=" ")
print(f"{len(played.findings)} findings")
for finding in played.findings[:1]:
    lab.print_finding(finding)

# %% name="check-waits" kind="check" exercise="3.2" points=2
_ = check("3.2", my_number, my_waits)

# %% name="waits-compared" fold=true
if solved("3.2"):
    lab.compare_waits(mine, needed)

# %% [markdown]
# **A door.** You can order any list of tasks, and you know which waits are needed. This is a
# good place to stop for today. When you come back, run all cells once: what you solved is
# in the notebook.

# %% [markdown]
# ## 4. Three races (40 minutes)
#
# Here are three programs that people really write. Two of them ran on a real GPU
# (section 10): 20 times while it was quiet, and every result was right; 20 times while it
# was busy, and every result was wrong.
#
# For each program: run it, read the first finding, fill in the diagnosis, then repair the
# program *and keep its overlap*. The CPU waits for nothing.
#
# A finding names the bytes, the two operators that touch them (with their streams), and
# the order that is missing. What it suggests is safe, but may cost overlap. It says
# *hazard* for both kinds:
#
# - `"race"`: two streams touch one tensor, and nothing orders them;
# - `"reuse"`: memory was freed and given to another tensor ("handed out again") while a
#   stream still used it.
#
# ### Filled here, sent there
#
# Some layers keep a part of their weights in the CPU's memory (the *host's*), to save room
# on the GPU (the *device*). Such a layer has two gradients, one on each side.
# `layer.pack()` copies both into one flat tensor on the device, `layer.flat`, which is sent.
# A layer with one gradient sends it without packing: there `layer.flat` is that gradient.
#
# `layer.backward()` and `layer.pack()` launch on the current stream. Packing has a stream of
# its own, so that the GPU's copy engine works beside the next layer's backward pass.


# %% name="flat" kind="exercise" exercise="3.3a" reference=true broken=true
def send_gradients(layers):
    packing = streams.Stream()
    works = []
    for layer in layers:
        layer.backward()
        if len(layer.grads) > 1:
            packing.wait_stream(streams.current_stream())
            with streams.stream(packing):
                layer.pack()
        ### BEGIN SOLUTION
        # Launched from the packing stream, the message starts behind the packing, and
        # the backward pass waits for neither.
        packed = len(layer.grads) > 1
        with streams.stream(packing if packed else streams.current_stream()):
            works.append(dist.all_reduce(layer.flat, async_op=True))
        ### END SOLUTION
        ### BEGIN STUB
        # works.append(dist.all_reduce(layer.flat, async_op=True))
        ### END STUB
    for work in works:
        work.wait()


# %% name="flat-seen"
case = lab.case("3.3a", my_number)
as_given, yours = case.as_handed_out(), case.run(send_gradients)
print(
    f"{len(as_given.findings)} findings as given, {len(yours.findings)} now. The first:"
)
lab.print_finding(as_given.findings[0])
view.draw_many({"as given": as_given.timeline, "yours": yours.timeline}, ranks=[0])

# %% [markdown]
# In the figure of the program as given, a message starts *beside* `pack`. The finding names
# the copy from the host (`copy h2d`), which is still writing the flat tensor.
#
# The values are right all the same: the virtual cluster computes them in the order in which
# you launch, whatever its clock says. Trust findings, not values.
#
# **Exercise 3.3a.** Diagnose the program as given, then repair it. Each `pack` must still
# run beside the next layer's backward pass. Packing on the main stream would be right, but
# each copy would make the step longer.
#
# - `"kind"`: `"race"` or `"reuse"`; `"tensor"`: the first that a finding names;
# - `"packed_on"`: the stream that fills it, as the finding calls it.
#
# <details><summary>Hint: the missing edge</summary>
#
# A collective starts after what is on the *current* stream at its launch. Which stream is
# current there, and which one packs?
#
# </details>

# %% name="flat-diagnosis" kind="exercise" exercise="3.3a"
### BEGIN SOLUTION
flat_diagnosis = {
    "kind": "race",
    "tensor": case.as_handed_out().findings[0].name,
    "packed_on": "stream 1",
}
### END SOLUTION
### BEGIN STUB
# flat_diagnosis = {"kind": None, "tensor": None, "packed_on": None}
### END STUB

# %% name="check-flat" kind="check" exercise="3.3a" points=2
_ = check("3.3a", my_number, flat_diagnosis, send_gradients)

# %% [markdown]
# ### One event for two
#
# A model has several towers. Each fetches its rows from the host's memory and computes, on
# a stream of its own. Then the main stream combines what they made. One rank has two
# towers, the other rank has one.


# %% name="event" kind="exercise" exercise="3.3b" reference=true broken=true
def look_up(towers):
    main = streams.current_stream()
    ### BEGIN SOLUTION
    events = []
    ### END SOLUTION
    ### BEGIN STUB
    # ready = streams.Event()
    ### END STUB
    for tower in towers:
        side = streams.Stream()
        side.wait_stream(main)
        with streams.stream(side):
            tower.fetch()
            tower.forward()
            ### BEGIN SOLUTION
            events.append(side.record_event())
            ### END SOLUTION
            ### BEGIN STUB
            # ready.record()  # on the current stream
            ### END STUB
    ### BEGIN SOLUTION
    for event in events:
        main.wait_event(event)
    ### END SOLUTION
    ### BEGIN STUB
    # main.wait_event(ready)
    ### END STUB


# %% name="event-seen"
case = lab.case("3.3b", my_number)
as_given, yours = case.as_handed_out(), case.run(look_up)
print(
    f"{len(as_given.findings)} findings as given, {len(yours.findings)} now. The first:"
)
lab.print_finding(as_given.findings[0])
view.draw_many({"as given": as_given.timeline, "yours": yours.timeline})

# %% [markdown]
# **Exercise 3.3b.** Diagnose the program as given, then repair it. The towers must
# still run side by side.
#
# - `"kind"`; `"rank"`: where it happens; `"tensor"`: the one that is read too early.
#
# <details><summary>Hint: what does an event remember?</summary>
#
# Only its last `record()`.
#
# </details>
# <details><summary>Hint: the order of waits</summary>
#
# A wait inside the loop makes the main stream wait for the first tower, and the second
# tower waits for the main stream. Launch all, then wait for all.
#
# </details>

# %% name="event-diagnosis" kind="exercise" exercise="3.3b"
### BEGIN SOLUTION
finding = case.as_handed_out().findings[0]
event_diagnosis = {"kind": "race", "rank": finding.rank, "tensor": finding.name}
### END SOLUTION
### BEGIN STUB
# event_diagnosis = {"kind": None, "rank": None, "tensor": None}
### END STUB

# %% name="check-event" kind="check" exercise="3.3b" points=2
_ = check("3.3b", my_number, event_diagnosis, look_up)

# %% [markdown]
# ### Memory given away
#
# Batches are copied to the device on a stream of their own, while the step before runs. No
# wait is missing, and still there is a finding.


# %% name="reuse" kind="exercise" exercise="3.3c" reference=true broken=true
def train(batches, step):
    loading = streams.Stream()
    compute = streams.current_stream()
    for host in batches:
        with streams.stream(loading):
            batch = host.to(ol.device(), non_blocking=True)
        compute.wait_stream(loading)
        ### BEGIN SOLUTION
        batch.record_stream(compute)  # its memory is in use there too
        ### END SOLUTION
        ### BEGIN STUB
        ### END STUB
        step(batch)


# %% name="reuse-seen"
case = lab.case("3.3c", my_number)
as_given, yours = case.as_handed_out(), case.run(train)
print(
    f"{len(as_given.findings)} findings as given, {len(yours.findings)} now. The first:"
)
lab.print_finding(as_given.findings[0])
view.draw_many({"as given": as_given.timeline, "yours": yours.timeline}, ranks=[0])

# %% [markdown]
# When Python drops a tensor, PyTorch's allocator gives its memory back at once to the
# *stream that allocated it*. The next tensor of that stream may get the same memory. The
# allocator does not know that another stream still reads the old tensor.

# %% name="picture-memory" fold=true
lab.lifetime_of_memory()

# %% [markdown]
# Look between the dotted lines: one stream writes what the other still reads.
#
# | | |
# |---|---|
# | `x.record_stream(s)` | tells the allocator that `s` uses `x`. When you *drop* `x`, its memory is kept until `s` has done what was launched on it by then |
#
# It costs memory. While a batch is kept back, the next one gets new memory, at the moment when
# the CPU launches its copy. Here a launch takes no time, so the CPU has launched everything
# at 0 ms. No step has ended by then, so each batch gets memory of its own.
#
# **Exercise 3.3c.** Diagnose the program as given, then repair it. Python may hold at most
# three batches at a time, and copies must still run beside steps. (What the allocator keeps
# after you drop it is not counted.)
#
# - `"kind"`; `"tensor"`: whose memory is given away; `"overwritten_by"`: who gets it.
#
# <details><summary>Hint: tell the allocator</summary>
#
# Which stream reads the batch, and did not allocate it?
#
# </details>
# <details><summary>Hint: without the allocator</summary>
#
# Keep the batch. Before you drop it, let the loading stream wait for the step that read
# it, but not for the step that runs now: that would cost the overlap.
#
# </details>

# %% name="reuse-diagnosis" kind="exercise" exercise="3.3c"
### BEGIN SOLUTION
finding = case.as_handed_out().findings[0]
given_away, new_owner = re.findall(r"batch \d", str(finding))[:2]
reuse_diagnosis = {
    "kind": "reuse",
    "tensor": given_away,
    "overwritten_by": new_owner,
}
### END SOLUTION
### BEGIN STUB
# reuse_diagnosis = {"kind": None, "tensor": None, "overwritten_by": None}
### END STUB

# %% name="check-reuse" kind="check" exercise="3.3c" points=2
_ = check("3.3c", my_number, reuse_diagnosis, train)

# %% [markdown]
# **A door.** You can find a race from its report, and repair it. This is the second good
# place to stop.

# %% [markdown]
# ## 5. A batch to the device (30 minutes)
#
# Now put all of this into one loop that every training has. Samples are in the host's
# memory. A step needs its batch on the device. Each step ends with `loss.item()`, which makes
# the CPU wait until the GPU has computed the loss.


# %% name="plain-feed"
def plain(samples, step):
    for sample in samples:
        step(sample.to(ol.device()))


feeds = {"plain": lab.feed_loop(plain)}
view.draw(feeds["plain"].timeline, title="plain")

# %% [markdown]
# Ordinary memory is **pageable**: the operating system may move it, so the GPU's copy
# engine cannot read it by itself. The CPU has to help, and waits. Memory that is
# **pinned** stays where it is. The copy engine reads it alone, while CPU and GPU go on.
# Here a batch takes 3 ms from pinned memory, and 6 ms from pageable memory.
#
# **The API of this screen.**
#
# | | |
# |---|---|
# | `torch.empty_like(x, pin_memory=True)` | a pinned buffer like `x`; `buffer.copy_(x)` fills it. That is the CPU's work: it takes no time here, and much on a real machine (section 10) |
# | `buffer.to(ol.device(), non_blocking=True)` | a new tensor on the device; launched, not done |
# | `event.synchronize()` | the *CPU* waits for the event |
#
# From pageable memory `non_blocking=True` does not help: the CPU waits all the same.


# %% name="pinned-feed"
def pinned(samples, step):
    for sample in samples:
        buffer = torch.empty_like(sample, pin_memory=True)
        buffer.copy_(sample)
        step(buffer.to(ol.device(), non_blocking=True))


feeds["pinned"] = lab.feed_loop(pinned)
view.draw_many({name: fed.timeline for name, fed in feeds.items()})

# %% [markdown]
# **Predict.** A copy from pinned memory takes 3 ms, a step takes 4 ms, and there are five
# batches. In how many ms can they all be done?

# %% name="predict-feed" kind="lab-only"
feed_ms = None

# %% name="predicted-feed" kind="solution-only"
feed_ms = 23

# %% [markdown]
# **Exercise 3.4.** Write `feed(samples, step)`.
#
# - Call `step(batch)` once for each sample, in order, on the stream that is current when
#   you are called; `batch` is the sample on the device. All samples have one shape.
# - While a step runs, the next batch is copied. In some loops `step` ends with
#   `loss.item()`; in others the CPU runs far ahead. Your loop must be right in both.
# - Copy from pinned memory, on a stream of your own. A pinned buffer may be filled again
#   only when its last copy has *ended*. The CPU fills it, so the CPU must wait for that.
# - Python holds at most three batches at a time.
#
# About 12 lines more.
#
# <details><summary>Hint: the order of launches</summary>
#
# `step(batch)` may not return before the GPU has finished. Launch the copy of the next
# batch *before* you call it.
#
# </details>
# <details><summary>Hint: two buffers</summary>
#
# Sample `i` uses buffer `i % 2`. Keep an event for each buffer, and record it right after
# the copy. The stream of the steps waits for it before the step. The CPU waits for it before
# it fills the buffer again.
#
# </details>
# <details><summary>Hint: a finding about memory handed out again</summary>
#
# The batch is allocated on your stream and read on another. See 3.3c.
#
# </details>


# %% name="feed" kind="exercise" exercise="3.4" reference=true
def feed(samples, step):
    main, loading = streams.current_stream(), streams.Stream()
    buffers = [torch.empty_like(samples[0], pin_memory=True) for _ in range(2)]
    copied = [None, None]  # the event of each buffer's last copy

    def load(i):
        """Fill buffer i % 2 with sample i, launch its copy; return the batch."""
        ### BEGIN SOLUTION
        slot = i % 2
        if copied[slot] is not None:
            copied[slot].synchronize()  # until then the buffer is being read
        buffers[slot].copy_(samples[i])
        with streams.stream(loading):
            batch = buffers[slot].to(ol.device(), non_blocking=True)
            copied[slot] = loading.record_event()
        return batch
        ### END SOLUTION

    ### BEGIN SOLUTION
    following = load(0)
    for i in range(len(samples)):
        batch = following
        main.wait_event(copied[i % 2])
        batch.record_stream(main)
        if i + 1 < len(samples):
            following = load(i + 1)
        step(batch)
    ### END SOLUTION


# %% name="check-feed" kind="check" exercise="3.4" points=3
_ = check("3.4", feed)
lab.keep("3.4", feed)

# %% name="feed-again"
name = f"beside the step ({lab.whose('3.4')})"
feeds[name] = lab.feed_loop(lab.mine_or_ours("3.4"))
fed_ms = {n: fed.step_ns / 1e6 for n, fed in feeds.items()}
lab.side_by_side("five batches, ms", feed_ms, f"{fed_ms[name]:.0f}")
for n, fed in feeds.items():
    print(
        f"{n}: {fed_ms[n]:.0f} ms, {fed.exposed_copy_ns / 1e6:.0f} ms of copies exposed"
    )
view.draw_many({n: fed.timeline for n, fed in feeds.items()})

# %% [markdown]
# Only the first copy has no step beside it. If a copy takes longer than a step, the copy
# engine is the bottleneck, and more streams do not help.

# %% [markdown]
# ## Takeaways (3 minutes)

# %% name="takeaways" fold=true
steps_ms = [timeline.step_ns / 1e6 for timeline in so_far.values()]
print(f"""1. A stream is a queue, not an engine. Two streams that wait for everything on each
   other take {steps_ms[1]:.0f} ms, like one stream. With a wait for each need they take {steps_ms[2]:.0f} ms.
2. Waits form chains: of {len(mine.every_wait)} waits some follow from the others. Where one is missing
   there is a race, whatever the values say. Memory that is given away is one too: use
   record_stream, or keep the tensor.
3. Copy from pinned memory, on a stream of its own, and launch the next copy before the
   step: five batches took {fed_ms["plain"]:.0f} ms from pageable memory, {fed_ms["pinned"]:.0f} from pinned, and {fed_ms[name]:.0f} beside
   the steps.""")

# %% [markdown]
# **Tomorrow, in your own loop.** The third takeaway in one line, for any loader:
#
# ```python
# loader = DataLoader(data, batch_size=64, num_workers=4, pin_memory=True)
# for batch in ol.BatchPrefetcher(loader):  # on the GPU, the next one on its way
#     train_step(batch)
# ```
#
# You write it in lab 08. For streams of your own: one event per need, not `synchronize()`.
#
# ---
# **Stop line.** That is the core. You may close the laptop here. Next: 04, when is it done?
#
# ---

# %% [markdown]
# # Extras
#
# Each stands alone. Take what you like.
#
# ### How much is hidden? (5 minutes)
#
# Here are your streams of 3.1 on another machine: a launch takes the CPU 0.5 ms, and the
# wire needs twice as long.

# %% name="other-machine"
other = lab.play(job, lab.mine_or_ours("3.1"), lab.EAGER)
view.draw(other.timeline, title="slow launches, a slow wire")

# %% name="other-machine-numbers"
report = other.timeline.report()
for name in ("step", "compute", "communication", "hidden", "exposed", "saved"):
    print(f"{name:<14}{getattr(report, f'{name}_ns') / 1e6:5.1f} ms")

# %% [markdown]
# **Exercise 3.1b.** The **overlap fraction** is the part of the communication that is
# hidden. What is it in this run? A number from 0 to 1, within 0.01.
#
# Two other ratios look like it. The **saved fraction** is saved / communication. It is smaller
# here, since the GPU waits for the CPU's launches at the beginning. The **efficiency** is
# saved / what could be saved at best.
#
# <details><summary>Hint: which two numbers?</summary>
#
# Hidden / communication. You need neither the computation nor the step.
#
# </details>

# %% name="fraction" kind="exercise" exercise="3.1b"
### BEGIN SOLUTION
overlap_fraction = report.hidden_ns / report.communication_ns
### END SOLUTION
### BEGIN STUB
# overlap_fraction = None
### END STUB

# %% name="check-fraction" kind="check" exercise="3.1b" points=1
_ = check("3.1b", other, overlap_fraction)

# %% [markdown]
# ## 6. How many streams are enough? (9 minutes)
#
# There are six chains of three pieces each, of 2, 3 and 2 ms. Chain `i` goes to stream `i`
# modulo the number of streams.
#
# - `"kernels"`: all three pieces are kernels;
# - `"one chain"`: each is loaded, worked on and sent, and chain `i + 1` starts after chain
#   `i` has ended;
# - `"batches"`: the same, but no chain needs another.
#
# **Exercise 3.5.** For each of the three, how many streams are enough? Give the smallest
# number, from 1 to 6, whose step is within 1 % of the shortest. Guess first, then try:
# `lab.steps_ms("batches")` times all six.
#
# <details><summary>Hint: what can work at the same time?</summary>
#
# The GPU's processors are one engine: kernels on two streams share it. The copy engine and
# the wire are two more.
#
# </details>

# %% name="enough" kind="exercise" exercise="3.5"
### BEGIN SOLUTION
enough = {}
for kind in ("kernels", "one chain", "batches"):
    steps = lab.steps_ms(kind)
    shortest = min(steps.values())
    enough[kind] = min(n for n in steps if steps[n] <= 1.01 * shortest)
### END SOLUTION
### BEGIN STUB
# enough = {"kernels": None, "one chain": None, "batches": None}
### END STUB

# %% name="check-enough" kind="check" exercise="3.5" points=1
_ = check("3.5", enough)

# %% name="enough-seen" fold=true
if solved("3.5"):
    for kind in ("kernels", "one chain", "batches"):
        steps = lab.steps_ms(kind)
        print(
            f"{kind:<10}", "  ".join(f"{n}: {step:.0f} ms" for n, step in steps.items())
        )
    numbers = (1, 3, 6)
    runs = {f"{n} streams": lab.on_streams("batches", n).timeline for n in numbers}
    display(view.draw_many({f"batches, {name}": run for name, run in runs.items()}))

# %% [markdown]
# (*Saved* in the titles counts messages, not copies: look at the step.)
#
# Use one stream per engine that can work at the same time. More can be *worse*: the kernels
# of many chains share the GPU, so they end together, and then send together.
#
# ## 7. What a synchronize does not wait for (10 minutes)
#
# A sum over the ranks is launched while a side stream is current. The CPU needs it. Meanwhile the main
# stream has long work of its own.


# %% name="synchronize"
def synchronize_side(side, work):
    side.synchronize()


early = lab.finish_with(my_number, synchronize_side)
print(f"the CPU goes on at {early.cpu_ns / 1e6:.0f} ms,", end=" ")
print(f"the sum is there at {early.sum_ns / 1e6:.0f} ms")
view.draw(early.timeline, title="side.synchronize()")

# %% [markdown]
# `dist.all_reduce(x, async_op=True)` runs on a stream of its *communicator*. The side stream
# holds only what came before it. Until somebody waits for the work, the side stream does
# not know that there is a collective.
#
# **Exercise 3.6.** Write `finish(side, work)`. When it returns, the sum must be there. So
# the CPU itself waits, but not for the main stream's work. 3 lines.
#
# <details><summary>Hint</summary>
#
# `work.wait()` makes the stream that is current *at the call* wait for the collective.
#
# </details>


# %% name="finish" kind="exercise" exercise="3.6"
def finish(side, work):
    ### BEGIN SOLUTION
    with streams.stream(side):
        work.wait()
    side.synchronize()
    ### END SOLUTION


# %% name="check-finish" kind="check" exercise="3.6" points=1
_ = check("3.6", my_number, finish)

# %% [markdown]
# ## 8. Past the host, or through it? (12 minutes)
#
# There are eight nodes with one GPU each. With **GPUDirect RDMA** the network card reads the
# GPU's memory itself. Without it a message is **staged**: it goes over PCIe into the host's
# memory, and from there to the card. Batches come over the same PCIe.

# %% name="knobs"
knobs = view.explorer(
    lab.turn,
    lab.KNOBS,
    what_if={"GPUDirect RDMA": lambda s: {"staged": False}},
    keep=("expensive", "free", "copy"),
)
knobs

# %% [markdown]
# **Exercise 3.7.** Find three settings and keep each with its button. Then
# `found = dict(knobs.kept)`. What you kept is gone when the kernel stops, so paste what
# `print(dict(knobs.kept))` shows before you hand it in. (Without knobs, type
# `knobs.set(batch_mib=256)`, then `knobs.keep("expensive")`.) Or type dicts of `gbit_per_s`
# (25, 100, 200, 400), `batch_mib` (1, 16, 64, 256, 512) and `ktokens` (2, 4, 8, 16, 32). Each
# is judged with staging and without.
#
# - `"expensive"`: staging makes the step at least 20 % longer;
# - `"free"`: the network is busy for half of the step or more, and staging costs under 1 %;
# - `"copy"`: staging makes the *copy* 1.5 times as long, and the step under 1 % longer.
#
# <details><summary>Hint: when do they meet?</summary>
#
# PCIe is faster than a slow network. Staging hurts where the network alone nearly fills
# PCIe, or where a copy uses PCIe at the same time.
#
# </details>

# %% name="found" kind="exercise" exercise="3.7"
### BEGIN SOLUTION
found = {
    "expensive": {"gbit_per_s": 400, "batch_mib": 256, "ktokens": 8},
    "free": {"gbit_per_s": 25, "batch_mib": 16, "ktokens": 8},
    "copy": {"gbit_per_s": 100, "batch_mib": 512, "ktokens": 8},
}
### END SOLUTION
### BEGIN STUB
# start = {"gbit_per_s": 200, "batch_mib": 64, "ktokens": 8}  # the knobs' start
# found = {"expensive": start, "free": None, "copy": None}
### END STUB

# %% name="found-seen" fold=true
for name in ("expensive", "free", "copy"):
    if problem := lab.problem_with(name, found):
        print(problem)
    else:
        direct = lab.turn(**{**found[name], "staged": False})
        staged = lab.turn(**{**found[name], "staged": True})
        print(f"{name}: step {direct.step_ns / 1e6:.1f} ms direct,", end=" ")
        print(f"{staged.step_ns / 1e6:.1f} staged; copy", end=" ")
        print(f"{lab.copy_ms(direct):.1f} ms direct, {lab.copy_ms(staged):.1f} staged")

# %% name="check-found" kind="check" exercise="3.7" points=1
_ = check("3.7", found)

# %% [markdown]
# ## 9. Priorities (3 minutes)
#
# The GPU prefers the kernels of a stream with `streams.Stream(priority=-1)`. The virtual
# cluster keeps the number and does nothing with it: its kernels share the GPU evenly.


# %% name="priority"
def beside(priority):
    x = torch.ones(512, 512)
    main, urgent = streams.current_stream(), streams.Stream(priority=priority)
    urgent.wait_stream(main)
    for _ in range(8):
        torch.mm(x, x)
    with streams.stream(urgent):
        x.sum()
    main.wait_stream(urgent)


for priority in (0, -1):
    step_ns = ol.run(beside, priority, world_size=1).timeline.step_ns
    print(f"priority {priority}: step {step_ns / 1e3:.1f} us")

# %% [markdown]
# On a GPU a priority decides which *waiting* blocks of kernels go next. It interrupts
# nothing that runs. The next section shows what it is worth.
#
# ## 10. On real GPUs (12 minutes)
#
# The same programs, measured and stored; nothing is measured now.

# %% name="gpu-table"
lab.on_gpus()

# %% [markdown]
# *Section 1.* A unit is a large matmul, or a message that takes about as long. The order is
# the same as on the virtual cluster. The gain is smaller, because matmuls and messages slow
# each other down. The prediction knows that; it is a little too long because its factors
# were measured with matmuls of other sizes.
#
# *Section 3.* Waiting for an event is not much cheaper than `event.synchronize`. But while
# the CPU waits it launches nothing, and the table does not count that.
#
# *Section 4.* The two programs were right 20 times while the GPU was quiet, and wrong 20
# times while it was busy: a kernel that only waits stood before the one that was raced.
# Repaired, they were right every time. That is why tests do not find races.
#
# *Section 5.* Copied ahead, from memory that is pinned already, a batch costs over a quarter
# more than its step alone. Half of that is the first of six copies, which has no step
# beside it. In 3.4 the CPU also *fills* the pinned buffers: that costs nothing on the virtual
# clock, and it is the bottleneck here. A `DataLoader` with `pin_memory=True` fills them on a
# thread of its own.
#
# *Section 6.* Here the virtual cluster is most wrong. It lets the kernels of two streams
# share one engine, so that nothing is gained. That is nearly true of wide kernels, which
# fill the GPU, and wrong of narrow ones, which leave some of its processors free.
#
# *Sections 7 and 9.* `stream.synchronize` returns long before the sum is there. And the
# priority hardly matters here: with either, the small kernels take twice as long as alone.
#
# ### A tool that looks for races (5 minutes)
#
# `TORCH_CUDA_SANITIZER=1` makes PyTorch look for races in a live run: it follows kernels,
# streams and events as they are launched. Here are four small races and their repairs. The
# virtual cluster runs them now; the sanitizer ran the same code on a GPU. `no_wait` reads a
# sum before `work.wait()`.

# %% name="gpu-sanitizer"
lab.beside_the_sanitizer()

# %% name="gpu-sanitizer-report" fold=true
lab.sanitizer_report("event")

# %% [markdown]
# Use it: it sees the run that you have, with Python stacks. But know what it misses. It
# forgets a tensor when its memory is freed, so it cannot see that this memory is given
# away. And it takes a collective for work of the stream that launched it.
#
# ## 11. Where the model lies
#
# - Kernels on two streams share the GPU evenly here, even if there is room for both.
# - Launching, recording an event and filling pinned memory cost the CPU nothing here.
# - Messages, copies and kernels do not slow each other down in this lab's slow motion. The
#   profiles of real machines have factors for messages and kernels.
#
# ## In production
#
# - PyTorch FSDP2: `FSDPCommContext` in
#   `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py` has a stream for each job
#   (all-gather, copy-in, reduce-scatter, all-reduce); `AllGatherState` and
#   `ReduceScatterState` keep memory alive with the event that frees it, and no
#   `record_stream`.
# - vLLM: `AsyncGPUModelRunnerOutput` in `vllm/v1/worker/gpu_model_runner.py` copies sampled
#   tokens to the host on `async_output_copy_stream`, and waits for an event only when
#   somebody asks for them: section 5 the other way round.
# - PyTorch's allocator: `recordStream` in `c10/cuda/CUDACachingAllocator.cpp`. The
#   `DataLoader` pins on a thread: `torch/utils/data/_utils/pin_memory.py`.
#
# Further reading: the chapter on asynchronous execution of the CUDA C++ Programming Guide.
