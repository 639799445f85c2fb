"""The processes in which a notebook is graded, seen from the parent.

A server that runs no code of the learner's is forked: for the cells; for each exercise,
to hold the learner's objects; and once to judge, by asking those. The parent never
unpickles what a child sends: it reads JSON, and carries the objects as bytes from the
one that plays the cells to those that hold them. A child that dies or misses its
deadline is killed with everything that it started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlaplab.deadline import WALL_FACTOR, machine_is_busy
from overlaplab.errors import NotebookError
from overlaplab.grading.cells import NotebookCell
from overlaplab.grading.exercise import Exercise
from overlaplab.grading.forks import GRACE_S, START_S, Fork, Server

_MOST_DEATHS = 5

# An exercise, the names of its objects, and the cell in which it is solved, 0: unknown.
Order = tuple[str, tuple[str, ...], int]


@dataclass(frozen=True, slots=True)
class Objects:
    """The learner's objects for one exercise."""

    payload: bytes  # pickled; only the child that holds them unpickles it
    # file name -> text of the cells, for the lines in error messages
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an exercise."""

    verdict: Mapping[str, Any] | None  # `Verdict.to_dict()`, None if it came to none
    reason: str = ""  # why not, "" if there is a verdict
    # False if that was not the code's doing, as far as one can know
    judged: bool = True


@dataclass(slots=True)
class Handover:
    """What came out of the cells: objects by exercise, or why there are none."""

    objects: dict[str, Objects] = field(default_factory=dict)
    missing: dict[str, Outcome] = field(default_factory=dict)


def _listen(
    child: Fork,
    handover: Handover,
    stop_at: float,
    cell_wall_s: float,
    progress: Callable[[str], None],
) -> tuple[int | None, Outcome | None]:
    """Take messages until the end; (cell, what became of it) if the child must go."""
    cell: int | None = None
    patience = START_S
    try:
        while True:
            left = stop_at - time.monotonic()
            message = child.receive(min(patience, left))
            if message is None and left <= patience:
                reason = f"the deadline of the notebook passed in cell {cell}"
                return None, Outcome(None, reason, judged=False)
            if message is None:
                reason = f"cell {cell} did not end within {cell_wall_s:g} s"
                return cell, Outcome(None, reason, judged=not machine_is_busy())
            patience = cell_wall_s + GRACE_S
            if "cell" in message:
                cell = int(message["cell"])
                progress(f"cell {cell}")
            elif "objects" in message:
                task = str(message["objects"])
                payload = child.receive_bytes(GRACE_S)
                if payload is None:
                    reason = f"cell {cell} broke the connection to the grader"
                    return cell, Outcome(None, reason)
                handover.objects[task] = Objects(payload, dict(message["sources"]))
                handover.missing.pop(task, None)
            elif "missing" in message:
                judged = message.get("judged") is not False
                outcome = Outcome(None, str(message["reason"]), judged)
                handover.missing[str(message["missing"])] = outcome
            elif "end" in message:
                return None, None
    except (EOFError, ValueError, KeyError, TypeError, AttributeError):
        reason, own_doing = child.how_it_ended()
        return cell, Outcome(None, f"cell {cell} {reason}", own_doing)


def _elsewhere(*_: object) -> None:
    raise LookupError("this exercise is judged in another process")


class Judge:
    """Plays cells and has objects judged, in forks of one server.

    It serves any number of notebooks, one after another.

    Args:
        modules: to import, for exercises of an instructor's own.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = modules
        self._server = Server(modules)
        self._judging: Fork | None = None
        self._closed = False

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End its processes; from any thread. What it still does comes to nothing."""
        self._closed = True
        self._end()

    def exercises(self, lab: str = "") -> tuple[Exercise, ...]:
        """Those of a lab ("06"), or all, without their graders.

        Raises:
            NotebookError: a lab, or one of the modules, cannot be imported.
        """
        try:
            answer = self._server.ask({"exercises": lab or None})
        except EOFError:  # gone, whoever killed it
            try:
                self._restart()
                answer = self._server.ask({"exercises": lab or None})
            except EOFError as error:
                raise NotebookError(f"nothing can be graded: {error}") from None
        if "broken" in answer:
            raise NotebookError(f"exercises cannot be loaded: {answer['broken']}")
        found = answer["exercises"]
        return tuple(Exercise(verifies=(), grade=_elsewhere, **e) for e in found)

    def play(
        self,
        cells: Sequence[NotebookCell],
        orders: Sequence[Order],
        directory: Path,
        *,
        stop_at: float,
        cell_timeout_s: float,
        progress: Callable[[str], None],
    ) -> Handover:
        """Run `cells` in a fork and take each exercise's objects.

        A cell that kills the fork, or hangs so that only a kill ends it, is left out
        and the others are played again in a new one. What may be the machine's fault is
        tried once more with all of them.

        Args:
            cells: in order, with the checks.
            orders: which objects to take, and where they are made.
            directory: of the notebook, for modules that it imports.
            stop_at: deadline of the whole, as `time.monotonic()` counts.
            cell_timeout_s: deadline of one cell, in CPU time.
            progress: called with which cell runs.
        """
        handover = Handover()
        left_out: dict[int, Outcome] = {}
        once_more = True
        while len(left_out) <= _MOST_DEATHS:
            script = {
                "directory": str(directory),
                "cells": [
                    [c.number, c.source] for c in cells if c.number not in left_out
                ],
                "orders": list(orders),
                "cell_timeout_s": cell_timeout_s,
            }
            try:
                child = self._fork("play")
            except EOFError as error:
                left_out[0] = Outcome(None, str(error), judged=False)
                break
            try:
                child.send(script)
                culprit, outcome = _listen(
                    child, handover, stop_at, WALL_FACTOR * cell_timeout_s, progress
                )
            finally:
                child.close()
            outcomes = [*handover.missing.values(), *([outcome] if outcome else [])]
            in_time = time.monotonic() < stop_at
            if once_more and in_time and not all(o.judged for o in outcomes):
                once_more = False
                continue
            if outcome is None:
                break
            left_out[culprit or 0] = outcome
            if culprit is None or not in_time:
                break
        for task in {order[0] for order in orders} - set(handover.objects):
            # The fate of the exercise's own cell, or of what ended all.
            own = [cell.number for cell in cells if cell.exercise == task]
            blame = next((left_out[n] for n in (*own, 0) if n in left_out), None)
            blame = blame or handover.missing.get(task)
            handover.missing[task] = blame or Outcome(None, "not found")
        return handover

    def judge(
        self, task: Exercise, objects: Objects, directory: Path, stop_at: float
    ) -> Outcome:
        """Judge; once more if the machine may be to blame that there is no verdict.

        Args:
            task: which exercise.
            objects: the learner's.
            directory: of the notebook, for modules that the objects refer to.
            stop_at: deadline of the notebook, as `time.monotonic()` counts.
        """
        request = {
            "exercise": task.id,
            "sources": dict(objects.sources),
            "directory": str(directory),
        }
        for _ in range(2):
            outcome = self._judge(task, request, objects.payload, stop_at)
            if outcome.judged:
                break
        return outcome

    def _judge(
        self, task: Exercise, request: Mapping[str, Any], payload: bytes, stop_at: float
    ) -> Outcome:
        if stop_at <= time.monotonic():
            reason = "the deadline of the notebook had passed"
            return Outcome(None, reason, judged=False)
        try:
            host = self._fork("host")
        except EOFError as error:
            return Outcome(None, str(error), judged=False)
        try:
            host.send(request, payload)
            self._judging = self._judging or self._fork("judge")
            return self._ask_judge(self._judging, task, request, host, stop_at)
        except EOFError as error:
            return Outcome(None, str(error), judged=False)
        finally:
            host.close()

    def _ask_judge(
        self,
        judge: Fork,
        task: Exercise,
        request: Mapping[str, Any],
        host: Fork,
        stop_at: float,
    ) -> Outcome:
        left = stop_at - time.monotonic()
        own_limit = WALL_FACTOR * task.timeout_s + GRACE_S
        self._judging = None  # unless it answers
        try:
            judge.send({**request, "process": host.process})
            judge.pass_on(host)
            answer = judge.receive(min(START_S, left))
            if answer:
                left = stop_at - time.monotonic()
                answer = judge.receive(min(own_limit, left))
            if answer:
                self._judging = judge
        except (EOFError, ValueError):
            reason, own_doing = judge.how_it_ended()
            return Outcome(None, f"what judges the code {reason}", own_doing)
        finally:
            if self._judging is None:
                judge.close()
        if answer is None:
            limit = min(own_limit, max(left, 0))
            judged = own_limit < left and not machine_is_busy()
            return Outcome(None, f"did not end within {limit:.0f} s", judged)
        if "gone" in answer:
            reason, own_doing = str(answer["gone"]), True
            if not reason:
                reason, own_doing = host.how_it_ended()
            return Outcome(None, f"the code {reason} during the check", own_doing)
        verdict = answer.get("verdict")
        if not isinstance(verdict, dict):
            reason = str(answer.get("reason", "was not verified"))
            return Outcome(None, reason, answer.get("judged") is not False)
        return Outcome(verdict, judged=verdict.get("judged") is not False)

    def _fork(self, job: str) -> Fork:
        try:
            return Fork(self._server, job)
        except EOFError:
            self._restart()
            return Fork(self._server, job)

    def _end(self) -> None:
        self._server.close()
        judge, self._judging = self._judging, None
        if judge is not None:
            judge.process = 0  # it has ended with the server
            judge.close()

    def _restart(self) -> None:
        self._end()
        if self._closed:
            raise EOFError("grading was ended")
        self._server = Server(self._modules)
