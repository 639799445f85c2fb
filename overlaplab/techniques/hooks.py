"""Hooks on the parameters that train, and the backward that calls them.

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
news are silent, and a callback at the end notes that one stream. (It also stands for
the owner of a gradient that was dropped in between and made anew on another one.) If
the backward raises, nothing ends it: its hooks stay silent until `Arrivals.pausing` is
over, so that the next one that only accumulates may not learn of it; the one that sends
does.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from overlaplab.techniques.model_facts import ParameterInfo

running = torch._C._current_graph_task_id  # the number of the one that runs here


class Hooks:
    """One for each parameter, on it from when it trains.

    They go before the user's, which may step and free the gradient. A dropped `Hooks`
    takes its hooks off; they keep neither it, nor the counter, nor a parameter alive.

    Args:
        parameters: of the model.
        counter: its `note(index)` is called once a gradient is complete, in `.grad`.

    Attributes:
        trains: whether each parameter did, when `follow` looked.
    """

    trains: list[bool]

    def __init__(self, parameters: Sequence[ParameterInfo], counter: object) -> None:
        self._tensors = [info.parameter for info in parameters]
        self._counter: Any = weakref.ref(counter)
        self._all_heard = [False] * len(parameters)
        self._silent = self._all_heard.copy()  # shared with the hooks
        self._handles: list[Any] = [None] * len(parameters)
        weakref.finalize(self, _remove, self._handles)
        self.follow()

    @property
    def outdated(self) -> bool:
        """Whether something froze, or trains again, since `follow` looked."""
        return self._what_trains() != self.trains

    def follow(self) -> None:
        """Look at what trains now; each of that has its hook."""
        self.trains = self._what_trains()
        for index, trains in enumerate(self.trains):
            if trains and self._handles[index] is None:
                self._handles[index] = self._put_first(index)

    def silence(self, which: Sequence[bool]) -> None:
        """These return at once until `hear`."""
        self._silent[:] = which

    def hear(self) -> bool:
        """All call again; whether some were silent."""
        some = any(self._silent)
        self._silent[:] = self._all_heard
        return some

    def remove(self) -> None:
        """Take them off."""
        _remove(self._handles)

    def _what_trains(self) -> list[bool]:
        return list(map(_requires_grad, self._tensors))

    def _put_first(self, index: int) -> Any:
        counter, silent = self._counter, self._silent

        def on_gradient(_: Tensor) -> None:
            if not silent[index] and (me := counter()) is not None:
                me.note(index)

        on_gradient.arrivals = counter  # type: ignore[attr-defined]
        parameter: Any = self._tensors[index]
        handle = parameter.register_post_accumulate_grad_hook(on_gradient)
        hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks
        later = {key: hook for key, hook in hooks.items() if hook is not on_gradient}
        for key in later:
            del hooks[key]
        hooks.update(later)
        return handle


def is_watched(info: ParameterInfo) -> bool:
    """Whether a parameter has the hook of a counter that lives."""
    hooks: dict[int, Any] = info.parameter._post_accumulate_grad_hooks or {}
    counters = (getattr(hook, "arrivals", None) for hook in hooks.values())
    return any(counter is not None and counter() is not None for counter in counters)


_requires_grad = operator.attrgetter("requires_grad")


def _remove(handles: list[Any]) -> None:
    for i, handle in enumerate(handles):
        if handle is not None:
            handle.remove()
            handles[i] = None


class Backwards:
    """The latest backward: begun by its first hook, which asks to hear of its end.

    Args:
        on_end: called as one ends, an inner one too; held weakly. Never after a raise.

    Attributes:
        number: autograd's, of the latest; `running()` is equal in its hooks.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = weakref.WeakMethod(on_end)
        self._ended = self._inner_ended = True
        self.number = -1

    @property
    def failed(self) -> bool:
        """Whether it raised; see [Note: a backward that did not end]."""
        if self._ended:
            return False
        # Rare: the inner one has ended, and we are still in the outer one, whose Python
        # function may run whole steps. That is no failure.
        return not (self._inner_ended and _outermost_function() is not None)

    @property
    def runs_here(self) -> bool:
        """Whether one of its hooks asks."""
        return not self._ended and running() == self.number

    @property
    def goes_on(self) -> bool:
        """Rare: what runs here is inside it, and no other one."""
        return not self._ended and _outermost_function() is not None

    def begin(self) -> bool:
        """Another one runs here; False if it is part of an outer one."""
        outer = _outermost_function()
        self._ended, self._inner_ended = False, False
        self._call_at_the_end(inner=outer is not None)
        if outer is None:
            return True
        # Rare: a backward inside another, whose end is the one that counts.
        me = weakref.ref(self)

        def outer_goes_on(*_: object) -> None:
            handle.remove()
            if (backwards := me()) is not None and not backwards._ended:
                backwards._call_at_the_end()

        handle = outer.register_hook(outer_goes_on)
        return False

    def forget(self) -> None:
        """Whether the latest one ended counts no more."""
        self._ended = True

    def _call_at_the_end(self, inner: bool = False) -> None:
        """Note when the running backward ends; `inner` if it is part of another."""
        number = self.number = running()
        me = weakref.ref(self)

        def ended() -> None:
            backwards = me()
            if backwards is None or backwards.number != number:
                return
            backwards._inner_ended = True
            backwards._ended |= not inner
            if (on_end := backwards._on_end()) is not None:
                on_end()

        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(ended)


def _outermost_function() -> Any:
    """The Python function on the stack whose backward started this one, or None."""
    frame: FrameType | None = sys._getframe(1)
    code, found = BackwardCFunction.apply.__code__, None
    while frame is not None:
        if frame.f_code is code:
            found = frame
        frame = frame.f_back
    return None if found is None else found.f_locals["self"]


def refuse_late(info: ParameterInfo, bucket: int) -> None:
    """A gradient came after its bucket had been sent, mostly from a second backward."""
    if not info.parameter.requires_grad:
        raise RuntimeError(
            f"{info.name} was frozen between a forward and its backward: the gradient "
            f"came all the same, after bucket {bucket}, which it belongs to, had been "
            "sent without it. Freeze before the forward."
        )
    raise RuntimeError(
        f"{info.name} got a second gradient in one step, after bucket {bucket}, which "
        "it belongs to, had been sent. Call reducer.wait() after each backward; or run "
        "all backwards of a step but the last inside reducer.no_sync(); with "
        "activation checkpointing pass use_reentrant=False."
    )
