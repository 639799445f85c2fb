"""The threads of ranks: what each waits for, and what is its rank's."""

from __future__ import annotations

import threading
from _thread import allocate_lock
from collections.abc import Callable
from typing import Any

from overlaplab.deadline import RANK_THREADS


class Stop(BaseException):
    """Unwinds a rank's thread after another rank failed; never seen by users."""


class RankThread:
    """One rank, which does `main`: its thread, its lock, what it waits for, its process
    state."""

    def __init__(
        self,
        rank: int,
        main: Callable[[], Any],
        thread: threading.Thread | None = None,
    ) -> None:
        self.rank = rank
        self.main = main
        self.home = self  # whose process state it has
        self.helpers: list[Helper] = []  # threads that the rank started
        self.lock = allocate_lock()
        self.lock.acquire()
        self.can_move: Callable[[], bool] | None = None
        self.waits_for: Any = None
        self.due_s: float | None = None  # when its wait is over, on `Turns.clock_s`
        self.timed_out = False
        self.finished = False
        self.is_dismissed = False  # it ends where it waits
        self.num_asked = 0  # of locks and events, since it let others go on
        self.resumed: Callable[[], None] | None = None  # called when it goes on
        self.result: Any = None
        self.error: BaseException | None = None
        self.state: tuple[Any, ...] = ()
        self.has_begun = False
        self.idle_polls = 0
        self.thread = thread or threading.Thread(
            target=self._run, name=f"{RANK_THREADS}{rank}", daemon=True
        )
        self.body: Callable[[RankThread], None] | None = None  # how it takes its turns

    def _run(self) -> None:
        assert self.body is not None
        self.body(self)

    def __str__(self) -> str:
        return f"rank {self.rank}"


class Helper(RankThread):
    """A thread that the rank `home` started, and what it does as a member of it."""

    def __init__(
        self, home: RankThread, thread: threading.Thread, main: Callable[[], Any]
    ) -> None:
        super().__init__(home.rank, main, thread)
        self.home = home
        self.is_daemon = False

    def __str__(self) -> str:
        return f"rank {self.rank}, in thread {self.thread.name!r},"

    def forget(self) -> None:
        """It has ended, and keeps nothing of what it used."""
        self.main = lambda: None
        self.resumed = None
        del self.thread
