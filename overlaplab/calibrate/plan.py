"""What a calibration measures: sizes and counts, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from overlaplab.models import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A transformer of which every operator is timed.

    Args:
        d_model, num_heads, vocab_size, num_layers: of the model.
        batch: sequences.
        tokens: of one sequence.
    """

    d_model: int
    num_heads: int
    vocab_size: int
    batch: int
    num_layers: int = 2
    tokens: int = 1024

    def config(self) -> TransformerConfig:
        return TransformerConfig(
            num_layers=self.num_layers,
            d_model=self.d_model,
            num_heads=self.num_heads,
            vocab_size=self.vocab_size,
        )


@dataclass(frozen=True, kw_only=True)
class CalibrationPlan:
    """How much to measure.

    Args:
        dtype: of the models.
        models: whose operators are timed, smallest first.
        launch_model: small, so that its step is bound by launches.
        matmul_sizes: square matrices, for each of `matmul_dtypes`.
        matmul_dtypes: names of torch's dtypes.
        memory_bytes: tensors that are copied in device memory, and to the host.
        wire_bytes: payloads of all-reduces of one tensor.
        coalesced: (tensors, bytes in all) of coalesced all-reduces.
        contention: the model that runs beside collectives, and for how many steps.
        beside_bytes: payload of the all-reduces that run beside it.
        small_beside_bytes: of small ones.
        most_sends: at most so many beside one step.
        hot_ns: a measurement that depends on heat runs at least so long.
        repeats: of each measurement.
        steps: of the models, of which the median is taken.
        launch_rounds: of eight steps of the launch model, in turn with each reducer.
    """

    dtype: str
    models: tuple[ModelCase, ...]
    launch_model: ModelCase
    matmul_sizes: tuple[int, ...]
    matmul_dtypes: tuple[str, ...]
    memory_bytes: tuple[int, ...]
    wire_bytes: tuple[int, ...]
    coalesced: tuple[tuple[int, int], ...]
    contention: ModelCase
    beside_bytes: int
    small_beside_bytes: tuple[int, ...]
    most_sends: int
    hot_ns: int
    repeats: int = 5
    steps: int = 4
    launch_rounds: int = 5


def _mib(*sizes: int) -> tuple[int, ...]:
    return tuple(2**20 * n for n in sizes)


# None of these is a model of the benchmarks. Widths are multiples of 128, heads of 64
# or 128: as people choose them, and as GPUs like them.
GPU = CalibrationPlan(
    dtype="bfloat16",
    models=(
        ModelCase(d_model=512, num_heads=8, vocab_size=8192, batch=1),
        ModelCase(d_model=1024, num_heads=8, vocab_size=16384, batch=2),
        ModelCase(d_model=640, num_heads=10, vocab_size=40960, batch=10),
        ModelCase(d_model=640, num_heads=10, vocab_size=57344, batch=24),
        ModelCase(d_model=896, num_heads=14, vocab_size=49152, batch=20),
        ModelCase(d_model=1024, num_heads=16, vocab_size=57344, batch=24),
        ModelCase(d_model=1280, num_heads=10, vocab_size=32768, batch=16),
        ModelCase(d_model=1536, num_heads=12, vocab_size=24576, batch=5),
        ModelCase(d_model=1536, num_heads=12, vocab_size=57344, batch=10),
        ModelCase(d_model=2560, num_heads=20, vocab_size=40960, batch=6),
        ModelCase(d_model=3072, num_heads=24, vocab_size=32768, batch=5),
        ModelCase(d_model=2560, num_heads=20, vocab_size=57344, batch=12),
        ModelCase(d_model=640, num_heads=10, vocab_size=57344, batch=44),
    ),
    launch_model=ModelCase(
        d_model=1280, num_heads=10, vocab_size=8192, num_layers=10, batch=1
    ),
    matmul_sizes=(256, 512, 1024, 2048, 4096, 8192),
    matmul_dtypes=("bfloat16", "float16", "float32"),
    memory_bytes=_mib(1, 4, 16, 64, 256, 1024),
    wire_bytes=(
        *(2**10, 2**14, 2**17, 2**19),
        *_mib(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    ),
    coalesced=tuple(
        zip(
            (2, 8, 2, 12, 6, 24, 96, 12, 48, 48, 150),
            _mib(8, 8, 32, 32, 16, 64, 256, 128, 128, 512, 512),
            strict=True,
        )
    ),
    contention=ModelCase(d_model=1536, num_heads=12, vocab_size=40960, batch=10),
    beside_bytes=2**27,
    small_beside_bytes=(2**14, 2**20),
    most_sends=48,
    hot_ns=400_000_000,
)

CPU = CalibrationPlan(
    dtype="float32",
    models=(
        ModelCase(d_model=64, num_heads=2, vocab_size=512, batch=1, tokens=64),
        ModelCase(d_model=128, num_heads=4, vocab_size=1024, batch=2, tokens=128),
    ),
    launch_model=ModelCase(d_model=32, num_heads=2, vocab_size=64, batch=1, tokens=16),
    matmul_sizes=(64, 128, 256, 512),
    matmul_dtypes=("float32",),
    memory_bytes=_mib(1, 4, 16),
    wire_bytes=(2**10, 2**16, *_mib(1, 4, 16)),
    coalesced=((8, 2**20), (8, 2**22)),
    contention=ModelCase(d_model=64, num_heads=2, vocab_size=512, batch=1, tokens=64),
    beside_bytes=2**20,
    small_beside_bytes=(2**14,),
    most_sends=20,
    hot_ns=0,
    repeats=2,
    steps=3,
    launch_rounds=1,
)


def quick(plan: CalibrationPlan) -> CalibrationPlan:
    """Every other model and size, fewer repeats: coarser, in less than half the time.

    The largest are kept: beyond them a profile extrapolates.
    """
    return replace(
        plan,
        models=plan.models[::-2][::-1],
        matmul_sizes=plan.matmul_sizes[::-2][::-1],
        memory_bytes=plan.memory_bytes[::-2][::-1],
        wire_bytes=plan.wire_bytes[::2],
        coalesced=plan.coalesced[::-2][::-1],
        repeats=max(2, plan.repeats // 2),
        steps=3,
        launch_rounds=max(1, plan.launch_rounds // 2),
    )
