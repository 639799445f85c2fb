"""A calibration that any machine ends in seconds."""

from overlaplab.calibrate.plan import CalibrationPlan, ModelCase

TINY = ModelCase(d_model=8, num_heads=1, vocab_size=16, batch=1, num_layers=1, tokens=4)
SMALL = CalibrationPlan(
    dtype="float32",
    models=(TINY,),
    launch_model=TINY,
    matmul_sizes=(16,),
    matmul_dtypes=("float32",),
    memory_bytes=(2**16, 2**17),
    wire_bytes=(1024, 2**16),
    coalesced=((2, 2**16),),
    contention=TINY,
    beside_bytes=2**16,
    small_beside_bytes=(1024,),
    beside_ns=0,
    most_sends=2,
    hot_ns=0,
    repeats=1,
    steps=1,
    launch_rounds=1,
)
