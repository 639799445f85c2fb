"""Traces written by hand, in microseconds, for tests of their reader."""

import gzip
import json

COMM = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def kernel(
    name, stream, start, end, *, device=0, correlation=None, cat="kernel", **args
):
    if correlation is not None:
        args["correlation"] = correlation
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": device,
        "tid": stream,
        "ts": start,
        "dur": end - start,
        "args": {"device": device, "stream": stream, **args},
    }


def launch(correlation, start, end, *, name="cudaLaunchKernel", thread=100):
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": name,
        "pid": 100,
        "tid": thread,
        "ts": start,
        "dur": end - start,
        "args": {"correlation": correlation},
    }


def annotation(name, start, end, *, cat="user_annotation", thread=100):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 100,
        "tid": thread,
        "ts": start,
        "dur": end - start,
    }


def write(path, events, *, compress=False, **fields):
    """An object with the events and fields; a text is written as it is."""
    text = events if isinstance(events, str) else json.dumps(_trace(events, fields))
    data = text.encode()
    path.write_bytes(gzip.compress(data) if compress else data)
    return path


def _trace(events, fields):
    return {"schemaVersion": 1, **fields, "traceEvents": events}
