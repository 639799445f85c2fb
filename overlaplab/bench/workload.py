"""What all benchmarks share: models, batches, and what they ran on."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda.nccl import version as nccl_version

from overlaplab import streams
from overlaplab.files import write_whole
from overlaplab.models import Transformer, TransformerConfig

_Plan = TypeVar("_Plan")

_PLANS = tomllib.loads(Path(__file__).with_name("plans.toml").read_text("utf-8"))


def plans(of: str, kind: type[_Plan]) -> dict[str, _Plan]:
    """What plans.toml has under `of`, by name."""
    return msgspec.convert(_PLANS[of], dict[str, kind])  # type: ignore[valid-type]


# How ranks reach one another -> what is set before NCCL starts. Without P2P they talk
# through the host's memory.
LINKS: dict[str, dict[str, str]] = {"nvlink": {}, "p2p-off": {"NCCL_P2P_DISABLE": "1"}}
MODELS = plans("models", TransformerConfig)
MAIN = "gpt-738m"


def build(
    name: str, batch: int, tokens: int
) -> tuple[Transformer, tuple[Tensor, Tensor], dict[str, Any]]:
    """A model, this rank's batch, and what the results say of both. Collective.

    Args:
        name: of `MODELS`.
        batch: sequences, each of so many `tokens`.
    """
    model, head = build_model(name)
    inputs = random_batch(MODELS[name], batch, tokens, streams.device())
    return model, inputs, head | {"batch": batch, "tokens": tokens}


def build_model(name: str) -> tuple[Transformer, dict[str, Any]]:
    """A model of `MODELS`, the same at every call, and what the results say of it."""
    device = streams.device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):  # on one CPU thread this would take many seconds
        torch.manual_seed(0)
        model = Transformer(MODELS[name]).to(dtype)
    return model, {
        "model": name,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
    }


@contextmanager
def default_dtype(name: str) -> Iterator[None]:
    """In the `with` block new tensors of floating point have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def say(text: str) -> None:
    """Progress, from rank 0 only."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def write_json(results: Mapping[str, Any], out: Path | None) -> None:
    """Write results where a file is asked for, in a folder that may be new."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, (json.dumps(results, indent=1) + "\n").encode())


def write_from_rank_0(results: Mapping[str, Any], out: Path | None) -> None:
    write_json(results, out if dist.get_rank() == 0 else None)


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def random_batch(
    config: TransformerConfig, size: int, tokens: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Random tokens, other ones on every rank."""
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    text = torch.randint(
        config.vocab_size, (size, tokens + 1), generator=generator, device=device
    )
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def device_description() -> dict[str, Any]:
    """Card, driver and library versions, and NCCL's settings, for the results."""
    found: dict[str, Any] = {"torch": torch.__version__}
    settings = {k: v for k, v in os.environ.items() if k.startswith("NCCL_")}
    if settings:
        found["environment"] = settings
    if torch.cuda.is_available():
        found["card"] = torch.cuda.get_device_name()
        found["num_cards"] = torch.cuda.device_count()
        found["cuda"] = torch.version.cuda
        version: Any = nccl_version
        found["nccl"] = ".".join(map(str, version()))
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            answer = subprocess.run(query, capture_output=True, text=True, timeout=20)
            found["driver"] = answer.stdout.split("\n")[0].strip()
        except (OSError, subprocess.TimeoutExpired):
            found["driver"] = "unknown"
    return found
