"""The benchmark of pipeline schedules: what it prints and writes, and which targets count as missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import pipeline_schedule


def test_all_ways_are_timed_and_come_to_the_same_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    assert pipeline_schedule.main(["--ranks", "4", "--rounds", "1", "--json", str(file)]) in (0, 1)
    found = json.loads(file.read_text())
    assert {"cpu", "cores", "torch", "commit"} <= found["environment"].keys()
    assert [(row["name"], row["actions"], row["steps"]) for row in found["rows"]] == [
        ("1F1B", 160, 65),
        ("Interleaved1F1B", 352, 149),
    ]
    for row in found["rows"]:
        assert all(row[f"{way}_ms"] > 0 for way in ("ours", "torch", "search"))
        assert row["times_torch"] == row["torch_ms"] / row["ours_ms"]
        assert row["million_actions"] > 0
    assert "Interleaved1F1B" in capsys.readouterr().out


def test_missed_targets_are_named() -> None:
    right = {"name": "1F1B", "stages_per_rank": 1, "microbatches": 8, "ranks": 32, "actions": 200_000,
             "ours_ms": 9.0, "times_torch": 60.0, "million_actions": 3.0}  # fmt: skip
    assert pipeline_schedule.missed_targets(right) == []
    assert pipeline_schedule.missed_targets(right | {"ours_ms": 11.0}) == ["1F1B (1, 8, 32): 11.0 ms, target 10.0 ms"]
    assert pipeline_schedule.missed_targets(right | {"ranks": 64, "ours_ms": 99.0}) == []
    assert len(pipeline_schedule.missed_targets(right | {"ranks": 64, "ours_ms": 101.0})) == 1
    assert len(pipeline_schedule.missed_targets(right | {"times_torch": 40.0, "million_actions": 1.0})) == 2


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--ranks", "1"]])
def test_bad_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        pipeline_schedule.main(arguments)
    assert ended.value.code == 2
    assert "or more" in capsys.readouterr().err
