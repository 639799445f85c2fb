"""Kernels that CUDA has and a CPU lacks, so that a CPU launches what CUDA launches.

On a CPU, torch takes apart what it runs as one kernel on CUDA: RMSNorm, dropout,
attention with dropout; its attention without keeps less and lays gradients out in
another way. While `launching_as_cuda` is open, what chooses (`rms_norm`, `dropout`,
`scaled_dot_product_attention`) chooses as it does for CUDA, and the kernels that it
then asks for are here, written with the operators that a CPU has: a mode that watches
sees one operator, and autograd saves what it saves on CUDA. Values are those of the
parts up to rounding, and draw the same random numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from overlaplab.operators.facts import python_body

_aten: Any = torch.ops.aten
Maybe = Tensor | None
_KEYS = "CPU", "AutogradCPU"  # inference tensors have only the first

# Random states from which masks are drawn again: 5 KB on a CPU, two numbers on CUDA,
# so what autograd keeps is the key. By call; forgotten when it is closed.
_states: dict[int, Tensor] = {}
_numbers = itertools.count(1)


@contextlib.contextmanager
def launching_as_cuda(here: Callable[[], bool]) -> Iterator[None]:
    """While open, CPU tensors, real or fake, get CUDA's kernels where `here()` says so
    of the calling thread."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for kernel in _KERNELS:  # called as torch calls its operator
        library.impl(kernel.__name__, kernel, "CPU")
    for name, choice in _CHOICES.items():
        chosen = _where(here, choice, getattr(_aten, name).default)
        for key in _KEYS:
            library.impl(name, chosen, key)
    _forget_dispatch()
    first = next(_numbers)
    try:
        yield
    finally:
        library._destroy()
        _forget_dispatch()
        for number in [n for n in _states if n > first]:
            del _states[number]


def _forget_dispatch() -> None:
    """Have Python look up again which kernels these operators have.

    It keeps what it found (for what traces: torch.compile, make_fx). A choice that is
    gone would leave an operator without any backward, and no error.
    """
    for name in (*(kernel.__name__ for kernel in _KERNELS), *_CHOICES):
        for key in _KEYS:
            dispatch_key = getattr(torch._C.DispatchKey, key)
            getattr(_aten, name).default._uncache_dispatch(dispatch_key)


def take_apart(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Run the parts of a composite operator: CUDA's choice, else torch's own."""
    body = python_body(func)
    if body is not None:
        return body(*args, **kwargs)
    choice = _CHOICES.get(name)
    out = None if choice is None else choice(*args, **kwargs)
    return func.decompose(*args, **kwargs) if out is None else out


def _where(
    here: Callable[[], bool], choice: Callable[..., Any], torchs: Any
) -> Callable[..., Any]:
    """`choice` in such threads, unless it has none; torch's own elsewhere."""

    def choose(*args: Any, **kwargs: Any) -> Any:
        out = choice(*args, **kwargs) if here() else None
        return torchs.decompose(*args, **kwargs) if out is None else out

    return choose


# Choices: None is torch's own.


def rms_norm(
    input: Tensor, shape: Sequence[int], weight: Maybe = None, eps: float | None = None
) -> Any:
    return _aten._fused_rms_norm(input, shape, weight, eps)[0]


def dropout(input: Tensor, p: float, train: bool) -> Any:
    if not train or not 0 < p < 1 or not input.numel():
        return None
    return _aten.native_dropout(input, p, True)[0]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Maybe = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Flash attention where CUDA has it; else, without dropout, a CPU's own kernel."""
    if not 0 <= dropout_p < 1 or query.dim() != 4 or not query.numel():
        return None
    cuda: Any = torch.backends.cuda
    is_plain = attn_mask is None and cuda.flash_sdp_enabled()
    if is_plain and _has_flash(query, key, value, is_causal):
        flash = _aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if (
        dropout_p == 0
        or query.dtype == torch.float64
        or enable_gqa
        or not cuda.mem_efficient_sdp_enabled()
    ):
        return None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -math.inf).to(query.dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    efficient = _aten._scaled_dot_product_efficient_attention
    qkv = query, key, value
    return efficient(*qkv, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def _has_flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    """Whether flash attention takes these (ATen/native/transformers/cuda/sdp_utils)."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    width = query.shape[-1]
    square = not is_causal or query.shape[2] == key.shape[2]
    heads = query.shape[1] % key.shape[1] == 0 and key.shape[1] == value.shape[1]
    known = width == value.shape[-1] <= 256 and width % 8 == 0
    return half and square and heads and known


_CHOICES: dict[str, Callable[..., Any]] = {
    choice.__name__: choice
    for choice in (rms_norm, dropout, scaled_dot_product_attention)
}


# Kernels, forward and backward.


def _fused_rms_norm(
    input: Tensor, shape: Sequence[int], weight: Maybe, eps: float | None
) -> Any:
    return _aten._fused_rms_norm.default.decompose(input, shape, weight, eps)


def _fused_rms_norm_backward(
    grad: Tensor,
    input: Tensor,
    shape: Sequence[int],
    rstd: Tensor,
    weight: Maybe,
    wanted: Sequence[bool],
) -> tuple[Maybe, Maybe]:
    dims = list(range(input.dim() - len(shape), input.dim()))
    normal = input.to(rstd.dtype) * rstd
    of_normal = grad.to(rstd.dtype) if weight is None else grad.to(rstd.dtype) * weight
    of_input = of_weight = None
    if wanted[0]:
        mean = (of_normal * normal).mean(dims, keepdim=True)
        of_input = (rstd * (of_normal - normal * mean)).to(input.dtype)
    if wanted[1] and weight is not None:
        of_weight = (grad * normal).flatten(0, dims[0] - 1).sum(0)
        of_weight = of_weight.reshape(weight.shape).to(weight.dtype)
    return of_input, of_weight


def _scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    number = _keep_state() if dropout_p else 0
    seed = torch.tensor((number, 0)).view(torch.uint64)
    if dropout_p:
        out = _attend(query, key, value, None, dropout_p, is_causal, scale)
        sums = _no_sums(query, query.shape[2])
    else:
        attend = _aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = attend(query, key, value, 0.0, is_causal, scale=scale)
    sizes = query.shape[2], key.shape[2]
    rest = torch.zeros((), dtype=torch.uint64), query.new_empty(0)
    return out, sums, None, None, *sizes, seed, *rest


def _scaled_dot_product_flash_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Maybe,
    cum_seq_k: Maybe,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    seed: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    found: Sequence[Tensor]
    if dropout_p:
        how = dropout_p, is_causal, scale, int(seed.view(torch.int64)[0])
        found = _attend_backward(grad, query, key, value, None, *how)
    else:
        kept = grad, query, key, value, out, logsumexp
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = backward(*kept, 0.0, is_causal, scale=scale)
    laid_out = zip((query, key, value), found, strict=False)  # each as its input
    return tuple(torch.empty_like(like).copy_(of) for like, of in laid_out)


def _scaled_dot_product_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Maybe,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    number = _keep_state()
    out = _attend(query, key, value, bias, dropout_p, is_causal, scale)
    sums = _no_sums(query, -(-query.shape[2] // 32) * 32)
    return out, sums, torch.tensor(number), torch.tensor(0)


def _scaled_dot_product_efficient_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Maybe,
    out: Tensor,
    logsumexp: Tensor,
    seed: Tensor,
    unused: Tensor,
    dropout_p: float,
    wanted: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Maybe, ...]:
    how = dropout_p, is_causal, scale, int(seed)
    *found, of_bias = _attend_backward(grad, query, key, value, bias, *how)
    gradients = (_by_tokens(of.to(query.dtype)) for of in found)
    return (*gradients, of_bias.to(query.dtype) if wanted[3] else None)


_KERNELS = (
    _fused_rms_norm,
    _fused_rms_norm_backward,
    _scaled_dot_product_flash_attention,
    _scaled_dot_product_flash_attention_backward,
    _scaled_dot_product_efficient_attention,
    _scaled_dot_product_efficient_attention_backward,
)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Maybe,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """The output, laid out as CUDA's: heads within tokens."""
    shared = query.shape[1] != key.shape[1]
    out, _ = _aten._scaled_dot_product_attention_math(
        *(query, key, value, bias, dropout_p, is_causal),
        scale=scale,
        enable_gqa=shared,
    )
    return _by_tokens(out)


def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Maybe,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    number: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and bias, with the mask of call `number`."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v, g = (t.to(dtype) for t in (query, key, value, grad))
    shared = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(shared, dim=1) for t in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q @ k.mT * scale
    if is_causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores.masked_fill_(above, -math.inf)
    if bias is not None:
        scores += bias
    weights = _aten._safe_softmax(scores, -1)
    generator = torch.Generator()
    generator.set_state(_states[number])
    kept = torch.empty(scores.shape, dtype=torch.bool)
    kept = kept.bernoulli_(1 - dropout_p, generator=generator) / (1 - dropout_p)
    of_value = (weights * kept).mT @ g
    of_weights = (g @ v.mT) * kept
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    of_query, of_key = of_scores @ k * scale, of_scores.mT @ q * scale
    of_key, of_value = (t.unflatten(1, (-1, shared)).sum(2) for t in (of_key, of_value))
    return of_query, of_key, of_value, of_scores


def _by_tokens(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


def _no_sums(query: Tensor, rows: int) -> Tensor:
    """Where CUDA keeps the logarithms of sums, which the backward here needs not."""
    return query.new_zeros((*query.shape[:2], rows), dtype=torch.float32)


def _keep_state() -> int:
    number = next(_numbers)
    _states[number] = torch.get_rng_state()
    return number
