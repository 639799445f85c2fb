"""When slots are filled and batches copied, on the virtual clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import overlaplab as ol
from overlaplab import streams
from overlaplab.hardware import find_hardware
from overlaplab.timeline.intervals import merge, subtract, total

WIDTH = 64
NUM_BYTES = 4 * WIDTH * WIDTH
# A square of WIDTH takes 1 ms to copy, half a ms to read and to write in pageable
# memory, and 1 ms to multiply with another one.
HARDWARE = replace(
    find_hardware("chalk"),
    name="milliseconds",
    flops_per_s={"default": 1000 * 2 * WIDTH**3},
    memory_bytes_per_s=10**15,
    host_bytes_per_s=1000 * NUM_BYTES,
    pageable_bytes_per_s=500 * NUM_BYTES,
)
FILLING = replace(HARDWARE, cpu_bytes_per_s=2 * 1000 * NUM_BYTES)


def loop(
    num: int = 5,
    *,
    copy_ms: int = 3,
    step_ms: int = 4,
    reads_loss: bool = True,
    pinned: bool = False,
    depth: int = 2,
) -> list[float]:
    """Steps on batches of `copy_ms`; what each step saw."""
    host = [
        torch.full((WIDTH * copy_ms, WIDTH), float(i), device="cpu") for i in range(num)
    ]
    if pinned:
        host = [batch.pin_memory() for batch in host]
    weight = torch.ones(WIDTH, WIDTH * step_ms, device=ol.device())
    losses = []
    for number, batch in enumerate(ol.BatchPrefetcher(host, depth=depth)):
        with ol.annotate(f"step {number}"):
            loss = (batch[-WIDTH:] @ weight)[0, 0] / WIDTH
            losses.append(loss.item() if reads_loss else loss)
    streams.synchronize()
    return [float(loss) for loss in losses]


def play(hardware: Any = HARDWARE, **how: Any) -> Any:
    run = ol.run(loop, hardware=hardware, world_size=1, **how)
    assert run.warnings == ()
    assert run.values[0] == [float(i) for i in range(how.get("num", 5))]
    return run


def when(run: Any) -> list[tuple[str, int, int]]:
    """What copies, and the matmuls of steps: label, begin and end in ms, by begin."""
    spans = [
        (s.attributes["label"], round(s.start_ns / 1e6), round(s.end_ns / 1e6))
        for s in run.timeline.spans
        if s.kind == "memcpy" or s.name == "mm"
    ]
    return sorted(spans, key=lambda s: s[1:])


def exposed_ms(run: Any) -> float:
    """How long a copy runs with no kernel beside it."""
    copies, kernels = (
        merge((s.start_ns, s.end_ns) for s in run.timeline.spans if s.kind == kind)
        for kind in ("memcpy", "compute")
    )
    return total(subtract(copies, kernels)) / 1e6


@pytest.mark.parametrize("reads_loss", [True, False])
def test_the_copy_of_the_next_batch_begins_with_the_step(reads_loss: bool) -> None:
    assert when(play(num=4, reads_loss=reads_loss)) == [
        ("batch 0", 0, 3),
        ("batch 1", 3, 6),
        ("step 0", 3, 7),
        ("batch 2", 7, 10),
        ("step 1", 7, 11),
        ("batch 3", 11, 14),
        ("step 2", 11, 15),
        ("step 3", 15, 19),
    ]


def test_copies_that_take_longer_than_steps_follow_one_another() -> None:
    assert when(play(num=4, copy_ms=3, step_ms=1)) == [
        ("batch 0", 0, 3),
        ("step 0", 3, 4),
        ("batch 1", 3, 6),
        ("step 1", 6, 7),
        ("batch 2", 6, 9),
        ("step 2", 9, 10),
        ("batch 3", 9, 12),
        ("step 3", 12, 13),
    ]


def test_with_one_slot_no_copy_has_a_step_beside_it() -> None:
    assert when(play(num=3, depth=1)) == [
        ("batch 0", 0, 3),
        ("step 0", 3, 7),
        ("batch 1", 7, 10),
        ("step 1", 10, 14),
        ("batch 2", 14, 17),
        ("step 2", 17, 21),
    ]


def test_more_slots_are_no_faster() -> None:
    ends = {d: play(num=6, depth=d).timeline.end_ns for d in (2, 3, 4)}
    assert ends[2] == ends[3] == ends[4]


@pytest.mark.parametrize("copy_ms", [1, 2, 3, 4])
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("reads_loss", [True, False])
def test_only_the_first_copy_is_exposed_where_copies_are_shorter_than_steps(
    copy_ms: int, pinned: bool, reads_loss: bool
) -> None:
    how = {"num": 6, "copy_ms": copy_ms, "pinned": pinned, "reads_loss": reads_loss}
    assert exposed_ms(play(**how)) == pytest.approx(copy_ms, abs=0.001)


def test_a_slot_is_filled_again_when_its_copy_has_ended_and_then_copied() -> None:
    """The CPU's rows and the copies, in the order of launch; waits name what ended."""
    (ops,) = play(num=4, reads_loss=False).program.ranks
    copies = {op.index: op.label for op in ops if op.kind == "memcpy"}
    story = []
    for op in ops:
        if op.kind == "host_wait" and op.name == "event.synchronize":
            story.append(f"wait for {', '.join(copies[i] for i in op.after)}")
        elif op.label.startswith("batch"):
            word = "copy" if op.kind == "memcpy" else "fill"
            story.append(f"{word} {op.label}")
        elif op.name == "mm":
            story.append(op.label)
    assert story == [
        *("fill batch 0", "copy batch 0", "fill batch 1", "copy batch 1", "step 0"),
        *("wait for batch 0", "fill batch 2", "copy batch 2", "step 1"),
        *("wait for batch 1", "fill batch 3", "copy batch 3", "step 2"),
        # The end of the loop lets the memory of both slots go.
        *("step 3", "wait for batch 2", "wait for batch 3"),
    ]


def with_fills(run: Any) -> list[tuple[str, int, int]]:
    """As `when`, with what the CPU does to slots; from the first of it on."""
    fills = [
        (f"fill {s.attributes['label']}", s.start_ns, s.end_ns)
        for s in run.timeline.spans
        if s.kind == "host" and s.attributes["label"].startswith("batch")
    ]
    begin = fills[0][1]  # behind the making of the host's tensors
    others = [(name, a * 10**6, b * 10**6) for name, a, b in when(run)]
    found = [
        (name, round((a - begin) / 1e6), round((b - begin) / 1e6))
        for name, a, b in fills + others
    ]
    return sorted(found, key=lambda s: s[1:])


def test_the_cpu_fills_beside_the_steps_if_it_runs_ahead() -> None:
    run = play(FILLING, num=4, copy_ms=2, reads_loss=False)
    assert with_fills(run) == [
        ("fill batch 0", 0, 2),
        ("fill batch 1", 2, 4),
        ("batch 0", 2, 4),
        ("fill batch 2", 4, 6),
        ("batch 1", 4, 6),
        ("step 0", 4, 8),
        ("fill batch 3", 6, 8),
        ("batch 2", 8, 10),
        ("step 1", 8, 12),
        ("batch 3", 12, 14),
        ("step 2", 12, 16),
        ("step 3", 16, 20),
    ]


def test_the_filling_is_exposed_if_steps_read_their_loss() -> None:
    """The one thread of the program waits for the step: pin in the loader's."""
    run = play(FILLING, num=4, copy_ms=2, reads_loss=True)
    assert with_fills(run) == [
        ("fill batch 0", 0, 2),
        ("fill batch 1", 2, 4),
        ("batch 0", 2, 4),
        ("batch 1", 4, 6),
        ("step 0", 4, 8),
        ("fill batch 2", 8, 10),
        ("batch 2", 10, 12),
        ("step 1", 10, 14),
        ("fill batch 3", 14, 16),
        ("batch 3", 16, 18),
        ("step 2", 16, 20),
        ("step 3", 20, 24),
    ]


def test_what_is_pinned_is_copied_from_where_it_is() -> None:
    (ops,) = play(pinned=True).program.ranks
    labelled = [op for op in ops if op.label.startswith("batch")]
    assert [op.kind for op in labelled] == ["memcpy"] * 5
    assert all(op.attributes["pinned"] for op in labelled)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("drops", [True, False])
def test_as_many_batches_as_slots_are_on_the_device_and_the_one_before(
    depth: int, drops: bool
) -> None:
    def program() -> None:
        host = [torch.ones(WIDTH, WIDTH, device="cpu") for _ in range(8)]
        for batch in ol.BatchPrefetcher(host, depth=depth):
            (batch @ batch).sum()
            if drops:
                del batch
        streams.synchronize()

    storages = ol.run(program, world_size=1).program.storages
    lives = [(s.born, s.freed) for s in storages if s.name.startswith("batch")]
    assert len(lives) == 8
    at_once = [sum(born <= at < freed for born, freed in lives) for at, _ in lives]
    assert max(at_once) == depth + (0 if drops else 1)
