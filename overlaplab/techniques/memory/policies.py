"""What a block may do about its activations: keep them, or compute some of them again.

A policy makes, of a block's forward, another function that gives the same values and
the same gradients. Knows neither plans nor costs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Forward = Callable[..., Any]

# Attention, as autograd's operators call it: expensive to compute, cheap to keep.
_ATTENTION = frozenset(
    """
    _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_fused_attention_overrideable _flash_attention_forward
    _efficient_attention_forward flex_attention
    """.split()  # noqa: SIM905 (wrapped)
)
_MATMULS = frozenset(
    """
    mm addmm bmm baddbmm linear convolution _convolution cudnn_convolution
    """.split()  # noqa: SIM905 (wrapped)
)


@dataclass(frozen=True, slots=True)
class Policy:
    """How a block is run.

    Args:
        name: in plans.
        attention: its results are kept while the rest is computed again.
        matmul_stride: so are those of every matmul (1), every second (2), ...; 0: none.
        recompute: whether anything is computed again by `torch.utils.checkpoint`.
        compiled: by `torch.compile`, the block alone.
        budget: torch's own activation budget of a compiled block, a fraction of what it
            would keep by itself.
        backend: of `torch.compile`.
    """

    name: str
    attention: bool = False
    matmul_stride: int = 0
    recompute: bool = False
    compiled: bool = False
    budget: float = 1.0
    backend: str = "inductor"


KEEP = Policy("keep")
RECOMPUTE = Policy("recompute", recompute=True)
EAGER = (
    KEEP,
    RECOMPUTE,
    Policy("keep attention", attention=True, recompute=True),
    Policy("keep attention, matmuls", attention=True, matmul_stride=1, recompute=True),
    Policy(
        "keep attention, every 2nd matmul",
        attention=True,
        matmul_stride=2,
        recompute=True,
    ),
)
BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)


def compiled(
    budgets: tuple[float, ...] = BUDGETS, backend: str = "inductor"
) -> tuple[Policy, ...]:
    """A menu of compiled blocks: torch's activation budgets, and all recomputed.

    Args:
        budgets: fractions, 1.0 first: a block that recomputes only what is free.
        backend: of `torch.compile`; one with a partitioner, for budgets to count.
    """
    return (
        *(
            Policy(f"compiled {b:g}", compiled=True, budget=b, backend=backend)
            for b in budgets
        ),
        Policy("compiled, recompute", recompute=True, compiled=True, backend=backend),
    )


def whole(
    budgets: tuple[float, ...] = (1.0,), backend: str = "inductor"
) -> tuple[Policy, ...]:
    """The whole model compiled, under torch's activation budgets.

    Args:
        budgets, backend: see `compiled`.
    """
    return tuple(
        Policy(f"whole compiled {b:g}", compiled=True, budget=b, backend=backend)
        for b in budgets
    )


def runner(policy: Policy, block: nn.Module, *, replays: bool = True) -> Forward:
    """What to call instead of `block.forward`.

    Args:
        policy: how.
        block: whose forward; not changed by this.
        replays: whether what is computed again draws the same random numbers. False
            saves the look at the generator, for blocks that draw none.
    """
    forward = own_forward(block)
    if policy.compiled:
        of_class = type(block).forward
        if policy.recompute:  # in the graph, where the compiler sees both
            of_class = _recomputed_in_graph
        code = _own_code(of_class, type(block).__name__, policy)
        made = torch.compile(
            code, backend=_backend(policy.backend, policy.budget), dynamic=False
        )
        # Not a method that is compiled: a copy of the model would keep this block.
        return functools.partial(made, block)
    if policy.recompute:
        return functools.partial(_recomputed, policy, block, forward, replays)
    return forward


def compile_part(model: nn.Module, method: str, backend: str) -> None:
    """Compile a method of `model`, until it is deleted from the object."""
    code = getattr(type(model), method)
    made = torch.compile(code, backend=backend, dynamic=False)
    model.__dict__[method] = functools.partial(made, model)


def own_forward(block: nn.Module) -> Forward:
    """The forward that the block's class has, whatever was put in its place."""
    return types.MethodType(type(block).forward, block)


def _recomputed(
    policy: Policy,
    block: nn.Module,
    forward: Forward,
    replays: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():  # the compiler counts statistics once by itself
        return _recomputed_in_a_whole(policy, forward, *args, **kwargs)
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        preserve_rng_state=replays,
        context_fn=functools.partial(_contexts, policy, block),
        **kwargs,
    )


def _recomputed_in_a_whole(
    policy: Policy, forward: Forward, *args: Any, **kwargs: Any
) -> Any:
    """In the graph of somebody who compiles the model, or more, with its plan."""
    if not (policy.attention or policy.matmul_stride):
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    contexts = functools.partial(_selective_contexts, policy)
    return checkpoint(
        forward, *args, use_reentrant=False, context_fn=contexts, **kwargs
    )


def _recomputed_in_graph(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return type(block).forward(block, *args, **kwargs)

    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _contexts(policy: Policy, block: nn.Module) -> tuple[Any, Any]:
    """For the forward, and for what is computed again."""
    if not (policy.attention or policy.matmul_stride):
        return contextlib.nullcontext(), _FrozenStatistics(block)
    first, again = _selective_contexts(policy)
    return first, _FrozenStatistics(block, again)


def _selective_contexts(policy: Policy) -> tuple[Any, Any]:
    contexts: Any = create_selective_checkpoint_contexts
    first, again = contexts(_Selection(policy))
    return first, again


class _Selection:
    """Which results are kept: the same ones when they are looked up again."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._counts = {False: itertools.count(), True: itertools.count()}

    def __call__(self, context: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        name = func._schema.name.partition("::")[2] if hasattr(func, "_schema") else ""
        stride = self._policy.matmul_stride
        keeps = self._policy.attention and name in _ATTENTION
        if stride and name in _MATMULS:
            keeps = next(self._counts[context.is_recompute]) % stride == 0
        if keeps:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


# Whose running statistics a second forward leaves as they are.
BATCH_NORM = nn.modules.batchnorm._BatchNorm


class _FrozenStatistics:
    """Batch statistics count once, though they are computed twice.

    It is entered once for each time that a block is computed again: a graph that is
    kept (`retain_graph`, `create_graph`) may go backward more than once.

    Args:
        block: whose.
        inner: a context to be in as well.
    """

    def __init__(self, block: nn.Module, inner: Any = None) -> None:
        self._block = block
        self._inner = inner or contextlib.nullcontext()
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._inner)
            stack.enter_context(_frozen_statistics(self._block))
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool:
        return bool(self._entered.pop().__exit__(*error))


@contextlib.contextmanager
def _frozen_statistics(block: nn.Module) -> Iterator[None]:
    """Batch statistics count once, though they are computed twice."""
    norms = [
        m
        for m in block.modules()
        if isinstance(m, BATCH_NORM) and m.training and m.track_running_stats
    ]
    momenta = [norm.momentum for norm in norms]
    counts = [norm.num_batches_tracked for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, count in zip(norms, momenta, counts, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count


@functools.cache
def _own_code(function: Any, class_name: str, policy: Policy) -> Any:
    """A copy of `function` with a code object of its own, for each class and policy.

    Dynamo keeps what it compiled by code object, and gives up, without a word, after
    eight graphs of one: a menu may have more.
    """
    if not isinstance(function, types.FunctionType):
        return function
    name = f"{class_name}_{policy.name}".replace(" ", "_")
    copied = types.FunctionType(
        function.__code__.replace(co_name=name),
        function.__globals__,
        name,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def budgeted(name: str, budget: float) -> Callable[..., Any]:
    """A compiler of its own, under torch's activation budget.

    Dynamo keeps what it compiled by code and backend: under one name a block would get
    the graph of another budget.
    """
    # Here, since the compiler takes seconds to import.
    from torch._dynamo.backends.registry import lookup_backend
    from torch._functorch import config as functorch_config

    inner = lookup_backend(name)

    def compile_graph(module: Any, inputs: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=budget):
            return inner(module, inputs)

    return compile_graph


_backend = functools.cache(budgeted)  # by all blocks under one budget
