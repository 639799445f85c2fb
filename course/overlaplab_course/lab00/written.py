"""Programs written down in the place of recorded ones, for knobs and predictions.

They have the operators that the virtual cluster records (a test holds them together),
and cost no run: sizes of real GPUs take no memory here.
"""

from __future__ import annotations

from functools import lru_cache

from overlaplab.program import Program, ProgramBuilder


@lru_cache(maxsize=64)
def written_step(
    num_layers: int,
    width: int,
    batch: int,
    *,
    dtype: str = "float32",
    element_bytes: int = 4,
) -> Program:
    """Forward and backward pass of equal linear layers with ReLU: `train_step`."""
    flops = 2 * batch * width * width
    rows = element_bytes * batch * width  # of one activation
    weight = element_bytes * width * width
    bias = element_bytes * width
    b = ProgramBuilder()

    def launch(name: str, phase: str, reads: int, writes: int, flops: int = 0) -> None:
        b.compute(
            0,
            name,
            flops=flops,
            dtype=dtype,
            read_bytes=reads,
            write_bytes=writes,
            phase=phase,
        )

    for _ in range(num_layers):
        launch("addmm", "forward", rows + weight + bias, rows, flops)
        launch("relu", "forward", rows, rows)
    launch("pow", "forward", rows, rows)
    launch("mean", "forward", rows, element_bytes)
    launch("ones_like", "forward", 0, element_bytes)
    launch("div", "backward", element_bytes, rows)
    launch("pow", "backward", rows, rows)
    launch("mul", "backward", rows, rows)
    launch("mul", "backward", 2 * rows, rows)
    for layer in reversed(range(num_layers)):
        launch("threshold_backward", "backward", 2 * rows, rows)
        if layer:
            launch("mm", "backward", rows + weight, rows, flops)
        launch("mm", "backward", 2 * rows, weight, flops)
        launch("sum", "backward", rows, bias)
    return b.build()


def written_products(
    number: int, width: int, *, dtype: str, element_bytes: int
) -> Program:
    """A queue of equal products."""
    b = ProgramBuilder()
    size = element_bytes * width * width
    for _ in range(number):
        b.compute(
            0,
            "mm",
            flops=2 * width**3,
            dtype=dtype,
            read_bytes=2 * size,
            write_bytes=size,
        )
    return b.build()
