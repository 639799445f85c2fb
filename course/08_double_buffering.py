# %% [markdown]
# # One fills while the other empties
#
# **Lab 08: double buffering.** Core: three sittings of 60, 40 and 20 minutes, with doors
# after sections 3 and 4. Extras: 55 more. You need no GPU.
#
# After the core you can
#
# - write a **prefetcher**, which brings the next batch to the GPU beside the step;
# - say when a buffer may be filled again, and who has to wait for that;
# - send gradients beside the next step, and say what that does to the training;
# - tell from a bill which buffer to have twice.
#
# In the extras you keep two sets of weights that stay one model.
#
# It builds on lab 03 (streams, events, pinned memory) and on lab 04: a collective with
# `async_op=True` travels beside the computation, and `work.wait()` makes the *current stream*
# wait.
#
# **How it works.** Run the cells from top to bottom. A check tells you what it saw, in
# numbers, and draws what *your* code did. No exercise needs the one before it: where
# yours is not finished, the course's own runs in its place and the cell says so.

# %% name="setup"
import itertools

import torch
import torch.distributed as dist

import overlaplab as ol
from overlaplab import streams, view
from overlaplab.grading import check
from overlaplab_course import lab08 as lab

# %% [markdown]
# ## 1. The waste (10 minutes)
#
# A batch goes through three hands before a step has computed with it. The CPU **fills**
# pinned memory with it. The copy engine **copies** it to the device. The GPU computes.
#
# ```
#                  the host's memory                the device's memory
#               +----------------------+          +----------------------+
#    loader --> |  pinned A   pinned B | --copy-> |  device A   device B | --> step
#      the CPU  +----------------------+  the     +----------------------+  the compute
#      fills                              engine                            stream
# ```
#
# A place for one batch is a **slot**. Nobody may put anything into a slot that somebody
# else still reads. With one slot of each kind, copies and steps therefore take turns.
#
# Everything is in slow motion: a batch takes 2 ms to fill, 3 to copy, and its step 4.
# There are six batches. The last is shorter, as last batches often are: its fill takes 1.3 ms and
# its copy 2.


# %% name="one-slot"
def one_slot(loader, pinned, device):
    for batch in loader:
        host = lab.part(pinned[0], batch)  # as many rows of the slot as the batch has
        ours = lab.part(device[0], batch)
        for slot, tensor in zip(host, batch, strict=True):
            slot.copy_(tensor)  # the CPU fills
        for slot, tensor in zip(ours, host, strict=True):
            slot.copy_(tensor, non_blocking=True)  # the copy engine copies
        streams.synchronize()  # now the pinned slot is free
        yield ours  # the caller's step


alone = lab.feed_slots(one_slot)
so_far = {"one slot of each kind": alone}
print(f"{alone.step_ns / 1e6:.0f} ms, GPU idle {alone.gpu_idle_ns / 1e6:.0f} ms")
view.draw(alone.timeline, title="one slot of each kind")

# %% [markdown]
# How to read it: `cpu` fills (dark) and waits (grey); `default` computes. Copies are on
# `default`, too. A batch is two tensors, so a fill and a copy have two pieces. The lower lanes
# are the *slots*: who writes into each, or reads from it, and when. `pinned B` and `device B`
# have no lane, since nobody uses them.
#
# Look at `device A`: it is busy all the time, first written, then read. The copy cannot write while
# the step reads, and the step cannot read while the copy writes. So the GPU is idle for nearly half
# of the time.
#
# **Predict.** With two slots of each kind, one fills while the other empties. How many ms
# do the six batches take at best? Type your guess. Nobody marks it.

# %% name="predict-two" kind="lab-only"
two_slots_ms = None

# %% name="predicted-two" kind="solution-only"
two_slots_ms = 29

# %% name="target" fold=true
target = lab.ours_in_slots()
lab.side_by_side("two slots, ms", two_slots_ms, f"{target.step_ns / 1e6:.0f}")
view.draw_many(
    {
        "one slot of each kind": alone.timeline,
        "two slots of each kind": target.timeline,
    }
)

# %% [markdown]
# The first fill and the first copy have nothing beside them: 2 + 3 ms. From then on the slowest of
# the three hands never stops. Here that is the GPU: 6 x 4 ms. Compare the lanes of A and B of one
# kind: while A is read, B is written.
#
# You build it in two halves: first the device's side (section 2), then the host's (3).

# %% [markdown]
# ## 2. The next batch, beside the step (22 minutes)
#
# Here batches come pinned, each in memory of its own, as from
# `DataLoader(..., pin_memory=True)`. So the CPU has nothing to fill. The device's memory
# comes from the allocator. The training loop stays as everybody writes it:


# %% name="loop"
def train(prefetch, loader, step):
    for batch in prefetch(loader):
        step(batch)


# %% [markdown]
# So a prefetcher is a **generator**: it stops at each `yield` until the loop asks for the
# next batch. What you write before a `yield` is launched *before* the step of that batch. What you
# write after it is launched after that step.


# %% name="in-turn"
def in_turn(loader):
    for batch in loader:
        yield tuple(tensor.to(ol.device(), non_blocking=True) for tensor in batch)


fed = {"in turn": lab.feed(in_turn)}
view.draw(
    fed["in turn"].timeline, title="in turn: five batches, each step reads its loss"
)

# %% [markdown]
# **Exercise 8.1.** Write `prefetch(loader)`, a generator.
#
# - `loader` yields batches, tuples of pinned tensors. You do not know how many: perhaps none. The
#   last one is shorter.
# - Yield each batch on the device, in the loader's order, as a tuple of tensors. Whatever is
#   launched next on the current stream may read them.
# - While a step runs, the next batch is copied on a stream of your own. In some loops a
#   step ends with `loss.item()`, so that the CPU waits in it; in others the CPU runs ahead.
# - The prefetcher itself makes the CPU wait for nothing.
# - At most three batches are on the device at a time. (Memory that is free, but kept by the
#   allocator, does not count.) And at most two that you took from the loader still wait for
#   their step.
#
# About 11 lines. `load` is given; you may also write all of it in your own way.
#
# <details><summary>Hint: the order</summary>
#
# Keep one batch `ahead`. For each that the loader gives: launch its copy, *then* yield the
# one that was ahead.
#
# </details>
# <details><summary>Hint: ready</summary>
#
# Two things of lab 03: the current stream waits for the event behind the copy, and the
# allocator hears that another stream reads this memory: `tensor.record_stream(main)`.
#
# </details>
# <details><summary>Hint: the end</summary>
#
# When the loop over the loader is over, one batch is still ahead, unless there was none.
#
# </details>


# %% name="prefetch" kind="exercise" exercise="8.1" reference=true
def prefetch(loader):
    main, copying = streams.current_stream(), streams.Stream()

    def load(batch):
        """Launch the copies of a batch; return it on the device, and an event."""
        with streams.stream(copying):
            ours = tuple(t.to(ol.device(), non_blocking=True) for t in batch)
            return ours, copying.record_event()

    def ready(batch, copied):
        """The batch, in order behind its copy and safe from the allocator."""
        ### BEGIN SOLUTION
        main.wait_event(copied)
        for tensor in batch:
            tensor.record_stream(main)
        return batch
        ### END SOLUTION

    ### BEGIN SOLUTION
    ahead = None
    for batch in loader:
        following = load(batch)
        if ahead is not None:
            yield ready(*ahead)
        ahead = following
    if ahead is not None:
        yield ready(*ahead)
    ### END SOLUTION


# %% name="check-prefetch" kind="check" exercise="8.1" points=3
_ = check("8.1", prefetch)
lab.keep("8.1", prefetch)

# %% name="prefetch-again"
fed[f"one ahead ({lab.whose('8.1')})"] = lab.feed(lab.mine_or_ours("8.1"))
for name, run in fed.items():
    print(
        f"{name}: {run.step_ns / 1e6:.0f} ms, GPU idle {run.gpu_idle_ns / 1e6:.0f} ms"
    )
view.draw_many({name: run.timeline for name, run in fed.items()})

# %% [markdown]
# From the end of the first copy on, `default` is full. The GPU waits for one copy only, however
# many batches there are.

# %% [markdown]
# ## 3. When may a slot be filled again? (27 minutes)
#
# Real loaders give ordinary, **pageable** memory. A copy from there makes the CPU wait, whatever
# `non_blocking` says. So somebody has to put each batch into pinned memory first. Pinning new memory
# for each batch is slow, because the operating system takes part. So you keep two pinned slots and
# fill them in turn. With two *device* slots as well, the loop allocates nothing at all.
#
# But then *you* decide when memory is used again. No allocator looks after it. Here are three
# moments in the life of batch 0, which goes through `pinned A` and `device A`:
#
# 1. its copy has been launched;
# 2. its copy has ended;
# 3. its step has ended.
#
# **Predict.** Batch 2 is the next one in A. From which of these moments on may the CPU fill
# `pinned A` again? From which on may the copy engine write `device A`? Answer with 1, 2 or 3.

# %% name="predict-moments" kind="lab-only"
pinned_free, device_free = None, None

# %% name="predicted-moments" kind="solution-only"
pinned_free, device_free = 2, 3

# %% name="moments" fold=true
lab.side_by_side("pinned A is free from moment", pinned_free, 2)
lab.side_by_side("device A is free from moment", device_free, 3)

# %% [markdown]
# A launch is not a start: at moment 1 nothing has been read yet. And the two waits are of
# different kinds. The *CPU* fills, so the CPU has to wait for the copy:
# `event.synchronize()`. The copy *stream* writes the device's slot, so the stream has to
# wait for the step: `wait_event`, and the CPU goes on.
#
# | who | waits for | how |
# |---|---|---|
# | the CPU, before it fills a pinned slot | the slot's last copy | `event.synchronize()` |
# | the copy stream, before it writes a device slot | the step that read it | `copying.wait_event(event)` |
# | the compute stream, before a step | the batch's copy | `main.wait_event(event)` |
#
# You know the third from 8.1. For the second you need an event behind the step. The loop asks for
# the next batch when it has launched the step of the last one. So record the event *then*, on the
# current stream: it stands behind that step.
#
# **The API of this screen.** `lab.part(slot, batch)` gives the first rows of a slot's
# tensors, as many as the batch has. They are views. After a shorter batch the slot still has old
# rows at its end, and nobody may read those.
#
# **Exercise 8.2.** Below is `double_buffered(loader, pinned, device)`, a generator like 8.1. Only the
# waits are missing. Put them in: the three of the table, and no others.
#
# - `loader` as before, but batches are tuples of *pageable* tensors. `pinned` and `device`
#   are lists of two slots; a slot is a tuple of tensors, each with room for a whole batch.
# - Batch `i` goes through `pinned[i % 2]` and `device[i % 2]`. It is yielded as views of the
#   device slot. Allocate nothing.
# - Fills, copies and steps go on side by side. The check also has steps that end with
#   `loss.item()`, and a loop in which one fill takes long.
#
# About 9 lines more. You may also write all of it in your own way.
#
# <details><summary>Hint: two lists of events</summary>
#
# `copied[slot]`: recorded behind the slot's copies. It is waited for twice, by the CPU before
# the next fill, and by the current stream before the step. `read[slot]`: recorded behind the
# step.
#
# </details>
# <details><summary>Hint: the first time</summary>
#
# A slot that nobody has used yet has no event. `if copied[slot] is not None: ...`
#
# </details>
# <details><summary>Hint: behind the step</summary>
#
# What stands right behind a `yield` runs when the loop asks for the next batch. The step has
# been launched then: `read[i % 2] = main.record_event()`.
#
# </details>


# %% name="double-buffered" kind="exercise" exercise="8.2" reference=true
def double_buffered(loader, pinned, device):
    main, copying = streams.current_stream(), streams.Stream()
    copied, read = [None, None], [None, None]  # events, by slot

    def load(i, batch):
        """Fill a pinned slot with batch i, launch its copies; return the views."""
        slot = i % 2
        host, ours = lab.part(pinned[slot], batch), lab.part(device[slot], batch)
        ### BEGIN SOLUTION
        if copied[slot] is not None:
            copied[slot].synchronize()  # until then the copy engine reads it
        ### END SOLUTION
        ### BEGIN STUB
        # # may the CPU fill it?
        ### END STUB
        for target, source in zip(host, batch, strict=True):
            target.copy_(source)  # the CPU fills
        ### BEGIN SOLUTION
        if read[slot] is not None:
            copying.wait_event(read[slot])  # until then a step reads it
        ### END SOLUTION
        ### BEGIN STUB
        # # may the copy engine write it?
        ### END STUB
        with streams.stream(copying):
            for target, source in zip(ours, host, strict=True):
                target.copy_(source, non_blocking=True)
            ### BEGIN SOLUTION
            copied[slot] = copying.record_event()
            ### END SOLUTION
            ### BEGIN STUB
            # # who will want to know that it has ended?
            ### END STUB
        return ours

    def step_with(i, batch):
        """Hand batch i out, in order behind its copies."""
        ### BEGIN SOLUTION
        main.wait_event(copied[i % 2])
        yield batch
        read[i % 2] = main.record_event()
        ### END SOLUTION
        ### BEGIN STUB
        # yield batch
        ### END STUB

    coming = None
    for i, batch in enumerate(loader):
        before, coming = coming, (i, load(i, batch))
        if before is not None:
            yield from step_with(*before)
    if coming is not None:
        yield from step_with(*coming)


# %% name="slots-seen"
mine = lab.feed_slots(double_buffered)
print(f"{len(mine.findings)} findings")
for finding in mine.findings[:1]:
    lab.print_finding(finding)
view.draw(mine.timeline, title="as you have it now")

# %% [markdown]
# A finding names some bytes and two who touch them: nothing makes the second wait for the first.
# Where it says `the CPU`, it means a fill.

# %% name="check-double-buffered" kind="check" exercise="8.2" points=4
_ = check("8.2", double_buffered)
lab.keep("8.2", double_buffered)

# %% name="slots-again"
so_far[f"two slots ({lab.whose('8.2')})"] = lab.feed_slots(lab.mine_or_ours("8.2"))
slots_ms = [run.step_ns / 1e6 for run in so_far.values()]
for name, run in so_far.items():
    print(
        f"{name}: {run.step_ns / 1e6:.0f} ms, GPU idle {run.gpu_idle_ns / 1e6:.0f} ms"
    )
view.draw_many({name: run.timeline for name, run in so_far.items()})

# %% [markdown]
# Now a loop whose steps read their loss. The CPU waits in each step, and while it waits it cannot
# fill. More slots would not help: there is only one CPU thread.

# %% name="thread"
waiting = lab.ours_in_slots(reads_loss=True)
print(f"the same loop, reading each loss: {waiting.step_ns / 1e6:.0f} ms", end=" ")
print(f"instead of {lab.ours_in_slots().step_ns / 1e6:.0f}")
view.draw(waiting.timeline, title="two slots, each step reads its loss")

# %% [markdown]
# That is why `DataLoader(pin_memory=True)` has a *thread* of its own: it fills while your thread
# waits.
#
# The library's `ol.BatchPrefetcher` is 8.2 for real loaders: batches may be nested, slots grow when
# a batch does not fit, and an error of the loader reaches you. In the loop above, without
# `loss.item()`:

# %% name="library-batches"
theirs = lab.feed_slots(lambda loader, pinned, device: ol.BatchPrefetcher(loader))
print(f"ol.BatchPrefetcher: {theirs.step_ns / 1e6:.0f} ms")

# %% [markdown]
# **A door.** Both halves of the prefetcher are done: batches come beside the steps. This is a good
# place to stop for today. When you come back, run all cells once: what you solved is in the
# notebook.

# %% [markdown]
# ## 4. One gradient step late (32 minutes)
#
# Gradients are a buffer, too: the backward pass fills it, the messages empty it. With one
# set, the next backward pass has to wait until the messages have arrived and the optimizer has
# used them.
#
# Here is a net of six equal layers on two ranks, four steps of it. Each gradient is sent
# when it is there, as in labs 05 and 06. The link is slow: all messages of a step take nearly as
# long as its forward, backward and update together.

# %% name="from-hooks"
undelayed = lab.train(lab.FromHooks)
print(lab.costs_text(undelayed))
view.draw(undelayed.timeline, title="one set of gradients")

# %% [markdown]
# Only the rest of the backward pass can hide a gradient, and that is too short. `default` is
# empty while the last messages travel.
#
# What if the optimizer used the averages of the step *before*? Then messages have the whole next
# step to travel, forward and backward. That needs a second set of gradients: one travels while the
# other is filled. Call them A and B.
#
# ```
# step 1     | step 2                           | step 3
# backward   | forward  | backward   | update   | forward  | backward   | update
# fills A    | A travels ............| uses A   |          | fills A    | A travels ...
#            |          | fills B    | B travels ........................| uses B
# ```
#
# **Predict.** How many ms do the four steps take then? The line above the figure has what you
# need. The messages of the last step have nothing to compute beside them.

# %% name="predict-late" kind="lab-only"
late_ms = None

# %% name="predicted-late" kind="solution-only"
late_ms = 29

# %% name="late-seen" fold=true
ours = lab.ours_late()
lab.side_by_side("four steps, ms", late_ms, f"{ours.step_ns / 1e6:.0f}")
both = {"one set of gradients": undelayed, "two sets, one step late": ours}
view.draw_many({name: run.timeline for name, run in both.items()})

# %% [markdown]
# The gradients of step 1 travel beside forward and backward 2. Only the messages of the last step
# have nothing beside them. So four steps take 4 x 6.0 ms, and the last messages 5.3. It is about
# 1 ms less than that sum, because one update runs beside the last messages: the one that uses the
# gradients of step 3.
#
# But this is *another algorithm*. With weights $w_n$, the gradient $g_n$ that step $n$ computes from
# them, and the learning rate $\eta$:
#
# $$w_{n+1} = w_n - \eta\, g_{n-1} \quad\text{in the place of}\quad w_{n+1} = w_n - \eta\, g_n$$
#
# Step 1 has no averages yet, so it must change nothing. And after the last step one update is left
# to do. Here is the loop around your class:


# %% name="late-loop"
def train_late(model, batches, optimizer, reducer):
    for batch in batches:
        model(batch).backward()
        reducer.wait()  # now .grad holds the averages of the step before, or None
        optimizer.step()
        optimizer.zero_grad()  # drops what .grad holds
    if reducer.flush():  # now .grad holds the last averages
        optimizer.step()
        optimizer.zero_grad()


# %% [markdown]
# **Exercise 8.3.** Write the class `LateReducer`.
#
# - `wait()` is called after each backward pass, when every parameter's `.grad` has this rank's
#   gradient. It sends each of them once, to become the average over the ranks. In `.grad` it leaves
#   the averages of the step before, for whatever is launched next on the current stream.
# - In the first step there are no averages: leave `None`, and the optimizer does nothing. (With
#   zeros it would still apply momentum and weight decay.)
# - `flush()` leaves the last averages in `.grad` and returns True. Where nothing travels, it
#   returns False. Afterwards training may go on, as from step 1.
# - At most two sets of gradients exist at any time. The CPU waits for nothing.
#
# About 14 lines. Weights are equal on all ranks at the start.
#
# <details><summary>Hint: two sets without a copy</summary>
#
# `.grad` is a reference. Take the tensors out of the parameters and send *them*; put the
# other set's tensors in. In the next backward pass autograd makes new ones, since `.grad` is
# None by then.
#
# </details>
# <details><summary>Hint: what to keep</summary>
#
# `self.travelling = (grads, works)`, or None. `work.wait()` before a gradient is used, and not
# earlier.
#
# </details>
# <details><summary>Hint: the mean</summary>
#
# An all-reduce adds up. `grad /= dist.get_world_size()` divides in place. `grad / n` would make a
# third set.
#
# </details>


# %% name="late-reducer" kind="exercise" exercise="8.3" reference=true
class LateReducer:
    """Gives each step the averages of the step before."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.travelling = None

    def wait(self):
        ### BEGIN SOLUTION
        grads = [p.grad for p in self.parameters]
        works = [dist.all_reduce(grad, async_op=True) for grad in grads]
        self.flush()
        self.travelling = grads, works
        ### END SOLUTION

    def flush(self):
        ### BEGIN SOLUTION
        if self.travelling is None:
            for parameter in self.parameters:
                parameter.grad = None
            return False
        for parameter, grad, work in zip(
            self.parameters, *self.travelling, strict=True
        ):
            work.wait()
            grad /= dist.get_world_size()
            parameter.grad = grad
        self.travelling = None
        return True
        ### END SOLUTION


# %% name="check-late" kind="check" exercise="8.3" points=4
_ = check("8.3", LateReducer)
lab.keep("8.3", LateReducer)

# %% name="late-again"
both[f"two sets ({lab.whose('8.3')})"] = lab.train(lab.mine_or_ours("8.3"))
for name, run in both.items():
    print(f"{name:<24} {lab.costs_text(run)}")

# %% [markdown]
# ### What does it do to the loss? (7 minutes)
#
# Take the smallest model: one weight $w$ with the loss $w^2/2$, so the gradient is $w$. Training
# works if $w$ shrinks towards 0. Undelayed, $w_{n+1} = w_n - \eta\, w_n$ shrinks as long as
# $\eta < 2$.
#
# **Predict.** Up to which learning rate does $w_{n+1} = w_n - \eta\, w_{n-1}$ shrink?

# %% name="predict-rate" kind="lab-only"
largest_rate = None

# %% name="predicted-rate" kind="solution-only"
largest_rate = 1.0

# %% name="rates" fold=true
print("of rates in steps of 0.01 the largest with which w shrinks:")
for momentum in (0.0, 0.9):
    at_once, late = (
        lab.largest_rate(late=late, momentum=momentum) for late in (False, True)
    )
    print(f"momentum {momentum}: undelayed {at_once}, one step late {late}")
lab.side_by_side("late, it shrinks up to", largest_rate, "1, and no longer at 1")
swings = ", ".join(f"{w:.1f}" for w in lab.walk(1.1, late=True)[:14])
print(f"w at rate 1.1, one step late: {swings}")

# %% [markdown]
# Half of it. A late gradient fits the place where the weight *was*. So the weight goes too far, comes
# back too far, and swings. With momentum it is far worse, because momentum adds up what is late.
# Undelayed, momentum 0.9 allows a *larger* rate than no momentum. One step late, the rate has to
# stay under 0.1.
#
# Here is a small net, trained by SGD with momentum 0.9, both ways:

# %% name="losses"
runs = {
    rate: (lab.losses(rate, late=False), lab.losses(rate, late=True))
    for rate in (0.02, 0.05, 0.1)
}
for rate, (at_once, late) in runs.items():
    print(f"rate {rate}: the loss at the end is {lab.last(at_once):.2f},", end=" ")
    print(f"one step late {lab.last(late):.2f}")
lab.draw_losses(runs)

# %% [markdown]
# At the small rate the two curves end close together. At the middle one the late curve is behind.
# At the largest one undelayed training is best, and the late one explodes. So do not look at the
# time alone: look at the loss at *your* learning rate, too.
#
# The library's `ol.DoubleBufferedReducer` is this class with buckets that leave from hooks. Here
# with small ones, in the same loop:

# %% name="library-late"
theirs = lab.train(lambda model: ol.DoubleBufferedReducer(model, bucket_mib=0.02))
print(lab.costs_text(theirs))

# %% [markdown]
# It takes a little longer, because it has one thing more to send: before the first step it brings
# rank 0's weights to all ranks.

# %% [markdown]
# **A door.** Gradients travel a step late, and you know what that costs. This is a good place to
# stop for today. What is left is to decide what to have twice. When you come back, run all cells
# once.

# %% [markdown]
# ## 5. The bill (18 minutes)
#
# A second buffer costs its bytes. It wins at most the time in which one thing had to wait for the
# other. Here are both, counted in the runs of this lab:

# %% name="own-bill" fold=true
print(lab.own_bill(alone, undelayed))

# %% [markdown]
# Now a whole training, on 8 nodes with 100 Gbit/s Ethernet. It learns from images, so a batch is
# large. A step copies its batch and computes. Its gradients leave in eight messages, the first of
# them during the backward pass. After every fourth step the weights are copied to the host, to be
# evaluated there. While they are copied, the optimizer may not write them, unless there is a second
# set: one is copied while the other is updated.

# %% name="bill-line"
job = lab.EXAMPLE
for name, ms in job.ms.items():
    print(f"{name:<10} {ms:5.1f} ms per step")
print(job.mib)

# %% [markdown]
# `messages` is the time that the wire is busy. `exposed` is the part of it with no computing beside
# it. `publish` is the copy of the weights: a quarter of its time, since it comes every fourth step.
# The last line is what a second buffer of each takes, in MiB.
#
# **Predict.** You may double one of the three, `"batch"`, `"gradients"` or `"weights"`. Which
# wins most?

# %% name="predict-bill" kind="lab-only"
wins_most = None

# %% name="predicted-bill" kind="solution-only"
wins_most = "gradients"

# %% name="bill" fold=true
won = {name: job.step_ms([]) - job.step_ms([name]) for name in job.mib}
lab.side_by_side("wins most", wins_most, max(won, key=won.get))
print(lab.bill_table())

# %% [markdown]
# Each row is a run of sixteen steps. With nothing doubled the step is a sum: `compute` + `copy` +
# `exposed` + `publish`. Doubling takes one of them out of the sum: `copy` for the batch, `exposed`
# for gradients, `publish` for weights. That work now goes on beside the computing.
#
# But it still has to be done once a step. With batch and gradients doubled, the step is hardly
# longer than its `messages`: the wire is full. So a third buffer wins nothing.
#
# **Exercise 8.5.** Write `what_to_double(ms, mib, free_mib)`.
#
# - `ms`: the five numbers of a step, as printed above. `mib`: what a second buffer takes.
#   `free_mib`: memory for second buffers.
# - Return the list of what to double. Some choices fit into the memory, and one of those has the
#   shortest step. Take the choice with the fewest MiB whose step is at most 1 % longer than that.
#
# That choice is written for you. What is missing is how long a step takes: about 4 lines. The check
# asks for ten trainings on four machines and times your answers. Each may lose at most a fifth of
# what there was to gain. No constant answer passes.
#
# <details><summary>Hint: one after the other</summary>
#
# `compute`, and for each buffer that is not doubled `copy`, `exposed` or `publish`.
#
# </details>
# <details><summary>Hint: beside the computing</summary>
#
# The step is at least as long as `copy` if the batch is doubled, as `messages` if gradients are,
# and as `publish` if weights are.
#
# </details>


# %% name="what-to-double" kind="exercise" exercise="8.5"
def what_to_double(ms, mib, free_mib):
    """The fewest second buffers with a step within 1 % of the best that fits."""
    choices = [c for n in range(4) for c in itertools.combinations(mib, n)]

    def step_ms(doubled):  # some of "batch", "gradients", "weights"
        ### BEGIN SOLUTION
        in_line = {"batch": "copy", "gradients": "exposed", "weights": "publish"}
        beside = {**in_line, "gradients": "messages"}
        line = ms["compute"] + sum(ms[in_line[b]] for b in mib if b not in doubled)
        return max([line, *(ms[beside[b]] for b in doubled)])
        ### END SOLUTION

    def size_mib(doubled):
        return sum(mib[b] for b in doubled)

    fitting = [c for c in choices if size_mib(c) <= free_mib]
    best_ms = min(map(step_ms, fitting))
    close = [c for c in fitting if step_ms(c) <= 1.01 * best_ms]
    return list(min(close, key=size_mib))


# %% name="check-bill" kind="check" exercise="8.5" points=3
_ = check("8.5", what_to_double)

# %% [markdown]
# How good is such an estimate? Here is one of the ten: a language model on four nodes with
# InfiniBand.

# %% name="hidden-not-saved" fold=true
nodes = lab.EXAMPLE_IB
line_ms = nodes.ms["exposed"]
won_ms = nodes.step_ms([]) - nodes.step_ms(["gradients"])
print(f"gradients one step late: {line_ms:.1f} ms are no longer exposed,", end=" ")
print(f"and the step is {won_ms:.1f} ms shorter")

# %% [markdown]
# Hidden is not saved. On this machine messages and kernels slow one another: what goes on beside the
# computing makes the computing longer. So the exposed time promises more than you win.

# %% [markdown]
# ## Takeaways (2 minutes)

# %% name="takeaways" fold=true
step_ms = [run.step_ns / 1e6 / 4 for run in (undelayed, ours)]
print(f"""1. With one slot copies and steps take turns: {slots_ms[0]:.0f} ms. With two, the slowest of CPU, copy
   engine and GPU sets the pace: {slots_ms[1]:.0f} ms. A slot is free when its reader has ended:
   the CPU waits for the copy, the copy for the step.
2. Gradients one step late hide behind a whole step, {step_ms[1]:.1f} ms instead of {step_ms[0]:.1f}. It is another
   algorithm: on w * w / 2 the largest learning rate is half, and with momentum far less.
3. Double what the step waits for, and stop when an engine is full: on {job.profile} a step
   of {job.step_ms([]):.0f} ms becomes {job.step_ms(["batch", "gradients"]):.0f} with two second buffers and no less with three.""")

# %% [markdown]
# **Tomorrow, in your own loop.** Ask first what your step waits for: print
# `ol.diagnose(profile.timeline)`. If it waits for batches, a second slot is one line:
#
# ```python
# for batch in ol.BatchPrefetcher(DataLoader(data, 64, num_workers=4, pin_memory=True)):
#     train_step(batch)
# ```
#
# If it waits for messages, and your learning rate has room: `ol.DoubleBufferedReducer(model)`.
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
# ## 6. Two sets of weights (16 minutes)
#
# In 8.3 the next step still waits for the update, which writes the weights that the step reads. With
# two sets of weights, one is read while the other is updated.
#
# Here is such a program, with a fault that people really make. A step reads `front`. Beside it,
# `back` is updated with the gradient of the step before, as soon as its message has come. Then the
# two change places: only the names are exchanged, and no byte is moved.

# %% name="my-number"
my_number = 4  # any whole number: your day of birth, your desk

# %% name="two-sets-case"
case = lab.two_sets(my_number)
print(case)


# %% name="train-two" kind="exercise" exercise="8.4" broken=true reference=true
def train_two(front, back, batches, gradient):
    main, updating = streams.current_stream(), streams.Stream()
    rate = lab.RATE / dist.get_world_size()  # the all-reduce adds up
    sent = None  # the gradient of the step before, and its message
    for batch in batches:
        updating.wait_stream(main)  # whoever read `back` has ended
        if sent is not None:
            grad, work = sent
            with streams.stream(updating):
                work.wait()
                ### BEGIN SOLUTION
                # `back` lacks a gradient that `front` has: build on `front`.
                torch.sub(front, grad, alpha=rate, out=back)
                ### END SOLUTION
                ### BEGIN STUB
                # back.sub_(grad, alpha=rate)
                ### END STUB
        fresh = gradient(front, batch)  # beside the message and the update
        message = dist.all_reduce(fresh, async_op=True)
        main.wait_stream(updating)
        if sent is not None:
            front, back = back, front  # by reference
        sent = fresh, message
    sent[1].wait()  # the last gradient comes too late for anybody
    return front


# %% name="two-sets-seen"
seen = case.play(train_two)
print(f"{len(seen.findings)} findings")
print(seen.story())
view.draw(seen.timeline, title="as you have it now")

# %% [markdown]
# The lanes `set A` and `set B` show who touches each set. A gradient reads it. An update writes it:
# a thin line, since it takes next to no time here. There is no finding and no needless wait, and
# every message but the last goes beside a gradient. And yet the training is broken.
#
# **Exercise 8.4.** Fill in what the program does *as given* (run the cell above before you
# repair it). Then repair it, in the place of one line.
#
# - `"kind"`: `"race"`: a set is read while it is written; `"drift"`: the two sets become two
#   different models; `"stale"`: gradients come two steps late; `"sum"`: they are not averaged.
# - `"gradients"`: how many gradients are in the weights that it returns?
# - `"first_missing"`: the first batch, from 0, whose gradient they lack.
#
# Repaired, every gradient is in the weights once and one step late, as in 8.3. Only that of the last
# batch is missing, since no step comes after it. Messages still go beside gradients, and the run
# takes no longer.
#
# <details><summary>Hint: the diagnosis</summary>
#
# Which set is returned? The last one that was updated. Count the lines that write it.
#
# </details>
# <details><summary>Hint: the repair</summary>
#
# Say `front` has every gradient so far. `back` was made a step earlier, so it lacks one. The next
# weights are `front` minus the rate times the new gradient. Where do they go?
#
# </details>
# <details><summary>Hint: in one operator</summary>
#
# `torch.sub(a, b, alpha=rate, out=c)` writes `a - rate * b` into `c`.
#
# </details>

# %% name="two-sets-diagnosis" kind="exercise" exercise="8.4"
### BEGIN SOLUTION
diagnosis = {
    "kind": "drift",
    "gradients": case.num_gradients,
    "first_missing": case.first_missing,
}
### END SOLUTION
### BEGIN STUB
# diagnosis = {"kind": None, "gradients": None, "first_missing": None}
### END STUB

# %% name="check-two-sets" kind="check" exercise="8.4" points=3
_ = check("8.4", my_number, diagnosis, train_two)

# %% [markdown]
# <details><summary>What was wrong, when you have repaired it</summary>
#
# As given, set A is trained on every second batch, and set B on the others. They are two models,
# each trained on half of the data. The loss that you watch belongs to one and then to the other, and
# nothing reports it. With two sets the rule is: **build the back from the front, never from what
# the back held.**
#
# </details>
#
# `ol.DoubleBufferedWeights` keeps that rule, for a *serving* model that gets new weights while it
# answers. An update writes every tensor of the set that nobody reads, on a stream of its own. Then
# the two change places (section 9).

# %% [markdown]
# ## 7. More than two? (8 minutes)
#
# `depth` of `ol.BatchPrefetcher` is the number of slots of each kind: 2 is 8.2.
#
# **Predict.** Section 1's six batches took 29 ms with two slots. How many ms with four?

# %% name="predict-four" kind="lab-only"
four_slots_ms = None

# %% name="predicted-four" kind="solution-only"
four_slots_ms = 32

# %% name="depths" fold=true
depths = {depth: lab.feed_at_depth(depth) for depth in (1, 2, 3, 4)}
lab.side_by_side("four slots, ms", four_slots_ms, f"{depths[4].step_ns / 1e6:.0f}")
for depth, run in depths.items():
    print(
        f"depth {depth}: {run.step_ns / 1e6:.0f} ms, GPU idle {run.gpu_idle_ns / 1e6:.0f}"
    )
view.draw_many({f"depth {depth}": depths[depth].timeline for depth in (2, 4)})

# %% [markdown]
# Two are enough where every fill and every copy is shorter than a step: when a step ends, the next
# batch is there. A third slot takes memory and has nothing to win. Here it even costs time, since
# the first step waits until all slots have been filled once.
#
# A deeper buffer helps where fills *differ*. Here is a loader in which every fill takes 1 ms, but
# one takes 14. Two slots hold one batch in store, and the GPU runs out of work. Three hold more.
# Still more only make the first step late.

# %% name="stutter" fold=true
for depth in (2, 3, 4, 5):
    run = lab.feed_at_depth(depth, stutter=True)
    print(
        f"depth {depth}: {run.step_ns / 1e6:.0f} ms, GPU idle {run.gpu_idle_ns / 1e6:.0f}"
    )

# %% [markdown]
# So depth is for loaders that stutter, such as those that read files. On average they must be
# faster than the steps, or no depth helps. Gradients never stutter: a third set would make them
# two steps late, and win nothing.
#
# ## 8. Buckets are buffers (4 minutes)
#
# A flat bucket is filled by the backward pass and emptied by the wire. With two of them, one fills
# while the other travels: two times the cap in memory. Here are 48 gradients of 8 MiB each on two
# links. A bucket is filled again when its own last message has left.

# %% name="buckets" fold=true
print(lab.buckets_table())

# %% [markdown]
# On the fast link the size of the buckets hardly matters, except for the smallest. A cap of 128 MiB
# takes 256 MiB of memory, and is no faster than one of 16. So small buckets save memory there, and
# no time.
#
# On the slow link large buckets also cost time: the first leaves late, and the last has nothing
# beside it. Take the smallest cap that is as fast as any.
#
# ## 9. Swap by copy (6 minutes)
#
# A model answers while new weights arrive from the host. They are loaded into the set that nobody
# reads, beside the answer. So far that is right. But look at the last line of the loop.


# %% name="serve" kind="exercise" exercise="8.6" broken=true reference=true
def serve(front, back, versions, answer):
    main, loading = streams.current_stream(), streams.Stream()
    for version in versions:  # each in pinned memory
        loading.wait_stream(main)  # whoever read `back` has ended
        with streams.stream(loading):
            back.copy_(version, non_blocking=True)
        answer(front)  # beside the copy
        main.wait_stream(loading)
        ### BEGIN SOLUTION
        front, back = back, front
        ### END SOLUTION
        ### BEGIN STUB
        # front.copy_(back)  # from now on the new ones
        ### END STUB
    answer(front)


# %% name="serve-seen"
served = lab.serve(serve)
print(f"{len(served.findings)} findings;", end=" ")
print(f"{served.copied_bytes(0) / 2**10:.0f} KiB copied on the device")
view.draw(served.timeline, title="as you have it now")

# %% [markdown]
# The copy is the last thin piece of `default` before the next answer.
#
# **Exercise 8.6.** Repair it: the same answers, and no weights copied on the device. One line.
#
# <details><summary>Hint</summary>
#
# A name is a reference.
#
# </details>

# %% name="check-serve" kind="check" exercise="8.6" points=1
_ = check("8.6", serve)

# %% [markdown]
# In a real module the names are inside its parameters: `parameter.data = other` changes what a
# parameter refers to. `ol.DoubleBufferedWeights.swap()` does that, for every parameter and buffer.
#
# ## 10. A trainer with all three (6 minutes)
#
# Here are six layers, five pageable batches, and a copy of the model that is evaluated elsewhere.
# First as everybody writes it, then with two of everything.


# %% name="trainers" reference=true
def plainly(model, loader, optimizer, served):
    reducer = ol.BucketedReducer(model, bucket_mib=0.02)
    for batch in loader:
        model(batch.to(ol.device())).backward()
        reducer.wait()
        optimizer.step()
        optimizer.zero_grad()
        served.load_state_dict(model.state_dict())


def two_of_everything(model, loader, optimizer, served):
    reducer = ol.DoubleBufferedReducer(model, bucket_mib=0.02)
    weights = ol.DoubleBufferedWeights(served)

    def update():
        weights.wait()  # the last copy has been read from the model
        optimizer.step()
        optimizer.zero_grad()
        weights.update_from(model)  # beside what follows

    for batch in ol.BatchPrefetcher(loader):
        model(batch).backward()
        reducer.wait()
        update()
    if reducer.flush():
        update()
    weights.swap()


trained = {f.__name__: lab.play_trainer(f) for f in (plainly, two_of_everything)}
print(lab.trainers_table(trained))
view.draw_many({name: run.timeline for name, run in trained.items()})

# %% [markdown]
# There are three waits, and each has its place. `weights.wait()` comes before the optimizer writes
# what is being copied. `reducer.wait()` comes before the optimizer reads what has travelled. And the
# prefetcher waits before the step. (The first message brings rank 0's weights to all. *Saved* in the
# titles counts messages, not copies, so compare the steps.)
#
# ## 11. On real GPUs (9 minutes)
#
# Here is what a GPU did, stored: nothing is measured now. A step is a chain of matrix products and
# needs a batch from the host. The first three rows are what the three hands take alone. The others
# are what each way to feed the step *adds* to the step alone.
#
# *Pinned* batches lie in pinned memory already, as in 8.1. *Pageable* ones have to be filled into it,
# as in 8.2. *torch's workers* are a `DataLoader` with worker processes and `pin_memory=True`. *Ours*
# is `ol.BatchPrefetcher` over the same.

# %% name="gpu-feeds" fold=true
print(lab.gpu_feeds())

# %% [markdown]
# - **Pinned.** On the stream of the steps a copy adds about what it takes. With *ours* it adds next to
#   nothing. That is 8.1.
# - **Pageable, the step longer than a fill.** With *ours* next to nothing is added, or less than the
#   copy takes: two slots hide fill and copy. The fourth column is an example.
# - **Pageable, the fill longer than the step.** The fill sets the pace, and *ours* wins nothing over
#   pinning in the loop. The third column: step and addition together take clearly longer than a fill
#   alone. We suppose, and have not measured, that a fill is slower beside copies, since both use the
#   host's memory. The virtual cluster does not know that.
# - **Workers.** They hand large batches over more slowly than one thread fills them. No prefetcher is
#   faster than its loader.
#
# Now gradients, on two GPUs. *Bucketed* sends them beside their own backward pass, as in lab 06.
# *Delayed* is `ol.DoubleBufferedReducer`, whose messages have the whole next step. *P2P off* makes
# the link slow.
#
# **Predict.** On the slow link, at batch 2, a step computes for 17 ms, and DDP takes 58. How short
# can the delayed step be?

# %% name="gpu-reducers" fold=true
print(lab.gpu_reducers())

# %% [markdown]
# About 50 ms, at batch 1 as at batch 2. The one computes for 13 ms and the other for 17, so it is the
# messages that set the pace. At batch 8 the computing takes longer than the messages. The delayed
# step is still 8 ms longer than the computing, because kernels and messages slow one another.
#
# Over NVLink little is exposed anyway. Being one step late wins 1 or 2 % there, and at batch 1 it
# loses. That is not worth 1.4 GiB and a late gradient.
#
# ## 12. Where the model lies (3 minutes)
#
# - Here fills take time in sections 1, 3 and 7 only, and always as long as the loop says. On a
#   machine a fill competes for the host's memory with the copy, and with the other ranks' fills.
# - Kernels on two streams share the GPU evenly here. So an update beside a forward pass is hidden,
#   but not saved.
# - Allocating and pinning memory are free here. On a machine pinning is slow, which is why there are
#   slots.
# - The loss curves are those of one small net. How much a late gradient costs depends on the model,
#   the learning rate and the optimizer.
#
# ## In production
#
# - PyTorch: `_pin_memory_loop` in `torch/utils/data/_utils/pin_memory.py`, the thread that fills.
# - NVIDIA Apex: `data_prefetcher` in `examples/imagenet/main_amp.py` is 8.1, with two comments on
#   `record_stream` and its alternative that you can now read.
# - NVIDIA DALI: `prefetch_queue_depth` of a `Pipeline`; its default is 2.
# - DeepSpeed: `ipg_buffer` and `ipg_index` in `deepspeed/runtime/zero/stage_1_and_2.py`: two flat
#   buckets that change places where `overlap_comm` and `contiguous_gradients` are on.
# - PyTorch: `async_save` in `torch/distributed/checkpoint/state_dict_saver.py` and the stagers in
#   `staging.py` beside it: weights go to the host while training goes on.
# - This package: `overlaplab/techniques/double_buffer/`.
#
# Further reading: D. Narayanan et al., *Memory-Efficient Pipeline-Parallel DNN Training*, ICML 2021:
# two sets of weights and gradients one step late in a pipeline, and what it does to accuracy.
