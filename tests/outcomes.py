"""``pytest --outcomes FILE``: a run of tests that can be stopped at any time and continued later."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--outcomes",
        metavar="FILE",
        help="record outcomes in FILE; if it exists, continue the run that wrote it, without tests that have passed",
    )


def pytest_configure(config: pytest.Config) -> None:
    if (file := config.getoption("--outcomes")) is not None:
        config.pluginmanager.register(Outcomes(Path(file)))


class Outcomes:
    """Records the outcome of each test in a file, and skips tests that have passed according to the file.

    Tests that have not begun yet come first. Otherwise a test that hangs would prevent all later tests in every run.

    Args:
        file: has a line for each test that has begun or ended, such as "passed <name>". The last line of a test
            counts. The file need not exist.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        known = {name: outcome for outcome, _, name in (line.partition(" ") for line in lines)}
        config.hook.pytest_deselected(items=[item for item in items if known.get(item.nodeid) == "passed"])
        left = [item for item in items if known.get(item.nodeid) != "passed"]
        items[:] = sorted(left, key=lambda item: item.nodeid in known)

    def _note(self, outcome: str, name: str) -> None:
        with self._file.open("a") as file:
            file.write(f"{outcome} {name}\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note("begun", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._note(report.outcome, report.nodeid)
