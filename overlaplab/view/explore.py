"""Sliders over a function that re-times a step, the timeline redrawn at each change.

Knows a function from settings to a timeline, not where it gets it. Needs ipywidgets
for the sliders only; `Explorer.set` does the same by typing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from overlaplab.timeline import Timeline
from overlaplab.view.panel import Panel, numbers
from overlaplab.view.share_bars import shares_part
from overlaplab.view.stacking import Picture, stack

Settings = Mapping[str, Any]


class Knob(NamedTuple):
    """One slider.

    Args:
        values: that it can take, in its order.
        default: one of them, to start with.
        label: what stands beside it, with the unit: "bucket (MiB)"; the knob's name
            if empty.
    """

    values: Sequence[Any]
    default: Any
    label: str = ""


def explorer(
    retime: Callable[..., Timeline],
    knobs: Mapping[str, Knob | tuple[Sequence[Any], Any, str]],
    *,
    what_if: Mapping[str, Callable[[dict[str, Any]], Settings]] | None = None,
    lanes: Sequence[str] | None = None,
    ranks: Sequence[int] | None = None,
) -> Explorer:
    """Sliders that re-time a step and redraw it.

    Args:
        retime: called with one keyword a knob; returns the timeline, quickly.
        knobs: by the keyword of `retime`.
        what_if: by name ("half the latency"), a change of the settings; the figure
            says how much of the step each saves. Its values need not be a slider's.
        lanes, ranks: draw only these.

    Returns:
        The explorer; as the last line of a cell it shows itself.

    Raises:
        ValueError: no knobs, or a default that is not among its knob's values.
    """
    return Explorer(retime, knobs, what_if=what_if, lanes=lanes, ranks=ranks)


class Explorer:
    """See `explorer`. Settings change by slider or by `set`, and only together with
    the timeline: if re-timing fails, both stay as they were.
    """

    def __init__(
        self,
        retime: Callable[..., Timeline],
        knobs: Mapping[str, Knob | tuple[Sequence[Any], Any, str]],
        *,
        what_if: Mapping[str, Callable[[dict[str, Any]], Settings]] | None = None,
        lanes: Sequence[str] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.knobs = {name: Knob(*knob) for name, knob in knobs.items()}
        if not self.knobs:
            raise ValueError("explorer got no knobs; expected {name: Knob(...), ...}")
        for name, knob in self.knobs.items():
            if knob.default not in knob.values:
                raise ValueError(
                    f"knob {name!r}: default {knob.default!r} is not among its values "
                    f"{list(knob.values)}"
                )
        self._retime = retime
        self._what_if = dict(what_if or {})
        self._lanes, self._ranks = lanes, ranks
        self._settings = {name: knob.default for name, knob in self.knobs.items()}
        self._timeline = retime(**self._settings)
        self._kept: dict[str, tuple[dict[str, Any], Timeline]] = {}
        self._sliders: dict[str, Any] = {}
        self._message: Any = None
        self._shown: Any = None
        self._moving = False  # the sliders follow `set`: their events are no changes

    @property
    def settings(self) -> dict[str, Any]:
        """The current value of each knob; a copy."""
        return dict(self._settings)

    @property
    def timeline(self) -> Timeline:
        """The timeline of the current settings."""
        return self._timeline

    @property
    def kept(self) -> Mapping[str, dict[str, Any]]:
        """The settings kept so far, by name."""
        return MappingProxyType({k: dict(s) for k, (s, _) in self._kept.items()})

    def set(self, **settings: Any) -> Picture:
        """Turn some knobs: what the sliders do, typed.

        Returns:
            The new figure.

        Raises:
            ValueError: no such knob, or a value that it does not have.
        """
        for name, value in settings.items():
            if name not in self.knobs:
                raise ValueError(f"no knob {name!r}; there are {list(self.knobs)}")
            if value not in self.knobs[name].values:
                raise ValueError(
                    f"knob {name!r} has no value {value!r}; expected one of "
                    f"{list(self.knobs[name].values)}"
                )
        wanted = {**self._settings, **settings}
        self._timeline, self._settings = self._retime(**wanted), wanted
        return self._redraw()

    def keep(self, name: str = "kept") -> dict[str, Any]:
        """Keep the current settings under a name: the answer to a question.

        The figure shows the critical path of each, to compare. A name that was kept
        before is replaced.

        Returns:
            The settings.
        """
        self._kept[name] = (self.settings, self._timeline)
        self._redraw()
        return self.settings

    def savings(self) -> dict[str, float]:
        """For each `what_if` the fraction of the step that it would save."""
        step_ns = max(self._timeline.step_ns, 1)
        changed = {
            name: self._retime(**{**self._settings, **change(self.settings)})
            for name, change in self._what_if.items()
        }
        return {name: 1 - line.step_ns / step_ns for name, line in changed.items()}

    def figure(self) -> Picture:
        """The timeline, its settings and the bars of its critical path."""
        title = "   ".join(f"{name} {v}" for name, v in self._settings.items())
        panel = Panel(self._timeline, title, lanes=self._lanes, ranks=self._ranks)
        remark = "     ".join(
            f"{name} saves {100 * saved:.1f} %"
            for name, saved in self.savings().items()
        )
        bars = {"now": self._timeline}
        bars |= {name: timeline for name, (_, timeline) in self._kept.items()}
        return stack([panel.part(), shares_part(bars, remark)])

    def __repr__(self) -> str:
        typed = ", ".join(f"{name}={value!r}" for name, value in self._settings.items())
        return f"<Explorer {typed}: {numbers(self._timeline.report())}>"

    def _redraw(self) -> Picture:
        """Show the current state wherever it is shown already."""
        figure = self.figure()
        self._moving = True
        try:
            for name, slider in self._sliders.items():
                slider.value = self._settings[name]
        finally:
            self._moving = False
        if self._message is not None:
            self._message.value = ""
        if self._shown is not None:
            self._shown.update(figure)
        return figure

    def _ipython_display_(self) -> None:
        """Sliders, and the figure as an output of its own.

        The figure is what remains where no kernel runs: sliders are blank there.
        """
        display: Any = import_module("IPython.display").display
        box = self._make_sliders()
        if box is not None:
            display(box)
        self._shown = display(self.figure(), display_id=True)
        first = next(iter(self.knobs))
        hint = f"knobs.set({first}={self._settings[first]!r})"
        print(f"No sliders here? Type {hint}, if its name is knobs.")

    def _make_sliders(self) -> Any:
        """A box of one slider a knob, None without ipywidgets."""
        try:
            ipywidgets: Any = import_module("ipywidgets")
        except ImportError:
            return None
        for name, knob in self.knobs.items():
            slider = ipywidgets.SelectionSlider(
                options=[(str(value), value) for value in knob.values],
                value=self._settings[name],
                description=knob.label or name,
                continuous_update=False,  # a drag would queue a figure a pixel
                style={"description_width": "12em"},
                layout={"width": "32em"},
            )
            slider.observe(functools.partial(self._slid, name), names="value")
            self._sliders[name] = slider
        self._message = ipywidgets.Label()
        return ipywidgets.VBox([*self._sliders.values(), self._message])

    def _slid(self, name: str, change: Mapping[str, Any]) -> None:
        if self._moving:
            return
        try:
            self.set(**{name: change["new"]})
        except Exception as error:  # a callback's traceback would reach nobody
            self._redraw()
            if self._message is not None:
                self._message.value = f"{name} = {change['new']}: {error}"
