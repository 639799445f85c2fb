"""Small drawings that lessons show before they use a word: one idea each.

What they show is fixed; nothing here is measured or simulated.
"""

from __future__ import annotations

from overlaplab.view.colors import COLORS, EXPOSED, MEMORY_COLORS
from overlaplab.view.stacking import Picture
from overlaplab_course.drawing import COMPUTED, SENT, Drawing

LAUNCH = COLORS["launch"].face
GATHERED = MEMORY_COLORS["gathered"].face
NUM_RANKS = 3  # in the ring


def cpu_queue_gpu_wire() -> Picture:
    """Who hands work to whom, before the first timeline."""
    d = Drawing(
        (96, 24),
        "The CPU puts operators into a queue, the stream, and goes on with its "
        "Python. The GPU takes one after another out of the queue and computes. "
        "Messages go over the wire to another GPU.",
    )
    d.box((2, 8), (15, 9), "CPU\nruns Python")
    d.arrow((17, 12.5), (26, 12.5))
    d.words((21.5, 10.5), "launch", align="center")
    for place in range(3):
        d.box((26 + 8 * place, 8), (7, 9), f"op {4 - place}")
    d.words((37.5, 5.5), "the queue: a stream", align="center")
    d.arrow((50, 12.5), (56, 12.5))
    d.box((56, 8), (13, 9), "GPU\nop 1", face=COMPUTED)
    d.words((62.5, 5.5), "computes", align="center")
    d.arrow((69, 12.5), (83, 12.5), color=SENT)
    d.words((76, 10.5), "the wire", align="center")
    d.box((83, 8), (11, 9), "another\nGPU")
    d.words((9.5, 20), "goes on at once", align="center")
    d.words((37.5, 20), "waiting to be run, in order", align="center")
    d.words((76, 20), "messages", align="center")
    return d.figure


def ring_all_reduce() -> Picture:
    """Three ranks, three chunks, four steps: each rank sends 4/3 of the bytes."""
    d = Drawing(
        (96, 33),
        "A ring all-reduce of three ranks in four frames. Each rank cuts its "
        "gradient into three thirds. In each frame every rank sends one third to "
        "its neighbour. After two frames of adding, each rank has one third that is "
        "summed over all ranks. After two frames of copying, all ranks have all "
        "three sums. Each rank has sent four thirds.",
    )
    n = NUM_RANKS
    holds = [[{rank} for _ in range(n)] for rank in range(n)]
    for frame in range(2 * (n - 1)):
        adds = frame < n - 1
        sent = [(r - frame) % n if adds else (r + n - frame) % n for r in range(n)]
        moving = [set(holds[r][sent[r]]) for r in range(n)]
        for r in range(n):
            to = (r + 1) % n
            holds[to][sent[r]] = holds[to][sent[r]] | moving[r]
        left = 3 + 24 * frame
        title = f"{frame + 1}: {'add' if adds else 'copy'}"
        d.words((left + 9.5, 2), title, align="center", bold=True)
        for r in range(n):
            x = left + 7 * r
            d.words((x + 2.5, 5.5), f"rank {r}", align="center", size=7.5)
            for chunk in range(n):
                came = sent[(r - 1) % n] == chunk
                _chunk(d, (x, 7.5 + 5.5 * chunk), holds[r][chunk], came)
            y = 10 + 5.5 * sent[r]
            if r < n - 1:
                d.arrow((x + 5.1, y), (x + 6.9, y), color=SENT)
            else:  # round to rank 0
                d.arrow((x + 5.1, y), (x + 7.3, y), color=SENT)
                d.arrow((left - 2.3, y), (left - 0.1, y), color=SENT)
    d.words((48, 28), "each frame: every rank sends one third", align="center")
    d.words(
        (48, 31),
        "N - 1 frames to add, N - 1 to copy, 1/N of the bytes in each: 2 (N - 1) / N",
        align="center",
    )
    return d.figure


def _chunk(d: Drawing, place: tuple[float, float], parts: set[int], came: bool) -> None:
    """A third of a gradient: a stripe for each rank whose part is in it."""
    x, y = place
    for rank in range(NUM_RANKS):
        face = COMPUTED if rank in parts else "none"
        d.stripe((x + 5 * rank / NUM_RANKS, y), (5 / NUM_RANKS, 5), face)
    d.frame(place, (5, 5), SENT if came else "", wide=came)


def bucket_fills() -> Picture:
    """When a gradient goes into the open bucket, and when the bucket leaves."""
    d = Drawing(
        (96, 27),
        "A bucket in three frames. Gradient 6 arrives first and goes into the open "
        "bucket, which is half full. Gradient 5 fits under the cap, too. Gradient 4 "
        "would not fit: it opens the next bucket, and the first leaves as one "
        "message.",
    )
    for number, (title, inside) in enumerate(
        (("6 arrives", [6]), ("5 fits", [6, 5]), ("4 does not", [4]))
    ):
        left = 3 + 32 * number
        d.words((left + 7, 2), title, align="center", bold=True)
        for i, gradient in enumerate(inside):
            d.box((left + 1, 18 - 6 * i), (12, 5.5), f"grad {gradient}", face=COMPUTED)
        d.bucket((left, 8), (14, 16))
        d.words((left + 14.5, 9.5), "cap", size=8)
        d.line((left, 9.5), (left + 14, 9.5))
    d.box((84, 13), (10, 9), "6 + 5", face=SENT, hatched=True)
    d.words((89, 10.5), "one message", align="center", size=8)
    d.arrow((84, 24.5), (94, 24.5), color=SENT)
    return d.figure


def ring_of_slots() -> Picture:
    """Prefetch with two slots: what waits for what."""
    d = Drawing(
        (96, 35),
        "Prefetch at depth 1. The CPU launches everything early. One stream gathers "
        "G0, G1, G2, G3, the other computes F0, F1, F2, F3. Two slots are used in "
        "turn: slot 0 holds layers 0 and 2, slot 1 holds layers 1 and 3. A forward "
        "waits for its gather; G2 waits for F0, because it fills the slot that F0 "
        "reads.",
    )
    for y, name in zip((2, 8, 14, 23, 29), _RING_LANES, strict=True):
        d.words((12, y + 2), name, align="right")
    d.box((14, 2), (16, 4), "launches", face=LAUNCH)
    d.words((31, 4), "far ahead")
    gathers = ((18, 6), (24, 6), (38, 6), (52, 6))
    forwards = ((24, 14), (38, 14), (52, 14), (66, 14))
    for layer in range(4):
        g, f = gathers[layer], forwards[layer]
        d.box((g[0], 14), (g[1], 4), f"G{layer}", face=SENT)
        d.box((f[0], 8), (f[1], 4), f"F{layer}", face=COMPUTED)
        y = 23 + 6 * (layer % 2)
        d.box((g[0], y), (f[0] + f[1] - g[0], 4), f"layer {layer}", face=GATHERED)
    d.arrow((23.6, 14.2), (24.6, 11.8))
    d.arrow((37.6, 11.8), (38.6, 14.2))
    d.words((24, 20), "F0 waits for G0", align="center", size=8)
    d.words((40, 20), "G2 waits for F0", align="center", size=8)
    return d.figure


_RING_LANES = ("CPU", "computes", "gathers", "slot 0", "slot 1")


def events_between_steps() -> Picture:
    """Marks that the GPU passes, and what lies between two of them."""
    d = Drawing(
        (96, 21),
        "The CPU launches three steps and four events and is done early. On the "
        "stream an event stands before, between and after the steps. The GPU writes "
        "down the time when it passes each. From one event to the next is the time "
        "of one step.",
    )
    d.words((12, 4), "CPU", align="right")
    d.words((12, 12), "stream", align="right")
    d.box((14, 2), (18, 4), "launches", face=LAUNCH)
    d.words((33.5, 4), "done: it asks for the times at the end")
    for step in range(3):
        d.box((18 + 24 * step, 10), (24, 4), f"step {step}", face=COMPUTED)
    for event in range(4):
        x = 18 + 24 * event
        d.flag((x, 8), (x, 15.5))
        d.words((x, 17), f"event {event}", align="center", size=8)
    d.arrow((54, 19.2), (65.8, 19.2))
    d.arrow((54, 19.2), (42.2, 19.2))
    d.words((67, 19.2), "elapsed_time(event 1, event 2)", size=8)
    return d.figure


def hidden_and_exposed() -> Picture:
    """One message, part of it beside a computation: two words for two parts."""
    d = Drawing(
        (96, 19),
        "A message starts while the GPU computes and goes on after it. The part "
        "beside the computation is hidden; the rest is exposed, and the step is "
        "longer by it.",
    )
    d.words((14, 4), "computes", align="right")
    d.words((14, 10), "the wire", align="right")
    d.box((16, 2), (50, 4), "backward pass", face=COMPUTED)
    d.box((36, 8), (46, 4), "one message", face=SENT, hatched=True)
    d.line((66, 1), (66, 16.5))
    d.arrow((51, 15), (36, 15))
    d.arrow((51, 15), (66, 15))
    d.arrow((74, 15), (66, 15), color=EXPOSED)
    d.arrow((74, 15), (82, 15), color=EXPOSED)
    d.words((51, 17.3), "hidden", align="center")
    d.words((74, 17.3), "exposed", align="center", color=EXPOSED)
    return d.figure


def lifetime_of_memory() -> Picture:
    """Memory is given away while another stream still reads it."""
    d = Drawing(
        (96, 27),
        "The copy stream allocates memory and fills it with batch 0. The compute "
        "stream reads it in step 0. Python drops batch 0 as soon as the step is "
        "launched, and the allocator gives the same memory to batch 1. Batch 1 is "
        "written while step 0 still reads: a race.",
    )
    for y, name in zip((2, 8, 14, 20), _LIFE_LANES, strict=True):
        d.words((14, y + 2), name, align="right")
    d.box((16, 2), (8, 4), "launch", face=LAUNCH)
    d.words((25, 4), "del batch: Python is done with it")
    d.box((20, 8), (14, 4), "copy batch 0", face=COLORS["memcpy"].face)
    d.box((34, 14), (34, 4), "step 0 reads batch 0", face=COMPUTED)
    d.box((46, 8), (14, 4), "copy batch 1", face=COLORS["memcpy"].face)
    d.box((20, 20), (26, 4), "batch 0", face=GATHERED)
    d.box((46, 20), (44, 4), "batch 1", face=GATHERED)
    d.line((46, 7), (46, 25.5))
    d.line((60, 7), (60, 25.5))
    d.words((61, 10), "written here, still read below", size=8)
    return d.figure


_LIFE_LANES = ("CPU", "copies", "computes", "the memory")


def life_of_an_activation() -> Picture:
    """From the forward that makes it to the backward that uses it."""
    d = Drawing(
        (96, 23),
        "Three blocks run forward, then backward in reverse. Each block's "
        "activations live from its forward to the end of its backward: the first "
        "block's live longest, and all are there where forward meets backward.",
    )
    d.words((12, 4), "computes", align="right")
    for block in range(3):
        f, b = 14 + 12 * block, 50 + 14 * (2 - block)
        d.box((f, 2), (12, 4), f"forward {block}", face=COLORS["forward"].face)
        d.box((b, 2), (14, 4), f"backward {block}", face=COMPUTED)
        y = 8 + 4 * block
        d.words((12, y + 1.7), f"inside {block}", align="right")
        d.box((f, y), (b + 14 - f, 3.4), "", face=GATHERED)
    d.line((50, 1), (50, 22))
    d.words((50.8, 21.3), "all of them: the peak", size=8)
    return d.figure
