"""Data parallelism: every rank has the whole model, gradients are averaged.

The way of a gradient, from its hook to its average; paths begin at
`overlaplab/techniques/`:

1. `arrivals.py` counts. Autograd has added the gradient to `.grad` and calls its hook.
   When its bucket and all before it are full, it is the bucket's turn. Inside
   `no_sync()` a gradient is noted and not counted.
2. `data_parallel/steps.py` sends a bucket at its turn, and in `wait`, which the user
   calls after the backward pass, those that are left.
3. `in_flight.py` makes the stream of the launch wait for the streams that wrote, gives
   the gradients to the wire and, in `wait`, waits for it.
4. `data_parallel/wire.py` averages them in place: `.grad` is the average. Averages of
   copies, and of what only other ranks have, are put there in `wait`.

A usual step is no more than that. Elsewhere stand

- the plan, and missing gradients (a note): `data_parallel/agreement.py`;
- backwards that fail, or run inside another (a note): `hooks.py`;
- what travels as a copy: `payload.py`;
- what is refused: `data_parallel/guard.py`; `abandon`: `data_parallel/base.py`;
- beside it, what else a training loop calls, `reducer.py`, `baselines.py`, `join.py`
  (ranks with different numbers of batches), and what it may set, `options.py`.
"""

from overlaplab.techniques.buckets import Bucket, BucketPlan, plan_buckets
from overlaplab.techniques.data_parallel.baselines import HookReducer, SerialReducer
from overlaplab.techniques.data_parallel.options import BFloat16Wire
from overlaplab.techniques.data_parallel.reducer import BucketedReducer
from overlaplab.techniques.data_parallel.wire import AllReduce

Reducer = BucketedReducer  # for annotations: the others are subclasses

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
