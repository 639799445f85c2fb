"""Gradients that no compiled backward averaged are refused, not added.

Dynamo silently skips code that it cannot trace: a function with a graph break in a
loop, what is disabled, everything if it is switched off. A model that is called without
its compiled wrapper is as silent. A backend never sees that code, so a hook on each
parameter checks what arrives there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from overlaplab.errors import OverlaplabError
from overlaplab.techniques.compiler.capture import Run

_running = torch._C._current_graph_task_id  # the number of the backward that runs here
Module = TypeVar("Module", bound=nn.Module)


class NotAveragedError(OverlaplabError):
    """A backward was about to add a gradient to `.grad` that ranks did not average."""


def watch(model: Module) -> Module:
    """From now on `model` takes no gradient that is not an average over the ranks.

    Nothing else changes, neither what is compiled nor what it computes:

        model = torch.compile(ol.compiler.watch(model), backend=ol.compiler.backend())

    It costs three short calls of Python per parameter in each backward. If two compiled
    graphs contribute to one parameter in one backward, a third contribution that is no
    average goes unnoticed. What `torch.autograd.grad` returns is not looked at.

    Args:
        model: each parameter that it has now is watched, also if it is frozen. A
            copy's parameters are others: watch it, too.

    Returns:
        `model` itself. Its backwards raise NotAveragedError, before they add the
        gradient, if code that `backend` did not compile made it or a part of it.

    Raises:
        TypeError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {model!r}; expected a torch.nn.Module")
    for name, parameter in model.named_parameters():
        trainable = parameter.is_floating_point() or parameter.is_complex()
        if trainable and _watch_of(parameter) is None:
            _put_first(parameter, _Watch(name))
    return model


class _Watch:
    """The hook of one parameter; remembers what compiled code gave it in a backward."""

    exist = False  # in this process; who watches nothing pays nothing

    def __init__(self, name: str) -> None:
        _Watch.exist = True
        self._name = name
        self._backward, self._num_given = -1, 0
        self.given: Tensor | None = None  # the average, if there is just one

    def give(self, gradient: Tensor, backward: int) -> None:
        """An average is on its way to the parameter."""
        if backward != self._backward:
            self._backward, self._num_given = backward, 0
        self._num_given += 1
        self.given = gradient if self._num_given == 1 else None

    def __call__(self, gradient: Tensor | None) -> None:
        """Called with the whole gradient; if it is the very tensor that we gave, good.

        It is let go here, or autograd would copy it into `.grad` and not take it over.
        """
        given, self.given = self.given, None
        if gradient is given:
            return
        num_given = self._num_given if self._backward == _running() else 0
        if num_given < 2 and _accumulates():
            raise NotAveragedError(_message(self._name, num_given))


def noting(run: Run, positions: Iterable[int], forward: Graph) -> Run:
    """A compiled backward that tells parameters what it gives to them.

    Args:
        run: its code; AOTAutograd calls it in the backward of its own function.
        positions: of parameters' gradients, averaged, in what `run` returns.
        forward: its graph. `run` returns a result for each of its inputs, and autograd
            has edges for the tensors among them alone, so these are counted.
    """
    inputs = [node for node in forward.nodes if node.op == "placeholder"]
    edges = [(place, sum(map(_is_tensor, inputs[:place]))) for place in positions]

    def noted(args: list[Any]) -> Any:
        results = run(args)
        if not _Watch.exist:
            return results
        below = torch._C._current_autograd_node().next_functions
        backward, watches = _running(), []
        for place, edge in edges:
            watch = _watch_of(getattr(below[edge][0], "variable", None))
            if watch is not None:
                watch.give(results[place], backward)
                watches.append(watch)

        def ended() -> None:
            for watch in watches:  # backward(inputs=...) may not have reached them
                watch.given = None

        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(ended)
        return results

    noted._boxed_call = True  # type: ignore[attr-defined]
    return noted


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val", node.meta.get("example_value")), Tensor)


def _watch_of(parameter: Any) -> _Watch | None:
    for hook in (getattr(parameter, "_backward_hooks", None) or {}).values():
        if type(hook) is _Watch:
            return hook
    return None


def _put_first(parameter: nn.Parameter, watch: _Watch) -> None:
    """Before hooks that change a gradient."""
    trains = parameter.requires_grad
    parameter.requires_grad_()  # no hook can be put on what is frozen, but stays there
    parameter.register_hook(watch)  # type: ignore[no-untyped-call]
    hooks: Any = parameter._backward_hooks
    others = {key: hook for key, hook in hooks.items() if hook is not watch}
    for key in others:
        del hooks[key]
    hooks.update(others)
    parameter.requires_grad_(trains)


def _accumulates() -> bool:
    """Whether the backward that runs adds to `.grad`, and does not return gradients."""
    node = torch._C._current_autograd_node()
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # so torch says that it runs torch.autograd.grad
        return False


def _message(name: str, num_given: int) -> str:
    what = "a part of the gradient" if num_given else "the gradient"
    return (
        f"{what} of {name} is this rank's own and no average over the ranks: code made "
        "it that ol.compiler's backend did not compile. Either the model was called "
        "without its compiled wrapper, or something outside of it uses the parameter, "
        "such as a penalty. Or Dynamo left code out: it skips a whole function for a "
        "graph break in a loop, and what is disabled; TORCH_LOGS=graph_breaks shows "
        "which. Repair: call the compiled model, with the penalty inside; take graph "
        "breaks out of loops (fullgraph=True refuses all of them). Or let "
        "ol.BucketedReducer(model) average, which needs no compiler, and do not watch "
        "the model."
    )
