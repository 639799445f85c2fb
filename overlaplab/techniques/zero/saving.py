"""What `Zero3` saves and loads: full values, and checkpoints that stay in parts.

Imports torch.distributed.checkpoint, which takes seconds, where it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from overlaplab.techniques.groups import asked_group
from overlaplab.techniques.zero.full import full_state, load_full
from overlaplab.techniques.zero.guards import Guards
from overlaplab.techniques.zero.ring import Ring, ShardedUnit

if TYPE_CHECKING:
    from overlaplab.techniques.zero.loading import Source
    from overlaplab.techniques.zero.pieces import Piece


class Saving:
    """What `Zero3` saves and loads: a part of it in a file of its own."""

    _model: nn.Module
    _all: list[ShardedUnit]
    _group: dist.ProcessGroup
    _guards: Guards
    _ring: Ring

    def full_state_dict(
        self, device: torch.device | str | None = None
    ) -> dict[str, Any]:
        """The model's state dict with full values. Collective; every rank gets it.

        Args:
            device: where its tensors go, one unit after another; None: where they are.
        """
        self._refuse_removed("zero.full_state_dict()")
        with self._guards.lifted():
            return full_state(self._model, self._all, self._group, device)

    def load_full_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Give the model full values, as `load_state_dict`. Collective, between steps.

        Args:
            state: the model's, on any device; rank 0's counts, so others may give
                None. One row of tensors after another goes out to the ranks.

        Raises:
            ValueError: names or shapes differ, on every rank; nothing was loaded.
            RuntimeError: a step is open.
        """
        self._prepare_load("zero.load_full_state_dict()")
        with self._guards.lifted(), torch.no_grad():
            load_full(self._model, self._all, self._group, state)

    def checkpoint(self, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
        """What `torch.distributed.checkpoint.save` and `async_save` write, in parts.

        By the model's own names and full shapes, as `get_state_dict` has it: a model
        that is not sharded, or is by another number of ranks, loads it as well. A
        buffer is that of one rank. Views of what is there: save it before the next
        step of an optimizer (`async_save` copies first).

        Args:
            optimizers: over `shards()`, whose states are numbers or as large as their
                pieces; in the same order when loaded. None: the model alone.

        Raises:
            ValueError: an optimizer is not over `shards()`.
            TypeError: a state of another kind.

        Example:
            dcp.save({**zero.checkpoint(optimizer), "step": 7}, checkpoint_id=folder)
            zero.load_checkpoint(folder, optimizer)
        """
        from overlaplab.techniques.zero.checkpoint import model_state, optimizer_state

        self._refuse_open("zero.checkpoint()")
        pieces = self._pieces()
        with self._guards.lifted():
            state = {"model": model_state(self._model, pieces)}
        if optimizers:
            state["optimizer"] = optimizer_state(optimizers, pieces)
        return state

    def load_checkpoint(
        self, source: Source, *optimizers: torch.optim.Optimizer, prefix: str = ""
    ) -> None:
        """Load what any number of ranks have saved. Collective, between steps.

        Needs memory for this rank's part once more while it reads.

        Args:
            source: the folder, or a `StorageReader`.
            optimizers: as they were given to `checkpoint`; they need no step before.
            prefix: "app" where `{"app": zero.checkpoint()}` was saved.

        Raises:
            ValueError: names or shapes differ; nothing was loaded.
            RuntimeError: a step is open.
        """
        from overlaplab.techniques.zero.loading import load

        self._prepare_load("zero.load_checkpoint()")
        with self._guards.lifted(), torch.no_grad():
            load(
                source,
                prefix and f"{prefix}.",
                self._model,
                optimizers,
                self._pieces(),
                asked_group(self._group),
            )

    def _prepare_load(self, what: str) -> None:
        self._refuse_open(what)
        with torch.no_grad():
            self._ring.drain()  # an evaluation that failed may have left gathers

    def _pieces(self) -> list[Piece]:
        from overlaplab.techniques.zero.pieces import pieces_of

        return list(pieces_of(self._all, dist.get_rank(self._group)))

    def _refuse_removed(self, what: str) -> None:
        raise NotImplementedError

    def _refuse_open(self, what: str) -> None:
        raise NotImplementedError
