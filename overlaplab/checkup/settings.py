"""What environment variables mean for overlap, by the table `settings.toml`.

Knows no machine: `judge` says which of it matters here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

Status = Literal["ok", "note", "warning", "broken"]


@dataclass(frozen=True, slots=True)
class Remark:
    """One thing that the doctor says.

    Args:
        status: "ok"; "note" (know it); "warning" (works, and not as you may think);
            "broken" (something of the course or the package does not work).
        what: the fact.
        means: for overlap, or for the course; "" if the fact speaks for itself.
        do: how to change it; "" if there is nothing to do.
    """

    status: Status
    what: str
    means: str = ""
    do: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """An entry of the table, which explains its fields; the rest as in `Remark`."""

    names: tuple[str, ...]
    means: str
    do: str = ""
    when: tuple[str, ...] = ()
    status: Status = "note"


def _read_table() -> tuple[Setting, ...]:
    text = Path(__file__).with_suffix(".toml").read_bytes()
    return msgspec.toml.decode(text, type=dict[str, tuple[Setting, ...]])["setting"]


SETTINGS = _read_table()
# What a set-up says about itself, and no switch.
_SILENT = ("NCCL_VERSION", "NCCL_HOME", "NCCL_ROOT", "NCCL_LIB_DIR", "NCCL_INCLUDE_DIR")
_NEEDS_NO_GPU = ("GLOO_SOCKET_IFNAME", "TORCH_DISTRIBUTED_DEBUG")


def judge_settings(environ: Mapping[str, str], *, has_gpus: bool) -> Iterator[Remark]:
    """A remark for each variable that is set and touches overlap.

    Without GPUs those that only concern them share one remark.
    """
    idle = []
    for name in sorted(environ):
        remark = _remark(name, environ[name])
        if remark is None:
            continue
        if has_gpus or name in _NEEDS_NO_GPU:
            yield remark
        else:
            idle.append(name)
    if idle:
        yield Remark(
            "note",
            f"set, and without effect where no GPU is: {', '.join(idle)}",
            "The virtual cluster does not read them.",
        )


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
        remark = _remark(name, value) if name not in environ and has_gpus else None
        if remark is not None:
            yield replace(remark, what=f"{remark.what} (in {path})")


def _remark(name: str, value: str) -> Remark | None:
    entries = [setting for setting in SETTINGS if name in setting.names]
    for entry in entries:
        if not entry.when or value.strip().lower() in entry.when:
            return Remark(entry.status, f"{name}={value}", entry.means, entry.do)
    if entries or name in _SILENT:
        return None  # set to what it is anyway
    if name.startswith(("NCCL_", "TORCH_NCCL_")):
        return Remark(
            "note",
            f"{name}={value}",
            "Changes a default of NCCL or of torch's use of it; what it does to "
            "overlap is not known here.",
        )
    return None
