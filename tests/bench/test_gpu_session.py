"""bench/gpu_session.sh, on a machine and with commands that are made up: what it prints, keeps and returns."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_session.sh"

# In the place of Python. What a part does is in a variable named after it: by default, it prints "<part> is done".
PYTHON = """#!/usr/bin/env bash
case "$*" in
    *device_count*) echo "${GPUS:-1}" ;;
    *get_device_capability*) eval "${capability:-echo 9.0a}" ;;
    *importlib.metadata*) echo torch 1 setuptools 2 pytest 3 ;;
    setup.py*) eval "${build:-echo build for \\$TORCH_CUDA_ARCH_LIST is done}" ;;
    "-m bench.gpu_primitives"*) eval "${primitives:-echo primitives is done}"; touch "${@: -1}" ;;
    "-m pytest"*) eval "${tests:-echo tests is done}" ;;
    "-m bench.collective_matmul"*) eval "${collectives:-echo collectives is done}"; touch "${@: -1}" ;;
    "-m symm_overlap.cli train"*) eval "${train:-echo train is done}" ;;
esac
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    file = tmp_path / "python"
    file.write_text(PYTHON)
    file.chmod(0o755)
    return file


def session(python: Path, *parts: str, **environment: str) -> tuple[int, list[str], set[str]]:
    """Exit code, lines printed, files kept."""
    out = python.parent / "out"
    done = subprocess.run(
        ["bash", SCRIPT, *parts],
        env={**os.environ, "PYTHON": str(python), "OUT": str(out), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    files = {file.name for file in out.iterdir()} if out.exists() else set()
    return done.returncode, (done.stdout + done.stderr).splitlines(), files


def test_the_table_has_a_line_for_each_part_with_the_last_one_of_its_log(python: Path) -> None:
    code, lines, files = session(python)
    assert code == 0
    assert lines[0] == "torch 1 setuptools 2 pytest 3"
    table = [line.split(maxsplit=5) for line in lines[-5:-2]]
    assert [(row[0], row[2], row[5]) for row in table] == [
        ("build", "0", "build for 9.0a is done"),
        ("primitives", "0", "primitives is done"),
        ("tests", "0", "tests is done"),
    ]
    assert "collectives  not run       needs two GPUs" in lines[-2]
    assert "train        not run       needs two GPUs" in lines[-1]
    assert files == {"environment.txt", "build.log", "primitives.log", "primitives.json", "tests.log"}


def test_all_parts_keep_at_most_eight_files(python: Path) -> None:
    code, lines, files = session(python, GPUS="2")
    assert code == 0
    assert lines[-1].endswith("train is done")
    assert len(files) == 8


def test_a_part_that_fails_does_not_keep_the_others_from_running(python: Path) -> None:
    code, lines, _ = session(python, primitives="echo 1 is WRONG; exit 3")
    assert code == 1
    assert lines[-4].split()[:3] == ["primitives", "exit", "3"]
    assert lines[-4].endswith("1 is WRONG")
    assert lines[-3].endswith("tests is done")


def test_without_an_architecture_nothing_is_built_and_that_is_a_failure(python: Path) -> None:
    code, lines, _ = session(python, "build", "tests", capability="false")
    assert code == 1
    assert lines[-2].startswith("build        not run       torch cannot tell")
    assert lines[-1].endswith("tests is done")


def test_one_limit_is_for_all_parts_and_who_passes_it_can_still_report(python: Path) -> None:
    hang = "trap 'echo 1 passed; exit 2' INT; for i in {1..300}; do sleep 0.1; done"
    code, lines, files = session(python, "primitives", "tests", "train", LIMIT="2", GPUS="2", tests=hang)
    assert code == 1
    assert lines[-3].endswith("primitives is done")
    assert lines[-2].split()[:3] == ["tests", "exit", "124"]
    assert lines[-2].endswith("1 passed")
    assert lines[-1] == "train        not run       the 2 s of LIMIT are over"
    assert "train.log" not in files


@pytest.mark.parametrize(("parts", "gpus", "message"), [(["tests"], "0", "sees no GPU"), (["all"], "1", "no part all")])
def test_what_cannot_run_is_refused_before_anything_runs(
    python: Path, parts: list[str], gpus: str, message: str
) -> None:
    code, lines, files = session(python, *parts, GPUS=gpus)
    assert code == 2
    assert message in lines[-1]
    assert not files
