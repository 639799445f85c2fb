"""The hardware profiles that come with the package, by name.

Each is a file in machines/, as `write_profile` makes them, with the source of every
number. "Issue" there is one of that repository on GitHub.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

from overlaplab.hardware.model import Hardware
from overlaplab.hardware.store import read_profile

_MACHINES = Path(__file__).with_name("machines")
_NAMES = (
    "chalk",
    "h100-nvlink",
    "h200-nvlink",
    "h100-ib400",
    "a100-nvlink",
    "ethernet-100g",
    "ethernet-25g",
    "laptop",
)

PROFILES: Mapping[str, Hardware] = MappingProxyType(
    {name: read_profile(_MACHINES / f"{name}.json") for name in _NAMES}
)


def find_hardware(name: str | Hardware) -> Hardware:
    """The profile called `name`; a `Hardware` is returned as it is.

    Args:
        name: one of `PROFILES`, or the path of a profile file, which ends in ".json".

    Raises:
        ValueError: nobody knows the name (the message lists the known ones), there is
            no such file, or it holds no profile (see `read_profile`).
        TypeError: neither a name nor a `Hardware`.

    >>> find_hardware("chalk").link.latency_ns
    1000
    """
    if isinstance(name, Hardware):
        return name
    if not isinstance(name, str):
        raise TypeError(
            f"hardware is {type(name).__name__}; expected a name "
            f"({', '.join(PROFILES)}), the path of a profile file (text that ends in "
            ".json), or overlaplab.hardware.Hardware(...)"
        )
    if name.endswith(".json"):
        try:
            return read_profile(name)
        except OSError as error:
            raise ValueError(
                f"hardware {name!r} cannot be read: {error.strerror}; expected a "
                f"profile file, or one of {', '.join(PROFILES)}"
            ) from error
    if name not in PROFILES:
        near = get_close_matches(name, PROFILES, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"unknown hardware {name!r}; known: {', '.join(PROFILES)}.{hint} Or give "
            "the path of a profile file (.json), or a Hardware(...), such as "
            "dataclasses.replace(find_hardware('h100-nvlink'), ...)"
        )
    return PROFILES[name]


def with_link(
    hw: str | Hardware,
    *,
    latency_ns: int | None = None,
    bytes_per_s: int | None = None,
) -> Hardware:
    """`hw` with another link; its name gets a "+link", so that reports show it.

    A bandwidth stands instead of the link's measured points. Between nodes there is
    `network`, which stays; edit it with `dataclasses.replace`.

    >>> with_link("chalk", latency_ns=500).link.latency_ns
    500
    """
    hw = find_hardware(hw)
    changes: dict[str, object] = {}
    if latency_ns is not None:
        changes["latency_ns"] = latency_ns
    if bytes_per_s is not None:
        changes["bytes_per_s"] = bytes_per_s
    if not changes:
        return hw
    edited = f"{hw.link.source}; edited: {changes}"
    if bytes_per_s is not None:
        changes["times"] = ()  # measured at the old bandwidth
    link = replace(hw.link, source=edited, **changes)  # type: ignore[arg-type]
    name = hw.name if hw.name.endswith("+link") else hw.name + "+link"
    return replace(hw, name=name, link=link)
