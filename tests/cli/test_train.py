"""The train command works from end to end, and reports a wrong argument in one line before it starts a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from symm_overlap.cli import launch
from symm_overlap.cli.__main__ import main
from symm_overlap.demo.config import SIZES, TrainConfig
from symm_overlap.demo.sample import generate, printable
from symm_overlap.demo.training import train
from tests.demo.models import alone, windows

ROOT = Path(__file__).parents[2]
TINY = ["train", "--size", "tiny", "--seq", "32", "--batch", "2"]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # otherwise torchrun prints that it sets this variable
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_ranks_of_torchrun_compare_both_models_show_them_and_write_the_timeline(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "symm_overlap.cli"]
    options = ["--steps", "6", "--compare", "--sample", "20", "--prompt", "The \x1b[1m", "--timeline", str(trace)]
    done = run_python(*launcher, *TINY, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("on 2 x cpu") == 1, "only one rank may print"
    lines = done.stdout.splitlines()
    assert "on 2 x cpu in float32; 6 steps of 2 x 32 bytes of pydoc_data.topics" in lines[0]
    rows = [line.split() for line in lines if line.split() and line.split()[0].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert all(float(row[1]) == pytest.approx(float(row[2]), rel=1e-4) for row in rows)
    assert float(rows[-1][1]) < float(rows[0][1])
    assert "losses agree at every step" in done.stdout
    sample = done.stdout.partition("sample:\n")[2]
    assert sample.startswith("The \\x1b[1m"), "a control byte of the sample must not reach the terminal"
    assert len(sample) > len("The \\x1b[1m") + 1
    assert done.stderr == "", "nothing may be printed over the progress bar"
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    for name in ("overlap", "plain"):
        assert {f"{name}: forward", f"{name}: backward", f"{name}: optimizer"} <= names


def test_the_options_reach_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/demo/test_compiled_training.py tests what the ranks do with ``compile``."""
    started = []
    monkeypatch.setattr(launch, "run_ranks", lambda *call: started.append(call) or 0)
    assert main([*TINY, "--compile", "--compare", "--steps", "4", "--sample", "0"]) == 0
    settings = {"size": "tiny", "seq": 32, "batch": 2, "steps": 4, "sample": 0, "compile": True, "compare": True}
    assert started == [(train, (TrainConfig(**settings, lr=SIZES["tiny"].lr),), 2)]


def test_a_pipeline_is_started_with_all_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/demo/test_pipeline_training.py tests what the ranks do with the pipeline."""
    started = []
    monkeypatch.setattr(launch, "run_ranks", lambda *call: started.append(call) or 0)
    assert main([*TINY, "--pp", "2", "--schedule", "zbv", "--microbatches", "2"]) == 0
    (_, (config,), ranks) = started[0]
    assert (config.tp, config.pp, config.schedule, config.microbatches, ranks) == (2, 2, "zbv", 2, 4)


def test_data_parallel_ranks_share_no_layer_unless_they_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``--tp``, each rank has whole layers. tests/demo/test_data_parallel_training.py tests what ranks do."""
    started = []
    monkeypatch.setattr(launch, "run_ranks", lambda *call: started.append(call) or 0)
    for options in (["--fsdp", "2"], ["--fsdp", "2", "--tp", "2", "--pp", "2", "--microbatches", "1"]):
        assert main([*TINY, *options]) == 0
    assert [(config.fsdp, config.tp, config.pp, ranks) for _, (config,), ranks in started] == [
        (2, 1, 1, 2),
        (2, 2, 2, 8),
    ]


@pytest.mark.usefixtures("forked_ranks")
def test_a_pipeline_of_ranks_that_the_command_starts_trains_what_one_process_trains(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    trace = tmp_path / "trace.json"
    options = ["--steps", "3", "--sample", "4", "--tp", "1", "--pp", "2", "--schedule", "zbv", "--timeline", str(trace)]
    assert main([*TINY, *options]) == 0
    shown, errors = capfd.readouterr()
    assert errors == "", "nothing may be printed over the progress bar"
    assert "on 2 x 1 x cpu as a pipeline of 4 stages" in shown
    assert "simulated with the costs" in shown
    config = TrainConfig(size="tiny", seq=32, batch=2, steps=3, lr=SIZES["tiny"].lr, sample=4)
    trainer, batches = alone(config), windows(config)
    expected = [trainer.step(batches.next()) for _ in range(3)]
    rows = [line.split() for line in shown.splitlines() if line.split() and line.split()[0].isdigit()]
    assert [float(row[1]) for row in rows] == pytest.approx(expected, abs=2e-5)
    text = generate(trainer, config.prompt, 4, config.seq, config.seed)
    assert shown.partition("sample:\n")[2].rstrip("\n") == printable(text, "utf-8").rstrip("\n")
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"F chunk 0.0", "W chunk 3.1"} <= names


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tp", "3"], "--tp 3 does not divide"),
        (["--tp", "4", "--seq", "30"], "--seq 30 is not a multiple of --tp 4"),
        (["--text", "missing.txt"], "--text missing.txt: no such file"),
        (["--seq", "1000000"], "--seq 1000000 needs at least 1000001"),
        (["--steps", "many"], "invalid int value"),
        (["--size", "huge"], "invalid choice"),
        (["--pp", "2", "--schedule", "zbw"], "there is no schedule 'zbw'"),
    ],
)
def test_wrong_arguments_cost_one_line_and_no_process(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "run_ranks", lambda *_: pytest.fail("ranks were started"))
    try:
        code = main(["train", *arguments])
    except SystemExit as stop:  # argparse exits this way
        code = int(stop.code or 0)
    assert code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert words in errors[0]


def test_a_rank_that_fails_is_reported_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise launch.RankError("rank 1 (process 7) was killed by SIGKILL")

    monkeypatch.setattr(launch, "run_ranks", fail)
    assert main(TINY) == 1
    assert capsys.readouterr().err == "symm-overlap train: rank 1 (process 7) was killed by SIGKILL\n"
