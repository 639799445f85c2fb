# %% [markdown]
# # What is worth computing twice?
#
# **Lab 16: activation checkpointing.** Core: 60 minutes. Extras: 35 more. You need no GPU.
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
# ## 1. Where the bytes are (8 minutes)
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
# The virtual cluster runs it and writes down which bytes live when. Here is the second step, with
# its memory curve.

# %% name="curve"
plain = lab.step_of(lab.record(train))
print(f"The peak is at {lab.peak_percent(plain):.0f} % of the step.")
lab.draw_memory({"six blocks": plain})

# %% [markdown]
# Read it from below. Parameters and the optimizer's states are always there. Activations grow
# through the forward, because each block leaves behind what its backward will need, and shrink
# through the backward, while gradients of the parameters arrive. So the peak is where forward
# and backward meet. Many texts leave it at that.

# %% name="picture-life" fold=true
lab.life_of_an_activation()

# %% [markdown]
# Look at the left ends and the right ends: what is made first is used last.
#
# **Predict.** Now every block computes its activations a second time, in the backward, instead
# of keeping them. How far through the step is the peak then, in percent?

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
# Four steps, four places. Where blocks compute again, the gradients make the peak, at the end of the
# backward. With a large vocabulary the loss makes it: logits and their gradients. With
# short sequences activations are hardly worth a thought. So look before you save: only what
# lives *at the peak* is worth a plan.

# %% name="again-curve"
pair = {name: steps[name] for name in [*steps][:2]}
lab.draw_memory(pair)

# %% [markdown]
# ## 2. The arithmetic (10 minutes)
#
# `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)` runs `block(x)` and keeps `x`
# alone. When the backward comes to the block, it runs the block again. Here are the two steps of
# the figure above in numbers.

# %% name="bill"
print(lab.bill_table(steps["six blocks"], steps["blocks compute again"]))

# %% [markdown]
# Two claims that you will meet. *"Checkpointing every layer needs the memory of one layer"*: no, the inputs
# of all blocks stay, one per block, and grow with the depth. *"It doubles the forward"*: the forward
# does run twice, but a backward takes twice as long as a forward, so forward and backward
# together take 4/3 of the time, not 2. (Here it is a little less; section 6 says why.)
#
# To plan, write a step down as a table. From here on sizes are whole MiB, and what is always there
# (parameters, states) is left out.

# %% name="chain"
print(lab.chain_table(lab.UNEVEN))

# %% [markdown]
# - `input`: what the block gets from the one before it. There until the block's backward has ended.
# - `inside`: what its backward needs besides. Made in the forward. *Kept*, it stays until the
#   backward has ended; *computed again*, it goes at the end of the forward and comes back for
#   the block's own backward.
# - `work`: gradients and temporary results, there while the block's backward runs.
#
# **Exercise 16.1.** Write `peak(blocks, again)`: the most MiB that live at once in a step.
#
# - `blocks`: a list in the order of the forward. `block.input`, `.inside`, `.work`, `.ms`.
# - `again`: the set of the numbers (from 0) of blocks that compute their inside again.
# - No forward needs more than the backward of the same block: look at backwards only.
#
# About 8 lines.
#
# <details><summary>Hint: one moment</summary>
#
# While block `i` is at work in its backward, which inputs live? Which insides? And what lives for block
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
# A text that adds up what is *saved* and calls the sum the peak is wrong by the block at work: what it
# computes again must live as well, and so must its gradients. The last block can be kept for nothing: its backward
# comes first, and needs its inside at once.

# %% [markdown]
# ## 3. sqrt(n), by hand (11 minutes)
#
# The oldest rule is of Chen and others, 2016: cut a stack into segments, keep the input of each segment, and
# compute a whole segment again when the backward comes to it.
#
# Here are layers `tanh(x W)`. Each leaves one activation, its output, which is the next layer's input. So with
# $k$ segments of $n$ layers there live $k$ inputs, and the $n / k$ activations of the segment at
# work.
#
# **Predict.** 64 layers. With which number of segments is the peak the lowest?

# %% name="predict-k" kind="lab-only"
best_k = None

# %% name="predicted-k" kind="solution-only"
best_k = 8

# %% [markdown]
# **The API of this screen.** `checkpoint(function, x, use_reentrant=False)`: returns `function(x)`, keeps `x`, and calls
# `function` again in the backward.
#
# **Exercise 16.2.** Write `segmented(layers, x, k)`: the output of all layers, in `k` checkpointed segments.
#
# - `layers`: a list of modules, each takes one tensor and returns one. `x`: a tensor without gradient.
# - Sizes of the segments differ by one at most. `1 <= k <= len(layers)`.
# - Whether the last segment is checkpointed is up to you. (It need not be. Why?)
#
# About 9 lines.
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
# $k + n/k$ is least at $k = \sqrt{n}$, and the lane agrees: what it has more is gradients. 1 segment and 64
# segments are the two ends that save nothing. One computes all of it again at once, the other keeps
# every input.
#
# Is that the rule for your GPT? Its blocks are not thin. Each has an inside that is many times its input:

# %% name="gpt-ratio"
gpt, _always = lab.blocks_of_24()
ratio = gpt[0].inside / gpt[0].input
print(f"a GPT's block: inside / input = {ratio:.1f}")
print(f"24 blocks: the best k is sqrt(24 * {ratio:.1f}) = {(24 * ratio) ** 0.5:.0f}")

# %% [markdown]
# With insides of $a$ inputs the sum is $k + a\,n/k$, least at $\sqrt{a\,n}$. For a GPT that is nearly every block. So
# people checkpoint block by block, and sqrt(n) is for nets of thin layers.

# %% [markdown]
# ## 4. Blocks that are not alike (16 minutes)
#
# Eight blocks, two choices each. 256 choices can be tried.
#
# **Predict.** With a budget of 150 MiB, how many ms must be computed again at least? The table above has all you
# need.

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
# A GPT of 40 blocks has 2^40 choices. Most of them need not be looked at. Decide from the first block to the last, and
# think of two beginnings, different choices for the first ten blocks, that *keep equally much*. All later blocks
# fit behind the one exactly as behind the other. So the slower beginning can be forgotten. What is left is a table:
# for each number of kept MiB, the fastest beginning. That is **dynamic programming**.
#
# **Exercise 16.3.** Write `fastest(blocks, budget)`: the set of blocks that compute again, so that the peak
# is at most `budget` MiB and as few ms as possible are computed again.
#
# - Return `None` if no choice fits.
# - The check asks for chains of up to 36 blocks.
#
# About 16 lines.
#
# <details><summary>Hint: the table</summary>
#
# `best = {0: (0, frozenset())}`: kept MiB -> (ms computed again, which blocks). For each block make the next table
# from this one: each entry goes on in two ways.
#
# </details>
# <details><summary>Hint: what fits</summary>
#
# An entry can go on if `kept + block.input + block.inside + block.work <= budget`: the line of 16.1.
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
    ### BEGIN SOLUTION
    best = {0: (0, frozenset())}
    for i, block in enumerate(blocks):
        longer = {}
        for kept, (ms, again) in best.items():
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
        best = longer
    if not best:
        return None
    return set(min(best.values(), key=lambda way: way[0])[1])
    ### END SOLUTION


# %% name="check-fastest" kind="check" exercise="16.3" points=4
_ = check("16.3", fastest)
lab.keep("16.3", fastest)

# %% [markdown]
# Rules that people use instead: compute again what is largest, or what is cheapest per MiB, until it fits.

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
# A rule takes one block after the other, and never asks what two cheap blocks would do in the place of
# an expensive one.
#
# ## 5. Inside a block (8 minutes)
#
# A block need not compute *all* of its inside again. Here is what the operators of a GPT's block leave, and how long they take
# on an H200, for two widths.

# %% name="operators"
print(lab.operators_table())

# %% [markdown]
# *"Keep the matmuls, they are expensive; compute GELU and norms again, they are cheap."* At a width of 8192 that is
# right: a matmul costs about ten times as much per MiB as a GELU. At a width of 1024 it is hardly a difference: both take as long as
# their bytes take, and attention stands out. (So does the last matmul, but its result is never computed again: no backward of the block asks
# for it.)
#
# **The API of this screen.** `create_selective_checkpoint_contexts(policy)` asks `policy(ctx, op, *args, **kwargs)` at each operator
# of the block. `CheckpointPolicy.MUST_SAVE` keeps its result, `CheckpointPolicy.PREFER_RECOMPUTE` lets it be computed again.
# `str(op)` is a name such as `"aten.addmm.default"`.
#
# **Exercise 16.4.** Write `policy` for *wide* blocks.
#
# - What takes long is kept. What is quick to compute is not.
# - The check has blocks with a GELU and biases, and gated blocks without biases: a Linear
#   without bias is `aten.mm`.
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
# Read the last row: a policy that keeps *everything* needs more than no checkpoint at all. It keeps every result, also
# those that no backward needs.
#
# ## 6. 24 blocks (9 minutes)
#
# An exercise that you will meet elsewhere: *train a 24-layer transformer with and without checkpoints; measure the peak
# and the time of a step (expect about 33 % more); check that the gradients are the same.* You have all
# that it takes.
#
# The model is small, so that the numbers are real, and its GPU is slow at matmuls, so that kernels take as long
# relative to one another as in a model that is 1024 wide. `lab.train_24(numbers)` trains it for one step in which these blocks compute
# again. The run has
#
# - `curve`: `((ns, bytes), ...)`, from each time until the next;
# - `step_ns`;
# - `grads`: a dict of the gradients, by the parameters' names.
#
# **Exercise 16.5.** Write `compare(plain, other)`: what the other run saves and pays. Return `(saved, extra, equal)`.
#
# - `saved`: by how many MiB its peak is lower. Negative if it is higher.
# - `extra`: by how many percent its step is longer.
# - `equal`: whether all gradients are the same, to the last bit.
#
# About 8 lines.
#
# <details><summary>Hint: to the last bit</summary>
#
# `torch.equal(a, b)`. `torch.allclose` also passes what another mask, or another order of additions, has made of them.
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
# **Predict.** All 24 blocks compute again. How many percent longer is the step?

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
# Less than 33 %: a block's last matmul is not computed again, because torch stops as soon as it has all that the
# backward asks for. Embedding, head and loss are outside the blocks.
#
# And what do you do with a budget between the two? The 24 blocks are a chain. Measured block by block, they make a table
# for *your* `fastest`. Its choice is then trained, and the lane says what it took. The last column
# is the package's planner, which has more choices per block than two (section 5).

# %% name="budgets"
print(lab.budgets_table(lab.mine_or_ours("16.3"), (13, 20, 26, 32, 40, 60)))

# %% [markdown]
# No run passes its budget, though nobody trained before planning. The
# planner is ahead by a little: it keeps what is expensive inside a block. Its plan prints:

# %% name="plan"
model, sample = lab.GPT24.make(), lab.GPT24.sample()
plan = plan_checkpoints(model, sample, budget_bytes=26 * MIB, hardware=lab.NARROW)
print(plan)

# %% [markdown]
# ## Takeaways (1 minute)

# %% name="takeaways" fold=true
print(f"""1. Look where the peak is: at {lab.peak_percent(plain):.0f} % of the step where blocks keep, at {seen_percent:.0f} % where they compute again.
   Inputs stay, one per block; the block at work needs its inside either way.
2. All blocks again: {saved:.0f} MiB less of {max(b for _, b in kept_24.curve) / MIB:.0f}, and {extra:.0f} % more time, not 33 and not 100. sqrt(n) is for thin
   layers: a GPT's inside is {ratio:.0f} inputs large.
3. Between the two ends a table finds the best choice: for each number of kept bytes, the fastest
   beginning. Rules that take one block after the other need up to {max(lost.values()):.0f} % more time again.""")

# %% [markdown]
# ## Tomorrow, in your own loop
#
# Five lines. The plan is made from fake tensors: nothing is trained for it. On a GPU leave `hardware` out, and blocks are measured there.

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
# ## 7. The same mask twice (10 minutes)
#
# *"A dropout mask must be saved, because it is random."* It need not be. A mask follows from the state of the random
# generator: whoever remembers the state draws the same mask again. But whoever forgets it draws another one.
#
# Here is a checkpoint by hand. `forward(block, x)` returns the output and whatever `backward` has to remember. It
# has a fault.


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
# Nothing fails, and the loss falls all the same: these are gradients of another network than the one whose loss you saw.
#
# **Exercise 16.6.** Repair both functions. Afterwards
#
# - gradients are those without checkpoints, to the last bit;
# - behind the step the generator is where it would be without checkpoints;
# - no more is kept per block than its input and the generator's state.
#
# `torch.get_rng_state()`, `torch.set_rng_state(state)`. (On a GPU: `torch.cuda.get_rng_state()`, and its pair.) About 4
# lines.
#
# <details><summary>Hint: two states</summary>
#
# One is set before the second forward. The other is where the generator is when the backward begins, and must be again when
# the second forward is over.
#
# </details>

# %% name="check-by-hand" kind="check" exercise="16.6" points=2
_ = check("16.6", forward, backward)

# %% [markdown]
# `torch.utils.checkpoint` does the same, unless somebody passed `preserve_rng_state=False` for speed.
#
# ## 8. A setting that does not exist (3 minutes)
#
# You will meet these two lines in texts on compilers: `torch._dynamo.config.activation_checkpointing = True`, and
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
# The one that exists is a fraction of what a compiled graph would keep by itself: 1.0 keeps what the partitioner likes, 0.0
# computes all again. It is no number of bytes and no bound of the peak: 0.0 computes everything again *at once* and can need more
# than 0.2 does. In XLA, `jax.checkpoint` does what `checkpoint` does here, and a pass named rematerialization computes values
# again by itself where a program would not fit.
#
# ## 9. Computing again beside messages (12 minutes)
#
# Several GPUs train one model, and each block's gradients are averaged as soon as its backward has ended (lab 06). Then
# computing again has a second effect: the backward gets longer, and more of the messages is hidden behind it. Here are
# six blocks; block 4 has most of the parameters, so its message takes longest.

# %% name="six-blocks"
print(lab.chain_table(lab.SIX))
print(f"\nmessages, ms: {list(lab.MESSAGES)}")

# %% [markdown]
# **Exercise 16.7.** Write `step_ms(blocks, messages, again)`: how long the step takes.
#
# - All forwards, `block.ms` each, from the first to the last block. Then backwards, from the last to the first, twice as
#   long; a block in `again` first computes its forward again.
# - When a block's backward has ended, its message of `messages[i]` ms can leave. One message travels at a time, in this order.
# - The step ends when all is computed and all has arrived.
#
# About 9 lines.
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
# Both fit 100 MiB. The plan that computes *more* again has the shorter step. What is computed again before the long message
# leaves delays it. What is computed again while that message travels costs nothing: the GPU would have waited for it
# anyway.
#
# ## 10. On a GPU (3 minutes)
#
# The frontier of a GPT: for each budget the peak and the step, as planned and as measured, beside torch's own ways.

# %% name="gpu" fold=true
print(lab.gpu_frontier())

# %% [markdown]
# Read it by peaks. Where torch's budget of 0.2 needs 5.17 GiB, a plan of blocks that are compiled one by one is a tenth
# faster within the same bytes, since it chooses for each block. At the fast end, with 6.5 GiB and more, the whole compiled
# model is as fast: it may fuse across blocks. Predicted peaks are exact to both digits, and steps within 3 %.
#
# ## Where the model lies
#
# - Bytes are counted as the program asks for them, in the allocator's blocks. A real allocator also has holes: what is reserved is
#   more than what lives.
# - An operator takes the time of its matmul or of its bytes. A real GPU's clock falls under load, and small
#   kernels wait for the CPU, which launches each block's forward a second time.
# - A block is kept or computed again as a whole, or by operator. Plans that compute a value three times to keep still less are
#   left out here.
#
# ## In production
#
# - PyTorch: `torch/utils/checkpoint.py`. `_CheckpointFrame` keeps inputs and the generator's state; the second forward ends at
#   `_StopRecomputationError`, which is why the last matmul is not computed again.
# - torch.compile: `torch/_functorch/partitioners.py`, `min_cut_rematerialization_partition`: a minimum cut through the graph
#   decides what is kept, and a knapsack what `activation_memory_budget` leaves.
# - Megatron-LM: `--recompute-granularity selective` computes attention's softmax again; `full` with `--recompute-method uniform` or
#   `block` is section 3.
# - This package: `overlaplab/techniques/memory/knapsack.py` is 16.3 with any number of choices per block; `chain.py` the sum of
#   16.1 with gradients, outputs and temporaries.
#
# Further reading: Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016; Beaumont et al., *Optimal checkpointing for
# heterogeneous chains*, 2019.
