"""What the GPU tests of the compiler run on every rank.

Generated code with two streams runs unchanged on `virtual`: on a GPU a delay kernel
makes an edge that is missing visible in values, on `virtual` it is a finding.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import overlaplab as ol
from overlaplab import streams
from overlaplab.hardware import find_hardware
from overlaplab.techniques import compiler
from overlaplab.techniques.compiler.runtime import Generated, load
from tests.gpu import programs, stream_programs

WIDTH = 512


def gradients_of_a_compiled_chain(delay: bool, lowering: str = "eager") -> float:
    """The worst relative error of averaged gradients, to one process's.

    Args:
        delay: whether the messages are held up: each waits on a side stream for a
            delay kernel, so that a read before its wait sees the local gradient.
        lowering: of the backend.
    """
    model = _chain()
    world = dist.get_world_size()
    batches = [programs.batch_of(rank) for rank in range(world)]
    losses = torch.stack([model(batch).square().mean() for batch in batches])
    expected = torch.autograd.grad(losses.mean(), list(model.parameters()))
    backend = ol.compiler.backend(bucket_mib=1, lowering=lowering)
    made = torch.compile(model, backend=backend)
    worst = 0.0
    for _ in range(3):
        model.zero_grad()
        loss = made(batches[dist.get_rank()]).square().mean()
        if delay and dist.get_rank() == 1:  # the other rank's messages wait for it
            torch.cuda._sleep(programs.LONG)
        loss.backward()
        for parameter, right in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            error = (parameter.grad - right).norm() / right.norm()
            worst = max(worst, error.item())
    return worst


def gradients_of_a_table(delay: bool) -> list[float]:
    """Errors of an embedding's gradient that is sent as rows, to one process's.

    Of three steps, the second with a smaller batch on rank 1; the last number is how
    far the ranks' gradients are from one another, bit by bit.

    Args:
        delay: whether the rows of one rank are held up.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    table = torch.nn.Embedding(4096, 64)
    model = torch.nn.Sequential(table, torch.nn.Linear(64, 64)).cuda()
    backend = ol.compiler.backend(embedding_rows=512)
    made = torch.compile(model, backend=backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    errors, apart = [], 0.0
    for step in range(3):
        batches = [
            torch.randint(4096, (4, 64 if step == of == 1 else 128), generator=draw)
            for of in range(world)
            for draw in [torch.Generator().manual_seed(10 * step + of)]
        ]
        losses = [model(batch.cuda()).square().mean() for batch in batches]
        weights = [*model.parameters()]
        right = torch.autograd.grad(torch.stack(losses).mean(), weights)[0]
        model.zero_grad()
        loss = made(batches[rank].cuda()).square().mean()
        if delay and rank == 1:
            torch.cuda._sleep(programs.LONG)
        loss.backward()
        found = model[0].weight.grad
        assert isinstance(found, torch.Tensor)
        errors.append(((found - right).norm() / right.norm()).item())
        first = found.clone()
        dist.broadcast(first, 0)
        apart = max(apart, (found - first).abs().max().item())
    assert "all_gather_into_tensor" in backend.explain()
    return [*errors, apart]


def _chain() -> torch.nn.Sequential:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = (
        part
        for _ in range(4)
        for part in (torch.nn.Linear(programs.WIDTH, programs.WIDTH), torch.nn.Tanh())
    )
    return torch.nn.Sequential(*layers).cuda()


def what_inductor_wrote() -> list[str]:
    """ "mm", "send" and "wait", in the order of the backward that Inductor wrote."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    model = _chain()
    backend = ol.compiler.backend(bucket_mib=1, lowering="inductor")
    made = torch.compile(model, backend=backend)
    batch = programs.batch_of(dist.get_rank())
    with config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(lambda: made(batch).square().mean().backward())
    marks = {"all_reduce": "send", "wait_tensor": "wait", "kernels.mm(": "mm"}
    marks |= {"kernels.addmm(": "mm", "triton_tem": "mm"}
    code = "\n".join(code for code in codes if "wait_tensor" in code)
    calls = code[code.index("def call(") :].splitlines()
    lines = [line for line in calls if not line.lstrip().startswith("#")]
    return [mark for line in lines for text, mark in marks.items() if text in line]


def code_on_two_streams() -> Generated:
    """A bucket of dW of three layers, packed and sent beside their dX."""
    costs = compiler.Costs(find_hardware("chalk"), 2)
    graph = compiler.nine_operators(width=WIDTH, rows=WIDTH)
    merged = compiler.merge(graph, compiler.plan_merges(graph, 8 * WIDTH**2))
    ordered = compiler.schedule(merged, compiler.plan_schedule(merged, costs))
    return compiler.generate(ordered, "backward", compiler.plan_streams(ordered))


def _cut(source: str, line: str) -> str:
    """`source` with nothing where `line` is."""
    assert source.count(line) == 1, source
    return source.replace(line, "pass")


def _late(source: str, line: str) -> str:
    """`source` with a delay before `line`, on the stream that is current there."""
    (found,) = (each for each in source.splitlines() if each.strip().startswith(line))
    indent = found[: len(found) - len(found.lstrip())]
    return source.replace(found, f"{indent}delay()\n{found}")


def late_gradients(source: str, whole: bool) -> str:
    """What is packed is written late; communication waits for the event or not."""
    late = _late(source, "dw2 = ")
    return late if whole else _cut(late, "side.wait_event(ready_0)")


def late_messages(source: str, whole: bool) -> str:
    """The last message leaves late; compute waits for it or not."""
    late = _late(source, "all_reduce_dw1 = ")
    return late if whole else _cut(late, "all_reduce_dw1.wait()")


def memory_that_is_let_go(source: str, whole: bool) -> str:
    """A message is packed late; its gradients are kept until then or not."""
    late = _late(source, "bucket_0_parts = ")
    if whole:
        return late
    early = late.replace("del bucket_0_flat", "del bucket_0_flat, dw2, dw3")
    return early.replace(", dw2, dw3  ", "  ").replace("del bucket_0, dw2, dw3", "pass")


CUTS = {f.__name__: f for f in (late_gradients, late_messages, memory_that_is_let_go)}


def run_source(source: str) -> list[torch.Tensor]:
    """The results of generated code on the calling rank, which are averages."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    device = streams.device()
    args = [torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(7)]
    on_device = [arg.div(WIDTH).to(device) for arg in args]
    streams.synchronize()
    made = load(source, "backward", {"delay": stream_programs.delay})
    results = made.run(on_device, dist.group.WORLD, device, streams.Stream())
    copies = [result.clone() for result in results]
    streams.synchronize()
    return copies


def differences() -> dict[str, tuple[float, float]]:
    """Of each edge: relative errors of the averages with it, and without."""
    source = code_on_two_streams().source
    right = run_source(source)
    found = {}
    for name, change in CUTS.items():
        errors = []
        for whole in (True, False):
            results = run_source(change(source, whole))
            pairs = zip(results, right, strict=True)
            errors.append(max(((a - b).norm() / b.norm()).item() for a, b in pairs))
        found[name] = (errors[0], errors[1])
    return found
