"""The benchmark of the cost of one call: how the cost is split, which figures count, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import call_cost
from bench.harness.call_parts import ENTRIES, split

TIMES = {
    "call": 100.0,
    "op": 110.0,
    "alone": 30.0,
    "matmul": 2.0,
    "empty_plan": 3.0,
    "meeting_plan": 7.0,
    "functional": 800.0,
}


def test_every_part_is_the_difference_of_two_programs() -> None:
    expected = {"entry": 28, "matmul": 2, "issue": 3, "waits": 4, "rest": 63}
    assert split(TIMES) == expected
    assert set(call_cost.PARTS) == set(expected), "the table shows every part"


def test_the_parts_of_an_op_without_a_matmul_add_up_to_the_call() -> None:
    without = {name: time for name, time in TIMES.items() if name != "matmul"}
    assert split(without)["matmul"] == 0.0
    assert sum(split(without).values()) == TIMES["call"]


def blocks(**changed: list[float]) -> dict[str, list[float]]:
    return {name: [time] for name, time in TIMES.items()} | changed


def test_the_median_of_the_slowest_rank_counts() -> None:
    found = call_cost.row("all_gather", [blocks(call=[10.0, 40.0, 90.0]), blocks(call=[20.0, 30.0, 999.0])])
    assert found["call_us"] == 40.0
    assert found["quickest_us"] == 20.0
    assert found["ratio"] == 40.0 / 800.0


@pytest.mark.parametrize(
    ("call", "functional", "met"),
    [(60.0, 600.0, True), (60.1, 6000.0, False), (60.0, 599.0, False)],
    ids=["both", "too slow", "too close to functional"],
)
def test_both_targets_must_be_met(call: float, functional: float, met: bool) -> None:
    found = call_cost.row("all_gather", [blocks(call=[call], functional=[functional])])
    assert found["met"] is met
    line = next(line for line in call_cost.table([found]).splitlines() if "all_gather" in line)
    assert line.split()[-1] == ("met" if met else "MISSED")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_the_command_times_every_op_and_writes_its_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    code = call_cost.main(["--calls", "20", "--json", str(file)])
    found = json.loads(file.read_text())
    assert found["environment"]["ranks"] == 2
    assert [row["op"] for row in found["rows"]] == list(ENTRIES)
    assert code == (0 if all(row["met"] for row in found["rows"]) else 1)
    for row in found["rows"]:
        assert all(time > 0 for time in row["programs_us"].values())
        assert sum(row["parts_us"].values()) == pytest.approx(row["call_us"])
    shown = capsys.readouterr().out
    assert "target 60" in shown
    assert "target 0.1" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--calls", "9"], "--calls is 9; give 10 or more"),
        (["--ops", "all_gather,nothing"], "--ops has nothing; give some of all_gather_matmul, "),
    ],
)
def test_wrong_arguments_start_no_rank(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(call_cost, "launch", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(SystemExit) as ended:
        call_cost.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
