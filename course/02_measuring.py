# %% [markdown]
# # Did it overlap?
#
# **Lab 02: measuring.** Core: three sittings of 50, 45 and 30 minutes, with doors after
# sections 3 and 4. Extras: 65 more. You need no GPU.
#
# After the core you can
#
# - time a step so that the number means something;
# - write the profiler that says how much communication is hidden, for any trace;
# - read a trace of real GPUs: when messages start, and what holds them up;
# - say what overlap *saved*, and how to prove it.
#
# You know PyTorch. From lab 00 you need one sentence: a **launch** is not a start. The CPU
# hands an operator to the GPU and goes on.
#
# **How it works.** Run the cells from top to bottom. A check tells you what it saw, in
# numbers, and draws what *your* code did. No exercise needs the one before it: where
# yours is not finished, the course's own runs in its place and the cell says so.
# (Exercises 2.2 and 2.4 wait in the extras.)

# %% name="setup"
import statistics
import textwrap
from collections import Counter
from itertools import pairwise

import overlaplab as ol
from overlaplab import streams, view
from overlaplab.grading import check, solved
from overlaplab_course import lab02 as lab

# %% [markdown]
# ## 1. One step, two stopwatches (6 minutes)
#
# Here is a small training step: 24 small matrix products, 20 large ones, and a message between
# two GPUs. How long does it take? Two people time four steps.
#
# `lab.clock()` is the clock of the CPU, in ms (on a real machine:
# `1e3 * time.perf_counter()`). `streams.synchronize()` makes the CPU wait until the GPU
# has finished everything.


# %% name="two-stopwatches"
def around(step):
    start = lab.clock()
    for _ in range(4):
        step()
    return (lab.clock() - start) / 4


def wait_each(step):
    times = []
    for _ in range(4):
        streams.synchronize()
        start = lab.clock()
        step()
        streams.synchronize()
        times.append(lab.clock() - start)
    return statistics.mean(times)


first = lab.time_with(around, "small first")
print(f"around: {first.value[0]:.2f} ms per step")
whole = first.timeline.of_rank(0).report()
work_ns = whole.compute_ns + whole.communication_ns
print(f"the GPU works {work_ns / 4e6:.2f} ms per step")

# %% [markdown]
# **Predict.** A launch costs the CPU 10 us, and the message's launch 20. What does `wait_each`
# say, in ms? And how long does a step take in training, where nobody waits? Type two
# numbers. Nobody marks them.

# %% name="predict-two" kind="lab-only"
wait_each_ms = None
training_ms = None

# %% name="predicted-two" kind="solution-only"
wait_each_ms = 0.72
training_ms = 0.46

# %% name="two" fold=true
second = lab.time_with(wait_each, "small first")
lab.side_by_side("wait_each (ms)", wait_each_ms, f"{second.value[0]:.2f}")
lab.side_by_side("in training (ms)", training_ms, f"{lab.true_ms('small first'):.2f}")
view.draw_many(
    {
        "around four steps": first.timeline.of_rank(0),
        "wait in each of four": second.timeline.of_rank(0),
    }
)

# %% [markdown]
# Both are wrong. In training the CPU is ahead, so a step takes as long as the GPU works. `around`
# stops the clock when the CPU has *launched* the last step: look how early the grey ends.
# `wait_each` measures another program: after each wait the GPU is idle while the CPU launches
# the small products again. (They take far less than 1 us each, too short to see, so the
# `default` lane looks empty.)
#
# (The numbers above a figure are of all its four steps together. Ignore *exposed* until
# exercise 2.3, and *saved* until section 5.)
#
# So the CPU's clock is of no use here: without a wait it does not know when the GPU is done, and
# a wait changes the step. But the GPU itself can take the time.

# %% [markdown]
# ## 2. Let the GPU take the time (22 minutes)
#
# **The API of this screen.** The names and their meaning are torch.cuda's.
#
# | | |
# |---|---|
# | `e = streams.Event(enable_timing=True)` | a bookmark that will have a time |
# | `e.record()` | launch it: the GPU takes the time when the current stream gets there |
# | `a.elapsed_time(b)` | ms from `a` to `b`; an error if the CPU does not know yet that both have happened |
# | `streams.synchronize()` | the CPU waits until all has happened |
#
# A record is a launch like any other: the CPU goes on.

# %% name="picture-events" fold=true
lab.events_between_steps()

# %% [markdown]
# Look at the event between two steps: it ends one and begins the next. By then the CPU is far
# ahead.
#
# **Exercise 2.1.** Write `time_step(step)`. It returns how long a *typical* step takes in
# training, in ms.
#
# - `step()` launches one step and returns. Call it 3 times to warm up, then 10 times or more.
# - The first three calls do things that later calls do not: they set up communicators and try
#   out kernels.
# - Later, a checkpoint is written now and then, and a step is skipped now and then.
# - While the timed steps are launched, the CPU must run ahead.
#
# About 10 lines. The check has four steps with one trap each.
#
# <details><summary>Hint: where do the events go?</summary>
#
# One between any two steps. With 20 steps there are 21 of them, and 20 times.
#
# </details>
# <details><summary>Hint: when are they read?</summary>
#
# After the last step has been launched, and after one `streams.synchronize()`.
#
# </details>
# <details><summary>Hint: typical</summary>
#
# `statistics.median`. A checkpoint changes the mean, and a skipped step is the minimum.
#
# </details>


# %% name="time-step" kind="exercise" exercise="2.1" reference=true
def time_step(step):
    """The time of a typical step, in ms."""
    ### BEGIN SOLUTION
    for _ in range(3):
        step()
    events = [streams.Event(enable_timing=True) for _ in range(21)]
    for event in events[:-1]:
        event.record()
        step()
    events[-1].record()
    streams.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events))
    ### END SOLUTION


# %% name="check-time-step" kind="check" exercise="2.1" points=3
_ = check("2.1", time_step)
lab.keep("2.1", time_step)

# %% [markdown]
# Most people use a fourth stopwatch: warm up, wait, launch many steps, wait, divide.


# %% name="in-one-go"
def in_one_go(step):
    for _ in range(3):
        step()
    streams.synchronize()
    start = lab.clock()
    for _ in range(20):
        step()
    streams.synchronize()
    return (lab.clock() - start) / 20


# %% [markdown]
# Here are four stopwatches and five steps. The last step has all four traps. In which rows is a
# wrong stopwatch right by luck?

# %% name="stopwatches" fold=true
with_events = lab.mine_or_ours("2.1")
lines = []
for kind in ("steady", "cold", "small first", "odd", "training"):
    said = [
        f"{lab.time_with(stopwatch, kind).value[0]:.2f}"
        for stopwatch in (around, wait_each, in_one_go, with_events)
    ]
    lines.append((kind, *said, f"{lab.true_ms(kind):.2f}"))
head = ("ms per step", "around", "wait each", "in one go", "events", "typical")
print(lab.text_table(head, lines))

# %% [markdown]
# `wait_each` is right for `steady`, whose only trap is set for `around`. For `odd` it is right by
# luck: none of its four calls was an odd one. That is how people come to trust it.
#
# `in_one_go` tells you how long 20 steps take *together*: a mean, which every odd step changes.
# That is right for the cost of a whole training run. For one typical step, or to compare two
# that differ by a few percent, take the median of events.
#
# So far this was the model. Here are such steps on two real GPUs, stored; nothing is measured now.

# %% name="on-gpus" fold=true
print(lab.on_gpus())

# %% [markdown]
# Again `around` says too little and `wait_each` too much, but both are closer. Why? Subtract the
# first row from the second, in the columns `around` and `events`. The 24 small products make the
# step longer by as much as they take to launch. So launches are the bottleneck, and the GPU
# waits for the CPU anyway.
#
# The traps of exercise 2.1 are real, too: a first call takes hundreds of times as long as a later
# one. (The lines with an x say how many times as long a step takes if you wait after each
# operator, or profile it with `ol.profile()`, which section 6 uses. `events=True` times no
# kernels, so it costs less. Section 4 comes back to what a profiler costs.)
#
# ## 3. From events to kernels (22 minutes)
#
# Events time only what you put between them. A **profiler** times every kernel: the driver takes
# the times on the GPU and hands them out later. `torch.profiler` writes them into a
# **trace**. Here is a trace of two H200s that train a GPT with 738 M parameters.

# %% name="raw"
rows = lab.raw_rows("overlapped, batch 8")
print(lab.machine())
for category, number in Counter(row.category for row in rows).most_common():
    example = next(row for row in rows if row.category == category)
    print(f"{number:>6} {category:<20} {example.name[:60]}")

# %% [markdown]
# A **row** has `.name`, `.category`, `.stream`, `.start_ns`, `.end_ns` (integers) and
# `.args` (a dict). Most rows are the CPU's. How much communication is hidden? You write a
# function that answers this, for this trace and any other.
#
# **The API of this screen.** Kernels of several streams run side by side, so you cannot add up
# their times. `lab.merge(intervals)` returns the union of `(start, end)` pairs, in order.
# `lab.intersect(a, b)` returns what is in both of two merged lists. `lab.total(intervals)`
# returns the length of all intervals together.
#
# **Exercise 2.3.** Write `overlap(rows)`: a dict with five entries.
#
# - `"communication_ns"`: the time in which at least one kernel runs that communicates.
#   `"compute_ns"`: the same for kernels that compute.
# - `"hidden_ns"`: communication with computation beside it. `"exposed_ns"`: without.
# - `"fraction"`: hidden over communication; `None` where there is no communication.
#
# Only rows of the category `"kernel"` are kernels. `lab.is_communication(row)` says whether one
# communicates; all other kernels compute. (It goes by the kernel's name: see section 7.) All
# rows are of one GPU. About 12 lines.
#
# <details><summary>Hint: no intersect needed</summary>
#
# Hidden = compute + communication - the union of both.
#
# </details>


# %% name="overlap" kind="exercise" exercise="2.3" reference=true
def overlap(rows):
    """What is computed, sent, hidden and exposed, in ns."""
    ### BEGIN SOLUTION
    kernels = [row for row in rows if row.category == "kernel"]
    sent = lab.merge(
        (row.start_ns, row.end_ns) for row in kernels if lab.is_communication(row)
    )
    computed = lab.merge(
        (row.start_ns, row.end_ns) for row in kernels if not lab.is_communication(row)
    )
    hidden_ns = lab.total(lab.intersect(sent, computed))
    return {
        "compute_ns": lab.total(computed),
        "communication_ns": lab.total(sent),
        "hidden_ns": hidden_ns,
        "exposed_ns": lab.total(sent) - hidden_ns,
        "fraction": hidden_ns / lab.total(sent) if sent else None,
    }
    ### END SOLUTION


# %% name="check-overlap" kind="check" exercise="2.3" points=2
_ = check("2.3", overlap)
lab.keep("2.3", overlap)

# %% [markdown]
# You have written a profiler. Here it reads three real traces, beside the package's own, which is
# `ol.read_trace(path).report()`. *Serial* sends all gradients in one message after the
# backward pass. *Overlapped* sends them in buckets of 100 MiB beside it. Each trace is cut to
# three whole steps. Each row is one run, so a difference of a few percent between two rows
# means little.

# %% name="profiler" fold=true
profiler = lab.mine_or_ours("2.3")
lines = []
for which in lab.TRACES:
    mine = profiler(list(lab.step_rows(which)))
    theirs = lab.whole_steps(which).report()
    same = all(
        mine[key] == getattr(theirs, key)
        for key in ("compute_ns", "communication_ns", "hidden_ns", "exposed_ns")
    )
    numbers = [
        f"{mine[key] / 1e6:.2f}"
        for key in ("compute_ns", "communication_ns", "hidden_ns", "exposed_ns")
    ]
    percent = f"{100 * mine['fraction']:.0f} %"
    lines.append((which, *numbers, percent, "yes" if same else "NO"))
head = ("ms", "compute", "sent", "hidden", "exposed", "fraction", "package agrees")
print(lab.text_table(head, lines))

# %% [markdown]
# They agree to the nanosecond. At batch 8 most of the communication is hidden. Are we done? A
# percentage does not say what starts when, what it waits for, or what it was worth. For that
# you must look at the trace.
#
# **A door.** You can time a step and read a profile. This is a good place to stop for today. When
# you come back, run all cells once: what you solved is in the notebook.
#
# ## 4. Read a real step (45 minutes)
#
# The number that you type decides which of the trace's three steps you get. Time 0 is the start
# of its first kernel or copy.

# %% name="my-step"
my_number = 6  # any whole number: your day of birth, your desk

step = lab.trace_step("overlapped, batch 8", my_number)
messages = [span for span in step.spans if span.kind == "communication"]
print(f"{len(step.spans)} spans, {len(messages)} of them messages")
print(view.text(step, width=88))
view.draw(step, title="your step: batch 8, buckets of 100 MiB", critical_path=False)

# %% [markdown]
# (`view.show(step)`, in a cell of your own, zooms: wheel, drag, click.)
#
# The upper lane has the kernels of the compute stream, the lower lane NCCL's. First comes the forward
# pass (light blue), then the backward pass, from the last layer to the first. A message
# follows each layer. A red strip along its top marks what is exposed.
#
# **Predict.** The CPU launched the first message some time before it started on the GPU. How many
# ms before?

# %% name="predict-lead" kind="lab-only"
lead_ms = None

# %% name="predicted-lead" kind="solution-only"
lead_ms = 0.1

# %% [markdown]
# **The API of this screen.** A **span** has `.kind` (`"compute"`, `"communication"`, ...),
# `.name` (the operator), `.start_ns`, `.end_ns`, `.bytes`. A message's
# `.attributes["launch_ns"]` is when the CPU began to launch it.
#
# **Exercise 2.5.** Read, in ms from 0:
#
# - `"backward_ms"`: the start of the backward pass, the first compute span with
#   `backward` in its name;
# - `"first_ms"`: the start of the first message;
# - `"lead_ms"`: how long before that start it was launched;
# - `"tail_ms"`: how much of the last message comes after the end of the last compute span (all
#   of it, if it starts only then);
# - `"tail_mib"`: how large that message is, in MiB.

# %% name="reading" kind="exercise" exercise="2.5"
### BEGIN SOLUTION
compute = [span for span in step.spans if span.kind == "compute"]
backward = next(span for span in compute if "backward" in span.name)
last = max(messages, key=lambda span: span.end_ns)
computed_ns = max(span.end_ns for span in compute)
reading = {
    "backward_ms": backward.start_ns / 1e6,
    "first_ms": messages[0].start_ns / 1e6,
    "lead_ms": (messages[0].start_ns - messages[0].attributes["launch_ns"]) / 1e6,
    "tail_ms": (last.end_ns - max(last.start_ns, computed_ns)) / 1e6,
    "tail_mib": last.bytes / 2**20,
}
### END SOLUTION
### BEGIN STUB
# reading = {
#     "backward_ms": None,
#     "first_ms": None,
#     "lead_ms": None,
#     "tail_ms": None,
#     "tail_mib": None,
# }
### END STUB

# %% name="check-reading" kind="check" exercise="2.5" points=2
_ = check("2.5", my_number, reading)

# %% name="reading-seen" fold=true
if solved("2.5"):
    right = lab.read(step)
    lab.side_by_side(
        "launched before its start (ms)", lead_ms, f"{right['lead_ms']:.0f}"
    )
    print(f"a step takes {step.step_ns / 1e6:.0f} ms")
    table_mib = 32768 * 2048 * 2 / 2**20
    print(f"the table of 32768 tokens, 2048 wide, in bfloat16: {table_mib:.0f} MiB")

# %% [markdown]
# The CPU is more than a whole step ahead: when it launches this message, the GPU is still busy with
# an earlier step. And the tail is the embedding (the table of tokens). Its gradient is the
# last of the backward pass, so nothing is left to compute that could hide its message.
#
# Between messages the wire is idle. Is something late? When the wire is free, a message needs two
# things to start: its *launch* and its *gradients*. The later one decides.
#
# **Exercise 2.6.** Write `find_gaps(timeline)`: a list of `(start_ns, end_ns, why)`.
#
# - A gap is a time between messages in which no message runs, on any lane. Return the gaps of 1 ms
#   or more, in order. What comes before the first message or after the last is no gap.
# - `why` is `"launch"` if the message that ends the gap starts less than 0.1 ms after its
#   `launch_ns`: it started as soon as the CPU had launched it. Otherwise it was launched and
#   had to wait: `"gradient"`.
#
# About 12 lines. In Nsight Systems one does this by eye, with a ruler.
#
# <details><summary>Hint: messages side by side</summary>
#
# `lab.merge` gives the stretches in which at least one message runs. Gaps are between
# them. The message that ends a gap is the one that starts at its end.
#
# </details>


# %% name="find-gaps" kind="exercise" exercise="2.6" reference=true
def find_gaps(timeline):
    """(start_ns, end_ns, "launch" or "gradient") of each gap of 1 ms or more."""
    ### BEGIN SOLUTION
    sent = [span for span in timeline.spans if span.kind == "communication"]
    launched = {span.start_ns: span.attributes["launch_ns"] for span in sent}
    busy = lab.merge((span.start_ns, span.end_ns) for span in sent)
    gaps = []
    for (_, end_ns), (start_ns, _) in pairwise(busy):
        if start_ns - end_ns >= 1_000_000:
            at_once = start_ns - launched[start_ns] < 100_000
            gaps.append((end_ns, start_ns, "launch" if at_once else "gradient"))
    return gaps
    ### END SOLUTION


# %% name="check-find-gaps" kind="check" exercise="2.6" points=3
_ = check("2.6", find_gaps)
lab.keep("2.6", find_gaps)

# %% [markdown]
# Your gaps are drawn as a lane of their own, for the same program with 8 sequences per GPU and with
# 2. Look at the compute lane, too.

# %% name="gaps-drawn" fold=true
annotate = lab.mine_or_ours("2.6")
annotated = {}
for which in ("overlapped, batch 8", "overlapped, batch 2"):
    one = lab.trace_step(which, my_number)
    gaps = annotate(one)
    annotated[which] = lab.with_gaps(one, gaps)
    reasons = Counter(why for _, _, why in gaps)
    print(f"{which}: {len(gaps)} gaps, held by {dict(reasons)}")
lab.draw_gaps(annotated)

# %% [markdown]
# At batch 8 nothing is late: each message starts when its gradients are there, and there is nothing
# else to send in the gaps. At batch 2 the compute lane has holes, and every message that ends
# a gap starts the moment that the CPU launches it: the step is **launch-bound**. There smaller
# buckets are worse, because they need more launches (33.7 instead of 25.4 ms, below).
#
# So at batch 2 you need fewer launches. At batch 8 two losses are left: the tail, and what messages
# cost the kernels beside them (section 5).
#
# But what makes the CPU slow? Here is the same program without a profiler, from the same run. A step
# is timed from its start to the start of the next. 8 of 10 steps lie between the two times in
# the last column (the 10th and 90th percentile of 30).

# %% name="profiler-costs" fold=true
lines = []
for batch in (8, 2):
    traced_ms = lab.traced_ms(f"overlapped, batch {batch}")
    without_ms = lab.unprofiled_ms("overlapped", batch)
    percent = f"{100 * (traced_ms / without_ms - 1):+.0f} %"
    spread = "{:.1f} to {:.1f}".format(*lab.spread_ms("overlapped", batch))
    lines.append(
        (f"batch {batch}", f"{traced_ms:.1f}", f"{without_ms:.1f}", percent, spread)
    )
print(
    lab.text_table(
        ("ms per step", "profiled", "not profiled", "", "8 of 10 lie in"), lines
    )
)
small_ms = lab.unprofiled_ms("overlapped, 25 MiB", 2)
print(f"batch 2 in buckets of 25 MiB, not profiled: {small_ms:.1f}")
print(lab.machine())

# %% [markdown]
# **The profiler makes the CPU slower.** It writes down every call of the CPU. At batch 2 the CPU has no
# time for that. At batch 8 it has. There the profiled steps are even *shorter*, which cannot be
# the profiler's doing: two sets of steps of one program differ by 2 ms. Remember that size.
#
# So take *times* from events, without a profiler. Take *what happened when* from a trace. And if a
# trace is launch-bound, compare it with the step without a profiler before you believe it.
#
# **A door.** You can say when messages start, and what holds them up. This is the second good place
# to stop.
#
# ## 5. Hidden is not saved (24 minutes)
#
# At batch 8 nearly everything is hidden. How much does that save, compared with sending everything at
# the end?

# %% name="hidden"
serial, overlapped = lab.both_steps(my_number)
for name, one in (("serial", serial), ("overlapped", overlapped)):
    report = one.report()
    print(f"{name:<11} sent {report.communication_ns / 1e6:.2f} ms,", end=" ")
    print(f"hidden {report.hidden_ns / 1e6:.2f}")

# %% [markdown]
# **Predict.** How much shorter than the serial step is the overlapped one, in ms?

# %% name="predict-saved" kind="lab-only"
saved_ms = None

# %% name="predicted-saved" kind="solution-only"
saved_ms = 5

# %% name="hidden-drawn" fold=true
seen_ms = (serial.step_ns - overlapped.step_ns) / 1e6
lab.side_by_side("saved (ms)", saved_ms, f"{seen_ms:.1f}")
view.draw_many(
    {"serial, batch 8": serial, "overlapped, batch 8": overlapped}, critical_path=False
)

# %% [markdown]
# The two steps end at nearly the same time: less than those 2 ms apart. Where did the rest go?
#
# **Exercise 2.7.** Account for it, with six numbers. The first three come from
# `serial.report()` and `overlapped.report()`, with `step_ns`, `compute_ns`,
# `communication_ns` and `hidden_ns`:
#
# - `"hidden_ms"`: how much communication is hidden in the overlapped step;
# - `"saved_ms"`: how much shorter that step is than the serial one;
# - `"messages_ms"`: how much longer it sends, in all, than the serial one.
#
# The other three compare kernels. `lab.pairs(serial, overlapped)` has a triple for each: `(the
# kernel in the serial step, the same kernel in the overlapped step, whether a message ran beside
# the second)`. Kernels have `.duration_ns`.
#
# - `"beside_ms"`: kernels with a message beside them take longer. By how much, all together?
# - `"alone_ms"`: the same for the kernels without one;
# - `"beside_ratio"`: how many times as long the kernels of `"beside_ms"` take. Divide their sum in
#   the overlapped step by their sum in the serial step.
#
# Kernels run one at a time here, so a step is compute + exposed + idle. About 10 lines.
#
# <details><summary>Hint: one loop</summary>
#
# Collect `(after - before)` by `is_beside`: `sum(...)` over the triples with it, and over
# those without.
#
# </details>

# %% name="bill" kind="exercise" exercise="2.7"
### BEGIN SOLUTION
before, after = serial.report(), overlapped.report()


def both_ms(beside):
    chosen = [
        (a.duration_ns / 1e6, b.duration_ns / 1e6)
        for a, b, is_beside in lab.pairs(serial, overlapped)
        if is_beside is beside
    ]
    return sum(a for a, _ in chosen), sum(b for _, b in chosen)


beside_before_ms, beside_after_ms = both_ms(True)
alone_before_ms, alone_after_ms = both_ms(False)


bill = {
    "hidden_ms": after.hidden_ns / 1e6,
    "saved_ms": (before.step_ns - after.step_ns) / 1e6,
    "messages_ms": (after.communication_ns - before.communication_ns) / 1e6,
    "beside_ms": beside_after_ms - beside_before_ms,
    "alone_ms": alone_after_ms - alone_before_ms,
    "beside_ratio": beside_after_ms / beside_before_ms,
}
### END SOLUTION
### BEGIN STUB
# bill = {
#     "hidden_ms": None,
#     "saved_ms": None,
#     "messages_ms": None,
#     "beside_ms": None,
#     "alone_ms": None,
#     "beside_ratio": None,
# }
### END STUB

# %% name="check-bill" kind="check" exercise="2.7" points=3
_ = check("2.7", my_number, bill)

# %% name="bill-seen" fold=true
if solved("2.7"):
    right = lab.pay(serial, overlapped)
    idle_ms = right["hidden_ms"] - sum(
        right[key] for key in ("saved_ms", "beside_ms", "alone_ms", "messages_ms")
    )
    beside, alone = (f"x {right[key]:.2f}" for key in ("beside_ratio", "alone_ratio"))
    print(f"  hidden                                {right['hidden_ms']:5.2f} ms")
    print(
        f"- kernels beside a message are slower   {right['beside_ms']:5.2f}     {beside}"
    )
    print(f"- messages take longer                  {right['messages_ms']:5.2f}")
    print(
        f"- kernels without one are slower        {right['alone_ms']:5.2f}     {alone}"
    )
    print(f"- the GPU idles longer (-: less)        {idle_ms:5.2f}")
    print(f"= saved                                 {right['saved_ms']:5.2f} ms")
    by_itself_ms = overlapped.report().saved_ns / 1e6
    print(
        f"\ncompute + sent - step, all from the overlapped trace: {by_itself_ms:.2f} ms"
    )

# %% [markdown]
# **Hidden is not saved.** A message's kernel takes processors, memory bandwidth and power from the
# kernel beside it: **contention**. That kernel takes a third longer. And many messages beside
# computation take longer than one alone.
#
# The kernels without a message are slower, too, by up to 2 ms. Messages cannot be the reason. The two
# steps are of two runs, and this pair cannot tell you whether it was clocks, power or chance.
# That difference alone can be larger than `saved`. So one pair of steps shows contention kernel
# by kernel, but it *does not show what was saved*. Neither does "compute + sent - step" of one
# trace, because contention has made both of them longer.
#
# What shows it? Run three programs in turn, many steps each, without a profiler: computing alone,
# serial, overlapped. Serial minus computing alone is what *can* be saved.
#
# **Predict** for batch 8 and batch 2: how many percent of that does overlap save?

# %% name="predict-paid" kind="lab-only"
share_8, share_2 = None, None

# %% name="predicted-paid" kind="solution-only"
share_8, share_2 = 88, 30

# %% name="did-it-pay" fold=true
lines = []
for batch in (8, 2):
    for variant in ("compute", "serial", "overlapped"):
        low_ms, high_ms = lab.spread_ms(variant, batch)
        median = f"{lab.unprofiled_ms(variant, batch):.1f}"
        lines.append(
            (f"batch {batch}, {variant}", median, f"{low_ms:.1f} to {high_ms:.1f}")
        )
print(lab.text_table(("ms per step, not profiled", "median", "8 of 10 lie in"), lines))
print()
for batch, share in ((8, share_8), (2, share_2)):
    paid = lab.did_it_pay(batch)
    says = f"{paid.saved_ms:+.1f} of {paid.possible_ms:.1f} ms: {paid.percent:+.0f} %"
    lab.side_by_side(f"saved at batch {batch}, %", share, says)
print(lab.machine())

# %% [markdown]
# At batch 8 overlap saves 1.3 of 5.3 ms, a quarter, where the overlap fraction says nearly 90 %.
# Single steps do not show it: the ranges of the two programs overlap (last column). Medians of
# 30 steps in turn do. Whether it is 1.3 or 1.0, only a second run could tell you.
#
# At batch 2 overlap *costs* 3.6 ms, although a part of the communication is hidden. It launches 14
# messages where the serial step launches one, and the CPU is late anyway. The same code wins at
# one batch size and loses at another, and no fraction shows it.
#
# ## 6. Your own trace (5 minutes)
#
# Your profiler reads any trace. In your training loop, this writes one per rank:
#
# ```python
# with torch.profiler.profile(
#     schedule=torch.profiler.schedule(wait=5, warmup=2, active=3),
#     on_trace_ready=lambda p: p.export_chrome_trace(f"rank{dist.get_rank()}.json.gz"),
# ) as profiler:
#     for batch in batches:
#         train_step(batch)
#         profiler.step()
# ```
#
# Type the path of one here. Without one, the third trace of this lab is read.

# %% name="my-trace"
my_trace = None  # "rank0.json.gz"

# %% name="own-trace"
path = my_trace or lab.path_of("overlapped, batch 2")
mine = lab.mine_or_ours("2.3")(lab.rows_of(path))
print(", ".join(f"{name[:-3]} {mine[name] / 1e6:.2f} ms" for name in list(mine)[:4]))
for finding in ol.diagnose(ol.read_trace(path)).findings[:3]:
    says = f"{finding.kind}: {finding.says}"
    print(textwrap.fill(says, 88, subsequent_indent="    "))

# %% [markdown]
# Your function says how much is hidden. `ol.diagnose` (in a terminal: `overlaplab report FILE`) says
# what holds the step up, and what to change first.
#
# ### Takeaways

# %% name="takeaways" fold=true
wrong_ms = [lab.time_with(s, "small first").value[0] for s in (around, wait_each)]
true_ms, traced_ms = lab.true_ms("small first"), lab.traced_ms("overlapped, batch 2")
print(f"1. Time with events, the CPU ahead: {true_ms:.2f} ms. A clock around launches")
print(f"   said {wrong_ms[0]:.2f}, waiting in each step {wrong_ms[1]:.2f}.")
eight, two = lab.did_it_pay(8), lab.did_it_pay(2)
print(
    f"2. Hidden is not saved: {overlapped.report().hidden_ns / 1e6:.1f} ms hidden at batch 8, and",
    end=" ",
)
print(f"{eight.saved_ms:.1f} of {eight.possible_ms:.1f} saved;")
print(f"   at batch 2 overlap costs {-two.saved_ms:.1f}. Medians of 30 steps show it.")
print(f"3. A profiler is a load: {traced_ms:.0f} ms with,", end=" ")
print(f"{lab.unprofiled_ms('overlapped', 2):.0f} without, where launches set the pace.")

# %% [markdown]
# **Tomorrow, in your own loop.** Let the package write and read the trace:
#
# ```python
# with ol.profile(warmup=2) as profile:
#     for batch in batches:
#         train_step(batch)
#         profile.step()
# print(ol.diagnose(profile.timeline))
# ```
#
# Then time the step with your `time_step`, without a profiler, and compare the two.
#
# **You may close the laptop here.** Next: 03, who waits for whom. What follows is extra.

# %% [markdown]
# ## 7. Extra: two parts of the profiler (27 minutes)
#
# In exercise 2.3 two functions were given: `lab.merge` and `lab.is_communication`. Write them.
#
# **Exercise 2.2.** Kernels of several streams run side by side. Write
# `merge(intervals)`, their union.
#
# - `intervals`: pairs `(start, end)` of integers, in any order. `end` is the first
#   nanosecond that is not in it.
# - Return a list of pairs, in order. Intervals that overlap or touch become one. Leave out empty
#   ones (`start == end`).
# - Do not change the list that you get.
#
# About 8 lines.
#
# <details><summary>Hint</summary>
#
# Go through them in the order of their starts. The next one either begins after the end of the last
# one that you have, or may make that one longer.
#
# </details>


# %% name="merge" kind="exercise" exercise="2.2"
def merge(intervals):
    """The union: ascending, none empty, none that touch."""
    ### BEGIN SOLUTION
    union = []
    for start, end in sorted(intervals):
        if start == end:
            continue
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union
    ### END SOLUTION


# %% name="check-merge" kind="check" exercise="2.2" points=1
_ = check("2.2", merge)
lab.keep("2.2", merge)

# %% [markdown]
# Which kernels communicate? There is no flag for it, only names:
#
# | | kernels are called, for example |
# |---|---|
# | NCCL, older | `ncclKernel_AllReduce_RING_LL_Sum_float(...)` |
# | NCCL, newer | `ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)` |
# | NCCL, symmetric memory | `ncclSymkDevKernel_AllGather_LL(...)` |
# | RCCL (AMD) | `void rcclGenericKernel<1>(...)` |
# | PyTorch, symmetric memory | `multimem_all_reduce_kernel<...>`, `one_shot_all_reduce_kernel<...>`, `two_shot_all_reduce_kernel<...>` |
# | vLLM | `void vllm::cross_device_reduce_1stage<...>` |
# | somebody's own | anything; at times `row.args` has a `"Collective name"` |
#
# The operation in a name may not be the one that ran (`..._Generic_4`). A name tells you *whether* a
# kernel communicates. To know *what* it sends, look into `args`.
#
# **Exercise 2.4.** Write `is_communication(row)`. The check tries more rows. Most of their names are
# not in the table, but those that communicate belong to its families. Count a kernel that you
# do not know as computing.
#
# <details><summary>Hint: a list of what computes?</summary>
#
# That list never ends: everybody writes kernels, but few people write collectives.
#
# </details>
# <details><summary>Hint: reduce</summary>
#
# `reduce_kernel` sums up one GPU's numbers. Search for more than `reduce`.
#
# </details>


# %% name="is-communication" kind="exercise" exercise="2.4" reference=true
def is_communication(row):
    """Whether the row is a kernel that communicates."""
    ### BEGIN SOLUTION
    words = ("nccl", "rccl", "multimem", "shot_all_reduce", "cross_device_reduce")
    return row.category == "kernel" and (
        "Collective name" in row.args or any(w in row.name.lower() for w in words)
    )
    ### END SOLUTION


# %% name="check-is-communication" kind="check" exercise="2.4" points=2
_ = check("2.4", is_communication)
lab.keep("2.4", is_communication)

# %% [markdown]
# ## 8. Extra: repair two profilers (28 minutes)
#
# **Exercise 2.8a.** `profile_step` below times the computing and the sending of a step, with events,
# while the CPU runs ahead. It says that nothing is hidden, but it says so of every program.
#
# - `compute()` launches products; `send()` launches a message and returns its `Work`, as
#   `dist.all_reduce(..., async_op=True)` does. Call each once.
# - Repair it: the three times must be right, and the step must not get longer.
#
# From lab 03 (given here): `s = streams.Stream()` is a second stream; inside `with
# streams.stream(s):` launches, records and waits are on `s`; `a.wait_stream(b)` makes `a`
# wait for all that is on `b` by now; `streams.current_stream()` is the one you are on.
#
# <details><summary>Hint: why zero?</summary>
#
# `computed` and `sending` come one after the other in *one* stream. The GPU reaches `sending` as soon
# as it has passed `computed`, whatever the message does. So the time from `sending` to `sent` is
# only what the stream still waits for: the exposed part.
#
# </details>
# <details><summary>Hint: where does a message have a start?</summary>
#
# On a stream that has nothing else to do. Record there, send, wait there, record. But first let that
# stream wait for the current one, because the message cannot start before that.
#
# </details>


# %% name="profile-step" kind="exercise" exercise="2.8a"
def profile_step(compute, send):
    begin, computed, sending, sent = (
        streams.Event(enable_timing=True) for _ in range(4)
    )
    ### BEGIN SOLUTION
    main, side = streams.current_stream(), streams.Stream()
    side.wait_stream(main)
    begin.record()
    with streams.stream(side):  # the side stream waits for the message; main does not
        sending.record()
        work = send()
        work.wait()
        sent.record()
    compute()
    computed.record()
    main.wait_stream(side)
    streams.synchronize()
    compute_ms = begin.elapsed_time(computed)
    communication_ms = sending.elapsed_time(sent)
    both_end_ms = min(compute_ms, begin.elapsed_time(sent))
    hidden_ms = both_end_ms - max(0.0, begin.elapsed_time(sending))
    return {
        "compute_ms": compute_ms,
        "communication_ms": communication_ms,
        "hidden_ms": max(0.0, hidden_ms),
    }
    ### END SOLUTION
    ### BEGIN STUB
    # begin.record()
    # work = send()
    # compute()
    # computed.record()
    # sending.record()
    # work.wait()
    # sent.record()
    # streams.synchronize()
    # hidden_ms = max(0.0, sending.elapsed_time(computed))
    # return {
    #     "compute_ms": begin.elapsed_time(computed),
    #     "communication_ms": sending.elapsed_time(sent),
    #     "hidden_ms": hidden_ms,
    # }
    ### END STUB


# %% name="profile-step-seen" fold=true
seen = lab.profile_with(profile_step)
for key, right_ms in lab.truth(seen.timeline).items():
    print(f"{key:<18} yours {seen.value[0][key]:.3f}   true {right_ms:.3f}")
view.draw(seen.timeline.of_rank(0), title="the step that was profiled")

# %% name="check-profile-step" kind="check" exercise="2.8a" points=2
_ = check("2.8a", profile_step)

# %% [markdown]
# **Exercise 2.8b.** `summary` below adds up the times of rows by name, and takes the largest sum for
# the whole step. Repair it. Count *kernels* only, so that
#
# - `"step_ns"` is the time from the first start to the last end;
# - `"busy_ns"` is the time in which at least one runs;
# - `"by_name"` has the sum of the times of each name, `"top"` the name with the largest.


# %% name="summary" kind="exercise" exercise="2.8b" reference=true
def summary(rows):
    ### BEGIN SOLUTION
    rows = [row for row in rows if row.category == "kernel"]
    ### END SOLUTION
    ### BEGIN STUB
    ### END STUB
    by_name = {}
    for row in rows:
        length_ns = row.end_ns - row.start_ns
        by_name[row.name] = by_name.get(row.name, 0) + length_ns
    top = max(by_name, key=by_name.get)
    ### BEGIN SOLUTION
    step_ns = max(row.end_ns for row in rows) - min(row.start_ns for row in rows)
    busy_ns = lab.total(lab.merge((row.start_ns, row.end_ns) for row in rows))
    ### END SOLUTION
    ### BEGIN STUB
    # step_ns = by_name[top]
    # busy_ns = sum(by_name.values())
    ### END STUB
    return {"step_ns": step_ns, "busy_ns": busy_ns, "by_name": by_name, "top": top}


# %% name="check-summary" kind="check" exercise="2.8b" points=1
_ = check("2.8b", summary)

# %% [markdown]
# A table of sums by name is useful, but its total is not the time of the step: kernels run side by
# side, and between them the GPU may be idle.

# %% [markdown]
# ## 9. Extra: the report (8 minutes)
#
# The package's own profiler goes further. `ol.diagnose(timeline)` (in a terminal, `overlaplab report
# FOLDER`) says what makes a step longer, and by how much, the largest loss first.
#
# **Predict.** Which kind of finding will stand first for each trace? One of
# `"launched-late"` (a message could have been launched earlier), `"contention"` (kernels are
# slower beside messages), `"launch-bound"` (the GPU waits for the CPU), `"last-bucket"` (the
# last message has nothing to hide behind), `"small-messages"` (latency counts more than
# bytes), `"same-stream"` (messages and kernels queue up in one stream).

# %% name="predict-findings" kind="lab-only"
my_findings = dict.fromkeys(lab.TRACES)  # {"serial, batch 8": None, ...}

# %% name="predicted-findings" kind="solution-only"
guesses = ("launched-late", "last-bucket", "launch-bound")
my_findings = dict(zip(lab.TRACES, guesses, strict=True))

# %% name="findings" fold=true
for which in lab.TRACES:
    worst = ol.diagnose(lab.whole_trace(which)).findings[0]
    lab.side_by_side(which, my_findings.get(which), worst.kind)
    says = f"{worst.cost_ns / 1e6:.2f} ms at most. {worst.says}"
    print(textwrap.indent(textwrap.fill(says, 84), "    ") + "\n")

# %% [markdown]
# There are three traces with three bottlenecks. A percentage could have told you the first at most.
# Here is the whole report of the last trace. Which of its findings would you act on only after
# you have timed the step without a profiler? And which loss would stay, whatever the size of
# the buckets?
#
# <details><summary>An answer</summary>
#
# The first: without a profiler the CPU launches faster, and section 4 has the step's time. Much
# of the loss may be the profiler's. And the last bucket stays: it is a single tensor, which
# no bucket size splits.
#
# </details>

# %% name="report"
print(ol.diagnose(lab.whole_trace("overlapped, batch 2")))

# %% [markdown]
# And here is a step of this machine: you can put `ol.profile()` around any training loop. On a CPU
# every operator is finished when its line returns, so there is no lead, and nothing to hide.

# %% name="own-step"
import torch

model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
batch = torch.randn(256, 512)
with ol.profile(warmup=2, steps=2) as own:
    for _ in range(4):
        model(batch).square().mean().backward()
        own.step()
one = own.timeline.of_step(own.timeline.steps[-1])
view.draw(one, title="a step of this machine", critical_path=False)

# %% [markdown]
# On several GPUs, with torchrun, use the same lines, then `own.save("traces/")` on every rank, and
# `overlaplab report traces/`.
#
# ## 10. What a profiler cannot see
#
# While a message's kernel waits for a late rank, it looks as if it were sending. You cannot tell the two
# apart in the trace of one rank, so read all ranks. A kernel that both computes and sends (a
# fused matmul and all-reduce) has only one name. Copies by copy engines are not kernels. And
# the clock of section 1 is a model: a launch always costs the same there, and a profiler costs
# nothing.
#
# ## In production
#
# - `torch.profiler.profile` with `schedule(wait, warmup, active)`: this lab's traces were made
#   by it. Its warm-up is the profiler's own; the program's is yours.
# - HolisticTraceAnalysis (`TraceAnalysis.get_comm_comp_overlap`) computes exercise 2.3. It
#   leaves out the last step unless told otherwise, and rounds to whole microseconds; the exact
#   number is this lab's.
# - Nsight Systems shows the same lanes, with your ranges: [nsight.md](../course/nsight.md).
#
# Further reading: the chapter on timing with events of the CUDA C++ Best Practices Guide.
