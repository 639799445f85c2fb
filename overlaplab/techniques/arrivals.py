"""Which gradients have arrived: hooks that count, and say when a bucket is full.

Knows no collective. Its hooks run on autograd's thread, once for every parameter, while
the CPU runs ahead of the GPU: they note the stream and count. The one that fills the
bucket whose turn it is also calls `on_turn`, which launches it.

[Note: a backward that did not end]
A backward that raises has called some hooks and not others, and the reducer does not
hear of it. So the first hook of each backward asks autograd for a callback at its end.
If another backward begins and the one before has not ended, that one failed, and ranks
may have sent different buckets. A backward inside a backward (reentrant checkpointing)
is part of the outer one. If the inner one brings the first gradient, its own end is not
the one that counts: the outer one's callback is asked for as soon as the outer one goes
on, after the Python function that started the inner one.

[Note: a gradient that is there already]
While backwards only accumulate, a hook has news once in a step: its parameter has got
a gradient, and this stream made it and owns its memory. Later backwards add to it, and
which streams do so need not be noted: nothing is sent before these backwards have
ended, and when one ends, autograd makes the stream that called it wait for all that
wrote ("Stream semantics of backward passes" in torch's notes on CUDA). So hooks without
news return at once, and a callback at the end notes that one stream. (It also stands
for the owner of a gradient that was dropped in between and made anew on another one.)
If the backward raises, nothing ends it: its hooks stay silent until `pausing` is over,
so that the next one that only accumulates may not learn of it; the one that sends does.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from overlaplab import streams
from overlaplab.techniques.model_facts import ParameterInfo


class Arrivals:
    """The gradients of one step, as they come.

    Args:
        parameters: of the model; hooks sit on those that train. A dropped `Arrivals`
            takes its hooks off; they keep neither it nor a parameter alive.
        on_backward: called at the first gradient of each backward. Held weakly.
        on_turn: called with the index of each bucket, in order: when it and all before
            it are full, or when `announce_next` or `announce_rest` ask for it. Held
            weakly. What it raises, the backward raises.

    Attributes:
        paused: gradients are noted and not counted, so that no bucket gets full. Set
            by `pausing`, or by the owner for all backwards.
        windows: blocks of `pausing` that are open.
        is_open: the step has begun; the owner sets it where no gradient has come.
        next: the first bucket that has not been announced; how many have been.
        first: index of the parameter whose gradient began the latest backward.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterInfo],
        on_backward: Callable[[], None],
        on_turn: Callable[[int], None],
    ) -> None:
        self._parameters = parameters
        self._tensors = [info.parameter for info in parameters]
        # No circle: a reducer that is dropped is freed at once, and its group with it.
        self._on_backward = weakref.WeakMethod(on_backward)
        self._on_turn = weakref.WeakMethod(on_turn)
        self._stream_key = streams.key_reader(streams.provider())
        self._handles: list[Any] = [None] * len(parameters)
        self._buckets: Sequence[Sequence[int]] = ()
        self._bucket_of: list[int] = []
        # By parameter: whether its gradient has arrived in this step, and how that
        # begins. By bucket: what trains, and what of it has not been counted yet.
        self._here: list[bool] = []
        self._nothing = [False] * len(parameters)
        self._expected: list[list[int]] = []
        self._missing: list[set[int]] = []
        self.paused = False
        self.windows = 0
        self.first = -1
        self._backward = -1  # autograd's number of the one that is running
        self._ended = self._inner_ended = True
        # Shared with the hooks: whether one has no news in the backward that runs.
        self._no_news = self._nothing.copy()
        weakref.finalize(self, _remove, self._handles)
        self.plan(())

    def plan(self, buckets: Sequence[Sequence[int]]) -> None:
        """Count by these buckets of parameter indices from now on; resets."""
        self._buckets = buckets
        self._bucket_of = [-1] * len(self._parameters)
        for number, bucket in enumerate(buckets):
            for index in bucket:
                self._bucket_of[index] = number
        self._watch_what_trains()
        self.reset()

    def reset(self) -> None:
        """Forget the step: nothing has arrived. What trains now gets a hook."""
        if self._what_trains() != self._trains:
            self._watch_what_trains()
        self._here = self._nothing.copy()
        self._no_news[:] = self._nothing
        self._missing = list(map(set, self._expected))
        # Dicts, not sets: their order, and so the run, does not depend on hashes.
        self._writers: list[dict[Hashable, None]] = [{} for _ in self._buckets]
        self._writers_while_paused: dict[Hashable, None] = {}  # of any bucket
        self.is_open = False
        self.next = 0
        self._ended = True

    def _what_trains(self) -> list[bool]:
        return list(map(_requires_grad, self._tensors))

    def _watch_what_trains(self) -> None:
        self._trains = self._what_trains()
        self._expected = [[] for _ in self._buckets]
        for info in self._parameters:
            if self._trains[info.index]:
                if self._handles[info.index] is None:
                    self._handles[info.index] = self._watch(info)
                if (bucket := self._bucket_of[info.index]) >= 0:
                    self._expected[bucket].append(info.index)

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Pause in this block. Blocks may be nested; an exception ends them, too."""
        before, self.paused = self.paused, True
        self.windows += 1
        try:
            yield
        finally:
            self.windows -= 1
            self.paused = before
            self._no_news[:] = self._nothing  # one that raised left it as it was

    @property
    def backward_failed(self) -> bool:
        """See [Note: a backward that did not end]."""
        if self._ended:
            return False
        # Not failed: the inner one has ended, and we are still in the outer one, whose
        # Python function may run whole steps.
        return not (self._inner_ended and _outermost_function() is not None)

    def stale(self, bucket: int) -> list[int]:
        """Indices of its parameters that froze: a `.grad` left there is an old one."""
        if all(map(self._here.__getitem__, self._buckets[bucket])):
            return []
        return [
            index
            for index in self._buckets[bucket]
            if not self._here[index]
            and not self._parameters[index].parameter.requires_grad
        ]

    def arrived(self, index: int) -> bool:
        """Whether parameter `index` has got a gradient in this step."""
        return self._here[index]

    def writers(self, bucket: int) -> dict[Hashable, None]:
        """Keys of the streams that wrote its gradients, in order of arrival."""
        return self._writers_while_paused | self._writers[bucket]

    def announce_next(self) -> None:
        """Announce one more bucket, full or not; it stays `next` if that raises."""
        _alive(self._on_turn)(self.next)
        self.next += 1

    def announce_rest(self) -> None:
        """Announce all buckets that have not been, full or not."""
        while self.next < len(self._buckets):
            self.announce_next()

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        _remove(self._handles)

    def _watch(self, info: ParameterInfo) -> Any:
        me, index, no_news = weakref.ref(self), info.index, self._no_news

        def on_gradient(_: Tensor) -> None:
            if not no_news[index] and (arrivals := me()) is not None:
                arrivals._note(index)

        on_gradient.arrivals = me  # type: ignore[attr-defined]
        parameter: Any = info.parameter
        handle = parameter.register_post_accumulate_grad_hook(on_gradient)
        # Ours goes first: a hook of the user's may step and free the gradient.
        hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks
        later = {key: hook for key, hook in hooks.items() if hook is not on_gradient}
        for key in later:
            del hooks[key]
        hooks.update(later)
        return handle

    def _note(self, index: int) -> None:
        if _current_backward() != self._backward:
            self.first = index
            self._begin_backward()
        self._here[index] = True
        if self.paused:
            self._writers_while_paused[self._stream_key()] = None
            return
        bucket = self._bucket_of[index]
        if bucket < 0:
            return
        self._writers[bucket][self._stream_key()] = None
        if bucket < self.next:
            self._refuse_late(index, bucket)
        missing = self._missing[bucket]
        if index in missing:
            missing.remove(index)
            while self.next < len(self._missing) and not self._missing[self.next]:
                self.announce_next()

    def _begin_backward(self) -> None:
        outer = _outermost_function()
        if not self._ended and outer is not None:  # part of the one that runs
            return
        if not self.is_open and self._what_trains() != self._trains:
            self.reset()  # frozen or unfrozen since the last step
        _alive(self._on_backward)()
        self.is_open = True
        self._ended, self._inner_ended = False, False
        self._call_at_the_end(inner=outer is not None)
        if outer is None:
            if self.paused:  # see [Note: a gradient that is there already]
                self._no_news[:] = self._here
            return
        me = weakref.ref(self)

        def outer_goes_on(*_: object) -> None:
            handle.remove()
            if (arrivals := me()) is not None and not arrivals._ended:
                arrivals._call_at_the_end()

        handle = outer.register_hook(outer_goes_on)

    def _call_at_the_end(self, inner: bool = False) -> None:
        """Note when the running backward ends; `inner` if it is part of another."""
        number = self._backward = _current_backward()
        me = weakref.ref(self)

        def ended() -> None:
            arrivals = me()
            if arrivals is None or arrivals._backward != number:
                return
            arrivals._inner_ended = True
            arrivals._ended |= not inner
            if any(arrivals._no_news):
                arrivals._no_news[:] = arrivals._nothing
                arrivals._writers_while_paused[arrivals._stream_key()] = None

        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(ended)

    def _refuse_late(self, index: int, bucket: int) -> None:
        raise RuntimeError(
            f"{self._parameters[index].name} got a second gradient in one step, after "
            f"bucket {bucket}, which it belongs to, had been sent. Call reducer.wait() "
            "after each backward; or run all backwards of a step but the last inside "
            "reducer.no_sync(); with activation checkpointing pass use_reentrant=False."
        )


_current_backward = torch._C._current_graph_task_id
_requires_grad = operator.attrgetter("requires_grad")


def _alive(method: weakref.WeakMethod[Any]) -> Any:
    """The method: while an `Arrivals` lives, so does the reducer that owns it."""
    found = method()
    assert found is not None
    return found


def watcher_of(info: ParameterInfo) -> Arrivals | None:
    """The living `Arrivals` that watches a parameter, None if there is none."""
    hooks: dict[int, Any] = info.parameter._post_accumulate_grad_hooks or {}
    for hook in hooks.values():
        me = getattr(hook, "arrivals", None)
        if me is not None and (arrivals := me()) is not None:
            watching: Arrivals = arrivals
            return watching
    return None


def _outermost_function() -> Any:
    """The Python function on the stack whose backward started this one, or None."""
    frame: FrameType | None = sys._getframe(1)
    code, found = BackwardCFunction.apply.__code__, None
    while frame is not None:
        if frame.f_code is code:
            found = frame
        frame = frame.f_back
    return None if found is None else found.f_locals["self"]


def _remove(handles: list[Any]) -> None:
    for i, handle in enumerate(handles):
        if handle is not None:
            handle.remove()
            handles[i] = None
