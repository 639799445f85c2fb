"""What each allocation is for, from the record."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from overlaplab.program import (
    Program,
    ProgramBuilder,
    StorageLife,
    live_by_kind,
    live_bytes,
    memory_kinds,
    resolve,
)
from overlaplab.timeline import MEMORY_KINDS


class Builder(ProgramBuilder):
    """One rank, whose recorder says of some storages what they are."""

    def __init__(self) -> None:
        super().__init__(1)
        self.said: dict[int, str] = {}

    def new(self, kind: str = "", bytes: int = 8):
        access = self.storage(0, bytes=bytes)
        if kind:
            self.said[access.storage] = kind
        return access

    def launch(self, name: str, reads=(), writes=(), phase: str = "") -> None:
        self.compute(0, name, reads=tuple(reads), writes=tuple(writes), phase=phase)

    def send(self, operation: str, reads, writes) -> None:
        self.collective(0, operation, reads=tuple(reads), writes=tuple(writes))

    def program(self) -> Program:
        built = self.build()
        said = (replace(s, kind=self.said.get(s.storage, "")) for s in built.storages)
        return replace(built, storages=tuple(said))

    def kinds(self) -> list[str]:
        found = memory_kinds(self.program(), 0)
        return [found[number] for number in sorted(found)]


def test_a_plain_step():
    b = Builder()
    weight, batch, hidden = b.new("parameters"), b.new(), b.new()
    b.launch("randn", writes=[batch])
    b.launch("mm", [batch, weight], [hidden], "forward")
    grad, passed = b.new("gradients"), b.new()
    b.launch("mm", [hidden], [grad], "backward")
    b.launch("mm", [hidden, weight], [passed], "backward")
    state, scratch = b.new("states"), b.new()
    b.launch("mul", [grad, state], [scratch])
    assert b.kinds() == [
        "parameters",
        "inputs",
        "activations",
        "gradients",
        "activations",
        "states",
        "other",
    ]


def test_a_batch_that_nobody_made_is_an_input():
    b = Builder()
    b.launch("mm", [b.new()], [b.new()], "forward")
    assert b.kinds() == ["inputs", "activations"]


def test_a_prefetcher_that_gathers_straight_into_what_it_computes_with():
    b = Builder()
    shard, full, hidden = b.new("parameters"), b.new(), b.new()
    b.launch("zeros", writes=[full])
    b.send("all_gather", [shard], [full])
    b.launch("mm", [full], [hidden], "forward")
    assert b.kinds() == ["shards", "gathered", "activations"]


def test_the_copies_on_the_way_are_the_collectives_and_the_last_one_is_gathered():
    """FSDP2: copy in, gather in place, copy out."""
    b = Builder()
    shard, flat, full = b.new("shards"), b.new(), b.new("parameters")
    b.launch("all_gather_copy_in", [shard], [flat])
    b.send("all_gather", [flat], [flat])
    b.launch("split_with_sizes_copy", [flat], [full])
    b.launch("mm", [full], [b.new()], "forward")
    assert b.kinds()[:3] == ["shards", "communication", "gathered"]


def test_a_cast_before_the_gather_leaves_the_master_a_shard():
    b = Builder()
    master, half, full = b.new("parameters"), b.new(), b.new()
    b.launch("_to_copy", [master], [half])
    b.send("all_gather", [half], [full])
    b.launch("mm", [full], [b.new()], "backward")
    assert b.kinds()[:3] == ["shards", "communication", "gathered"]


def test_a_replica_that_gathers_keep_up_to_date_stays_a_parameter():
    """ZeRO-1: it was there before, and is computed with."""
    b = Builder()
    initial, replica, shard = b.new(), b.new("parameters"), b.new("parameters")
    b.launch("uniform_", writes=[initial], reads=[initial])
    b.launch("cat", [initial], [replica])
    b.launch("mm", [replica], [b.new()], "forward")
    b.send("all_gather", [shard], [replica])
    assert b.kinds()[1:3] == ["parameters", "shards"]


def test_an_activation_that_is_gathered_is_no_parameter():
    """Sequence parallelism."""
    b = Builder()
    batch, part, whole = b.new(), b.new(), b.new()
    b.launch("mm", [batch], [part], "forward")
    b.send("all_gather", [part], [whole])
    b.launch("mm", [whole], [b.new()], "forward")
    assert b.kinds() == ["inputs", "activations", "communication", "activations"]


def test_what_a_reduce_scatter_makes_of_gradients_are_gradients():
    b = Builder()
    grad, flat, part = b.new("gradients"), b.new(), b.new()
    b.launch("chunk_cat", [grad], [flat], "backward")
    b.send("reduce_scatter", [flat], [part])
    assert b.kinds() == ["gradients", "communication", "gradients"]


def test_a_bucket_is_the_collectives():
    b = Builder()
    grad, bucket = b.new("gradients"), b.new()
    b.launch("cat", [grad], [bucket], "backward")
    b.send("all_reduce", [bucket], [bucket])
    assert b.kinds() == ["gradients", "communication"]


def test_what_the_recorder_says_goes_first():
    b = Builder()
    view = b.new("gradients")
    b.send("all_reduce", [view], [view])
    assert b.kinds() == ["gradients"]


def test_memory_by_kind_over_time():
    b = Builder()
    weight, batch = b.new("parameters", 100), b.new(bytes=7)
    hidden = b.new(bytes=30)
    b.compute(0, "mm", ns=1_000, reads=(batch,), writes=(hidden,), phase="forward")
    b.free(0, batch)
    b.compute(0, "mm", ns=2_000, reads=(weight, hidden), phase="forward")
    b.free(0, hidden)
    (memory,) = resolve(b.program(), "chalk").memory
    assert memory.steps == ((0, 137), (1_000, 130), (3_000, 100))
    assert memory.kinds == (
        ("parameters", (100, 100, 100)),
        ("inputs", (7, 0, 0)),
        ("activations", (30, 30, 0)),
    )
    assert memory.kinds_at(memory.peak_ns + 999) == (
        ("parameters", 100),
        ("inputs", 7),
        ("activations", 30),
    )
    assert memory.kinds_at(5_000) == (("parameters", 100),)
    assert memory.kinds_at(-1) == ()


def test_memory_that_changes_its_kind_and_not_its_size_is_a_step():
    b = Builder()
    first = b.new("parameters", 50)
    b.compute(0, "mm", ns=10)
    b.free(0, first)
    b.new("states", 50)
    b.compute(0, "mm", ns=10)
    (memory,) = resolve(b.program(), "chalk").memory
    assert memory.steps == ((0, 50), (10, 50))
    assert memory.kinds == (("parameters", (50, 0)), ("states", (0, 50)))


lives = st.builds(
    lambda bytes, born, length, kind: StorageLife(
        0, 0, bytes, born, None if length is None else born + length, "s", kind=kind
    ),
    st.integers(0, 50),
    st.integers(0, 10),
    st.none() | st.integers(0, 5),
    st.sampled_from(("", *MEMORY_KINDS)),
)


@given(st.lists(lives, max_size=8))
def test_the_kinds_add_up(storages):
    numbered = tuple(replace(life, storage=i) for i, life in enumerate(storages))
    program = Program(((),), 1, storages=numbered)
    by_kind = live_by_kind(program)
    assert list(by_kind) == [kind for kind in MEMORY_KINDS if kind in by_kind]
    for place, (index, live) in enumerate(live_bytes(program)):
        assert {steps[place][0] for steps in by_kind.values()} <= {index}
        assert sum(steps[place][1] for steps in by_kind.values()) == live
