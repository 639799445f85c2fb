"""What ranks say through the store is heard in the run, and the world, that said it."""

from __future__ import annotations

import subprocess
import sys

import torch.distributed as dist

from overlaplab.techniques import groups
from tests.guards import GUARD_S
from tests.ranks import On, everywhere, values_on


def said_and_numbered() -> tuple[bool, int]:
    """Whether something was said before; the number of a reducer."""
    world = dist.group.WORLD
    said = groups._store().check([groups._key(world, "a word", 0)])
    dist.barrier()
    groups.say(world, "a word", "hello")
    return said, groups.number_in(world)


@everywhere
def test_a_run_hears_and_counts_nothing_of_the_one_before(on: On) -> None:
    for _ in range(2):
        assert values_on(on, said_and_numbered) == ((False, 1),) * on.ranks


WORLDS = """
from datetime import timedelta
import torch.distributed as dist
from overlaplab.techniques import groups

store = dist.HashStore()
for text in ("first", "second"):
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    store.set_timeout(timedelta(milliseconds=1))
    try:
        print(groups.hear(dist.group.WORLD, "a word", 0))
    except RuntimeError as error:
        print(error)
    groups.say(dist.group.WORLD, "a word", text)
    heard = groups.hear(dist.group.WORLD, "a word", 0)
    print(heard, groups.number_in(dist.group.WORLD))
    dist.destroy_process_group()
"""


def test_a_second_world_of_one_store_hears_nothing_of_the_first() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WORLDS], capture_output=True, text=True, timeout=GUARD_S
    )

    silence = "rank 0 did not come to a word in time. Call it on every rank."
    heard = [silence, "first 1", silence, "second 1"]
    assert ended.stdout.splitlines() == heard, ended.stderr
