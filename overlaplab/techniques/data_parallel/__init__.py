"""Data parallelism: every rank has the whole model, gradients are averaged.

The way of a gradient: autograd accumulates it into `.grad` and calls the hook of
`Arrivals`, which counts. When its bucket and all before it are full, `Arrivals` calls
`BucketedReducer._full`. `InFlight.launch` waits for the streams that wrote it, `load`s
it (itself, or a copy where it cannot travel) and gives it to the `Wire`. The user's
`wait()` sends what is left, lets the current stream wait (`Wire.finish`), and writes
copies back (`unload`): `.grad` is the average.

Besides that way: `agreement` (parameters without a gradient), `join` (uneven data).
"""

from overlaplab.techniques.buckets import Bucket, BucketPlan, plan_buckets
from overlaplab.techniques.data_parallel.baselines import HookReducer, SerialReducer
from overlaplab.techniques.data_parallel.reducer import BucketedReducer
from overlaplab.techniques.data_parallel.wire import AllReduce, BFloat16Wire

Reducer = BucketedReducer  # the three are one machine with other plans

__all__ = [
    "AllReduce",
    "BFloat16Wire",
    "Bucket",
    "BucketPlan",
    "BucketedReducer",
    "HookReducer",
    "Reducer",
    "SerialReducer",
    "plan_buckets",
]
