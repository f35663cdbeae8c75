"""A command ends quietly if nobody reads its output any more, as in ``symm-overlap train | head -1``. If its output
cannot be written, it says so in one line."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from symm_overlap.cli.mistakes import report_errors
from tests.cli.session import processes_of
from tests.leftovers import wait_until_empty

ROOT = Path(__file__).parents[2]
TRAIN = ["train", "--size", "tiny", "--steps", "200", "--sample", "0"]  # the table has a line every 20 steps


def start(arguments: list[str], unbuffered: bool) -> subprocess.Popen[str]:
    """Start the command with its output in a pipe. If ``unbuffered``, Python writes each output to the pipe at once,
    otherwise when the command ends."""
    return subprocess.Popen(
        [sys.executable, *(["-u"] if unbuffered else []), "-m", "symm_overlap.cli", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def in_shell(command: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a shell does that redirects its standard streams."""
    line = f'exec "{sys.executable}" -m symm_overlap.cli {command}'
    return subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [(["plan", "all_gather_matmul"], True), pytest.param(["info"], False, marks=pytest.mark.slow)],
)
def test_a_closed_pipe_ends_the_command_quietly(arguments: list[str], unbuffered: bool) -> None:
    process = start(arguments, unbuffered)
    assert process.stdout is not None
    process.stdout.close()
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 141, "the exit code must be 128 + SIGPIPE, as for other programs"


@pytest.mark.parametrize("command", ["plan all_gather_matmul", pytest.param("info", marks=pytest.mark.slow)])
def test_a_full_disk_is_told_in_one_line(command: str) -> None:
    done = in_shell(f"{command} > /dev/full")
    assert done.stderr == "symm-overlap: input or output failed: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.slow
def test_a_command_works_without_its_standard_streams() -> None:
    assert in_shell("plan all_gather_matmul >&-").returncode == 0
    done = in_shell("schedule show - <&-")
    assert done.stderr == "symm-overlap schedule: standard input: it is closed\n"
    assert done.returncode == 2


def test_a_closed_pipe_is_no_mistake_of_the_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    def nobody_reads(args: argparse.Namespace) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        report_errors("plan")(nobody_reads)(argparse.Namespace())
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_closed_pipe_ends_every_rank_quietly() -> None:
    process = start(TRAIN, unbuffered=False)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("tiny model")
        process.stdout.close()
        assert process.communicate(timeout=120)[1] == ""
        assert process.returncode == 141
        assert not wait_until_empty(lambda: processes_of(process.pid), seconds=10)
    finally:
        process.kill()
        process.wait()
