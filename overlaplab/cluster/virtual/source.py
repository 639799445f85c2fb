"""Where in the user's code an operator was launched."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

import torch

import overlaplab

_SKIPPED = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.dirname(os.path.abspath(overlaplab.__file__)) + os.sep,
    os.path.dirname(os.path.abspath(os.__file__)) + os.sep,
    "<",
)
_is_user: dict[CodeType, bool] = {}


def user_line(frame: FrameType | None = None) -> str:
    """ "file:line in function" of the innermost frame of the user's, or "".

    Looks outwards from `frame`, from the caller if it is None.

    Frames of torch, of this package and of the standard library are not the user's.
    The file is given without its folder, so that records of two machines are equal.
    """
    if frame is None:
        frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_user_code(code):
            name = os.path.basename(code.co_filename)
            return f"{name}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return ""


def is_user_code(code: CodeType) -> bool:
    """Whether it is neither torch's, nor ours, nor the standard library's."""
    users = _is_user.get(code)
    if users is None:
        users = _is_user[code] = _of_user(code.co_filename)
    return users


def _of_user(filename: str) -> bool:
    if filename.startswith("<ipython-input"):
        return True
    return not filename.startswith(_SKIPPED)
