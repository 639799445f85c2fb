"""Numbers and tables of any library, as Python's own.

What a learner reads off a timeline with numpy, an exact fraction and a table that is a
defaultdict are right answers.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_DEEP = 20
_MANY = 10_000  # elements of an array


def as_number(answer: object) -> float | None:
    """A finite number of any type, None for anything else (a bool, a text)."""
    answer = as_answer(answer)
    if isinstance(answer, bool | str | bytes):
        return None
    try:
        number = float(answer)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def as_whole(answer: object) -> int | None:
    """A whole number of any type, 9.0 too; None for anything else."""
    number = as_number(answer)
    return int(number) if number is not None and number.is_integer() else None


def as_answer(answer: Any, deep: int = _DEEP) -> Any:
    """The same answer of Python's own types; what is no answer stays what it is.

    Scalars of numpy, tensors of no dimension, fractions and decimals become int, float
    or bool; mappings dicts; arrays lists; what is in dicts, lists and tuples, too.
    """
    kind = type(answer)
    if kind in (int, float, bool, str) or deep == 0:
        return answer
    if isinstance(answer, Mapping):
        return {as_answer(k): as_answer(v, deep - 1) for k, v in answer.items()}
    if isinstance(answer, list):
        return [as_answer(one, deep - 1) for one in answer]
    if isinstance(answer, tuple):
        return tuple(as_answer(one, deep - 1) for one in answer)
    if kind.__module__ in ("numpy", "torch") and hasattr(answer, "ndim"):
        if answer.ndim == 0:
            return answer.item()
        if kind.__name__ == "ndarray" and answer.size <= _MANY:
            return answer.tolist()
    elif isinstance(answer, numbers.Integral):
        return int(answer)
    elif isinstance(answer, numbers.Real | Decimal):
        number = float(answer)
        return int(number) if number.is_integer() else number
    return answer
