"""One rank that stands for all (`fake=True`): what it can, and what is refused.

Rank 0 is recorded on fake tensors, which have shapes and no values, and every other
rank is taken to do the same at the same time. That holds for data, tensor and sharded
parallelism, over the world, groups and meshes: rank 0's groups stand for the others'
like them. What depends on `get_rank()` is done as rank 0 does it; nothing can notice
that the others would not. Messages are noticed: where all ranks do the same, what rank
0 sends over some distance it also gets from there.
"""

from __future__ import annotations

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from overlaplab.cluster.virtual.meeting import Meetings
from overlaplab.errors import MismatchError

_DATA = "data is not allocated yet"  # torch's C++, of a fake tensor


def explained(error: BaseException) -> BaseException:
    """`error`, or what it means where tensors have no values."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        what = f"{error.func} gives or needs a value (item, tolist, if tensor: ...)"
    elif isinstance(error, RuntimeError) and _DATA in str(error):
        what = "torch's C++ reads a tensor's memory here (DistributedDataParallel does)"
    else:
        return error
    new = RuntimeError(
        f"fake=True computes shapes and no values, and {what}. Leave it out of the "
        "fake run, or run with fake=False"
    )
    new.__cause__ = error
    return new.with_traceback(error.__traceback__)


def refuse_other_roles(meetings: Meetings) -> None:
    """Refuse messages that not every rank can send and receive alike.

    Raises:
        MismatchError: rank 0 sends what it does not receive, or the reverse.
    """
    for (group, distance, num_bytes), surplus in meetings.messages.items():
        if surplus:
            does, lacks = ("sends", "receives") if surplus > 0 else ("gets", "sends")
            raise MismatchError(
                f"fake=True lets rank 0 stand for all, but rank 0 {does} "
                f"{abs(surplus)} more than it {lacks} of the messages of {num_bytes} "
                f"bytes that go {distance} ranks up in group {group!r}: ranks have "
                "roles of their own. Run with fake=False, which records every rank"
            )
