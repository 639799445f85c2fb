"""Drives a notebook in JupyterLab, in a headless Chromium that has no network.

Set-up goes through JupyterLab's own commands; what a test is about, through mouse and
keyboard. Every wait has a deadline.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, sync_playwright

from tests.browser.jupyter import Jupyter
from tests.browser.processes import MARK
from tests.guards import GUARD_S

TIMEOUT_MS = 1000 * GUARD_S  # of one act
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


@contextmanager
def chromium(executable: str, mark: str) -> Iterator[Browser]:
    """A headless browser; its processes carry the mark and end with this one."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable,
            args=list(FLAGS),
            env={**os.environ, MARK: mark},
            timeout=TIMEOUT_MS,
        )
        try:
            yield browser
        finally:
            browser.close()


class Notebook:
    """A notebook that is open in a page of its own, with its kernel.

    Attributes:
        page: of playwright.
        faults: what the page said that it should not: exceptions, errors in its
            console, requests to anywhere but the server.
    """

    def __init__(
        self,
        browser: Browser,
        server: Jupyter,
        path: str,
        *,
        width: int = 1280,
        scale: float = 1,
    ) -> None:
        self.faults: list[str] = []
        self.page: Page = browser.new_page(
            viewport={"width": width, "height": 900}, device_scale_factor=scale
        )
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.on("pageerror", lambda e: self.faults.append(f"exception: {e}"))
        self.page.on("console", self._hear)
        self.page.route("**/*", lambda route: self._let_through(route, server.url))
        self.page.goto(server.page_of(path))
        self._wait()

    def _wait(self) -> None:
        self.page.locator(".jp-Notebook .jp-Cell").first.wait_for()
        self.page.wait_for_function(
            "() => window.jupyterapp.shell.currentWidget.sessionContext?.session"
            "?.kernel?.status === 'idle'"
        )

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            where = message.location.get("url", "")
            self.faults.append(f"console: {message.text} ({where})")

    def _let_through(self, route: Any, address: str) -> None:
        url = route.request.url
        if url.startswith((address, "data:", "blob:")):
            route.continue_()
        else:
            self.faults.append(f"request: {url}")
            route.abort()

    def close(self) -> None:
        self.page.close()

    def command(self, name: str, **arguments: Any) -> None:
        """Run a command of JupyterLab, and wait until it has ended."""
        self.page.evaluate(
            "async ([name, arguments]) => {"
            " await window.jupyterapp.commands.execute(name, arguments) }",
            [name, arguments],
        )

    def cell(self, cell_id: str) -> Locator:
        """A cell, scrolled to and made active."""
        self.page.evaluate(
            """async (id) => {
              const notebook = window.jupyterapp.shell.currentWidget.content;
              const index = notebook.widgets.findIndex(w => w.model.id === id);
              if (index < 0) throw new Error(`no cell ${id}`);
              notebook.activeCellIndex = index;
              await notebook.scrollToItem(index, 'start');
              notebook.widgets[index].node.dataset.testCell = id;
            }""",
            cell_id,
        )
        return self.page.locator(f'[data-test-cell="{cell_id}"]')

    def run(self, cell_id: str) -> Locator:
        """Run a cell to its end.

        Raises:
            AssertionError: it raised.
        """
        cell = self.cell(cell_id)
        self.command("notebook:run-cell")
        errors = cell.locator('[data-mime-type="application/vnd.jupyter.stderr"]')
        said = "\n".join(errors.all_inner_texts())
        assert "Error" not in said, f"cell {cell_id} raised: {said[-2000:]}"
        return self.cell(cell_id)

    def save_and_restart(self) -> None:
        """Save the notebook with its outputs, and begin a new kernel."""
        self.command("docmanager:save")
        self.page.evaluate(
            "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
            ".restart()"
        )
        self._wait()

    def open_again(self) -> None:
        """Load the page and the saved notebook again."""
        self.page.reload()
        self._wait()

    def ask(self, expression: str) -> Any:
        """What an expression is in the kernel, for values that Python can write.

        Raises:
            AssertionError: it raised.
        """
        answer = self.page.evaluate(
            """async (code) => {
              const kernel =
                window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
              const future = kernel.requestExecute({
                code: '', silent: true, store_history: false,
                user_expressions: {answer: code},
              });
              return (await future.done).content.user_expressions.answer;
            }""",
            f"repr({expression})",
        )
        assert answer["status"] == "ok", f"{expression}: {answer}"
        return ast.literal_eval(ast.literal_eval(answer["data"]["text/plain"]))

    def theme(self, name: str) -> None:
        """Change to "light" or "dark"."""
        theme = f"JupyterLab {name.title()}"
        self.command("apputils:change-theme", theme=theme)
        light = "true" if name == "light" else "false"
        self.page.locator(f'body[data-jp-theme-light="{light}"]').wait_for(
            state="attached"
        )

    def picture(self, cell_id: str, path: Path) -> None:
        """Save what a person sees of a cell once it has come to rest."""
        cell = self.cell(cell_id)
        self.page.mouse.move(0, 0)
        self.page.evaluate(
            "() => new Promise(done =>"
            " requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        cell.screenshot(path=path, animations="disabled")
