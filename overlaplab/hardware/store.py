"""Profiles as files: JSON whose keys are the fields of `Hardware` and `Link`."""

from __future__ import annotations

import json
import os
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from overlaplab.files import write_whole
from overlaplab.hardware.model import Hardware, Link


def write_profile(hw: Hardware, path: str | os.PathLike[str]) -> None:
    """Write `hw` as JSON; a reader sees the whole file or the one there before.

    Raises:
        OSError: the folder is missing or not writable.
        TypeError: `hw` is no `Hardware`.
    """
    if not isinstance(hw, Hardware):
        raise TypeError(f"hw is {type(hw).__name__}; expected a Hardware")
    record = _record(hw)
    for key in ("link", "network"):
        if record[key] is not None:
            record[key] = _record(record[key])
    write_whole(path, (json.dumps(record, indent=2) + "\n").encode())


def read_profile(path: str | os.PathLike[str]) -> Hardware:
    """The profile that `write_profile` or a person wrote; equal to what was written.

    Fields of `Hardware` that have a default may be left out.

    Raises:
        OSError: no such file, or not readable.
        ValueError: not JSON (with line and column), or a key is missing, unknown, given
            twice, negative, zero or of the wrong type. The message names file and key.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        record = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {error.lineno}, column {error.colno}: not JSON ({error.msg})"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not text in UTF-8, from byte {error.start} on; save it as UTF-8"
        ) from error
    except ValueError as error:  # a key twice, or too many digits
        raise ValueError(f"{path}: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: no profile: nested too deeply") from error
    try:
        values = _values(Hardware, record, "")
        for key in ("link", "network"):
            if values.get(key) is not None:
                values[key] = _link(values[key], key)
        return Hardware(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _record(value: Hardware | Link) -> dict[str, Any]:
    record = {}
    for key in fields(value):
        found = getattr(value, key.name)
        record[key.name] = dict(found) if hasattr(found, "keys") else found
    return record


def _link(record: Any, key: str) -> Link:
    values = _values(Link, record, f"{key}.")
    try:
        return Link(**values)
    except ValueError as error:
        # A Link calls itself "link"; here it may be the network's.
        raise ValueError(str(error).replace("link.", f"{key}.", 1)) from error


def _values(kind: type[Any], record: Any, prefix: str) -> dict[str, Any]:
    where = prefix.rstrip(".") or "the profile"
    if not isinstance(record, dict):
        raise ValueError(f"{where} is {record!r}; expected an object {{...}}")
    known = {field.name: field for field in fields(kind)}
    for key in record:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"unknown key {prefix + key!r}; {hint}known: {', '.join(known)}"
            )
    for key, field in known.items():
        optional = field.default is not MISSING or field.default_factory is not MISSING
        if key not in record and not optional:
            raise ValueError(f"{prefix}{key} is missing")
    return dict(record)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of JSON's doubled keys the last would win in silence."""
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} is there twice")
    return record
