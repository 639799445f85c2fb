"""Learners' reducers: one that is right, and its faults one at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from overlaplab import streams


class Right:
    """Buckets by dtype in reverse order, launched in order; absent gradients as zeros.

    `cap` gradients a bucket. Unusual on purpose: no cap in bytes, one flag a parameter.
    """

    cap = 2

    def __init__(self, model: torch.nn.Module) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)
        self.buckets: list[list[torch.nn.Parameter]] = []
        self.bucket_of: dict[torch.nn.Parameter, int] = {}
        self.handles = []
        open_bucket: dict[torch.dtype, int] = {}
        for p in reversed([p for p in model.parameters() if p.requires_grad]):
            b = open_bucket.get(p.dtype)
            if b is None or len(self.buckets[b]) >= self.cap:
                b = open_bucket[p.dtype] = len(self.buckets)
                self.buckets.append([])
            self.buckets[b].append(p)
            self.bucket_of[p] = b
            self.handles.append(p.register_post_accumulate_grad_hook(self.hook))
        self.arm()

    def arm(self) -> None:
        self.missing = [len(bucket) for bucket in self.buckets]
        self.sent: list[Any] = []
        self.arrived: set[torch.nn.Parameter] = set()

    def hook(self, p: torch.nn.Parameter) -> None:
        self.arrived.add(p)
        self.missing[self.bucket_of[p]] -= 1
        self.launch_full()

    def launch_full(self) -> None:
        while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:
            self.launch(len(self.sent))

    def launch(self, b: int) -> None:
        flat = torch.cat([self.payload(p) for p in self.buckets[b]])
        flat /= dist.get_world_size()
        self.sent.append((flat, dist.all_reduce(flat, async_op=True)))

    def payload(self, p: torch.nn.Parameter) -> torch.Tensor:
        if p.grad is None or p not in self.arrived:
            return torch.zeros(p.numel(), dtype=p.dtype)
        return p.grad.reshape(-1)

    def wait(self) -> None:
        while len(self.sent) < len(self.buckets):
            self.launch(len(self.sent))
        used = torch.zeros(len(self.bucket_of))
        for i, p in enumerate(self.bucket_of):
            used[i] = float(p in self.arrived)
        dist.all_reduce(used)
        someone = dict(zip(self.bucket_of, used.tolist(), strict=True))
        for bucket, (flat, work) in zip(self.buckets, self.sent, strict=True):
            self.finish(bucket, flat, work, someone)
        self.arm()

    def finish(self, bucket: Any, flat: torch.Tensor, work: Any, someone: Any) -> None:
        work.wait()
        offset = 0
        for p in bucket:
            if someone[p]:
                piece = flat[offset : offset + p.numel()].view(p.shape)
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                p.grad.copy_(piece)
            offset += p.numel()


class SumsOnly(Right):
    def launch(self, b: int) -> None:
        flat = torch.cat([self.payload(p) for p in self.buckets[b]])
        self.sent.append((flat, dist.all_reduce(flat, async_op=True)))


class NoBroadcast(Right):
    def __init__(self, model: torch.nn.Module) -> None:
        real, dist.broadcast = dist.broadcast, lambda *a, **k: None
        try:
            super().__init__(model)
        finally:
            dist.broadcast = real


class Late(Right):
    """Everything in `wait`."""

    def launch_full(self) -> None:
        pass


class WaitsInTheHook(Right):
    def launch(self, b: int) -> None:
        super().launch(b)
        self.sent[-1][1].wait()


class SendsParameters(Right):
    def payload(self, p: torch.nn.Parameter) -> torch.Tensor:
        return p.detach().reshape(-1)


class NeverWritesBack(Right):
    def finish(self, bucket: Any, flat: Any, work: Any, someone: Any) -> None:
        work.wait()


class ReadsBeforeTheWait(Right):
    def wait(self) -> None:
        for bucket, (flat, work) in zip(self.buckets, self.sent, strict=True):
            for p, piece in zip(bucket, flat.chunk(len(bucket)), strict=True):
                p.grad.copy_(piece.view(p.shape))
            work.wait()
        self.arm()


class FillsOnASideStream(Right):
    """Copies on a stream of its own that waits for nothing."""

    def launch(self, b: int) -> None:
        side = streams.Stream()
        with streams.stream(side):
            super().launch(b)


class KeepsEverything(Right):
    def arm(self) -> None:
        self.kept = [*getattr(self, "kept", []), *getattr(self, "sent", [])]
        super().arm()


class SendsTwice(Right):
    def launch(self, b: int) -> None:
        super().launch(b)
        flat, work = self.sent[-1]
        work.wait()
        again = flat.clone().div_(dist.get_world_size())
        self.sent[-1] = (again, dist.all_reduce(again, async_op=True))


class MeanInPlace(Right):
    """No buffer: the all-reduce itself makes the mean, in `.grad`."""

    op = dist.ReduceOp.AVG

    def launch(self, b: int) -> None:
        for p in self.buckets[b]:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        grads = [p.grad for p in self.buckets[b]]
        works = [dist.all_reduce(g, op=self.op, async_op=True) for g in grads]
        self.sent.append((grads, works))

    def wait(self) -> None:
        while len(self.sent) < len(self.buckets):
            self.launch(len(self.sent))
        for _, works in self.sent:
            for work in works:
                self.wait_for(work)
        self.arm()

    def wait_for(self, work: Any) -> None:
        work.wait()


class SumInPlace(MeanInPlace):
    op = dist.ReduceOp.SUM


class MeanInPlaceNotWaitedFor(MeanInPlace):
    def wait_for(self, work: Any) -> None:
        pass


class MeanInPlaceOfBuffer(Right):
    """`.grad` becomes the place in a buffer that holds the mean after the wait."""

    def launch(self, b: int) -> None:
        flat = torch.cat([self.payload(p) for p in self.buckets[b]])
        places = flat.split([p.numel() for p in self.buckets[b]])
        for p, place in zip(self.buckets[b], places, strict=True):
            p.grad = place.view(p.shape)
        work = dist.all_reduce(flat, op=dist.ReduceOp.AVG, async_op=True)
        self.sent.append((flat, work))

    def finish(self, bucket: Any, flat: Any, work: Any, someone: Any) -> None:
        work.wait()

    def wait(self) -> None:
        for flat, work in self.sent:
            self.finish(None, flat, work, None)
        self.arm()
