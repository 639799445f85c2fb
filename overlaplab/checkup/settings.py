"""What environment variables mean for overlap, by the table `settings.toml`.

Knows no machine: `judge` says which of it matters here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from overlaplab.checkup.remarks import Remark, Status, remark


@dataclass(frozen=True, slots=True)
class Setting:
    """An entry of the table, which explains its fields; the rest as in `Remark`."""

    names: tuple[str, ...]
    means: str
    do: str = ""
    when: tuple[str, ...] = ()
    status: Status = "note"


SETTINGS = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(),
    type=dict[str, tuple[Setting, ...]],
)["setting"]
# What a set-up says about itself, and no switch.
_SILENT = ("NCCL_VERSION", "NCCL_HOME", "NCCL_ROOT", "NCCL_LIB_DIR", "NCCL_INCLUDE_DIR")
_NEEDS_NO_GPU = ("GLOO_SOCKET_IFNAME", "TORCH_DISTRIBUTED_DEBUG")


def judge_settings(environ: Mapping[str, str], *, has_gpus: bool) -> Iterator[Remark]:
    """A remark for each variable that is set and touches overlap.

    Without GPUs those that only concern them share one remark.
    """
    idle = []
    for name in sorted(environ):
        found = _judge(name, environ[name])
        if found is None:
            continue
        if has_gpus or name in _NEEDS_NO_GPU:
            yield found
        else:
            idle.append(name)
    if idle:
        yield remark("idle settings", names=", ".join(idle))


def judge_files(
    settings: Iterable[tuple[str, str, str]],
    environ: Mapping[str, str],
    *,
    has_gpus: bool,
) -> Iterator[Remark]:
    """The same for what NCCL's own files set: (name, value, file).

    A variable of the environment goes before a line of a file.
    """
    for name, value, path in settings:
        found = _judge(name, value) if name not in environ and has_gpus else None
        if found is not None:
            yield replace(found, what=f"{found.what} (in {path})")


def _judge(name: str, value: str) -> Remark | None:
    entries = [setting for setting in SETTINGS if name in setting.names]
    for entry in entries:
        if not entry.when or value.strip().lower() in entry.when:
            return Remark(entry.status, f"{name}={value}", entry.means, entry.do)
    if entries or name in _SILENT:
        return None  # set to what it is anyway
    if name.startswith(("NCCL_", "TORCH_NCCL_")):
        return remark("unknown setting", name=name, value=value)
    return None
