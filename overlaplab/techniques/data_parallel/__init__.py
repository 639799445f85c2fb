"""Data parallelism: every rank has the whole model, gradients are averaged."""

from overlaplab.techniques.data_parallel.bucketed import BucketedReducer
from overlaplab.techniques.data_parallel.buckets import Bucket, BucketPlan, plan_buckets
from overlaplab.techniques.data_parallel.hooks import HookReducer
from overlaplab.techniques.data_parallel.reducer import Reducer
from overlaplab.techniques.data_parallel.serial import SerialReducer

__all__ = [
    "Bucket",
    "BucketPlan",
    "BucketedReducer",
    "HookReducer",
    "Reducer",
    "SerialReducer",
    "plan_buckets",
]
