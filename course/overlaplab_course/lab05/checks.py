"""Graders of lab 05: 5.1, 5.2, 5.4a, 5.5; those of its reducers: reducer_checks.

What they promise stands in exercises.toml.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from overlaplab.grading.declared import Declared
from overlaplab.grading.exercise import Sheet
from overlaplab.grading.forms import as_number, find_slip, need_dict, write_number
from overlaplab_course.lab05 import reducer_checks, reference  # noqa: F401 (registers)
from overlaplab_course.lab05.given import HookCase, Model, Played, Seen, hook_case, play
from overlaplab_course.lab05.setups import WAYS, Costs, Setup

LAB = Declared(__file__)

# -- 5.1

WINDOWS, SHARED, EXPOSED = LAB.sentences("5.1")
NEAR_MS = 0.02  # a thousand element-wise kernels take less on the board

Windows = Callable[[list[float], list[str]], Mapping[str, float]]
LeastExposed = Callable[[Mapping[str, float], Mapping[str, float]], float]


@lru_cache(maxsize=16)
def _run(model: Model) -> Played:
    return play(reference.PromptReducer, model)


def _near(said: float | None, right: float) -> bool:
    return said is not None and abs(said - right) <= max(NEAR_MS, 0.002 * abs(right))


@LAB.grader("5.1")
def grade_window(sheet: Sheet, windows: Windows, least_exposed: LeastExposed) -> None:
    """Both functions against runs of the reference's hooks, each by itself."""
    for sentence, models in LAB.cases("5.1", "models").items():
        for options in models:
            model = Model(**{**options, "layers": tuple(options["layers"])})
            seen = _run(model)
            sheet.ran(f"layers {', '.join(model.layers)} on {model.ranks} ranks")
            if sentence == EXPOSED:
                _judge_exposed(sheet, model, seen, least_exposed)
            else:
                _judge_windows(sheet, sentence, model, seen, windows)
            sheet.stop_if_wrong()


def _judge_windows(
    sheet: Sheet, sentence: str, model: Model, seen: Played, windows: Windows
) -> None:
    answer = need_dict(
        windows(list(model.backward_ms), list(model.layers)), "what windows returns"
    )
    sheet.show(seen.timeline, step_ns=seen.evidence.step_ns[1], title="the run")
    right = seen.windows_ms()
    whole = sum(model.backward_ms)
    for name in model.names:
        said = as_number(answer.get(name))
        uses = [i for i, used in enumerate(model.layers) if used == name]
        own, later = model.backward_ms[uses[0]], sum(model.backward_ms[uses[0] + 1 :])
        slips = {"own": "own", "first": "first", "forward": "forward"}
        numbers = {
            "own": right[name] + own,
            "first": sum(model.backward_ms[: uses[-1]]),
            "forward": later,
        }
        known = {key: n for key, n in numbers.items() if not _near(n, right[name])}
        why = find_slip(said, slips, known, _near)
        why = why if why in LAB.cases("5.1", "hints")[sentence] else ""
        sheet.expect(
            sentence,
            _near(said, right[name]),
            seen=f"the window of {name}: {write_number(said)}",
            expected=f"{right[name]:g} ms of {whole:g}, as in the run below",
            hint=LAB.hint(sentence, why),
        )
    extra = sorted(map(str, set(answer) - set(model.names)))
    if extra:
        sheet.expect(sentence, False, seen=f"windows of {extra}: no such weight")


def _judge_exposed(
    sheet: Sheet, model: Model, seen: Played, least_exposed: LeastExposed
) -> None:
    messages, found = dict(model.message_ms), seen.windows_ms()
    right = {name: found[name] for name in model.names}  # in the order of `windows`
    said = as_number(least_exposed(dict(right), dict(messages)))
    exposed = seen.timeline.report().exposed_ns / 1e6
    sheet.show(seen.timeline, step_ns=seen.evidence.step_ns[1], title="the run")
    in_order = sorted(right, key=lambda name: right[name])
    numbers = {
        "total": max(0.0, sum(messages.values()) - sum(model.backward_ms)),
        "last": messages[in_order[0]],
        "alone": sum(max(0.0, messages[n] - w) for n, w in right.items()),
    }
    known = {key: n for key, n in numbers.items() if not _near(n, exposed)}
    why = find_slip(said, {key: key for key in numbers}, known, _near)
    sheet.expect(
        EXPOSED,
        _near(said, exposed),
        seen=f"you say {write_number(said)} ms for windows {right} "
        f"and messages {messages}",
        expected=f"{exposed:.2f} ms, as in the run below",
        hint=LAB.hint(EXPOSED, why),
    )


# -- 5.2

EXAMPLE = HookCase(3.0, 100.0, (2.0, 5.0))  # as the lesson runs it
GIVEN, GRAD, CALLS, READY = LAB.sentences("5.2")
HOOKS = {
    "register_hook": "register_hook",
    "register_post_accumulate_grad_hook": "post_accumulate",
    "register_full_backward_hook": "module",
}


def true_answers(case: HookCase) -> dict[str, dict[str, float]]:
    """By hook: what it is given, `.grad` at its first call, how often it is called."""
    with contextlib.redirect_stdout(io.StringIO()):
        seen: Seen = reference.experiment(case.weight, case.grad, case.factors)
    rows = {name: getattr(seen, log) for name, log in HOOKS.items()}
    return {
        name: {"given": rows[name][0][0], "grad": rows[name][0][1], "calls": len(log)}
        for name, log in rows.items()
    }


@LAB.grader("5.2")
def grade_hooks(sheet: Sheet, my_number: int, hooks: Mapping[str, Any]) -> None:
    """Each entry against torch itself."""
    case = hook_case(my_number)
    sheet.ran(f"the experiment with your numbers: {case}")
    answers = need_dict(hooks, "hooks")
    right = true_answers(case)
    for sentence, field in LAB.cases("5.2", "field").items():
        for name, row in right.items():
            entries = answers.get(name)
            said = entries.get(field) if isinstance(entries, Mapping) else None
            given = as_number(said)
            sheet.expect(
                sentence,
                given is not None and abs(given - row[field]) < 1e-6,
                seen=f"{name}, {field!r}: {said!r}",
                expected="what the experiment prints for your numbers",
                hint=_hook_hint(case, name, field, given),
            )
    returns, send_from = answers.get("backward returns"), answers.get("send from")
    wrong = []
    if str(returns) != "None" or returns is None:
        wrong.append(f"'backward returns': {returns!r}")
    if send_from != "register_post_accumulate_grad_hook":
        wrong.append(f"'send from': {send_from!r}")
    sheet.expect(
        READY,
        not wrong,
        seen="; ".join(wrong),
        expected="what print(loss.backward()) prints, as a text; one hook's name",
    )


def _hook_hint(case: HookCase, hook: str, field: str, said: float | None) -> str:
    """What a wrong number is."""
    if said is None:
        return ""
    total = sum(case.factors)
    if field != "calls" and said == true_answers(EXAMPLE)[hook][field]:
        return f"that is the example's number; yours are {case}"
    known = {
        case.weight: "that is the weight itself",
        total: "that is this backward pass's gradient alone",
        case.factors[0]: "that is the gradient of one use alone",
        case.factors[1]: "that is the gradient of one use alone",
        case.grad: "that is `.grad` before this backward pass adds to it",
        case.grad + total: "that is `.grad` after this backward pass has added to it",
    }
    return known.get(said, "") if field != "calls" else ""


# -- 5.4a

IN_FRONT, TWICE, ALL_NOW = LAB.sentences("5.4a")

ToLaunch = Callable[[list[str], int, set[str]], Any]


@LAB.grader("5.4a")
def grade_turn(sheet: Sheet, to_launch: ToLaunch) -> None:
    """One arrival after the other, as a rank's hooks see them."""
    for order, arrivals in LAB.cases("5.4a", "arrivals")[ALL_NOW]:
        sheet.ran(
            f"your function on the order {list(order)}, arrivals {list(arrivals)}"
        )
        num_launched = 0
        for number in range(len(arrivals) + 1):
            arrived = set(arrivals[:number])
            right = list(reference.to_launch(order, num_launched, arrived))
            answer = to_launch(list(order), num_launched, set(arrived))
            asked = f"{num_launched} launched, {sorted(arrived)} arrived"
            _judge_turn(sheet, list(order), num_launched, answer, right, asked)
            sheet.stop_if_wrong()
            num_launched += len(right)


def _judge_turn(
    sheet: Sheet,
    order: list[str],
    num_launched: int,
    answer: object,
    right: list[str],
    asked: str,
) -> None:
    said: list[Any] = list(answer) if isinstance(answer, list | tuple) else [answer]
    waiting = [name for name in order[num_launched:] if name not in right]
    in_front = any(name in waiting for name in said)
    twice = any(n in order[:num_launched] or said.count(n) > 1 for n in said)
    wrong = {
        IN_FRONT: in_front,
        TWICE: twice,
        ALL_NOW: said != right and not in_front and not twice,
    }
    for sentence, is_wrong in wrong.items():
        sheet.expect(
            sentence,
            not is_wrong,
            seen=f"{asked}: your function returns {answer!r}",
            expected=str(right),
        )


# -- 5.5

USABLE, SHORTER = LAB.sentences("5.5")
AT_MOST = 1.03


def machines() -> tuple[Setup, ...]:
    """Those on which `choose_way` is asked."""
    return tuple(Setup(*row) for row in LAB.cases("5.5", "machines")[SHORTER])


@LAB.grader("5.5")
def grade_choice(sheet: Sheet, choose_way: Callable[[Costs], Any]) -> None:
    """What is lost by each choice, on the recorded step of the GPT."""
    setups = machines()
    sheet.ran(f"your function on {len(setups)} machines")
    for setup in setups:
        answer = choose_way(setup.costs)
        good = isinstance(answer, str) and answer in WAYS
        LAB.expect(sheet, USABLE, good, name=setup.name, answer=answer)
        sheet.stop_if_wrong()
        other = WAYS[1 - WAYS.index(answer)]
        took, better = setup.steps_ns[answer], setup.steps_ns[other]
        lost = took > AT_MOST * better
        timeline = setup.timeline(answer)
        if lost:
            sheet.show(timeline, step_ns=took, target_ns=better, title=setup.name)
        LAB.refuse(
            sheet,
            SHORTER,
            lost,
            why=_why(setup, answer),
            name=str(setup),
            answer=answer,
            took=took / 1e6,
            other=better / 1e6,
        )
        sheet.stop_if_wrong()


def _why(setup: Setup, answer: str) -> str:
    if answer == "one":
        return "overlap"
    shares = setup.timeline(answer).critical_path().shares_ns
    return "launch" if max(shares, key=lambda s: shares[s]) == "launch" else "latency"
