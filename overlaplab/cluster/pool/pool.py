"""The pool: sends a call to its workers, collects the answers, ends what hangs.

Workers are interchangeable: worker i is rank i of whatever world a call asks for, and
joins a new process group where that differs from the last call's. A worker that hangs
or died is replaced at the next call.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from typing import Any, NamedTuple

from overlaplab.cluster.pool.frames import location, newest_change_s
from overlaplab.cluster.pool.messages import (
    Answer,
    Call,
    Failure,
    Locate,
    Located,
    Printed,
    Ready,
    Started,
    World,
)
from overlaplab.cluster.pool.pickling import dump_call, loads
from overlaplab.cluster.pool.process import Starter, WorkerProcess, new_launcher
from overlaplab.cluster.pool.report import (
    State,
    death_error,
    mismatch_error,
    rank_error,
    timeout_error,
    unwaited_findings,
)
from overlaplab.deadline import machine_is_busy
from overlaplab.errors import RunTimeoutError, printable
from overlaplab.profiling.trace.ranks import timeline_of_ranks
from overlaplab.program import Finding
from overlaplab.timeline import Timeline

_START_S = 600.0  # torch loads in seconds, on a busy machine in many
_GRACE_S = 0.5  # after a first failure, for the others' answers
_BUSY_FACTOR = 20  # on a machine that is busy: the first cause may answer later
_LOCATE_S = 5.0  # they answer at once, if they do
_TICK_S = 0.2
# A worker reads these once; a change needs new workers.
_ENVIRONMENT = ("CUDA_", "NCCL_", "TORCH", "PYTORCH_", "GLOO_", "OMP_", "MKL_")
# How gloo and NCCL say that a peer has gone: an echo of that peer's failure.
_ECHOES = ("closed by peer", "connection reset", "broken pipe", "remote process exited")


class Outcome(NamedTuple):
    """What a run on processes gives; see `Run`."""

    values: tuple[Any, ...]
    timeline: Timeline
    warnings: tuple[Finding, ...]


class Pool:
    """Workers of this process. One call at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parents: list[dict[str, Any]] = []
        self._workers: list[WorkerProcess] = []
        self._starter = Starter()
        self._environment = _relevant_environment()
        self._store: Any = None
        self._generation = 0
        self._world: World | None = None
        self._call_number = 0

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        world_size: int,
        backend: str,
        timeout_s: float,
        measure: bool = True,
    ) -> Outcome:
        """Call `fn(*args, **kwargs)` once on each of `world_size` processes.

        The processes stay for the next call. Function and arguments are pickled, see
        `pickling`. What a rank prints appears here as "[rank 1] ...". Starting
        processes does not count for the deadline. To `measure` the ranks costs
        microseconds an operator.

        Raises:
            TypeError: `fn`, an argument or a result cannot be pickled.
            RankError: a rank raised, or its process died.
            RunTimeoutError: the deadline passed; says where each rank was. Where the
                ranks wait for one another it is a DeadlockError too.
        """
        payload = dump_call(fn, args, kwargs)
        if not self._lock.acquire(timeout=timeout_s):
            raise RunTimeoutError(
                f"another thread's run still uses the processes after {timeout_s:g} s"
            )
        try:
            workers = self._get_workers(world_size)
            world = self._get_world(backend, world_size)
            self._call_number += 1
            for rank, worker in enumerate(workers):
                worker.mark_log()
                worker.send(
                    Call(
                        self._call_number,
                        world,
                        rank,
                        payload,
                        measure,
                        os.getcwd(),
                        tuple(sys.path),
                    )
                )
            collection = Collection(workers, timeout_s)
            collection.collect()
        except BaseException:  # an interrupt, above all
            self._end_workers()
            raise
        else:
            error = collection.error(backend)
            self._keep_what_is_good(collection)
            if error is not None:
                raise error
            return _outcome(collection, backend)
        finally:
            self._lock.release()

    def close(self) -> None:
        """End all processes."""
        self._end_workers()
        self._starter.close()

    def begin_anew(self) -> None:
        """In a forked child: workers and store are the parent's, and stay as they are.

        They are kept: a store that is destroyed waits for threads that a child has not.
        """
        self._parents.append(dict(self.__dict__))
        parents = self._parents
        self.__init__()  # type: ignore[misc]
        self._parents = parents

    def _end_workers(self) -> None:
        workers, self._workers = self._workers, []
        self._world = None
        for worker in workers:
            worker.kill()

    def pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        return [worker.pid for worker in self._workers]

    def _get_workers(self, number: int) -> list[WorkerProcess]:
        """The first `number` workers, started where they are missing."""
        environment = _relevant_environment()
        if environment != self._environment:
            self.close()
            self._environment = environment
        changed_s = newest_change_s()
        if any(w.has_ended() or w.started_s < changed_s for w in self._workers):
            self._end_workers()
        while len(self._workers) < number:
            self._workers.append(WorkerProcess(self._starter))
        workers = self._workers[:number]
        _await_ready(workers)
        return workers

    def _get_world(self, backend: str, size: int) -> World:
        if self._store is None:
            import torch.distributed as dist

            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1", 0, is_master=True, wait_for_workers=False
            )
        world = self._world
        if world is None or (world.backend, world.size) != (backend, size):
            self._generation += 1
            world = World(backend, size, self._store.port, self._generation)
        self._world = world
        return world

    def _keep_what_is_good(self, collection: Collection) -> None:
        answers = collection.answers
        kept = all(answer.kept for answer in answers.values())
        equal = len({tuple(sorted(a.sequences.items())) for a in answers.values()}) == 1
        if len(answers) < len(collection.workers) or not all(
            answer.clean for answer in answers.values()
        ):
            # Gloo aborts a process that leaves a group whose peer has died: so all go.
            self._end_workers()
        if not kept or not equal:
            self._world = None


class Collection:
    """The answers to one call, by rank, as they come; ends by itself after its
    deadline, which counts from when all ranks have met."""

    def __init__(self, workers: Sequence[WorkerProcess], timeout_s: float) -> None:
        self.workers = workers
        self.answers: dict[int, Answer] = {}
        self._timeout_s = timeout_s
        self._started: set[int] = set()
        self._deaths: list[int] = []
        self._states: dict[int, State] | None = None
        self._unfinished: dict[int, Located] = {}

    def collect(self) -> None:
        """Wait until all have answered, or one failed, or the deadline has passed."""
        until, started, failed = time.monotonic() + _START_S, False, False
        while self._missing() and time.monotonic() < until:
            self._receive(until - time.monotonic())
            if not started and len(self._started) == len(self.workers):
                started = True
                until = time.monotonic() + self._timeout_s
            if not failed and (self._deaths or self._failures()):
                failed = True
                grace_s = _GRACE_S * (_BUSY_FACTOR if machine_is_busy() else 1)
                until = min(until, time.monotonic() + grace_s)
        if self._missing() and not failed:
            self._states = self._locate()

    def error(self, backend: str) -> Exception | None:
        """Why the run failed, by its first cause; None if it did not."""
        if self._states is not None:
            return timeout_error(self._states, backend, self._timeout_s)
        failures = self._failures()
        causes = {
            rank: failure
            for rank, failure in failures.items()
            if not any(echo in failure.text.lower() for echo in _ECHOES)
        }
        if self._deaths and not causes:
            rank = self._deaths[0]
            worker = self.workers[rank]
            how = worker.how_it_ended()
            error = death_error(
                rank, len(self.workers), how, worker.log(), worker.notes()
            )
            return self._mismatch(error) or error if "SIGABRT" in how else error
        causes = causes or failures
        if not causes:
            return None
        rank = min(causes, key=lambda r: (causes[r].at_ns, r))
        raised = rank_error(rank, causes[rank], len(self.workers))
        from_torch = causes[rank].type_name in ("RuntimeError", "DistBackendError")
        return self._mismatch(raised) or raised if from_torch else raised

    def _mismatch(self, seen: Exception) -> Exception | None:
        states = {r: State(w.notes()) for r, w in enumerate(self.workers)}
        return mismatch_error(states, seen)

    def _missing(self) -> list[int]:
        return [
            rank
            for rank in range(len(self.workers))
            if rank not in self.answers and rank not in self._deaths
        ]

    def _failures(self) -> dict[int, Failure]:
        return {r: a.failure for r, a in self.answers.items() if a.failure is not None}

    def _receive(self, wait_s: float) -> None:
        ranks = {self.workers[rank].connection: rank for rank in self._missing()}
        wait_s = max(0.0, min(wait_s, _TICK_S))
        for ready in connection.wait(list(ranks), wait_s):
            rank = ranks[ready]  # type: ignore[index]
            try:
                self._take(rank, self.workers[rank].connection.recv())
            except (EOFError, OSError):
                self._deaths.append(rank)
        for rank in self._missing():  # its children may hold the socket open
            worker = self.workers[rank]
            if worker.has_ended() and not worker.connection.poll():
                self._deaths.append(rank)

    def _take(self, rank: int, message: Any) -> None:
        if isinstance(message, Printed):
            stream = sys.stdout if message.stream == "stdout" else sys.stderr
            for line in message.text.split("\n"):
                # Of a progress bar that draws over itself, the last.
                last = printable(line.rstrip("\r").rpartition("\r")[2])
                print(f"[rank {rank}] {last}", file=stream)
        elif isinstance(message, Started):
            self._started.add(rank)
        elif isinstance(message, Answer):
            self.answers[rank] = message
        elif isinstance(message, Located):
            self._unfinished[rank] = message

    def _locate(self) -> dict[int, State]:
        """Ask those that hang where they are; the deadline has passed."""
        missing = self._missing()
        for rank in missing:
            self.workers[rank].ask_for_stack()
            self.workers[rank].send(Locate())
        until = time.monotonic() + _LOCATE_S
        while time.monotonic() < until and not all(
            rank in self._unfinished and self.workers[rank].has_dumped_stack()
            for rank in self._missing()
        ):
            self._receive(0.02)
        time.sleep(0.02)  # a dump that has begun is written in less
        states = {}
        for rank, worker in enumerate(self.workers):
            located = self._unfinished.get(rank)
            states[rank] = State(
                worker.notes(),
                has_ended=rank not in missing,
                unfinished=located.unfinished if located else (),
                frame=location(worker.stack(), worker.main_thread or 0),
            )
        return states


def _outcome(collection: Collection, backend: str) -> Outcome:
    answers = [collection.answers[rank] for rank in range(len(collection.workers))]
    spans = {rank: answer.spans for rank, answer in enumerate(answers)}
    unwaited = {rank: answer.unwaited for rank, answer in enumerate(answers)}
    return Outcome(
        tuple(loads(answer.value or b"") for answer in answers),
        timeline_of_ranks(spans, origin=backend, num_ranks=len(answers)),
        unwaited_findings(unwaited),
    )


def _await_ready(workers: Sequence[WorkerProcess]) -> None:
    deadline = time.monotonic() + _START_S
    for worker in workers:
        if worker.main_thread is not None:
            continue
        try:
            message: Any = None
            if worker.connection.poll(max(0.0, deadline - time.monotonic())):
                message = worker.connection.recv()
        except (EOFError, OSError):
            pass
        if not isinstance(message, Ready):
            ended = worker.has_ended()
            how = worker.how_it_ended() if ended else f"is silent after {_START_S:g} s"
            raise RunTimeoutError(
                f"a process of the pool did not start: it {how}\n{worker.log()}"
            )
        worker.main_thread = message.main_thread


def _relevant_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k.startswith(_ENVIRONMENT)}


_pool = Pool()


def the_pool() -> Pool:
    """This process's pool; its workers end with the process."""
    return _pool


def _after_fork() -> None:
    new_launcher()
    _pool.begin_anew()


atexit.register(lambda: the_pool().close())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
