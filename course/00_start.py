# %% [markdown]
# # Has it run yet?
#
# **Lab 00: start.** Core: 57 minutes. Extras: 25 more. You need a laptop and nothing
# else.
#
# After the core you can
#
# - say when an operator starts, and what it waits for;
# - read a timeline;
# - find the line that makes the CPU wait, and move it;
# - write a program on two ranks that computes while it sends.
#
# You know a PyTorch training loop. Nothing else is needed.
#
# **How it works.** Run the cells one by one. After each exercise comes a check. It
# tells you what it saw, in numbers, and draws what *your* code did. A check that fails is
# red, and you can go on: no exercise needs the one before it.

# %% name="setup"
from dataclasses import replace

import torch
import torch.distributed as dist

import overlaplab as ol
from overlaplab import view
from overlaplab.grading import check, solved
from overlaplab_course import lab00 as lab

# %% [markdown]
# ## 1. A GPU in round numbers (1 minute)
#
# No GPU is needed. Your PyTorch code really runs, on the CPU of this machine. What it
# would cost on a GPU is computed, from round numbers, and is the same everywhere. To
# **launch** an operator (a call such as `a @ a`) is to hand it to the GPU.

# %% name="round-numbers"
print(f"to launch an operator: {lab.GPU.launch_ns / 1000:.0f} us of the CPU")
for width in (256, 64):
    a = torch.randn(width, width)
    one = ol.run(lambda a: a @ a, a, world_size=1, hardware=lab.GPU).timeline
    product_us = one.report().compute_ns / 1000
    print(f"one matrix product, {width} wide: {product_us:.1f} us of the GPU")

# %% [markdown]
# ## 2. One line, two times (6 minutes)
#
# First, who hands work to whom?

# %% name="picture-queue" fold=true
lab.cpu_queue_gpu_wire()

# %% [markdown]
# Look where the CPU's arrow ends: at the queue, not at the GPU. The CPU does not wait for
# what it has put there.
#
# Now six products, one after the other, 256 wide.


# %% name="six-products"
def six_products(a):
    for _ in range(6):
        a = a @ a


# %% [markdown]
# **Predict.** The call begins at 0 us. When does `six_products` *return*, and when has
# the GPU *finished*? Type two numbers. Nobody marks them.

# %% name="predict-six" kind="lab-only"
returns_us = None
finishes_us = None

# %% name="predicted-six" kind="solution-only"
returns_us = 200
finishes_us = 200

# %% name="six" fold=true
a = torch.randn(256, 256) / 16  # so that the products stay small
six = ol.run(six_products, a, world_size=1, hardware=lab.GPU).timeline
lab.side_by_side(
    "it returns at (us)", returns_us, f"{lab.last_launch_ns(six) / 1e3:.0f}"
)
lab.side_by_side("the GPU finishes at (us)", finishes_us, f"{six.end_ns / 1e3:.0f}")
view.draw(six, title="six products, 256 wide")

# %% [markdown]
# This is a **timeline**. Time runs to the right. Each row is a **lane**, each box a
# **span**. `cpu` is what your Python does: a grey span is one launch. `default` is a
# **stream**: a queue of the GPU, whose operators run in order. Look at how early the grey
# ends.
#
# Here is the same as a table.

# %% name="six-table"
print(lab.launch_table(six))

# %% [markdown]
# Follow the last row: the CPU was done with it long before the GPU got to it.
#
# **A launch is not a start.** And a return is no end: your line has returned, and its
# result does not exist yet. The CPU *runs ahead* of the GPU, and how far is its **lead**.
# Without a lead nothing in this course would work.
#
# The number that you type gives you products of your own.

# %% name="my-products"
my_number = 6  # any whole number: your day of birth, your desk

products = lab.own_products(my_number)
print(products)

# %% [markdown]
# **Exercise 0.0.** They are launched one after the other, as above, from 0 us on. When does
# the call return, and when has the GPU finished? Type two numbers, in us.

# %% name="times" kind="exercise" exercise="0.0"
### BEGIN SOLUTION
times = {
    "returns_us": 10 * products.number,
    "finishes_us": 10 + products.number * products.each_us,
}
### END SOLUTION
### BEGIN STUB
# times = {"returns_us": None, "finishes_us": None}
### END STUB

# %% name="check-times" kind="check" exercise="0.0" points=1
_ = check("0.0", my_number, times)

# %% [markdown]
# ## 3. When does it start? (10 minutes)
#
# Four rules make every timeline of this course:
#
# 1. The CPU does one thing after the other. A launch takes it 10 us.
# 2. An operator starts when its launch has ended *and* the operator before it in its
#    stream has ended *and* everything that it waits for has ended. Not later.
# 3. Two streams run side by side. The second one here, `copy`, brings batches.
# 4. A **host sync** (`item`) is the CPU itself waiting: it launches nothing until what
#    it waits for has ended. It costs no launch.
#
# Here is a program of your own: six launches and one host sync.

# %% name="my-launches"
launches = lab.six_launches(my_number)
launches

# %% [markdown]
# **Exercise 0.1.** When does each line start and end? Work it out by hand, and type a pair
# `(start, end)` for each line.
#
# - Times are in us. The CPU begins at 0. `waits for` names lines by their numbers.
# - The start of the host sync is when the CPU comes to it. Its end is when the CPU goes
#   on.
#
# Begin with line 0 alone and run the check: it judges the rows that are there, and says
# which comes next.
#
# <details><summary>Hint: the start</summary>
#
# Of each line, write down when its launch ends, when the operator before it in its stream
# ends, and when each line ends that it waits for. The latest of these is its start.
#
# </details>
# <details><summary>Do you prefer to program?</summary>
#
# Then write a function `schedule(launches, launch_us)` in the place of the table. It
# returns such a table. It has about 15 lines, takes some 20 minutes more, and earns the
# same points. The check tries it on 150 more programs.
#
# A line of `launches` is `(name, stream, duration_us, waits)`. `waits` are positions of
# earlier lines. The stream of the host sync is `"cpu"`. Keep the CPU's time (one number),
# the end of the last operator of each stream (a dictionary), and the ends so far (a list).
#
# </details>


# %% name="schedule" kind="exercise" exercise="0.1"
### BEGIN SOLUTION
def schedule(launches, launch_us):
    """(start, end) of each line, in us."""
    cpu_us = 0
    stream_end = {}
    pairs = []
    for _, stream, duration_us, waits in launches:
        ready = max((pairs[position][1] for position in waits), default=0)
        if stream == "cpu":
            pairs.append((cpu_us, max(cpu_us, ready)))
            cpu_us = pairs[-1][1]
            continue
        cpu_us += launch_us
        start = max(cpu_us, stream_end.get(stream, 0), ready)
        stream_end[stream] = start + duration_us
        pairs.append((start, start + duration_us))
    return pairs


### END SOLUTION
### BEGIN STUB
# schedule = [
#     # (start, end),  of line 0
# ]
### END STUB


# %% name="check-schedule" kind="check" exercise="0.1" points=2
_ = check("0.1", my_number, schedule)

# %% [markdown]
# Every time in this lab comes from these rules. What your PyTorch code launches is recorded,
# and `ol.resolve(program, hardware)` applies them. This is the **virtual cluster**.
#
# Back to the six products of section 2, now with small matrices, 64 wide. Section 1 printed
# how long one takes.
#
# **Predict.** When does the GPU finish now?

# %% name="predict-small" kind="lab-only"
small_finishes_us = None

# %% name="predicted-small" kind="solution-only"
small_finishes_us = 3

# %% name="small" fold=true
small = ol.run(six_products, a[:64, :64], world_size=1, hardware=lab.GPU).timeline
lab.side_by_side(
    "the GPU finishes at (us)", small_finishes_us, f"{small.end_ns / 1e3:.1f}"
)
busy = {"256 wide": six, "64 wide": small}
for name, timeline in busy.items():
    share = timeline.report().compute_ns / timeline.end_ns
    print(f"{name}: the GPU is busy {100 * share:.0f} % of the time")
view.draw_many(busy)

# %% [markdown]
# The line under the bars is the **critical path**: the chain of work that sets the total time. In
# the upper figure it lies on the GPU: the program is **GPU-bound**. In the lower one it lies
# on the CPU, which has no lead: the program is **launch-bound**, and a faster GPU would
# change nothing.
#
# Every figure of the course has a twin in characters, for those who do not see the figure.

# %% name="small-text"
print(view.text(small, width=88))

# %% [markdown]
# ## 4. `loss.backward()` returns. So what? (14 minutes)
#
# Here is a small net, forward and backward pass, on one GPU. Your number decides its size.


# %% name="train-step"
def train_step(model, x):
    loss = model(x).square().mean()
    loss.backward()


model, x = lab.model_and_batch(my_number)
run = ol.run(train_step, model, x, world_size=1, hardware=lab.GPU)
num_launched = sum(span.kind == "launch" for span in run.timeline.spans)
product = next(span for span in run.timeline.spans if span.name == "addmm")
print(f"{num_launched} operators are launched, 10 us each")
print(f"a product of the forward pass takes the GPU {product.duration_ns / 1e3:.0f} us")

# %% [markdown]
# **Predict.** At the moment when `backward()` returns: how many of these operators has the
# GPU finished?

# %% name="predict-backward" kind="lab-only"
finished_then = None

# %% name="predicted-backward" kind="solution-only"
finished_then = num_launched

# %% [markdown]
# **The API of this screen.** `run.timeline.spans` are the spans. Each has `.kind`
# (`"launch"` on the CPU, `"compute"` on the GPU), `.name`, `.start_ns`, `.end_ns`.
# `ol.resolve(run.program, hardware)` is the timeline of the same program on other
# hardware; `replace(lab.GPU, launch_ns=...)` is this GPU with other launches.
#
# **Exercise 0.2.** `backward()` returns when the last launch ends. Count what has happened
# by then.
#
# - `"returned_us"`: when `backward()` returns, in us;
# - `"launched"`: how many operators the CPU has launched by then;
# - `"started"`: how many of them the GPU has started, the finished ones included;
# - `"finished"`: how many of them the GPU has finished;
# - `"finished_if_slower"`: how many it has finished if each launch takes twice as long.
#
# About 8 lines.
#
# <details><summary>Hint: started, finished</summary>
#
# Count spans of kind `"compute"` by their `start_ns`, then by their `end_ns`.
#
# </details>
# <details><summary>Hint: twice as long</summary>
#
# Resolve again, and find the new moment first: `backward()` returns later too.
#
# </details>


# %% name="counts" kind="exercise" exercise="0.2"
### BEGIN SOLUTION
def at_return(timeline):
    launches = [span for span in timeline.spans if span.kind == "launch"]
    kernels = [span for span in timeline.spans if span.kind == "compute"]
    now_ns = max(span.end_ns for span in launches)
    return {
        "returned_us": now_ns / 1000,
        "launched": len(launches),
        "started": sum(span.start_ns <= now_ns for span in kernels),
        "finished": sum(span.end_ns <= now_ns for span in kernels),
    }


slower = ol.resolve(run.program, replace(lab.GPU, launch_ns=2 * lab.GPU.launch_ns))
counts = at_return(run.timeline)
counts["finished_if_slower"] = at_return(slower)["finished"]
### END SOLUTION
### BEGIN STUB
# launch_spans = [span for span in run.timeline.spans if span.kind == "launch"]
# kernel_spans = [span for span in run.timeline.spans if span.kind == "compute"]
# counts = {
#     "returned_us": None,
#     "launched": None,
#     "started": None,
#     "finished": None,
#     "finished_if_slower": None,
# }
### END STUB

# %% name="check-counts" kind="check" exercise="0.2" points=2
_ = check("0.2", my_number, counts)

# %% name="backward-seen" fold=true
if solved("0.2"):
    finished = lab.count(run.timeline).finished
    lab.side_by_side("finished by then", finished_then, finished)

# %% [markdown]
# When `backward()` returns, *everything is launched and little is finished*. The
# gradients are tensors with a shape and a place, and no values yet. So "send the
# gradients when `backward()` returns" says nothing about when they can be sent: that is
# what labs 03 to 06 are about.
#
# With slower launches more is finished by then. Nothing got faster: the CPU comes
# later.

# %% [markdown]
# ## 5. The line that makes the CPU wait (12 minutes)
#
# The lead is lost where your Python asks for a *value*: the CPU has to wait until the GPU
# has computed it. That is a host sync.
#
# **Predict.** Which of these lines do that? Copy their texts into the list. (`x` is a
# matrix and `loss` a number, both on the GPU.)

# %% name="predict-syncs" kind="lab-only"
print(*map(repr, lab.LINES), sep=",\n")
syncs = None  # a list: ["...", "..."]

# %% name="predicted-syncs" kind="solution-only"
print(*map(repr, lab.LINES), sep=",\n")
syncs = ["loss.item()"]

# %% name="syncs" fold=true
for text in set(syncs or ()) - set(lab.LINES):
    print(f"{text!r} is none of these lines: copy a line as it stands")
for text, line in lab.LINES.items():
    mine = None if syncs is None else "waits" if text in syncs else "goes on"
    told = "waits" if lab.holds_the_cpu(line) else "goes on"
    lab.side_by_side(f"the CPU at {text:<25}", mine, told)

# %% [markdown]
# A shape is known without computing. A computed value is not, and neither is anything that
# depends on one: an `if`, a printed value, a copy to the CPU, how many elements `nonzero`
# returns.
#
# Here is a training loop with a log, as people write it.


# %% name="given-loop" reference=true
def given_loop(model, batches):
    losses, worst = [], 0.0
    for x in batches:
        loss = (model(x) - x).square().mean()
        loss.backward()
        losses.append(loss.item())
        if loss > worst:
            worst = loss.detach()
        with torch.no_grad():
            for param in model.parameters():
                param -= 2 * param.grad
                param.grad = None
    return losses, float(worst)


given = lab.train(given_loop)
given_ms = given.timeline.end_ns / 1e6
print(f"{len(given.losses)} batches: {given_ms:.2f} ms; the GPU has nothing to do for")
print(f"{given.idle_ns / 1e6:.2f} ms of it; the CPU waits {len(given.waits)} times")
view.draw(given.timeline, title="the given loop")

# %% [markdown]
# Look at the gaps in `default` (*step*, over the figure, is the whole loop). Each
# begins where a wait ends. The GPU has run dry, and the CPU now launches the small
# operators of the update, one by one, while the GPU waits for each.
#
# **Exercise 0.3.** Repair `train`: same losses, same weights, hardly a gap.
#
# - Return `(losses, worst)` as before: a list of floats, one a batch, and the largest
#   of them as a float.
# - The given loop takes longer than one that never waits on the way. At least three
#   quarters of that difference must be gone.
#
# <details><summary>Hint</summary>
#
# A tensor can be kept without looking at it: `loss.detach()`. Look after the loop.
#
# </details>
# <details><summary>Hint: it is still slow</summary>
#
# Two lines of the loop ask for a value. The second one has no `item` in it.
#
# </details>


# %% name="train" kind="exercise" exercise="0.3" reference=true
def train(model, batches):
    ### BEGIN SOLUTION
    kept = []
    ### END SOLUTION
    ### BEGIN STUB
    # losses, worst = [], 0.0
    ### END STUB
    for x in batches:
        loss = (model(x) - x).square().mean()
        loss.backward()
        ### BEGIN SOLUTION
        kept.append(loss.detach())
        ### END SOLUTION
        ### BEGIN STUB
        # losses.append(loss.item())
        # if loss > worst:
        #     worst = loss.detach()
        ### END STUB
        with torch.no_grad():
            for param in model.parameters():
                param -= 2 * param.grad
                param.grad = None
    ### BEGIN SOLUTION
    losses = torch.stack(kept).tolist()
    return losses, max(losses)
    ### END SOLUTION
    ### BEGIN STUB
    # return losses, float(worst)
    ### END STUB


# %% name="check-train" kind="check" exercise="0.3" points=3
_ = check("0.3", train)

# %% [markdown]
# Does it matter *where* a loop looks?

# %% name="where-it-looks" fold=true
late, best = lab.train(lab.late_train), lab.train(lab.good_train)
looks = {"before the update": given, "after the update": late, "after the loop": best}
for where, seen in looks.items():
    ms, num_waits = seen.timeline.end_ns / 1e6, len(seen.waits)
    print(f"looks {where:<17}  {ms:.2f} ms   waits of the CPU: {num_waits}")

# %% [markdown]
# After the update, a look costs little. What the CPU launches next are the large products
# of the next batch, so the GPU runs dry for one launch only. Before the update, what comes
# next are small operators. The GPU is done with each before the next one is launched.
#
# On a real GPU, `torch.cuda.set_sync_debug_mode("warn")` names most such lines for you.

# %% [markdown]
# ## 6. Two ranks (12 minutes)
#
# A **rank** is one of the processes that train together, one a GPU. Each runs the same
# program on other data. `dist.all_reduce(x)` adds up the `x` of all ranks and writes
# the sum into each `x`: a **message**.


# %% name="serial-step"
def serial_step(x, a):
    dist.all_reduce(x)
    return a @ a + x


two = lab.run_step(serial_step)
view.draw(two.timeline, title="first the message, then the product")

# %% [markdown]
# The message stands in the queue of `default`, as an operator does. Its dots are
# **latency**: the time before bytes move. The product does not need `x`, and yet it
# waits: a queue runs in order. The CPU does not wait: it launches the product while the
# message travels. No computation runs beside that message, so it is **exposed**. With
# computation beside it, it would be **hidden**.
#
# The numbers over the figure are rank 0's. *Saved* is how much shorter the step is than
# all its computing and sending, one after the other. Nothing is saved here. It is even
# below zero: the step begins with a launch, which is neither computing nor sending.
#
# **The API of this screen.** `work = dist.all_reduce(x, async_op=True)` launches the
# message on a stream of its own, the lane `comm`. Its rules are:
#
# - The message waits for what you launched *before* it on the current stream, here
#   `default`.
# - What you launch *after* `work.wait()` waits for the message.
# - The CPU never waits. It goes on at once.
#
# **Predict.** How long can the step take if the message travels beside the product, in us?
# Read the parts off the figure.

# %% name="predict-beside" kind="lab-only"
print(f"now: {two.timeline.end_ns / 1e3:.0f} us; to launch a message takes 20 us")
beside_us = None

# %% name="predicted-beside" kind="solution-only"
print(f"now: {two.timeline.end_ns / 1e3:.0f} us; to launch a message takes 20 us")
beside_us = 280

# %% [markdown]
# **Exercise 0.4.** Write `step(x, a)`: it returns `a @ a` plus the sum of all ranks'
# `x`, as above, and the message travels beside the product. `x` may be overwritten.
# Four lines.
#
# <details><summary>Hint: still one after the other?</summary>
#
# Order matters twice. What must be launched *before* the product? What *after* it?
#
# </details>


# %% name="step" kind="exercise" exercise="0.4" reference=true
def step(x, a):
    ### BEGIN SOLUTION
    work = dist.all_reduce(x, async_op=True)
    product = a @ a
    work.wait()
    return product + x
    ### END SOLUTION


# %% name="check-step" kind="check" exercise="0.4" points=3
_ = check("0.4", step)
lab.keep("0.4", step)

# %% name="again" fold=true
overlapped = lab.run_step(lab.mine_or_ours("0.4")).timeline
lab.side_by_side("the step (us)", beside_us, f"{overlapped.end_ns / 1e3:.0f}")
view.draw_many(
    {
        "message, then product": two.timeline.of_rank(0),
        "message beside product": overlapped.of_rank(0),
    }
)

# %% [markdown]
# This is what the whole course does, on larger and larger models: launch early, wait
# late, and know what may run in between.
#
# ### Takeaways

# %% name="takeaways" fold=true
before_us, after_us = two.timeline.end_ns / 1e3, overlapped.end_ns / 1e3
print("1. A launch is not a start, a return no end: when backward() returns,")
print("   everything is launched and little has finished.")
best_ms = lab.train(lab.good_train).timeline.end_ns / 1e6
print("2. Who asks for a value waits for the GPU. Then the GPU waits for the CPU:")
print(f"   a look before each update cost {100 * (given_ms / best_ms - 1):.0f} %.")
print("3. Launch the message first, wait for it last:")
print(f"   {before_us:.0f} us became {after_us:.0f}.")

# %% [markdown]
# **Tomorrow, in your own loop.** Keep losses on the GPU and look once in a hundred steps:
#
# ```python
# losses.append(loss.detach())  # was: losses.append(loss.item())
# if len(losses) == 100:
#     print(torch.stack(losses).mean().item())  # the only wait
#     losses.clear()
# ```
#
# **You may close the laptop here.** Next: 01, the arithmetic of overlap. What follows
# is extra.

# %% [markdown]
# ## 7. Extra: read a timeline (7 minutes)
#
# Here are two ranks again, with uneven work: your number decides how uneven. One of them
# also looks at a number on the way.

# %% name="uneven"
uneven = lab.two_ranks(my_number)
view.draw(uneven, title="two uneven ranks")

# %% [markdown]
# A message needs all ranks. On `comm`, a rank's span begins when that rank is there;
# bytes move when the last one has come. The numbers over the figure are rank 0's.
#
# **Exercise 0.5.** Read, from the figure or from `uneven.spans` (`.rank`, `.lane`,
# `.kind`, `.name`, `.start_ns`, `.duration_ns`):
#
# - `"late_rank"`: the rank that the message waits for; `"held_us"`: for how long;
# - `"looking_rank"`: the rank whose CPU waits for its GPU; `"cpu_waits_us"`: how long;
# - `"products"`: how many products (`mm`) *that* rank's GPU has finished when its CPU
#   goes on.

# %% name="reading" kind="exercise" exercise="0.5"
### BEGIN SOLUTION
first, last = sorted(
    (span for span in uneven.spans if span.kind == "communication"),
    key=lambda span: span.start_ns,
)
(wait,) = (span for span in uneven.spans if span.name.startswith("wait"))
reading = {
    "late_rank": last.rank,
    "held_us": (last.start_ns - first.start_ns) / 1000,
    "looking_rank": wait.rank,
    "cpu_waits_us": wait.duration_ns / 1000,
    "products": sum(
        span.name == "mm" and span.rank == wait.rank and span.end_ns <= wait.end_ns
        for span in uneven.spans
    ),
}
### END SOLUTION
### BEGIN STUB
# reading = {
#     "late_rank": None,
#     "held_us": None,
#     "looking_rank": None,
#     "cpu_waits_us": None,
#     "products": None,
# }
### END STUB

# %% name="check-reading" kind="check" exercise="0.5" points=1
_ = check("0.5", my_number, reading)

# %% [markdown]
# ## 8. Extra: launch-bound or GPU-bound? (9 minutes)
#
# Here is a training step of six layers, with knobs. Each button keeps the present setting
# under the button's name. Without knobs, type: `knobs.set(batch=64)`, then
# `knobs.keep("border")`.

# %% name="knobs"
names = ("launch-bound", "GPU-bound", "border")
knobs = view.explorer(lab.turn, lab.KNOBS, what_if=lab.WHAT_IF, keep=names)
knobs

# %% [markdown]
# **Exercise 0.6.** Find these three settings and keep each. Then type
# `found = dict(knobs.kept)`. What you kept is gone when the kernel stops, so paste what
# `print(dict(knobs.kept))` shows before you hand it in. Or type the numbers.
#
# - `"launch-bound"`: launches half as long save 40 % or more, a GPU twice as fast saves
#   under 2 %;
# - `"GPU-bound"`: the other way round;
# - `"border"`: the smallest `batch` at which launches half as long save under 10 %,
#   with `width=512`, `launch_us=10`, `teraflops=20`.
#
# <details><summary>Hint: the border</summary>
#
# A batch twice as large launches as many operators, each twice as long. At the border
# the kernels together take as long as the launches together.
#
# </details>

# %% name="found" kind="exercise" exercise="0.6"
### BEGIN SOLUTION
found = {
    "launch-bound": {"batch": 16},
    "GPU-bound": {"batch": 4096},
    "border": next(
        batch
        for batch in lab.KNOBS["batch"].values
        if lab.saved_percent({**lab.BORDER_AT, "batch": batch}, "launches half as long")
        < 10
    ),
}
### END SOLUTION
### BEGIN STUB
# found = {
#     "launch-bound": None,
#     "GPU-bound": None,
#     "border": None,
# }
### END STUB

# %% name="check-found" kind="check" exercise="0.6" points=1
_ = check("0.6", found)

# %% [markdown]
# ## 9. Extra: this machine and real GPUs (9 minutes, with 10)
#
# A program of this course runs, unchanged, on three **clusters**:
#
# | cluster | what runs | whose times you see |
# |---|---|---|
# | `virtual` | ranks inside this notebook | a model GPU's: computed, the same on every machine |
# | `gloo` | one CPU process per rank | this CPU's |
# | `nccl` | one process per GPU | your GPUs': the truth about speed |
#
# Which of them run here? The doctor looks. (In a terminal: `overlaplab doctor`.)

# %% name="doctor"
ol.doctor()

# %% [markdown]
# This lab stays on `virtual`, which is a model. Here is what GPUs did, stored: nothing is
# measured now. First a queue of products, as in section 2. *Returned* is when the CPU
# had launched everything, *finished* when the GPU was done.

# %% name="gpu-launches"
print(lab.measured.launches())

# %% [markdown]
# Launching the wide products took longer than predicted. The model does not say why.
#
# Then a step, as in section 4: when `backward()` returned, and when it was done. Which
# batches are launch-bound? Where both columns agree, there was no lead.

# %% name="gpu-backward"
print(lab.measured.backwards())

# %% [markdown]
# All batches but the largest take about the same time, however much there is to compute:
# launch-bound. The prediction is too short there. Why?

# %% name="gpu-launch-costs"
print(lab.measured.launch_costs())

# %% [markdown]
# A bare launch costs what the profile says. In a training step Python, modules and
# autograd stand between the launches, and the profile knows nothing of them.
#
# The two loops of exercise 0.3, the given one and one that looks at the end:

# %% name="gpu-loops"
print(lab.measured.loops())

# %% [markdown]
# Both loops took turns, 15 runs each; these are medians. Where launches take all the time
# (batch 1024), the GPU waits for the CPU anyway, and a look costs little. It costs most
# where CPU and GPU need about as long (batch 8192): there the CPU loses a lead that it
# needs. With a larger batch the same gap is a smaller part of the step.
#
# And exercise 0.4, with a larger product and a larger message:

# %% name="gpu-two-ranks"
print(lab.measured.two_ranks())
print()
print(lab.measured.measure_it_here())

# %% [markdown]
# Less is saved than could be: side by side, the two slow each other down. The round
# numbers of this lab leave that out.
#
# ## 10. Where the model lies
#
# Here all operators take the same time to launch, and Python between them costs
# nothing. Reading a batch takes CPU time that is in no rule of section 3. The queue is
# endless here; CUDA's holds about a thousand launches, then the CPU waits.
#
# ## In production
#
# - nanoGPT, `train.py`: `loss.item()` stands under `if iter_num % log_interval == 0`,
#   and its comment says why: a sync of CPU and GPU.
# - PyTorch, `torch/nn/utils/clip_grad.py`: gradients are always multiplied by a clamped
#   factor. An `if norm > max_norm` would be a host sync.
# - CUDA graphs (`ol.capture_step`) launch a whole step at once: no longer launch-bound.
#
# Further reading: *CUDA semantics* in PyTorch's notes, the part on asynchronous
# execution.
