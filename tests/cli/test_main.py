"""The command line as a whole."""

from __future__ import annotations

import subprocess
import sys

import pytest

from symm_overlap.cli.__main__ import main


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for command in ("train", "info", "plan"):
        assert f"\n    {command} " in shown


@pytest.mark.parametrize("arguments", [[], ["fly"]])
def test_an_unknown_command_is_an_error_that_names_the_known_ones(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "train" in capsys.readouterr().err


def test_the_command_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "symm_overlap.cli", "train", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "--compare" in done.stdout
