"""Knobs over a function that re-times a step, the timeline redrawn at each change.

Knows a function from settings to a timeline, not where it gets it. Needs anywidget
for the live knobs only; `Explorer.set` and `.keep` do the same by typing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from overlaplab.timeline import Timeline
from overlaplab.view.panel import Panel, numbers
from overlaplab.view.payload import colors, payload
from overlaplab.view.share_bars import shares_part
from overlaplab.view.stacking import Picture, stack
from overlaplab.view.units import percentages
from overlaplab.view.widget import Message, make_widget

Settings = Mapping[str, Any]


class Knob(NamedTuple):
    """One knob.

    Args:
        values: that it can take, in its order.
        default: one of them, to start with.
        label: what stands beside it, with the unit: "bucket (MiB)"; the knob's name
            if empty.
    """

    values: Sequence[Any]
    default: Any
    label: str = ""


class Explorer:
    """Knobs that re-time a step and redraw it.

    As the last line of a cell it shows itself. Settings change by knob or by `set`, and
    only together with the timeline: if re-timing fails, both stay as they were.

    Args:
        retime: called with one keyword a knob; returns the timeline, quickly.
        knobs: by the keyword of `retime`.
        what_if: by name ("half the latency"), a change of the settings; the figure
            says how much of the step each saves. Its values need not be a knob's.
        keep: the names that a question asks for: a button each, which keeps the
            current setting under that name, in `.kept`.

    Raises:
        ValueError: no knobs, or a default that is not among its knob's values.
    """

    def __init__(
        self,
        retime: Callable[..., Timeline],
        knobs: Mapping[str, Knob | tuple[Sequence[Any], Any, str]],
        *,
        what_if: Mapping[str, Callable[[dict[str, Any]], Settings]] | None = None,
        keep: Sequence[str] = (),
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
        self._names = tuple(keep)
        self._settings = {name: knob.default for name, knob in self.knobs.items()}
        self._timeline = retime(**self._settings)
        self._kept: dict[str, tuple[dict[str, Any], Timeline]] = {}
        self._widget: Any = None
        self._shown: Any = None  # the figure beside it
        self._serial = 0  # of the front end's last message: what a state answers

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
        """Turn some knobs: what the live ones do, typed.

        Returns:
            The new figure.

        Raises:
            ValueError: no such knob, or a value that it does not have.
        """
        self._turn(settings)
        return self._redraw()

    def _turn(self, settings: Settings) -> None:
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
        panel = Panel(self._timeline, title)
        return stack([panel.part(), shares_part(self._bars(), self._remark())])

    def __repr__(self) -> str:
        typed = ", ".join(f"{name}={value!r}" for name, value in self._settings.items())
        return f"<Explorer {typed}: {numbers(self._timeline)}>"

    def _bars(self) -> dict[str, Timeline]:
        """By name: now, and what was kept."""
        return {
            "now": self._timeline,
            **{name: timeline for name, (_, timeline) in self._kept.items()},
        }

    def _remark(self) -> str:
        return "     ".join(
            f"{name} saves {100 * saved:.1f} %"
            for name, saved in self.savings().items()
        )

    def _redraw(self) -> Picture:
        """Show the current state wherever it is shown already."""
        self._send_state()
        figure = self.figure()
        if self._shown is not None:
            self._shown.update(figure)
        return figure

    def _ipython_display_(self) -> None:
        """The live knobs, and the figure as an output of its own.

        The figure is what remains where no kernel runs; in a live JupyterLab the
        style sheet of the widget hides it.
        """
        display: Any = import_module("IPython.display").display
        html: Any = import_module("IPython.display").HTML
        if self._widget is None:  # shown twice, it is one widget with two views
            self._widget = make_widget(self._content(), self._asked)
        if self._widget is not None:
            display(self._widget)
        self._shown = display(self.figure(), display_id=True)
        first = next(iter(self.knobs))
        hint = (
            f"No knobs here? Type knobs.set({first}={self._settings[first]!r}), if its "
            "name is knobs."
        )
        display(html(f'<small class="olt-without">{escape(hint)}</small>'))

    def _content(self) -> dict[str, Any]:
        """What the front end needs: what stays, and what changes."""
        knobs = [
            {
                "name": name,
                "label": knob.label or name,
                "values": [str(value) for value in knob.values],
            }
            for name, knob in self.knobs.items()
        ]
        config = {"colors": colors(), "knobs": knobs, "keep": list(self._names)}
        return {"config": config, "state": self._state()}

    def _state(self, error: str = "") -> dict[str, Any]:
        return {
            "panels": [payload(self._timeline)],
            "bars": [_bar(name, timeline) for name, timeline in self._bars().items()],
            "remark": self._remark(),
            "settings": {
                name: list(self.knobs[name].values).index(value)
                for name, value in self._settings.items()
            },
            "kept": {
                name: ", ".join(f"{knob} {value}" for knob, value in settings.items())
                for name, settings in self.kept.items()
            },
            "error": error,
            "serial": self._serial,
        }

    def _send_state(self, error: str = "") -> None:
        if self._widget is not None:
            self._widget.state = self._state(error)

    def _asked(self, message: Message) -> None:
        """The front end turned knobs, wants to keep a setting, or has come to rest."""
        if message["type"] == "rest":
            # Slow to draw: not while a knob is being dragged.
            if self._shown is not None:
                self._shown.update(self.figure())
            return
        self._serial = message["serial"]
        error = ""
        try:
            if message["type"] == "keep":
                self._kept[message["name"]] = (self.settings, self._timeline)
            else:
                chosen = message["settings"]
                self._turn({n: self.knobs[n].values[i] for n, i in chosen.items()})
        except Exception as caught:  # a callback's traceback would reach nobody
            error = f"{type(caught).__name__}: {caught}"
        self._send_state(error)


explorer = Explorer


def _bar(name: str, timeline: Timeline) -> dict[str, Any]:
    path = timeline.critical_path()
    percents = percentages(path.shares_ns.values())
    shares = [
        {"share": share, "fraction": path.shares[share], "percent": percent}
        for share, percent in zip(path.shares_ns, percents, strict=True)
    ]
    return {"name": name, "shares": shares}
