"""What the doctor says, by two tables.

`remarks.toml` has the words of the checks: each a function of facts that names an entry
and gives what is to be filled in. `settings.toml` says what environment variables mean
for overlap; on which machine that matters, the caller knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

_Table = TypeVar("_Table")
Status = Literal["ok", "note", "warning", "broken"]


@dataclass(frozen=True, slots=True)
class Remark:
    """One thing that the doctor says."""

    # "ok"; "note" (know it); "warning" (works, and not as you may think); "broken"
    # (something of the course or the package does not work)
    status: Status
    what: str  # the fact
    means: str = ""  # for overlap, or for the course; "" if the fact speaks for itself
    do: str = ""  # how to change it; "" if there is nothing to do


def remark(entry: str, **facts: object) -> Remark:
    """The entry of the table, with `facts` in their places."""
    found = _REMARKS[entry]
    texts = (found.what, found.means, found.do)
    return Remark(found.status, *(text.format(**facts) for text in texts))


@dataclass(frozen=True, slots=True)
class Setting:
    """An entry of the table, which explains its fields; the rest as in `Remark`."""

    names: tuple[str, ...]
    means: str
    do: str = ""
    when: tuple[str, ...] = ()
    status: Status = "note"


def _read(name: str, of: type[_Table]) -> _Table:
    text = Path(__file__).with_name(name).read_bytes()
    return msgspec.toml.decode(text, type=of)


_REMARKS = _read("remarks.toml", dict[str, Remark])
SETTINGS = _read("settings.toml", dict[str, tuple[Setting, ...]])["setting"]
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
