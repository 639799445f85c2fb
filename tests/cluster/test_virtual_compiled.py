"""torch.compile in ranks: one compile serves all of them, and every rank runs it."""

import dataclasses
import threading
import warnings

import pytest
import torch
import torch._dynamo.config as config
import torch.distributed as dist

import overlaplab as ol
from overlaplab.cluster.virtual import compiling
from overlaplab.errors import RankError, RunTimeoutError
from tests.cluster.compiled_nets import Counting, Net, Numbered


@pytest.fixture(autouse=True)
def fresh():
    Counting.compiled.clear()
    Counting.ran.clear()


def apply(name, shapes=(4,), **options):
    model = torch.compile(Net(), backend=Counting(name), **options)
    return [model(torch.ones(rows, 8)).sum().item() for rows in shapes]


def test_nine_ranks_run_what_one_of_them_compiled_and_so_does_a_second_run():
    first = ol.run(apply, "nine", world_size=9)
    assert Counting.compiled == ["nine"]
    assert sorted(Counting.ran) == list(range(9))
    eager = ol.run(lambda: [Net()(torch.ones(4, 8)).sum().item()], world_size=1)
    assert first.values == eager.values * 9
    Counting.compiled.clear()
    again = ol.run(apply, "nine", world_size=9)
    assert Counting.compiled == []
    assert again.program.ranks == first.program.ranks  # capturing records nothing


def test_four_ranks_with_three_shapes_run_compiled_code_on_all():
    ol.run(apply, "shapes", (2, 3, 5), world_size=4, dynamic=False)
    assert Counting.compiled == ["shapes"] * 3
    assert sorted(Counting.ran) == sorted([0, 1, 2, 3] * 3)


def test_at_the_limit_of_recompiles_a_rank_ends_and_says_what_to_do():
    def step():
        config.recompile_limit = 2
        return apply("limit", (2, 3, 5), dynamic=False)

    before = config.recompile_limit
    torch._dynamo.reset()
    with pytest.raises(
        RankError, match=r"recompile_limit.*__eq__ and __hash__"
    ) as found:
        ol.run(step)
    assert type(found.value.__cause__).__name__ == "FailOnRecompileLimitHit"
    assert len(Counting.ran) == 2  # and then none without the compiler
    assert config.recompile_limit == before
    assert not config.fail_on_recompile_limit_hit


def test_many_ranks_may_have_as_many_compiles_each_as_a_process_has():
    (limit, *others) = ol.run(lambda: config.recompile_limit, world_size=20).values
    assert {limit, *others} == {160}
    assert ol.run(lambda: config.recompile_limit, world_size=2).values == (64, 64)


def test_a_thread_of_a_rank_has_the_limits_of_its_rank():
    def step():
        seen = []
        thread = threading.Thread(
            target=lambda: seen.append(config.fail_on_recompile_limit_hit)
        )
        thread.start()
        thread.join()
        return seen

    assert ol.run(step).values == ([True], [True])


def test_what_asks_for_its_rank_is_compiled_for_each():
    def step():
        model = torch.compile(Numbered(), backend=Counting("numbered"))
        return [model(torch.zeros(1)).item() for _ in range(2)]

    assert ol.run(step, world_size=3).values == ([0, 0], [1, 1], [2, 2])
    assert Counting.compiled == ["numbered"] * 3
    assert ol.run(step, world_size=3).values == ([0, 0], [1, 1], [2, 2])
    assert Counting.compiled == ["numbered"] * 3
    assert compiling.rank_number() == -1


def test_a_module_that_is_an_object_may_be_a_notebooks_global():
    cell = {"__name__": "a notebook", "config": config}
    exec("def step():\n    return config.recompile_limit", cell)
    assert ol.run(cell["step"]).values == (64, 64)


def test_a_time_out_names_a_slow_compile():
    def step():
        model = torch.compile(Net(), backend=Counting("slow", spins_s=20))
        model(torch.ones(4, 8))

    with pytest.raises(RunTimeoutError) as found:
        ol.run(step, timeout_s=2)
    first, second = str(found.value).splitlines()[1:3]
    assert "rank 0 was at" in first and "compiling" in first
    assert "compiling" not in second
    assert "Compiling takes seconds" in str(found.value)


# -- training


def train(fake=False):
    torch.manual_seed(dist.get_rank())
    model = Net(sums=True)
    compiled = torch.compile(model, backend=Counting("train", trains=True))
    compiled(torch.ones(4, 8)).sum().backward()
    return [p.grad for p in model.parameters()]


def eager():
    torch.manual_seed(dist.get_rank())
    model = Net(sums=True)
    model(torch.ones(4, 8)).sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.fixture(scope="module")
def trained():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of global hooks, above all
        return ol.run(train, world_size=2)


def test_no_compiled_module_is_warned_of_our_hooks_and_of_others_it_is(trained):
    def step():
        hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
        try:
            torch.compile(Net(), backend=Counting("hook"))(torch.ones(4, 8))
        finally:
            hook.remove()

    with pytest.warns(UserWarning, match="global hooks"):
        ol.run(step, world_size=1)


def test_compiled_gradients_are_those_of_eager_code(trained):
    for ours, theirs in zip(trained.values, ol.run(eager).values, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert trained.warnings == ()


def test_parameters_have_the_names_that_their_model_gave_them(trained):
    names = {s.name for s in trained.program.storages if s.kind == "parameters"}
    layers = [f"{n}.{kind}" for n in ("first", "second") for kind in ("weight", "bias")]
    assert names == {*layers}


def test_lines_of_compiled_code_are_those_that_were_compiled(trained):
    ops = trained.program.ranks[1]
    forward = [op for op in ops if op.phase == "forward" and "nets" in op.source]
    here = "compiled_nets.py:{} in forward"
    first = int(forward[0].source.split(":")[1].split()[0])
    expected = [
        ("addmm", 0),
        ("relu", 1),
        ("addmm", 2),
        ("clone", 4),
        ("all_reduce", 4),
    ]
    assert [(op.name, op.source) for op in forward] == [
        (name, here.format(first + later)) for name, later in expected
    ]
    backward = [op for op in ops if op.phase == "backward" and op.name == "mm"]
    assert {op.source.split()[-1] for op in backward} == {"run"}  # of the backend
    assert [op.attributes["forward"] for op in backward] == [
        here.format(first + later) for later in (2, 2, 0)
    ]


def test_where_torchs_own_backend_runs_the_lines_are_the_same(trained):
    def step():
        model = Net(sums=True)
        torch.compile(model, backend="aot_eager")(torch.ones(4, 8)).sum().backward()

    found = ol.run(step, world_size=2).program.ranks[1]
    ours = trained.program.ranks[1]
    in_nets = [(op.name, op.source) for op in found if op.phase == "forward"][:5]
    assert in_nets == [
        (op.name, op.source)
        for op in ours
        if op.phase == "forward" and "nets" in op.source
    ]
    assert {op.source.split()[-1] for op in found if op.phase == "backward"} == {"step"}


def test_a_functional_collective_sends_a_copy_that_a_kernel_makes(trained):
    ops = trained.program.ranks[0]
    sent = [op for op in ops if op.collective]
    assert len(sent) == 2  # in each direction
    for op in sent:
        copy = ops[op.index - 1]
        assert (copy.name, copy.write_bytes, copy.writes) == ("clone", 128, op.reads)


def test_fake_ranks_record_what_real_ones_do(trained):
    fake = ol.run(train, world_size=2, fake=True)
    real = [dataclasses.replace(op, rank=0) for op in trained.program.ranks[0]]
    assert list(fake.program.ranks[0]) == real
