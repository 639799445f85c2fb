"""Contention: how fast each operator goes beside the others that run now.

[Note: rates] An operator has an amount of *work*: its time alone, in units of which it
does `FULL` a nanosecond while nothing slows it. Beside others it does less:

- k kernels on different streams of one rank run at 1/k each;
- a kernel runs at its kind's speed while a collective is on its rank's wire (beside
  several at the slowest), see `Hardware.speeds`;
- a collective on the wire gets 1/k of its links, where k is the largest number of
  collectives on one of its ports: one direction of one link of one rank (the link in
  the node and the network are two; a send goes out and a receive comes in);
- and of that, while kernels run on its ranks, as much as the kind leaves that leaves
  least;
- host copies and kernels do not slow one another; nor do copies and the wire, except
  where the network is staged through the host: then both use one direction of PCIe,
  see `overlaplab.hardware.pcie_shares`.

Rates change only where an operator starts or ends. Then the work done so far is taken
off, exactly, and the new end is the remaining work over the new rate, rounded up. A
collective's latency is not slowed. Where the profile `waits_for_room`, a collective is
on no wire, and slows nothing, before the kernels have ended that ran when its latency
was over.
"""

from __future__ import annotations

from collections.abc import Iterable

from overlaplab.hardware import Hardware, pcie_shares
from overlaplab.program.costs import NETWORK, Speeds, engine, port

_SHARES = 2520  # divisible by 1 to 10: rates of up to ten sharers are exact
FULL = 1000 * _SHARES


class Rates:
    """What runs now, and how much of it is left.

    Operators are ids of the graph; a collective goes by the id of its first member.
    """

    def __init__(self, hw: Hardware, num_ops: int, num_ranks: int) -> None:
        self._hw = hw
        self._work = [0] * num_ops  # remaining
        self._rate = [0] * num_ops
        self._since = [0] * num_ops
        # What runs on each rank, and what it does to the other side; of a collective,
        # whether it has high priority.
        self._kernels: list[dict[int, Speeds]] = [{} for _ in range(num_ranks)]
        self._wires: list[dict[int, bool]] = [{} for _ in range(num_ranks)]
        self._ports: dict[int, tuple[int, ...]] = {}  # of the collectives on the wire
        self._load = [0] * (4 * num_ranks)  # collectives on each port
        self._copy = [-1] * (2 * num_ranks)  # what each copy engine does
        self._pinned = [True] * (2 * num_ranks)
        self._staged = hw.network_staged
        self._pcie = {True: pcie_shares(hw), False: pcie_shares(hw, pinned=False)}
        self._dirty: set[int] = set()  # ranks on which something started or ended

    def start_kernel(
        self, g: int, rank: int, ns: int, now: int, speeds: Speeds
    ) -> None:
        self._work[g], self._since[g] = ns * FULL, now
        self._kernels[rank][g] = speeds
        self._dirty.add(rank)

    def end_kernel(self, g: int, rank: int) -> None:
        if self._kernels[rank].pop(g, None) is not None:
            self._dirty.add(rank)

    def kernels(self, ranks: Iterable[int]) -> list[int]:
        """Those that run on `ranks` now."""
        return [g for rank in ranks for g in self._kernels[rank]]

    def start_copy(
        self, g: int, rank: int, direction: int, ns: int, now: int, *, pinned: bool
    ) -> None:
        self._work[g], self._since[g] = ns * FULL, now
        self._copy[engine(rank, direction)] = g
        self._pinned[engine(rank, direction)] = pinned
        self._dirty.add(rank)

    def end_copy(self, rank: int, direction: int) -> None:
        self._copy[engine(rank, direction)] = -1
        self._dirty.add(rank)

    def start_wire(
        self,
        g: int,
        ports: tuple[int, ...],
        ns: int,
        now: int,
        *,
        high_priority: bool = False,
    ) -> None:
        self._work[g], self._since[g] = ns * FULL, now
        self._ports[g] = ports
        for number in ports:
            self._load[number] += 1
            self._wires[number // 4][g] = high_priority
            self._dirty.add(number // 4)

    def end_wire(self, g: int) -> None:
        for number in self._ports.pop(g, ()):
            self._load[number] -= 1
            self._wires[number // 4].pop(g, None)
            self._dirty.add(number // 4)

    def changes(self, now: int) -> list[tuple[int, int]]:
        """Set the rates of all that runs beside what started or ended.

        Returns:
            (id, its new end) of what goes faster or slower than before.
        """
        if not self._dirty:
            return []
        changed: list[tuple[int, int]] = []
        wires: dict[int, bool] = {}
        for rank in sorted(self._dirty):
            kernels = self._kernels[rank]
            if kernels:
                beside = set(self._wires[rank].values())
                for g, speeds in kernels.items():
                    slowed = min(speeds[h][0] for h in beside) if beside else 1000
                    self._set(g, slowed * _SHARES // len(kernels), now, changed)
            for number in (2 * rank, 2 * rank + 1):  # its copy engines
                if self._copy[number] >= 0:
                    self._set(self._copy[number], self._copy_rate(number), now, changed)
            wires.update(self._wires[rank])
        self._dirty.clear()
        for g, high in wires.items():
            self._set(g, self._wire_rate(g, high), now, changed)
        return changed

    def _copy_rate(self, number: int) -> int:
        if self._staged and self._load[port(number // 2, NETWORK, number % 2)]:
            return self._pcie[self._pinned[number]][1] * _SHARES
        return FULL

    def _wire_rate(self, g: int, high: bool) -> int:
        ports = self._ports[g]
        sharers = max(self._load[number] for number in ports)
        slowed = 1000
        for rank in {number // 4 for number in ports}:
            for speeds in self._kernels[rank].values():
                slowed = min(slowed, speeds[high][1])
        if self._staged:
            slowed = slowed * min(map(self._pcie_left, ports)) // 1000
        return slowed * _SHARES // sharers

    def _pcie_left(self, number: int) -> int:
        """Of the speed of a staged network on this port, beside a copy."""
        rank, level, direction = number // 4, number // 2 % 2, number % 2
        copies = engine(rank, direction)
        if level != NETWORK or self._copy[copies] < 0:
            return 1000
        return self._pcie[self._pinned[copies]][0]

    def _set(self, g: int, rate: int, now: int, changed: list[tuple[int, int]]) -> None:
        rate = max(1, rate)
        if self._rate[g] == rate:
            return
        self._work[g] -= self._rate[g] * (now - self._since[g])
        self._since[g], self._rate[g] = now, rate
        changed.append((g, now + max(0, -(-self._work[g] // rate))))


class Room:
    """Which collectives wait for which kernels; each waits once, see [Note: rates]."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}  # by collective: kernels that have to end
        self._in_the_way: dict[int, list[int]] = {}  # by kernel: of which collectives

    def waits(self, collective: int, kernels: Iterable[int]) -> bool:
        """Does `collective` wait, for `kernels`? Asked again it has waited."""
        if collective in self._left:
            return False
        self._left[collective] = 0
        for kernel in kernels:
            self._in_the_way.setdefault(kernel, []).append(collective)
            self._left[collective] += 1
        return self._left[collective] > 0

    def made_by(self, kernel: int) -> list[int]:
        """`kernel` has ended: the collectives that need not wait any more."""
        freed = []
        for collective in self._in_the_way.pop(kernel, ()):
            self._left[collective] -= 1
            if self._left[collective] == 0:
                freed.append(collective)
        return freed
