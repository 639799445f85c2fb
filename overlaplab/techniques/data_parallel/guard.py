"""What breaks a step is refused here, on every rank.

`Steps` asks at three moments: a step opens, a backward begins in it, it is to end. What
errors send one to, `reducer.abandon()`, is in base.py.
"""

from __future__ import annotations

from overlaplab.techniques.arrivals import Arrivals
from overlaplab.techniques.groups import Group, is_registered
from overlaplab.techniques.in_flight import InFlight
from overlaplab.techniques.model_facts import ModelFacts, marks_of
from overlaplab.techniques.payload import touched


class Guard:
    """Raises RuntimeError where the steps of a reducer cannot go on."""

    removed = False  # the reducer's `remove()` was called

    def __init__(self, facts: ModelFacts, group: Group) -> None:
        self._facts, self._group = facts, group
        self._step, self._marks = 0, marks_of(facts.tensors)

    def step_opens(self, number: int) -> None:
        """Step `number` begins. From now on parameters stay as they are."""
        self.refuse_destroyed_group()
        self._step, self._marks = number, marks_of(self._facts.tensors)

    def backward_begins(self, arrivals: Arrivals) -> None:
        """A backward begins, maybe the first one of a step."""
        if arrivals.is_open:
            self._refuse_failed_backward("this backward", arrivals)
            if not arrivals.paused:  # else nothing is sent: `wait` will look
                self._refuse_changed_parameter("this backward")

    def step_ends(self, arrivals: Arrivals) -> None:
        """`wait` was called, and will send the buckets that are left."""
        if arrivals.windows:
            raise RuntimeError("reducer.wait() inside no_sync(); leave the block first")
        self.refuse_removed("reducer.wait()")
        self.refuse_inside_backward("reducer.wait()", arrivals)
        self._facts.check_identity()
        if arrivals.is_open:
            self._refuse_failed_backward("reducer.wait()", arrivals)
            self._refuse_changed_parameter("reducer.wait()")

    def all_sent(self, arrivals: Arrivals, in_flight: InFlight) -> None:
        """All buckets are on the way, and nobody has waited for them."""
        payloads = in_flight.payloads
        absent = [info for payload in payloads for info, _ in payload.absent]
        lost = (info for info in absent if arrivals.here[info.index])
        if (info := touched(payloads) or next(lost, None)) is not None:
            raise RuntimeError(
                f"{info.name}.grad was replaced, freed or written between the "
                "backward pass and reducer.wait(), while its average was on the "
                "way. Call reducer.wait() first; then clip, step or zero."
            )

    def refuse_destroyed_group(self) -> None:
        """Raise if the ranks can meet no more."""
        if not is_registered(self._group):
            raise RuntimeError(
                "the reducer's process group has been destroyed since it was built "
                "(destroy_process_group). Call reducer.remove() and build a new one."
            )

    def refuse_removed(self, what: str) -> None:
        """Raise if the reducer has no hooks any more."""
        if self.removed:
            raise RuntimeError(f"{what} after remove(); build a new reducer")

    def refuse_inside_backward(self, what: str, arrivals: Arrivals) -> None:
        """Raise if a hook of the step's backward calls."""
        if arrivals.backwards.runs_here:
            raise RuntimeError(
                f"{what} inside the backward pass, in a hook: gradients may be still "
                "to come. Call it after loss.backward() has returned."
            )

    def _refuse_failed_backward(self, what: str, arrivals: Arrivals) -> None:
        if arrivals.backwards.failed:
            raise RuntimeError(
                f"a backward of step {self._step} raised before it ended: "
                f"{arrivals.next} of {len(arrivals.buckets)} buckets were sent, so "
                f"{what} cannot go on. Call reducer.abandon() on every rank instead "
                "of reducer.wait(), and zero the gradients."
            )

    def _refuse_changed_parameter(self, what: str) -> None:
        now = marks_of(self._facts.tensors)
        if now == self._marks:
            return
        same = [a == b for a, b in zip(now, self._marks, strict=True)]
        name = self._facts.parameters[same.index(False)].name
        raise RuntimeError(
            f"parameter {name} was changed while step {self._step} was open, "
            f"before {what}: by an update with a gradient that is not averaged, after "
            "which ranks differ, or by load_state_dict or a cast. Call reducer.wait() "
            "after loss.backward(), before optimizer.step() and all else that changes "
            "the model."
        )
