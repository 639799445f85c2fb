"""What people pass to a planner of memory, looked at before anything is measured.

Knows names, types and ranges; no costs.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from overlaplab.hardware import Hardware
from overlaplab.techniques.memory.policies import Policy

_MOST_BYTES = 2**60  # sums of a few stay within 64 bits


def whole_bytes(name: str, value: Any) -> int:
    """A number of bytes, as an int; NumPy's whole numbers are numbers, too.

    Raises:
        TypeError: it is none.
    """
    number = _whole(value)
    if number is None:
        raise TypeError(f"{name} is {value!r}; expected a whole number of bytes")
    # More than any device has: one number serves for all of them.
    return min(number, _MOST_BYTES)


def resident_rows(
    resident_bytes: int | Mapping[str, int],
) -> tuple[tuple[str, int], ...]:
    """(what, bytes) of all that lives beside the model and has bytes.

    Raises:
        TypeError: something is no whole number.
        ValueError: something is less than 0, or more than any device has.
    """
    if isinstance(resident_bytes, Mapping):
        named = {f"resident_bytes[{what!r}]": n for what, n in resident_bytes.items()}
        names = list(map(str, resident_bytes))
    else:
        named = {"resident_bytes": resident_bytes}
        names = ["resident beside the model"]
    sizes = [whole_bytes(name, value) for name, value in named.items()]
    for name, num_bytes in zip(named, sizes, strict=True):
        if not 0 <= num_bytes < _MOST_BYTES:
            raise ValueError(
                f"{name} is {named[name]}; expected 0 to {_MOST_BYTES - 1} bytes"
            )
    return tuple(row for row in zip(names, sizes, strict=True) if row[1])


def whole_k(k: Any) -> int:
    """Of "every k-th block".

    Raises:
        TypeError: it is no whole number.
        ValueError: it is less than 1.
    """
    number = _whole(k)
    if number is None:
        raise TypeError(f"k is {k!r}; expected a whole number, at least 1")
    if number < 1:
        raise ValueError(f"k is {k}; expected at least 1")
    return number


def checked_model(model: Any) -> None:
    """Refuse what is no module of torch, classes of them, and what has no sizes yet.

    Raises:
        TypeError: it is none.
        ValueError: it has lazy parameters.
    """
    if isinstance(model, nn.Module):
        named = [*model.named_parameters(), *model.named_buffers()]
        if lazy := [name for name, tensor in named if is_lazy(tensor)]:
            raise ValueError(
                f"{type(model).__name__} does not know the size of {lazy[0]} yet: it "
                "is lazy. Run one forward first"
            )
        return
    what = f"a {type(model).__name__}"
    if isinstance(model, type):
        what = f"the class {model.__name__} and not an object of it"
    raise TypeError(f"model is {what}; expected a torch.nn.Module")


def refuse_compiled(model: nn.Module) -> None:
    """Refuse what has no forward of its own to be planned.

    Raises:
        ValueError: the model, or a module of it, is what `torch.compile` returned.
    """
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules:  # OptimizedModule, which is slow to import
            raise ValueError(
                f"{name or 'model'} is what torch.compile returned, and has no forward "
                "of its own. Plan and apply before you compile, or take its _orig_mod"
            )


def checked_policies(policies: Sequence[Policy]) -> tuple[Policy, ...]:
    """A menu.

    Raises:
        TypeError: something in it is no policy.
        ValueError: it is empty, or two have one name.
    """
    if isinstance(policies, str) or not isinstance(policies, Sequence):
        raise TypeError(
            f"policies is {policies!r}; expected a list of Policy, such as EAGER"
        )
    if not policies:
        raise ValueError("policies is empty; expected at least policies.KEEP")
    for place, policy in enumerate(policies):
        if not isinstance(policy, Policy):
            raise TypeError(
                f"policies[{place}] is {policy!r}; expected a Policy, such as those of "
                "EAGER"
            )
    names = [policy.name for policy in policies]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(
            f"policies has two of the name {twice!r}; give each a name of its own, for "
            "plans choose by it"
        )
    return tuple(policies)


def checked_budgets(
    budgets: Sequence[float], name: str = "compile_budgets"
) -> tuple[float, ...]:
    """Of compiled blocks, or of the whole model.

    Raises:
        TypeError, ValueError: not all are numbers from 0 to 1.
    """
    if isinstance(budgets, str) or not isinstance(budgets, Sequence):
        raise TypeError(f"{name} is {budgets!r}; expected several: ({budgets!r},)")
    for place, budget in enumerate(budgets):
        what = f"{name}[{place}] is {budget!r}; expected a number from 0 to 1"
        if isinstance(budget, bool) or not isinstance(budget, int | float):
            raise TypeError(what)
        if not 0 <= budget <= 1:
            raise ValueError(what)
    return tuple(budgets)


def checked_parts(model: nn.Module, parts: Sequence[str]) -> tuple[str, ...]:
    """Methods of a model that are compiled with its plan.

    Raises:
        TypeError: a string, or something in it is none.
        ValueError: the model has no method of that name, or one of its own already.
    """
    if isinstance(parts, str):
        raise TypeError(f"compiled_parts is {parts!r}; expected a list: [{parts!r}]")
    for part in parts:
        if not callable(getattr(type(model), part, None)):
            raise ValueError(
                f"compiled_parts names {part!r}, and {type(model).__name__} has no "
                "method of that name; expected names such as 'forward'"
            )
        if part in vars(model):
            raise ValueError(
                f"{part} of {type(model).__name__} was replaced on this object already:"
                " a plan that was applied and not undone, or a patch. Undo that first"
            )
    return tuple(parts)


def checked_loss(loss: Any) -> Callable[[Any], Any] | None:
    """A function, or None.

    Raises:
        TypeError: neither.
    """
    if loss is not None and not callable(loss):
        raise TypeError(
            f"loss is {loss!r}; expected a function of what the model returns, or None"
        )
    function: Callable[[Any], Any] | None = loss
    return function


def inputs_do_not_fit(
    model: nn.Module, args: Any, kwargs: Mapping[str, Any], error: Exception
) -> ValueError:
    """What to raise where the model's own forward failed on its sample inputs."""
    name = type(model).__name__
    given = [described(value) for value in args]
    given += [f"{key}={described(value)}" for key, value in kwargs.items()]
    said = (str(error).strip().splitlines() or [""])[0].rstrip(".!")
    return ValueError(
        f"{name} cannot be run with these sample_inputs: {', '.join(given) or 'none'}. "
        f"{type(error).__name__}: {said}. Expected what {name}.forward"
        f"{inspect.signature(model.forward)} takes: one value, a tuple of arguments or "
        "a dict of keyword arguments"
    )


def described(value: Any) -> str:
    """Of tensors dtype, shape and device; other values as they are."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {tuple(value.shape)} on {value.device}"
    text = repr(value)
    return text if len(text) < 40 else f"a {type(value).__name__}"


def checked_backend(backend: Any) -> str:
    """Of `torch.compile`, which takes seconds to import.

    Raises:
        ValueError: there is none of that name.
    """
    from torch._dynamo import list_backends

    known = list_backends(exclude_tags=None)
    if backend in known:
        return str(backend)
    raise ValueError(
        f"backend is {backend!r}; expected one of torch.compile's: {', '.join(known)}"
    )


def checked_hardware(hardware: Any) -> str | Hardware | None:
    """A profile, its name, "measured" or None.

    Raises:
        TypeError: something else.
    """
    if hardware is None or isinstance(hardware, str | Hardware):
        return hardware
    raise TypeError(
        f"hardware is {hardware!r}; expected the name of a profile, a Hardware, "
        '"measured" or None'
    )


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
