"""What the GPU tests of ZeRO-3 run on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlaplab import capture_step
from overlaplab.models import Transformer, TransformerConfig
from overlaplab.techniques.zero import Zero3
from tests.techniques.zero import saving
from tests.techniques.zero.peers import full_values, shard_with_fsdp2
from tests.techniques.zero.training import make_model, make_optimizer, tokens_or_batch

NETS = ("mlp", "tied", "frozen", "unused", "over_size", "transformer", "tied head")
NUM_STEPS = 20


def as_alone(name: str, prefetch: int) -> float:
    """The largest difference of a parameter to one process on all the data."""
    model, whole = make_model(name).cuda(), make_model(name).cuda()
    zero = Zero3(model, prefetch=prefetch)
    optimizers = make_optimizer(zero.shards()), make_optimizer(whole.parameters())
    ranks = list(range(dist.get_world_size()))
    for step in range(NUM_STEPS):
        model(*cuda(name, step, [dist.get_rank()])).backward()
        whole(*cuda(name, step, ranks)).backward()
        zero.wait()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found, expected = zero.full_state_dict(), whole.state_dict()
    return max(
        float((found[key] - value).abs().max())
        for key, value in expected.items()
        if value.numel()
    )


def cuda(name: str, step: int, ranks: list[int]) -> list[Any]:
    return [tensor.cuda() for tensor in tokens_or_batch(name, step, ranks)]


def all_nets_as_alone(prefetch: int) -> dict[str, float]:
    return {name: as_alone(name, prefetch) for name in NETS}


def steps_without_sync() -> str:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).cuda()
    zero = Zero3(model)
    optimizer = torch.optim.AdamW(zero.shards(), fused=True)
    batch = torch.randn(64, 512, device="cuda")

    def step() -> None:
        model(batch).square().mean().backward()
        zero.wait()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no sync"


def saved_and_loaded(folder: str) -> dict[str, bool]:
    """Whether a second model has what the first one had, and goes on as it does."""
    saved, trained = saving.start_and_save(Path(folder))
    loaded, went_on = saving.load_and_go_on(Path(folder))
    pairs = {"loaded": (loaded, saved), "went on": (went_on, trained)}
    return {
        what: all(
            torch.equal(found[name], want)
            for name, want in expected.items()
            if isinstance(want, torch.Tensor)
        )
        for what, (found, expected) in pairs.items()
    }


def built_on_meta() -> tuple[int, int]:
    """Bytes at the peak of sharding, and of the full model."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(16)))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _zero = Zero3(model)
    full_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return torch.cuda.max_memory_allocated() - before, full_bytes


CAPTURED: dict[str, dict[str, Any]] = {
    "default": {},
    "on demand": {"prefetch": 0},
    "two ahead": {"prefetch": 2},
    "kept": {"reshard_after_forward": False},
}


def captured_as_eager(accumulates: bool) -> dict[str, float]:
    """For each setting the largest difference of a parameter after eight steps."""
    return {
        name: max(
            float((a - b).abs().max())
            for a, b in zip(
                _eight_steps(True, accumulates, settings),
                _eight_steps(False, accumulates, settings),
                strict=True,
            )
        )
        for name, settings in CAPTURED.items()
    }


def _eight_steps(captured: bool, accumulates: bool, settings: Any) -> list[Tensor]:
    torch.manual_seed(3)
    config = TransformerConfig(num_layers=4, d_model=128, vocab_size=512)
    model = Transformer(config).cuda()
    zero = Zero3(model, **settings)
    optimizer = torch.optim.AdamW(zero.shards(), fused=True, capturable=True)

    def step(tokens: Tensor) -> Tensor:
        if accumulates:
            with zero.no_sync():
                model(tokens[:, :64], tokens[:, 1:65]).backward()
        loss = model(tokens[:, 64:-1], tokens[:, 65:])
        loss.backward()
        zero.wait()
        zero.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = capture_step(step) if captured else step
    for index in range(8):
        generator = torch.Generator("cuda").manual_seed(10 * index + dist.get_rank())
        run(torch.randint(512, (2, 129), generator=generator, device="cuda"))
    if captured:
        assert run.captured
    with torch.no_grad():  # eager again, with the same slots
        model(*torch.ones(2, 2, 8, dtype=torch.int64, device="cuda"))
    found = [value.cpu() for value in zero.full_state_dict().values()]
    if captured:
        run.release()
    zero.remove()
    return found


def as_fsdp2(name: str) -> float:
    """The largest difference of a parameter to FSDP2, after the same steps."""
    model, peer = make_model(name).cuda(), make_model(name).cuda()
    zero, root = Zero3(model), shard_with_fsdp2(peer)
    optimizers = make_optimizer(zero.shards()), make_optimizer(root.parameters())
    for step in range(NUM_STEPS):
        batch = cuda(name, step, [dist.get_rank()])
        model(*batch).backward()
        zero.wait()
        root(*batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found, expected = zero.full_state_dict(), full_values(root)
    return max(
        float((found[key] - value).abs().max()) for key, value in expected.items()
    )


def all_nets_as_fsdp2() -> dict[str, float]:
    return {name: as_fsdp2(name) for name in NETS}
