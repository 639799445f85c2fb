"""What differs between torch 2.11 and 2.13, and the private names of torch in use.

Both stand here and nowhere else. Importing this module, which everything does that
needs torch, looks up each private name: a torch that lacks one is refused at once, by
an error that says which, and not by an AttributeError in the middle of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import CellType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.utils import _python_dispatch

TESTED = ("2.11", "2.13")  # the oldest and the newest
# Module of torch -> the private names of it that the package uses.
PRIVATE_NAMES: Mapping[str, str] = {
    "torch._C": "_TensorBase _current_autograd_node _current_graph_task_id "
    "_will_engine_execute_node",
    "torch._C._autograd": "_profiler_enabled",
    "torch._C._distributed_c10d": "AllgatherOptions HashStore ProcessGroup "
    "ReduceScatterOptions Store Work "
    "_set_thread_isolation_mode _unregister_all_process_groups",
    "torch._C._distributed_c10d.ProcessGroup": "_start_coalescing _end_coalescing "
    "_set_group_name _set_group_desc allreduce allreduce_coalesced",
    "torch._C._distributed_c10d.Reducer": "_set_forward_pass_work_handle",
    "torch._guards": "TracingContext",
    "torch._subclasses.fake_tensor": "DataDependentOutputException "
    "DynamicOutputShapeException FakeTensor FakeTensorMode is_fake "
    "unset_fake_temporarily",
    "torch._tensor": "",
    "torch": "_disable_dynamo _foreach_copy_ _foreach_div_ _foreach_mul_ "
    "_foreach_norm _foreach_zero_ _is_functional_tensor",
    "torch.Tensor": "_backward_hooks _post_accumulate_grad_hooks _version",
    "torch.autograd": "_engine_run_backward _get_sequence_nr",
    "torch.autograd.graph": "_engine_run_backward",
    "torch.autograd.Variable": "_execution_engine",
    "torch.autograd.function": "BackwardCFunction",
    "torch.autograd.grad_mode": "_unsafe_preserve_version_counter",
    "torch.cuda": "_lazy_call _sleep",
    "torch.distributed": "_Work",
    "torch.distributed._mesh_layout": "",
    "torch.distributed.c10d_logger": "_exception_logger",
    "torch.distributed.distributed_c10d": "_new_process_group_helper "
    "_resolve_process_group _world batch_isend_irecv",
    "torch.jit._builtins": "_get_builtin_table",
    "torch.nn.modules.module": "_global_forward_pre_hooks _has_any_global_hook",
    "torch._ops.OpOverload": "_uncache_dispatch",
    "torch.ops.aten": "_fused_rms_norm _fused_rms_norm_backward "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention",
    "torch.optim.optimizer": "_foreach_supported_types "
    "_get_foreach_kernels_supported_devices",
    "torch.utils._device": "_device_constructors",
    "torch.utils._foreach_utils": "_foreach_supported_types",
    "torch.utils._python_dispatch": "TorchDispatchMode _disable_current_modes",
    "torch.utils._pytree": "tree_flatten tree_leaves tree_unflatten",
    "torch.utils.flop_counter": "flop_registry",
}
# Names that torch has only where it was built for CUDA.
PRIVATE_CUDA_NAMES = {
    "torch._C": "_cuda_getCurrentStream _cuda_getDevice _cuda_setStream"
}
# Names that take two seconds to import: the virtual cluster's first run looks them up.
PRIVATE_DTENSOR_NAMES = {
    "torch.distributed.tensor._sharding_prop.ShardingPropagator": ""
    "_propagate_tensor_meta_non_cached"
}
# Names that Dynamo imports, which takes seconds: who compiles looks them up.
PRIVATE_COMPILER_NAMES = {"torch._functorch.aot_autograd": "aot_module_simplified"}
PRIVATE_INDUCTOR_NAMES = {
    "torch._inductor.compile_fx": "compile_fx compile_fx_inner",
    "torch._inductor.config": "patch reorder_for_compute_comm_overlap "
    "reorder_for_locality reorder_for_peak_memory",
    "torch._functorch.config": "patch enable_autograd_cache",
}


def check_private_names(names: Mapping[str, str] = PRIVATE_NAMES) -> None:
    """Look up `names`.

    Raises:
        ImportError: this torch lacks some; says its version, which, and what to do.
    """
    missing = []
    for place, wanted in names.items():
        try:
            owner = _find(place)
        except (ImportError, AttributeError):
            missing.append(place)
            continue
        missing += [f"{place}.{n}" for n in wanted.split() if not hasattr(owner, n)]
    if missing:
        raise ImportError(
            f"torch {torch.__version__} lacks what overlaplab uses of it: "
            f"{', '.join(missing)}. These names are private and change with versions; "
            f"overlaplab is tested with torch {TESTED[0]} to {TESTED[1]}. Repair: "
            f'pip install "torch=={TESTED[1]}.*", or a newer overlaplab'
        )


def _find(place: str) -> Any:
    """A module, or a class in one."""
    try:
        return import_module(place)
    except ImportError:
        module, _, name = place.rpartition(".")
        return getattr(import_module(module), name)


check_private_names()
if torch.version.cuda:
    check_private_names(PRIVATE_CUDA_NAMES)


def sharding_propagator() -> Any:
    """The class with which DTensor finds shapes; see `PRIVATE_DTENSOR_NAMES`."""
    check_private_names(PRIVATE_DTENSOR_NAMES)
    return _find(next(iter(PRIVATE_DTENSOR_NAMES)))


def aot_module_simplified() -> Any:
    """AOTAutograd for backends of `torch.compile`; see `PRIVATE_COMPILER_NAMES`."""
    check_private_names(PRIVATE_COMPILER_NAMES)
    return _find("torch._functorch.aot_autograd").aot_module_simplified


def inductor() -> tuple[Any, Any, Any]:
    """Inductor's compile_fx, without AOTAutograd's cache, compile_fx_inner, and config.

    That cache knows a graph by what Dynamo gave, not by what an `inner_compile` made of
    it: the backward of an earlier compile would come back, without any communication.
    """
    check_private_names(PRIVATE_INDUCTOR_NAMES)
    compile_fx = _find("torch._inductor.compile_fx")
    uncached = _find("torch._functorch.config").patch(enable_autograd_cache=False)
    patch = _find("torch._inductor.config").patch
    return uncached(compile_fx.compile_fx), compile_fx.compile_fx_inner, patch


# torch's stubs do not know how its C++ classes are subclassed.
BaseGroup: Any = dist.ProcessGroup
BaseStore: Any = torch._C._distributed_c10d.Store
BaseStream: Any = torch.Stream
BaseWork: Any = dist._Work  # type: ignore[attr-defined]

# Gathered or scattered in one tensor: called `..._into_tensor`, `..._tensor` until
# 2.12, which 2.13 deprecates.
all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


def launch_all_gather(group: dist.ProcessGroup, full: Tensor, shard: Tensor) -> Any:
    """Gather equal shards into one tensor, asynchronously; returns the work.

    As `all_gather_single` with `async_op`, by the group's own method: what
    torch.distributed's function looks up first costs as much CPU time as the launch.
    """
    return getattr(group, _ALL_GATHER)(full, shard, _ALL_GATHER_OPTIONS)


def launch_reduce_scatter(
    group: dist.ProcessGroup, part: Tensor, full: Tensor, options: Any
) -> Any:
    """Reduce one tensor and keep a part, asynchronously; see `launch_all_gather`.

    Args:
        group: the ranks.
        part, full: out of `full`, into `part`.
        options: of `reduce_scatter_options`, made once.
    """
    return getattr(group, _REDUCE_SCATTER)(part, full, options)


def reduce_scatter_options(op: Any) -> Any:
    """For `launch_reduce_scatter`: it reduces by `op`."""
    options: Any = torch._C._distributed_c10d.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp(op)
    options.asyncOp = True
    return options


_NEW = hasattr(dist.ProcessGroup, "all_gather_single")
_ALL_GATHER = "all_gather_single" if _NEW else "_allgather_base"
_REDUCE_SCATTER = "reduce_scatter_single" if _NEW else "_reduce_scatter_base"
_ALL_GATHER_OPTIONS: Any = torch._C._distributed_c10d.AllgatherOptions()
_ALL_GATHER_OPTIONS.asyncOp = True

# Method of `ProcessGroup` in 2.13 -> the operation that it launches, and the names by
# which 2.11, C++ and older callers reach the same method.
_METHODS: Mapping[str, tuple[str, ...]] = {
    "allreduce": ("all_reduce",),
    "allreduce_coalesced": ("all_reduce",),
    "broadcast": ("broadcast",),
    "reduce": ("reduce",),
    "allgather": ("all_gather",),
    "allgather_coalesced": ("all_gather",),
    "all_gather_single": ("all_gather", "_allgather_base"),
    "all_gather_single_coalesced": ("all_gather", "allgather_into_tensor_coalesced"),
    "reduce_scatter": ("reduce_scatter",),
    "reduce_scatter_single": ("reduce_scatter", "_reduce_scatter_base"),
    "reduce_scatter_single_coalesced": (
        "reduce_scatter",
        "reduce_scatter_tensor_coalesced",
    ),
    "alltoall": ("all_to_all",),
    "all_to_all_single": ("all_to_all", "alltoall_base"),
    "gather": ("gather",),
    "scatter": ("scatter",),
    "barrier": ("barrier",),
    "send": ("send",),
    "recv": ("recv",),
    "recv_anysource": ("recv",),
}
# Every such name, new and old -> the operation's name in torch.distributed.
OPERATIONS: Mapping[str, str] = {
    name: operation
    for method, (operation, *older) in _METHODS.items()
    for name in (*older, method)
}
# What else a group must answer to.
_OTHER_METHODS = ("merge_remote_group", "monitored_barrier", "split_group")
Group = TypeVar("Group", bound=type)


def complete_group(cls: Group) -> Group:
    """Give a ProcessGroup class the older names, and a refusal for what it lacks.

    A missing method would end in "No backend type associated with device type cpu".
    """
    for method, (_, *older) in _METHODS.items():
        for name in older:
            setattr(cls, name, getattr(cls, method))
    for name in (*OPERATIONS, *_OTHER_METHODS):
        if name not in cls.__dict__ and hasattr(dist.ProcessGroup, name):
            setattr(cls, name, _refusal(name))
    return cls


def _refusal(name: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"ProcessGroup.{name} is not supported on the virtual cluster yet; "
            'run it with cluster="gloo" or cluster="nccl"'
        )

    refuse.__name__ = name
    return refuse


def averages(group: dist.ProcessGroup) -> bool:
    """Whether the group's backend has `ReduceOp.AVG`; gloo has it since 2.13 only."""
    return dist.get_backend(group) not in ("gloo", "mpi", "ucc")


@contextmanager
def rewrapped(function: Any, make: Callable[[Any], Any]) -> Iterator[None]:
    """While open, a decorated function of torch.distributed wraps `make(original)`: for
    those, too, who imported it by name."""
    cell: CellType = function.__closure__[function.__code__.co_freevars.index("func")]
    original = cell.cell_contents
    cell.cell_contents = make(original)
    try:
        yield
    finally:
        cell.cell_contents = original


def fake_mode() -> FakeTensorMode:
    """A new fake mode that may be entered in a thread.

    Where torch is built for CUDA and there is no GPU, the first fake mode of a process
    sets a stand-in for the device that dies with its thread; entering another one then
    crashes (2.11). So the stand-in is set here, in the caller's thread.
    """
    with FakeTensorMode():
        return FakeTensorMode(allow_non_fake_inputs=True)


def swap_of_fakes() -> Callable[[Any, Any], None]:
    """`torch.utils.swap_tensors`, by which modules convert fake parameters.

    torch swaps no tensor that somebody refers to, be it the fake mode itself, and
    `model.bfloat16()` failed (2.11, 2.13). On a GPU a module gives its parameters other
    data instead, and so do fake ones here.
    """
    swap: Any = torch.utils.swap_tensors

    def swap_tensors(one: Any, other: Any) -> None:
        if is_fake(one) and is_fake(other):
            one.data = other
        else:
            swap(one, other)

    return swap_tensors


def mode_flags() -> dict[str, Any]:
    """torch's process-wide notes of which dispatch modes are on."""
    names = [n for n in vars(_python_dispatch) if n.startswith("_is_in_")]
    return {name: getattr(_python_dispatch, name) for name in names}


def set_mode_flags(flags: dict[str, Any]) -> None:
    """Put back what `mode_flags` returned."""
    for name, value in flags.items():
        setattr(_python_dispatch, name, value)
    name = "is_in_mode_without_ignore_compile_internals"
    set_for_dynamo = getattr(_python_dispatch, f"set_{name}", None)  # not in 2.11
    if set_for_dynamo is not None:
        set_for_dynamo(
            flags.get("_is_in_any_mode_without_ignore_compile_internals", False)
        )
