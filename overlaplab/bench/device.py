"""Which card, driver and libraries a result was measured with."""

from __future__ import annotations

import subprocess
from typing import Any

import torch
from torch.cuda.nccl import version as nccl_version


def device_description() -> dict[str, Any]:
    """Card, driver and library versions, for the results."""
    found: dict[str, Any] = {"torch": torch.__version__}
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
