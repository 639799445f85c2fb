"""Where a timeline was read from, and what its reader had to leave out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """The account that a reader of traces gives of itself.

    Args:
        files: that were read, in the order of the ranks.
        devices: (rank, "NVIDIA H200") where the trace names its devices.
        num_events: events seen in all files, whole ones.
        dropped: (reason, number of events) that could not be used: "cut off at the
            end of the file", "negative duration", ...
        communication_names: the patterns by which a kernel counts as communication.
        remarks: one sentence each: what a reader of the numbers must know ("no
            communication kernels found", "3 kernels have no launch record").
        zero_ns: what the trace's own clock said at the timeline's 0, its base time
            included: with it, a span is found again in the file.
    """

    files: tuple[str, ...] = ()
    devices: tuple[tuple[int, str], ...] = ()
    num_events: int = 0
    dropped: tuple[tuple[str, int], ...] = ()
    communication_names: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    zero_ns: int = 0

    @property
    def num_dropped(self) -> int:
        return sum(number for _, number in self.dropped)


NO_SOURCE = Source()  # of a timeline that no file gave
