"""Kinds of kernels: what slows a collective, and is slowed by it, differs by kind."""

from __future__ import annotations

# Of arithmetic, as torch calls them without "torch.".
DTYPES = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("complex128", "complex64", "complex32"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)
KINDS = "matmul", "attention", "attention backward", "norm", "elementwise"
# Rows are read twice or held: they wait for memory as others do, but differently.
_ROWWISE = ("norm", "softmax", "nll_loss", "cross_entropy")


def kernel_kind(name: str, flops: int) -> str:
    """The kind of an operator's kernels, one of `KINDS`.

    Args:
        name: of the operator, as it is recorded.
        flops: what it computes; counted for matrix products, convolutions and attention
            only. Who has none and is no norm or softmax counts as elementwise.

    >>> kernel_kind("addmm", 1000), kernel_kind("native_layer_norm_backward", 0)
    ('matmul', 'norm')
    >>> kernel_kind("_scaled_dot_product_flash_attention_backward", 1000)
    'attention backward'
    >>> kernel_kind("gelu", 0)
    'elementwise'
    """
    if "attention" in name:
        return "attention backward" if "backward" in name else "attention"
    if flops:
        return "matmul"
    return "norm" if any(word in name for word in _ROWWISE) else "elementwise"


def takes_lists(name: str) -> bool:
    """Whether an operator goes over lists of tensors, as steps of optimizers do.

    >>> takes_lists("_foreach_mul_"), takes_lists("_fused_adamw_")
    (True, True)
    >>> takes_lists("_fused_rms_norm"), takes_lists("mul_")
    (False, False)
    """
    fused = name.startswith("_fused_") and name.endswith("_")
    return fused or name.startswith("_foreach_")


def contention_key(kind: str, *, high_priority: bool) -> str:
    """The key of `Hardware.contention` for kernels of `kind`.

    >>> contention_key("norm", high_priority=True)
    'norm, high priority'
    """
    return f"{kind}, high priority" if high_priority else kind


CONTENTION_KEYS = tuple(
    contention_key(kind, high_priority=high) for kind in KINDS for high in (False, True)
)
