"""Right repairs, settings and choices that nobody expects."""

from __future__ import annotations

from typing import Any

import numpy as np

from overlaplab_course.lab05 import broken as broken05
from overlaplab_course.lab05.repairs import repair_cases
from overlaplab_course.lab10.repairs import repair_case
from tests.labs import test_lab00_extras as lab00
from tests.labs import test_lab03_extras as lab03
from tests.labs import test_lab06_reading as lab06
from tests.labs import test_lab08_bill as lab08
from tests.labs.test_lab10_depth import by_growing
from tests.labs.unusual import Cases
from tests.labs.unusual_programs import (
    PromptByMean,
    PromptByStream,
    prefetched_on_a_stream,
)

NUMBER = 5
CASES = Cases()
add = CASES.add


def in_numpy(found: Any) -> Any:
    """Numbers and texts as numpy has them."""
    if isinstance(found, dict):
        return {key: in_numpy(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [in_numpy(value) for value in found]
    return np.array(found)[()] if isinstance(found, int | float | str) else found


def with_repair(place: int, repaired: Any) -> tuple[Any, ...]:
    """What 5.6a or 5.6b takes: one of the five is repaired."""
    names = ("Alder", "Birch", "Cedar", "Elm", "Fir")
    # Ranks whose gradients come in other orders need another repair.
    numbers = (n for n in range(50) if repair_cases(n)[place].name != "Elm")
    number = next(numbers)
    own = repair_cases(number)[place]
    classes = [(lambda model, n=n: getattr(broken05, n)(model)) for n in names]
    classes[names.index(own.name)] = repaired
    return number, own.truth(), *classes


def depth_in_numpy(*numbers: Any) -> Any:
    return np.float64(by_growing(*numbers))


def doubled_as_a_tuple(*numbers: Any) -> Any:
    return tuple(np.array(name)[()] for name in lab08.right(*numbers))


for place, reducer in enumerate((PromptByMean, PromptByStream)):
    id = ("5.6a", "5.6b")[place]
    add(id, *with_repair(place, reducer), name=reducer.__name__)
own = repair_case(NUMBER)
said = {"kind": own.kind, "layer": np.int64(own.layer)}
add("10.6", NUMBER, said, prefetched_on_a_stream, prefetched_on_a_stream)
add("0.6", in_numpy(lab00.FOUND), name="in numpy")
add("3.5", in_numpy(lab03.ENOUGH), name="in numpy")
add("3.7", in_numpy(lab03.FOUND), name="in numpy")
add("6.7", in_numpy(lab06.FOUND), name="in numpy")
add("8.5", doubled_as_a_tuple)
add("10.4", depth_in_numpy)
