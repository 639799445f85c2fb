"""Which gradients have arrived: counts them, and says when a bucket is full.

Each parameter's hook calls when its gradient is in `.grad`, on autograd's thread. The
CPU runs ahead of the GPU: the gradient has been launched, and may not be computed yet.
So the stream that computes it is noted, by a key (`streams.key_reader`).

`hooks` puts the hooks on, and tells one backward from the next.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import filterfalse
from typing import Any

from overlaplab import streams
from overlaplab.techniques.hooks import Backwards, Hooks, refuse_late, running
from overlaplab.techniques.model_facts import ParameterInfo


class Arrivals:
    """The gradients of one step, as they come. Parameters go by their index.

    Args:
        on_backward: called at the first gradient of each backward.
        on_turn: called with the number of each bucket, in order: when it and all before
            it are full, or when `announce` asks for it.

    Attributes:
        buckets: parameters that travel together.
        next: the bucket whose turn comes next; how many have had theirs.
        here: by parameter, whether its gradient has arrived.
        is_open: the step has begun; its reducer sets it (`Steps.open`).
        first: the parameter whose gradient began the latest backward.
        paused: gradients are noted and not counted, so that no bucket gets full: inside
            `pausing` (`no_sync`); in backwards of a `SerialReducer`.
        windows: blocks of `pausing` that are open.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterInfo],
        on_backward: Callable[[], None],
        on_turn: Callable[[int], None],
    ) -> None:
        self._parameters = parameters
        # Weak: a dropped reducer is freed at once, and its group with it.
        self._on_backward_ref: Any = weakref.WeakMethod(on_backward)
        self._on_turn_ref: Any = weakref.WeakMethod(on_turn)
        self._stream_key = streams.key_reader(streams.provider())
        self.hooks = Hooks(parameters, self)
        self.backwards = Backwards(self._backward_ended)
        self.paused, self.windows, self.first = False, 0, -1
        self.plan(())

    def plan(self, buckets: Sequence[Sequence[int]]) -> None:
        """Count by these buckets from now on; resets."""
        self.buckets = buckets
        self._bucket_of = [-1] * len(self._parameters)
        for number, bucket in enumerate(buckets):
            for index in bucket:
                self._bucket_of[index] = number
        self._expect()
        self.reset()

    def reset(self) -> None:
        """Forget the step: nothing has arrived. What trains now gets a hook."""
        if self.hooks.outdated:
            self._expect()
        self.here = [False] * len(self._parameters)
        self._awaited = list(map(set, self._expected))  # by bucket: what has to come
        # Dicts: their order, and so the run, does not depend on hashes.
        self._writers: list[dict[Hashable, None]] = [{} for _ in self.buckets]
        self._writers_while_paused: dict[Hashable, None] = {}  # of any bucket
        self.hooks.hear()  # none is silent
        self.backwards.forget()
        self.is_open = False
        self.next = 0

    def note(self, index: int) -> None:
        """What a hook calls: a gradient is here, written by the current stream."""
        # The first gradient of a backward that is not part of the latest one.
        if running() != self.backwards.number and not self.backwards.goes_on:
            self._begin_backward(index)
        self.here[index] = True
        if self.paused:
            self._writers_while_paused[self._stream_key()] = None
            return
        bucket = self._bucket_of[index]
        if bucket < 0:  # it did not train when the buckets were planned
            return
        self._writers[bucket][self._stream_key()] = None
        if bucket < self.next:
            refuse_late(self._parameters[index], bucket)
        awaited = self._awaited
        if index in awaited[bucket]:
            awaited[bucket].remove(index)
            while self.next < len(awaited) and not awaited[self.next]:
                self.announce(self.next + 1)

    def announce(self, up_to: int) -> None:
        """It is the turn of all buckets before `up_to`; one that raises stays next."""
        while self.next < up_to:
            self._on_turn_ref()(self.next)
            self.next += 1

    def writers(self, bucket: int) -> dict[Hashable, None]:
        """Keys of the streams that wrote its gradients, in order of arrival."""
        return self._writers_while_paused | self._writers[bucket]

    def missing(self, bucket: int) -> list[int]:
        """Its parameters without a gradient in this step."""
        return list(filterfalse(self.here.__getitem__, self.buckets[bucket]))

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Pause in this block; blocks may be nested."""
        before, self.paused = self.paused, True
        self.windows += 1
        try:
            yield
        finally:
            self.windows -= 1
            self.paused = before
            self.hooks.hear()

    def _expect(self) -> None:
        self.hooks.follow()
        trains = self.hooks.trains
        self._expected = [[i for i in bucket if trains[i]] for bucket in self.buckets]

    def _begin_backward(self, index: int) -> None:
        if not self.is_open and self.hooks.outdated:
            self.reset()  # frozen or unfrozen since the last step
        self.first = index
        self._on_backward_ref()()
        if self.backwards.begin() and self.paused:
            # Inside `no_sync`; see hooks, [Note: a gradient that is there already].
            self.hooks.silence(self.here)

    def _backward_ended(self) -> None:
        if self.hooks.hear():
            self._writers_while_paused[self._stream_key()] = None
