"""Run All of an unsolved lab comes to its end, and is red at each check.

Of one lab here; with OVERLAPLAB_EVERY_LAB=1 of all.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.browser.conftest import LABS
from tests.browser.jupyter import Jupyter
from tests.browser.notebook import Notebook

NAMES = sorted(path.name for path in LABS.glob("*.ipynb"))
SOME = NAMES if os.environ.get("OVERLAPLAB_EVERY_LAB") else NAMES[:1]


def stderr(cell: dict[str, Any]) -> str:
    outputs = [o for o in cell["outputs"] if o.get("name") == "stderr"]
    return "".join("".join(output["text"]) for output in outputs)


@pytest.mark.parametrize("name", SOME)
def test_run_all_ends_at_the_last_cell(
    browser: Browser, server: Jupyter, name: str
) -> None:
    notebook = Notebook(browser, server, name)
    try:
        notebook.command("notebook:run-all-cells")
        cells = notebook.page.evaluate(
            "() => window.jupyterapp.shell.currentWidget.content.model.toJSON().cells"
        )
    finally:
        notebook.close()
    code = [c for c in cells if c["cell_type"] == "code" and "".join(c["source"])]
    assert code[-1]["execution_count"] == len(code)
    raised = {
        c["id"]: output["evalue"]
        for c in code
        for output in c["outputs"]
        if output["output_type"] == "error"
    }
    assert raised == {}
    checks = [c for c in code if c["metadata"].get("nbgrader", {}).get("grade")]
    red = [c["id"] for c in checks if "is not solved yet; see above" in stderr(c)]
    assert red == [c["id"] for c in checks] and red
