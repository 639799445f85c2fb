"""The live timeline of a cell: its state as it shows it, its knobs and its buttons."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Locator, expect

from tests.browser.notebook import Notebook
from tests.guards import GUARD_S

ANSWER_TIMEOUT_MS = 1000 * GUARD_S
# anywidget gives a widget two seconds to begin, by the clock, and then leaves it dead.
BEGIN_MS = 2_500
TOO_LATE = "[anywidget] Failed to initialize model"
MOST_TRIES = 20
expect.set_options(timeout=ANSWER_TIMEOUT_MS)


def run_live(notebook: Notebook, cell_id: str) -> Live:
    """Run a cell that shows a live timeline; again, where a busy machine was too late.

    Raises:
        AssertionError: it was too late each time.
    """
    for _ in range(MOST_TRIES):
        live = Live(notebook.run(cell_id))
        notebook.page.wait_for_timeout(BEGIN_MS)
        late = [fault for fault in notebook.faults if TOO_LATE in fault]
        if not late:
            return live
        notebook.faults = [f for f in notebook.faults if f not in late]
    raise AssertionError(f"cell {cell_id}: no widget began in time, {MOST_TRIES} times")


class Live:
    """A live timeline in an output; `data-*` attributes are its state."""

    def __init__(self, cell: Locator) -> None:
        self.cell = cell
        self.root = cell.locator(".ol-timeline")
        self.canvas = self.root.locator("canvas.olt-canvas")
        self.root.wait_for()

    def state(self, name: str) -> str:
        """What it says of itself: "step-ns", "theme", ..."""
        value = self.root.get_attribute(f"data-{name}")
        assert value is not None, f"the timeline has no data-{name}"
        return value

    @property
    def step_ns(self) -> int:
        return int(self.state("step-ns"))

    @property
    def window_ns(self) -> tuple[int, int]:
        """The part of the time that is drawn."""
        return int(self.state("window-start-ns")), int(self.state("window-end-ns"))

    @property
    def knobs(self) -> dict[str, str]:
        """The value of each knob as the kernel confirmed it."""
        knobs: dict[str, str] = json.loads(self.state("knobs"))
        return knobs

    @property
    def kept(self) -> dict[str, Any]:
        """The settings kept, as the kernel confirmed them."""
        kept: dict[str, Any] = json.loads(self.state("kept"))
        return kept

    def knob(self, name: str) -> Locator:
        return self.root.locator(f'[data-knob="{name}"]')

    def drag(self, name: str, to: float) -> None:
        """Drag a knob with the mouse to a fraction of its way, and wait."""
        knob = self.knob(name)
        box = knob.bounding_box()
        assert box is not None
        low, high = (int(knob.get_attribute(edge) or 0) for edge in ("min", "max"))
        now = (int(knob.input_value()) - low) / (high - low)
        mouse, y = knob.page.mouse, box["y"] + box["height"] / 2
        thumb = 8  # half of it: the ways of the mouse and of the thumb differ by that
        x = [box["x"] + thumb + (box["width"] - 2 * thumb) * at for at in (now, to)]
        mouse.move(x[0], y)
        mouse.down()
        mouse.move(x[1], y, steps=8)
        mouse.up()
        self.rest()

    def press(self, name: str, key: str) -> None:
        """Press a key on a knob, and wait."""
        self.knob(name).press(key)
        self.rest()

    def keep(self, name: str) -> None:
        """Keep the setting under a name by its button, and wait."""
        self.root.locator(f'[data-keep="{name}"]').click()
        self.rest()

    def keeps(self) -> list[Locator]:
        """The buttons that keep a setting."""
        return self.root.locator("[data-keep]").all()

    def rest(self) -> None:
        """Wait until the kernel has answered all that was asked."""
        expect(self.root).to_have_attribute("data-busy", "false")
