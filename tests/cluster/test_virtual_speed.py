"""Recording costs little and always the same: counted, not timed."""

import sys
from collections import Counter
from dataclasses import replace

import torch

import overlaplab as ol
from overlaplab import demo, streams
from overlaplab.cluster.virtual import run_virtual
from overlaplab.techniques.data_parallel import BucketedReducer

SIZES = replace(demo.SMALL, config=replace(demo.SMALL.config, num_layers=2))
# Python calls inside this package for each recorded operator of a training step, of a
# list for each of its tensors: about 27. Views and what starts no kernel are in it.
MOST_CALLS = 40


def train(steps, after=lambda: None):
    model = demo.make_model(0, SIZES).to(ol.device())
    reducer = BucketedReducer(model, bucket_mib=SIZES.bucket_mib)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        if step == steps - 1:
            after()
        tokens, targets = demo.batch(0, step, SIZES)
        model(tokens, targets).backward()
        reducer.wait()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_an_operator_costs_a_bounded_number_of_calls():
    def count():
        calls = Counter()

        def note(frame, event, _):
            if event == "call" and "/overlaplab/cluster/" in frame.f_code.co_filename:
                calls[frame.f_code.co_name] += 1

        train(2, after=lambda: sys.setprofile(note))
        sys.setprofile(None)
        return calls

    (one,), program = run_virtual(count, world_size=1)
    first = sum(1 for o in program.ranks[0] if o.name == "embedding")
    assert first == 2
    start = [o.index for o in program.ranks[0] if o.name == "embedding"][1]
    operators = sum(max(1, len(op.writes)) for op in program.ranks[0][start:])
    assert 0 < sum(one.values()) < MOST_CALLS * operators, one.most_common(10)


def everything():
    """Streams, pinned copies, buckets, host syncs and a hazard."""
    train(2)
    side, box = streams.Stream(), torch.empty(64, pin_memory=True)
    for fill in (1.0, 2.0):
        box.fill_(fill)
        with streams.stream(side):
            batch = box.to(ol.device(), non_blocking=True)
        batch.record_stream(side)
        total = (batch * 2).sum()
    streams.synchronize()
    return total.item()


def test_two_runs_are_equal_with_everything_on():
    one, other = (ol.run(everything, world_size=3) for _ in range(2))
    assert one.program == other.program
    assert one.timeline == other.timeline
    assert one.warnings == other.warnings and one.warnings
    assert one.values == other.values
