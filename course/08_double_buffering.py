# %% [markdown]
# # One fills while the other empties
#
# **Lab 08: double buffering.** Core: 60 minutes. You need no GPU.
#
# After the core you can
#
# - write a **prefetcher**, which brings the next batch to the GPU beside the step;
# - say when a buffer may be filled again, and who has to wait for that.
#
# It builds on lab 03: streams, events, pinned memory.
#
# **How it works.** Run the cells from top to bottom. A check tells you what it saw, in
# numbers, and draws what *your* code did. No exercise needs the one before it: where
# yours is not finished, the course's own runs in its place and the cell says so.

# %% name="setup"
import overlaplab as ol
from overlaplab import streams, view
from overlaplab.grading import check
from overlaplab_course import lab08 as lab

# %% [markdown]
# ## 1. The waste (7 minutes)
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
# There are six batches. The last is shorter, as last batches are: its fill takes 1.3 ms and
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


so_far = {"one slot of each kind": lab.feed_slots(one_slot)}
view.draw_many({name: run.timeline for name, run in so_far.items()})

# %% [markdown]
# How to read it: `cpu` fills (dark) and waits (grey); `default` computes. Copies are on
# `default`, too. The lower lanes are the *slots*: from when a batch is put in until it has
# been read. `pinned B` and `device B` have no lane, since nobody uses them.
#
# Look at `device A`: it is busy all the time, first written, then read. While one of the two
# goes on, the other has to wait. The GPU computes for 24 ms, a little more than half.
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
        "one slot of each kind": so_far["one slot of each kind"].timeline,
        "two slots of each kind": target.timeline,
    }
)

# %% [markdown]
# The first fill and the first copy have nothing beside them: 2 + 3 + 6 x 4 ms. From then on
# the slowest of the three hands never stops. Compare a slot's lane with the one below it:
# where A empties, B fills.
#
# You build it in two halves: first the device's side (section 2), then the host's (3).

# %% [markdown]
# ## 2. The next batch, beside the step (11 minutes)
#
# Here batches come pinned, each in memory of its own, as from
# `DataLoader(..., pin_memory=True)`. So the CPU has nothing to fill. The device's memory
# comes from the allocator. This is 3.4 turned inside out: there you called `step`; here
# the training loop stays as everybody writes it.


# %% name="loop"
def train(prefetch, loader, step):
    for batch in prefetch(loader):
        step(batch)


# %% [markdown]
# So a prefetcher is a **generator**: it stops at each `yield` until the loop asks for the
# next batch. What stands before a `yield` is launched *before* the step of that batch,
# what stands behind it after.


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
# - `loader` yields batches, tuples of pinned tensors. How many, nobody knows; the last
#   one is shorter. It may yield none.
# - Yield each batch on the device: a tuple of tensors, in order, ready for what the current
#   stream gets next.
# - While a step runs, the next batch is copied on a stream of your own. In some loops a
#   step ends with `loss.item()`, so that the CPU waits in it; in others it runs ahead.
# - The prefetcher itself makes the CPU wait for nothing.
# - At most three batches are on the device at a time (what the allocator keeps back is not
#   counted), and the loader is at most two batches ahead of the step.
#
# About 15 lines. `load` and `ready` are begun for you; you may write it otherwise.
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
        ### BEGIN SOLUTION
        with streams.stream(copying):
            ours = tuple(t.to(ol.device(), non_blocking=True) for t in batch)
            return ours, copying.record_event()
        ### END SOLUTION

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
# `default` is full from the first copy's end on. The GPU waits for one copy, however many
# batches there are.

# %% [markdown]
# ## 3. When may a slot be filled again? (14 minutes)
#
# Real loaders give ordinary, pageable memory. Somebody has to put each batch into pinned
# memory, and pinning new memory is slow: the operating system takes part. So one keeps two
# pinned slots and fills them in turn. With two *device* slots, too, nothing is allocated at
# all while the loop runs.
#
# But now memory is used again by *you*, not by an allocator that looks after it. Three
# moments in the life of batch 0, which goes through `pinned A` and `device A`:
#
# 1. its copy has been launched;
# 2. its copy has ended;
# 3. its step has ended.
#
# **Predict.** Batch 2 is next in A. From which of these moments on may the CPU fill `pinned
# A` again? From which on may the copy engine write `device A`? Answer with 1, 2 or 3.

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
# The third you know. Where does the event of the second come from? When the loop asks for
# the next batch, it has launched the step of the last one: an event recorded *then* on the
# current stream stands behind that step.
#
# **The API of this screen.** `lab.part(slot, batch)` gives the first rows of a slot's
# tensors, as many as the batch has: views. A batch that is shorter leaves old rows behind
# it in the slot, and nobody may read those.
#
# **Exercise 8.2.** Write `double_buffered(loader, pinned, device)`, a generator.
#
# - `loader` as before, but batches are tuples of *pageable* tensors. `pinned` and `device`
#   are lists of two slots; a slot is a tuple of tensors, each with room for a whole batch.
# - Batch `i` goes through `pinned[i % 2]` and `device[i % 2]`. Yield it as views of the
#   device slot. Allocate nothing.
# - Fills, copies and steps go on side by side. Here a fill takes the CPU time.
# - Nobody waits longer than the table asks for. Again some steps end with `loss.item()`.
#
# About 18 lines; start from your 8.1.
#
# <details><summary>Hint: two lists of events</summary>
#
# `copied = [None, None]` and `read = [None, None]`, by slot. `copied[slot]` is waited for
# twice: by the CPU before the next fill, and by the current stream before the step.
#
# </details>
# <details><summary>Hint: load</summary>
#
# In this order: the CPU waits for `copied[slot]`; it fills; the copy stream waits for
# `read[slot]`; the copies are launched; `copied[slot]` is recorded anew.
#
# </details>
# <details><summary>Hint: read</summary>
#
# Right behind the `yield` of batch `i`: `read[i % 2] = main.record_event()`.
#
# </details>


# %% name="double-buffered" kind="exercise" exercise="8.2" reference=true
def double_buffered(loader, pinned, device):
    main, copying = streams.current_stream(), streams.Stream()
    copied, read = [None, None], [None, None]  # events, by slot

    def load(i, batch):
        """Fill a pinned slot with batch i, launch its copies; return the views."""
        ### BEGIN SOLUTION
        slot = i % 2
        host, ours = lab.part(pinned[slot], batch), lab.part(device[slot], batch)
        if copied[slot] is not None:
            copied[slot].synchronize()  # until then the copy engine reads it
        for target, source in zip(host, batch, strict=True):
            target.copy_(source)
        if read[slot] is not None:
            copying.wait_event(read[slot])
        with streams.stream(copying):
            for target, source in zip(ours, host, strict=True):
                target.copy_(source, non_blocking=True)
            copied[slot] = copying.record_event()
        return ours
        ### END SOLUTION

    ### BEGIN SOLUTION
    ahead = None
    for i, batch in enumerate(loader):
        following = load(i, batch)
        if ahead is not None:
            main.wait_event(copied[(i - 1) % 2])
            yield ahead
            read[(i - 1) % 2] = main.record_event()
        ahead = following
    if ahead is not None:
        main.wait_event(copied[i % 2])
        yield ahead
    ### END SOLUTION


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
# Now a loop whose steps read their loss. The CPU waits in each step, and cannot fill
# meanwhile. Fills stand in line again, with one CPU thread and any number of slots.

# %% name="thread"
waiting = lab.ours_in_slots(reads_loss=True)
print(f"the same loop, reading each loss: {waiting.step_ns / 1e6:.0f} ms", end=" ")
print(f"instead of {lab.ours_in_slots().step_ns / 1e6:.0f}")
view.draw(waiting.timeline, title="two slots, each step reads its loss")

# %% [markdown]
# Hence the *thread* of `DataLoader(pin_memory=True)`: it fills while your thread waits. It
# is the third buffer of the same kind: one thread fills while the other empties.

# %% [markdown]
# ## Takeaways (1 minute)

# %% name="takeaways" fold=true
print(f"""1. With one slot everybody takes turns: {slots_ms[0]:.0f} ms. With two, the slowest of CPU, copy engine
   and GPU sets the pace: {slots_ms[1]:.0f} ms.""")
