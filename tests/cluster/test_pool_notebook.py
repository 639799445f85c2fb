"""Processes from a notebook: cells' functions, errors with source, no leftovers."""

import os

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
import nbformat
from nbclient import NotebookClient

from tests.guards import GUARD_S, wait_until

CELLS = [
    """
    import os
    import torch
    import torch.distributed as dist
    import overlaplab as ol

    scale = 10

    def in_a_cell(x):
        print("here")
        dist.all_reduce(x)
        return os.getpid(), (x * scale).tolist()
    """,
    """
    values = ol.run(in_a_cell, torch.ones(2), cluster="gloo").values
    print(*(pid for pid, _ in values))
    print([numbers for _, numbers in values])
    """,
    """
    def fail():
        raise ValueError("in a cell")

    try:
        ol.run(fail, cluster="gloo")
    except ol.RankError as error:
        print(error)
    """,
    """
    import threading, _thread, time

    threading.Timer(0.5, _thread.interrupt_main).start()
    try:
        ol.run(time.sleep, 1000, cluster="gloo")
    except KeyboardInterrupt:
        print("interrupted")
    """,
    'print(*ol.run(lambda: os.getpid(), cluster="gloo").values)',
]


@pytest.fixture(scope="module")
def outputs():
    import textwrap

    cells = [nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=GUARD_S, startup_timeout=GUARD_S).execute()
    return [
        "".join(output.text for output in cell.outputs if output.name == "stdout")
        for cell in notebook.cells
    ]


def test_a_function_of_a_cell_runs_and_its_prints_appear_under_the_cell(outputs):
    lines = outputs[1].splitlines()

    assert sorted(lines[:2]) == ["[rank 0] here", "[rank 1] here"]
    assert lines[3] == "[[20.0, 20.0], [20.0, 20.0]]"


def test_an_error_shows_the_cell_s_source_line(outputs):
    assert "raised ValueError: in a cell" in outputs[2]
    assert 'raise ValueError("in a cell")' in outputs[2]


def test_after_an_interrupt_the_next_cell_runs(outputs):
    assert outputs[3] == "interrupted\n"
    assert len(outputs[4].split()) == 2


def test_the_processes_end_with_the_kernel(outputs):
    pids = [int(pid) for pid in outputs[4].split()]

    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
