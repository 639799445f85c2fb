"""The course of a step: a gradient opens it, its buckets are sent, `wait` ends it.

`Arrivals` calls: a backward begins; it is a bucket's turn. `Guard` refuses what breaks
a step. `Agreement` plans the buckets, and makes flags that say who has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from overlaplab import streams
from overlaplab.techniques.arrivals import Arrivals
from overlaplab.techniques.data_parallel.agreement import Agreement, Average
from overlaplab.techniques.data_parallel.guard import Guard
from overlaplab.techniques.in_flight import InFlight
from overlaplab.techniques.model_facts import ModelFacts
from overlaplab.techniques.payload import Wire


class Steps:
    """One step after another.

    Args:
        caps: of a bucket and of each dtype's first one, in bytes.
        in_flight: takes what is sent; may be another one in each step.
        title: of the ranges in a profile.

    Attributes:
        num_ended: how many steps have ended or were given up.
        wire_of_step: gives the wire of each step; None: that of `in_flight`.
    """

    wire_of_step: Callable[[], Wire] | None = None  # set inside `join`

    def __init__(
        self,
        facts: ModelFacts,
        caps: tuple[int, int],
        in_flight: InFlight,
        guard: Guard,
        title: str,
    ) -> None:
        self.arrivals = Arrivals(facts.parameters, self._backward_begins, self._launch)
        self.agreement = Agreement(facts, self.arrivals, caps)
        self.in_flight = in_flight
        self.guard = guard
        self.num_ended = 0
        self._wire = in_flight.wire
        self._title = title
        self._annotate = streams.provider().annotate

    def open(self) -> None:
        """A step begins: at its first gradient, else in `wait` or `abandon`."""
        self.guard.step_opens(self.num_ended)
        self.agreement.step_opens()
        of_step = self.wire_of_step
        self.in_flight.wire = self._wire if of_step is None else of_step()
        self.arrivals.is_open = True

    def _backward_begins(self) -> None:
        """`arrivals` has the first gradient of a backward, maybe not of the step."""
        self.guard.backward_begins(self.arrivals)
        if not self.arrivals.is_open:
            self.open()

    def _launch(self, bucket: int) -> None:
        """It is the turn of `bucket`: send it."""
        last = bucket == len(self.arrivals.buckets) - 1
        with self._annotate(self._title), self._annotate(f"bucket {bucket}"):
            self.in_flight.launch(
                self.agreement.members[bucket],
                self.arrivals.writers(bucket),
                self.agreement.write_flags if last else None,
                self.arrivals.missing(bucket),
            )

    def wait(self) -> None:
        """End the step; averages are in `.grad`, safe on the current stream."""
        self.send_rest()
        for info, average in self.finish():
            info.parameter.grad = average
        self.end()

    def send_rest(self) -> None:
        """Send the buckets that are left: full ones, too, behind one that is not."""
        self.guard.step_ends(self.arrivals)
        with torch.no_grad():
            if not self.arrivals.is_open:
                self.open()
            self.arrivals.announce(len(self.arrivals.buckets))  # calls `_launch`
        self.guard.all_sent(self.arrivals, self.in_flight)

    def finish(self) -> list[Average]:
        """Wait for the buckets: gradients that travelled are averages then.

        Returns:
            Averages of what has no gradient here; nobody's `.grad` yet.
        """
        with torch.no_grad():
            self.in_flight.finish()
            return self.agreement.adopt(self.in_flight)

    def end(self) -> None:
        """The step is over, or given up."""
        self.num_ended += 1
        self.in_flight.clear()
        self.arrivals.reset()
