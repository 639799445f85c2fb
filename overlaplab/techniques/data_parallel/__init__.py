"""Data parallelism: every rank has the whole model, gradients are averaged.

The way of a gradient, from its hook to the average in `.grad`, file by file:

1. `techniques/arrivals.py` counts. Autograd has added the gradient to `.grad` and calls
   its hook. When its bucket and all before it are full, it is the bucket's turn.
2. `steps.py` sends a bucket at its turn, and in `wait`, which the user calls after the
   backward pass, those that are not full.
3. `techniques/in_flight.py` makes the stream of the launch wait for the streams that
   wrote, gives the gradients to the wire and, in `wait`, waits for it.
4. `wire.py` averages them in place: `.grad` is the average.

Inside `no_sync()` a hook counts nothing: it notes that there is a gradient, and on
which stream.

These guard it, and need not be read to follow it: in `techniques/`, `hooks` (backwards
that raise, or run inside another) and `payload` (which gradients travel as copies);
here, `guard` (what is refused) and `agreement` (the plan; frozen layers, parameters
without a gradient). What a training loop calls is in `reducer`, `base`, `baselines` and
`join` (ranks with different numbers of batches), what it may set in `options`.
"""

from overlaplab.techniques.buckets import Bucket, BucketPlan, plan_buckets
from overlaplab.techniques.data_parallel.baselines import HookReducer, SerialReducer
from overlaplab.techniques.data_parallel.options import BFloat16Wire
from overlaplab.techniques.data_parallel.reducer import BucketedReducer
from overlaplab.techniques.data_parallel.wire import AllReduce

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
