"""``symm-overlap schedule`` prints, verifies, simulates, compares and converts schedules, and reports a mistake in one
line."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from symm_overlap.cli.__main__ import main
from symm_overlap.pipeline import read_csv, write_csv
from symm_overlap.pipeline.generators import GENERATORS, generate
from symm_overlap.pipeline.lowering import lower, merge_backward

Captured = pytest.CaptureFixture[str]
SMALL = ["--ranks", "2", "--microbatches", "4"]


def printed(capsys: Captured, *arguments: str, code: int = 0) -> str:
    assert main(["schedule", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out if code < 2 else captured.err


def test_show_prints_the_cells_of_every_rank(capsys: Captured) -> None:
    lines = printed(capsys, "show", "1f1b", "--ranks", "2", "--microbatches", "2").splitlines()
    assert lines == [
        "1f1b: 2 ranks, 2 stages, 2 microbatches, 8 actions",
        "         Rank 0 Rank 1",
        "Cell 00: 0F0",
        "Cell 01:        1F0",
        "Cell 02: 0F1    1B0",
        "Cell 03: 0B0    1F1",
        "Cell 04:        1B1",
        "Cell 05: 0B1",
    ]


def test_show_ends_with_the_last_action(capsys: Captured) -> None:
    shown = printed(capsys, "show", "ZBVZeroBubble", "--ranks", "3", "--microbatches", "2")
    assert shown.splitlines()[-1] == "Cell 20: 0W1", "the rows themselves end with eleven empty cells, as in torch"


def test_show_lowered_prints_each_step_with_its_messages(capsys: Captured) -> None:
    shown = printed(capsys, "show", "GPipe", "--lowered", *SMALL)
    assert "Step 02: 0SEND_F0     1RECV_F0" in shown
    assert "0UNSHARD" in shown


@pytest.mark.parametrize("name", GENERATORS)
def test_every_generator_is_proven_and_its_lowered_form_read_from_standard_input(
    name: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no deadlock" in printed(capsys, "verify", name, "--ranks", "4", "--microbatches", "8")
    text = printed(capsys, "convert", name, "--lower", "--ranks", "4", "--microbatches", "8")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert read_csv(text).pipelines == generate(name, 4, 8).pipelines
    assert "no deadlock" in printed(capsys, "verify", "-", "--transport", "batched")


def test_verify_fails_with_what_is_wrong(tmp_path: Path, capsys: Captured) -> None:
    table = tmp_path / "table.csv"
    table.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n")
    shown = printed(capsys, "verify", str(table), code=1)
    assert "missing" in shown
    assert "1B1" in shown


def test_simulate_prints_a_row_a_rank_and_writes_an_image_and_a_trace(tmp_path: Path, capsys: Captured) -> None:
    image, trace = tmp_path / "step.svg", tmp_path / "step.json"
    costs = ["--forward", "2", "--input-grad", "2", "--weight-grad", "1"]
    shown = printed(capsys, "simulate", "1F1B", *SMALL, *costs, "--svg", str(image), "--trace", str(trace)).splitlines()
    assert shown[1].startswith("makespan 25.000 ms"), "a step is 4 microbatches of 5 ms, and one more on the other rank"
    assert [line.split()[:2] for line in shown[3:5]] == [["0", "20.000"], ["1", "20.000"]]
    assert shown[5].startswith("critical path: 0F0@0 0SEND_F0@0 1RECV_F0@1 1F0@1")
    boxes = ElementTree.parse(image).getroot().findall("{*}rect/{*}title")
    assert sum((box.text or "").startswith("F chunk 1.3 on compute") for box in boxes) == 1
    assert len(ElementTree.parse(image).getroot().findall("{*}line[@marker-end]")) == 8, (
        "each message must have an arrow"
    )
    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "s" for event in events) == 8
    memory = [event["args"]["activations"] for event in events if event["ph"] == "C" and event["pid"] == 0]
    assert max(memory) == 2
    assert memory[-1] == 0


def test_a_rank_has_the_same_layers_in_one_stage_or_in_two(capsys: Captured) -> None:
    lines = printed(capsys, "compare", "1F1B", "Interleaved1F1B", "DualPipe", *SMALL).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["1F1B", "1"], ["Interleaved1F1B", "2"], ["DualPipe", "2"]]
    assert [line.split()[3] for line in lines[1:]] == ["15.000", "13.500", "12.000"]


def test_a_schedule_that_does_not_train_is_simulated_with_a_note(capsys: Captured, tmp_path: Path) -> None:
    """Rank 1 runs its backward before its forward, which takes less time than any schedule that trains."""
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("0F0,0B0\n1B0,1F0\n")
    note = f"{wrong} does not train a model: schedule verify --transport queued finds 1 problem"
    assert printed(capsys, "simulate", str(wrong)).splitlines()[-1] == note
    sources = [str(wrong), "1F1B"]
    assert printed(capsys, "compare", *sources, "--ranks", "2", "--microbatches", "1").splitlines()[-1] == note
    late = tmp_path / "late.csv"  # sound only if sends do not wait for their receives
    made = lower(generate("Interleaved1F1B", 4, 8), deferred=True, transport="queued")
    late.write_text(write_csv(made))
    printed(capsys, "verify", str(late), code=1)
    for sound in (["1F1B", *SMALL], ["zbv", *SMALL], [str(late)]):
        assert "does not train" not in printed(capsys, "simulate", *sound)


def test_compare_has_a_row_for_every_generator_that_can_be_made(capsys: Captured) -> None:
    shown = printed(capsys, "compare", "--ranks", "3", "--microbatches", "6").splitlines()
    assert {line.split()[0] for line in shown[1 : len(GENERATORS)]} == set(GENERATORS) - {"DualPipe"}
    assert shown[-1].startswith("DualPipe is left out: DualPipe: ranks make pairs")


def test_a_table_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "latin.csv"
    path.write_bytes(b"0F0,\xe9\n")
    assert f"{path}: 'utf-8' codec can't decode" in printed(capsys, "show", str(path), code=2)
    path.write_text("0F0,0G0\n")
    assert f"{path}: row 1 (rank 0), cell 2: '0G0' is not an action" in printed(capsys, "show", str(path), code=2)
    monkeypatch.setattr("sys.stdin", None)
    assert "standard input: it is closed" in printed(capsys, "show", "-", code=2)


def test_a_schedule_from_a_file_has_the_size_that_was_asked_for(capsys: Captured, tmp_path: Path) -> None:
    path = tmp_path / "read.csv"
    path.write_text(write_csv(generate("ZBV", 3, 5)))
    right = ["--ranks", "3", "--microbatches", "5", "--stages-per-rank", "2"]
    assert printed(capsys, "verify", str(path)) == printed(capsys, "verify", str(path), *right)
    for option, size in (("--ranks", 3), ("--microbatches", 5), ("--stages-per-rank", 2)):
        wrong = f"{option} is 4, and the schedule in {path} has {size}"
        for command in ("show", "verify", "simulate", "convert"):
            assert wrong in printed(capsys, command, str(path), option, "4", code=2)
        assert f"{path} is left out: {wrong}" in printed(capsys, "compare", str(path), "Interleaved1F1B", option, "4")


def test_convert_writes_what_the_passes_make(tmp_path: Path, capsys: Captured) -> None:
    source = generate("ZBV", 2, 4)
    assert printed(capsys, "convert", "zbv", *SMALL) == write_csv(source)
    out = tmp_path / "lowered.csv"
    assert printed(capsys, "convert", "zbv", *SMALL, "--merge", "--lower", "--deferred", "--out", str(out)) == ""
    assert read_csv(out.read_text()) == lower(merge_backward(source), deferred=True)
    again = printed(capsys, "convert", str(out), "--to", "zero-bubble")
    assert "BW" in again
    assert read_csv(again, "zero-bubble") == read_csv(out.read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "1G1B"], "there is no schedule '1G1B'"),
        (["show", "none.csv"], "none.csv: No such file"),
        (["simulate", "1F1B", "--forward", "nan"], "forward is nan"),
        (["compare", "--message", "-1"], "message is -1.0"),
        (["verify", "1F1B", "--ranks", "0"], "ranks must be at least 1"),
        (["convert", "1F1B", "--waits"], "add --lower"),
        (["convert", "1F1B", "--out", "/nowhere/x.csv"], "/nowhere/x.csv: No such file"),
        (["convert", "1F1B", "--out", "/dev/full"], "/dev/full: No space left"),
        (["show", "1F1B", "--ranks", "100000"], "stages * (microbatches + ranks) is"),
        (["show", "GPipe", "--ranks", "99999999999999999999"], "stages * (microbatches + ranks) is"),
        (["simulate", "1F1B", "--forward", "1e308"], "the durations add up to more than a float can hold"),
        (["simulate", "x.csv", "--svg", "x.csv"], "source and svg are the same file"),
        (["compare", "1G1B"], "1G1B is left out: there is no schedule '1G1B'"),
        (["simulate", "1F1B", "--svg", "/nowhere/x.svg"], "/nowhere/x.svg: No such file"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list[str], message: str, capsys: Captured) -> None:
    error = printed(capsys, *arguments, code=2)
    assert error.startswith("symm-overlap schedule: ")
    assert message in error
    assert error.count("\n") == 1
