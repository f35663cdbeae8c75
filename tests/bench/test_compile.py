"""The benchmark of compiled models: which figures count, and the command from its arguments to its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import compile as command
from bench.harness.compiled import WAYS

COMPILED = [{"seconds": 10.0, "in_pass": 0.1, "share": 0.01, "kernels": kernels} for kernels in (False, True)]
LEFT = {"compiled": 4, "torch's pass": 2, "ours": 0}


def rank(share: float = 0.01, **ms: list[float]) -> dict[str, Any]:
    """Return the measurements of one rank. Every way takes 10 ms in each of three rounds, except as ``ms`` says."""
    compilations = [COMPILED[0] | {"share": share}, COMPILED[1]]
    return {"ms": {way: [10.0] * 3 for way in WAYS} | ms, "compilations": compilations, "left": LEFT}


def test_ways_are_compared_round_by_round_with_the_slowest_rank_of_each() -> None:
    # The second round is slow for both ways. The medians of each way alone would compare a slow round with a quick one.
    one = rank(ours=[8.0, 90.0, 1.0], compiled=[10.0, 100.0, 1.0])
    other = rank(ours=[1.0, 1.0, 8.0], compiled=[1.0, 1.0, 10.0])
    found = command.row("MLP", [one, other])
    assert found["steps_ms"]["ours"] == [8.0, 90.0, 8.0]
    assert found["ratios"]["compiled"] == 0.8
    assert found["quickest_ratios"]["compiled"] == 0.8
    assert found["quickest_ms"] == {"eager": 10.0, "compiled": 10.0, "torch's pass": 10.0, "ours": 8.0}


@pytest.mark.parametrize(
    ("ours", "share", "missed"),
    [(9.9, 0.029, []), (10.0, 0.029, ["eager", "compiled", "torch's pass"]), (9.9, 0.03, ["share"])],
    ids=["all met", "as slow as the others", "a pass that takes too long"],
)
def test_ours_must_be_quicker_than_every_other_way_and_the_pass_quick(
    ours: float, share: float, missed: list[str]
) -> None:
    found = command.row("MLP", [rank(ours=[ours] * 3), rank(share, ours=[ours] * 3)])
    assert [what for what, met in found["met"].items() if not met] == missed
    shown = command.table([found])
    assert shown.count("MISSED") == 2 * len(missed), "each miss is shown once in its row and once in the verdicts"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_the_command_times_every_way_and_writes_what_it_fused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    sizes = ["--models", "MLP, dim 0", "--size", "32,16,32,4", "--rounds", "3"]
    code = command.main([*sizes, "--json", str(file)])
    (found,) = json.loads(file.read_text())["rows"]
    assert code == (0 if all(found["met"].values()) else 1)  # which way is quicker in three rounds is random
    assert {way: len(times) for way, times in found["steps_ms"].items()} == dict.fromkeys(WAYS, 3)
    assert found["left"] == LEFT, "torch's pass did not run, or ours did not"
    cold, warm = found["compilations"]
    assert (cold["kernels"], warm["kernels"]) == (False, True)
    assert 0 < cold["in_pass"] < cold["seconds"]
    assert "of compilation, goal below 3%" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds is 0; give 1 or more"),
        (["--models", "MLP, dim 0;nothing"], "--models has nothing; give some of MLP, dim 0; "),
        (["--size", "16,16"], "--size is 16,16; give four numbers"),
    ],
)
def test_wrong_arguments_start_no_rank(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "launch", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
