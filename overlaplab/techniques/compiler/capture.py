"""Graphs of an unmodified model, by torch's own tracers.

`capture_step` follows a function once (make_fx): a whole step in one graph, whatever
the function does. `capture` compiles a model as `torch.compile` does (Dynamo, then
AOTAutograd): for each fragment between graph breaks a forward and a backward graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from overlaplab.techniques.compiler.graphs import output_of, returned
from overlaplab.torch_versions import aot_module_simplified

Run = Callable[..., Any]
Compile = Callable[["Fragment"], Run]


@dataclass(frozen=True)
class Fragment:
    """One graph of a model, forward or backward.

    Args:
        graph: its operators.
        gradients: of a backward: position in what it returns -> the name of the
            parameter whose gradient that is.
        is_backward: which of the two it is.
        forward: of a backward, the graph that ran before it.
    """

    graph: Graph
    gradients: dict[int, str]
    is_backward: bool
    forward: Graph | None = None


def capture_step(step: Callable[..., Any], *args: Any) -> Graph:
    """The operators that `step(*args)` runs, once, on tensors without values.

    A backward that it runs is in it, writes in place and random draws as well. Nothing
    depends on values: what the function decides by them is refused by torch.

    Args:
        step: returns tensors, in lists and dicts if it likes.
        args: the same; their tensors become the graph's inputs, in order.

    Returns:
        A graph of tensors that returns tensors.

    Raises:
        TypeError, ValueError: `step` is no function, or uses other tensors.
    """
    if not callable(step):
        raise TypeError(f"step is {step!r}; expected a function of tensors")
    try:
        graph: Graph = make_fx(step, tracing_mode="fake")(*args).graph
    except AssertionError as error:
        if "FakeTensor" not in str(error):
            raise
        raise ValueError(
            "step uses a tensor that is not among its arguments, such as a parameter "
            "of a model; expected all of them in args. capture_gradients does that"
        ) from error
    leaves = pytree.tree_leaves(output_of(graph).args[0])
    output_of(graph).args = (tuple(leaves),)
    return graph


def capture_gradients(model: nn.Module, *inputs: Any) -> tuple[Graph, dict[int, str]]:
    """Forward and backward of a model that returns its loss, in one graph.

    Args:
        model: called with `inputs`; its parameters and buffers are the first inputs of
            the graph.
        inputs: of the model.

    Returns:
        A graph that returns the loss and a gradient for each parameter that trains, and
        the names of those by position.

    Raises:
        TypeError, ValueError: `model` is no module, trains nothing or returns no loss.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {model!r}; expected a torch.nn.Module")
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    trained = [name for name, tensor in tensors.items() if tensor.requires_grad]
    if not trained:
        raise ValueError(
            f"{type(model).__name__} has no parameter that requires a gradient"
        )

    def step(tensors: dict[str, torch.Tensor], inputs: Sequence[Any]) -> Any:
        loss = torch.func.functional_call(model, tensors, tuple(inputs))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = getattr(loss, "shape", type(loss).__name__)
            raise ValueError(f"the model returns {got}; expected its loss, one number")
        wanted = [tensors[name] for name in trained]
        return loss, *torch.autograd.grad(loss, wanted, allow_unused=True)

    graph = capture_step(step, tensors, inputs)
    return graph, {1 + i: name for i, name in enumerate(trained)}


class Capturing:
    """A backend for `torch.compile`: AOTAutograd's graphs, run by what `compile` gives.

    Args:
        compile: gets each fragment, the backward lazily, inside the first backward; it
            returns a function of a list of inputs, which may empty it.
    """

    def __init__(self, compile: Compile) -> None:
        self._compile = compile

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Run:
        names = parameter_names(module.graph)

        before: list[Graph] = []

        def forward(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
            before.append(gm.graph)
            return self._boxed(Fragment(gm.graph, {}, False))

        def backward(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
            gradients = gradients_of(gm.graph, names)
            return self._boxed(Fragment(gm.graph, gradients, True, before[0]))

        run: Run = aot_module_simplified()(
            module, inputs, fw_compiler=forward, bw_compiler=backward
        )
        return run

    def _boxed(self, fragment: Fragment) -> Run:
        run: Any = self._compile(fragment)

        def boxed(args: list[Any]) -> Any:
            return run(args)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed


def sameness(module: GraphModule) -> Hashable | None:
    """Equal for graphs of Dynamo that AOTAutograd would make the same of; else None.

    A function of a notebook has its own code on each rank that shares a process, so
    Dynamo brings its graph once a rank. Graphs with constants have equal code and other
    constants; sizes that are symbols belong to the graph that was traced.
    """
    nodes = list(module.graph.nodes)
    kinds = []
    for node in nodes:
        if node.op not in ("placeholder", "call_function", "call_method", "output"):
            return None
        if node.op != "placeholder":
            continue
        value = node.meta.get("example_value")
        real = getattr(node.meta.get("grapharg"), "example", None)  # as it was traced
        if not isinstance(value, torch.Tensor) or value._has_symbolic_sizes_strides:
            return None
        layout = (value.dtype, value.device, value.shape, value.stride())
        learns = isinstance(value, nn.Parameter), value.requires_grad
        kinds.append((node.name, layout, learns, type(real)))
    device = nodes[0].meta["example_value"].device.type if kinds else "cpu"
    modes = (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
    )
    targets = tuple(node.target for node in nodes)
    names = tuple(parameter_names(module.graph).items())
    return module.code, tuple(kinds), targets, names, modes


def parameter_names(graph: Graph) -> dict[int, str]:
    """Of what Dynamo gives to a graph: the names of those that are parameters."""
    names = {}
    places = [node for node in graph.nodes if node.op == "placeholder"]
    for position, node in enumerate(places):
        if isinstance(node.meta.get("example_value"), nn.Parameter):
            names[position] = _name(node)
    return names


def _name(node: Node) -> str:
    """ "layers.0.weight" of L['self']._modules['layers']._modules['0']..."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    if source is None:
        return node.name
    name = source.name() if callable(source.name) else source.name
    parts = [part.partition("'")[0] for part in name.split("['")[2:]]
    plain = [part for part in parts if part]
    return ".".join(plain) if "['" in name and plain else str(name)


def gradients_of(graph: Graph, names: dict[int, str]) -> dict[int, str]:
    """Positions of parameters' gradients in what a backward graph returns.

    Another input that requires a gradient is where a fragment ends, and is not
    averaged: the fragment before it averages what it makes of it.
    """
    descriptions = output_of(graph).meta.get("desc")
    if descriptions is None:
        raise NotImplementedError(
            f"torch {torch.__version__} does not say which result of a backward graph "
            "is which parameter's gradient. Compile with torch 2.13."
        )
    found = {}
    for position, description in enumerate(descriptions):
        index = getattr(getattr(description, "grad_of", None), "idx", None)
        if index in names and isinstance(returned(graph)[position], Node):
            found[position] = names[index]
    return found


def capture(model: nn.Module, *inputs: Any) -> list[Fragment]:
    """Forward and backward graphs of a model, each fragment's in the order of running.

    The model runs once, forward and backward, on `inputs`, and so costs what that
    costs; its `.grad`s are left as they are.

    Args:
        model: unmodified; it returns a tensor or several.
        inputs: of the model.
    """
    found: list[Fragment] = []

    def keep(fragment: Fragment) -> Run:
        found.append(fragment)
        module = GraphModule(
            fragment.graph.owning_module or nn.Module(), fragment.graph
        )
        return lambda args: module.forward(*args)

    compiled = torch.compile(model, backend=Capturing(keep))
    results = pytree.tree_leaves(compiled(*inputs))
    wanted = [p for p in model.parameters() if p.requires_grad]
    loss = sum(
        r.sum() for r in results if isinstance(r, torch.Tensor) and r.requires_grad
    )
    if isinstance(loss, torch.Tensor) and wanted:
        torch.autograd.grad(loss, wanted, allow_unused=True)
    return found
