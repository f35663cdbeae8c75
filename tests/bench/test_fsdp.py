"""``python -m bench.fsdp``: the rows that it writes, and that a wrong result is a failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import fsdp


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
def test_collectives_and_steps_are_timed_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "MODELS", (fsdp.Model(16, 2, 3),))
    file = tmp_path / "result.json"
    fsdp.main(["--rounds", "1", "--most", "262144", "--json", str(file)])  # which is quicker in one round is random
    rows = json.loads(file.read_text())["rows"]
    alone = [(row["collective"], row["bytes"]) for row in rows if row["part"] == "alone"]
    names = "all-gather", "reduce-scatter", "gradients"
    assert alone == [(name, size) for name in names for size in (65536, 262144)]
    assert [row["width"] for row in rows if row["part"] == "step"] == [16]
    assert all(row["torch"] > 0 and row["ours"] > 0 and not row.get("wrong") for row in rows)


@pytest.mark.parametrize(
    ("size", "wrong", "ours", "code"),
    [
        (65536, "", 2.0, 0),
        (1 << 20, "", 0.6, 1),
        (1 << 20, "", 0.5, 0),
        (65536, "ours[3] is 1.0, expected 2.0", 0.1, 1),
    ],
)
def test_what_is_wrong_or_slow_misses_the_target(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], size: int, wrong: str, ours: float, code: int
) -> None:
    row = {"collective": "all-gather", "bytes": size, "wrong": wrong, "torch": [1.0], "ours": [ours]}
    right = {**row, "wrong": ""}
    monkeypatch.setattr(fsdp, "launch", lambda *_: [[right], [row]])
    assert fsdp.main(["--only", "alone"]) == code
    assert wrong in capsys.readouterr().out


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fsdp.main(["--world", "1"])
    assert "--world 1; give 1 and 2 or more" in capsys.readouterr().err
