"""The benchmark of the schedule search: its recorded costs, its table and its JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import schedule_search
from symm_overlap.pipeline.cost_file import read_costs


def test_there_are_twelve_cost_sets_and_all_can_be_read() -> None:
    files = sorted(schedule_search.FOLDER.glob("*.toml"))
    assert len(files) == 12
    for file in files:
        assert read_costs(file.read_text()).layers >= schedule_search.RANKS


def test_it_prints_and_writes_a_row_for_each_cap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    arguments = ["--sets", "heavy_head,odd_layers", "--ranks", "4", "--microbatches", "4", "--steps", "60"]
    assert schedule_search.main([*arguments, "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert {line.count("|") for line in lines} == {9}
    rows = json.loads(file.read_text())["rows"]
    assert [row["costs"] for row in rows] == ["heavy_head"] * 2 + ["odd_layers"] * 2
    for row in rows:
        assert row["peak"] <= row["cap"] * (1 + 1e-9)
        assert row["gain"] is None or row["gain"] >= 0


def test_unknown_sets_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        schedule_search.main(["--sets", "nothing"])
    assert "--sets has nothing; give some of cheap_weights" in capsys.readouterr().err
