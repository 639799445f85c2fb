"""Ranks as threads, of which exactly one runs at a time.

A rank keeps the turn until it needs what it has not got (`block`), then the next rank
in round robin goes on; each rank has one lock on which it sleeps. So the order of
everything is a function of the program and not of the machine. Threads that a rank
starts (threads.py) take turns with it and with all others in the same way. This file
knows nothing of tensors' contents, streams or collectives.

Who waits with a time-out gets no more than it waits for as long as anybody else can
move; then the one whose time would be over first goes on, and the clock of the waits
(`clock_s`) is there. Nobody sleeps for it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import weakref
from _thread import allocate_lock
from collections.abc import Callable
from typing import Any, NoReturn

from overlaplab.cluster.settings import (
    first_state,
    process_state,
    set_process_state,
)
from overlaplab.cluster.virtual.interrupts import Interrupts
from overlaplab.cluster.virtual.rank_thread import Helper, RankThread, Stop
from overlaplab.cluster.virtual.tracing import suspend_tracing
from overlaplab.deadline import (
    WALL_FACTOR,
    interruptible,
    is_importing,
    stack_of,
)
from overlaplab.errors import DeadlockError

# A rank that asks "is it done?" this often without doing anything else, while nobody
# else can move, waits for what will never come.
_MAX_IDLE_POLLS = 1000
# So often one time-out may follow the other, while nobody gets what it waits for.
_MAX_TIMEOUTS = 10_000
_JOIN_S = 2.0  # of a thread that ends, or should


FEWER_RANKS = "Pass a smaller world_size, or fake=True: one rank stands for all"


class Turns:
    """Hands the turn from rank to rank; notices that no rank can move, for which
    `explain` makes the error."""

    def __init__(
        self,
        ranks: list[RankThread],
        explain: Callable[[], DeadlockError],
        *,
        is_fake: bool = False,
    ) -> None:
        self.ranks = ranks
        self.is_fake = is_fake
        self.threads = list(ranks)  # and behind each those that it started
        self.clock_s = 0.0
        self.num_futures = 0  # that programs made, see threads.py
        self.strangers: list[threading.Thread] = []  # of libraries; they take no turns
        self.stopping = False
        self.on_the_wall = False
        self.first_error: tuple[int, BaseException] | None = None
        self._explain = explain
        self._live = ranks[0].home  # whose process state is in place
        self._num_timeouts = 0  # one after the other
        self._ended: list[weakref.ref[threading.Thread]] = []  # about to, of helpers
        self._caller = allocate_lock()
        self._caller.acquire()
        for rank in ranks:
            rank.body = self.run_rank

    @interruptible
    def run(self, timeout_s: float, interrupts: Interrupts) -> bool:
        """Run all ranks; False if the time is over before they end.

        Args:
            timeout_s: CPU time of this process; on the wall, ten times as much.
            interrupts: allowed while the ranks run; not while their threads start,
                since one that is half started cannot be ended.

        Raises:
            RuntimeError: there cannot be so many threads.
        """
        for number, rank in enumerate(self.ranks):
            rank.state = first_state()
            try:
                rank.thread.start()
            except RuntimeError as error:
                raise RuntimeError(
                    f"each rank is a thread, and this machine starts {number} of "
                    f"{len(self.ranks)} ({error}). {FEWER_RANKS}"
                ) from error
        self.ranks[0].lock.release()
        cpu_end = time.process_time() + timeout_s
        wall_end = time.monotonic() + WALL_FACTOR * timeout_s
        # In slices: an interrupt is seen between two, wherever it lands.
        with interrupts.allowed():
            while not self._caller.acquire(timeout=0.1):
                self.on_the_wall = time.process_time() < cpu_end
                if not self.on_the_wall or time.monotonic() >= wall_end:
                    return False
        return True

    def run_rank(self, me: RankThread) -> None:
        """The body of a rank's thread."""
        me.lock.acquire()
        try:
            if not (self.stopping or me.is_dismissed):
                self._go_on(me)
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
            following = self._next(me) or self._next_timeout()
            if isinstance(me, Helper):
                self._forget(me)
            if following is not None:
                self._keep_state(me, following)
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

    def add(self, helper: Helper) -> None:
        """A thread of a rank is about to start; it has its first turn later."""
        after = helper.home.helpers[-1] if helper.home.helpers else helper.home
        self.threads.insert(self.threads.index(after) + 1, helper)
        helper.home.helpers.append(helper)

    def _forget(self, helper: Helper) -> None:
        """It has ended."""
        self.threads.remove(helper)
        helper.home.helpers.remove(helper)
        self._ended.append(weakref.ref(helper.thread))
        helper.forget()

    def block(
        self,
        me: RankThread,
        can_move: Callable[[], bool],
        what: Any,
        timeout_s: float | None = None,
    ) -> bool:
        """Hand on the turn until `can_move()`, which is pure and asked by other
        threads; returns at once if it is true. `what` is waited for, for the report.

        Returns:
            False where the time (of the clock of waits) is over.

        Raises:
            DeadlockError: no rank can move.
        """
        self.check()
        me.due_s = None if timeout_s is None else self.clock_s + timeout_s
        while not me.timed_out and not can_move():
            if me.is_dismissed:
                raise Stop
            me.can_move, me.waits_for = can_move, what
            following = self._next(me) or self._next_timeout()
            if following is not None:
                self._hand_over(me, following)
            elif not self._await_strangers():
                self._give_up(me)
        in_time = not me.timed_out
        if in_time:
            self._num_timeouts = 0
        me.can_move = me.waits_for = me.due_s = None
        me.timed_out = False
        return in_time

    def wait_for_helpers(self, me: RankThread) -> None:
        """At the end of a rank: wait for its threads, and end the daemons.

        Raises:
            DeadlockError: one of them never ends.
        """

        def all_ended() -> bool:
            return all(h.finished or h.is_daemon for h in me.helpers)

        def are_gone() -> bool:
            return all(helper.finished for helper in me.helpers)

        self.block(me, all_ended, "waits at its end for the threads that it started")
        for helper in list(me.helpers):
            helper.is_dismissed = True
        self.block(me, are_gone, "ends its daemons")

    def let_others(self, me: RankThread) -> None:
        """Let every other thread that can move go first."""
        self.check()
        following = self._next(me)
        if following is not None:
            self._hand_over(me, following)

    def yield_turn(self, me: RankThread, what: Any) -> None:
        """Let every other rank that can move go first (a poll: `is_completed`)."""
        self.check()
        following = self._next(me)
        if following is None or following is me:
            following = self._next_timeout()
        if following is None or following is me:
            me.idle_polls += 1
            if me.idle_polls > _MAX_IDLE_POLLS:
                me.waits_for = what
                self._give_up(me)
            return
        me.idle_polls = 0
        self._hand_over(me, following)

    def check(self) -> None:
        """Leave if the run is being stopped."""
        if self.stopping:
            raise Stop

    def stop(self) -> list[int]:
        """End every rank that has not, one by one; returns those that would not end.

        A rank in C++ cannot be stopped: its thread is left, a daemon, and stops at its
        next operator.
        """
        self.stopping = True
        for reference in self._ended:
            if (ended := reference()) is not None:
                ended.join(_JOIN_S)
            del ended
        stuck = []
        for rank in self.threads:
            thread = rank.thread
            if thread.ident is None:
                continue
            if not rank.finished and rank.lock.locked():
                rank.lock.release()
            thread.join(0.05 if not rank.finished else _JOIN_S)
            while thread.is_alive() and self._is_importing(thread):
                thread.join(0.05)  # half a module would be left for every later run
            if thread.is_alive():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident), ctypes.py_object(Stop)
                )
                thread.join(_JOIN_S)
            if thread.is_alive():
                stuck.append(rank.rank)
        return stuck

    def _is_importing(self, thread: threading.Thread) -> bool:
        frame = sys._current_frames().get(thread.ident or -1)
        return is_importing(stack_of(frame))

    def _next(self, me: RankThread) -> RankThread | None:
        """The next rank in round robin that can move; `me` last; None if none."""
        start = self.threads.index(me) + 1
        for rank in self.threads[start:] + self.threads[:start]:
            if rank.finished:
                continue
            if rank.can_move is None or rank.is_dismissed or rank.can_move():
                return rank
        return None

    def _next_timeout(self) -> RankThread | None:
        """Nobody can move: the one whose time is over first, where anybody's is."""
        due = [r for r in self.threads if not r.finished and r.due_s is not None]
        if not due or self._num_timeouts >= _MAX_TIMEOUTS:
            return None
        first = min(due, key=lambda rank: rank.due_s or 0.0)
        self.clock_s = max(self.clock_s, first.due_s or 0.0)
        first.timed_out = True
        self._num_timeouts += 1
        return first

    def _await_strangers(self) -> bool:
        """Whether a thread that takes no turns could still free what is waited for."""
        if not any(thread.is_alive() for thread in self.strangers):
            return False
        time.sleep(0.001)
        self.check()
        return True

    def _give_up(self, me: RankThread) -> NoReturn:
        """No rank can move: an error of the rank; where a helper notices, of the run,
        for a pool of threads keeps its members' errors to itself."""
        error = self._why_nobody_moves()
        if me is me.home:
            raise error
        if self.first_error is None:
            self.first_error = (me.rank, error)
        self.stopping = True
        self._caller.release()
        raise Stop

    def _hand_over(self, me: RankThread, following: RankThread) -> None:
        if following is me:
            return
        resume_tracing = suspend_tracing()
        self._keep_state(me, following)
        following.lock.release()
        me.lock.acquire()
        resume_tracing()  # also where the run stops: the trace undoes it on its way out
        self.check()
        self._go_on(me)
        if me.is_dismissed:
            raise Stop

    def _keep_state(self, me: RankThread, following: RankThread) -> None:
        if following.home is not me.home and not me.home.finished:
            me.home.state = process_state()

    def _go_on(self, me: RankThread) -> None:
        """`me` has the turn: its process's state comes back."""
        if self._live is not me.home or not me.home.has_begun:
            set_process_state(me.home.state)
            self._live = me.home
            me.home.has_begun = True
        if me.resumed is not None:
            me.resumed()
