"""Threads that a rank starts: members of the rank, one of which runs at a time.

A thread of the program's (`threading.Thread`, `ThreadPoolExecutor`) has its rank's
number, groups, record and random generators. Its current stream is the default stream
until it enters another, as in CUDA; its labels and its grad mode are its own.

It takes turns with its rank and with all other ranks (ranks.py): it goes on where
another thread waits, and keeps the turn until it waits itself. So locks that the
program makes, and what Python builds from them (conditions, events, semaphores, queues,
futures, timers), hand on the turn where they wait, as do `join` and, beside such
threads, `sleep`. A thread that asks again and again (`is_set`, `is_alive`, `empty`)
hands it on, too. Which thread gets an item therefore does not depend on the machine.
Who waits in the operating system (for a pipe, a socket) keeps the turn, and waits till
the deadline for what another thread of the run would have to do.

A rank ends when its threads have ended; daemons are ended with it, as by a process.
What a thread does not catch ends the run.

Threads that a library starts for itself, or `multiprocessing`, are none of the rank's:
they run as ever and nothing of them is recorded; so do locks that a library makes.

[Note: where the model lies] A rank has one CPU on the virtual clock, and what its
threads do stands there in the order in which it was recorded: a thread hides no work of
the CPU's. Two threads that use one piece of the host's memory without a lock are
ordered by their turns: no hazard is found. The backward of a graph belongs to the
thread that made it: from another thread its streams and lines are not known.
"""

from __future__ import annotations

import _thread
import concurrent.futures.thread as pools
import contextlib
import logging
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import _base
from functools import cache, partial
from typing import Any

import torch

from overlaplab import ours
from overlaplab.cluster.virtual import world
from overlaplab.cluster.virtual.modes import RecordMode
from overlaplab.cluster.virtual.patching import Patch, patched
from overlaplab.cluster.virtual.rank_thread import Helper
from overlaplab.cluster.virtual.recorder import Recorder, current_recorder
from overlaplab.deadline import note_thread
from overlaplab.streams import install_thread_provider, thread_provider

# Made for those who call them.
_TOOLS = {m.__file__ for m in (threading, queue, pools, _base, contextlib)} | {__file__}
_ASKED_TOO_OFTEN = 64
_WAITS = "waits for another thread (a lock, condition, event, queue or future)"
_allocate = _thread.allocate_lock
_helpers: weakref.WeakKeyDictionary[Any, Helper] = weakref.WeakKeyDictionary()

Enter = Callable[[], contextlib.AbstractContextManager[Any]]


class TurnLock:
    """A lock that hands on the turn where it waits; in other threads, a plain one."""

    def __init__(self) -> None:
        self._lock = _allocate()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock.acquire`."""
        recorder = current_recorder()
        if recorder is None or recorder.looks_away:
            return self._lock.acquire(blocking, timeout)
        _ask(recorder)
        while not self._lock.acquire(False):
            if not blocking or timeout == 0:
                return False
            until = None if timeout < 0 else timeout
            if not recorder.turns.block(recorder.thread, self._is_free, _WAITS, until):
                return False
        return True

    def release(self) -> None:
        """As `threading.Lock.release`."""
        self._lock.release()

    def locked(self) -> bool:
        """As `threading.Lock.locked`."""
        return self._lock.locked()

    def _is_free(self) -> bool:
        return not self._lock.locked()

    def _at_fork_reinit(self) -> None:
        self._lock = _allocate()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def _ask(recorder: Recorder) -> None:
    """Who only asks, in a loop, lets others go on that could change the answer."""
    me = recorder.thread
    if me.home.helpers:
        me.num_asked += 1
        if me.num_asked >= _ASKED_TOO_OFTEN:
            me.num_asked = 0
            recorder.turns.let_others(me)


@contextlib.contextmanager
def rank_threads(enter: Enter) -> Iterator[None]:
    """While open, threads that the programs of ranks start are members of their ranks.
    In `enter()` a thread's tensors are as its rank's (fake or not)."""
    thread: Any = threading.Thread
    init, start, join = thread.__init__, thread.start, thread.join
    is_alive, is_set = thread.is_alive, threading.Event.is_set
    lock, allocate, rlock = threading.Lock, threading._allocate_lock, threading.RLock  # type: ignore[attr-defined]
    simple, sleep, init_future = queue.SimpleQueue, time.sleep, _base.Future.__init__

    def new_init(self: Any, *args: Any, daemon: bool | None = None, **kw: Any) -> None:
        init(self, *args, daemon=daemon, **kw)
        rank = _rank_of_the_program()
        if rank is not None and daemon is None and rank.thread is rank.thread.home:
            self._daemonic = False  # our own thread is one, a process's is none

    def new_start(self: Any) -> None:
        rank = _rank_of_the_program()
        if rank is not None and self not in _helpers:  # or Python says: only once
            _start(rank, self, start, enter)
            return
        here = current_recorder()
        if here is not None and not here.looks_away:
            here.turns.strangers.append(self)
        start(self)

    def new_join(self: Any, timeout: float | None = None) -> None:
        rank, helper = _helper(self)
        if rank is None or helper is None or rank.thread is helper:
            join(self, timeout)
            return
        what = f"waits for thread {self.name!r} to end"
        has_ended = partial(getattr, helper, "finished")
        if rank.turns.block(rank.thread, has_ended, what, timeout):
            join(self)

    def new_is_alive(self: Any) -> bool:
        rank, helper = _helper(self)
        if rank is None or helper is None:
            return bool(is_alive(self))
        rank.turns.let_others(rank.thread)
        return not helper.finished

    def new_is_set(self: Any) -> bool:
        rank = current_recorder()
        if rank is not None and not rank.looks_away:
            _ask(rank)
        return bool(is_set(self))

    def new_allocate() -> Any:
        frame = sys._getframe(1)
        if frame.f_code is threading.Condition.wait.__code__:
            return TurnLock() if _takes_turns(frame.f_locals["self"]) else allocate()
        return lock() if _rank_of_the_program() is None else TurnLock()

    def new_rlock(*args: Any, **kwargs: Any) -> Any:
        if _rank_of_the_program() is None:
            return rlock(*args, **kwargs)
        return threading._PyRLock()  # type: ignore[attr-defined]

    def new_simple_queue() -> Any:
        if _rank_of_the_program() is None:
            return simple()
        return queue._PySimpleQueue()  # type: ignore[attr-defined]

    def new_sleep(seconds: float) -> None:
        rank = _rank_of_the_program()
        if rank is None or not rank.thread.home.helpers:
            sleep(seconds)
        else:
            rank.turns.block(rank.thread, lambda: False, "sleeps", seconds)

    def new_init_future(self: Any) -> None:
        init_future(self)
        rank = _rank_of_the_program()
        if rank is not None:
            rank.turns.num_futures += 1
            self.number = rank.turns.num_futures

    patches: list[Patch] = [
        (thread, "__init__", new_init),
        (thread, "start", new_start),
        (thread, "join", new_join),
        (thread, "is_alive", new_is_alive),
        (threading.Event, "is_set", new_is_set),
        (threading, "Lock", new_allocate),
        (threading, "_allocate_lock", new_allocate),
        (threading, "RLock", new_rlock),
        (threading, "_time", _clock),
        (queue, "time", _clock),
        (queue, "SimpleQueue", new_simple_queue),
        (time, "sleep", new_sleep),
        (_base.Future, "__init__", new_init_future),
        (_base.Future, "__hash__", _hash_of_future),
        (_base._AcquireFutures, "__init__", _in_order),
        # Held while a pool starts threads and fills its queue.
        (pools, "_global_shutdown_lock", TurnLock()),
    ]
    with patched(patches):
        yield


def _start(rank: Recorder, thread: Any, start: Any, enter: Enter) -> None:
    """Start a thread that has its first turn when others wait."""
    home, turns = rank.thread.home, rank.turns
    run, become, provider = thread.run, world.inherit(), thread_provider()

    def main() -> None:
        become()
        install_thread_provider(provider)
        torch.set_num_threads(1)
        try:
            with (
                torch.autograd.set_multithreading_enabled(False),
                enter(),
                RecordMode(rank, fake=turns.is_fake),
                contextlib.suppress(SystemExit),  # it ends the thread alone
            ):
                run()
        finally:
            world.leave(late=turns.stopping)
            install_thread_provider(None)

    def run_in_turns() -> None:
        del thread.run  # nothing of ours keeps the thread, and what it has
        turns.run_rank(helper)

    helper = Helper(home, thread, main)
    helper.is_daemon = thread.daemon
    for one in (home, helper):
        one.resumed = partial(rank.switch_to, one)
    note_thread(thread)
    _helpers[thread] = helper
    thread.run = run_in_turns
    daemon, thread._daemonic = thread.daemon, True  # if it hangs, Python still ends
    try:
        with rank.looking_away():  # both sides of this event run at once
            thread._started = threading.Event()
            turns.add(helper)
            start(thread)
    finally:
        thread._daemonic = daemon


def end_threads(rank: Recorder) -> None:
    """At the end of a rank's function: its threads end, or are ended.

    Raises:
        DeadlockError: one of them never ends.
    """
    home = rank.thread.home
    for helper in home.helpers:
        if helper.thread in pools._threads_queues and not helper.finished:
            reference = helper.thread._args[0]  # type: ignore[attr-defined]
            executor = reference()
            if executor is not None:  # at the end of a process its work is done first
                executor.shutdown(wait=False)
    rank.turns.wait_for_helpers(home)


def _helper(thread: Any) -> tuple[Recorder | None, Helper | None]:
    """The calling rank, and what `thread` is in a run."""
    return current_recorder(), _helpers.get(thread)


def _takes_turns(owner: Any) -> bool:
    """Whether a condition, semaphore or queue is built from a lock of a program's."""
    lock = getattr(owner, "_cond", owner)  # of a semaphore
    lock = getattr(lock, "_lock", getattr(lock, "mutex", None))
    return isinstance(getattr(lock, "_block", lock), TurnLock)


def _hash_of_future(future: Any) -> int:
    """Futures that are done come from sets: in an order that is not the machine's."""
    number: int | None = vars(future).get("number")
    return object.__hash__(future) if number is None else number


def _in_order(self: Any, futures: Any) -> None:
    """Python locks several futures in the order of their addresses."""
    self.futures = sorted(futures, key=hash)


def _clock() -> float:
    """What time-outs of threading and queue are measured by."""
    rank = current_recorder()
    if rank is not None and _takes_turns(sys._getframe(1).f_locals.get("self")):
        return rank.turns.clock_s
    return time.monotonic()


def _rank_of_the_program() -> Recorder | None:
    """The calling rank, if its program wants a thread or a lock, and no library."""
    recorder = current_recorder()
    if recorder is None or recorder.looks_away:
        return None
    frame = sys._getframe(2)
    while frame.f_code.co_filename in _TOOLS and frame.f_back is not None:
        frame = frame.f_back
    return recorder if _is_the_programs(frame.f_code.co_filename) else None


@cache
def _is_the_programs(filename: str) -> bool:
    return ours.is_our_file(filename) or not filename.startswith(ours.libraries())


@contextlib.contextmanager
def quiet_pools() -> Iterator[None]:
    """Members of a pool print every error at which they end, also where we end them."""
    logger = logging.getLogger("concurrent.futures")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
