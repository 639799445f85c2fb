# %% [markdown]
# # When is a gradient ready?
#
# **Lab 05: gradients and hooks.** Core: two sittings of 50 and 60 minutes, with a door after
# section 3. Extras: 65 more. You need no GPU.
#
# After the core you can
#
# - say what can hide a gradient's message, and what cannot, in ms;
# - say which **hook** is given what, and when;
# - write a reducer that sends each gradient when it is ready, also where ranks differ.
#
# In the extras you see when hooks cost more than they hide, and repair two reducers.
#
# It builds on lab 04: a collective with `async_op=True` travels beside the computation,
# and `work.wait()` makes the *current stream* wait. Lab 06 adds **buckets**: gradients
# that share a message. Here each gradient travels alone.
#
# **How it works.** Run the cells from top to bottom. A check tells you what it saw, in
# numbers, and draws what *your* code did. No exercise needs the one before it: where
# yours is not finished, the course's own runs in its place and the cell says so.

# %% name="setup"
from dataclasses import replace

import torch
import torch.distributed as dist

import overlaplab as ol
from overlaplab import streams, view
from overlaplab.grading import check
from overlaplab_course import lab05 as lab

# %% [markdown]
# ## 1. The waste (12 minutes)
#
# Four GPUs train one model, each on data of its own. After the backward pass every
# gradient must become the mean over the four. What does that is a **reducer**. Training
# calls it so:
#
#     reducer = AllAtEnd(model)
#     for batch in batches:
#         model(batch).backward()
#         reducer.wait()  # now each .grad is the mean over the ranks
#         optimizer.step()
#         optimizer.zero_grad()


# %% name="all-at-end"
class AllAtEnd:
    def __init__(self, model):
        self.params = list(model.parameters())

    def wait(self):
        for param in self.params:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


# %% [markdown]
# The model has a table that is looked up (`embedding`), four matrices (`w0` to `w3`), and a
# `head`. It runs on the board: virtual hardware with round numbers. A look-up has nothing to
# multiply, so it takes no time.

# %% name="model"
print(lab.layers_table(lab.UNTIED))

# %% name="waste"
at_end = lab.play(AllAtEnd)
view.draw(at_end.timeline, title="all messages at the end")

# %% [markdown]
# F is a layer's forward and B its backward. A backward has *two* products: one makes the gradient
# of the layer's weight, the other the gradient of its input. The backward pass begins with the
# last layer. Now look at the right half: six messages travel, and nobody computes.

# %% name="waste-numbers"
report = at_end.timeline.report()
compute_ms, sent_ms = report.compute_ns / 1e6, report.communication_ns / 1e6
backward_ms = sum(lab.UNTIED.backward_ms)
print(f"compute {compute_ms:.0f} ms, of it the backward pass {backward_ms:.0f}")
print(f"messages {sent_ms:.0f} ms, step {at_end.step_ms:.0f} ms")
print(f"{100 * report.exposed_ns / report.step_ns:.0f} % of the step only sends")

# %% [markdown]
# Lab 01's bound: no step is shorter than its computing, nor than its messages. Here that is
# 21 ms.
#
# **Predict.** Now each message leaves when its gradient is ready and the wire is free.
# How long is the step, in ms? The table and the lines above have what you need. The forward
# takes what is left of the computing: 21 - 14 ms.

# %% name="predict-step" kind="lab-only"
step_ms = None

# %% name="predicted-step" kind="solution-only"
step_ms = 25

# %% name="prompt-seen" fold=true
prompt = lab.play(lab.ours("5.3"))
lab.side_by_side("the step in ms", step_ms, f"{prompt.step_ms:.0f}")
view.draw_many({"all at the end": at_end.timeline, "when ready": prompt.timeline})

# %% [markdown]
# Messages have a lane of their own now: `comm`. Each has the name of its gradient. A red strip marks
# what is **exposed**: nothing computes beside it.
#
# There is as much to compute as to send. Yet most of the messages are exposed. Why?

# %% name="prompt-numbers"
report = prompt.timeline.report()
print(f"hidden {report.hidden_ns / 1e6:.0f} of {sent_ms:.0f} ms,", end=" ")
print(f"exposed {report.exposed_ns / 1e6:.0f}\n")
print(view.text(prompt.timeline))

# %% [markdown]
# ## 2. The window (23 minutes)
#
# The forward pass hides nothing, because no gradient exists yet. A message cannot leave before its
# gradient is complete. From then on only one thing can hide it: the *rest of the backward pass*.
# That is the gradient's **window**:
#
# - `head` is complete after the first layer of the backward pass. Its window is what the
#   other layers take.
# - `embedding` is complete when the backward pass is over. Its window is 0.
#
# Here are the windows of the run above: what was left when each gradient arrived.

# %% name="windows-seen"
print(lab.windows_table(lab.UNTIED, {"window": prompt.windows_ms()}))

# %% [markdown]
# What must be exposed, then? Begin with the gradients whose window is 0: `w0` and `embedding`.
# They are complete when all computing is over. So their messages, 2 + 6 ms, are all exposed.
#
# Now add `w1`, whose window is 2 ms. The three messages take 10 ms, and the wire sends one after
# the other. None of them can leave before the last 2 ms of the backward pass. So at most 2 of the
# 10 ms are hidden, and again 8 must be exposed.
#
# You can do this for any window $w$: take all gradients whose window is at most $w$, add up their
# messages, and subtract $w$. At least that much must be exposed. Do it for every window, and the
# largest result counts. Which $w$ explains the 12 ms of the run?
#
# **Exercise 5.1.** Write two functions.
#
# - `windows(backward_ms, layers)`: `layers[i]` is the name of layer i's weight, in the
#   order of the *forward*. `backward_ms[i]` is how long its backward takes. Two layers may
#   have the same weight; its gradient is complete when the backward of both is over.
#   Return a dict: name to window, in ms.
# - `least_exposed(windows_ms, message_ms)`: both are dicts by name. Return how many ms
#   must be exposed.
#
# About 5 lines and 4 lines. Both are compared with runs of other models, on other numbers of ranks.
#
# <details><summary>Hint: which way to walk?</summary>
#
# The backward pass ends with layer 0. When layer i is done, layers i - 1 to 0 are left: all that
# stand before it in the list. So walk from the front and add up `backward_ms` as you go.
#
# </details>
# <details><summary>Hint: least_exposed</summary>
#
# For each weight: the sum of the messages of all whose window is no larger, minus its
# window. The largest of these.
#
# </details>


# %% name="window" kind="exercise" exercise="5.1" reference=true
def windows(backward_ms, layers):
    """How much of the backward pass is left when each weight's gradient is complete."""
    ### BEGIN SOLUTION
    left, windows_ms = 0, {}
    for took, name in zip(backward_ms, layers, strict=True):
        windows_ms.setdefault(name, left)  # the first use gets its gradient last
        left += took
    return windows_ms
    ### END SOLUTION


def least_exposed(windows_ms, message_ms):
    """What of the messages must show, however they are sent."""
    ### BEGIN SOLUTION
    exposed = 0
    for window in windows_ms.values():
        late = [name for name, w in windows_ms.items() if w <= window]
        exposed = max(exposed, sum(message_ms[name] for name in late) - window)
    return exposed
    ### END SOLUTION


# %% name="check-window" kind="check" exercise="5.1" points=3
_ = check("5.1", windows, least_exposed)
lab.keep("5.1", windows)

# %% [markdown]
# Many GPTs use one table twice: `embedding` and `head` are **tied**. That saves 6 ms on the
# wire.
#
# **Predict.** 14 ms of messages are left. How many ms of them are exposed?

# %% name="predict-tied" kind="lab-only"
tied_exposed_ms = None

# %% name="predicted-tied" kind="solution-only"
tied_exposed_ms = 8

# %% name="tied" fold=true
tied = lab.play(lab.ours("5.3"), lab.TIED)
exposed_ms = tied.timeline.report().exposed_ns / 1e6
lab.side_by_side("exposed, in ms", tied_exposed_ms, f"{exposed_ms:.0f}")
said = lab.mine_or_ours("5.1")(lab.TIED.backward_ms, lab.TIED.layers)
print(lab.windows_table(lab.TIED, {"window": tied.windows_ms(), "yours": said}))
view.draw_many({"two tables": prompt.timeline, "one table, tied": tied.timeline})

# %% [markdown]
# The tied gradient has two parts. The head's part comes first, the look-up's part last. The sum is
# complete when both are in it, at the very end, so nothing hides the largest message.

# %% [markdown]
# ## 3. Which hook is given what? (14 minutes)
#
# A **hook** is a function that autograd calls in the middle of `backward()`. There are
# several kinds. Two are registered on a tensor, one on a module:
#
# - `param.register_hook(hook)`
# - `param.register_post_accumulate_grad_hook(hook)`
# - `module.register_full_backward_hook(hook)`
#
# Which of them may send? Here is an experiment. One weight is used twice: a module multiplies
# its input by the weight, and is called twice. `.grad` is not empty at the start, as in the
# second of several micro-batches. Each hook notes two numbers: one that it was given, and what
# `.grad` holds at that moment.


# %% name="experiment" reference=true
def experiment(weight, grad, factors):
    seen = lab.Seen()
    w = torch.nn.Parameter(torch.tensor(weight))
    w.grad = torch.tensor(grad)

    class Multiply(torch.nn.Module):
        def forward(self, x):
            return w * x

    def tensor_hook(given):
        seen.register_hook.append((given.item(), w.grad.item()))

    def post_accumulate_hook(given):
        seen.post_accumulate.append((given.item(), w.grad.item()))

    def module_hook(module, grad_inputs, grad_outputs):
        seen.module.append((grad_outputs[0].item(), w.grad.item()))

    multiply = Multiply()
    w.register_hook(tensor_hook)
    w.register_post_accumulate_grad_hook(post_accumulate_hook)
    multiply.register_full_backward_hook(module_hook)
    first, second = (torch.tensor(f, requires_grad=True) for f in factors)
    loss = multiply(first) + multiply(second)
    print("backward() returns", loss.backward())
    return seen


# %% name="experiment-seen"
seen = experiment(weight=3.0, grad=100.0, factors=(2.0, 5.0))
print("(given, .grad), call by call")
print("register_hook:                     ", seen.register_hook)
print("register_post_accumulate_grad_hook:", seen.post_accumulate)
print("register_full_backward_hook:       ", seen.module)

# %% [markdown]
# The weight is 3, and `.grad` was 100. Its two uses have the gradients 2 and 5. Look at each number
# in the output, and say what it is before you go on. There are five candidates: the weight, the old
# `.grad`, 2 + 5, 100 + 2 + 5, or the gradient of a module's *output*. (That last one is 1, because
# the loss is the sum of the outputs.)
#
# Now choose a number. From it you get a weight, a `.grad` and two factors of your own for the same
# experiment:

# %% name="my-number"
my_number = 5  # any whole number: your day of birth, your desk
print(lab.hook_case(my_number))

# %% [markdown]
# **Exercise 5.2.** Fill in the table for *your* numbers: run `experiment` with them, or
# work it out.
#
# - `"given"`: the number that the hook is given, as in the output above;
# - `"grad"`: what `.grad` holds at the hook's *first* call;
# - `"calls"`: how often it is called;
# - `"backward returns"`: what `print(loss.backward())` would show, as a text: `"..."`;
# - `"send from"`: the name of the hook in which `.grad` is complete and can be sent.

# %% name="hooks-table" kind="exercise" exercise="5.2"
### BEGIN SOLUTION
case = lab.hook_case(my_number)
both = sum(case.factors)
hooks = {
    "register_hook": {"given": both, "grad": case.grad, "calls": 1},
    "register_post_accumulate_grad_hook": {
        "given": case.weight,
        "grad": case.grad + both,
        "calls": 1,
    },
    "register_full_backward_hook": {"given": 1, "grad": case.grad, "calls": 2},
    "backward returns": "None",
    "send from": "register_post_accumulate_grad_hook",
}
### END SOLUTION
### BEGIN STUB
# hooks = {
#     "register_hook": {"given": None, "grad": None, "calls": None},
#     "register_post_accumulate_grad_hook": {"given": None, "grad": None, "calls": None},
#     "register_full_backward_hook": {"given": None, "grad": None, "calls": None},
#     "backward returns": None,
#     "send from": None,
# }
### END STUB

# %% name="check-hooks-table" kind="check" exercise="5.2" points=2
_ = check("5.2", my_number, hooks)

# %% [markdown]
# <details><summary>Row by row, when you have filled in your table</summary>
#
# - `register_hook` is given the gradient *before* it is added to `.grad`. It may return another
#   gradient, which then takes its place. Do not send from it: the message would overwrite the
#   gradient while autograd still reads it, to add it to `.grad`.
# - `register_post_accumulate_grad_hook` is given the **parameter**, when `.grad` is complete. It
#   is called once in a backward pass, and both uses are in `.grad` by then. It must return `None`.
# - A module's hook is called once for each *use*, and is given the gradient of the module's output.
#   At its first call `.grad` is not complete. At its last it may be, but autograd does not promise
#   that.
#
# And `backward()` returns `None`: `grad = loss.backward()` is no gradient.
#
# </details>
#
# **Predict.** A public training framework once had this hook, registered with
# `register_post_accumulate_grad_hook`:
#
#     def reduce_grad(grad):
#         dist.all_reduce(grad)
#
# On four ranks the weight is 3.0, and the gradients are 1.0, 2.0, 3.0 and 4.0. What are the
# weight and the gradient of rank 0 after `backward()`?

# %% name="predict-argument" kind="lab-only"
weight_after, grad_after = None, None

# %% name="predicted-argument" kind="solution-only"
weight_after, grad_after = 12.0, 1.0


# %% name="argument" fold=true
def reduce_grad(grad):
    dist.all_reduce(grad)


def one_step():
    w = torch.nn.Parameter(torch.tensor(3.0))
    w.register_post_accumulate_grad_hook(reduce_grad)
    (w * (dist.get_rank() + 1.0)).backward()
    return w.item(), w.grad.item()


seen = ol.run(one_step, world_size=4).values[0]
lab.side_by_side("(weight, gradient)", (weight_after, grad_after), seen)

# %% [markdown]
# It summed the *weights*, since the hook is given the parameter. There is no error and no warning,
# and every rank goes on with its own gradient. With the mean in the place of the sum even the
# weights would have looked right: the mean of four equal weights is that weight.

# %% [markdown]
# **A door.** You know what can hide a message, and which hook may send it. This is a good place to
# stop for today. When you come back, run all cells once: what you solved is in the notebook.

# %% [markdown]
# ## 4. One message per gradient (21 minutes)
#
# **Exercise 5.3.** Write `PromptReducer(model)`. Training calls it as in section 1.
#
# - Each gradient is a message of its own. The hook that tells you that the gradient is complete
#   launches it.
# - After `wait()`, each `.grad` is the mean over the ranks (`dist.get_world_size()` of them), for
#   all that is launched on the current stream from then on.
# - `wait()` waits for every message. The hooks wait for none, and the CPU waits for nothing.
# - A parameter with `requires_grad` False has no gradient, and to register a hook on it is an error.
#   One that the loss does not use gets no gradient on any rank: its `.grad` stays `None`.
# - `wait()` leaves the reducer as it was before the first step. The next step may begin with zeros
#   in `.grad` and not `None`: that is what `zero_grad(set_to_none=False)` leaves.
#
# About 10 lines.
#
# <details><summary>Hint: what to keep from the hook to wait()</summary>
#
# A list of pairs: the parameter and the work that `dist.all_reduce(...)` returned. Empty it
# at the end of `wait()`.
#
# </details>
# <details><summary>Hint: the order in wait()</summary>
#
# First `work.wait()`, then divide: the division is launched on the current stream, so it
# comes after the sum.
#
# </details>


# %% name="prompt-reducer" kind="exercise" exercise="5.3" reference=true
class PromptReducer:
    def __init__(self, model):
        ### BEGIN SOLUTION
        self.sent = []
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self.hook)
        ### END SOLUTION

    def hook(self, param):
        ### BEGIN SOLUTION
        work = dist.all_reduce(param.grad, async_op=True)
        self.sent.append((param, work))
        ### END SOLUTION

    def wait(self):
        ### BEGIN SOLUTION
        for param, work in self.sent:
            work.wait()
            param.grad /= dist.get_world_size()
        self.sent.clear()
        ### END SOLUTION


# %% name="check-prompt" kind="check" exercise="5.3" points=3
_ = check("5.3", PromptReducer)
lab.keep("5.3", PromptReducer)

# %% [markdown]
# With several micro-batches the hook is called in each of them. Only the last one should send:
# that is what `no_sync()` of DDP is for.

# %% [markdown]
# ### The same timeline again (1 minute)
#
# Exercise 5.1 said how much must be exposed. Does your reducer expose that much, and no more?

# %% name="again"
mine = lab.play(lab.mine_or_ours("5.3"))
print(f"must be exposed {lab.must_be_exposed(lab.UNTIED):.0f} ms,", end=" ")
print(f"is exposed {mine.timeline.report().exposed_ns / 1e6:.0f} ms")
so_far = {"all at the end": at_end.timeline, lab.whose("5.3"): mine.timeline}
view.draw_many(so_far)

# %% name="again-numbers"
view.table(so_far)

# %% [markdown]
# ## 5. Ranks that differ (36 minutes)
#
# Messages meet in the order of their launch: the first of rank 0 with the first of rank 1,
# whatever is in them. And each hook launches as soon as its gradient is complete. In some models
# the data of a rank decide which layers run, and in which order. There the ranks launch
# different messages, or the same ones in different orders.
#
# **Predict.** A `PromptReducer` trains each of the four models below for three steps, on three
# ranks. Are the gradients `"right"`, are they `"wrong"` without an error, or are the ranks `"stuck"`?

# %% name="predict-differ" kind="lab-only"
expected = {
    "two layers share a weight": None,
    "no rank uses a layer": None,
    "only rank 0 uses a layer": None,
    "rank 0 uses two layers in the other order": None,
}

# %% name="predicted-differ" kind="solution-only"
expected = {
    "two layers share a weight": "right",
    "no rank uses a layer": "right",
    "only rank 0 uses a layer": "stuck",
    "rank 0 uses two layers in the other order": "wrong",
}

# %% name="differ-seen" fold=true
for what, net in lab.SITUATIONS.items():
    lab.side_by_side(what, expected[what], lab.outcome(lab.ours("5.3"), net))

# %% [markdown]
# A weight that is used twice is no trouble: its hook is called once. A gradient that no rank has is
# no trouble either. Here are the other two. First the one that is stuck:

# %% name="stuck-seen"
print(lab.how_it_ended(lab.ours("5.3"), lab.SITUATIONS["only rank 0 uses a layer"]))

# %% [markdown]
# Rank 0 sends two gradients in each step, the others one. In three steps the others launch three
# messages and end. The fourth of rank 0, number 3, waits for partners that never come. (Messages 0
# to 2 did meet, but they added up gradients of different layers, or of different steps.)
#
# And here is the worse one, because nobody notices. Whose gradients does each rank send?

# %% name="order-seen"
order = "rank 0 uses two layers in the other order"
seen = lab.play(lab.ours("5.3"), lab.SITUATIONS[order])
print(lab.orders(seen))
view.draw(lab.named(seen.evidence, step=1), title="three ranks, step 1")

# %% [markdown]
# Take one message, number 0 say, and read what each rank puts into it: rank 0 the gradient of one
# layer, the others that of another. They are added up. The shapes fit, so there is no error.
#
# So all ranks must launch in *one* order, whatever arrives first. A gradient that is ready too
# early waits until those before it are launched.
#
# **Exercise 5.4a.** Begin with that decision alone. Write `to_launch(order, num_launched, arrived)`.
# `order` is a list. Its first `num_launched` are launched already. `arrived` is a set of all that is
# ready by now, launched or not. Return a list of what may be launched now, in the order.
#
# With the order `["d", "c", "b", "a"]` and nothing launched yet: if only `c` has arrived, return `[]`.
# If `a`, `c` and `d` have, return `["d", "c"]`: `a` waits for `b`. About 4 lines.


# %% name="to-launch" kind="exercise" exercise="5.4a" reference=true
def to_launch(order, num_launched, arrived):
    """What may be launched now: a list, in the order."""
    ### BEGIN SOLUTION
    ready = []
    for following in order[num_launched:]:
        if following not in arrived:
            break
        ready.append(following)
    return ready
    ### END SOLUTION


# %% name="check-to-launch" kind="check" exercise="5.4a"
_ = check("5.4a", to_launch)

# %% [markdown]
# **Exercise 5.4.** Complete `OrderedReducer`. It promises what `PromptReducer` does, and
#
# - messages are launched in the order of `self.params`, on every rank;
# - a parameter that has no gradient on this rank, at the end of the backward pass, adds zeros. The
#   mean is over *all* ranks. (A parameter that no rank used may end with zeros or `None`.)
# - where gradients arrive in that order, each message still leaves at once.
#
# About 12 lines. `__init__` is given. `self.params` are the trainable parameters, the last
# registered first, much as gradients arrive. Use your `to_launch`; if it is not finished,
# `lab.ours("5.4a")` is the course's.
#
# <details><summary>Hint: the hook</summary>
#
# Note the arrival, then launch what `to_launch` returns. As many are launched as there are works.
#
# Keep arrivals in the set. (`param in a_list` compares tensors element by element, and fails where
# shapes differ.) Do not look at `.grad` to see what has arrived: `zero_grad` may have left zeros
# there before the backward pass.
#
# </details>
# <details><summary>Hint: what never came</summary>
#
# `wait()` comes after the backward pass, on every rank. What is not launched by then is
# launched there, in the same order. Where `.grad` is `None`, make it
# `torch.zeros_like(param)`.
#
# </details>


# %% name="ordered-reducer" kind="exercise" exercise="5.4" reference=true
class OrderedReducer:
    def __init__(self, model):
        self.params = [p for p in model.parameters() if p.requires_grad][::-1]
        self.arrived, self.works = set(), []
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.hook)

    def hook(self, param):
        ### BEGIN SOLUTION
        self.arrived.add(param)
        for ready in to_launch(self.params, len(self.works), self.arrived):
            self.works.append(dist.all_reduce(ready.grad, async_op=True))
        ### END SOLUTION

    def wait(self):
        ### BEGIN SOLUTION
        for param in self.params[len(self.works) :]:  # held up, or never came
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            self.works.append(dist.all_reduce(param.grad, async_op=True))
        for param, work in zip(self.params, self.works, strict=True):
            work.wait()
            param.grad /= dist.get_world_size()
        self.arrived.clear()
        self.works.clear()
        ### END SOLUTION


# %% name="check-ordered" kind="check" exercise="5.4" points=3
_ = check("5.4", OrderedReducer)
lab.keep("5.4", OrderedReducer)

# %% name="ordered-seen"
for what, net in lab.SITUATIONS.items():
    print(f"{what}: {lab.outcome(lab.mine_or_ours('5.4'), net)}")
print(lab.how_it_ended(lab.mine_or_ours("5.4"), lab.SITUATIONS[order]))

# %% [markdown]
# The order has a price. Here is the model of section 1 with one more matrix, `spare`, that no rank
# uses. It was registered last, so its turn comes first. In the figure its message, all zeros, has
# no name:

# %% name="price" fold=true
spare = lab.play(lab.mine_or_ours("5.4"), replace(lab.UNTIED, unused=("spare",)))
in_order = lab.play(lab.mine_or_ours("5.4"))
print(f"all are used: {in_order.step_ms:.0f} ms; with `spare`: {spare.step_ms:.0f} ms")
view.draw_many({"all are used": in_order.timeline, "with spare": spare.timeline})

# %% [markdown]
# A gradient that never comes holds up all behind it, to the end of the backward pass. DDP's setting
# `find_unused_parameters=True` is made for that: *before* each backward pass it finds out which
# gradients will not come.

# %% [markdown]
# ## Takeaways (2 minutes)

# %% name="takeaways" fold=true
hidden_ms = mine.timeline.report().hidden_ns / 1e6
print(f"""1. Only the rest of the backward pass hides a gradient: {hidden_ms:.0f} of {sent_ms:.0f} ms here, though
   {compute_ms:.0f} ms are computed. What is used first is complete last; a tied table is, too.
2. Send from the hook that is called once a backward pass, when .grad has every use in it.
3. Launch in one order on all ranks. The order has a price: a gradient that never comes
   holds up all behind it, {spare.step_ms:.0f} ms instead of {in_order.step_ms:.0f}.""")

# %% [markdown]
# **Tomorrow, in your own loop.** Print the order in which your gradients are complete. What
# comes last has nothing to hide behind:
#
# ```python
# for name, param in model.named_parameters():
#     param.register_post_accumulate_grad_hook(lambda _, name=name: print(name))
# loss_of(model, batch).backward()
# ```
#
# If an embedding or a tied table closes the list, its message is exposed, whatever you do with the
# others.
#
# ---
# **Stop line.** That is the core. You may close the laptop here.
#
# ---

# %% [markdown]
# # Extras
#
# Take what you like. Section 8 measures the GPT of section 6; otherwise each stands alone.
#
# ## 6. When hooks cost more than they hide (25 minutes)
#
# On the board a launch costs nothing. With real GPUs each launch takes time on the CPU, and each
# hook is Python. So here is other virtual hardware: two GPUs that train a GPT with 738.5 million
# parameters. The CPU takes 15 us to launch a kernel. For a message it takes 80 us, its hook
# included. The GPUs are joined by NVLink, and each message has 44 us of latency.

# %% name="eager"
eager = lab.Setup(
    name="1 sequence",
    sequences=1,  # of 1024 tokens, on each GPU
    launch_us=15,
    collective_us=80,
    latency_us=44,
    gbyte_per_s=340,
)
print(eager)

# %% [markdown]
# **Predict.** There are two ways: `"each"` gradient in a message of its own, from hooks, or `"one"`
# message for all, after the backward pass. With one sequence per GPU, which step is shorter? And
# how many ms does the step of `"each"` take? Add up what the CPU has to launch.

# %% name="predict-way" kind="lab-only"
shorter, each_ms = None, None

# %% name="predicted-way" kind="solution-only"
shorter, each_ms = "one", 17

# %% name="ways-seen" fold=true
ways = {"each alone": eager.timeline("each"), "one for all": eager.timeline("one")}
lab.side_by_side(
    "the shorter way", shorter, min(eager.steps_ns, key=eager.steps_ns.get)
)
lab.side_by_side("each, in ms", each_ms, f"{eager.steps_ns['each'] / 1e6:.1f}")
launched_ms = eager.num_gradients * eager.costs.collective_ms
print(f"{eager.num_gradients} messages at {eager.collective_us:.0f} us", end=" ")
print(f"are {launched_ms:.0f} ms of launching")
view.draw_many(ways)

# %% [markdown]
# Look at the lane `cpu` of the upper figure: it is full to the end, and `default` has gaps. The
# GPU waits for launches, and so does the wire. Now two changes, one at a time:

# %% name="setups"
captured = replace(eager, name="captured in a CUDA graph", launch_us=0, collective_us=0)
longer = replace(eager, name="8 sequences", sequences=8)
print(lab.steps_table([eager, captured, longer]))

# %% [markdown]
# The last two columns name the largest part of the critical path. With `"each"`, three things can
# be the slowest: the GPU, the CPU that launches, or the wire, where every message pays its latency.
#
# - A CUDA graph launches the whole step at once, so the CPU no longer counts. `"each"` loses all
#   the same, because of its latencies.
# - With 8 sequences the GPU has so much to compute that launches and latencies hide behind it.
#
# **Exercise 5.5.** Write `choose_way(costs)`: return `"each"` or `"one"`, whichever has the
# shorter step. It is asked on ten machines, and neither answer is right on all ten. The step that
# you choose may be up to 3 % longer than the other.
#
# | of `costs` | |
# |---|---|
# | `compute_ms` | all kernels of forward and backward, back to back; a third is the forward |
# | `launch_ms` | what the CPU takes to launch those kernels |
# | `collective_ms` | what the CPU takes to launch one message, its hook included |
# | `num_gradients` | how many messages `"each"` sends |
# | `latency_ms` | what every message costs on the wire, however small it is |
# | `wire_ms` | what the bytes of all gradients take on the wire |
# | `last_ms` | what the bytes of the last gradient alone take |
#
# About 8 lines: estimate both steps, then compare.
#
# <details><summary>Hint: one</summary>
#
# First the computing or the launching, whichever takes longer. Then one message with everything
# in it.
#
# </details>
# <details><summary>Hint: each</summary>
#
# The longest of three chains:
#
# - the GPU computes, then the last gradient travels;
# - the CPU launches kernels and messages, then the last gradient travels;
# - the forward, which hides nothing, then all messages, one after the other.
#
# </details>


# %% name="choose-way" kind="exercise" exercise="5.5"
def choose_way(costs):
    """ "each" or "one", whichever has the shorter step."""
    ### BEGIN SOLUTION
    c, n = costs, costs.num_gradients
    gpu, cpu = c.compute_ms, c.launch_ms + n * c.collective_ms
    wire = c.compute_ms / 3 + n * c.latency_ms + c.wire_ms
    each = max(max(gpu, cpu) + c.latency_ms + c.last_ms, wire)
    one = max(gpu, c.launch_ms) + c.collective_ms + c.latency_ms + c.wire_ms
    return "each" if each < one else "one"
    ### END SOLUTION


# %% name="check-choose-way" kind="check" exercise="5.5" points=2
_ = check("5.5", choose_way)

# %% [markdown]
# Between the two lie buckets: few enough messages that launches and latencies do not count, and
# enough of them that the first leaves early. That is lab 06.

# %% [markdown]
# ## 7. Two repairs of five (30 minutes)
#
# Here are five reducers, each with a fault that people really make. Your number picks two of them,
# and a net for each: two branches, then a trunk of some matrices. Run the next cell, then read only
# your two, but run the cells of all five.

# %% name="repair-cases"
first, second = lab.repair_cases(my_number)
print(f"first:  {first}\nsecond: {second}")

# %% [markdown]
# The idea behind `Alder`: what is launched on a side stream runs beside the rest.


# %% name="alder" kind="exercise" exercise="5.6a" reference=true broken=true
class Alder:
    def __init__(self, model):
        self.params = list(model.parameters())
        self.side = streams.Stream()
        ### BEGIN SOLUTION
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.send)
        ### END SOLUTION
        ### BEGIN STUB
        ### END STUB

    def send(self, param):
        self.side.wait_stream(streams.current_stream())
        with streams.stream(self.side):
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()

    def wait(self):
        ### BEGIN SOLUTION
        # all is sent already, by the hooks
        ### END SOLUTION
        ### BEGIN STUB
        # for param in self.params:
        #     self.send(param)
        ### END STUB
        streams.current_stream().wait_stream(self.side)


# %% [markdown]
# `Birch`: a gradient is sent as soon as autograd has it.


# %% name="birch" kind="exercise" exercise="5.6a" reference=true broken=true
class Birch:
    def __init__(self, model):
        self.params, self.works = list(model.parameters()), []
        for param in self.params:
            ### BEGIN SOLUTION
            param.register_post_accumulate_grad_hook(lambda p: self.send(p.grad))
            ### END SOLUTION
            ### BEGIN STUB
            # param.register_hook(self.send)
            ### END STUB

    def send(self, grad):
        self.works.append(dist.all_reduce(grad, async_op=True))

    def wait(self):
        for work in self.works:
            work.wait()
        for param in self.params:
            param.grad /= dist.get_world_size()
        self.works.clear()


# %% [markdown]
# `Cedar`: one order on all ranks, and the early layers first, while the later ones compute.


# %% name="cedar" kind="exercise" exercise="5.6a" reference=true broken=true
class Cedar:
    def __init__(self, model):
        self.order = list(model.parameters())
        ### BEGIN SOLUTION
        self.order.reverse()  # the last layer's gradient comes first
        ### END SOLUTION
        ### BEGIN STUB
        ### END STUB
        self.turn, self.arrived, self.works = 0, set(), []
        for param in self.order:
            param.register_post_accumulate_grad_hook(self.hook)

    def hook(self, param):
        self.arrived.add(param)
        while self.turn < len(self.order) and self.order[self.turn] in self.arrived:
            grad = self.order[self.turn].grad
            self.works.append(dist.all_reduce(grad, async_op=True))
            self.turn += 1

    def wait(self):
        for work in self.works:
            work.wait()
        for param in self.order:
            param.grad.div_(dist.get_world_size())
        self.turn, self.arrived, self.works = 0, set(), []


# %% [markdown]
# `Elm`: gradients go into a buffer as they come. When it is full, it leaves.


# %% name="elm" kind="exercise" exercise="5.6a" reference=true broken=true
class Elm:
    def __init__(self, model, room=3000):
        self.room, self.filled, self.sent = room, [], []
        ### BEGIN SOLUTION
        self.order = list(model.parameters())[::-1]
        self.turn, self.arrived = 0, set()
        ### END SOLUTION
        ### BEGIN STUB
        ### END STUB
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self.hook)

    def hook(self, param):
        ### BEGIN SOLUTION
        self.arrived.add(param)
        while self.turn < len(self.order) and self.order[self.turn] in self.arrived:
            self.fill(self.order[self.turn])  # in one order, whatever arrives first
            self.turn += 1
        ### END SOLUTION
        ### BEGIN STUB
        # self.fill(param)
        ### END STUB

    def fill(self, param):
        self.filled.append(param)
        if sum(p.numel() for p in self.filled) >= self.room:
            self.send()

    def send(self):
        buffer = torch.cat([param.grad.flatten() for param in self.filled])
        work = dist.all_reduce(buffer, async_op=True)
        self.sent.append((self.filled, buffer, work))
        self.filled = []

    def wait(self):
        if self.filled:
            self.send()
        for params, buffer, work in self.sent:
            work.wait()
            buffer /= dist.get_world_size()
            parts = buffer.split([param.numel() for param in params])
            for param, part in zip(params, parts, strict=True):
                param.grad.copy_(part.view_as(param))
        ### BEGIN SOLUTION
        self.turn, self.arrived = 0, set()
        ### END SOLUTION
        ### BEGIN STUB
        ### END STUB
        self.sent.clear()


# %% [markdown]
# `Fir`: each gradient in a message of its own, when it is complete.


# %% name="fir" kind="exercise" exercise="5.6a" reference=true broken=true
class Fir:
    def __init__(self, model):
        self.params, self.works = list(model.parameters()), []
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.hook)

    def hook(self, param):
        self.works.append(dist.all_reduce(param.grad, async_op=True))

    def wait(self):
        for work in self.works:
            work.wait()
        ### BEGIN SOLUTION
        for param in self.params:
            param.grad.div_(dist.get_world_size())
        ### END SOLUTION
        ### BEGIN STUB
        ### END STUB
        self.works.clear()


# %% name="first-seen"
five = {"Alder": Alder, "Birch": Birch, "Cedar": Cedar, "Elm": Elm, "Fir": Fir}
seen = first.play(five[first.name])
print(lab.repair_report(seen))
view.draw(seen.timeline, title=f"{first.name}, as you have it now")

# %% [markdown]
# **Exercises 5.6a and 5.6b.** The cell above shows your first as given; one further down shows the
# second. Note the diagnosis of each *before* you repair it. Then repair it in the cell of its
# class. Repaired, it leaves the mean on every rank, has no race, and its step is as short as that
# of 5.3. The branches are `left` and `right`; for `Elm` rank 0 runs them in
# another order than the other ranks.
#
# - `"kind"`, and the one entry that goes with it:
#   - `"behind the backward pass"`: messages are queued behind all of it. Add `"exposed_ms"`: how
#     much of them is exposed, as the figure says.
#   - `"front layers first"`: all wait for the gradient that comes last. Add `"exposed_ms"`, too.
#   - `"before it was accumulated"`: a race. Add `"read_by"`: the operator that reads the gradient
#     while it is sent. The first finding names it.
#   - `"other gradients on other ranks"`. Add `"message"`: the number, from 0, of the first message
#     in which ranks 0 and 1 send different gradients.
#   - `"a sum"`. Add `"factor"`: how many times too large the gradients are.

# %% name="first-diagnosis" kind="exercise" exercise="5.6a"
### BEGIN SOLUTION
first_diagnosis = first.truth()
### END SOLUTION
### BEGIN STUB
# first_diagnosis = {"kind": None}
### END STUB

# %% name="check-first" kind="check" exercise="5.6a" points=2
_ = check("5.6a", my_number, first_diagnosis, Alder, Birch, Cedar, Elm, Fir)

# %% name="second-seen"
five = {"Alder": Alder, "Birch": Birch, "Cedar": Cedar, "Elm": Elm, "Fir": Fir}
seen = second.play(five[second.name])
print(lab.repair_report(seen))
view.draw(seen.timeline, title=f"{second.name}, as you have it now")

# %% name="second-diagnosis" kind="exercise" exercise="5.6b"
### BEGIN SOLUTION
second_diagnosis = second.truth()
### END SOLUTION
### BEGIN STUB
# second_diagnosis = {"kind": None}
### END STUB

# %% name="check-second" kind="check" exercise="5.6b" points=2
_ = check("5.6b", my_number, second_diagnosis, Alder, Birch, Cedar, Elm, Fir)

# %% [markdown]
# <details><summary>All five, when you have done yours</summary>
#
# - `Alder`: when `wait()` is called, the whole backward pass has been launched, and the side
#   stream waits for all of it. Another stream hides nothing; an early launch does.
# - `Birch`: the hook comes before `.grad` is written. Autograd copies or adds the gradient while
#   the message is overwriting it.
# - `Cedar`: the first layers' gradients come *last*. "Early layers first" is everything at the end.
# - `Elm`: what shares a message must follow from a plan that all ranks have, not from what
#   arrives. Lab 06 writes such a plan.
# - `Fir`: `all_reduce` adds up. A learning rate that was found on two ranks is too large on four.
#
# </details>

# %% [markdown]
# ## 8. On real GPUs (8 minutes)
#
# Here is what GPUs did with the GPT of section 6, stored: nothing is measured now. `serial` is one
# message for all, after the backward pass. `per parameter` does what your `PromptReducer` does.
# `ours` has buckets.

# %% name="gpu-steps" fold=true
print(lab.measured_table())
print(lab.machine())

# %% [markdown]
# Read the row `per parameter`. With 1 and 2 sequences its steps are about twice the serial ones:
# hooks cost. With 8 sequences they save a little. Here are both ways again, predicted and measured.
# The prediction is for an H200, a faster GPU than that of section 6, on the same link.

# %% name="gpu-predicted" fold=true
h200 = ol.PROFILES["h200-nvlink"]
for batch in (1, 2, 8):
    setup = replace(eager, sequences=batch)
    for way, stored in (("each", "per parameter"), ("one", "serial")):
        ms, said = lab.measured_ms(stored, batch), setup.on(h200, way).step_ns / 1e6
        print(f"batch {batch}, {way}: predicted {said:.1f} ms, measured {ms:.1f}")

seen_ms = lab.measured_ms("serial", 8) - lab.measured_ms("per parameter", 8)
said_ms = (setup.on(h200, "one").step_ns - setup.on(h200, "each").step_ns) / 1e6
print(f"\nbatch 8: hooks save {said_ms:.1f} ms predicted, {seen_ms:.1f} measured")
extra_ms = lab.measured_ms("per parameter", 1) - lab.measured_ms("serial", 1)
print(
    f"batch 1: each message costs {1e3 * extra_ms / setup.num_gradients:.0f} us,",
    end=" ",
)
print(f"the profile charges {h200.collective_launch_ns / 1e3:.0f} us")

# %% [markdown]
# With 1 and 2 sequences the CPU sets the pace, and the prediction is far too kind to hooks. With 2
# the measured step of the hooks is also much longer than with 1. The CPU launches the same kernels
# and messages in both, so the prediction cannot explain that, and neither can we.
#
# With 8 sequences the GPU sets the pace. Both steps are predicted a little too short. But the order
# is right: hooks win, by little.
#
# ## 9. Where the model lies (2 minutes)
#
# Autograd calls hooks between layers, not between the two products of one layer. So a message
# leaves when its layer's *whole* backward is over. The message of `head` left 3 ms after its gradient
# was there: half of that layer's backward.
#
# All ranks are equally fast here. A message starts when the *last* rank has its gradient, so
# one slow rank moves all windows. And nothing on the board slows anything: on GPUs, hidden
# messages slow the backward pass that hides them (lab 02).
#
# ## In production
#
# - PyTorch DDP: `Reducer::autograd_hook` in `torch/csrc/distributed/c10d/reducer.cpp`, one for each
#   parameter's node that accumulates; `mark_variable_ready` counts its bucket down, and
#   `search_unused_parameters` walks the graph to mark what will never come.
# - FSDP2: `RegisterPostBackwardFunction` in
#   `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py` is a function on the *inputs* of a
#   layer group, whose backward comes when the group's gradients are there. What is left is sent at the end:
#   `_root_post_backward_final_callback` in `_fsdp_state.py`.
# - Megatron-LM: `_make_backward_post_hook` in
#   `megatron/core/distributed/distributed_data_parallel.py` adds `.grad` to a gradient buffer of its
#   own, and `register_grad_ready` counts.
# - This package: `ol.HookReducer` is exercise 5.4, with refusals; `ol.BucketedReducer` is lab 06.
#
# Further reading: the page *Autograd mechanics* of PyTorch's documentation, section *Backward
# hooks execution*: which hook runs when, in one list.
