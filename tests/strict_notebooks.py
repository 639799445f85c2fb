"""A pytest plugin that closes what nbval leaves open: `-p tests.strict_notebooks`.

nbval reports a cell that ran into its time-out as XFAIL or XPASS, which a run counts as
good. And a run that was to test notebooks and tested none of them has proved nothing.
"""

from __future__ import annotations

import pytest


class StrictNotebooks:
    """Counts the reports of a run; with xdist, on the controller, which sees all."""

    def __init__(self) -> None:
        self.num_passed = 0
        self.expected_failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, "wasxfail"):
            self.expected_failures.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.num_passed += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        if self.expected_failures or not self.num_passed:
            session.exitstatus = max(session.exitstatus, pytest.ExitCode.TESTS_FAILED)

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        if self.expected_failures:
            terminalreporter.section("cells that timed out (XFAIL or XPASS)", red=True)
            for nodeid in self.expected_failures:
                terminalreporter.line(nodeid)
        if not self.num_passed:
            terminalreporter.section("no cell of a notebook passed", red=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(StrictNotebooks(), "strict-notebooks")
