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

from overlaplab import streams, view
from overlaplab.grading import check
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
# the figure above, without optimizer, in numbers.

# %% name="bill"
print(lab.bill_table(steps["six blocks"], steps["blocks compute again"]))

# %% [markdown]
# Two claims that you will meet. *"Checkpointing every layer needs the memory of one layer"*: no, the inputs
# of all blocks stay, one per block, and grow with the depth. *"It doubles the forward"*: the forward
# does run twice, but a backward takes twice as long as a forward, so forward and backward
# together take 4/3 of the time, not 2.
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
lab.keep("16.1", peak)

# %% name="peak-seen"
every = set(range(len(lab.UNEVEN)))
for name, again in (("none", set()), ("all", every), ("0, 1 and 3", {0, 1, 3})):
    mib = lab.mine_or_ours("16.1")(lab.UNEVEN, again)
    print(
        f"{name} computed again: {mib} MiB, {lab.extra_ms(lab.UNEVEN, again)} ms more"
    )
lab.draw_memory(
    {
        "none": lab.walk(lab.UNEVEN, set()),
        "all": lab.walk(lab.UNEVEN, every),
        "0, 1 and 3": lab.walk(lab.UNEVEN, {0, 1, 3}),
    }
)

# %% [markdown]
# A text that adds up what is *saved* and calls the sum the peak is wrong by the block at work: what it
# computes again must live as well, and so must its gradients. The last block can be kept for nothing: its backward
# comes first, and needs its inside at once.

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
lab.draw_budgets(long, budgets, ways)
