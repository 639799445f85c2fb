# %% [markdown]
# # How much can overlap save?
#
# **Lab 01: the arithmetic of overlap.** Core: two sittings of 50 and 40 minutes, with a door
# after section 4. Extras: 50 more. You need no GPU, but a pencil now and then.
#
# After the core you can
#
# - say how short a step can get, before you write a line of code;
# - tell apart what a run *hid*, what it *saved*, and what it could have saved;
# - time the messages of a backward pass by hand;
# - work out from a data sheet how long a message takes, without mixing up bits and bytes.
#
# You know a PyTorch training loop. Here two **ranks** (processes, one GPU each) train
# together. Their gradients must be summed, with one **message** per gradient. You need
# nothing else, though lab 00 helps.
#
# **How it works.** Run the cells from top to bottom. A check tells you what it saw, in
# numbers. No exercise needs the one before it. The first two cells may take a minute.

# %% name="setup"
import torch.distributed as dist
from torch import nn

import overlaplab as ol
from overlaplab import view
from overlaplab.grading import check, solved
from overlaplab.hardware import collective_ns, find_hardware
from overlaplab_course import lab01 as lab

# %% [markdown]
# ## 1. 100 + 50 (13 minutes)
#
# Here is a training step of ten layers, in slow motion: 100 ms of computing (forward 30,
# backward 60, update 10) and 50 ms of messages.


# %% name="serial-step"
def serial_step(model, x, optimizer):
    model(x).sum().backward()
    for param in model.parameters():
        dist.all_reduce(param.grad)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # needs all gradients
    optimizer.step()


serial = ol.run(serial_step, *lab.ten_layers(), hardware=lab.GPU).timeline
view.draw(serial, ranks=[0], title="first compute, then send")

# %% [markdown]
# `default` is the GPU's **stream**: a queue, in which computing and messages come one after the
# other. The wire has nothing to do for 90 ms. Then nothing is computed for 50 ms. (Both
# ranks do the same, so one is drawn.) The line under the bars is the **critical path**: the
# longest chain of things that had to follow one another. It is as long as the step.
#
# While the messages travel, something could be computed. While the GPU computes, something
# could be sent. That is **overlap**.
#
# **Predict.** Suppose that you may reorder this step as you like. How short can it get, in ms?
# Type a number. Nobody marks it.

# %% name="predict-best" kind="lab-only"
best_ms = None

# %% name="predicted-best" kind="solution-only"
best_ms = 100

# %% [markdown]
# The backward pass makes the gradient of the *last* layer first. A **hook** sends each gradient as
# soon as it is complete: `async_op=True` puts the message on a stream of its own, `comm`, and
# the program goes on. What you launch after `work.wait()` starts after the message.


# %% name="hooks-step"
def hooks_step(model, x, optimizer):
    works = []

    def send(param):  # runs when the gradient of `param` is complete
        works.append(dist.all_reduce(param.grad, async_op=True))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(send)
    model(x).sum().backward()
    for work in works:
        work.wait()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


hooks = ol.run(hooks_step, *lab.ten_layers(), hardware=lab.GPU).timeline
lab.side_by_side("the step in ms", best_ms, f"{hooks.step_ns / 1e6:.0f}")
so_far = {"first compute, then send": serial, "send with hooks": hooks}
view.draw_many(so_far, ranks=[0])

# %% name="hooks-numbers"
print(
    f"{'ms':<26}" + "".join(f"{n:>9}" for n in ("step", "exposed", "hidden", "saved"))
)
for name, timeline in so_far.items():
    r = timeline.report()
    times_ns = (r.step_ns, r.exposed_ns, r.hidden_ns, r.saved_ns)
    print(f"{name:<26}" + "".join(f"{ns / 1e6:>9.0f}" for ns in times_ns))

# %% [markdown]
# Every figure of the course has a twin in characters:

# %% name="hooks-text"
print(view.text(hooks.of_rank(0), width=88))

# %% name="picture-hidden" fold=true
lab.hidden_and_exposed()

# %% [markdown]
# **Hidden** is communication with computation beside it, **exposed** is the rest. In the figures a
# red strip along the top of a message marks what is exposed. **Saved** is by how much the
# step is shorter than computing and sending one after the other.
#
# Nine of ten messages are hidden. The tenth is not. The first layer's gradient comes last, when
# only the update is left to compute. And the update needs *all* gradients, because it clips
# them by the norm of all.
#
# Without overlap the step takes 150 ms. With overlap, you often read, it takes 100 ms, because
# "the messages disappear". This step cannot be that short. How short can it be?
#
# Two chains of work are in every schedule of this step:
#
# - the forward pass, the *whole* backward pass, *one* message (the last), the update;
# - the forward pass, the backward pass of *one* layer (it makes the first gradient), *all*
#   messages, the update.
#
# No schedule is shorter than either of them.

# %% name="chains-here"
print(f"last message: 30 + 60 + 5 + 10 = {30 + 60 + 5 + 10} ms")
print(f"all messages: 30 + 6 + 50 + 10 = {30 + 6 + 50 + 10} ms")

# %% [markdown]
# So 105 ms is the shortest possible step, and the hooks reach it. Now take a step of your own.

# %% name="my-job"
my_number = 6  # any whole number: your day of birth, your desk

job = lab.job(my_number)
job

# %% [markdown]
# **Exercise 1.1.** How long is each chain of *your* step, and how long is the shortest step? Work
# it out by hand, in ms.

# %% name="chains" kind="exercise" exercise="1.1"
### BEGIN SOLUTION
chains = {
    "last message": 24 + 8 * 6 + 4 + 9,
    "all messages": 24 + 6 + 8 * 4 + 9,
}
chains["shortest"] = max(chains.values())
### END SOLUTION
### BEGIN STUB
# chains = {
#     "last message": None,
#     "all messages": None,
#     "shortest": None,
# }
### END STUB

# %% name="check-chains" kind="check" exercise="1.1" points=1
_ = check("1.1", my_number, chains)

# %% [markdown]
# In such a step only the *rest of the backward pass* can hide a gradient's message. The forward
# pass cannot: it is over. The backward pass of the gradient's own layer cannot: it must end
# before the message starts.

# %% [markdown]
# ## 2. Bounds (8 minutes)
#
# Often you know only two sums. **Tc** ($T_c$) is the time of all computing, and **Tm** ($T_m$) the
# time of all messages. Both are measured *alone*, with nothing beside them. Then
#
# - **serial** is the step if nothing overlaps;
# - the **bound** is what no schedule can beat, whatever it hides;
# - the best **speed-up** is serial over bound.
#
# **Exercise 1.2.** Write `bounds(tc, tm)`: return `(serial, bound, speed_up)`. Times
# are in ms; one of them may be 0. Three lines.
#
# <details><summary>Hint: the bound</summary>
#
# All the computing must be done, and all messages must be sent. How long does that take at least?
#
# </details>


# %% name="bounds" kind="exercise" exercise="1.2"
def bounds(tc, tm):
    """(serial, bound, best speed-up)."""
    ### BEGIN SOLUTION
    serial, bound = tc + tm, max(tc, tm)
    return serial, bound, serial / bound
    ### END SOLUTION


# %% name="check-bounds" kind="check" exercise="1.2" points=1
_ = check("1.2", bounds)

# %% [markdown]
# You will meet two claims. The first: *"The best speed-up is 1 + Tm/Tc."* The second: *"If
# communication is 10 % of a step, overlap makes it 20 % faster; if it is 30 %, 40 %."*
#
# **Predict.** If sending takes twice as long as computing, 1 + Tm/Tc says 3 times as fast. What is
# the best possible speed-up?

# %% name="predict-claim" kind="lab-only"
best_speed_up = None

# %% name="predicted-claim" kind="solution-only"
best_speed_up = 1.5

# %% name="claims" fold=true
lab.side_by_side("best speed-up at Tm = 2 Tc", best_speed_up, f"{3 / 2:.2f}")
print("\nTm/Tc    claimed  possible")
for ratio in (0.25, 0.5, 1, 2, 4):
    possible = (1 + ratio) / max(1, ratio)
    print(f"{ratio:<8} {1 + ratio:>6.2f}x {possible:>8.2f}x")
print("\nshare     claimed  possible")
for share, claimed in ((0.1, 1.2), (0.3, 1.4), (0.5, None), (0.6, None), (0.9, None)):
    possible = 1 / max(share, 1 - share)
    told = f"{claimed:.2f}x" if claimed else "-"
    print(f"{100 * share:.0f} % {told:>11} {possible:>8.2f}x")

# %% [markdown]
# The first claim is right as long as sending takes less time than computing. Beyond that it counts
# messages as hidden that have nothing beside them. The second claim promises 20 % where 11 %
# is the bound.
#
# **Overlap alone never more than doubles the speed**, and that only at Tc = Tm.

# %% [markdown]
# ## 3. T = Tc + (1 - a) Tm (12 minutes)
#
# This is the formula that everybody uses. A fraction $a$ of the communication disappears from the
# step, and the rest is added:
#
# $$T = T_c + (1 - a)\,T_m$$
#
# For the step of section 1: $a$ = 45/50 and T = 100 + 0.1 x 50 = 105 ms. It fits.
#
# People use the **overlap fraction** of a profiler as $a$: hidden / communication. Here are four
# examples. Tc and Tm were measured alone. In the figure, look for bars that are longer than
# alone, and for times at which all lanes but `cpu` are empty. (Do not look at *saved*, above
# the figures, until section 4.)

# %% name="cards"
cards = lab.cards(my_number)
for letter, card in cards.items():
    print(f"{letter}: {card}")
view.draw_many(
    {
        f"{k}, alone {card.tc_ms:g} + {card.tm_ms:g} ms": card.timeline
        for k, card in cards.items()
        if card.timeline
    }
)

# %% [markdown]
# **Exercise 1.3.** What does the formula say for each card, in ms to one decimal? And what is your
# `"verdict"`?
#
# - `"holds"`: the run took what the formula says;
# - `"contention"`: the two sides slow each other down, so that each takes longer than
#   alone;
# - `"idle"`: there is time in which neither side has anything to do;
# - `"impossible"`: no schedule can be as short as the formula says.
#
# `card.tc_ms`, `card.tm_ms` and `card.a` are numbers; everything else is printed above the figure.
# One card is only a promise, so it has no run.
#
# <details><summary>Hint: contention or idle?</summary>
#
# Does computing take longer in the run than Tc? Or are there gaps in the figure, in `default` and
# `comm` at the same time?
#
# </details>

# %% name="reading" kind="exercise" exercise="1.3"
### BEGIN SOLUTION
reading = {
    letter: {"formula_ms": card.tc_ms + (1 - card.a) * card.tm_ms}
    for letter, card in cards.items()
}
reading["A"]["verdict"] = "holds"
reading["B"]["verdict"] = "contention"
reading["C"]["verdict"] = "impossible"
reading["D"]["verdict"] = "idle"
### END SOLUTION
### BEGIN STUB
# reading = {
#     "A": {"formula_ms": None, "verdict": None},
#     "B": {"formula_ms": None, "verdict": None},
#     "C": {"formula_ms": None, "verdict": None},
#     "D": {"formula_ms": None, "verdict": None},
# }
### END STUB

# %% name="check-reading" kind="check" exercise="1.3" points=2
_ = check("1.3", my_number, reading)

# %% [markdown]
# So the formula is arithmetic, not a law of nature. Solve it for $a$:
#
# $$a = \frac{T_c + T_m - T}{T_m}$$
#
# That is what was *saved*, divided by Tm. You may use a profiler's fraction as $a$ only where it
# equals this. And $a$ cannot be larger than Tc/Tm: no more can be saved than Tc, because only
# computing hides a message.

# %% [markdown]
# ## 4. Three ratios (13 minutes)
#
# Three different numbers are called "overlap". In this course they are
#
# | name | is | asks |
# |---|---|---|
# | **overlap fraction** | hidden / communication, both in the run | did something run beside the messages? |
# | **saved fraction** | saved / Tm | how much of the messages is gone from the step? |
# | **efficiency** | saved / (serial - bound) | how much was saved of what overlap could save? |
#
# Take a run of 140 ms, with Tc = 80 and Tm = 120. It saves 60 ms. That is half of the messages. But
# only 80 ms could be saved, and 60 is three quarters of that.
#
# **Exercise 1.4.** Write `ratios(tc, tm, sent, hidden, step)`.
#
# - `tc`, `tm`: computation and communication, each alone, in ms;
# - `sent`, `hidden`: communication in the run, and the part of it with computation beside it;
#   `step`: how long the run takes.
# - Return `(overlap_fraction, saved_fraction, efficiency)`. Each is `None` where its denominator
#   is 0. A run can take longer than serial: then saved is less than 0.
#
# About 6 lines.
#
# <details><summary>Hint: serial - bound</summary>
#
# tc + tm - max(tc, tm). Which of the two is left?
#
# </details>


# %% name="ratios" kind="exercise" exercise="1.4" reference=true
def ratios(tc, tm, sent, hidden, step):
    """(overlap fraction, saved fraction, efficiency)."""
    ### BEGIN SOLUTION
    saved = tc + tm - step
    could_be = tc + tm - max(tc, tm)
    return (
        hidden / sent if sent else None,
        saved / tm if tm else None,
        saved / could_be if could_be else None,
    )
    ### END SOLUTION


# %% name="check-ratios" kind="check" exercise="1.4" points=2
_ = check("1.4", ratios)
lab.keep("1.4", ratios)

# %% [markdown]
# Here is the step of section 1 twice: on the GPU that you know, and on one that computes at 60 % of
# its speed beside a message, and sends at 50 % of its speed beside computing.
#
# **Predict.** With contention less is saved. Is less *hidden*, too?

# %% name="predict-hidden" kind="lab-only"
hides_less = None  # True or False

# %% name="predicted-hidden" kind="solution-only"
hides_less = True

# %% name="contention" fold=true
_, half, quarters = lab.mine_or_ours("1.4")(80, 120, 120, 60, 140)
print(f"80, 120, 140: {100 * half:.0f} % saved, efficiency {100 * quarters:.0f} %\n")
pair = {"no contention": lab.uncontended(), "contention": lab.contended()}
fractions = {name: lab.mine_or_ours("1.4")(*totals) for name, totals in pair.items()}
less = fractions["contention"][0] < fractions["no contention"][0]
lab.side_by_side("contention hides less", hides_less, less)
print(f"\n{'':<16}{'step':>8}{'overlap':>10}{'saved':>8}{'efficiency':>12}")
for name, totals in pair.items():
    row = "".join(f"{100 * f:>8.0f} %" for f in fractions[name])
    print(f"{name:<16}{totals.step:>5.0f} ms{row}")
seen = pair["contention"].timeline.report()
print(f"\nin the lower run: {seen.compute_ns / 1e6:.0f} ms of computing,", end=" ")
print(f"{seen.communication_ns / 1e6:.0f} of sending; alone 100 and 50")
upper, lower = (totals.timeline for totals in pair.values())
view.show(upper, beside=lower, title=tuple(pair))

# %% [markdown]
# (With a kernel, the figure is live: click it, zoom with the wheel.)
#
# *More* is hidden: messages that take longer have more computation beside them. **Hidden is not
# saved.** A profiler's overlap fraction can be highest where the two sides slow each other
# down most.
#
# No *saved* stands over the lower figure. What was saved is measured against computing and
# sending *alone*, and in *this run* both take longer (the last line of numbers). So **one trace
# by itself cannot show what contention costs**: put the times alone beside it.

# %% [markdown]
# **A door.** You know what overlap can save, and what a run saved. This is a good place to stop for
# today. When you come back, run all cells once: what you solved is in the notebook.

# %% [markdown]
# ## 5. Ten layers by hand (20 minutes)
#
# Here is another backward pass: ten layers of 5 ms. Each layer's gradients take 3 ms on the wire.
# Two layers share a message: a **bucket** of 6 ms.
#
# **Predict.** Count from the start of the backward pass. When does the last message end? And how
# many of the 30 ms of messages are hidden? Draw it on paper.

# %% name="predict-ten" kind="lab-only"
ends_ms = None
hidden_ms = None

# %% name="predicted-ten" kind="solution-only"
ends_ms = 56
hidden_ms = 24

# %% name="ten" fold=true
slow = lab.slow_gpu(layer_ms=5, message_ms=3)


def ten_layers(per_bucket, hardware=slow):
    """The ten layers, run with that many per bucket, from the backward pass on."""
    cap = per_bucket * lab.GRADIENT_BYTES
    timeline = ol.replay(lab.recorded(), hardware=hardware, buckets=cap)
    return lab.from_backward(timeline)


two_a_bucket = ten_layers(2)
hidden_ns = two_a_bucket.report().hidden_ns
lab.side_by_side("the end in ms", ends_ms, f"{two_a_bucket.step_ns / 1e6:.0f}")
lab.side_by_side("hidden, in ms", hidden_ms, f"{hidden_ns / 1e6:.0f}")
view.draw(two_a_bucket, title="ten layers, two per bucket")

# %% [markdown]
# (A layer's backward pass is two matrix products, `mm`, of 2.5 ms.)
#
# **Exercise 1.5.** Write `schedule(num_layers, layer_ms, message_ms, per_bucket)`: when
# does each message start and end?
#
# - `layer_ms`: one layer's backward pass; `message_ms`: the message of *one* layer.
# - A bucket leaves when the backward pass of all its layers is done and the wire is free. The wire
#   sends one message at a time, in order.
# - If `num_layers` does not divide by `per_bucket`, the last bucket is smaller.
# - Return a list of pairs `(start, end)` in ms from the start of the backward pass, one pair per
#   message.
#
# About 8 lines. Your ten layers are drawn. The check tries 153 more cases.
#
# <details><summary>Hint: what to keep</summary>
#
# One number: the time at which the wire is free again.
#
# </details>


# %% name="schedule" kind="exercise" exercise="1.5" reference=true
def schedule(num_layers, layer_ms, message_ms, per_bucket):
    """(start, end) of each message, from the start of the backward pass."""
    ### BEGIN SOLUTION
    pairs = []
    free = 0
    for first in range(0, num_layers, per_bucket):
        last = min(first + per_bucket, num_layers)
        start = max(last * layer_ms, free)
        free = start + (last - first) * message_ms
        pairs.append((start, free))
    return pairs
    ### END SOLUTION


# %% name="check-schedule" kind="check" exercise="1.5" points=3
_ = check("1.5", schedule)
lab.keep("1.5", schedule)

# %% [markdown]
# Here is your schedule beside runs of the program. In the fourth line sending takes longer than
# computing: once the wire is busy, it never rests, and the schedule still holds. The last two
# lines have something that the schedule does not know.

# %% name="beside-runs" fold=true
if solved("1.5"):
    rows = {
        "ten per bucket": (3, 10, slow),
        "two": (3, 2, slow),
        "one": (3, 1, slow),
        "two, 8 ms per layer": (8, 2, lab.slow_gpu(5, 8)),
        "one, and each costs 4 ms": (3, 1, lab.slow_gpu(5, 3, latency_us=4000)),
        "one, with contention": (3, 1, lab.with_contention(slow)),
    }
    print(f"{'':<27}you say   the run   hidden, you say   the run")
    for name, (message_ms, per_bucket, hardware) in rows.items():
        step, hidden = lab.step_and_hidden(schedule(10, 5, message_ms, per_bucket), 50)
        seen = ten_layers(per_bucket, hardware).report()
        print(f"{name:<26}{step:>5.0f} ms{seen.step_ns / 1e6:>7.0f} ms", end="")
        print(f"{hidden:>9.0f} of {10 * message_ms} ms", end="")
        print(f"{seen.hidden_ns / 1e6:>5.0f} of {seen.communication_ns / 1e6:.0f} ms")
gap = {f"{number} per bucket": ten_layers(number) for number in (10, 5, 2, 1)}
costly = ten_layers(1, lab.slow_gpu(5, 3, latency_us=4000))
view.draw_many({**gap, "1 per bucket, each costs 4 ms": costly})

# %% [markdown]
# Watch the gap close. The last bucket stays exposed: only the update is left to compute, and it
# waits for that bucket. So is smaller always better? In the first four figures a message takes
# only as long as its bytes. In the last figure each message costs 4 ms more, so ten messages
# of 7 ms keep the wire busy from 5 ms to 75.

# %% [markdown]
# ## 6. What a message costs (14 minutes)
#
# The cost has two parts. **alpha** ($\alpha$), the **latency**, is what it costs to send nothing.
# **beta** ($\beta$) is the time that a byte takes, and $1/\beta$ is the **bandwidth**. A message
# of $m$ bytes takes
#
# $$T(m) = \alpha + \beta\, m$$
#
# Data sheets are written in *bits*: 100 Gbit/s are 12.5 GB/s. A GB is $10^9$ bytes (a GiB
# is $2^{30}$, 7 % more). In a **ring**, each rank passes pieces on to its neighbour. An all-reduce
# among $N$ ranks sends $2(N-1)/N$ times its bytes over each link: once with two ranks, nearly
# twice with many. Here $\alpha$ is the same for any $N$; section 11 says more.

# %% name="picture-ring" fold=true
lab.ring_all_reduce()

# %% [markdown]
# Count the arrows that leave rank 0: four, with a third of its bytes each. That is
# $2(N-1)/N$ for three ranks.
#
# **Predict.** How many ms does a gigabyte take, with 100 Gbit/s, alpha = 100 us and two ranks?

# %% name="predict-gigabyte" kind="lab-only"
gigabyte_ms = None

# %% name="predicted-gigabyte" kind="solution-only"
gigabyte_ms = 80

# %% name="gigabyte" fold=true
latency_ns, wire_ns = collective_ns(lab.link_of(100, 100), "all_reduce", 2, 10**9)
lab.side_by_side("a gigabyte in ms", gigabyte_ms, f"{(latency_ns + wire_ns) / 1e6:.1f}")
print(f"{wire_ns / 1e6:.0f} ms of wire, {latency_ns / 1e6:.1f} ms for each message")

# %% [markdown]
# **Exercise 1.6.** Write `send_ms(num_bytes, gbit_per_s, latency_us, num_messages,
# num_ranks)`: how long do all-reduces of `num_bytes` bytes *together* take, cut into
# `num_messages` equal messages, one after the other?
#
# - `gbit_per_s`: of one link, in $10^9$ bits per second. Return ms.
# - Each message takes the latency once, whatever the number of ranks.
# - A single rank sends nothing, so it takes 0 ms.
#
# About 5 lines.
#
# <details><summary>Hint: units</summary>
#
# Convert the bytes into bits. 1 Gbit/s is 1e6 bits per ms. 1000 us are 1 ms.
#
# </details>


# %% name="send" kind="exercise" exercise="1.6"
def send_ms(num_bytes, gbit_per_s, latency_us, num_messages, num_ranks):
    """Time of `num_messages` all-reduces in a row, in ms."""
    ### BEGIN SOLUTION
    if num_ranks == 1:
        return 0
    crossings = 2 * (num_ranks - 1) / num_ranks
    wire_ms = crossings * num_bytes * 8 / (gbit_per_s * 1e6)
    return num_messages * latency_us / 1000 + wire_ms
    ### END SOLUTION


# %% name="check-send" kind="check" exercise="1.6" points=2
_ = check("1.6", send_ms)

# %% [markdown]
# Which size is best? A backward pass of 100 ms makes that gigabyte of gradients, at an even
# rate. A message leaves as soon as its gradients are there and the wire is free.
#
# **Predict.** Into how many messages should it be cut: 1, 10, 100 or 1000?

# %% name="predict-messages" kind="lab-only"
messages = None

# %% name="predicted-messages" kind="solution-only"
messages = 10

# %% name="counted" fold=true
counted = lab.count([1, 2, 5, 10, 20, 50, 100, 200, 500, 1000])
asked = [c for c in counted if c.num_messages in (1, 10, 100, 1000)]
lab.side_by_side("messages", messages, min(asked, key=lambda c: c.step_ms).num_messages)
print("\nmessages   one takes   all in a row   backward with messages")
for c in counted:
    print(
        f"{c.num_messages:>8} {c.one_ms:>8.2f} ms {c.all_ms:>11.1f} ms "
        f"{c.step_ms:>15.1f} ms"
    )
lab.draw_counted(counted)

# %% [markdown]
# Three people may look for the best size. The first wants the time of *one message* to be short:
# the orange line (squares) falls for ever, so the smallest size wins. The second wants *all
# messages together* to be short: the wide green line only rises, so one message for all wins.
# The third counts the overlap: the blue line (dots) has a valley with a flat floor, at the
# star. Only that question is worth asking. Lab 06 finds where the valley is.

# %% [markdown]
# ## Takeaways (2 minutes)

# %% name="takeaways" fold=true
report = serial.report()
both, bound_ms = report.serial_ns / 1e6, report.bound_ns / 1e6
overlap, saved, _ = fractions["contention"]
one_bucket = gap["10 per bucket"].step_ns / 1e6
print("1. No step is under max(Tc, Tm). One whose update waits for all gradients does")
print(
    f"   not even reach it: {both:.0f} ms became {hooks.step_ns / 1e6:.0f}, not {bound_ms:.0f}."
)
print("   Overlap alone never more than doubles the speed.")
print("2. As long as the update waits for all gradients, the last bucket is exposed:")
print(
    f"   of {one_bucket:.0f} ms, two layers per bucket make {two_a_bucket.step_ns / 1e6:.0f}, ",
    end="",
)
print(f"and {hidden_ns / 1e6:.0f} of 30 ms are hidden.")
print(
    f"3. Hidden is not saved: with contention {100 * overlap:.0f} % was hidden, {100 * saved:.0f} % saved."
)

# %% [markdown]
# **Tomorrow, in your own loop.** Time your step with its messages and without them. Then you know how
# much overlap could save at most, before you write any:
#
# ```python
# with_ms = time_step(lambda: model(batch).mean().backward())  # lab 02 writes time_step
# with model.no_sync():  # DistributedDataParallel: the same, and nothing is sent
#     without_ms = time_step(lambda: model(batch).mean().backward())
# print(f"exposed: {with_ms - without_ms:.1f} of {with_ms:.1f} ms")
# ```
#
# **You may close the laptop here.** Next: 02, measuring. What follows is extra; each
# part stands alone.

# %% [markdown]
# ## 7. Extra: from 8 to 4,096 GPUs (16 minutes)
#
# *"With hundreds of GPUs, communication is 30 to 50 % of the time."* Is it? Take a GPT with 1.3
# billion parameters. Each GPU has all of them, and the gradients are in bfloat16.
#
# **The API of this screen.** `collective_ns(hardware, "all_reduce", num_gpus, num_bytes)`
# returns `(latency_ns, wire_ns)`. `hardware.flops_per_s["bfloat16"]` is the GPU's rate.
# `find_hardware("h100-ib400")` is the hardware of a name in `lab.LINKS`; `lab.PARAMETERS` is the
# number of parameters. You can try a setting with `share(256, 4096, find_hardware("h100-ib400"))`.

# %% name="links"
for name in lab.LINKS:
    gpu = find_hardware(name)
    print(f"{name:<14} {gpu.link.bytes_per_s / 1e9:>6.1f} GB/s", end="")
    print(f"{gpu.flops_per_s['bfloat16'] / 1e12:>6.0f} TFLOP/s")

# %% [markdown]
# **Exercise 1.7.** Write `share(num_gpus, tokens, hardware)`: Tm / (Tc + Tm) of a step
# *without* overlap. `tokens` are those of one GPU. A step computes 6 FLOP for each
# parameter and token, and all-reduces 2 bytes for each parameter, in one message.
#
# Then find three settings, each with 100 to 999 GPUs, 256 to 65,536 tokens per GPU and
# one of the links in `lab.LINKS`:
#
# - `"claim holds"`: the share is 30 to 50 %;
# - `"far less"`: under 5 %; `"far more"`: over 80 %.


# %% name="share" kind="exercise" exercise="1.7"
def share(num_gpus, tokens, hardware):
    """Communication's share of a step without overlap."""
    ### BEGIN SOLUTION
    tc = 6 * lab.PARAMETERS * tokens * 1e9 / hardware.flops_per_s["bfloat16"]
    tm = sum(collective_ns(hardware, "all_reduce", num_gpus, 2 * lab.PARAMETERS))
    return tm / (tc + tm)
    ### END SOLUTION


### BEGIN SOLUTION
found = {
    "claim holds": {"num_gpus": 256, "tokens": 2048, "link": "h100-ib400"},
    "far less": {"num_gpus": 256, "tokens": 32_768, "link": "h100-ib400"},
    "far more": {"num_gpus": 256, "tokens": 2048, "link": "ethernet-100g"},
}
### END SOLUTION
### BEGIN STUB
# found = {
#     "claim holds": {"num_gpus": None, "tokens": None, "link": None},
#     "far less": {"num_gpus": None, "tokens": None, "link": None},
#     "far more": {"num_gpus": None, "tokens": None, "link": None},
# }
### END STUB

# %% name="check-share" kind="check" exercise="1.7" points=2
_ = check("1.7", share, found)

# %% name="share-table" fold=true
if solved("1.7"):
    for title, tokens_of in (
        ("8192 tokens per GPU", lambda n: 8192),
        ("4.2 million tokens for all together", lambda n: lab.GLOBAL_TOKENS // n),
    ):
        print(f"{title:<37}" + "".join(f"{name:>15}" for name in lab.LINKS))
        for num in lab.GPUS:
            cells = (lab.given_share(num, tokens_of(num), name) for name in lab.LINKS)
            print(
                f"{num:>8} GPUs{'':<24}" + "".join(f"{100 * c:>13.1f} %" for c in cells)
            )
        print()
    latency_ns, wire_ns = collective_ns(
        find_hardware("h100-ib400"), "all_reduce", 4096, 2 * lab.PARAMETERS
    )
    print(f"h100-ib400, 4096 GPUs: latency {latency_ns / 1e6:.2f} ms, ", end="")
    print(f"wire {wire_ns / 1e6:.1f} ms")
    print(
        f"a plain ring, 5 us a hop: 2 x 4095 hops, {2 * 4095 * 5e-3:.0f} ms of latency"
    )

# %% [markdown]
# If each GPU has the same work (above), the share is nearly the same for 16 GPUs and for 4,096. There
# are two reasons. Each link of a ring carries nearly twice the bytes, however many ranks there
# are. And the latency of our hardware profile hardly grows with them (last lines).
#
# If *all* GPUs together have the same work (below), each one has less to compute and as much to
# send. The share grows from next to nothing to nearly all.
#
# So the claim is true for some settings. It says nothing without the tokens per GPU and the link.

# %% [markdown]
# ## 8. Extra: when does overlap matter? (12 minutes)
#
# Here is the forward and backward pass of a GPT of 24 layers, with sliders. Below the timeline you
# see how much of the step *overlap* would save, and twice the bandwidth, and a GPU twice as
# fast. Without sliders, type `knobs.set(ktokens=16)`.

# %% name="knobs"
names = ("saves much", "little to send", "much to send")
knobs = view.explorer(lab.turn, lab.KNOBS, what_if=lab.WHAT_IF, keep=names)
knobs

# %% [markdown]
# **Exercise 1.8.** Find three settings, all with `overlap` at `"no"`. Turn the knobs and keep each with
# its button, or type the numbers. What you kept is gone when the kernel stops, so paste what
# `print(dict(knobs.kept))` shows before you hand it in.
#
# - `"saves much"`: overlap saves 30 % or more;
# - `"little to send"`: overlap saves under 2 %, and a GPU twice as fast 45 % or more;
# - `"much to send"`: overlap saves under 10 %, and twice the bandwidth 40 % or more.
#
# <details><summary>Hint</summary>
#
# The backward pass hides messages. When do the messages take as long as the backward pass?
#
# </details>

# %% name="settings" kind="exercise" exercise="1.8"
### BEGIN SOLUTION
settings = {
    "saves much": {"gbyte_per_s": 100},
    "little to send": {"gbyte_per_s": 340, "ktokens": 64, "teraflops": 400},
    "much to send": {"gbyte_per_s": 3},
}
### END SOLUTION
### BEGIN STUB
# settings = dict(knobs.kept)  # then paste it here: {"saves much": {"ktokens": 16}, ...}
### END STUB

# %% name="check-settings" kind="check" exercise="1.8" points=1
_ = check("1.8", settings)

# %% name="settings-seen" fold=true
for name, typed in settings.items():
    saves = {what: lab.saved_percent(typed, what) for what in lab.WHAT_IF}
    print(f"{name}: " + ", ".join(f"{k} {v:.2f} %" for k, v in saves.items()))
if solved("1.8"):
    fine = max(
        (lab.saved_percent({"gbyte_per_s": g, "ktokens": k}, "overlap"), g, k)
        for g in lab.KNOBS["gbyte_per_s"].values
        for k in lab.KNOBS["ktokens"].values
    )
    print(
        f"the most that overlap saves: {fine[0]:.0f} %, at {fine[1]} GB/s, {fine[2]}k tokens"
    )

# %% [markdown]
# Overlap matters in between. With little to send there is nothing to hide. With much to send there is
# not enough computing to hide it. And even in the middle it does not save half, because the
# forward pass, a third of the computing, hides no gradient.

# %% [markdown]
# ## 9. Extra: repair (10 minutes)
#
# Here is a calculator of a kind that people pass around. It takes the times alone and the fraction `a`
# that somebody promises to save. It forecasts the step, the speed-up, and the best possible
# speed-up. The number that you type decides which five jobs you get.

# %% name="jobs"
jobs = lab.jobs(my_number)
for letter, job in jobs.items():
    print(f"{letter}: Tc = {job.tc} ms, Tm = {job.tm} ms, a = {job.a}")

# %% [markdown]
# **Exercise 1.9.** First run the broken `forecast` on your jobs (the cell below it does).
# For exactly one job, the promised step is shorter than any schedule's.
#
# - `diagnosis`: `"job"`, its letter; `"promised_ms"`, what the broken calculator says;
#   `"shortest_ms"`, the shortest step that it could have.
# - Then repair `forecast`. Where `a` is possible, the step stays as it is. Where it is not, the
#   step is the bound.


# %% name="forecast" kind="exercise" exercise="1.9" broken=true
def forecast(tc, tm, a):
    """(step, speed-up, best speed-up)."""
    step = tc + (1 - a) * tm
    ### BEGIN SOLUTION
    bound = max(tc, tm)
    step = max(step, bound)
    best = (tc + tm) / bound
    ### END SOLUTION
    ### BEGIN STUB
    # best = 1 + tm / tc
    ### END STUB
    return step, (tc + tm) / step, best


# %% name="forecast-seen"
for letter, job in jobs.items():
    step, speed_up, best = forecast(*job)
    print(f"{letter}: {step:.1f} ms, {speed_up:.2f} times; at best {best:.2f} times")

# %% name="diagnosis" kind="exercise" exercise="1.9"
### BEGIN SOLUTION
letter, bad = next(
    (letter, job) for letter, job in jobs.items() if job.a * job.tm > job.tc
)
diagnosis = {
    "job": letter,
    "promised_ms": bad.tc + (1 - bad.a) * bad.tm,
    "shortest_ms": max(bad.tc, bad.tm),
}
### END SOLUTION
### BEGIN STUB
# diagnosis = {"job": None, "promised_ms": None, "shortest_ms": None}
### END STUB

# %% name="check-repair" kind="check" exercise="1.9" points=2
_ = check("1.9", my_number, diagnosis, forecast)

# %% [markdown]
# ## 10. Extra: on real GPUs (12 minutes, with 11)
#
# Here is a GPT of 738 million parameters on two GPUs, stored; nothing is measured now. With NVLink
# each GPU has a batch of 8 sequences. The other link was made slow on purpose (P2P off:
# transfers go through the host), and the batch is 2. So Tc differs, too: compare rows of one link.
#
# Tc is the step without messages. Tm is how much longer it gets with one message for all
# gradients at its end: that is the step without overlap. `ours-100` is this package's reducer
# with buckets of 100 MiB. `ddp-100` is PyTorch's DDP with buckets of that size, and
# `ddp-default` has DDP's own (25 MiB). `per-parameter` sends one message per parameter.

# %% name="gpu" fold=true
three = lab.mine_or_ours("1.4")
print("in brackets: eight of ten steps lie between\n")
print("\n".join(lab.measured_alone()))
print(f"\n{'':<32}  Tc    Tm  bound  step                 overlap  saved  efficiency")
for row in lab.measured():
    percents = [100 * f for f in three(*row)]
    print(
        f"{f'{row.link}, batch {row.batch}, {row.name}':<32}{row.tc:>5.1f}{row.tm:>6.1f}"
        f"{max(row.tc, row.tm):>7.1f}{row.step:>6.1f} ({row.low:.1f} to {row.high:.1f})"
        f"{percents[0]:>8.0f} %{percents[1]:>5.0f} %{percents[2]:>8.0f} %"
    )
print(lab.machine())
print("Times in ms, without a profiler; the overlap fraction is of a profiled step.")

# %% [markdown]
# On NVLink most of the messages are hidden, and little is saved: beside a message the kernels (what the
# GPU runs) take longer. These numbers do not say how little is saved: the brackets of the four
# reducers and of the step without overlap all overlap or touch. So you cannot say of any of
# the five that it is faster than another.
#
# With P2P off, sending takes longer than computing. The bound is Tm, and the overlap fraction cannot
# come near 1: read the last column. You cannot tell `ours-100` from `ddp-100`, and both are
# clearly shorter than the step without overlap. `per-parameter` takes 5 to 7 ms longer than
# they do, and so about as long as the step without overlap. The small batch is one reason why
# sending counts so much here: with the Tc of a batch of 8, sending would take less time than
# computing on this link, too.

# %% name="gpu-here"
print(lab.measure_it_here())

# %% [markdown]
# ## 11. Where the model lies
#
# Launching costs nothing here, except on one card of section 3. Ranks arrive together, so nobody waits
# for a late one. Latency is the same for any number of ranks, or (on `h100-ib400`) grows as
# slowly as the depth of a tree. Round a plain ring it would grow with each rank (end of the
# table in section 7).
#
# And one line of code sets the limit of section 1: the clipping. Without it, no update needs *all*
# gradients:


# %% name="no-clipping"
def no_clipping_step(model, x, optimizer):
    works = {}

    def send(param):
        works[param] = dist.all_reduce(param.grad, async_op=True)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(send)
    model(x).sum().backward()
    for param, work in works.items():  # in the order in which they left
        work.wait()
        param.data.add_(param.grad, alpha=-0.1)


without = ol.run(no_clipping_step, *lab.ten_layers(), hardware=lab.GPU).timeline
view.draw(without, ranks=[0], title="no clipping, each layer updated by itself")

# %% [markdown]
# Nine updates hide the last message. A bound is only as good as its list of what must come after what.
#
# ## In production
#
# - PyTorch DDP, `torch/csrc/distributed/c10d/reducer.cpp`: buckets in the order of the
#   backward pass, the first one small so that the wire starts early.
# - HTA (Holistic Trace Analysis), `hta/analyzers/communication_analysis.py`:
#   its "overlap percentage" is the overlap fraction of section 4.
# - nccl-tests, `doc/PERFORMANCE.md`: "bus bandwidth" has the ring's $2(N-1)/N$ in it.
#
# Further reading: Patarasuk and Yuan, *Bandwidth Optimal All-reduce Algorithms for
# Clusters of Workstations*, JPDC 2009.
