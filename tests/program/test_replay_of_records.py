"""Re-planned records against what the reducers of the package really record."""

import pytest
import torch
from torch import nn

import overlaplab as ol
from overlaplab.program import find_findings, gradient_payload, rebucket, resolve
from overlaplab.techniques.data_parallel import BucketedReducer, HookReducer

MIB = 2**20


def train(reducer_of, bucket_mib: float | None) -> None:
    model = nn.Sequential(
        nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 16)
    )
    options = {} if bucket_mib is None else {"bucket_mib": bucket_mib}
    reducer = reducer_of(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = torch.randn(8 + step, 32)
        model(x).pow(2).mean().backward()
        reducer.wait()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module", params=[2, 3])
def world_size(request):
    return request.param


@pytest.fixture(scope="module")
def by_parameter(world_size):
    return ol.run(train, HookReducer, None, world_size=world_size).program


def moves(timeline):
    return [
        (s.rank, s.lane, s.name, s.start_ns, s.end_ns, s.bytes) for s in timeline.spans
    ]


@pytest.mark.parametrize("bucket_mib", [0.004, 0.01, 1.0])
@pytest.mark.parametrize("hardware", ["chalk", "h100-nvlink"])
def test_a_re_planned_record_is_timed_like_the_record_of_a_bucketed_reducer(
    by_parameter, world_size, bucket_mib, hardware
):
    recorded = ol.run(train, BucketedReducer, bucket_mib, world_size=world_size).program
    replanned = rebucket(by_parameter, int(bucket_mib * MIB))
    assert moves(resolve(replanned, hardware)) == moves(resolve(recorded, hardware))


def test_a_bucketed_record_splits_into_one_all_reduce_a_parameter(
    by_parameter, world_size
):
    # Exact launch places are lost in a bucket: gradients leave as they are written,
    # which is never later than from a hook.
    recorded = ol.run(train, BucketedReducer, 1.0, world_size=world_size).program
    split = resolve(rebucket(recorded, 1), "chalk")
    hooks = resolve(by_parameter, "chalk")
    sent = [s.bytes for s in split.spans if s.name == "all_reduce"]
    assert sum(sent) == sum(s.bytes for s in hooks.spans if s.name == "all_reduce")
    assert len(sent) == len([s for s in hooks.spans if s.name == "all_reduce"])
    assert split.spans[-1].end_ns <= hooks.spans[-1].end_ns


def test_positions_follow_the_arrival_of_gradients(by_parameter):
    for step in gradient_payload(by_parameter):
        assert [part.name for part in step] == [
            "grad 4.bias",
            "grad 4.weight",
            "grad 2.bias",
            "grad 2.weight",
            "grad 0.bias",
            "grad 0.weight",
        ]


def test_neither_the_record_nor_its_re_plan_has_a_finding(by_parameter):
    assert find_findings(by_parameter) == ()
    assert find_findings(rebucket(by_parameter, 10_000)) == ()
