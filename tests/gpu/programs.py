"""What the GPU tests run on every rank. Importable, so that processes find it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from overlaplab import capture_step
from overlaplab.errors import CaptureError
from overlaplab.models import TOY_NETS, Transformer, TransformerConfig
from overlaplab.techniques.data_parallel import BucketedReducer

LONG = 40_000_000  # cycles: about 20 ms, long against any launch
WIDTH = 512


class Delayed(torch.autograd.Function):
    """Identity; a delay kernel goes before its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        torch.cuda._sleep(LONG)
        return grad.clone()


class Chain(nn.Module):
    """Linears with a delay before the backward of each."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(Delayed.apply(layer(x)))
        return x.square().mean()


class TwoStreams(nn.Module):
    """Two branches on two streams; the first one's backward is slow."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(WIDTH, WIDTH)
        self.fast = nn.Linear(WIDTH, WIDTH)
        self.streams = torch.cuda.Stream(), torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        here = torch.cuda.current_stream()
        outs = []
        for stream, layer in zip(self.streams, (self.slow, self.fast), strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                out = layer(x)
                outs.append(Delayed.apply(out) if layer is self.slow else out)
        for stream in self.streams:
            here.wait_stream(stream)
        return outs[0].square().mean() + outs[1].square().mean()


def batch_of(rank: int, step: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(100 * step + rank + 1)
    return torch.randn(64, WIDTH, generator=generator, device="cuda")


def expected_gradients(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Mean over the batches of the gradients, in this process."""
    losses = [model(batch) for batch in batches]
    mean = torch.stack(losses).mean()
    return list(torch.autograd.grad(mean, list(model.parameters())))


def worst_error(model: nn.Module, expected: list[Tensor]) -> float:
    """Largest relative error, read on the current stream without waiting before."""
    copies = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    torch.cuda.synchronize()
    errors = [(c - e).norm() / e.norm() for c, e in zip(copies, expected, strict=True)]
    return float(torch.stack(errors).max())


def delayed_backward(bucket_mib: float, side: bool) -> float:
    """`side`: backward on another stream than wait(), which is on the default one."""
    torch.manual_seed(dist.get_rank())
    model = Chain().cuda()
    reducer = BucketedReducer(model, bucket_mib=bucket_mib)
    batches = [batch_of(rank) for rank in range(dist.get_world_size())]
    expected = expected_gradients(model, batches)
    worst = 0.0
    for _ in range(3):
        model.zero_grad()
        torch.cuda.synchronize()
        stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            model(batches[dist.get_rank()]).backward()
        reducer.wait()
        worst = max(worst, worst_error(model, expected))
    return worst


def two_streams() -> float:
    torch.manual_seed(dist.get_rank())
    model = TwoStreams().cuda()
    reducer = BucketedReducer(model)
    batches = [batch_of(rank) for rank in range(dist.get_world_size())]
    expected = expected_gradients(model, batches)
    worst = 0.0
    for _ in range(3):
        model.zero_grad()
        torch.cuda.synchronize()
        model(batches[dist.get_rank()]).backward()
        reducer.wait()
        worst = max(worst, worst_error(model, expected))
    return worst


def dropped_after_wait() -> bool:
    """B01: backward on a side stream, wait on the default one, drop, refill at once.

    Rank 1 launches late, so rank 0's collective is still open when its gradient is
    dropped. Were the block handed out then, rank 1 would receive the refill.
    """
    torch.manual_seed(0)
    model = nn.Linear(4096, 4096, bias=False).cuda()
    reducer = BucketedReducer(model)
    side = torch.cuda.Stream()
    ones = torch.ones(8, 4096, device="cuda") * (dist.get_rank() + 1)
    right = True
    for _ in range(4):
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            if dist.get_rank() == 1:
                torch.cuda._sleep(LONG)
            model(ones).sum().backward()
        reducer.wait()
        if dist.get_rank() == 1:
            torch.cuda.synchronize()
            right = right and bool((model.weight.grad == 8 * 1.5).all())
        model.zero_grad()
        with torch.cuda.stream(side):  # the block's owner hands it out again
            for _ in range(4):
                torch.full((4096, 4096), float("nan"), device="cuda")
    return right


def reduce_dtype_on_side_stream() -> float:
    """Copies in another dtype, capped; all right without a synchronize."""
    torch.manual_seed(dist.get_rank())
    model = Chain().cuda()
    reducer = BucketedReducer(
        model, bucket_mib=1.0, max_in_flight=1, reduce_dtype=torch.float64
    )
    batches = [batch_of(rank) for rank in range(dist.get_world_size())]
    expected = expected_gradients(model, batches)
    worst = 0.0
    for _ in range(3):
        model.zero_grad()
        model(batches[dist.get_rank()]).backward()
        reducer.wait()
        worst = max(worst, worst_error(model, expected))
    return worst


def same_as_ddp(net_name: str) -> float:
    """Largest difference of gradients over four steps."""
    net = TOY_NETS[net_name]
    torch.manual_seed(0)
    ours, theirs = net.make_model().cuda(), net.make_model().cuda()
    theirs.load_state_dict(ours.state_dict())
    reducer = BucketedReducer(ours, bucket_mib=0.0005)
    wrapped = DistributedDataParallel(theirs, find_unused_parameters=True)
    worst = 0.0
    for step in range(4):
        batch = net.make_batch(dist.get_rank(), step).cuda()
        ours.zero_grad()
        theirs.zero_grad()
        ours(batch).backward()
        reducer.wait()
        wrapped(batch).backward()
        for (name, p), q in zip(
            ours.named_parameters(), theirs.parameters(), strict=True
        ):
            if p.numel() == 0:
                continue
            a = torch.zeros_like(p) if p.grad is None else p.grad
            b = torch.zeros_like(q) if q.grad is None else q.grad
            scale = max(float(b.abs().max()), 1e-3)
            difference = float((a - b).abs().max()) / scale
            assert difference < 2e-2, (net_name, name, step, difference)
            worst = max(worst, difference)
    return worst


def all_nets_as_ddp() -> dict[str, float]:
    return {name: same_as_ddp(name) for name in TOY_NETS}


def hooks_without_sync() -> str:
    model = Chain().cuda()
    reducer = BucketedReducer(model, bucket_mib=1.0)
    batch = batch_of(dist.get_rank())
    for _ in range(2):
        model.zero_grad()
        model(batch).backward()
        reducer.wait()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.zero_grad()
        model(batch).backward()
        reducer.wait()
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no sync"


def overlap_in_kernels() -> dict[str, float]:
    import overlaplab as ol
    from overlaplab.bench.kernels import kernel_sums

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(6))).cuda()
    reducer = BucketedReducer(model, bucket_mib=50.0)
    batch = torch.randn(4096, 4096, device="cuda")

    def step() -> None:
        model.zero_grad()
        model(batch).square().mean().backward()
        reducer.wait()

    for _ in range(3):
        step()
    with ol.profile() as profile:
        step()
    found = kernel_sums(profile.timeline)
    return {
        "first_communication_ms": found["communication_ms"][0][0],
        "last_compute_end_ms": found["last_compute_end_ms"],
        "hidden_ms": found["hidden_ms"],
    }


def trained_transformer(captured: bool, set_to_none: bool) -> list[Tensor]:
    """Parameters after eight steps with momentum, eager or captured."""
    torch.manual_seed(3)
    config = TransformerConfig(num_layers=2, d_model=128, vocab_size=512)
    model = Transformer(config).cuda()
    reducer = BucketedReducer(model, bucket_mib=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = model(tokens, targets)
        loss.backward()
        reducer.wait()
        optimizer.step()
        return loss.detach()

    run = capture_step(step) if captured else step
    for index in range(8):
        generator = torch.Generator("cuda").manual_seed(10 * index + dist.get_rank())
        tokens = torch.randint(512, (2, 65), generator=generator, device="cuda")
        run(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    if captured:
        assert run.captured
    torch.cuda.synchronize()
    return [p.detach().cpu() for p in model.parameters()]


def accumulated_transformer(captured: bool, set_to_none: bool) -> list[Tensor]:
    """Parameters after eight steps of four micro-batches, eager or captured."""
    torch.manual_seed(3)
    config = TransformerConfig(num_layers=2, d_model=128, vocab_size=512)
    model = Transformer(config).cuda()
    reducer = BucketedReducer(model, bucket_mib=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(tokens: Tensor) -> None:
        """Micro-batches (4, 2, 65)."""
        optimizer.zero_grad(set_to_none=set_to_none)
        *first, last = tokens
        with reducer.no_sync():
            for micro in first:
                model(micro[:, :-1], micro[:, 1:]).backward()
        model(last[:, :-1], last[:, 1:]).backward()
        reducer.wait()
        optimizer.step()

    run = capture_step(step) if captured else step
    for index in range(8):
        generator = torch.Generator("cuda").manual_seed(10 * index + dist.get_rank())
        run(torch.randint(512, (4, 2, 65), generator=generator, device="cuda"))
    if captured:
        assert run.captured
    torch.cuda.synchronize()
    return [p.detach().cpu() for p in model.parameters()]


def refusals() -> dict[str, str]:
    """The message of each step that cannot be captured."""
    model = Chain(1).cuda()
    reducer = BucketedReducer(model)
    batch = batch_of(dist.get_rank())

    def attempt(step: Any, *calls: Tensor) -> str:
        run = capture_step(step)
        try:
            for value in calls:
                run(value)
        except CaptureError as error:
            return str(error)
        return "captured"

    def plain(x: Tensor) -> None:
        model.zero_grad()
        model(x).backward()
        reducer.wait()

    def with_item(x: Tensor) -> float:
        plain(x)
        return model.layers[0].bias.grad.sum().item()

    def without_wait(x: Tensor) -> None:
        model.zero_grad()
        model(x).backward()

    def outside(x: Tensor) -> None:
        model(x).backward()
        reducer.wait()

    found = {
        "item": attempt(with_item, *[batch] * 5),
        "shape": attempt(plain, *[batch] * 5, batch[:32]),
        "plain": attempt(plain, *[batch] * 5),
    }

    def try_zeroing(set_to_none: bool, last: bool) -> str:
        """Zero the gradients outside, in one way for five calls; then otherwise."""
        run = capture_step(outside)
        model.zero_grad(set_to_none=set_to_none)
        if not set_to_none:
            model(batch).backward()
            reducer.wait()
        for _ in range(5):
            model.zero_grad(set_to_none=set_to_none)
            run(batch)
        if last:
            model.zero_grad()
        try:
            run(batch)
        except CaptureError as error:
            return str(error)
        return "captured"

    found["accumulates"] = try_zeroing(set_to_none=True, last=False)
    found["replaced"] = try_zeroing(set_to_none=False, last=True)
    return found
