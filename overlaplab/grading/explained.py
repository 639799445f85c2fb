"""What an error means that learners meet here: in plain words, before torch's own."""

from __future__ import annotations

import re
import traceback

from overlaplab import ours
from overlaplab.errors import RankError, message_of

# What the text of an error holds -> what it means; {1} is the first group.
_MEANINGS = {
    r"NotImplementedError: \d+\.\d+[a-z]?\b": (
        "something is not written yet: the cell still has the lab's raise "
        "NotImplementedError"
    ),
    r"'(\w+)' object is not callable": (
        "something of type {1} is called, where a function should be"
    ),
    r"'NoneType' object has no attribute '(wait|is_completed|get_future)'": (
        "{1}() is called on None, where a work should be: a collective returns one "
        "only with async_op=True, and what was never launched has none"
    ),
    r"post accumulate grad hooks should return None": (
        "your hook returns something; torch allows it to return nothing but None"
    ),
    r"copy_\(\).* must be Tensor, not NoneType": (
        "its gradient has not arrived (.grad is None)"
    ),
    r"'NoneType' object has no attribute '(\w+)'": (
        ".{1} is asked of None: what should stand there was never made, or not returned"
    ),
    r"unsupported operand type\(s\) for ([^:]+): .*'NoneType'": (
        "{1} is asked of None: what should stand there was never made, or not returned"
    ),
    r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)": (
        "the shapes do not fit: {1} elements beside {2} in one dimension"
    ),
    r"mat1 and mat2 shapes cannot be multiplied \((\S+) and (\S+)\)": (
        "the shapes of a product do not fit: {1} times {2}"
    ),
    r"shape '(.+?)' is invalid for input of size (\d+)": (
        "{2} elements do not fit into the shape {1}"
    ),
    r"view size is not compatible with input tensor's size and stride": (
        "a tensor that is not contiguous has no such view: use reshape()"
    ),
    r"output with shape (\[.*?\]) doesn't match the broadcast shape (\[.*?\])": (
        "an operator in place keeps the shape {1}, and the result has {2}"
    ),
    r"leaf Variable that requires grad is being used in an in-place": (
        "a parameter is changed in place while autograd records: do it under "
        "torch.no_grad()"
    ),
    r"element 0 of tensors does not require grad": (
        "backward() has nothing to go back through: the loss was detached, or computed "
        "under no_grad()"
    ),
    r"backward through the graph a second time": (
        "backward() is called twice for one forward pass"
    ),
    r"modified by an inplace operation": (
        "a tensor that the backward pass still needs was overwritten"
    ),
    r"Can't call numpy\(\) on Tensor that requires grad": (
        "numpy cannot take a tensor that autograd follows: detach() it first"
    ),
    r"takes (?:from )?(\d+(?: to \d+)?) positional arguments? but (\d+) w": (
        "it is called with {2} arguments, and takes {1}: the exercise says which"
    ),
}


def own_words(error: BaseException) -> str:
    """The message, if a grader refuses with it what it was given; else ""."""
    while isinstance(error, RankError) and error.__cause__ is not None:
        error = error.__cause__
    if type(error) not in (TypeError, ValueError, KeyError):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    if any(ours.is_users_file(frame.filename) for frame in frames):
        return ""
    raised = bool(frames) and (frames[-1].line or "").startswith("raise ")
    if not raised or not frames[-1].filename.startswith(ours.folders()):
        return ""
    return str(error.args[0]) if type(error) is KeyError else message_of(error)


def explain(error: str) -> str:
    """What the error means, one line; "" if it speaks for itself.

    Args:
        error: "your code raised RuntimeError: ...", as a verdict has it.
    """
    first = error.partition("\n  in ")[0]
    for pattern, meaning in _MEANINGS.items():
        if found := re.search(pattern, first, re.DOTALL):
            return meaning.format("", *(group or "" for group in found.groups()))
    return ""
