"""The worker process of the pool: takes calls, runs them as one rank, answers.

Started as a fresh interpreter with three descriptors: the socket to the parent, its
collective log, and the file where faulthandler dumps stacks on SIGUSR1. The main thread
runs the user's function; a second thread listens, so that a hanging rank can still say
where it is, and a worker whose parent has died ends at once.
"""

from __future__ import annotations

import faulthandler
import io
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, cast

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab.cluster.membership import (
    Init,
    Member,
    accepting_init,
    empty_store,
    environment_of,
)
from overlaplab.cluster.pool import collective_log as log_module
from overlaplab.cluster.pool.collective_log import CollectiveLog
from overlaplab.cluster.pool.frames import frames_of
from overlaplab.cluster.pool.messages import (
    Answer,
    Call,
    Failure,
    Located,
    Printed,
    Ready,
    Stage,
    Started,
    World,
)
from overlaplab.cluster.pool.pickling import dumps, loads
from overlaplab.cluster.settings import kept_settings, seed
from overlaplab.errors import message_of, say_of_recompiles
from overlaplab.profiling.collectives import Label, printable
from overlaplab.profiling.sessions import recording
from overlaplab.timeline import Span

# Our own deadline comes first: the process group's must never be what ends a call.
_GROUP_TIMEOUT = timedelta(days=1)
_SETTLE_S = 0.5
_LINUX = sys.platform == "linux"


def main(socket: int, collectives_file: int, stack_file: int) -> None:
    """Serve calls until the parent closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # interrupts are the parent's
    faulthandler.enable(file=2)
    faulthandler.register(
        signal.SIGUSR1, file=os.fdopen(stack_file, "wb"), all_threads=True
    )
    worker = _Worker(Connection(socket), log_module.install(collectives_file))
    with accepting_init(lambda: worker.member):
        worker.serve()


class _Worker:
    def __init__(self, connection: Connection, collective_log: CollectiveLog) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._collective_log = collective_log
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._world: World | None = None
        self._num_connected = 0  # to this world: once, and after each destruction
        # Of the call. Were DDP's C++ reducer the last to hold one, gloo's group would
        # end with the GIL held and join a thread that waits for it (torch 2.13).
        self._groups: list[Any] = []
        self.member: Member | None = None  # while a function runs

    def serve(self) -> None:
        sys.stdout = _Lines(self, "stdout")
        sys.stderr = _Lines(self, "stderr")
        threading.Thread(target=self._listen, daemon=True).start()
        self.send(Ready(threading.get_ident()))
        while True:
            self.send(self._answer(self._calls.get()))

    def send(self, message: Any) -> None:
        with self._sending:
            self._connection.send(message)

    def _listen(self) -> None:
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, Call):
                    self._calls.put(message)
                else:
                    self.send(Located(tuple(self._collective_log.unfinished())))
        except (EOFError, OSError):
            os._exit(0)

    def _answer(self, call: Call) -> Answer:
        self._collective_log.begin()
        value: bytes | None = None
        spans: tuple[Span, ...] = ()
        failure: Failure | None = None
        self._stage: Stage = "start"
        try:
            value, spans = self._run(call)
        except BaseException as error:  # also the user's SystemExit
            failure = _failure(error, self._stage)
        finally:
            self._groups.clear()
            self._collective_log.measuring = False
            sys.stdout.flush()
            sys.stderr.flush()
        unwaited = tuple(self._collective_log.in_flight())
        sequences = self._collective_log.sequences()
        clean = self._settle()
        kept = clean and self._keep_world()
        return Answer(
            call.number, value, spans, failure, unwaited, clean, kept, sequences
        )

    def _run(self, call: Call) -> tuple[bytes, tuple[Span, ...]]:
        os.chdir(call.working_directory)
        sys.path[:] = call.search_path
        self._enter(call.world, call.rank)
        self._groups.append(dist.group.WORLD)
        device = streams.device()
        cuda = device.type == "cuda"
        with ExitStack() as stack:
            stack.enter_context(kept_settings())
            stack.callback(torch.set_default_device, None)
            stack.enter_context(self._as_member(call.world, call.rank))
            stack.enter_context(empty_store(f"call {call.number}"))
            fn, args, kwargs = loads(call.payload, device)
            record = None
            if call.measure:
                record = stack.enter_context(recording(cuda=cuda, align=self._align))
                self._collective_log.measuring = True
            else:
                self._align()
            seed()
            self._stage = "function"
            result = fn(*args, **kwargs)
            if cuda:  # an error of a kernel is the user's too
                torch.cuda.synchronize()
            self._stage = "result"
        spans = tuple(record.spans(call.rank)) if record is not None else ()
        return dumps(result, detach=True), spans

    def _align(self) -> None:
        assert self._world is not None
        on_gpu = self._world.backend == "nccl"
        dist.barrier(device_ids=[torch.cuda.current_device()] if on_gpu else None)
        self._collective_log.begin()  # that barrier is not the user's
        self.send(Started())

    def _enter(self, world: World, rank: int) -> None:
        """Be `rank` of `world`; a group that serves already is kept."""
        if world == self._world and dist.is_initialized():
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        self._world = None
        if world.backend == "nccl":
            torch.cuda.set_device(rank)
        self._num_connected = 0
        cores = len(os.sched_getaffinity(0)) if _LINUX else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // world.size))
        self._connect(world, rank, dist.init_process_group)
        streams.install_process_provider(None)
        provider = _RankProvider(streams.provider(), self._collective_log.label)
        streams.install_process_provider(cast(streams.Provider, provider))
        self._world = world

    def _connect(self, world: World, rank: int, init: Init) -> None:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", world.port, is_master=False
        )
        self._num_connected += 1
        init(
            world.backend,
            store=dist.PrefixStore(  # type: ignore[attr-defined]
                f"world {world.generation}.{self._num_connected}", store
            ),
            rank=rank,
            world_size=world.size,
            timeout=_GROUP_TIMEOUT,
        )

    @contextmanager
    def _as_member(self, world: World, rank: int) -> Iterator[None]:
        """What the user's function finds out of the world, and may ask for again."""

        def connect(init: Init) -> None:
            self._connect(world, rank, init)
            self._groups.append(dist.group.WORLD)

        os.environ |= environment_of(rank, world.size, port=world.port)
        self.member = Member(rank, world.size, (world.backend,), connect)
        try:
            yield
        finally:
            self.member = None

    def _settle(self) -> bool:
        """Whether nothing is in flight, after a moment's patience."""
        deadline = time.monotonic() + _SETTLE_S
        while self._collective_log.unfinished():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
        return True

    def _keep_world(self) -> bool:
        """Leave no group of the user behind; False if the world itself has gone."""
        if not dist.is_initialized() or self._world is None:
            return False
        if len(dist.distributed_c10d._world.pg_map) == 1:
            return True
        dist.destroy_process_group()
        self._world = None
        return False


class _RankProvider:
    """The streams of this process's device; its annotations reach the log too."""

    def __init__(self, base: streams.Provider, label: Label) -> None:
        self._base = base
        self._label = label

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    @contextmanager
    def annotate(self, name: str) -> Iterator[None]:
        with self._base.annotate(printable(name)), self._label.entered(name):
            yield


class _Lines(io.TextIOBase):
    """sys.stdout of a rank: sends whole lines to the parent."""

    encoding = "utf-8"

    def __init__(self, worker: _Worker, stream: str) -> None:
        self._worker = worker
        self._stream = stream
        self._rest = ""
        self._lock = threading.RLock()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            lines, newline, self._rest = (self._rest + text).rpartition("\n")
            if newline:
                self._worker.send(Printed(self._stream, lines))
        return len(text)

    def flush(self) -> None:
        """Send an unfinished line too: the function has ended, or asks for it."""
        with self._lock:
            rest, self._rest = self._rest, ""
            if rest:
                self._worker.send(Printed(self._stream, rest))


def _failure(error: BaseException, stage: Stage) -> Failure:
    at_ns = time.monotonic_ns()
    say_of_recompiles(error)
    try:
        pickled = dumps(error, detach=True)
    except Exception:
        pickled = None
    return Failure(
        type(error).__name__,
        message_of(error),
        frames_of(error.__traceback__),
        pickled,
        at_ns,
        stage,
    )
