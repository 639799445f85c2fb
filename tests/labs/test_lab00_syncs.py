"""0.3: a loop that looks at its losses without stopping, and loops that still stop."""

from __future__ import annotations

import linecache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from overlaplab import streams
from overlaplab.grading import find_exercise, judge
from overlaplab_course.lab00 import checks_runs as lab00
from overlaplab_course.lab00 import given, reference

LESSON = Path(__file__).parents[2] / "course" / "00_start.py"


def update(model):
    with torch.no_grad():
        for param in model.parameters():
            param -= 2 * param.grad
            param.grad = None


def passes(model, batches, look):
    """The loop, with `look(loss)` where the given one logs."""
    for x in batches:
        loss = (model(x) - x).square().mean()
        loss.backward()
        look(loss)
        update(model)


# Right, each in its own way


def stacks(model, batches):
    kept = []
    passes(model, batches, lambda loss: kept.append(loss.detach()))
    losses = torch.stack(kept).tolist()
    return losses, max(losses)


def items_at_the_end(model, batches):
    kept = []
    passes(model, batches, kept.append)
    losses = [loss.item() for loss in kept]
    return losses, max(losses)


def writes_into_a_log(model, batches):
    log, step = torch.zeros(len(batches)), iter(range(len(batches)))
    passes(model, batches, lambda loss: log[next(step)].copy_(loss.detach()))
    return log.tolist(), log.max().item()


def one_step_late(model, batches):
    losses, before = [], []

    def look(loss):
        before.append(loss.detach())

    for x in batches:
        loss = (model(x) - x).square().mean()
        loss.backward()
        update(model)
        if before:
            losses.append(before.pop().item())
        look(loss)
    losses.append(before.pop().item())
    return tuple(losses), max(losses)


def four_at_a_time(model, batches):
    losses, kept = [], []

    def look(loss):
        if len(kept) == 4:
            losses.extend(torch.stack(kept).tolist())
            kept.clear()
        kept.append(loss.detach())

    passes(model, batches, look)
    losses += torch.stack(kept).tolist()
    return losses, max(losses)


def keeps_the_worst_on_the_gpu(model, batches):
    kept, worst = [], torch.zeros(())

    def look(loss):
        kept.append(loss.detach())
        torch.maximum(worst, loss.detach(), out=worst)

    passes(model, batches, look)
    return torch.stack(kept).tolist(), float(worst)


RIGHT = (
    items_at_the_end,
    writes_into_a_log,
    one_step_late,
    four_at_a_time,
    keeps_the_worst_on_the_gpu,
)


@pytest.mark.parametrize("loop", RIGHT, ids=lambda f: f.__name__)
def test_a_loop_that_looks_later_passes(loop):
    verdict = judge(find_exercise("0.3"), loop)
    assert verdict.passed, str(verdict)
    assert verdict.step_ns is not None and verdict.target_ns is not None


# Still stopping


def only_the_if(model, batches):
    kept, worst = [], 0.0
    for x in batches:
        loss = (model(x) - x).square().mean()
        loss.backward()
        kept.append(loss.detach())
        if loss > worst:
            worst = loss.detach()
        update(model)
    return torch.stack(kept).tolist(), float(worst)


def with_float(model, batches):
    losses = []
    passes(model, batches, lambda loss: losses.append(float(loss.detach())))
    return losses, max(losses)


def prints(model, batches):
    kept = []

    def look(loss):
        kept.append(loss.detach())
        f"{loss}"

    passes(model, batches, look)
    losses = torch.stack(kept).tolist()
    return losses, max(losses)


def copies_to_the_cpu(model, batches):
    kept = []
    passes(model, batches, lambda loss: kept.append(loss.detach().cpu()))
    losses = torch.stack(kept).tolist()
    return losses, max(losses)


def synchronizes(model, batches):
    kept = []

    def look(loss):
        streams.synchronize()
        kept.append(loss.detach())

    passes(model, batches, look)
    losses = torch.stack(kept).tolist()
    return losses, max(losses)


def the_if_and_one_by_one_at_the_end(model, batches):
    kept, worst = [], 0.0
    for x in batches:
        loss = (model(x) - x).square().mean()
        loss.backward()
        kept.append(loss.detach())
        if loss > worst:
            worst = loss.detach()
        update(model)
    return [loss.item() for loss in kept], float(worst)


STOPPING = {
    the_if_and_one_by_one_at_the_end: "what about `if`?",
    only_the_if: "what about `if`?",
    with_float: "asks the GPU for a number, in each step",
    prints: "asks the GPU for a number, in each step",
    copies_to_the_cpu: "asks the GPU for a number, in each step",
    synchronizes: "asks the GPU for a number, in each step",
    reference.given_loop: "two lines",
}


@pytest.mark.parametrize("loop", STOPPING, ids=lambda f: f.__name__)
def test_a_loop_that_stops_is_refused_by_its_holes(loop, faults):
    verdict = judge(find_exercise("0.3"), lambda model, batches: loop(model, batches))
    found = faults(verdict)
    assert list(found) == [lab00.AHEAD]
    assert "The CPU waits" in found[lab00.AHEAD]
    assert "nothing to do" in found[lab00.AHEAD]
    assert STOPPING[loop] in verdict.hint


def in_a_cell(source, name):
    """A function as a notebook defines it: its file is a number."""
    path = "/tmp/ipykernel_1/1161135425.py"
    linecache.cache[path] = (len(source), None, source.splitlines(True), path)
    scope = {"torch": torch}
    exec(compile(source, path, "exec"), scope)
    return scope[name]


def test_every_waiting_line_is_described_with_its_text_and_how_often_it_waits(faults):
    text = LESSON.read_text(encoding="utf-8")
    source = text[text.index("def given_loop") : text.index("given = lab.train")]
    loop = in_a_cell(source, "given_loop")
    described = faults(judge(find_exercise("0.3"), loop))[lab00.AHEAD]
    assert "waits 17 times:\n" in described
    assert "8 x your cell, line 6: losses.append(loss.item())" in described
    assert "8 x your cell, line 7: if loss > worst:" in described
    assert "1 x your cell, line 13: return losses, float(worst)" in described
    assert "1161135425" not in described


def test_the_time_asked_for_is_the_one_that_is_judged(faults):
    described = faults(judge(find_exercise("0.3"), with_float))[lab00.AHEAD]
    given, best = lab00.given_and_best(lab00.SHAPES[0])
    limit_ns = best.timeline.end_ns + (given.timeline.end_ns - best.timeline.end_ns) / 4
    assert f"expected at most {limit_ns / 1e6:.2f} ms" in described


def test_a_file_of_the_learners_keeps_its_name():
    hazard = "[1161135425.py:4 in step] and [mine.py:12 in step]"
    assert lab00.readable(hazard) == (
        "[your cell, line 4 in step] and [mine.py:12 in step]"
    )
    assert lab00.line_of("gone.py:3 in f") == "gone.py:3 in f"


# Wrong values


def no_log(model, batches):
    passes(model, batches, lambda loss: None)
    return [], 0.0


def every_second(model, batches):
    losses, worst = stacks(model, batches)
    return losses[::2], worst


def one_tensor_for_all(model, batches):
    kept, place = [], torch.zeros(())

    def look(loss):
        kept.append(place.copy_(loss.detach()))

    passes(model, batches, look)
    losses = [loss.item() for loss in kept]
    return losses, max(losses)


def tensors(model, batches):
    kept = []
    passes(model, batches, lambda loss: kept.append(loss.detach()))
    return kept, max(torch.stack(kept).tolist())


def worst_is_the_last(model, batches):
    losses, _ = stacks(model, batches)
    return losses, losses[-1]


def worst_is_a_tensor(model, batches):
    losses, worst = stacks(model, batches)
    return losses, torch.tensor(worst)


def never_updates(model, batches):
    losses, worst = stacks(model, batches)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.01)
    return losses, worst


def looks_again_afterwards(model, batches):
    passes(model, batches, lambda loss: None)
    with torch.no_grad():
        kept = [(model(x) - x).square().mean() for x in batches]
    losses = torch.stack(kept).tolist()
    return losses, max(losses)


def through_dlpack(model, batches):
    """The memory itself, which torch does not guard."""
    losses = []
    passes(
        model,
        batches,
        lambda loss: losses.append(float(np.from_dlpack(loss.detach()))),
    )
    return losses, max(losses)


def with_modes_switched_off(model, batches):
    losses = []

    def look(loss):
        with _disable_current_modes():
            losses.append(loss.item())

    passes(model, batches, look)
    return losses, max(losses)


WRONG = {
    through_dlpack: (lab00.LOSSES, "the CPU read"),
    with_modes_switched_off: (lab00.LOSSES, "the CPU read 0 bytes"),
    no_log: (lab00.LOSSES, "0 losses"),
    every_second: (lab00.LOSSES, "4 losses"),
    one_tensor_for_all: (lab00.LOSSES, "expected 8 floats"),
    tensors: (lab00.LOSSES, "Tensor"),
    worst_is_the_last: (lab00.WORST, "worst is"),
    worst_is_a_tensor: (lab00.WORST, "tensor("),
    never_updates: (lab00.WEIGHTS, "weight of"),
    looks_again_afterwards: (lab00.LOSSES, "8 floats"),
}


@pytest.mark.parametrize("loop", WRONG, ids=lambda f: f.__name__)
def test_a_loop_with_other_values_is_refused(loop, faults):
    sentence, words = WRONG[loop]
    found = faults(judge(find_exercise("0.3"), loop))
    assert sentence in found
    assert words in found[sentence]


def test_what_is_no_pair_is_reported():
    verdict = judge(find_exercise("0.3"), lambda model, batches: 3)
    assert "expected (losses, worst)" in verdict.error


# The lesson


def test_looking_after_the_update_costs_next_to_nothing():
    stopping, best = lab00.given_and_best(lab00.SHAPES[0])
    late = lab00.train(given.late_train, *lab00.SHAPES[0])
    assert late.losses == stopping.losses and late.worst == stopping.worst
    assert len(late.waits) == len(late.losses)
    assert late.timeline.end_ns < 1.01 * best.timeline.end_ns
    assert stopping.timeline.end_ns > 1.2 * best.timeline.end_ns


def test_waiting_costs_the_given_loop_a_sixth_or_more():
    for shape in lab00.SHAPES:
        given, best = lab00.given_and_best(shape)
        assert given.timeline.end_ns > 1.17 * best.timeline.end_ns
        assert best.idle_ns < 0.01 * best.timeline.end_ns
        assert len(best.waits) == 1


@pytest.mark.parametrize(
    ("text", "waits"),
    [
        ("loss.item()", True),
        ("print(loss)", True),
        ("if loss > 0:", True),
        ("x.nonzero()", True),
        ("x.cpu()", True),
        ("x.shape[0]", False),
        ("loss.detach()", False),
        ("torch.maximum(loss, loss)", False),
    ],
)
def test_lines_of_the_table_hold_the_cpu_or_not(text, waits):
    assert given.holds_the_cpu(given.LINES[text]) is waits
