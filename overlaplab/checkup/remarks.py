"""What the doctor says: `remarks.toml` has the words, the checks say when.

A check is a function of facts; it names an entry of the table and gives what is to be
filled in.
"""

from __future__ import annotations

from dataclasses import dataclass
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


_TABLE = msgspec.toml.decode(
    Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, Remark]
)


def remark(entry: str, **facts: object) -> Remark:
    """The entry of the table, with `facts` in their places."""
    found = _TABLE[entry]
    texts = (found.what, found.means, found.do)
    return Remark(found.status, *(text.format(**facts) for text in texts))
