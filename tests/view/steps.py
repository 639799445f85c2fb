"""Timelines of a data-parallel step, made without a cluster, to draw and to time."""

from overlaplab.timeline import Span, Timeline


def step(
    *,
    layers=4,
    kernels=3,
    ranks=1,
    plan="bucketed",
    per_bucket=2,
    kernel_ns=400_000,
    launch_ns=15_000,
    latency_ns=100_000,
    message_ns=300_000,
):
    """Forward and backward of `layers` layers of `kernels` kernels each.

    `plan`: "serial" sends each layer after the backward, "parameter" each kernel's
    gradient at once, "bucketed" `per_bucket` layers at a time. Rank r is r % slower.
    """
    spans, causes = [], []

    def add(cause, *args, **attributes):
        spans.append(Span(*args, attributes=attributes))
        causes.append(cause)
        return len(spans) - 1

    def end(index):
        return spans[index].end_ns if index is not None else 0

    cpu = dict.fromkeys(range(ranks))
    gpu = dict.fromkeys(range(ranks))
    ready = {}  # message -> last kernel of each rank
    sizes = {}

    def kernel(rank, name, phase):
        cpu[rank] = add(
            cpu[rank], rank, "cpu", "launch", f"launch {name}", end(cpu[rank]),
            end(cpu[rank]) + launch_ns,
        )  # fmt: skip
        cause = max((cpu[rank], gpu[rank]), key=end)
        length = kernel_ns * (2 if phase == "backward" else 1) * (100 + rank) // 100
        start = end(cause)
        gpu[rank] = add(
            cause, rank, "default", "compute", name, start, start + length,
            label=phase, phase=phase,
        )  # fmt: skip

    for rank in range(ranks):
        for _ in range(layers):
            for k in range(kernels):
                kernel(rank, "mm" if k else "layer_norm", "forward")
        for layer in reversed(range(layers)):
            for k in range(kernels):
                kernel(rank, "mm", "backward")
                done = (layers - 1 - layer) * kernels + k
                message = {
                    "serial": 0,
                    "parameter": done,
                    "bucketed": done // (per_bucket * kernels),
                }[plan]
                ready.setdefault(message, {})[rank] = gpu[rank]
                if rank == 0:
                    sizes[message] = sizes.get(message, 0) + 1
    wire = None
    names = {"serial": "all gradients", "parameter": "p{}", "bucketed": "bucket {}"}
    for message, lasts in ready.items():
        cause = max([*lasts.values(), *([wire] if wire is not None else [])], key=end)
        ready_ns = end(cause)
        wire_ns = sizes[message] * message_ns // kernels
        for rank, last in lasts.items():
            sent = add(
                cause, rank, "comm", "communication", "all_reduce",
                max(end(last), end(wire)), ready_ns + latency_ns + wire_ns,
                label=names[plan].format(message),
                ready_ns=ready_ns, latency_ns=latency_ns, wire_ns=wire_ns,
            )  # fmt: skip
        wire = sent
    for rank in range(ranks):
        cause = max((wire, gpu[rank]), key=end)
        add(cause, rank, "cpu", "host", "wait", end(cpu[rank]), end(cause))
        add(
            cause, rank, "default", "compute", "adam", end(cause),
            end(cause) + 2 * kernel_ns,
        )  # fmt: skip
    order = sorted(
        range(len(spans)),
        key=lambda i: (spans[i].start_ns, spans[i].rank, spans[i].lane),
    )
    new = {old: position for position, old in enumerate(order)}
    return Timeline(
        tuple(spans[i] for i in order),
        tuple(None if causes[i] is None else new[causes[i]] for i in order),
        num_ranks=ranks,
    )
