"""Exercise 2.4: does this kernel communicate? Names of today, and names unseen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from overlaplab.grading.exercise import Sheet, exercise
from overlaplab_course.lab02.rows import Row, kernel, other

NCCL = "NCCL's kernels, of every version"
RCCL = "RCCL's, on cards of AMD"
OTHERS = "collectives that have no nccl in their names"
ARGS = "a kernel whose args name a collective, whatever it is called"
COMPUTE = "kernels that compute are none, known or not"
NO_KERNELS = "what is no kernel is none"

_HINTS = {
    NCCL: "what do ncclKernel_, ncclDevKernel_ and ncclSymkDevKernel_ share?",
    RCCL: "nccl is not in rcclGenericKernel",
    OTHERS: "the second half of the table above",
    ARGS: 'row.args.get("Collective name")',
    COMPUTE: "list what communicates; what computes has no end of names",
    NO_KERNELS: 'row.category must be "kernel"',
}

Classify = Callable[[Row], Any]


def _kernels(*names: str) -> tuple[Row, ...]:
    return tuple(kernel(name, 7, 0, 1) for name in names)


ROWS: Mapping[str, tuple[Row, ...]] = {
    NCCL: _kernels(
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ...)",
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, ...)",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096>)",
        "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
        "ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs)",
        "void NCCL_AllReduce_tree_kernel<float>(...)",
    ),
    RCCL: _kernels(
        "void rcclGenericKernel<1>(ncclDevKernelArgsStorage<4096ul>)",
        "rcclGenericKernel_4_false",
    ),
    OTHERS: _kernels(
        "void c10d::symmetric_memory::(anonymous namespace)::"
        "multimem_all_reduce_kernel<c10::BFloat16, 16>(...)",
        "void multimem_one_shot_all_reduce_kernel<c10::BFloat16, 8>(...)",
        "multimem_all_gather_kernel",
        "void one_shot_all_reduce_kernel<float, 16, 2>(...)",
        "void two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 8>(...)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(...)",
        "void vllm::cross_device_reduce_2stage<half, 4>(...)",
    ),
    ARGS: (
        kernel("userbuffers_rs_oop", 7, 0, 1, **{"Collective name": "reduce_scatter"}),
        kernel(
            "my_ring", 20, 0, 1, **{"Collective name": "allreduce", "dtype": "Float"}
        ),
    ),
    COMPUTE: (
        *_kernels(
            "my_fused_op",
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(...)",
            "void cublasLt::splitKreduce_kernel<32, 16, int, float>(...)",
            "void at::native::_scatter_gather_elementwise_kernel<128, 8>(...)",
            "void at::native::vectorized_gather_kernel<16, long>(...)",
            "triton_red_fused__to_copy_sum_3",
            "broadcast_add_kernel",
            "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN",
        ),
        kernel("pointwise_17", 20, 0, 1, grid=[8, 1, 1]),
    ),
    NO_KERNELS: (
        other("gpu_user_annotation", "nccl:all_reduce", 20, 0, 1),
        other("user_annotation", "nccl:_all_gather_base", 1, 0, 1),
        other("cpu_op", "c10d::allreduce_", 1, 0, 1),
        other("cpu_op", "record_param_comms", 1, 0, 1)._replace(
            args={"Collective name": "allreduce"}
        ),
        other("cuda_runtime", "ncclLaunchKernel", 1, 0, 1),
    ),
}


@exercise(
    "2.4",
    title="does it communicate?",
    solution="is_communication",
    verifies=tuple(ROWS),
    points=2,
    timeout_s=10.0,
)
def grade_names(sheet: Sheet, is_communication: Classify) -> None:
    """Every row; those that are wrong are counted under their family."""
    sheet.ran(f"{sum(map(len, ROWS.values()))} rows, most of them not in the lesson")
    for sentence, rows in ROWS.items():
        right = sentence not in (COMPUTE, NO_KERNELS)
        wrong = [row for row in rows if bool(is_communication(row)) is not right]
        first = wrong[0] if wrong else None
        sheet.expect(
            sentence,
            not wrong,
            seen=""
            if first is None
            else f"{not right} for a {first.category}: {first.name}"
            + (f"\n  with args {dict(first.args)}" if first.args else "")
            + (f"\n(and {len(wrong) - 1} more like it)" if len(wrong) > 1 else ""),
            expected=f"{right}",
            hint=_HINTS[sentence],
        )
