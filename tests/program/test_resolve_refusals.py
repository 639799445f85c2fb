"""What `resolve` and `replay` answer to what is no program, plan or hardware."""

from dataclasses import replace

import pytest

from overlaplab.errors import DeadlockError
from overlaplab.hardware import find_hardware
from overlaplab.program import (
    PayloadTensor,
    Program,
    ProgramBuilder,
    find_deadlock,
    find_findings,
    replay,
    resolve,
)


def with_a_gradient() -> Program:
    b = ProgramBuilder(2)
    for rank in (0, 1):
        b.compute(rank, "backward", ns=10)
        b.collective(rank, "all_reduce", payload=[PayloadTensor(4, "float32", ready=0)])
    return b.build()


@pytest.mark.parametrize(
    "ask",
    [
        lambda program: resolve(program, "chalk"),
        lambda program: replay(program, hardware="chalk"),
        lambda program: replay(program, hardware="chalk", buckets=100),
        find_findings,
        find_deadlock,
    ],
    ids=["resolve", "replay", "replay with buckets", "find_findings", "find_deadlock"],
)
@pytest.mark.parametrize(
    ("thing", "kind"),
    [
        (None, "NoneType"),
        (resolve(with_a_gradient(), "chalk"), "Timeline"),
        (ProgramBuilder(), "ProgramBuilder"),
    ],
    ids=["None", "timeline", "builder"],
)
def test_what_is_no_program_is_a_type_error_that_says_where_programs_come_from(
    ask, thing, kind
):
    with pytest.raises(TypeError, match=rf"program is {kind}; expected .*run\.program"):
        ask(thing)


@pytest.mark.parametrize(
    "buckets",
    [1.5, "all", [0], [[0.0]], [["0"]], {0: [0]}, [None]],
    ids=repr,
)
def test_buckets_that_are_neither_a_cap_nor_positions_are_a_type_error(buckets):
    with pytest.raises(TypeError, match=r"buckets is .*; expected a cap in bytes"):
        replay(with_a_gradient(), hardware="chalk", buckets=buckets)


@pytest.mark.parametrize("buckets", [0, -1, True])
def test_a_cap_of_no_bytes_is_refused(buckets):
    with pytest.raises(ValueError, match=f"bucket cap is {buckets} bytes"):
        replay(with_a_gradient(), hardware="chalk", buckets=buckets)


def test_a_rule_that_is_no_function_is_a_type_error():
    with pytest.raises(TypeError, match="is_gradient is 'all_reduce'; expected a func"):
        replay(with_a_gradient(), hardware="chalk", buckets=8, is_gradient="all_reduce")


@pytest.mark.parametrize("hardware", [None, 5, with_a_gradient()])
def test_hardware_that_is_none_is_a_type_error(hardware):
    with pytest.raises(TypeError, match=r"hardware is .*; expected a name"):
        resolve(with_a_gradient(), hardware)


def test_a_collective_that_no_formula_knows_is_refused_by_its_name():
    b = ProgramBuilder(1)
    b.collective(0, "all_gather_v", bytes=8)
    with pytest.raises(ValueError, match=r"unknown collective 'all_gather_v'; expec"):
        resolve(b.build(), "chalk")


@pytest.mark.parametrize(("hardware", "time"), [("chalk", "4.00"), ("slow", "4.30")])
def test_a_deadlock_tells_the_virtual_time_at_which_nothing_moves_any_more(
    hardware, time
):

    slow = replace(find_hardware("chalk"), launch_ns=300)
    b = ProgramBuilder(2)
    b.compute(0, "forward", ns=4_000)
    b.wait(0, b.collective(0, "all_reduce", bytes=8))
    b.compute(0, "step")
    with pytest.raises(DeadlockError, match=rf"no rank can move at {time} us"):
        resolve(b.build(), slow if hardware == "slow" else hardware)
