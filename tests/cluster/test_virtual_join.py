"""torch's own `Join`, and DDP's, run on the virtual cluster as on gloo."""

import warnings
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

import overlaplab as ol
from tests.guards import GUARD_S
from tests.ranks import values_of

# Of DDP, then divide_by_initial_world_size, then a communication hook.
SETTINGS = [
    ({}, True, ""),
    ({}, False, ""),
    ({"find_unused_parameters": True}, True, ""),
    ({"gradient_as_bucket_view": True}, True, ""),
    ({}, True, "allreduce_hook"),
    ({}, True, "fp16_compress_hook"),
]


def train(options, by_initial, hook):
    """Rank r has 1 + 2 r batches."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = DistributedDataParallel(net, bucket_cap_mb=0.0001, **options)
    if hook:
        model.register_comm_hook(None, getattr(default_hooks, hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = dist.get_rank()
    with model.join(divide_by_initial_world_size=by_initial):
        for step in range(1 + 2 * rank):
            generator = torch.Generator().manual_seed(10 * step + rank)
            model(torch.randn(6, 8, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [v.clone() for v in net.state_dict().values()]


def train_all():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*find_unused_parameters")
        return [train(*setting) for setting in SETTINGS]


@cache
def run_of(cluster, ranks):
    return values_of(train_all, cluster=cluster, world_size=ranks)


@pytest.mark.parametrize("setting", range(len(SETTINGS)))
@pytest.mark.parametrize("ranks", [2, 3])
def test_ddp_with_uneven_data_ends_as_on_gloo(ranks, setting):
    for ours, theirs in zip(
        run_of("virtual", ranks), run_of("gloo", ranks), strict=True
    ):
        # Three numbers may be added in another order, also in float16.
        coarse = SETTINGS[setting][2].startswith("fp16")
        tolerance = 1e-2 if coarse else 1e-5
        torch.testing.assert_close(
            ours[setting], theirs[setting], rtol=tolerance, atol=tolerance
        )


class Counter(Joinable):
    """That of torch's tutorial: how many inputs all ranks have had."""

    def __init__(self):
        super().__init__()
        self.total = torch.zeros(())

    def __call__(self):
        Join.notify_join_context(self)
        self.add(1.0)

    def add(self, mine):
        count = torch.full((), mine)
        dist.all_reduce(count)
        self.total += count

    def join_hook(self, **kwargs):
        return CounterHook(self)

    @property
    def join_device(self):
        return ol.device()

    @property
    def join_process_group(self):
        return dist.group.WORLD


class CounterHook(JoinHook):
    def __init__(self, counter):
        self.counter = counter

    def main_hook(self):
        self.counter.add(0.0)


def count():
    counter = Counter()
    with Join([counter]):
        for _ in range(5 + dist.get_rank()):
            counter()
    return counter.total.item()


@pytest.mark.parametrize("cluster", ["virtual", "gloo"])
def test_a_joinable_of_ones_own_shadows_the_others(cluster):
    found = ol.run(count, world_size=3, cluster=cluster, timeout_s=GUARD_S)
    assert found.values == (18.0,) * 3


def collects():
    tensors = [torch.full((2,), 1.0 + dist.get_rank() + i) for i in range(3)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    dropped = [work.get_future() for work in works]
    all_of_them = torch.futures.collect_all(dropped)
    del dropped
    return [future.wait()[0].tolist() for future in all_of_them.wait()]


@pytest.mark.parametrize("cluster", ["virtual", "gloo"])
def test_futures_that_only_cpp_has_come_to_an_end(cluster):
    found = ol.run(collects, cluster=cluster, timeout_s=GUARD_S)
    assert found.values == ([[3.0, 3.0], [5.0, 5.0], [7.0, 7.0]],) * 2
    assert found.warnings == ()
