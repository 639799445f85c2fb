"""The order of collectives and waits of DDP, FSDP2 and our reducer, on GPUs.

    python -m tests.gpu.orders --out FOLDER

runs each case on two GPUs and on `virtual`, and writes FOLDER/orders.json (the normal
forms, card, versions, date, command) and what they were made of: a Chrome trace for
each case and rank. tests/cluster/test_virtual_orders.py compares
`virtual` with what is stored in tests/gpu/orders.json.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from overlaplab import streams
from overlaplab.models import Transformer, TransformerConfig
from overlaplab.techniques.data_parallel import BucketedReducer
from tests.gpu.order_form import END, Form, normal_form, program_tokens, trace_tokens

WORLD_SIZE = 2
RECORDED_STEP = 2  # the third: DDP has rebuilt its buckets, FSDP2 knows its order
CONFIG = TransformerConfig(num_layers=4, d_model=128, num_heads=4, max_tokens=32)
CASE_TIMEOUT_S = 150

Step = Callable[[Tensor, Tensor], None]


def _plain_step(model: nn.Module, finish: Callable[[], object] = lambda: None) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        model(tokens, targets).backward()
        finish()
        optimizer.step()

    return step


def _ddp(**options: Any) -> Callable[[], Step]:
    def make() -> Step:
        return _plain_step(DistributedDataParallel(_model(), **options))

    return make


def _reducer(bucket_mib: float) -> Callable[[], Step]:
    def make() -> Step:
        model = _model()
        return _plain_step(model, BucketedReducer(model, bucket_mib=bucket_mib).wait)

    return make


def _fsdp(explicit: bool = False, mixed: bool = False, **options: Any) -> Any:
    def make() -> Step:
        model = _sharded(mixed, **options)
        if explicit:
            blocks = list(model.blocks)
            for i, block in enumerate(blocks):
                block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
                block.set_modules_to_backward_prefetch(blocks[max(i - 2, 0) : i][::-1])
        return _plain_step(model)

    return make


def _fsdp_accumulation() -> Step:
    """Two microbatches; gradients are reduced in the second."""
    model = _sharded(mixed=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model(tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(CONFIG).to(streams.device())


def _sharded(mixed: bool, **options: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = _model()
    options["mesh"] = init_device_mesh(streams.device().type, (WORLD_SIZE,))
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


CASES: dict[str, Callable[[], Step]] = {
    "ddp": _ddp(),
    "ddp_cap_1": _ddp(bucket_cap_mb=1),
    "ddp_views_static_cap_0.3": _ddp(
        bucket_cap_mb=0.3, gradient_as_bucket_view=True, static_graph=True
    ),
    "ddp_no_buffers": _ddp(broadcast_buffers=False),
    "reducer_cap_0.5": _reducer(0.5),
    "fsdp2": _fsdp(),
    "fsdp2_no_reshard": _fsdp(reshard_after_forward=False),
    "fsdp2_explicit_prefetch": _fsdp(explicit=True),
    "fsdp2_mixed": _fsdp(mixed=True),
    "fsdp2_accumulation": _fsdp_accumulation,
}


def run_case(name: str, watch: Callable[[int, Callable[[], None]], None]) -> None:
    """The steps of a case on this rank; `watch` runs each, with its number."""
    step = CASES[name]()
    device = streams.device()
    generator = torch.Generator().manual_seed(dist.get_rank())
    mark = torch.ones(4, device=device)
    for number in range(RECORDED_STEP + 1):
        tokens = torch.randint(256, (2, 33), generator=generator).to(device)
        tokens, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

        def marked(tokens: Tensor = tokens, targets: Tensor = targets) -> None:
            torch.cumsum(mark, 0)
            step(tokens, targets)
            torch.cumsum(mark, 0)

        watch(number, marked)


def virtual_form(name: str) -> list[Form]:
    """The normal form of each rank of `virtual`."""
    from overlaplab.cluster.virtual import run_virtual

    def main() -> None:
        def watch(number: int, marked: Callable[[], None]) -> None:
            marked()

        run_case(name, watch)

    _, program = run_virtual(main, world_size=WORLD_SIZE)
    forms = []
    for rank in range(WORLD_SIZE):
        tokens = list(program_tokens(program, rank))
        ends = [i for i, token in enumerate(tokens) if token.name == END]
        first = ends[2 * RECORDED_STEP]
        # Earlier steps stay in it, as history that streams may be behind.
        tokens = [t for i, t in enumerate(tokens) if i >= first or t.name != END]
        forms.append(normal_form(tokens))
    return forms


# -- on GPUs


def _gpu_rank(rank: int, port: int, names: list[str], folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    backend, device = "gloo", None  # a rehearsal without GPUs
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        backend, device = "nccl", torch.device("cuda", rank)
    dist.init_process_group(backend, rank=rank, world_size=WORLD_SIZE, device_id=device)
    for name in names:
        _watch_case(name, Path(folder, f"{name}.rank{rank}"))
    dist.destroy_process_group()


def _watch_case(name: str, place: Path) -> None:
    def watch(number: int, marked: Callable[[], None]) -> None:
        streams.synchronize()
        if number == RECORDED_STEP:
            _profiled(marked, f"{place}.trace.json.gz")
        else:
            marked()
        streams.synchronize()

    run_case(name, watch)
    dist.barrier()
    Path(f"{place}.done").touch()


def _profiled(step: Callable[[], None], path: str) -> None:
    """A Chrome trace with the events that streams record and wait for.

    The profiler tells which stream waits, but not for which record of an event: that
    PyTorch tells its sanitizer, right after each call, and here the trace.
    """
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    on = [True]

    def note(kind: str) -> Callable[[int, int], None]:
        def call(event: int, stream: int) -> None:
            if on[0]:
                with torch.profiler.record_function(f"{kind} {event} {stream}"):
                    pass

        return call

    if torch.cuda.is_available():
        from torch.cuda import _gpu_trace

        torch._C._activate_gpu_trace()
        _gpu_trace.register_callback_for_event_record(note("event_record"))
        _gpu_trace.register_callback_for_event_wait(note("event_wait"))
    with profile(
        activities=activities,
        record_shapes=True,
        experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True),
    ) as profiler:
        step()
        streams.synchronize()
    on[0] = False
    profiler.export_chrome_trace(path)


def _run_on_gpus(names: list[str], folder: str) -> dict[str, str]:
    """Run the cases on fresh processes after each that fails; the failures by case."""
    errors: dict[str, str] = {}
    while names:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = torch.multiprocessing.spawn(
            _gpu_rank, args=(port, names, folder), nprocs=WORLD_SIZE, join=False
        )
        error = ""
        left, deadline = names, time.monotonic() + CASE_TIMEOUT_S
        try:
            while not context.join(timeout=0.5):
                done = [Path(folder, f"{n}.rank0.done").exists() for n in names]
                if sum(done) > len(names) - len(left):
                    deadline = time.monotonic() + CASE_TIMEOUT_S
                left = [n for n, d in zip(names, done, strict=True) if not d]
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{left[:1]} took over {CASE_TIMEOUT_S} s")
        except Exception:
            error = traceback.format_exc()
            for process in context.processes:
                process.kill()
        left = [n for n in names if not Path(folder, f"{n}.rank0.done").exists()]
        if left:
            errors[left[0]] = error or "the processes ended without it"
        names = left[1:]
    return errors


def gpu_form(name: str, folder: str | Path) -> list[Form]:
    """The normal form of each rank, from the traces in `folder`."""
    forms = []
    for rank in range(WORLD_SIZE):
        path = Path(folder, f"{name}.rank{rank}.trace.json.gz")
        trace = json.loads(gzip.decompress(path.read_bytes()))
        forms.append(normal_form(trace_tokens(trace)))
    return forms


def _virtual_child(names: list[str], path: str) -> None:
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = virtual_form(name)
        except Exception:
            found[name] = traceback.format_exc()
        Path(path).write_text(json.dumps(found))


def _run_on_virtual(names: list[str], folder: str) -> dict[str, Any]:
    """In a process of its own: nothing of CUDA is there."""
    path = Path(folder, "virtual.json")
    context = torch.multiprocessing.get_context("spawn")
    child = context.Process(target=_virtual_child, args=(names, str(path)))
    child.start()
    child.join(CASE_TIMEOUT_S)
    child.kill()
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder for everything")
    parser.add_argument("cases", nargs="*", help="by default all")
    arguments = parser.parse_args()
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    from overlaplab.bench.workload import device_description

    names = arguments.cases or list(CASES)
    errors = _run_on_gpus(names, str(folder))
    virtual = _run_on_virtual(names, str(folder))
    cases: dict[str, Any] = {}
    for name in names:
        try:
            gpu: Any = gpu_form(name, folder)
        except Exception:
            gpu = errors.get(name, "") + traceback.format_exc()
        here = virtual.get(name, "did not run")
        equal = isinstance(gpu, list) and gpu == here
        if equal and gpu[0] == gpu[1]:
            cases[name] = gpu[0]  # of both ranks, here and on virtual
        else:
            cases[name] = {"gpu": gpu, "virtual": here}
        print(f"{name}: {'equal' if equal else 'NOT equal'}", flush=True)
    result = {
        **device_description(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python -m tests.gpu.orders --out FOLDER",
        "cases": cases,
    }
    (folder / "orders.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
