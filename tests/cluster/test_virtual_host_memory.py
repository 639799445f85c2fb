"""Host memory: copies between it and the GPU's, and what the CPU does to it."""

import pytest
import torch
import torch.distributed as dist

import overlaplab as ol
from overlaplab import streams
from overlaplab.cluster.virtual import run_virtual
from overlaplab.hardware import find_hardware
from overlaplab.program import find_findings, resolve


def recorded(step, world_size=1, **options):
    values, program = run_virtual(step, world_size=world_size, **options)
    return values[0], program


def brief(program):
    """(kind, name, stream, after) of each operator."""
    return [(o.kind, o.name, o.stream, o.after) for o in program.ranks[0]]


def copies(program):
    return [
        (o.name, o.stream, o.read_bytes, dict(o.attributes))
        for o in program.ranks[0]
        if o.kind == "memcpy"
    ]


def hosted(program):
    return [(s.host, s.pinned) for s in program.storages]


@pytest.mark.parametrize("how", ["pin_memory()", "empty", "ones"])
def test_pinned_memory_goes_to_the_device_without_the_cpu_waiting(how):
    def step():
        if how == "pin_memory()":
            batch = torch.ones(256, device="cpu").pin_memory()
        elif how == "empty":
            batch = torch.empty(256, pin_memory=True)
            batch.fill_(1)
        else:
            batch = torch.ones(256, pin_memory=True)
        assert batch.is_pinned()
        side = streams.Stream()
        with streams.stream(side):
            moved = batch.to(ol.device(), non_blocking=True)
        streams.current_stream().wait_stream(side)
        assert not moved.is_pinned()
        assert moved.untyped_storage()._cdata != batch.untyped_storage()._cdata
        return moved + 1

    value, program = recorded(step)
    assert value.tolist() == [2] * 256
    assert copies(program) == [
        ("copy h2d", "stream 1", 1024, {"direction": "h2d", "pinned": True})
    ]
    assert not [o for o in program.ranks[0] if o.kind == "host_wait"]
    copy = next(o for o in program.ranks[0] if o.kind == "memcpy")
    assert program.ranks[0][-1].after == (copy.index,)
    assert (True, True) in hosted(program) and hosted(program)[-1] == (False, False)
    assert find_findings(program) == ()


@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("pinned", [False, True])
def test_the_cpu_waits_for_a_copy_unless_it_is_pinned_and_not_blocking(
    pinned, non_blocking
):
    def step():
        source = torch.zeros(4, device="cpu", pin_memory=pinned)
        target = torch.empty(4, device=ol.device())
        target.copy_(source, non_blocking=non_blocking)
        source.to(ol.device(), non_blocking=non_blocking)

    _, program = recorded(step)
    waits = [(o.name, o.after) for o in program.ranks[0] if o.kind == "host_wait"]
    if pinned and non_blocking:
        assert waits == []
    else:  # each waits for the copy before it
        assert waits == [("copy_", (1,)), ("to", (3,))]
    assert {c[3]["pinned"] for c in copies(program)} == {pinned}


@pytest.mark.parametrize("call", ["cpu", "to", "copy_", "device object", "other"])
def test_a_result_that_is_brought_back_is_waited_for(call):
    def step():
        loss = torch.ones(4) + 1
        if call == "cpu":
            back = loss.cpu()
        elif call == "to":
            back = loss.to("cpu")
        elif call == "device object":
            back = loss.to(torch.device("cpu"))
        elif call == "other":
            back = loss.to(torch.zeros(1, device="cpu"))
        else:
            back = torch.empty(4, device="cpu").copy_(loss)
        loss.zero_()
        return back.tolist()

    value, program = recorded(step)
    assert value == [2] * 4
    named = [(o.kind, o.name) for o in program.ranks[0] if o.name != "zeros"]
    wait = call if call in ("cpu", "copy_") else "to"
    assert named == [
        ("compute", "ones"),
        ("compute", "add"),
        ("memcpy", "copy d2h"),
        ("host_wait", wait),
        ("compute", "zero_"),
        ("host", "tolist"),
    ]
    assert find_findings(program) == ()


@pytest.mark.parametrize("waits", [False, True])
def test_reading_pinned_memory_before_the_copy_has_ended_is_a_hazard(waits):
    def step():
        loss = torch.ones(4) + 1
        box = torch.empty(4, pin_memory=True)
        box.copy_(loss, non_blocking=True)
        if waits:
            streams.current_stream().synchronize()
        return box.sum().item()

    value, program = recorded(step)
    assert value == 8
    found = find_findings(program)
    assert [f.kind for f in found] == ([] if waits else ["hazard"])


def test_to_cpu_without_blocking_is_pinned_as_torch_does_it():
    def step():
        loss = torch.ones(4) + 1
        box = loss.to("cpu", non_blocking=True)
        assert box.is_pinned()
        return box[0].item()

    _, program = recorded(step)
    assert copies(program)[0][3] == {"direction": "d2h", "pinned": True}
    assert [f.kind for f in find_findings(program)] == ["hazard"]


@pytest.mark.parametrize("repaired", [False, True])
def test_a_staging_buffer_that_is_refilled_during_its_copy_is_a_hazard(repaired):
    def step():
        buffer = torch.empty(4, pin_memory=True)
        side, copied = streams.Stream(), streams.Event()
        for fill in (1.0, 2.0):
            if repaired and fill > 1:
                copied.synchronize()
            buffer.fill_(fill)
            with streams.stream(side):
                batch = buffer.to(ol.device(), non_blocking=True)
                copied.record()
            streams.current_stream().wait_stream(side)
            batch.record_stream(streams.current_stream())
            total = batch.sum()
        return total.item()

    value, program = recorded(step)
    assert value == 8
    found = [f for f in find_findings(program) if f.kind == "hazard"]
    if repaired:
        assert found == []
    else:
        ops = [program.ranks[0][i] for i in found[0].ops]
        assert [(o.kind, o.name) for o in ops] == [
            ("memcpy", "copy h2d"),
            ("host", "fill_"),
        ]


def test_what_the_cpu_computes_stays_on_the_cpu():
    def step():
        a = torch.arange(6.0, device="cpu").view(2, 3)
        b = torch.zeros_like(a)
        b[:, 1] = a[:, 1] * 2
        picked = torch.nn.functional.one_hot(torch.ones(2, device="cpu").long(), 3)
        return (b.sum() + picked.sum()).item()

    value, program = recorded(step)
    assert value == 12
    kinds = {o.name: o.kind for o in program.ranks[0]}
    assert kinds["mul"] == kinds["sum"] == kinds["item"] == kinds["arange"] == "host"
    assert find_findings(program) == ()
    timeline = resolve(program, find_hardware("chalk"))
    assert not timeline.where(lambda s: s.kind == "memcpy").spans


def test_the_device_of_a_tensor_tells_where_it_is():
    def step():
        host = torch.ones(2, device="cpu")
        device = torch.ones(2)
        assert host.device == torch.device("cpu") != ol.device()
        assert device.device == host.to(ol.device()).device == ol.device()
        assert host.cuda().device == host.to("cuda").device == ol.device()
        assert device.cpu().device == torch.device("cpu")
        made = torch.zeros(2, device=device.device) + torch.ones(2, device="cuda")
        assert made.new_zeros(2, device=host.device).device == torch.device("cpu")
        assert torch.as_tensor(host, device=ol.device()).device == ol.device()
        assert torch.as_tensor([1.0], device="cpu").device == torch.device("cpu")
        return host is host.to("cpu") is host.cpu(), device is device.to(ol.device())

    value, _ = recorded(step)
    assert value == (True, True)


def test_a_module_moves_to_the_device_and_back():
    def step():
        with torch.random.fork_rng(devices=[]):
            model = torch.nn.Linear(2, 2)
        weight = model.weight
        before = len(model.weight)
        model.to(ol.device())
        assert model.weight is weight and before == 2
        model.cpu()
        assert model.weight.device == torch.device("cpu")
        model.to(ol.device())
        model(torch.ones(1, 2, device=ol.device())).sum().backward()
        return model.weight.grad.tolist()

    value, program = recorded(step)
    assert value == [[1, 1], [1, 1]]
    assert [c[0] for c in copies(program)] == ["copy d2h"] * 2 + ["copy h2d"] * 2
    assert find_findings(program) == ()


def test_gradients_flow_through_a_copy():
    def step():
        weight = torch.ones(3, device="cpu", requires_grad=True)
        (weight.to(ol.device()) * 2).sum().backward()
        return weight.grad

    value, _ = recorded(step)
    assert value.tolist() == [2, 2, 2]


def test_host_and_device_memory_in_one_operator_are_refused():
    def step():
        weight = torch.ones(3).to(ol.device())
        return weight + torch.ones(3, pin_memory=True)

    with pytest.raises(ol.RankError, match=r"(?s)add: .*host's memory.*ol\.device"):
        run_virtual(step, world_size=1)


def test_a_collective_takes_nothing_from_the_hosts_memory():
    def step():
        dist.all_reduce(torch.ones(3, device="cpu"))

    with pytest.raises(ol.RankError, match=r"(?s)all_reduce got.*ol\.device\(\)"):
        run_virtual(step, world_size=2)


def test_a_tensor_in_the_gpus_memory_cannot_be_pinned():
    with pytest.raises(ol.RankError, match="only the host's can be pinned"):
        run_virtual(lambda: torch.ones(3).to(ol.device()).pin_memory(), world_size=1)


def test_numbers_and_indices_of_the_host_go_with_a_kernel():
    def step():
        x = torch.ones(4).to(ol.device())
        scale = torch.tensor(2.0, device="cpu")
        return (x * scale)[torch.tensor([0, 1], device="cpu")].sum()

    value, program = recorded(step)
    assert value == 4
    kernels = [o.name for o in program.ranks[0] if o.kind == "compute"]
    assert kernels == ["ones", "mul", "index", "sum"]


def test_a_list_of_tensors_is_copied_one_by_one():
    def step():
        sources = [torch.ones(2, pin_memory=True), torch.ones(3)]
        targets = [torch.zeros(n).to(ol.device()) for n in (2, 3)]
        torch._foreach_copy_(targets, sources, non_blocking=True)
        return torch.cat(targets)

    value, program = recorded(step)
    assert value.tolist() == [1] * 5
    named = [(o.kind, o.name) for o in program.ranks[0][-3:]]
    assert named == [
        ("memcpy", "copy h2d"),
        ("compute", "_foreach_copy_"),
        ("compute", "cat"),
    ]


def test_fake_tensors_move_as_real_ones_do():
    def step():
        batch = torch.ones(256, pin_memory=True)
        moved = batch.to(ol.device(), non_blocking=True)
        loss = (moved * 2).to(torch.bfloat16)
        dist.all_reduce(loss)
        return loss.cpu()

    _, real = recorded(step)
    _, fake = recorded(step, fake=True)
    assert fake.ranks == real.ranks and fake.storages == real.storages


def test_torch_is_as_it_was_after_a_run():
    before = (torch.zeros, torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.device)
    recorded(lambda: torch.ones(2, device="cpu").cpu())
    assert (
        torch.zeros,
        torch.Tensor.to,
        torch.Tensor.cpu,
        torch.Tensor.device,
    ) == before
    assert "cpu" not in vars(torch.Tensor) and "device" not in vars(torch.Tensor)
    assert torch.ones(2, device="cpu").device == torch.device("cpu")


@pytest.mark.parametrize("make", ["empty_like", "zeros_like", "full_like"])
def test_what_is_made_like_a_host_tensor_on_the_device_is_on_the_device(make):
    def step():
        host = torch.full((64,), 2.0, device="cpu")
        more = (1.0,) if make == "full_like" else ()
        made = getattr(torch, make)(host, *more, device=ol.device())
        made.copy_(host.pin_memory(), non_blocking=True)
        return (made + torch.ones(64, device=ol.device())).sum().item()

    value, program = recorded(step)
    assert value == 192.0
    assert [name for name, *_ in copies(program)] == ["copy h2d"]
