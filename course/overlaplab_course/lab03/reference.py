"""The course's own solutions of lab 03: what a grader compares with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from overlaplab import streams
from overlaplab_course.lab03.jobs import Task


def issue(tasks: Sequence[Task]) -> None:
    """Two streams, one event a task."""
    compute = streams.current_stream()
    wire = streams.Stream()
    wire.wait_stream(compute)
    ended: dict[str, Any] = {}
    for task in tasks:
        own = compute if task.on == "compute" else wire
        for need in task.needs:
            own.wait_event(ended[need])
        with streams.stream(own):
            task.run()
        ended[task.name] = own.record_event()
    compute.wait_stream(wire)


def send_gradients(layers: Sequence[Any]) -> None:
    """A message leaves from the stream that filled its buffer."""
    packing = streams.Stream()
    works = []
    for layer in layers:
        layer.backward()
        if len(layer.grads) > 1:
            packing.wait_stream(streams.current_stream())
            with streams.stream(packing):
                layer.pack()
                works.append(dist.all_reduce(layer.flat, async_op=True))
        else:
            works.append(dist.all_reduce(layer.flat, async_op=True))
    for work in works:
        work.wait()


def look_up(towers: Sequence[Any]) -> None:
    """An event for each tower."""
    main = streams.current_stream()
    events = []
    for tower in towers:
        side = streams.Stream()
        side.wait_stream(main)
        with streams.stream(side):
            tower.fetch()
            tower.forward()
            events.append(side.record_event())
    for event in events:
        main.wait_event(event)


def train(batches: Sequence[torch.Tensor], step: Callable[..., object]) -> None:
    """The block of a batch is not given away before the step that reads it is over."""
    loading = streams.Stream()
    compute = streams.current_stream()
    for host in batches:
        with streams.stream(loading):
            batch = host.to(streams.device(), non_blocking=True)
        compute.wait_stream(loading)
        batch.record_stream(compute)
        step(batch)


def feed(samples: Sequence[torch.Tensor], step: Callable[..., object]) -> None:
    """Two pinned buffers take turns; the next copy is launched before the step."""
    main, loading = streams.current_stream(), streams.Stream()
    pinned = [torch.empty_like(samples[0], pin_memory=True) for _ in range(2)]
    copied: list[Any] = [None, None]  # the event of each buffer's last copy

    def load(i: int) -> torch.Tensor:
        slot = i % 2
        if copied[slot] is not None:
            copied[slot].synchronize()  # until then the buffer is being read
        pinned[slot].copy_(samples[i])
        with streams.stream(loading):
            batch = pinned[slot].to(streams.device(), non_blocking=True)
            copied[slot] = loading.record_event()
        return batch

    following = load(0)
    for i in range(len(samples)):
        batch = following
        main.wait_event(copied[i % 2])
        batch.record_stream(main)
        if i + 1 < len(samples):
            following = load(i + 1)
        step(batch)
