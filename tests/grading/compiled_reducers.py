"""Reducers that torch.compile puts into the graph of a backward pass, right and wrong.

A backend's class is imported and compares by its settings: ranks share one compile.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

functional = torch.ops._c10d_functional
aten = torch.ops.aten


class Inserting:
    """A backend that averages every gradient of a graph.

    Args:
        how: one of the methods below.
    """

    def __init__(self, how: str) -> None:
        self.how = how

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Inserting) and other.how == self.how

    def __hash__(self) -> int:
        return hash(self.how)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        def backward(module: torch.fx.GraphModule, _: Any) -> Any:
            output = next(iter(reversed(module.graph.nodes)))
            self.graph, self.output = module.graph, output
            given = output.args[0]
            gradients = list(dict.fromkeys(n for n in given if n is not None))
            for node in gradients:
                _bring_forward(node)
            averaged = getattr(self, self.how)(gradients)
            output.args = (tuple(averaged.get(node, node) for node in given),)
            module.graph.lint()
            module.recompile()
            return make_boxed_func(module)

        def forward(module: torch.fx.GraphModule, _: Any) -> Any:
            return make_boxed_func(module)

        return aot_autograd(fw_compiler=forward, bw_compiler=backward)(graph, inputs)

    # -- what is put in: gradients as nodes, to their averages

    def each(self, gradients):
        """Launched where the gradient is there, waited for at the end."""
        return self.average({node: self.launch(node, after=node) for node in gradients})

    def bucket(self, gradients):
        """Two a bucket, coalesced."""
        sums = {}
        for first in range(0, len(gradients), 2):
            members = gradients[first : first + 2]
            last = max(members, key=list(self.graph.nodes).index)
            with self.graph.inserting_after(last):
                many = functional.all_reduce_coalesced.default
                sent = self.graph.call_function(many, (members, "sum", self.group()))
            for place, node in enumerate(members):
                with self.graph.inserting_before(self.output):
                    one = self.graph.call_function(_item, (sent, place))
                    sums[node] = one
        return self.average(sums)

    def flat(self, gradients):
        """One message for all, packed, and cut up again."""
        with self.graph.inserting_before(self.output):
            views = [self.call(aten.view.default, node, [-1]) for node in gradients]
            packed = self.call(aten.cat.default, views)
            sent = self.call(functional.all_reduce.default, packed, "sum", self.group())
            total = self.call(functional.wait_tensor.default, sent)
            mean = self.call(aten.div.Tensor, total, dist.get_world_size())
            sizes = [node.meta["val"].numel() for node in gradients]
            parts = self.call(aten.split_with_sizes.default, mean, sizes)
            items = [self.call(_item, parts, i) for i in range(len(sizes))]
            shapes = [list(node.meta["val"].shape) for node in gradients]
            return {
                node: self.call(aten.view.default, item, shape)
                for node, item, shape in zip(gradients, items, shapes, strict=True)
            }

    def at_the_end(self, gradients):
        """Right values, all launched behind the whole backward."""
        with self.graph.inserting_before(self.output):
            sums = {node: self.launch(node) for node in reversed(gradients)}
        return self.average(sums)

    def all_but_one(self, gradients):
        return self.each(gradients[1:])

    def twice(self, gradients):
        """The first one's average is averaged again: the same values, sent twice."""
        averaged = self.each(gradients)
        with self.graph.inserting_before(self.output):
            averaged |= self.average(
                {gradients[0]: self.launch(averaged[gradients[0]])}
            )
        return averaged

    def anothers(self, gradients):
        """Two layers of one shape: one is sent, and both get its average."""
        averaged = self.each(gradients[1:])
        return averaged | {gradients[0]: averaged[gradients[1]]}

    def zeros_instead(self, gradients):
        """Messages of the right size, of nothing; the gradients stay at home."""
        with self.graph.inserting_before(self.output):
            for node in gradients:
                nothing = self.call(aten.zeros_like.default, node)
                self.call(functional.wait_tensor.default, self.launch(nothing))
        return {}

    # -- helpers

    def group(self):
        return dist.group.WORLD.group_name

    def call(self, target, *args):
        return self.graph.call_function(target, args)

    def launch(self, node, after=None):
        args = (node, "sum", self.group())
        if after is None:
            return self.call(functional.all_reduce.default, *args)
        with self.graph.inserting_after(after):
            return self.call(functional.all_reduce.default, *args)

    def average(self, sums):
        with self.graph.inserting_before(self.output):
            waits = {
                node: self.call(functional.wait_tensor.default, one)
                for node, one in sums.items()
            }
            size = dist.get_world_size()
            return {n: self.call(aten.div.Tensor, w, size) for n, w in waits.items()}


def _bring_forward(node):
    """Views of what an operator made stand right behind it."""
    chain = []
    while node.target in (aten.t.default, aten.view.default):
        chain.insert(0, node)
        node = node.args[0]
    for view in chain:
        node.append(view)
        node = view


def _item(values, place):
    return values[place]


class Compiled:
    """What a grader calls: the model is compiled in place, nothing is left to wait for.

    Args:
        how: as in `Inserting`.
    """

    def __init__(self, model: torch.nn.Module, how: str) -> None:
        for tensor in model.parameters():
            dist.broadcast(tensor.detach(), 0)
        model.compile(backend=Inserting(how))

    def wait(self) -> None: ...


class Twins(torch.nn.Module):
    """Two biases that are added in one place: one gradient for both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(8))
        self.second = torch.nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + (self.first + self.second)).square().mean()


class InTensorHooks:
    """Averages in hooks of tensors, which run before anybody else's: no graph."""

    def __init__(self, model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), 0)
            parameter.register_hook(self.average)

    def average(self, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    def wait(self) -> None: ...
