"""The key-value store of a run, as one rank sees it: waiting hands on the turn.

torch's own stores block in C++ while the rank holds the turn: nobody could ever set
the key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from overlaplab.cluster.virtual.ranks import RankThread, Turns
from overlaplab.torch_versions import BaseStore


@dataclass(frozen=True)
class KeyWait:
    """What a rank waits for whose CPU stands in `store.get` or `store.wait`."""

    keys: tuple[str, ...]

    def __str__(self) -> str:
        # torch puts the group's name and "//" before the user's key.
        keys = [repr(key.rpartition("//")[2]) for key in self.keys]
        return f"waits for {', '.join(keys)} in the store"


class RankStore(BaseStore):  # type: ignore[misc]
    """One rank's handle of the run's store.

    Args:
        shared: the run's.
        turns: hands on the turn.
        thread: the rank's own.
    """

    def __init__(self, shared: Any, turns: Turns, thread: RankThread) -> None:
        super().__init__()
        self._shared = shared
        self._turns = turns
        self._thread = thread

    def get(self, key: str) -> Any:
        self._until(lambda: self._shared.check([key]), (key,))
        return self._shared.get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._until(lambda: self._shared.check(list(keys)), tuple(keys))

    def set(self, key: str, value: Any) -> None:
        self._shared.set(key, value)

    def add(self, key: str, amount: int) -> Any:
        return self._shared.add(key, amount)

    def check(self, keys: Sequence[str]) -> Any:
        return self._shared.check(list(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> Any:
        return self._shared.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> Any:
        return self._shared.delete_key(key)

    def num_keys(self) -> Any:
        return self._shared.num_keys()

    def _until(self, there: Callable[[], bool], keys: tuple[str, ...]) -> None:
        if not there():
            self._turns.block(self._thread, there, KeyWait(keys))
