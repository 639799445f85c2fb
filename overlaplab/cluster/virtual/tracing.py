"""A rank that traces by FX takes its trace along when it hands on its turn."""

from __future__ import annotations

import sys
from collections.abc import Callable

_GLOBALS = (
    ("torch.fx._symbolic_trace", "CURRENT_PATCHER"),
    ("torch.fx._symbolic_trace", "_is_fx_tracing_flag"),
    ("torch.fx.experimental.proxy_tensor", "_CURRENT_MAKE_FX_TRACER"),
)


def suspend_tracing() -> Callable[[], None]:
    """Undo what the calling rank's FX trace patched; the result patches it again.

    `make_fx` and `symbolic_trace` patch torch for the whole process. Two ranks that
    trace in turn would undo one another's patches in the wrong order and leave some for
    ever; so a rank that hands on its turn takes its trace along.
    """
    active = {
        (module, name): value
        for module, name in _GLOBALS
        if (value := getattr(sys.modules.get(module), name, None))
    }
    if not active:
        return lambda: None
    patcher = active.get(_GLOBALS[0])
    if patcher is not None:
        patcher.revert_all_patches()
    for module, name in active:
        setattr(sys.modules[module], name, False if "flag" in name else None)

    def resume() -> None:
        for (module, name), value in active.items():
            setattr(sys.modules[module], name, value)
        if patcher is not None:
            patcher.reapply_all_patches()

    return resume
