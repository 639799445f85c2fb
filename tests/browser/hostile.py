"""One page with a text that means harm in each of forty places, and what it shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from typing import Any

import overlaplab as ol
from overlaplab.diagnosis.page import page
from overlaplab.grading.classroom import _page
from overlaplab.grading.notebook import ExerciseResult, GradeReport
from overlaplab.grading.verdict import CheckResult, Verdict
from overlaplab.profiling.trace.names import short_name
from overlaplab.timeline import Memory, Span, Timeline
from overlaplab.view import Table, show
from overlaplab.view.explore import Explorer, Knob
from overlaplab.view.memory_row import _short
from overlaplab.view.payload import to_json
from overlaplab.view.scripts import module, style
from tests.diagnosis.ten_traces import Rank, bucketed, steps

# Each runs `ran` where it is taken for more than text.
FORMS = (
    "<script>ran()</script>",
    "</script><script>ran()</script>",
    '"><img src=x onerror=ran()>',
    "' autofocus onfocus=ran() onmouseover='ran()",
    "]]></style></title></svg><svg/onload=ran()>",
    "<!--<script>ran()//--><script>ran()</script>",
    "javascript:ran()",
    "<iframe srcdoc='<script>parent.ran()</script>'></iframe>",
    "&lt;img src=x onerror=ran()&gt;&#60;script&#62;",
    '<details open ontoggle=ran()>\\u003cscript>"+ran()+"',
)


class Texts:
    """A text for each place.

    Attributes:
        shown: by place, what stands on the page.
        unused: places of a trace that no page shows today.
    """

    def __init__(self) -> None:
        self.shown: dict[str, str] = {}
        self.unused: list[str] = []
        self._numbers, self._forms = count(10), cycle(FORMS)

    def __getitem__(self, place: str) -> str:
        """A new text; the number before it makes it this place's alone."""
        text = f"{next(self._numbers)}{next(self._forms)}"
        self.shown[place] = text
        return text

    def leave_out(self, *places: str) -> None:
        """A page may show them or not."""
        for place in places:
            del self.shown[place]
            self.unused.append(place)


def report(texts: Texts, folder: Path) -> str:
    """The report on a trace: names of all that a trace names, and of the file."""
    events = steps(Rank(), bucketed).events
    names = {
        "gemm": texts["a kernel"],
        "gemm_backward": texts["a kernel of the backward"],
        "adam": texts["a kernel of the optimizer"],
    }
    for place in ("a kernel", "a kernel of the backward", "a kernel of the optimizer"):
        texts.shown[place] = short_name(texts.shown[place])
    group, description = texts["a process group"], texts["its description"]
    for event in events:
        event["name"] = names.get(event["name"], event["name"])
        if "Process Group Name" in event["args"]:
            event["args"]["Process Group Name"] = group
            event["args"]["Process Group Description"] = description
    for kind in ("process_name", "thread_name"):
        args = {"name": texts[f"a {kind}"]}
        events.append({"ph": "M", "name": kind, "pid": 1, "tid": 7, "args": args})
    mine = {"ph": "X", "cat": "user_annotation", "name": texts["a range"]}
    events.append({**mine, "pid": 1, "tid": 100, "ts": 0, "dur": 3000, "args": {}})
    trace = {
        "distributedInfo": {"rank": 0, "backend": texts["a backend"]},
        "deviceProperties": [{"id": 0, "name": texts["a device"]}],
        "traceEvents": events,
    }
    name = texts["a file"].replace("/", "-")
    texts.leave_out("a process_name", "a thread_name", "a range", "a backend")
    texts.leave_out("a process group", "a file")
    path = folder / f"{name}.json"
    path.write_text(json.dumps(trace))
    pattern = texts["a pattern"].replace("(", ".").replace(")", ".")
    texts.shown["a pattern"] = pattern.replace("\\", "\\\\")
    return page(ol.diagnose(ol.read_trace(path, communication=[pattern])))


def timeline(texts: Texts, where: str) -> Timeline:
    """Names of spans, lanes, labels, steps, and of parameters in memory."""
    label = {"label": texts[f"a label {where}"], "step": texts[f"a step {where}"]}
    lane = texts[f"a lane {where}"]
    spans = [
        Span(0, lane, "compute", texts[f"a span {where}"], 0, 90_000, attributes=label),
        Span(0, "comm", "communication", texts[f"a message {where}"], 50_000, 100_000),
    ]
    parameter = texts[f"a parameter {where}"]
    texts.shown[f"a parameter {where}"] = _short(parameter)
    memory = Memory(0, ((0, 10), (90_000, 0)), ((parameter, 10),))
    return replace(Timeline.of(spans), memory=(memory,))


def explorer(texts: Texts) -> Explorer:
    """Names of knobs, their labels and values, of what is kept and compared."""
    drawn = timeline(texts, "behind knobs")
    knob, value, kept = texts["a knob"], texts["a value"], texts["a name to keep"]
    label = texts["a knob's label"]
    made = Explorer(
        lambda **_: drawn,
        {knob: Knob([value], value, label), "plain": Knob([1], 1)},
        what_if={texts["a what-if"]: lambda settings: settings},
        keep=[kept],
    )
    made.keep(kept)
    made.keep(texts["a name that was kept"])
    return made


def verdict(texts: Texts) -> Verdict:
    """What a grader says of code, in the learner's words."""
    wrong = CheckResult(
        texts["a check"], False, seen=texts["what was seen"],
        expected=texts["what was expected"],
    )  # fmt: skip
    said = {name: texts[f"a verdict's {name}"] for name in ("title", "error", "hint")}
    return Verdict("06.1", passed=False, checks=(wrong,), **said)


def feedback(texts: Texts) -> str:
    """The body of a page for one learner of a class."""
    said = f"first line\n{texts['a reason of the class']}"
    number, title = texts["an exercise of the class"], texts["its title"]
    result = ExerciseResult(number, title, 0, 1, False, False, True, said, None)
    name, lab = texts["a notebook of the class"], texts["a lab of the class"]
    whole = _page(name, GradeReport("a.ipynb", lab, (result,)))
    return whole.partition("<body>")[2].partition("</body>")[0]


def widget(content: Mapping[str, Any]) -> str:
    """A page's part that does with a widget what a notebook does."""
    data = json.dumps(to_json(content)).replace("<", "\\u003c")
    code = module().replace("export default {", "const widget = {")
    return f"""<style>{style()}</style><div id="widget"></div>
<script type="module">{code}
const content = {data};
const model = {{ get: (key) => content[key], on() {{}}, off() {{}}, send() {{}} }};
widget.render({{ model, el: document.getElementById("widget") }});
</script>"""


def whole(texts: Texts, folder: Path) -> str:
    """The report, and in it all else that shows names in a browser."""
    titles = texts["a title"], texts["a second title"]
    pair = timeline(texts, "above"), timeline(texts, "below")
    row = texts["a row"], texts["a cell"]
    table = Table((texts["a column"], "b"), (row,), note=texts["a note"])
    parts = [
        show(*pair, title=titles).fragment(),
        table._repr_html_(),
        verdict(texts)._repr_html_(),
        feedback(texts),
        widget(explorer(texts)._content()),
    ]
    begin, body, end = report(texts, folder).partition("<h1>")
    return begin + "".join(parts) + body + end
