"""Ranks launch what CUDA launches as one kernel, with the values of its parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from overlaplab import streams
from overlaplab.cluster.virtual import run_virtual
from overlaplab.program import Program

Call = Callable[..., Tensor]
WIDTH = 8


def _rows(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def _qkv(dtype: torch.dtype, kv_heads: int = 4) -> list[Tensor]:
    return [_rows(dtype, 2, n, 6, WIDTH) for n in (4, kv_heads, kv_heads)]


def _attend(*qkv: Tensor, **how: Any) -> Tensor:
    return F.scaled_dot_product_attention(*qkv, dropout_p=0.2, **how)


_plain = F.scaled_dot_product_attention


def _masked(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return _attend(query, key, value, attn_mask=bias)


def _boolean(*qkv: Tensor) -> Tensor:
    mask = torch.ones(6, 6, dtype=torch.bool).tril(1)
    return _attend(*qkv, attn_mask=mask)


def _causal(*qkv: Tensor) -> Tensor:
    return _attend(*qkv, is_causal=True, scale=0.3)


def _shared(*qkv: Tensor) -> Tensor:
    return _attend(*qkv, enable_gqa=True)


BF16, FP32 = torch.bfloat16, torch.float32
FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
# name -> what is called with which tensors, and the kernel that is to be launched
CASES: dict[str, tuple[Call, Callable[[], list[Tensor]], str]] = {
    "rms_norm": (
        lambda x, w: F.rms_norm(x, (WIDTH,), w),
        lambda: [_rows(FP32, 3, 5, WIDTH), _rows(FP32, WIDTH)],
        "_fused_rms_norm",
    ),
    "rms_norm, two dimensions": (
        lambda x, w: F.rms_norm(x, (5, WIDTH), w, 1e-3),
        lambda: [_rows(FP32, 3, 5, WIDTH), _rows(FP32, 5, WIDTH)],
        "_fused_rms_norm",
    ),
    "rms_norm, halves": (
        lambda x, w: F.rms_norm(x, (WIDTH,), w),
        lambda: [_rows(BF16, 3, 5, WIDTH), _rows(BF16, WIDTH)],
        "_fused_rms_norm",
    ),
    "rms_norm without a weight": (
        lambda x: F.rms_norm(x, (WIDTH,)),
        lambda: [_rows(FP32, 3, WIDTH)],
        "_fused_rms_norm",
    ),
    "dropout": (
        lambda x: F.dropout(x, 0.3),
        lambda: [_rows(FP32, 7, WIDTH)],
        "native_dropout",
    ),
    "dropout, halves": (
        lambda x: F.dropout(x, 0.3),
        lambda: [_rows(BF16, 7, WIDTH)],
        "native_dropout",
    ),
    "attention": (_attend, lambda: _qkv(FP32), EFFICIENT),
    "attention, causal": (_causal, lambda: _qkv(FP32), EFFICIENT),
    "attention, a bias": (
        _masked,
        lambda: [*_qkv(FP32), _rows(FP32, 2, 1, 6, 6)],
        EFFICIENT,
    ),
    "attention, a mask": (_boolean, lambda: _qkv(FP32), EFFICIENT),
    "attention, halves": (_attend, lambda: _qkv(BF16), FLASH),
    "attention, halves, causal": (_causal, lambda: _qkv(BF16), FLASH),
    "attention, halves, keys shared": (_shared, lambda: _qkv(BF16, 2), FLASH),
    "attention without dropout": (_plain, lambda: _qkv(BF16), FLASH),
    "attention without dropout, causal, keys shared": (
        partial(_plain, is_causal=True, enable_gqa=True),
        lambda: _qkv(BF16, 2),
        FLASH,
    ),
}


def _run(call: Call, make: Callable[[], list[Tensor]]) -> list[Tensor]:
    """The result, the gradients, and the next random number, after the same seed."""
    torch.manual_seed(3)
    tensors = make()
    out = call(*tensors)
    gradients = torch.autograd.grad(out, tensors, torch.ones_like(out))
    return [out.detach(), *gradients, torch.rand(())]


def _everything() -> dict[str, list[Tensor]]:
    return {name: _run(call, make) for name, (call, make, _) in CASES.items()}


def _in_turn() -> None:
    for name, (call, make, _) in CASES.items():
        with streams.annotate(name):
            _run(call, make)


@pytest.fixture(scope="module")
def values() -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    """On a rank, and in a CPU process."""
    (on_rank,), _ = run_virtual(_everything, world_size=1)
    return on_rank, _everything()


def _by_case(program: Program) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {name: [] for name in CASES}
    for op in program.ranks[0]:
        if op.phase:
            row = op.name, op.read_bytes, op.write_bytes, op.flops
            found[op.label].append(row)
    return found


@pytest.fixture(scope="module")
def launched() -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """With values, and of fake tensors."""
    return tuple(
        _by_case(run_virtual(_in_turn, world_size=1, fake=fake)[1])
        for fake in (False, True)
    )


@pytest.mark.parametrize("name", CASES)
def test_values_gradients_and_the_generator_are_those_of_the_parts(
    name: str, values: tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]
) -> None:
    (out, *gradients, drawn), (expected, *of_parts, next_drawn) = (
        of[name] for of in values
    )
    assert torch.equal(out, expected) and torch.equal(drawn, next_drawn)
    for gradient, of_part in zip(gradients, of_parts, strict=True):
        assert gradient.dtype == of_part.dtype
        # Other orders of the same sums; halves are rounded at other places, too.
        least = 2e-2 if gradient.dtype == BF16 else 1e-6
        torch.testing.assert_close(gradient, of_part, rtol=least, atol=2 * least)


@pytest.mark.parametrize("name", CASES)
def test_one_kernel_is_launched_each_way(
    name: str, launched: tuple[dict[str, list[Any]], dict[str, list[Any]]]
) -> None:
    kernel = CASES[name][2]
    names = [of[0] for of in launched[0][name]]
    assert [n for n in names if n.startswith(("_", "native"))] == [
        kernel,
        f"{kernel}_backward",
    ]
    assert not {"mm", "bmm", "bernoulli_", "pow"} & set(names)


def test_fake_tensors_launch_the_same_kernels_of_the_same_bytes(
    launched: tuple[dict[str, list[Any]], dict[str, list[Any]]],
) -> None:
    assert launched[0] == launched[1]


def _bytes_of_dropout() -> None:
    x = _rows(FP32, 16, WIDTH)
    F.dropout(x, 0.5).backward(torch.ones_like(x))


def test_dropout_keeps_a_byte_for_each_element() -> None:
    _, program = run_virtual(_bytes_of_dropout, world_size=1)
    forward = next(op for op in program.ranks[0] if op.name == "native_dropout")
    size = 16 * WIDTH
    assert (forward.read_bytes, forward.write_bytes) == (4 * size, 4 * size + size)
    (mask,) = (s for s in program.storages if s.bytes == size)
    assert mask.freed is not None  # with the graph


def test_attention_with_dropout_allocates_no_weights() -> None:
    def attend() -> None:
        call, make, _ = CASES["attention, halves"]
        _run(call, make)

    _, program = run_virtual(attend, world_size=1)
    largest = max(s.bytes for s in program.storages)
    assert largest == 2 * 4 * 6 * WIDTH * 2


def test_what_flash_attention_refuses_on_cuda_is_a_cpus_own() -> None:
    def attend() -> None:
        query, key, value = (t.detach() for t in _qkv(BF16))
        _plain(query, key[:, :, :3], value[:, :, :3], is_causal=True)  # not square
        _plain(*(t[..., :6] for t in (query, key, value)))  # to be padded
        _plain(query.float(), key.float(), value.float())

    _, program = run_virtual(attend, world_size=1)
    names = [op.name for op in program.ranks[0] if "attention" in op.name]
    assert names == [f"{FLASH}_for_cpu"] * 3


def _head_and_loss(in_chunks: bool) -> Tensor:
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=4) if in_chunks else None
    torch.manual_seed(3)
    x, weight = _rows(FP32, 16, WIDTH), _rows(FP32, 32, WIDTH)
    targets = torch.randint(32, (16,))
    loss = F.linear_cross_entropy(x, weight, targets, options=options)
    gradients = torch.autograd.grad(loss, (x, weight))
    return torch.cat([part.detach().flatten() for part in (loss, *gradients)])


@pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="torch before 2.13 has no such loss"
)
@pytest.mark.parametrize("fake", [False, True])
def test_a_head_and_loss_in_chunks_are_recorded_chunk_by_chunk(fake: bool) -> None:
    runs = {
        chunks: run_virtual(_head_and_loss, (chunks,), world_size=1, fake=fake)
        for chunks in (False, True)
    }
    whole, parts = (program.ranks[0] for _, program in runs.values())
    assert sum(op.flops > 0 for op in whole) == 3
    assert sum(op.flops > 0 for op in parts) == 3 * 4  # a chunk of four rows each
    assert sum(op.flops for op in parts) == sum(op.flops for op in whole)
    logits = 4 * 16 * 32
    largest = {c: max(s.bytes for s in p.storages) for c, (_, p) in runs.items()}
    assert largest[False] >= logits and largest[True] < logits
    if not fake:
        (one,), (other,) = (values for values, _ in runs.values())
        torch.testing.assert_close(one, other)


def test_a_choice_of_the_user_is_kept() -> None:
    def attend() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            _attend(*_qkv(FP32))

    _, program = run_virtual(attend, world_size=1)
    assert "bmm" in {op.name for op in program.ranks[0]}


def test_outside_of_ranks_nothing_has_changed() -> None:
    x = torch.randn(3, WIDTH, requires_grad=True)

    def rank() -> None:
        F.rms_norm(x, (WIDTH,))

    run_virtual(rank, world_size=1)
    assert "Fused" not in type(F.rms_norm(x, (WIDTH,)).grad_fn).__name__
    with pytest.raises(NotImplementedError, match="_scaled_dot_product_flash"):
        torch.ops.aten._scaled_dot_product_flash_attention(*_qkv(BF16))


def test_checkpointed_dropout_draws_the_same_mask_again() -> None:
    def rank(again: bool) -> Tensor:
        torch.manual_seed(5)
        q, k, v = _qkv(FP32)
        if again:
            out = torch.utils.checkpoint.checkpoint(
                _causal, q, k, v, use_reentrant=False
            )
        else:
            out = _causal(q, k, v)
        (found,) = torch.autograd.grad(out.sum(), q)
        return found

    (plain,), _ = run_virtual(rank, (False,), world_size=1)
    (again,), _ = run_virtual(rank, (True,), world_size=1)
    assert torch.equal(plain, again)


def _steps(make: Callable[[list[Tensor]], Any], clip: bool) -> list[Tensor]:
    torch.manual_seed(0)
    weights: list[Any] = [nn.Parameter(torch.randn(3, 2)) for _ in range(3)]
    optimizer = make(weights)
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn(3, 2)
        if clip:
            nn.utils.clip_grad_norm_(weights, 0.5)
        optimizer.step()
    return [weight.detach() for weight in weights]


OPTIMIZERS: dict[str, tuple[Callable[[list[Tensor]], Any], list[str]]] = {
    "SGD": (
        lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9),
        ["_foreach_mul_", "_foreach_add_", "_foreach_add_"],
    ),
    "AdamW": (
        lambda w: torch.optim.AdamW(w, lr=0.1),
        [
            *("_foreach_mul_", "_foreach_lerp_", "_foreach_mul_", "_foreach_addcmul_"),
            *("_foreach_sqrt", "_foreach_div_", "_foreach_add_", "_foreach_addcdiv_"),
        ],
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("fake", [False, True])
def test_an_optimizer_steps_all_its_parameters_at_once(name: str, fake: bool) -> None:
    make, expected = OPTIMIZERS[name]
    (stepped,), program = run_virtual(_steps, (make, True), world_size=1, fake=fake)
    names = [op.name for op in program.ranks[0] if op.name.startswith("_foreach")]
    last = len(names) - 1 - names[::-1].index("_foreach_norm")
    assert names[last:] == ["_foreach_norm", "_foreach_mul_", *expected]
    if not fake:
        for weight, alone in zip(stepped, _steps(make, True), strict=True):
            # The same arithmetic in another order.
            torch.testing.assert_close(weight, alone, rtol=1e-5, atol=1e-6)


def test_who_says_foreach_false_steps_them_one_by_one() -> None:
    def make(weights: list[Tensor]) -> Any:
        return torch.optim.SGD(weights, lr=0.1, foreach=False)

    _, program = run_virtual(_steps, (make, False), world_size=1)
    assert sum(op.name == "add_" for op in program.ranks[0]) == 9


def test_inference_mode_launches_the_parts_of_what_it_calls() -> None:
    def infer() -> None:
        linear = nn.Linear(WIDTH, WIDTH)
        with torch.inference_mode():
            x = linear(torch.randn(3, WIDTH))
            F.dropout(F.rms_norm(x, (WIDTH,)))

    _, program = run_virtual(infer, world_size=1)
    *_, linear, norm, dropped = program.ranks[0]
    assert (linear.name, linear.flops) == ("addmm", 2 * 3 * WIDTH * WIDTH)
    assert (norm.name, dropped.name) == ("_fused_rms_norm", "native_dropout")
