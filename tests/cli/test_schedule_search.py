"""``schedule search`` prints a table, writes the best schedule, and reports a mistake in one line."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import pytest

from symm_overlap.cli import schedule_search
from symm_overlap.pipeline import read_csv
from symm_overlap.pipeline.verify import verify

COSTS = "forward = [1, 1, 2, 1, 1, 3]\nweight_grad = 0.5\nmessage = 0.2\n"


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.toml"
    path.write_text(COSTS)
    return path


def run(*arguments: object) -> int:
    """Run the command with a parser of its own."""
    parser = argparse.ArgumentParser()
    schedule_search.add_parser(parser.add_subparsers(required=True))
    return schedule_search.run(parser.parse_args(["search", *map(str, arguments)]))


def test_it_prints_the_table_and_writes_what_it_found(costs, tmp_path, capsys):
    out, lowered = tmp_path / "best.csv", tmp_path / "lowered.csv"
    given = ("--ranks", 2, "--microbatches", 4, "--cost", costs, "--memory-cap", 8, "--steps", 120)
    assert run(*given, "--out", out, "--lowered", lowered) == 0
    shown = capsys.readouterr()
    assert "at the same cap of 8" in shown.out
    assert "layers of each stage: " in shown.out
    assert shown.err == "", "without a terminal, no bar may be shown"
    found = read_csv(out.read_text())
    verify(found).raise_for_problems()
    with_messages = read_csv(lowered.read_text())
    verify(with_messages).raise_for_problems()
    assert [[a for a in row if a and a.kind in "FIWB"] for row in with_messages.rows] == [*map(list, found.rows)]
    first = out.read_bytes()
    assert b"\r\r" not in first
    assert run(*given, "--out", out) == 0
    assert out.read_bytes() == first


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--ranks", "0"], 2, "ranks is 0"),
        (["--ranks", "7"], 2, "6 layers cannot be cut into 7 stages"),
        (["--memory-cap", "1"], 1, "no schedule fits a cap of 1: the smallest possible peak is 3"),
        (["--memory-cap", "nan"], 2, "the memory cap is nan"),
        (["--stages-per-rank", "1,two"], 2, "--stages-per-rank is '1,two'"),
        (["--cost", "nowhere.toml"], 2, "nowhere.toml: No such file"),
        (["--out", "nowhere/best.csv"], 2, "nowhere/best.csv: No such file"),
        (["--out", "."], 2, ".: Is a directory"),
        (["--lowered", "/dev/full"], 2, "/dev/full: No space left"),
        (["--cost", "many.toml"], 2, "layers is 1001: this command works up to 1000"),
        (["--microbatches", "99999999"], 2, "ranks * (microbatches + ranks) is 2e+08"),
    ],
)
def test_mistakes_are_told(costs, tmp_path, monkeypatch, capsys, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "many.toml").write_text("layers = 1001")
    given = ["--ranks", "2", "--microbatches", "3", "--cost", costs, "--steps", "30", *arguments]
    assert run(*given) == code
    error = capsys.readouterr().err
    assert error.startswith("symm-overlap schedule search: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_file_that_cannot_be_written_is_told_before_the_search(costs, monkeypatch, capsys):
    monkeypatch.setattr(schedule_search, "search", lambda *_, **__: pytest.fail("the search was started"))
    for path in ("/nowhere/best.csv", "."):
        assert run("--ranks", 2, "--microbatches", 3, "--cost", costs, "--lowered", path) == 2
        assert f"symm-overlap schedule search: {path}: " in capsys.readouterr().err


def test_no_file_overwrites_another(costs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(schedule_search, "search", lambda *_, **__: pytest.fail("the search was started"))
    given, other = ("--ranks", 2, "--microbatches", 3, "--cost", costs), tmp_path / "best.csv"
    assert run(*given, "--out", costs) == 2
    assert "cost and out are the same file" in capsys.readouterr().err
    assert run(*given, "--out", other, "--lowered", other) == 2
    assert "out and lowered are the same file" in capsys.readouterr().err
    assert costs.read_text() == COSTS


def test_costs_that_cannot_be_are_told_with_their_key(costs, capsys):
    costs.write_text("layers = 4\nforward = nan\n")
    assert run("--ranks", 2, "--microbatches", 3, "--cost", costs) == 2
    assert "forward is nan" in capsys.readouterr().err
    costs.write_bytes(b"\xff\xfe")
    assert run("--ranks", 2, "--microbatches", 3, "--cost", costs) == 2
    assert "costs.toml" in capsys.readouterr().err


def test_the_bar_shows_progress_on_a_terminal_and_goes_away():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    bar = schedule_search.Bar(terminal)
    bar.step(50, 100, 12.5)
    bar.step(51, 100, 12.5)  # too soon after the last update to be shown
    assert terminal.getvalue() == f"\r[{'#' * 12}{'.' * 12}] 50/100 schedules  best 12.5\x1b[K"
    bar.clear()
    assert terminal.getvalue().endswith("\r\x1b[K")
