"""Data parallelism: every rank has the whole model, gradients are averaged."""

from overlaplab.techniques.buckets import Bucket, BucketPlan, plan_buckets
from overlaplab.techniques.data_parallel.reducer import (
    BucketedReducer,
    HookReducer,
    SerialReducer,
)
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
