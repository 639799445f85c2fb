"""What an operator does to memory and how much it computes, from its schema.

Facts that a schema does not have (which operators are views, launch no kernel, or make
the CPU wait) are listed here and nowhere else. Asks for no tensor: what one call of it
reads and writes is in calls.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

from overlaplab.operators.flops import flop_formula
from overlaplab.operators.launches import FUSED_STEPS, Count, launch_count

COLLECTIVES = "_c10d_functional"  # the namespace of functional collectives
# Namespaces that launch no kernels of their own. A functional collective reaches the
# process group, which records it.
_SKIPPED = frozenset({"profiler", "prim", "c10d", COLLECTIVES})

# Launch nothing, and their result may have a storage that is new.
_ALLOCATES = frozenset(
    """
    empty empty_like empty_permuted empty_strided lift lift_fresh new_empty
    new_empty_strided resize_ resize_as_ set_
    """.split()  # noqa: SIM905 (wrapped)
)

# Share the storage of their input or launch nothing, though the schema does not say.
_NO_KERNEL = _ALLOCATES | frozenset(
    """
    _unsafe_view _reshape_alias alias as_strided_ detach detach_ record_stream
    _version _has_compatible_shallow_copy_type is_same_size
    """.split()  # noqa: SIM905 (wrapped)
)

# Their result has the memory of their first argument, though the schema does not say.
_ALIASES = frozenset(
    """
    _unsafe_view _reshape_alias alias as_strided_ detach detach_ lift_fresh wait_tensor
    """.split()  # noqa: SIM905 (wrapped)
)

# Their result is on the CPU, or its shape is: CUDA waits for the stream.
_HOST_SYNC = {
    "_local_scalar_dense": "item",
    "equal": "equal",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
}

# With a mask among their indices, the CPU waits for "nonzero".
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})

# Overwrite their first argument without reading it.
_OVERWRITES = frozenset(
    """
    bernoulli_ copy_ exponential_ fill_ log_normal_ normal_ random_ uniform_ zero_
    _foreach_copy_ _foreach_zero_
    """.split()  # noqa: SIM905 (wrapped)
)

# Take only shape and dtype of their tensor, not its values.
_READS_NOTHING = frozenset(
    """
    full_like new_full new_ones new_zeros ones_like rand_like randint_like randn_like
    zeros_like
    """.split()  # noqa: SIM905 (wrapped)
)

# Made of other operators on a CPU only: CUDA has a kernel.
_COMPOSITE_ON_CPU = frozenset({"_fused_rms_norm", "mish_backward", "silu_backward"})

# Arguments that are written though the schema does not mark them.
_UNMARKED_WRITES = {"native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4)}


@dataclass(frozen=True, slots=True)
class Operator:
    """What the record needs of one overload."""

    name: str  # "mm", without namespace and overload
    records: bool = False  # False for views, metadata and allocation
    # its result may have a new storage, where it does not record
    allocates: bool = False
    skipped: bool = False  # launches no kernels of its own
    host_sync: str = ""  # name of the wait if the CPU waits for it, "" otherwise
    indexes: bool = False  # takes indices, and may wait for a mask
    writes: tuple[int, ...] = ()  # positions of arguments that it writes
    writes_named: tuple[str, ...] = ()  # keyword arguments that it writes
    overwrites: bool = False  # what it writes it does not read
    reads: bool = True  # False where its tensor arguments give only shape and dtype
    # counts multiply and add as two; None where it is not a matmul
    flops: Callable[..., Any] | None = None
    # arguments of whose memory its result is a part (a view, or what it wrote), by
    # position, or by name where they have none
    aliases: tuple[int | str, ...] = ()
    draws: bool = False  # may take numbers from the random generator
    is_collective: bool = False  # a functional collective; its wait is none
    # made of other operators. Autograd takes it apart; inference mode, which has none,
    # shows it whole, and so is what torch writes in Python
    composite: bool = False
    launches: int | Count = 1  # kernels that CUDA launches for a call, see launches.py
    # the step of a fused optimizer, which writes gradients where it is given their
    # scale
    scales_gradients: bool = False


# By identity, since the hash of an overload is slow; the overload is kept with it.
_known: dict[int, tuple[Operator, Any]] = {}
_dtype_names: dict[torch.dtype, str] = {}


def operator(func: Any) -> Operator:
    """The facts about an overload; computed once a process."""
    known = _known.get(id(func))
    if known is None:
        known = _known[id(func)] = _describe(func), func
    return known[0]


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32", "bfloat16", ..."""
    name = _dtype_names.get(dtype)
    if name is None:
        name = _dtype_names[dtype] = str(dtype).removeprefix("torch.")
    return name


def _describe(func: Any) -> Operator:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher order operator: its insides are recorded
        return Operator(str(func), allocates=True)
    space, name = schema.name.split("::")
    view = func.is_view or torch.Tag.inplace_view in func.tags
    positions: list[int] = []
    named: list[str] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            named.append(argument.name)
            if not argument.kwarg_only:
                positions.append(position)
    positions += _UNMARKED_WRITES.get(name, ())
    is_out = any(a.is_out for a in schema.arguments)
    return Operator(
        name=name,
        records=not (view or name in _NO_KERNEL or space in _SKIPPED),
        allocates=name in _ALLOCATES,
        skipped=space in _SKIPPED,
        host_sync=_HOST_SYNC.get(name, ""),
        indexes=name in _INDEXING,
        writes=tuple(positions),
        writes_named=tuple(named),
        overwrites=is_out or name in _OVERWRITES,
        reads=name not in _READS_NOTHING,
        flops=flop_formula(func, name),
        aliases=(0,) if name in _ALIASES else tuple(_shared(func)),
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        is_collective=space == COLLECTIVES and name != "wait_tensor",
        composite=(space == "aten" and not view and _has_parts(func, name))
        or python_body(func) is not None,
        launches=launch_count(name) if space == "aten" else 1,
        scales_gradients=name in FUSED_STEPS,
    )


def _has_parts(func: Any, name: str) -> bool:
    if name in _COMPOSITE_ON_CPU:
        return False
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has_kernel(func.name(), "CompositeImplicitAutograd"))


def python_body(func: Any) -> Callable[..., Any] | None:
    """What an operator does that torch itself wrote in Python, of other operators.

    As `linear_cross_entropy` in chunks (torch 2.13). Operators of others may be one
    kernel on CUDA, whatever they are on a CPU.
    """
    found = OPDEFS.get(func._schema.name)
    if found is None or not found._init_fn.__module__.startswith("torch."):
        return None
    body: Callable[..., Any] = found._init_fn
    return body


def _shared(func: Any) -> Iterator[int | str]:
    """Arguments that share an alias set with a result."""
    schema = func._schema
    sets = [r.alias_info.before_set for r in schema.returns if r.alias_info is not None]
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is None:
            continue
        # A view in several parts: its set becomes "*", and theirs has another name.
        if func.is_view or any(info.before_set & shared for shared in sets):
            yield argument.name if argument.kwarg_only else position
