"""Learners' objects in a process of their own, for tests that judge in this one.

    OVERLAPLAB_HOSTED=1 python -m pytest tests/labs

judges all solutions in the tests of labs so, with the verdicts that are stored.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

import cloudpickle

from overlaplab.cluster.pool.pickling import dumps
from overlaplab.grading.children import Judge
from overlaplab.grading.exercise import Exercise
from overlaplab.grading.judging import judge as judge_here
from overlaplab.grading.remote import RemoteHost
from overlaplab.grading.stage import hosted_by
from overlaplab.grading.verdict import Verdict


class Hosts:
    """Forks of one server, each with objects of one exercise.

    Args:
        judge: whose server it is, which may know exercises of the tests' own.
    """

    def __init__(self, judge: Judge | None = None) -> None:
        self._judge = judge or Judge()
        self._loaded: set[str] = set()

    @contextlib.contextmanager
    def holding(self, exercise: Exercise, *solutions: object) -> Iterator[RemoteHost]:
        """These are there, and not asked for yet."""
        for name, module in list(sys.modules.items()):
            if name.startswith("tests."):
                cloudpickle.register_pickle_by_value(module)
        payload = dumps(list(solutions))
        if exercise.lab not in self._loaded:
            self._judge.exercises(exercise.lab)  # imported once, before the forks
            self._loaded.add(exercise.lab)
        child = self._judge._fork("host")
        try:
            request = {"exercise": exercise.id, "directory": "", "sources": {}}
            child.send(request, payload)
            end = Connection(os.dup(child.connection.fileno()))
            remote = RemoteHost(end, child.process, exercise)
            with contextlib.closing(remote), hosted_by(remote):
                yield remote
        finally:
            child.close()

    def judge(self, exercise: Exercise, *solutions: object) -> Verdict:
        """As `overlaplab.grading.judge`, with handles of `solutions`."""
        with self.holding(exercise, *solutions) as remote:
            return judge_here(exercise, *remote.objects())
