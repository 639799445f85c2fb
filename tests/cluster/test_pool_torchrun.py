"""Under torchrun `run` starts nothing: every process is a rank and gets all values."""

import json
import os
import subprocess
import sys

import overlaplab as ol
from tests.guards import GUARD_S

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
import overlaplab as ol

from torch.distributed import destroy_process_group, init_process_group

def step(scale):
    for _ in range(2):
        init_process_group("gloo", rank=int(os.environ["RANK"]))
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        destroy_process_group()
    return os.getpid(), total.item() * scale

def calls_in_the_store():
    store = dist.distributed_c10d._get_default_store()
    return store.add(f"calls of rank {dist.get_rank()}", 1)

def run_gloo(fn, *args):
    return ol.run(fn, *args, cluster="gloo", world_size=2, timeout_s=900)

calls = [run_gloo(calls_in_the_store).values for _ in range(2)]
for _ in range(2):
    run = run_gloo(step, 10)
kinds = sorted({(span.rank, span.kind) for span in run.timeline.spans})
with open(f"{sys.argv[1]}/{os.environ['RANK']}.json", "w") as file:
    json.dump([os.getpid(), run.values, kinds, calls], file)
"""


def test_each_process_is_one_rank_and_has_the_values_of_all(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    source = os.path.dirname(os.path.dirname(ol.__file__))
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(script), str(tmp_path)]
    subprocess.run(command, env=environment, check=True, timeout=GUARD_S)

    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]

    values = [[pid, 30.0] for pid, *_ in results]
    for _, of_all, kinds, calls in results:
        assert of_all == values
        assert calls == [[1, 1], [1, 1]]  # nothing of a run is in the store of the next
        assert [0, "communication"] in kinds
        assert [1, "communication"] in kinds


def test_a_hang_ends_the_process_after_its_deadline_and_says_where():
    code = """
import time
from overlaplab.cluster.pool.torchrun import _deadline

def hang():
    time.sleep(1000)

with _deadline(0.2, 3):
    hang()
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=GUARD_S
    )

    assert ended.returncode == 124
    assert "rank 3 passed its deadline of 0.2 s" in ended.stderr
    assert "in hang" in ended.stderr
