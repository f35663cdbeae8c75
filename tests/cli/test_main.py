"""The command line names every command in its help, and rejects an unknown command."""

from __future__ import annotations

import subprocess
import sys

import pytest

from symm_overlap._version import VERSION
from symm_overlap.cli.__main__ import main


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for command in ("train", "info", "plan"):
        assert f"\n    {command} " in shown


def test_the_version_is_that_of_the_package() -> None:
    command = [sys.executable, "-m", "symm_overlap", "--version"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert told.stdout == f"symm-overlap {VERSION}\n"


@pytest.mark.parametrize("arguments", [[], ["fly"]])
def test_an_unknown_command_is_an_error_that_names_the_known_ones(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "train" in capsys.readouterr().err
