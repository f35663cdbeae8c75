"""Every wrong setting is named before a process is started."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from symm_overlap.demo.config import SIZES, LaunchEnvironment, TrainConfig, allowed_tp, problem

HOST = LaunchEnvironment()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tp": 3}, "--tp 3 does not divide the 8 heads of --size small; allowed: 1, 2, 4, 8"),
        ({"tp": 0}, "--tp is 0"),
        ({"steps": 0}, "--steps is 0"),
        ({"batch": -1}, "--batch is -1"),
        ({"fsdp": 0}, "--fsdp is 0"),
        ({"fsdp": 3}, "--batch 4 is not a multiple of --fsdp 3"),
        ({"fsdp": 2, "compile": True}, "--compile and --fsdp 2: a compiled model cannot be sharded yet"),
        ({"tp": 4, "seq": 30}, "--seq 30 is not a multiple of --tp 4"),
        ({"lr": float("nan")}, "--lr is nan"),
        ({"lr": -1.0}, "--lr is -1.0"),
        ({"sample": -5}, "--sample is -5"),
        ({"seed": 1 << 64}, f"--seed is {1 << 64}"),
        ({"prompt": ""}, "--prompt is empty"),
        ({"text": "no/such/file"}, "--text no/such/file: no such file"),
        ({"text": "/proc"}, "--text /proc: is a folder; give a file"),
        ({"text": "/dev/null"}, "--text /dev/null: is not a regular file; every rank reads it"),
        # This file can only be written. For most users, opening it fails. The superuser can open it, but not read it.
        ({"text": "/proc/self/clear_refs"}, "--text /proc/self/clear_refs: cannot be read: "),
        ({"text": "x" * 300}, f"--text {'x' * 300}: cannot be read: File name too long"),
        ({"timeline": "no/such/folder/x.json"}, "--timeline no/such/folder/x.json"),
        ({"timeline": "\udce9.json"}, "whose name is not UTF-8"),
        ({"batch": 10**20}, f"--batch {10**20} times --seq 256 is too large"),
        ({"device": "cuda"}, "no GPU is visible"),
    ],
)
def test_a_wrong_setting_is_named(change: dict[str, Any], words: str) -> None:
    found = problem(dataclasses.replace(TrainConfig(), **change), HOST)
    assert found is not None
    assert words in found
    assert "\n" not in found


def test_a_timeline_that_cannot_be_written_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    found = problem(dataclasses.replace(TrainConfig(), timeline="x.json"), HOST)
    assert found == "--timeline x.json: no permission to write there"


@pytest.mark.parametrize("option", ["text", "schedule"])
def test_a_timeline_overwrites_no_input(option: str, tmp_path: Path) -> None:
    path = tmp_path / "input.csv"
    path.write_text("0F0,0B0\n")
    link = tmp_path / "link"
    link.symlink_to(path)
    config = dataclasses.replace(TrainConfig(), pp=2, timeline=str(link), **{option: str(path)})
    assert f"--{option} and --timeline are the same file" in str(problem(config, HOST))


def test_right_settings_pass(tmp_path: Path) -> None:
    assert problem(TrainConfig(), HOST) is None
    assert problem(TrainConfig(timeline=str(tmp_path / "t.json"), sample=0, prompt=""), HOST) is None


def test_ranks_that_torchrun_started_are_the_ranks_there_are() -> None:
    assert "torchrun started 4 ranks" in str(problem(TrainConfig(tp=2), LaunchEnvironment(started=4, started_here=4)))
    assert problem(TrainConfig(tp=4), LaunchEnvironment(started=4, started_here=4)) is None
    assert problem(TrainConfig(fsdp=2, tp=2), LaunchEnvironment(started=4, started_here=4)) is None
    found = str(problem(TrainConfig(fsdp=4, tp=1, pp=2), LaunchEnvironment(started=4, started_here=4)))
    assert "--fsdp 4 --pp 2 are 8 ranks, but torchrun started 4" in found


def test_each_rank_has_a_gpu_unless_sharing_is_allowed() -> None:
    config = TrainConfig(device="cuda", tp=2)
    assert "2 ranks on this host need 2 GPUs and 1 are visible" in str(problem(config, LaunchEnvironment(gpus=1)))
    assert problem(config, LaunchEnvironment(gpus=1, share_gpus=True)) is None
    assert problem(config, LaunchEnvironment(gpus=2)) is None
    # Two hosts with one GPU each.
    assert problem(config, LaunchEnvironment(gpus=1, started=2, started_here=1)) is None


@pytest.mark.parametrize("name", SIZES)
def test_every_size_can_be_split_over_two_ranks(name: str) -> None:
    size = SIZES[name]
    assert size.dim % size.heads == 0
    assert size.dim // size.heads % 2 == 0, "the size of a head must be even, because rotary embedding rotates pairs"
    assert {1, 2, 4} <= set(allowed_tp(size))
    assert problem(TrainConfig(size=name, seq=size.seq, batch=size.batch), HOST) is None
