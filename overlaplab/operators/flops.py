"""What a call of an operator computes: a multiply and an add count as two.

Ours where torch has none (the CPU's attention), or where its own is slow: these are
asked at each operator of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.flop_counter import flop_registry


def flop_formula(func: Any, name: str) -> Callable[..., Any] | None:
    """How much one call of `func` computes.

    Returns:
        `formula(args, kwargs, out)`, an integer or, of symbolic shapes, an expression;
        None where nobody counts it.
    """
    own = _FLOPS.get(name)
    if own is not None:
        return own
    formula = flop_registry.get(func.overloadpacket)
    if formula is None:
        return None

    def count(args: Any, kwargs: Any, out: Any) -> Any:
        return formula(*args, **kwargs, out_val=out)

    return count


def _mm(args: Any, kwargs: Any, out: Any) -> Any:
    return 2 * out.numel() * args[0].shape[-1]


def _addmm(args: Any, kwargs: Any, out: Any) -> Any:
    return 2 * out.numel() * args[1].shape[-1]


def _attention(args: Any, kwargs: Any, out: Any) -> Any:
    query, key, value = args[:3]
    batch_heads, rows = query.shape[0] * query.shape[1], query.shape[2]
    columns, width = key.shape[2], query.shape[3] + value.shape[3]
    return 2 * batch_heads * rows * columns * width


def _attention_backward(args: Any, kwargs: Any, out: Any) -> Any:
    # Scores again, then the gradients of values, weights, queries and keys.
    _, query, key, value = args[:4]
    batch_heads, rows = query.shape[0] * query.shape[1], query.shape[2]
    columns, width = key.shape[2], 3 * query.shape[3] + 2 * value.shape[3]
    return 2 * batch_heads * rows * columns * width


_FLOPS: dict[str, Callable[..., Any]] = {
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
    "addmm_": _addmm,
    "baddbmm": _addmm,
    "baddbmm_": _addmm,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
