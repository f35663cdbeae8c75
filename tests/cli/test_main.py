"""The command line names every command in its help, and rejects an unknown command."""

from __future__ import annotations

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
