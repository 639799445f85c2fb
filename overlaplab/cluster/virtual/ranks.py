"""Ranks as threads, of which exactly one runs at a time.

A rank keeps the turn until it needs what it has not got (`block`), then the next rank
in round robin goes on; each rank has one lock on which it sleeps. So the order of
everything is a function of the program and not of the machine. This file knows
nothing of tensors' contents, streams or collectives.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from overlaplab.cluster.settings import (
    first_state,
    process_state,
    set_process_state,
)
from overlaplab.deadline import (
    RANK_THREADS,
    WALL_FACTOR,
    interruptible,
    is_importing,
    stack_of,
)
from overlaplab.errors import DeadlockError

# A rank that asks "is it done?" this often without doing anything else, while nobody
# else can move, waits for what will never come.
_MAX_IDLE_POLLS = 1000


class Stop(BaseException):
    """Unwinds a rank's thread after another rank failed; never seen by users."""


class RankThread:
    """One rank: its thread, its lock, what it waits for, its process state.

    Args:
        rank: global rank.
        main: the rank's whole job; called in its thread.
    """

    def __init__(self, rank: int, main: Callable[[], Any]) -> None:
        self.rank = rank
        self.main = main
        self.lock = threading.Lock()
        self.lock.acquire()
        self.can_move: Callable[[], bool] | None = None
        self.waits_for: Any = None
        self.finished = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.state: tuple[Any, ...] = ()
        self.idle_polls = 0
        self.thread = threading.Thread(
            target=self._run, name=f"{RANK_THREADS}{rank}", daemon=True
        )
        self.turns: Turns | None = None

    def _run(self) -> None:
        assert self.turns is not None
        self.turns.run_rank(self)


class Turns:
    """Hands the turn from rank to rank; notices that no rank can move.

    Args:
        ranks: every rank that has a thread.
        explain: makes the error when no rank can move.
    """

    def __init__(
        self, ranks: list[RankThread], explain: Callable[[], DeadlockError]
    ) -> None:
        self.ranks = ranks
        self.stopping = False
        self.on_the_wall = False
        self.first_error: tuple[int, BaseException] | None = None
        self._explain = explain
        self._caller = threading.Lock()
        self._caller.acquire()
        for rank in ranks:
            rank.turns = self

    @interruptible
    def run(self, timeout_s: float) -> bool:
        """Run all ranks; False if the time is over before they end.

        Args:
            timeout_s: CPU time of this process; on the wall, ten times as much.
        """
        for rank in self.ranks:
            rank.state = first_state()
            rank.thread.start()
        self.ranks[0].lock.release()
        cpu_end = time.process_time() + timeout_s
        wall_end = time.monotonic() + WALL_FACTOR * timeout_s
        # In slices: an interrupt is seen between two, wherever it lands.
        while not self._caller.acquire(timeout=0.1):
            self.on_the_wall = time.process_time() < cpu_end
            if not self.on_the_wall or time.monotonic() >= wall_end:
                return False
        return True

    def run_rank(self, me: RankThread) -> None:
        """The body of a rank's thread."""
        me.lock.acquire()
        try:
            if not self.stopping:
                set_process_state(me.state)
                me.result = me.main()
        except Stop:
            pass
        except BaseException as error:  # reported in the caller's thread
            me.error = error
            if self.first_error is None and not self.stopping:
                self.first_error = (me.rank, error)
        me.finished = True
        me.can_move = None
        if self.stopping:
            return
        if self.first_error is None:
            following = self._next(me)
            if following is not None:
                following.lock.release()
                return
            if not all(rank.finished for rank in self.ranks):
                self.first_error = (me.rank, self._why_nobody_moves())
        self._caller.release()

    def _why_nobody_moves(self) -> BaseException:
        try:
            return self._explain()
        except Exception as error:  # raised in this thread, it would let the run hang
            return error

    def block(self, me: RankThread, can_move: Callable[[], bool], what: Any) -> None:
        """Hand on the turn until `can_move()`; returns at once if it is true.

        Args:
            me: the calling rank.
            can_move: pure; asked by other ranks' threads.
            what: what is waited for, for the report.

        Raises:
            DeadlockError: no rank can move.
        """
        self.check()
        while not can_move():
            me.can_move, me.waits_for = can_move, what
            following = self._next(me)
            if following is None:
                raise self._explain()
            self._hand_over(me, following)
        me.can_move = me.waits_for = None

    def yield_turn(self, me: RankThread, what: Any) -> None:
        """Let every other rank that can move go first (a poll: `is_completed`)."""
        self.check()
        following = self._next(me)
        if following is None or following is me:
            me.idle_polls += 1
            if me.idle_polls > _MAX_IDLE_POLLS:
                me.waits_for = what
                raise self._explain()
            return
        me.idle_polls = 0
        self._hand_over(me, following)

    def check(self) -> None:
        """Leave if the run is being stopped."""
        if self.stopping:
            raise Stop

    def stop(self, join_s: float = 2.0) -> list[int]:
        """End every rank that has not, one by one; returns those that would not end.

        A rank in C++ cannot be stopped: its thread is left, a daemon, and stops at its
        next operator.
        """
        self.stopping = True
        stuck = []
        for rank in self.ranks:
            thread = rank.thread
            if thread.ident is None:
                continue
            if not rank.finished and rank.lock.locked():
                rank.lock.release()
            thread.join(0.05 if not rank.finished else join_s)
            while thread.is_alive() and self._is_importing(thread):
                thread.join(0.05)  # half a module would be left for every later run
            if thread.is_alive():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident), ctypes.py_object(Stop)
                )
                thread.join(join_s)
            if thread.is_alive():
                stuck.append(rank.rank)
        return stuck

    def _is_importing(self, thread: threading.Thread) -> bool:
        frame = sys._current_frames().get(thread.ident or -1)
        return is_importing(stack_of(frame))

    def _next(self, me: RankThread) -> RankThread | None:
        """The next rank in round robin that can move; `me` last; None if none."""
        start = self.ranks.index(me) + 1
        for rank in self.ranks[start:] + self.ranks[:start]:
            if rank.finished:
                continue
            if rank.can_move is None or rank.can_move():
                return rank
        return None

    def _hand_over(self, me: RankThread, following: RankThread) -> None:
        if following is me:
            return
        resume_tracing = suspend_tracing()
        me.state = process_state()
        following.lock.release()
        me.lock.acquire()
        resume_tracing()  # also where the run stops: the trace undoes it on its way out
        self.check()
        set_process_state(me.state)


_GLOBALS = (
    ("torch.fx._symbolic_trace", "CURRENT_PATCHER"),
    ("torch.fx._symbolic_trace", "_is_fx_tracing_flag"),
    ("torch.fx.experimental.proxy_tensor", "_CURRENT_MAKE_FX_TRACER"),
)


def suspend_tracing() -> Callable[[], None]:
    """Undo what the calling rank's FX trace patched; the result patches it again.

    `make_fx` and `symbolic_trace` patch torch for the whole process. Two ranks that
    trace in turn would undo one another's patches in the wrong order and leave some for
    ever; so a rank that hands on its turn takes its trace along.
    """
    active = {
        (module, name): value
        for module, name in _GLOBALS
        if (value := getattr(sys.modules.get(module), name, None))
    }
    if not active:
        return _nothing
    patcher = active.get(_GLOBALS[0])
    if patcher is not None:
        patcher.revert_all_patches()
    for module, name in active:
        setattr(sys.modules[module], name, False if "flag" in name else None)

    def resume() -> None:
        for (module, name), value in active.items():
            setattr(sys.modules[module], name, value)
        if patcher is not None:
            patcher.reapply_all_patches()

    return resume


def _nothing() -> None: ...
