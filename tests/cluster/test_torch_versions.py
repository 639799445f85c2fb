"""What overlaplab uses of torch and torch does not promise."""

import pytest
import torch
from torch.distributed import distributed_c10d

from overlaplab import torch_versions


def test_every_private_name_is_there():
    torch_versions.check_private_names()
    assert torch_versions.sharding_propagator().__name__ == "ShardingPropagator"


def test_a_torch_that_lacks_names_is_refused_with_version_names_and_repair(monkeypatch):
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    monkeypatch.delattr(distributed_c10d, "_new_process_group_helper")
    with pytest.raises(ImportError) as refused:
        torch_versions.check_private_names()
    message = str(refused.value)
    assert f"torch {torch.__version__} lacks" in message
    assert "torch._C._current_graph_task_id" in message
    assert "distributed_c10d._new_process_group_helper" in message
    assert "2.11 to 2.13" in message and "pip install" in message
    assert "_get_sequence_nr" not in message


def test_a_module_that_is_gone_is_named_too():
    with pytest.raises(ImportError, match=r"lacks .*: torch\.nowhere\. These"):
        torch_versions.check_private_names({"torch.nowhere": "this that"})


def test_old_and_new_names_of_a_method_are_one_operation():
    operations = torch_versions.OPERATIONS
    assert operations["_allgather_base"] == operations["all_gather_single"]
    assert operations["reduce_scatter_tensor_coalesced"] == "reduce_scatter"
    for method in ("allreduce", "broadcast", "send", "recv", "barrier"):
        assert hasattr(torch.distributed.ProcessGroup, method)
