# %% [markdown]
# # What is worth computing twice?
#
# **Lab 16: activation checkpointing.** Core: two sittings of 50 and 58 minutes, with a door in
# section 4. Extras: 40 more. You need no GPU.
#
# After the core you can
#
# - say from a memory curve where a step's peak is and what holds it;
# - predict what checkpointing saves and what it costs, and where sqrt(n) comes from;
# - find the fastest step within a budget of bytes, for blocks that are not alike;
# - keep some operators of a block and compute the others again.
#
# It builds on lab 00 alone: a launch is not a start, and a timeline shows both.
#
# **How it works.** Run the cells from top to bottom. A check tells you what it saw, in
# numbers, and draws what *your* code did. No exercise needs the one before it: where
# yours is not finished, the course's own runs in its place and the cell says so.

# %% name="setup"
import torch
from IPython.display import display
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from overlaplab import streams, view
from overlaplab.grading import check, solved
from overlaplab.techniques.memory import plan_checkpoints
from overlaplab_course import lab16 as lab

MIB = 2**20

# %% [markdown]
# ## 1. Where the bytes are (10 minutes)
#
# A GPT with six blocks trains on one GPU. `annotate` names the parts of the step.


# %% name="train"
def train(layers=6, vocab_size=256, length=1024, again=False):
    model = lab.make_gpt(layers, vocab_size)  # 1024 wide, bfloat16
    if again:
        lab.checkpoint_every_block(model)  # section 2
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(vocab_size, (4, length))
    for step in range(2):
        with streams.step(step):
            with streams.annotate("forward"):
                loss = model(tokens, targets=tokens)
            with streams.annotate("backward"):
                loss.backward()
            with streams.annotate("optimizer"):
                optimizer.step()
                optimizer.zero_grad()


# %% [markdown]
# The virtual cluster runs it and writes down which bytes live when. Below is the memory curve of
# the second step: the first one also creates the optimizer's states.

# %% name="curve"
plain = lab.step_of(lab.record(train))
print(f"The peak is at {lab.peak_percent(plain):.0f} % of the step.")
lab.draw_memory({"six blocks": plain})

# %% [markdown]
# Read it from below. Parameters and the optimizer's states are always there. Above them lie the
# activations. In the forward they grow, because each block leaves behind what its backward will
# need. In the backward they shrink, while the gradients of the parameters arrive.
#
# So the peak is where forward and backward meet. Many texts leave it at that.

# %% name="picture-life" fold=true
lab.life_of_an_activation()

# %% [markdown]
# Compare where the bars begin and where they end: what is made first is used last.
#
# **Predict.** Now no block keeps its activations. In the backward, each block computes its own a
# second time. How far through the step is the peak then, in percent?

# %% name="predict-when" kind="lab-only"
peak_at_percent = None

# %% name="predicted-when" kind="solution-only"
peak_at_percent = 40

# %% name="peaks" fold=true
steps = {"six blocks": plain}
steps["blocks compute again"] = lab.step_of(lab.record(train, 6, 256, 1024, True))
steps["vocabulary of 32768"] = lab.step_of(lab.record(train, 6, 32768))
steps["128 tokens, not 1024"] = lab.step_of(lab.record(train, 6, 256, 128))
seen_percent = lab.peak_percent(steps["blocks compute again"])
lab.side_by_side("the peak, in %", peak_at_percent, f"{seen_percent:.0f}")
print(lab.peaks_table(steps))

# %% [markdown]
# The lines below the table name the operator that runs at the peak, and in which part of the
# step. Each of the four has another cause for its peak:
#
# - Six blocks that keep: activations.
# - Blocks that compute again: the gradients of the parameters, which are nearly all there at the
#   end of the backward.
# - A large vocabulary: the loss, with the logits and their gradients.
# - Short sequences: again the gradients. The activations hardly count.
#
# So look before you save. Only what lives *at the peak* is worth a plan.

# %% name="again-curve"
pair = {name: steps[name] for name in [*steps][:2]}
lab.draw_memory(pair)

# %% [markdown]
# ## 2. The arithmetic (18 minutes)
#
# `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)` runs `block(x)` and keeps only
# `x`. When the backward comes to the block, it runs the block again.
#
# Here are the two steps of the figure above in numbers.

# %% name="bill"
print(lab.bill_table(steps["six blocks"], steps["blocks compute again"]))

# %% [markdown]
# You will meet two claims.
#
# *"If you checkpoint every layer, you need the memory of one layer."* No: each block still keeps
# its input. The deeper the model, the more inputs.
#
# *"It doubles the time."* No: only the forward runs twice, and a backward takes about as long as
# two forwards. So the time of three forwards becomes that of four: 4/3, not 2. (Here it is a
# little less; section 6 says why.)
#
# To plan, write a step down as a table with one row per block. From here on sizes are whole MiB.
# What is always there (parameters, states) is left out.

# %% name="chain"
print(lab.chain_table(lab.UNEVEN))

# %% [markdown]
# - `input`: what the block gets from the one before it. It lives until the block's backward has
#   ended.
# - `inside`: what else the block's backward needs. The forward makes it. If it is *kept*, it lives
#   until the block's backward has ended. If it is *computed again*, it is freed at the end of the
#   block's forward, and comes back for the block's own backward.
# - `work`: gradients and temporary results. They live while the block's backward runs.
#
# **Exercise 16.1.** Write `peak(blocks, again)`: the most MiB that live at once in a step.
#
# - `blocks`: a list in the order of the forward. A block has `.input`, `.inside` and `.work` in
#   MiB, and `.ms`, the time of its forward.
# - `again`: a set of numbers, from 0: these blocks compute their inside again.
# - Look at the backward alone, one moment per block. (A block's forward never needs more than its
#   backward.)
#
# About 6 lines.
#
# <details><summary>Hint: one moment</summary>
#
# While the backward of block `i` runs, which inputs live? Which insides? And what lives for block
# `i` alone? Draw it for three blocks. Then take the largest moment.
#
# </details>
# <details><summary>Hint: a running sum</summary>
#
# Walk forward. `kept` is what blocks before this one keep: their inputs, and the insides of those that are
# not in `again`.
#
# </details>


# %% name="peak" kind="exercise" exercise="16.1" reference=true
def peak(blocks, again):
    """The most MiB that live at once."""
    ### BEGIN SOLUTION
    kept, most = 0, 0
    for i, block in enumerate(blocks):
        most = max(most, kept + block.input + block.inside + block.work)
        kept += block.input + (0 if i in again else block.inside)
    return most
    ### END SOLUTION


# %% name="check-peak" kind="check" exercise="16.1" points=2
_ = check("16.1", peak)

# %% name="peak-seen"
every = set(range(len(lab.UNEVEN)))
if solved("16.1"):
    choices = {"none": set(), "all": every, "0, 1 and 3": {0, 1, 3}}
    for name, again in choices.items():
        more = f"{lab.extra_ms(lab.UNEVEN, again)} ms more"
        print(f"{name} computed again: {peak(lab.UNEVEN, again)} MiB, {more}")
    walks = {name: lab.walk(lab.UNEVEN, again) for name, again in choices.items()}
    display(lab.draw_memory(walks))

# %% [markdown]
# Some texts add up what is kept after the forward and call that sum the peak. They forget the
# block whose backward runs: what it computes again must live as well, and so must its gradients.
#
# Keeping the last block's inside costs nothing at the peak. Its backward comes first, and needs
# the inside at once.

# %% [markdown]
# ## 3. sqrt(n), by hand (17 minutes)
#
# The oldest rule is from Chen and others, 2016. Cut a stack of layers into **segments** and keep
# only the input of each segment. When the backward comes to a segment, compute the whole segment
# again.
#
# Here each layer is `tanh(x W)`. It leaves one activation, its output, which is also the next
# layer's input.
#
# Cut $n$ layers into $k$ segments. At the peak $k$ inputs live, and the $n / k$ activations of the
# segment whose backward runs.
#
# **Predict.** For 64 layers, which number of segments has the lowest peak?

# %% name="predict-k" kind="lab-only"
best_k = None

# %% name="predicted-k" kind="solution-only"
best_k = 8

# %% [markdown]
# **The API of this screen.** `checkpoint(function, x, use_reentrant=False)` returns `function(x)`.
# It keeps `x`, and calls `function` again in the backward.
#
# **Exercise 16.2.** Write `segmented(layers, x, k)`: the output of all layers, in `k` checkpointed segments.
#
# - `layers`: a list of modules. Each takes one tensor and returns one.
# - `x`: a tensor that needs no gradient.
# - The sizes of the segments differ by at most one. `1 <= k <= len(layers)`.
# - You may run the last segment without a checkpoint. (Why does it not need one?)
#
# About 6 lines.
#
# <details><summary>Hint: where segments begin</summary>
#
# Segment `i` is `layers[n * i // k : n * (i + 1) // k]`.
#
# </details>
# <details><summary>Hint: a function of a segment</summary>
#
# `torch.nn.Sequential(*layers[start:end])` is one.
#
# </details>


# %% name="segmented" kind="exercise" exercise="16.2" reference=true
def segmented(layers, x, k):
    """The output of the layers; k inputs are kept."""
    ### BEGIN SOLUTION
    n = len(layers)
    for i in range(k):
        segment = torch.nn.Sequential(*layers[n * i // k : n * (i + 1) // k])
        x = checkpoint(segment, x, use_reentrant=False)
    return x
    ### END SOLUTION


# %% name="check-segmented" kind="check" exercise="16.2" points=3
_ = check("16.2", segmented)
lab.keep("16.2", segmented)

# %% name="sweep"
ks = (1, 2, 4, 8, 16, 32, 64)
seen = lab.sweep(lab.mine_or_ours("16.2"), 64, ks)
lab.side_by_side("the best k", best_k, min(seen, key=seen.get))
lab.draw_curves(
    {
        f"memory lane, {lab.whose('16.2')}": [*seen.items()],
        "k + 64 / k": [(k, k + 64 / k) for k in ks],
    },
    "segments",
    "activations at the peak",
)

# %% [markdown]
# $k + n/k$ is least at $k = \sqrt{n}$. The measured curve, from the memory lane, agrees. It lies a
# little higher because it also counts gradients.
#
# Neither end of the curve saves anything. With 1 segment, everything is computed again at once.
# With 64 segments, every input is kept.
#
# Is that the rule for your GPT? Its blocks are not as thin as these layers. The inside of each is
# many times its input:

# %% name="gpt-ratio"
gpt, _always = lab.blocks_of_24()
ratio = gpt[0].inside / gpt[0].input
print(f"a GPT's block: inside / input = {ratio:.1f}")
print(f"24 blocks: the best k is sqrt(24 * {ratio:.1f}) = {(24 * ratio) ** 0.5:.0f}")

# %% [markdown]
# If an inside is as large as $a$ inputs, the sum is $k + a\,n/k$, least at $k = \sqrt{a\,n}$. For
# this GPT that is nearly one segment per block. So people checkpoint block by block. sqrt(n) is
# for nets of thin layers.

# %% [markdown]
# ## 4. Blocks that are not alike (5 minutes)
#
# Here are the eight blocks of section 2 again. Each can keep its inside or compute it again, so
# there are 256 choices. The cell after your guess tries them all.

# %% name="eight-blocks" fold=true
print(lab.chain_table(lab.UNEVEN))

# %% [markdown]
# **Predict.** The budget is 150 MiB. How many ms must be computed again at least?

# %% name="predict-150" kind="lab-only"
again_ms = None

# %% name="predicted-150" kind="solution-only"
again_ms = 11

# %% name="brute" fold=true
choice = lab.brute_force(lab.UNEVEN, 150)
lab.side_by_side("ms again", again_ms, lab.extra_ms(lab.UNEVEN, choice))
print(f"blocks {sorted(choice)} compute again")
view.draw(lab.walk(lab.UNEVEN, choice), title="150 MiB", memory=True)

# %% [markdown]
# **A door.** You can say what any choice of blocks needs at its peak, and what it costs. This is a
# good place to stop for today. When you come back, run all cells once: what you solved is in the
# notebook.
#
# ### A table instead of all choices (24 minutes)
#
# A GPT of 40 blocks has 2^40 choices: too many to try. Most of them need not be looked at.
#
# Decide block by block, from the first to the last. Take two beginnings: two different choices for
# the first ten blocks. Suppose that both *keep the same number of MiB*. Then whatever still fits
# behind one of them also fits behind the other. So you can forget the one that computes more ms
# again.
#
# What is left is a table: for each number of kept MiB, the beginning with the fewest ms. Working
# with such a table is called **dynamic programming**.
#
# **Exercise 16.3.** Finish `fastest(blocks, budget)`: the set of blocks that compute again. The
# peak must be at most `budget` MiB, and as few ms as possible are computed again.
#
# - Return `None` if no choice fits.
# - The check has up to 36 blocks, so trying every choice takes too long.
#
# The stub has the table `best`, and the loops that make it longer, a block at a time. Fill in what
# happens to one entry (about 8 lines) and the answer (3 lines).
#
# <details><summary>Hint: one entry</summary>
#
# It goes on in two ways: the block keeps its inside, or computes it again. Each way has its kept
# MiB, its ms and its blocks. It goes into `longer`, unless a faster one with the same MiB is there.
#
# </details>
# <details><summary>Hint: what fits</summary>
#
# An entry can go on if `kept + block.input + block.inside + block.work <= budget`. This is the
# moment of 16.1. It is the same for both ways.
#
# </details>
# <details><summary>Hint: the end</summary>
#
# The answer is the entry with the fewest ms. An empty table: nothing fits.
#
# </details>


# %% name="fastest" kind="exercise" exercise="16.3" reference=true
def fastest(blocks, budget):
    """The blocks to compute again; None if nothing fits."""
    best = {0: (0, frozenset())}  # MiB kept so far: (ms computed again, which blocks)
    for i, block in enumerate(blocks):
        longer = {}  # the next table, with this block
        for kept, (ms, again) in best.items():
            ### BEGIN SOLUTION
            if kept + block.input + block.inside + block.work > budget:
                continue
            kept += block.input
            for more, way in (
                (block.inside, (ms, again)),
                (0, (ms + block.ms, again | {i})),
            ):
                before = longer.get(kept + more)
                if before is None or way[0] < before[0]:
                    longer[kept + more] = way
            ### END SOLUTION
        best = longer
    ### BEGIN SOLUTION
    if not best:
        return None
    return set(min(best.values(), key=lambda way: way[0])[1])
    ### END SOLUTION


# %% name="check-fastest" kind="check" exercise="16.3" points=4
_ = check("16.3", fastest)
lab.keep("16.3", fastest)

# %% [markdown]
# People also use simple rules: compute the largest inside again first, or the one that is cheapest
# per MiB, until the rest fits.

# %% name="rules"
long = lab.random_chain(24, 7)
budgets = range(170, 900, 40)
ways = {
    f"{lab.whose('16.3')}": lab.mine_or_ours("16.3"),
    "largest inside first": lab.largest_first,
    "cheapest per MiB first": lab.cheapest_first,
}
lost = lab.most_lost(long, budgets, ways)
for name, percent in lost.items():
    print(f"{name}: at worst {percent:.0f} % more than the best")
lab.draw_budgets(long, budgets, ways)

# %% [markdown]
# Such a rule picks one block after the other. It never asks whether two cheap blocks could replace
# an expensive one.
#
# ## 5. Inside a block (12 minutes)
#
# A block need not compute *all* of its inside again. The table shows the operators of a GPT's
# block, for two widths: how many MiB each leaves, and how long it takes on an H200.

# %% name="operators"
print(lab.operators_table())

# %% [markdown]
# *"Keep the matmuls, they are expensive; compute GELU and norms again, they are cheap."* At a
# width of 8192 that is right. Per MiB, a matmul costs about ten times as much as a GELU.
#
# At a width of 1024 there is hardly a difference. A matmul that small takes about as long as
# moving its bytes, as a GELU does. Only attention stands out, and the last matmul. But that one's
# result is never computed again: nothing in the block's backward asks for it.
#
# **The API of this screen.** You write a **policy**, a function that torch asks at each operator
# of a checkpointed block: `policy(ctx, op, *args, **kwargs)`. For every operator it returns one of
# two answers:
#
# - `CheckpointPolicy.MUST_SAVE`: keep the operator's result.
# - `CheckpointPolicy.PREFER_RECOMPUTE`: compute it again.
#
# `str(op)` is the operator's name, such as `"aten.addmm.default"`. (In your own code you hand the
# policy over with `create_selective_checkpoint_contexts(policy)`. Here the check does that.)
#
# **Exercise 16.4.** Write `policy` for *wide* blocks.
#
# - Keep what takes long, and nothing that is quick to compute.
# - The check has two kinds of blocks: blocks with a GELU and biases, and gated blocks without
#   biases. A Linear with a bias is `aten.addmm`, one without is `aten.mm`.
#
# About 3 lines.
#
# <details><summary>Hint: names</summary>
#
# `"mm" in str(op)` and `"attention" in str(op)`.
#
# </details>


# %% name="policy" kind="exercise" exercise="16.4" reference=true
def policy(ctx, op, *args, **kwargs):
    """Which results a block keeps."""
    ### BEGIN SOLUTION
    if "mm" in str(op) or "attention" in str(op):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
    ### END SOLUTION


# %% name="check-policy" kind="check" exercise="16.4" points=2
_ = check("16.4", policy)
lab.keep("16.4", policy)

# %% name="policies"
print(lab.policies_table(lab.mine_or_ours("16.4")))

# %% [markdown]
# Read the last row: a policy that keeps *everything* needs more memory than no checkpoint at all.
# It also keeps results that no backward needs.
#
# ## 6. 24 blocks (18 minutes)
#
# You will meet this exercise elsewhere: *train a 24-layer transformer with and without
# checkpoints; measure the peak and the time of a step (expect about 33 % more); check that the
# gradients are the same.* Now you can do it.
#
# The model is small, so that it can be trained with real numbers here. Its GPU is made slow at
# matmuls. So each kind of kernel takes the same share of the time as in a model that is 1024 wide.
#
# `lab.train_24(numbers)` trains the model for one step. The blocks with these numbers compute
# again. It returns a run, which has
#
# - `curve`: pairs `(ns, bytes)` in a tuple. From this time until that of the next pair, so many
#   bytes live;
# - `step_ns`: how long the step took;
# - `grads`: a dict from the name of a parameter to its gradient.
#
# **Exercise 16.5.** Write `compare(plain, other)`, which compares two runs. Return
# `(saved, extra, equal)`.
#
# - `saved`: by how many MiB (of 2**20 bytes) the peak of `other` is lower. Negative if it is
#   higher.
# - `extra`: by how many percent the step of `other` is longer.
# - `equal`: whether both runs have gradients for the same parameters, and all are the same to the
#   last bit.
#
# About 8 lines.
#
# <details><summary>Hint: to the last bit</summary>
#
# `torch.equal(a, b)` compares to the last bit. `torch.allclose` would also accept gradients from
# another order of additions.
#
# </details>


# %% name="compare" kind="exercise" exercise="16.5" reference=true
def compare(plain, other):
    """(MiB saved at the peak, % more time, whether gradients are equal)."""
    ### BEGIN SOLUTION
    peaks = [max(size for _, size in run.curve) for run in (plain, other)]
    saved = (peaks[0] - peaks[1]) / 2**20
    extra = 100 * (other.step_ns / plain.step_ns - 1)
    equal = plain.grads.keys() == other.grads.keys() and all(
        torch.equal(plain.grads[name], other.grads[name]) for name in plain.grads
    )
    return saved, extra, equal
    ### END SOLUTION


# %% name="check-compare" kind="check" exercise="16.5" points=2
_ = check("16.5", compare)
lab.keep("16.5", compare)

# %% [markdown]
# **Predict.** If all 24 blocks compute again, by how many percent is the step longer?

# %% name="predict-extra" kind="lab-only"
extra_percent = None

# %% name="predicted-extra" kind="solution-only"
extra_percent = 33

# %% name="trained" fold=true
kept_24, again_24 = lab.train_24([]), lab.train_24(range(24))
saved, extra, equal = lab.mine_or_ours("16.5")(kept_24, again_24)
lab.side_by_side("longer, in %", extra_percent, f"{extra:.1f}")
print(f"saved {saved:.1f} MiB, gradients equal: {equal}")
lab.draw_memory(
    {"kept": lab.timeline_of(kept_24), "all computed again": lab.timeline_of(again_24)}
)

# %% [markdown]
# Less than 33 %, for two reasons. A block's last matmul is not computed again: torch stops as soon
# as it has all that the backward asks for. And embedding, head and loss are outside the blocks, so
# they run once.
#
# What if your budget lies between the two ends? The 24 blocks are a chain like that of section 4.
# Each is measured by itself, and *your* `fastest` chooses. Then the model is trained with that
# choice, and the table shows the peak and the step that came out. The last column is the package's
# planner. It has more choices per block than two, since it can also keep part of a block (section
# 5).

# %% name="budgets"
print(lab.budgets_table(lab.mine_or_ours("16.3"), (13, 20, 26, 32, 40, 60)))

# %% [markdown]
# No run needs more than its budget, though nothing was trained before the choice. The planner is a
# little faster: it keeps the expensive results inside a block. You can print its plan:

# %% name="plan"
model, sample = lab.GPT24.make(), lab.GPT24.sample()
plan = plan_checkpoints(model, sample, budget_bytes=26 * MIB, hardware=lab.NARROW)
print(plan)

# %% [markdown]
# ## Takeaways (2 minutes)

# %% name="takeaways" fold=true
kept_mib = max(size for _, size in kept_24.curve) / MIB
print(f"""1. Look where the peak is: at {lab.peak_percent(plain):.0f} % of the step if blocks keep their insides, at {seen_percent:.0f} % if
   they compute them again. Each block's input stays, and a block needs its inside while its backward runs.
2. Computing all blocks again saves {saved:.0f} of {kept_mib:.0f} MiB and takes {extra:.0f} % more time, not 33 and not 100.
   sqrt(n) is for thin layers: the inside of a GPT's block is as large as {ratio:.0f} inputs.
3. For a budget between the two ends, a table finds the best choice: for each number of kept bytes,
   the fastest beginning. Rules that pick one block after the other computed up to {max(lost.values()):.0f} % more ms again.""")

# %% [markdown]
# ## Tomorrow, in your own loop (2 minutes)
#
# Five lines. The plan is made from fake tensors, so nothing is trained for it. On a GPU leave
# `hardware` out: then the planner measures the blocks there.

# %% name="tomorrow"
model, batch = lab.GPT24.make(), lab.GPT24.sample()  # yours
plan = plan_checkpoints(model, batch, budget_bytes=32 * MIB, hardware=lab.NARROW)
print(f"{plan.peak_bytes / MIB:.1f} MiB, {plan.step_ns / 1e6:.2f} ms")
plan.apply(model)
model(**batch).backward()  # your loop, unchanged

# %% [markdown]
# ---
# **Stop line.** That is the core. You may close the laptop here.
#
# ---

# %% [markdown]
# # Extras
#
# Each stands alone. Take what you like.
#
# ## 7. The same mask twice (12 minutes)
#
# *"A dropout mask must be saved, because it is random."* No: a mask follows from the state of the
# random generator. If you remember the state, you can draw the same mask again. If you don't, you
# draw another one.
#
# Here is a checkpoint by hand. `forward(block, x)` returns the output, and whatever `backward` has
# to remember. It has a fault.


# %% name="by-hand" kind="exercise" exercise="16.6" broken=true reference=true
def forward(block, x):
    """The output of the block, and what to remember."""
    ### BEGIN SOLUTION
    remembered = torch.get_rng_state()
    ### END SOLUTION
    ### BEGIN STUB
    # remembered = None
    ### END STUB
    with torch.no_grad():
        return block(x), remembered


def backward(block, x, remembered, grad):
    """The gradient of x; adds to the gradients of the block's weights."""
    x = x.detach().requires_grad_()
    ### BEGIN SOLUTION
    now = torch.get_rng_state()
    torch.set_rng_state(remembered)
    with torch.enable_grad():
        y = block(x)
    torch.set_rng_state(now)
    ### END SOLUTION
    ### BEGIN STUB
    # with torch.enable_grad():
    #     y = block(x)
    ### END STUB
    y.backward(grad)
    return x.grad


# %% name="by-hand-seen"
print(lab.draws_text(forward, backward))

# %% [markdown]
# No error is raised, and in training the loss would still fall. But these gradients belong to
# another mask than the loss you saw.
#
# **Exercise 16.6.** Repair both functions. Afterwards
#
# - gradients are those without checkpoints, to the last bit;
# - after the step, the generator is in the state in which it would be without checkpoints;
# - a block keeps its input and the generator's state, and nothing more.
#
# You need `torch.get_rng_state()` and `torch.set_rng_state(state)`. (On a GPU:
# `torch.cuda.get_rng_state()` and `torch.cuda.set_rng_state(state)`.) About 4 lines.
#
# <details><summary>Hint: two states</summary>
#
# Set the first before the second forward: it is the state in which the first forward began. The
# other is the state at the beginning of the backward. Set it back when the second forward is over.
#
# </details>

# %% name="check-by-hand" kind="check" exercise="16.6" points=2
_ = check("16.6", forward, backward)

# %% [markdown]
# `torch.utils.checkpoint` does the same, unless somebody passed `preserve_rng_state=False` for speed.
#
# ## 8. A setting that does not exist (3 minutes)
#
# You will meet these two lines in texts on compilers:
# `torch._dynamo.config.activation_checkpointing = True`, and
# `from torch._functorch.config import activation_checkpointing`. Try them.

# %% name="no-such-setting"
import torch._dynamo
import torch._functorch.config as functorch_config

for where, config in (
    ("torch._dynamo.config", torch._dynamo.config),
    ("torch._functorch.config", functorch_config),
):
    print(
        f"{where}.activation_checkpointing:",
        hasattr(config, "activation_checkpointing"),
    )
budget = functorch_config.activation_memory_budget
print(f"torch._functorch.config.activation_memory_budget: {budget}")

# %% [markdown]
# The setting that exists is `activation_memory_budget`. It is a fraction of what a compiled graph
# would keep by itself. With 1.0 the compiler keeps all of that; with 0.0 it computes everything
# again.
#
# It is not a number of bytes, and it does not bound the peak. 0.0 computes everything again *at
# once*, which can need more memory than 0.2 does.
#
# In XLA, `jax.checkpoint` does what `checkpoint` does here. XLA also has a pass named
# rematerialization: if a program would not fit, it computes values again by itself.
#
# ## 9. Computing again beside messages (17 minutes)
#
# Several GPUs train one model. Each block's gradients are averaged as soon as its backward has
# ended (lab 06). Then computing again has a second effect: the backward gets longer, so more of
# the messages can hide behind it.
#
# Here are six blocks. Block 4 has most of the parameters, so its message takes longest.

# %% name="six-blocks"
print(lab.chain_table(lab.SIX))
print(f"\nmessages, ms: {list(lab.MESSAGES)}")

# %% [markdown]
# **Exercise 16.7.** Write `step_ms(blocks, messages, again)`: how long the step takes.
#
# - First come all forwards, from the first block to the last. Each takes `block.ms`.
# - Then come the backwards, from the last block to the first. Each takes twice `block.ms`. A block
#   in `again` first computes its forward once more.
# - When the backward of block `i` has ended, its message may leave. It takes `messages[i]` ms. One
#   message travels at a time, in the order of the backwards.
# - The step ends when all is computed and all messages have arrived.
#
# About 6 lines.
#
# <details><summary>Hint: two clocks</summary>
#
# `now` for the GPU and `wire` for the link: `wire = max(wire, now) + messages[i]`.
#
# </details>


# %% name="step-ms" kind="exercise" exercise="16.7" reference=true
def step_ms(blocks, messages, again):
    """From the first forward to the last arrival."""
    ### BEGIN SOLUTION
    now, wire = sum(block.ms for block in blocks), 0
    for i in reversed(range(len(blocks))):
        now += blocks[i].ms * (3 if i in again else 2)
        wire = max(wire, now) + messages[i]
    return max(now, wire)
    ### END SOLUTION


# %% name="check-step-ms" kind="check" exercise="16.7" points=2
_ = check("16.7", step_ms)
lab.keep("16.7", step_ms)

# %% name="two-plans"
mine = lab.mine_or_ours("16.7")
least = lab.best_by(lambda again: lab.extra_ms(lab.SIX, again), lab.SIX, 100)
short = lab.best_by(lambda again: mine(lab.SIX, lab.MESSAGES, again), lab.SIX, 100)
plans = {}
for name, again in (("least computed again", least), ("shortest step", short)):
    print(f"{name}: blocks {sorted(again)}, {lab.extra_ms(lab.SIX, again)} ms again")
    plans[f"{name}: {sorted(again)}"] = lab.overlapped(lab.SIX, lab.MESSAGES, again)
view.draw_many(plans)

# %% [markdown]
# Both plans fit into 100 MiB. The one that computes *more* again has the shorter step. Whatever is
# computed again before the long message leaves delays that message. Whatever is computed again
# while it travels costs nothing: the GPU would have waited for the message anyway.
#
# ## 10. On a GPU (5 minutes)
#
# What can a GPT reach on a real GPU? Each row is one way to save memory, torch's own or a plan
# within a budget, with the peak and the step as measured and as predicted. *Every 2* means that
# every second block computes again.

# %% name="gpu" fold=true
print(lab.gpu_frontier())

# %% [markdown]
# Compare rows with equal peaks. Torch's budget of 0.2 needs 5.17 GiB. A plan with the same bytes,
# whose blocks are compiled one by one, is a tenth faster, because it chooses for each block by
# itself.
#
# At the fast end, with 6.5 GiB and more, the whole compiled model is as fast as the plans: it may
# fuse across blocks. Predicted peaks are exact to both digits, and predicted steps are within 3 %.
#
# ## Where the model lies (2 minutes)
#
# - Bytes are counted in the allocator's blocks, as the program asks for them. A real allocator
#   also has holes, so it reserves more than what lives.
# - An operator takes the time of its matmul or of its bytes. A real GPU's clock falls under load.
#   And small kernels wait for the CPU, which launches the same forward a second time.
# - A block is kept or computed again, as a whole or by operator. Plans that compute a value three
#   times and keep still less are left out here.
#
# ## In production (2 minutes)
#
# - PyTorch: `torch/utils/checkpoint.py`. `_CheckpointFrame` keeps inputs and the generator's
#   state. `_StopRecomputationError` ends the second forward early: that is why the last matmul is
#   not computed again.
# - torch.compile: `torch/_functorch/partitioners.py`. `min_cut_rematerialization_partition`
#   decides what is kept by a minimum cut through the graph. For an `activation_memory_budget`
#   below 1 it solves a knapsack problem: which results are worth their bytes.
# - Megatron-LM: `--recompute-granularity selective` computes attention's softmax again. `full`,
#   with `--recompute-method uniform` or `block`, is section 3.
# - This package: `overlaplab/techniques/memory/knapsack.py` is 16.3 with any number of choices per
#   block. `chain.py` is the sum of 16.1 with gradients, outputs and temporaries.
#
# Further reading: Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016; Beaumont et
# al., *Optimal checkpointing for heterogeneous chains*, 2019.
