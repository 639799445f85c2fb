"""How many kernels CUDA launches for one call of an operator, where it is not one.

Counted on an H200 (torch 2.11, bfloat16; `python -m overlaplab.bench launches`),
memsets apart; of lists by the rule of ATen's multi_tensor_apply. What cuDNN does
differs with shapes and layouts: counted for images that are not channels-last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Count = Callable[[Any, Any], int]  # of positional and keyword arguments

# ATen/native/cuda/MultiTensorApply.cuh: a launch has so many blocks, each a chunk of
# one tensor, and so many tensors, by how many lists there are.
_CHUNK = 65_536
_BLOCKS = 320
_TENSORS = (110, 64, 48, 36, 30)
_SORTED_FROM = 3072  # indices from which the gradient of an embedding sorts them

FUSED_STEPS = frozenset(
    {"_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"}
)

_COUNTS: dict[str, int] = {
    # One kernel for the gradient of the input, one for those of the parameters.
    "native_layer_norm_backward": 2,
    "_fused_rms_norm_backward": 2,
    "native_batch_norm": 3,
    # The gradient times the output, in a kernel of its own.
    "_softmax_backward_data": 2,
    # Zeros first, of which some are written.
    "nll_loss_backward": 2,
    "mse_loss_backward": 2,
    "max_pool2d_with_indices_backward": 2,
    "mse_loss": 2,  # squares, then their mean
    # Rows of outputs times gradients; the gradients; those of the queries rounded.
    "_scaled_dot_product_efficient_attention_backward": 3,
}


def launch_count(name: str) -> int | Count:
    """The kernels of one call: a number, or what tells it by the arguments."""
    if name.startswith("_foreach_") or name in FUSED_STEPS:
        return _of_norms if name == "_foreach_norm" else _of_lists
    return _BY_ARGUMENTS.get(name, _COUNTS.get(name, 1))


def _of_lists(args: Any, kwargs: Any) -> int:
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and _tensors(arg)]
    # The steps of a fused optimizer are numbers of a tensor, and no list of its own.
    depth = sum(len(of) == len(lists[0]) and of[0].dim() > 0 for of in lists) or 1
    return multi_tensor_launches([tensor.numel() for tensor in lists[0]], depth)


def _of_norms(args: Any, kwargs: Any) -> int:
    return _of_lists(args[:1], kwargs) + 2  # zeros before, sums of the parts behind


def _tensors(values: Sequence[Any]) -> bool:
    return bool(values) and isinstance(values[0], torch.Tensor)


def multi_tensor_launches(sizes: Sequence[int], depth: int) -> int:
    """Launches for lists of tensors that have so many elements each.

    Args:
        depth: how many lists there are.

    >>> multi_tensor_launches([1024 * 1024] * 100, 3)  # 1600 chunks, 320 a launch
    5
    >>> multi_tensor_launches([10] * 100, 3)  # 48 tensors a launch
    3
    """
    most = _TENSORS[min(depth, len(_TENSORS)) - 1]
    launches = tensors = blocks = 0
    for size in sizes:
        chunks = -(-size // _CHUNK)
        tensors += chunks > 0
        for chunk in range(chunks):
            blocks += 1
            is_last = chunk == chunks - 1
            if blocks == _BLOCKS or (tensors == most and is_last):
                launches += 1
                blocks, tensors = 0, 0 if is_last else 1  # the rest of a tensor
    return launches + bool(blocks)


def _embedding_backward(args: Any, kwargs: Any) -> int:
    return 21 if args[1].numel() > _SORTED_FROM else 2


def _shared_keys(args: Any, kwargs: Any) -> int:
    query, key = args[1:3]
    return 3 if query.shape[1] == key.shape[1] else 5  # sums over heads


def _after_seed(position: int) -> Count:
    """With dropout, at `position` of the arguments, the random numbers' seed first."""

    def count(args: Any, kwargs: Any) -> int:
        dropout = args[position] if len(args) > position else kwargs.get("dropout_p", 0)
        return 1 + bool(dropout)

    return count


def _convolution(args: Any, kwargs: Any) -> int:
    return 4 + (args[2] is not None)  # layouts there and back, and the bias


def _convolution_backward(args: Any, kwargs: Any) -> int:
    wanted = args[10]
    return 10 + int(wanted[2])


_BY_ARGUMENTS: dict[str, Count] = {
    "embedding_dense_backward": _embedding_backward,
    "_scaled_dot_product_flash_attention": _after_seed(3),
    "_scaled_dot_product_efficient_attention": _after_seed(5),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _shared_keys,
    "_scaled_dot_product_flash_attention_backward": _shared_keys,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}
