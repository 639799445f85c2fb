"""Kineto traces (torch.profiler) -> Timeline.

A trace with GPU kernels gives what each stream did, and the CPU's launches and waits.
A trace without them (gloo) gives the outermost operators of the CPU as computation and
gloo's transfers as communication. Reads the dict of the Chrome-trace JSON; knows no
torch and no cluster.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from overlaplab.profiling.events import (
    LAUNCH_RANGE,
    NOT_OPERATORS,
    WAIT_RANGE,
    Event,
    Events,
)
from overlaplab.timeline import CPU_LANE, Span, Timeline

# Views and allocations touch no data, and composite operators are made of others that
# the trace has too: the operators inside count, under the names that a dispatch mode
# sees.
_TRANSPARENT = frozenset(
    """
    alias as_strided chunk contiguous detach empty empty_like empty_strided expand
    expand_as flatten lift_fresh movedim narrow new_empty new_empty_strided numpy_T
    permute ravel real requires_grad_ reshape resize_ resolve_conj resolve_neg select
    set_ slice split split_with_sizes squeeze swapaxes t transpose transpose_ unbind
    unflatten unfold unsqueeze view view_as _reshape_alias _unsafe_view is_nonzero item
    _local_scalar_dense result_type set_data _version output_nr is_leaf retain_grad
    batch_norm conv1d conv2d conv3d cross_entropy_loss dropout einsum group_norm
    layer_norm linear log_softmax matmul nll_loss nll_loss_nd ones_like
    scaled_dot_product_attention softmax to zeros zeros_like
    """.split()  # noqa: SIM905 (prose, wrapped)
)
_LAUNCHES = re.compile(
    r"^(cudaLaunch|cuLaunch|cudaGraphLaunch|cudaMem(cpy|set)\w*Async)"
)
_HOST_WAITS = re.compile(r"^(cuda(Stream|Device|Event)Synchronize|cudaMemcpy)$")
_NCCL = re.compile(r"nccl|rccl", re.IGNORECASE)
_OPERATION_WORDS = (
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("sendrecv", "send_recv"),
    ("send", "send"),
    ("recv", "recv"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
    ("barrier", "barrier"),
)
_ITEM_BYTES = {
    "double": 8, "long int": 8, "long": 8, "float": 4, "int": 4, "c10::BFloat16": 2,
    "c10::Half": 2, "short": 2, "signed char": 1, "unsigned char": 1, "bool": 1,
    "Float": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Long": 8, "Int": 4, "Byte": 1,
    "Char": 1, "Bool": 1,
}  # fmt: skip


def timeline_from_trace(
    trace: Mapping[str, Any], rank: int | None = None, *, origin: str = "trace"
) -> Timeline:
    """The timeline of one rank's trace, starting at 0.

    Args:
        trace: the parsed JSON of `torch.profiler`'s export. Times are microseconds;
            parse with `parse_float=decimal.Decimal` where they are too large for a
            float to hold nanoseconds.
        rank: whose; default: what the trace says, else 0.
        origin: of the timeline.

    Returns:
        Spans as `spans_from_trace` describes them, shifted so that the first starts
        at 0.

    Raises:
        ValueError: not a Kineto trace.
    """
    if rank is None:
        rank = int(trace.get("distributedInfo", {}).get("rank", 0))
    return timeline_of_ranks({rank: spans_from_trace(trace, rank)}, origin=origin)


def timeline_of_ranks(
    spans: Mapping[int, Sequence[Span]],
    *,
    origin: str,
    num_ranks: int | None = None,
) -> Timeline:
    """One timeline of many ranks' spans on one clock, shifted to start at 0."""
    every = [span for of_rank in spans.values() for span in of_rank]
    first_ns = min((span.start_ns for span in every), default=0)
    timeline = Timeline.of((_shifted(span, -first_ns) for span in every), origin=origin)
    return timeline if num_ranks is None else replace(timeline, num_ranks=num_ranks)


def spans_from_trace(trace: Mapping[str, Any], rank: int) -> list[Span]:
    """Spans of one rank, in nanoseconds of the machine's clock.

    The label of a span is the innermost profiler range around its launch; the step is
    the N of the enclosing `ProfilerStep#N`. If the trace holds a run that marked
    itself (`RUN_RANGE`), only what starts inside that range counts.

    Raises:
        ValueError: not a Kineto trace.
    """
    if not isinstance(trace, Mapping) or "traceEvents" not in trace:
        raise ValueError(
            "not a Kineto trace: expected a dict with 'traceEvents', as "
            "torch.profiler's export_chrome_trace writes"
        )
    events = Events(trace)
    if events.of("kernel", "gpu_memcpy", "gpu_memset"):
        spans = list(_device_spans(events, rank))
    else:
        spans = list(_cpu_spans(events, rank))
    if events.window is not None:
        start_ns, end_ns = events.window
        spans = [s for s in spans if start_ns <= s.start_ns <= end_ns]
    return spans


def _attributes(events: Events, thread: Any, at_ns: int) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    if label := events.label(thread, at_ns):
        attributes["label"] = label
    if (step := events.step(at_ns)) is not None:
        attributes["step"] = step
    return attributes


def _shifted(span: Span, by_ns: int) -> Span:
    return replace(span, start_ns=span.start_ns + by_ns, end_ns=span.end_ns + by_ns)


# --- CPU processes ---------------------------------------------------------------


def _cpu_spans(events: Events, rank: int) -> Iterator[Span]:
    for op in _outermost_operators(events.of("cpu_op")):
        yield Span(
            rank,
            "default",
            "compute",
            op.name.partition("::")[2],
            op.start_ns,
            op.end_ns,
            attributes=_attributes(events, op.thread, op.start_ns),
        )
    launches = defaultdict(list)
    for event in events.of("user_annotation"):
        if event.name.startswith(WAIT_RANGE):
            name = "wait " + event.name.removeprefix(WAIT_RANGE)
            yield Span(rank, CPU_LANE, "host", name, event.start_ns, event.end_ns)
        elif event.name.startswith(LAUNCH_RANGE):
            what = event.name.removeprefix(LAUNCH_RANGE)
            operation, group, sequence, size, label = what.split("|", 4)
            name = f"launch {operation}"
            yield Span(rank, CPU_LANE, "launch", name, event.start_ns, event.end_ns)
            launches[operation].append((group, int(sequence), int(size), label))
    # Gloo's threads take the works in the order of their launch.
    transfers = defaultdict(list)
    for event in events.of("user_annotation", "cpu_op"):
        if event.name.startswith("gloo:"):
            operation = _operation(event.name.removeprefix("gloo:"))
            transfers[operation].append(event)
    for operation, of_operation in transfers.items():
        known = launches[operation]
        for i, event in enumerate(sorted(of_operation, key=lambda e: e.start_ns)):
            attributes, lane = _attributes(events, event.thread, event.start_ns), "comm"
            num_bytes = _input_bytes(event.args)
            if len(known) == len(of_operation):
                group, attributes["sequence"], num_bytes, label = known[i]
                if label:
                    attributes["label"] = label
                if group != "default":
                    lane = f"comm:{group}"
            yield Span(
                rank,
                lane,
                "communication",
                operation,
                event.start_ns,
                event.end_ns,
                bytes=num_bytes,
                attributes=attributes,
            )


def _outermost_operators(events: Iterable[Event]) -> Iterator[Event]:
    """Operators that no other operator encloses; autograd's own events are glass."""
    end_ns: dict[Any, int] = {}
    for event in events:
        if event.start_ns < end_ns.get(event.thread, -1):
            continue
        if "::" not in event.name or event.name.startswith(NOT_OPERATORS):
            continue
        if event.name.partition("::")[2] not in _TRANSPARENT:
            end_ns[event.thread] = event.end_ns
            yield event


def _input_bytes(args: Mapping[str, Any]) -> int:
    """Bytes of the input tensors, where the profiler recorded shapes."""
    total = 0
    shapes, types = args.get("Input Dims", ()), args.get("Input type", ())
    for shape, kind in zip(shapes, types, strict=False):
        if kind in _ITEM_BYTES and shape and all(isinstance(n, int) for n in shape):
            size = _ITEM_BYTES[kind]
            for n in shape:
                size *= n
            total += size
    return total


# --- GPUs ------------------------------------------------------------------------


def _device_spans(events: Events, rank: int) -> Iterator[Span]:
    runtime = {
        e.args["correlation"]: e
        for e in events.of("cuda_runtime", "cuda_driver")
        if "correlation" in e.args
    }
    operators = {e.args.get("External id"): e for e in events.of("cpu_op")}
    main_stream = _main_stream(events.of("kernel"))
    names: dict[Any, str] = {}
    for event in events.of("kernel", "gpu_memcpy", "gpu_memset"):
        correlation = event.args.get("correlation")
        launch = runtime.get(correlation)
        if launch is None:
            attributes: dict[str, Any] = {}
        else:
            attributes = _attributes(events, launch.thread, launch.start_ns)
        stream = event.args.get("stream")
        lane = "default" if stream == main_stream else f"stream {stream}"
        operator = operators.get(event.args.get("External id"))
        if event.category == "kernel" and _NCCL.search(event.name):
            # What is sent stands with the kernel, or with the call that launched it.
            message = {**(operator.args if operator else {}), **event.args}
            names[correlation] = name = _operation(
                str(message.get("Collective name") or event.name)
            )
            yield Span(
                rank,
                _communicator_lane(message),
                "communication",
                name,
                event.start_ns,
                event.end_ns,
                bytes=_message_bytes(message),
                attributes={**attributes, "stream": stream},
            )
        elif event.category == "kernel":
            names[correlation] = name = (
                operator.name.rpartition("::")[2] if operator else _short(event.name)
            )
            yield Span(
                rank,
                lane,
                "compute",
                name,
                event.start_ns,
                event.end_ns,
                attributes={**attributes, "kernel": event.name[:200]},
            )
        else:
            is_copy = event.category == "gpu_memcpy"
            names[correlation] = name = "memcpy" if is_copy else "memset"
            yield Span(
                rank,
                lane,
                "memcpy" if is_copy else "memset",
                name,
                event.start_ns,
                event.end_ns,
                bytes=int(event.args.get("bytes", 0)),
                attributes={**attributes, "what": event.name},
            )
    yield from _cpu_lane(events, rank, names)


def _cpu_lane(events: Events, rank: int, names: Mapping[Any, str]) -> Iterator[Span]:
    for event in events.of("cuda_runtime", "cuda_driver"):
        if _HOST_WAITS.match(event.name):
            name = f"wait {event.name}"
            yield Span(rank, CPU_LANE, "host", name, event.start_ns, event.end_ns)
        elif _LAUNCHES.match(event.name):
            what = names.get(event.args.get("correlation"), event.name)
            attributes = _attributes(events, event.thread, event.start_ns)
            yield Span(
                rank,
                CPU_LANE,
                "launch",
                f"launch {what}",
                event.start_ns,
                event.end_ns,
                attributes=attributes,
            )


def _main_stream(kernels: Sequence[Event]) -> Any:
    """The stream that computes most: torch's default one in a usual step."""
    busy_ns: dict[Any, int] = defaultdict(int)
    for kernel in kernels:
        if not _NCCL.search(kernel.name):
            busy_ns[kernel.args.get("stream")] += kernel.end_ns - kernel.start_ns
    key: Callable[[Any], int] = busy_ns.__getitem__
    return max(busy_ns, key=key, default=None)


def _communicator_lane(args: Mapping[str, Any]) -> str:
    description = args.get("Process Group Description")
    name = args.get("Process Group Name")
    if description in (None, "", "default_pg") and name in (None, "", "0"):
        return "comm"
    if description in (None, "", "undefined"):
        return f"comm:{name}"
    return "comm" if description == "default_pg" else f"comm:{description}"


def _message_bytes(args: Mapping[str, Any]) -> int:
    elements = max(
        int(args.get("In msg nelems", 0)), int(args.get("Out msg nelems", 0))
    )
    return elements * _ITEM_BYTES.get(str(args.get("dtype", "")), 0)


def _operation(name: str) -> str:
    """'ncclDevKernel_AllReduce_Sum_f32_RING_LL' or 'all_reduce' -> 'all_reduce'."""
    word = name.lower().replace("_", "").removeprefix("nccl")
    for spelling, operation in _OPERATION_WORDS:
        if spelling in word:
            return operation
    return name


def _short(kernel: str) -> str:
    """A kernel's name without return type, namespaces and arguments."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    head = re.split(r"[<(]", name, maxsplit=1)[0]
    return head.rpartition("::")[2] or kernel
