"""``pytest --outcomes FILE``: a run of tests that can be cut off at any time, and goes on from there."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--outcomes", metavar="FILE", help="go on where the run that wrote it was cut off: without what has passed"
    )


def pytest_configure(config: pytest.Config) -> None:
    if (file := config.getoption("--outcomes")) is not None:
        config.pluginmanager.register(Outcomes(Path(file)))


class Outcomes:
    """Notes in a file what becomes of each test, and leaves out those that have passed by it.

    Tests that have not begun yet come first: one that hangs would keep every run from all that is behind it.

    Args:
        file: a line for each test that has begun or ended, "passed <name>" for one that has passed; the last one
            counts. It need not exist.
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
