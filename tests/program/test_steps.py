"""Steps: marked once, by a labelled range, on every cluster; and one of them alone."""

import pytest
import torch
import torch.distributed as dist

import overlaplab as ol
from overlaplab import streams
from overlaplab.program import ProgramBuilder, only_step, replay, resolve
from overlaplab.program.steps import step_starts


def train(numbers, mark):
    """Construction, then steps; each sends and computes under labels of its own."""
    weight = torch.ones(32, 32)
    weight = weight @ weight
    for number in numbers:
        with mark(number):
            grad = weight @ weight
            with ol.annotate("send"):
                work = dist.all_reduce(grad, async_op=True)
            work.wait()
            weight = weight + grad


def label(number):
    return ol.annotate("step" if number is None else f"step {number}")


@pytest.mark.parametrize("cluster", ["virtual", "gloo"])
@pytest.mark.parametrize(
    ("mark", "numbers", "steps"),
    [
        (label, (1, 2), (1, 2)),
        (label, (4, None), (4, 5)),
        (label, (None, None), (1, 2)),
        (streams.step, (3, 7), (3, 7)),
    ],
)
def test_a_labelled_range_marks_a_step(cluster, mark, numbers, steps):
    timeline = ol.run(train, numbers, mark, cluster=cluster).timeline
    assert timeline.steps == steps
    assert f"{len(steps)} steps" in repr(timeline)
    for step in steps:
        names = {span.name for span in timeline.of_step(step).spans}
        assert {"mm", "all_reduce", "add"} <= names
    outside = timeline.where(lambda span: "step" not in span.attributes)
    assert any(span.name == "mm" for span in outside.spans)  # the construction


def test_a_run_without_marks_has_no_steps():
    timeline = ol.run(lambda: torch.ones(3) + 1).timeline
    assert timeline.steps == ()


def test_steps_come_back_from_a_chrome_trace(tmp_path):
    timeline = ol.run(train, (1, 2), label).timeline
    back = ol.Timeline.from_chrome(timeline.to_chrome(tmp_path / "run.json"))
    assert back.steps == (1, 2)
    assert back.of_step(2) == timeline.of_step(2)


def test_a_step_inside_a_step_is_a_part_of_it():
    def program():
        with ol.annotate("step 1"), ol.annotate("step 2"):
            torch.ones(3) + 1
        with ol.annotate("step"):
            torch.ones(3) + 1

    assert ol.run(program).timeline.steps == (1, 2)


def test_labels_stay_the_innermost_ones():
    (ops, _) = ol.run(train, (1,), label).program.ranks
    labels = {op.label for op in ops if op.attributes.get("step") == 1}
    assert labels == {"step 1", "send"}
    (ops, _) = ol.run(train, (1,), streams.step).program.ranks
    assert {op.label for op in ops} == {"", "send"}


def test_a_backward_pass_is_of_the_step_that_calls_it():
    def program():
        weight = torch.ones(4, 4, requires_grad=True)
        for number in (1, 2):
            with streams.step(number):
                (weight @ weight).sum().backward()

    (ops, _) = ol.run(program).program.ranks
    backward = [op for op in ops if op.phase == "backward"]
    assert {op.attributes["step"] for op in backward} == {1, 2}
    assert any("forward" in op.attributes for op in backward)


def test_one_step_alone_leaves_the_construction_out():
    run = ol.run(train, (1, 2), label, hardware="chalk")
    first, second = (only_step(run.program, step) for step in (1, 2))
    names = [[op.name for op in ops] for ops in second.ranks]
    assert names == [["mm", "all_reduce", "add"]] * 2
    assert [op.index for op in second.ranks[1]] == [0, 1, 2]
    assert resolve(second, "chalk").step_ns == resolve(first, "chalk").step_ns
    assert {(wait.rank, wait.op, wait.before) for wait in second.waits} == {
        (0, 1, 2),
        (1, 1, 2),
    }
    assert only_step(run.program) == second


def test_an_inner_label_does_not_hide_where_a_step_begins():
    # As the forward pass of DDP, which has a range of its own.
    def program():
        torch.ones(3)
        with ol.annotate("step 1"):
            with torch.profiler.record_function("forward"):
                one = torch.ones(64, 64) @ torch.ones(64, 64)
            one.neg_()

    ops, _ = only_step(ol.run(program).program).ranks
    assert [op.name for op in ops] == ["ones", "ones", "mm", "neg_"]


def test_a_step_alone_takes_other_buckets():
    run = ol.run(train, (1, 2), streams.step, hardware="chalk")
    step = only_step(run.program, 1)
    assert replay(step, hardware="chalk", buckets=10**6).spans


def test_what_a_step_waited_for_from_before_it_is_there_at_its_start():
    b = ProgramBuilder()
    b.compute(0, "make", ns=100, stream="side")
    b.wait_stream(0, "default", "side")
    b.compute(0, "use", ns=50, attributes={"step": 1})
    (use,) = resolve(only_step(b.build()), "chalk").spans
    assert (use.start_ns, use.end_ns) == (0, 50)


def test_a_step_that_is_not_there_is_refused_with_those_that_are():
    program = ol.run(train, (1, 2), label).program
    with pytest.raises(ValueError, match=r"rank 0 has no step 5; it has \[1, 2\]"):
        only_step(program, 5)
    with pytest.raises(ValueError, match=r"no step; it has \[\].*annotate"):
        only_step(ol.run(lambda: torch.ones(1) + 1).program)


def test_each_rank_has_the_starts_of_its_steps():
    b = ProgramBuilder(num_ranks=2)
    for rank in (0, 1):
        for step in (None, 1, 1, 2)[rank:]:
            attributes = {} if step is None else {"step": step}
            b.compute(rank, "mm", ns=1, attributes=attributes)
    assert step_starts(b.build()) == ((1, 3), (0, 2))


def test_gradients_get_their_parameters_names():
    def program(**form):
        model = torch.nn.Linear(4, 4)
        model.bias.requires_grad_(False)
        streams.name_gradients(model, **form)
        model(torch.ones(2, 4)).sum().backward()

    def names(**form):
        return [n.name for n in ol.run(program, world_size=1, **form).program.names]

    assert names() == ["grad weight"]
    assert names(prefix="") == ["weight"]
