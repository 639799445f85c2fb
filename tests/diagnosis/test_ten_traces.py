"""The first finding is the cause: ten traces, each slow for one known reason."""

from __future__ import annotations

from pathlib import Path

import pytest

import overlaplab as ol
from tests.diagnosis.ten_traces import TEN, VARIANTS, write


@pytest.mark.parametrize("name", [*TEN, *VARIANTS])
def test_the_first_finding_is_the_cause(name: str, tmp_path: Path):
    cause, make = (TEN | VARIANTS)[name]
    found = ol.diagnose(ol.read_trace(write(tmp_path, make())))
    kinds = [one.kind for one in found.findings]
    assert kinds[:1] == ([cause] if cause else []), str(found)


def test_there_are_ten():
    assert len(TEN) == 10
