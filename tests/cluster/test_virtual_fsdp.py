"""FSDP2 on `virtual` trains as one process does, on its own streams, free of races."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import overlaplab as ol

NUM_LAYERS = 4


def make_model():
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(8, 3))


def batch(step, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def sharded(mesh_shape=None, explicit=False, **options):
    shape = mesh_shape or (dist.get_world_size(),)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = make_model()
    layers = list(model)[:NUM_LAYERS]
    for layer in layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    if explicit:
        for i, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
            layer.set_modules_to_backward_prefetch(layers[max(i - 2, 0) : i][::-1])
    return model


def train(model, make_batch, clip=None, accumulate=False):
    """Three steps of SGD with momentum; the parameters, whole."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        for part in (0, 1) if accumulate else (1,):
            if accumulate and hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(part == 1)
            model(make_batch(2 * step + part)).square().mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    parameters = [p.detach() for p in model.parameters()]
    return [getattr(p, "full_tensor", p.clone)() for p in parameters]


def compare(size, rtol=1e-5, training=None, **options):
    """Train on `size` ranks and in one process; the run."""
    training = training or {}

    def step():
        model = sharded(**options)
        return train(model, lambda n: batch(n, dist.get_rank()), **training)

    run = ol.run(step, world_size=size)
    reference = train(
        make_model(),
        lambda n: torch.cat([batch(n, r) for r in range(size)]),
        **training,
    )
    for parameters in run.values:
        for ours, theirs in zip(parameters, reference, strict=True):
            # The mean of means instead of one mean: some rounding.
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol / 10)
    assert run.warnings == ()
    return run


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_one_to_four_ranks_train_as_one_process(size):
    compare(size)


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"explicit": True},
        {"mesh_shape": (2, 2)},
        {"training": {"clip": 0.05}},
        {"training": {"accumulate": True}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_setting_trains_as_one_process(options):
    compare(4 if "mesh_shape" in options else 2, **options)


def test_mixed_precision_stays_within_its_rounding():
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    run = compare(2, rtol=5e-2, mp_policy=policy)
    sent = [op for op in run.program.ranks[0] if op.collective]
    own = {(op.name, op.dtype) for op in sent if not op.collective.async_op}
    assert own == {("all_gather", "bfloat16"), ("reduce_scatter", "float32")}


def test_its_streams_are_lanes_under_the_names_that_fsdp2_has_for_them():
    def step():
        model = sharded((2, 2))
        model(batch(0, dist.get_rank())).square().mean().backward()

    ops = ol.run(step, world_size=4).program.ranks[0]
    lanes = {(op.stream, op.name) for op in ops if op.collective}
    assert lanes == {
        ("all_gather", "all_gather"),
        ("reduce_scatter", "reduce_scatter"),
        ("all_reduce", "all_reduce"),
    }
    assert "all_gather_copy_in" in {op.stream for op in ops}


def gathers_before_each_layer(**options):
    """How many all-gathers were launched before the forward of each layer, step 1."""

    def step():
        model = sharded(**options)
        model(batch(0, dist.get_rank()))

    ops = ol.run(step).program.ranks[0]
    matmuls = [op.index for op in ops if op.name == "addmm"][: 2 * NUM_LAYERS : 2]
    gathers = [op.index for op in ops if op.name == "all_gather"]
    return [sum(g < m for g in gathers) for m in matmuls]


def test_prefetching_launches_gathers_before_their_layer():
    # The root's own parameters are gathered first.
    assert gathers_before_each_layer() == [2, 3, 4, 5]
    assert gathers_before_each_layer(explicit=True) == [4, 5, 5, 5]


def test_the_next_gather_runs_beside_the_layer_that_it_was_launched_before():
    """Implicit prefetch: the gather of a layer does not wait for the layer before."""

    def step():
        model = sharded()
        model(batch(0, dist.get_rank()))

    ops = ol.run(step).program.ranks[0]
    gathers = [op for op in ops if op.name == "all_gather"]
    layers = [op.index for op in ops if op.name == "addmm"]
    before_last = layers[2 * NUM_LAYERS - 3]  # in the last layer but one
    seen, left = set(), list(gathers[-1].after)
    while left:  # all that the last gather comes after
        op = ops[left.pop()]
        if op.index not in seen:
            seen.add(op.index)
            previous = [o.index for o in ops[: op.index] if o.stream == op.stream]
            left += [*op.after, *previous[-1:]]
    assert before_last not in seen and layers[0] in seen
