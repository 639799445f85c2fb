"""What Inductor is given. Its kernels take a minute here: see tests/gpu."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule

import overlaplab as ol
from overlaplab.errors import RankError
from overlaplab.techniques.compiler import lowering
from overlaplab.techniques.compiler.graphs import launches
from overlaplab.torch_versions import aot_module_simplified, inductor
from tests.techniques.compiler.nets import expected_states, state_of, step


class Interpreted:
    """In place of Inductor: runs what it is given, and remembers it."""

    def __init__(self) -> None:
        self.backwards: list[Graph] = []
        self.settings: list[dict[str, Any]] = []

    def compile_fx(
        self, module: GraphModule, inputs: Sequence[Any], inner_compile: Any
    ) -> Any:
        def backward(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
            return inner_compile(gm, example_inputs, is_backward=True)

        return aot_module_simplified()(
            module, inputs, fw_compiler=inner_compile, bw_compiler=backward
        )

    def compile_inner(
        self, gm: GraphModule, inputs: Sequence[Any], is_backward: bool = False
    ) -> Any:
        from torch._inductor import config

        if is_backward:
            self.backwards.append(gm.graph)
            names = lowering.KEEPS_ORDER
            self.settings.append({name: getattr(config, name) for name in names})

        def run(args: list[Any]) -> Any:
            return gm.forward(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def states() -> dict[str, Any]:
    made = ol.compiler.backend(hardware="chalk", bucket_mib=0.0005, lowering="inductor")

    def compiled(model: Any) -> Any:
        return torch.compile(ol.compiler.watch(model), backend=made)

    found = state_of(step("mlp", dist.get_rank(), compiled))
    return found | {"explained": made.explain()}


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_inductor_is_given_the_graph_that_was_scheduled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor import config

    fake = Interpreted()
    parts = (fake.compile_fx, fake.compile_inner, config.patch)
    monkeypatch.setattr(lowering, "inductor", lambda: parts)

    run = ol.run(states, world_size=2)

    assert run.warnings == ()
    explained = [values.pop("explained") for values in run.values]
    torch.testing.assert_close(
        list(run.values), expected_states("mlp", 2), rtol=0, atol=0
    )
    # The forward is known, too, and both are priced as what Inductor makes of them.
    assert "predicted on chalk, kernels fused by a rule of thumb: " in explained[0]
    assert "\nforward and backward: " in explained[0]
    assert len(launches(fake.backwards[0])) > 1
    assert fake.settings[0] == dict(lowering.KEEPS_ORDER)


def test_a_cached_backward_without_communication_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._functorch import config

    stub = SimpleNamespace(
        compile_fx=lambda: config.enable_autograd_cache, compile_fx_inner=None
    )
    monkeypatch.setitem(sys.modules, "torch._inductor.compile_fx", stub)

    with config.patch(enable_autograd_cache=True):
        assert inductor()[0]() is False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lowering": "triton"}, "lowering is 'triton'; expected one of ('eager', 'in"),
        (
            {"lowering": "inductor", "side_stream": True},
            "side_stream=True is for lowering='eager': leave one out",
        ),
    ],
)
def test_a_wrong_lowering_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(RankError) as failure:
        ol.run(lambda: ol.compiler.backend(**settings), world_size=1)

    assert message in str(failure.value.__cause__)
