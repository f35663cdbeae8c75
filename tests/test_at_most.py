"""The option ``--at-most``, on a file of tests of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

TESTS = """
import pytest

@pytest.mark.parametrize("case", range(40))
def test_of_many_cases(case): pass

@pytest.mark.parametrize("case", range(2))
def test_of_two_cases(case): pass

def test_of_one_case(): pass
"""


def run(folder: Path, *options: str) -> str:
    (folder / "test_cases.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.at_most", "-v", *options, "test_cases.py"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def names(output: str, test: str) -> list[str]:
    return [line.split()[0] for line in output.splitlines() if f"::{test}" in line and "PASSED" in line]


def test_no_test_has_more_cases_and_every_run_has_the_same_ones(tmp_path: Path) -> None:
    first, second = (run(tmp_path, "--at-most", "3") for _ in range(2))
    assert "6 passed, 37 deselected" in first
    assert len(names(first, "test_of_many_cases")) == 3
    assert len(names(first, "test_of_two_cases")) == 2
    assert names(first, "test_") == names(second, "test_")


def test_cases_that_other_options_leave_out_do_not_count(tmp_path: Path) -> None:
    assert "3 passed, 40 deselected" in run(tmp_path, "--at-most", "3", "-k", "many_cases and (1 or 2)")


def test_with_enough_of_them_all_cases_run(tmp_path: Path) -> None:
    assert "43 passed in" in run(tmp_path, "--at-most", "40")


def test_none_at_all_are_refused(tmp_path: Path) -> None:
    assert "--at-most 0: give at least 1" in run(tmp_path, "--at-most", "0")
