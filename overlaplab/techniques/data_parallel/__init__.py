"""Data parallelism: every rank has the whole model, gradients are averaged.

The way of a gradient: autograd accumulates it into `.grad` and calls the hook of
`Arrivals`, which counts. When its bucket and all before it are full, `Arrivals` calls
`_launch` in `steps`. `InFlight.launch` makes its stream wait for those that wrote the
gradient, `load`s it (itself, or a copy where it cannot travel) and gives it to the
`Wire`. The user's `wait()` launches the buckets that are not full, makes the current
stream wait (`Wire.finish`) and writes copies back (`unload`): `.grad` is the average.
Inside `no_sync()` a hook counts nothing: it notes that there is a gradient, and on
which stream. What breaks a step is refused in `steps`, as the next backward begins or
in `wait()`.

`steps` is the course of a step, which `double_buffer`'s reducer shares. What is not
special to data parallelism stands in `techniques/`: `buckets`, `arrivals`,
`in_flight`, `model_facts`. Off the main way: `agreement` (a parameter without a
gradient, a frozen layer) and `join` (ranks with different numbers of batches), though
`BucketedReducer` inherits from `steps` through it.
"""

from overlaplab.techniques.buckets import Bucket, BucketPlan, plan_buckets
from overlaplab.techniques.data_parallel.baselines import HookReducer, SerialReducer
from overlaplab.techniques.data_parallel.reducer import BucketedReducer
from overlaplab.techniques.data_parallel.wire import AllReduce, BFloat16Wire

Reducer = BucketedReducer  # for annotations: the other two are subclasses of it

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
