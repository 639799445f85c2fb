"""A diagnosis for a terminal: numbers of each rank, then findings, then details."""

from __future__ import annotations

import textwrap

from overlaplab.diagnosis import tables
from overlaplab.diagnosis.findings import Finding
from overlaplab.diagnosis.makers import UNKNOWN
from overlaplab.diagnosis.result import Result
from overlaplab.diagnosis.saved import Saved
from overlaplab.diagnosis.wording import of_whole, short
from overlaplab.errors import plural
from overlaplab.view.units import format_ns

WIDTH = 96
_HOW_TO_RECORD = (
    "No GPU events: this is a trace of the CPU's operators (of gloo's transfers, too, "
    "where there are any), and neither its computation nor its communication can be "
    "told from it. Record each rank's GPU: torch.profiler.profile(activities=["
    "ProfilerActivity.CPU, ProfilerActivity.CUDA], schedule=torch.profiler.schedule("
    "wait=1, warmup=1, active=3), on_trace_ready=torch.profiler."
    "tensorboard_trace_handler(FOLDER)), step() after each step, and give FOLDER. Of a "
    "run on CPUs with gloo: `with ol.profile() as p`, and p.save(FILE)."
)
_NOT_KNOWN = (
    "What that saved, one run cannot show, since computation and communication slow "
    "one another: give the same step without overlap, too (--serial)."
)
_NOTHING = "So overlap saved nothing."


def text(result: Result, *, details: bool = False) -> str:
    """The whole of it; with `details` the tables behind the findings, too."""
    parts = [_head(result), _numbers(result), _findings(result)]
    if details:
        parts += [f"{title}\n{table}" for title, table in tables.details(result, 6)]
    parts.append(_remarks(result, details))
    whole = "\n\n".join(part for part in parts if part)
    # A terminal obeys what it is sent, and names come from traces.
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in whole)


def headline(result: Result) -> list[str]:
    """What was looked at, and who made the collectives."""
    timeline = result.timeline
    devices = sorted({short(name) for _, name in timeline.source.devices})
    num_ranks = len(result.case.lookup.ranks)
    what = [plural(num_ranks, "rank")]
    if timeline.steps:
        what.append(plural(len(timeline.steps), "step"))
    what += devices
    measured = f"virtual, {timeline.hardware}"
    what.append(measured if timeline.origin == "virtual" else "measured")
    lines = [", ".join(what)]
    if result.has_communication:
        made = "; ".join(str(maker) for maker in result.makers)
        if result.makers[0].name == UNKNOWN:
            made = "an unknown maker: no range or operator names one"
        lines.append(f"Collectives launched by {made}")
    hw = result.case.hardware
    if hw is not None and timeline.origin != "virtual":
        how = ", guessed from the card's name" if result.case.is_guess else ""
        lines.append(f"Bandwidth compared with {hw.name}{how}")
    return lines


def saved_lines(result: Result) -> list[str]:
    """Hidden and saved, of the slowest of the steps described."""
    steps = result.case.representative
    if not result.has_device:
        return [_HOW_TO_RECORD]
    if not result.has_communication:
        return ["No communication kernels found: nothing can be said of overlap."]
    if not steps:
        return []
    step = max(steps, key=lambda s: s.step_ns)
    saved = result.saved[step.rank, step.step]
    where = f"Rank {step.rank}" + ("" if step.step is None else f", step {step.step}")
    hidden = f"{where}: hidden {of_whole(step.hidden_ns, step.communication_ns)} of "
    if not saved.is_known:
        return [f"{hidden}communication. {_NOT_KNOWN if step.hidden_ns else _NOTHING}"]
    return [
        f"{hidden}communication. {_saved(saved)}",
        f"(Alone: {format_ns(saved.compute_alone_ns)} of computation and "
        f"{format_ns(saved.communication_alone_ns)} of communication; {saved.basis}.)",
    ]


def _saved(saved: Saved) -> str:
    """What overlap gained of what it could, against one after the other."""
    possible = f"{format_ns(saved.possible_ns)} that overlap could save at most"
    if saved.serial_step_ns is not None:
        return _saved_of_serial(saved)
    if saved.saved_ns > saved.possible_ns:  # rounding of a model; never said to be more
        return f"Saved all of the {possible}."
    if saved.saved_ns < 0:
        return (
            f"Saved nothing of the {possible}: launches, copies, waiting and idle time "
            f"make the step {format_ns(-saved.saved_ns)} longer than the two alone, "
            "one after the other."
        )
    return f"Saved {of_whole(saved.saved_ns, saved.possible_ns)} possible."


def _saved_of_serial(saved: Saved) -> str:
    assert saved.serial_step_ns is not None
    steps = (
        f"the serial step takes {format_ns(saved.serial_step_ns)}, this one "
        f"{format_ns(saved.step_ns)}"
    )
    if saved.saved_ns < 0:
        return f"Saved nothing: {steps}."
    gain = of_whole(min(saved.saved_ns, saved.possible_ns), saved.possible_ns)
    more_ns = saved.saved_ns - saved.possible_ns
    rest = ""
    if more_ns > 0:
        rest = (
            f", {format_ns(more_ns)} of it by less other or idle time, not by overlap"
        )
    return f"Saved {gain} possible: {steps}{rest}."


def finding_title(finding: Finding) -> str:
    """'last-bucket: 0.59 of 4.2 ms of step 3 on rank 0 (up to 612 us; in 3 steps)'."""
    seen = finding.evidence.get("seen", ())
    where = f"on rank {finding.rank}"
    if finding.step is not None:
        where = f"of step {finding.step} {where}"
    ranks = {item["rank"] for item in seen}
    steps = {item["step"] for item in seen}
    more = []
    if len(steps) > 1:
        more.append(plural(len(steps), "step"))
    if len(ranks) > 1:
        more.append(plural(len(ranks), "rank"))
    extent = f"seen in {' and '.join(more)}" if more else ""
    most_ns = max((item["ns"] for item in seen), default=finding.cost_ns)
    if most_ns > finding.cost_ns:
        extent = f"up to {format_ns(most_ns)}; {extent}"
    extent = f" ({extent})" if extent else ""
    return f"{finding.kind}: {_share(finding)} {where}{extent}"


def _share(finding: Finding) -> str:
    """What it costs, of the step that it costs it."""
    return of_whole(finding.cost_ns, finding.evidence["step_ns"])


def verdict(result: Result) -> str:
    """The whole report in one line."""
    if not result.has_device:
        return "Verdict: no GPU events, so nothing can be said of overlap."
    if not result.timeline.spans:
        return "Verdict: no event that could be used, so nothing can be said."
    if result.findings:
        first = result.findings[0]
        where = f"rank {first.rank}"
        where += "" if first.step is None else f", step {first.step}"
        return f"Verdict: {first.kind}, for {_share(first)} ({where})."
    if result.unexplained is not None:
        return "Verdict: no finding; time is lost, and what to is not known."
    if not result.has_communication:
        return "Verdict: nothing communicates, and nothing else costs 1/200 of a step."
    return "Verdict: nothing found that costs 1/200 of a step."


def unexplained_lines(result: Result) -> list[str]:
    """What no finding names, if that is worth reporting."""
    return [] if result.unexplained is None else [str(result.unexplained)]


def source_lines(result: Result) -> list[str]:
    """What was read, dropped, and by which names a kernel counts as communication."""
    source = result.timeline.source
    lines = []
    if source.num_events:
        line = f"Read {plural(source.num_events, 'event')} of "
        line += plural(len(source.files), "file")
        dropped = [f"{number} {why}" for why, number in source.dropped]
        lines.append(f"{line}; dropped: {', '.join(dropped) or 'none'}.")
    if source.communication_names:
        names = " ".join(source.communication_names)
        lines.append(f"Kernels count as communication by these names: {names}")
    return lines


def _head(result: Result) -> str:
    lines = [verdict(result), *headline(result)]
    return "\n".join(_wrap(line, "", "  ") for line in lines)


def _numbers(result: Result) -> str:
    lines = "\n".join(_wrap(line, "", "") for line in saved_lines(result))
    return f"{tables.numbers(result)}\n\n{lines}" if result.has_device else lines


def _findings(result: Result) -> str:
    if not result.has_device:
        return ""
    if not result.findings:
        none = "Findings: none that costs 1/200 of a step."
        return "\n".join([none, *unexplained_lines(result)])
    lines = [
        "Findings, the most expensive first (two may be the same time, seen twice)"
    ]
    for number, finding in enumerate(result.findings, 1):
        lines += ["", _wrap(finding_title(finding), f"{number:2}. ", "    ")]
        lines += [_wrap(finding.says, "    ", "    ")]
        lines += [_wrap(finding.remedy, "    -> ", "       ")]
    lines += ["", *unexplained_lines(result)] if result.unexplained else []
    return "\n".join(lines)


def _remarks(result: Result, details: bool) -> str:
    remarks = [*result.remarks, *(source_lines(result) if details else ())]
    return "\n".join(_wrap(remark, "* ", "  ") for remark in remarks)


def _wrap(text: str, first: str, then: str) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=then,
        break_on_hyphens=False,
    )
