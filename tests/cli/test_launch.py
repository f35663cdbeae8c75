"""Ranks started by the command end together, whatever happens to one of them."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from symm_overlap.cli import launch, signals
from symm_overlap.demo.config import TrainConfig
from symm_overlap.demo.rank import join
from symm_overlap.demo.training import train

ROOT = Path(__file__).parents[2]


def fail_on_rank_1(how: str, pids: str) -> None:
    rank = os.environ["RANK"]
    Path(pids, rank).write_text(str(os.getpid()))
    if rank == "1":
        while not Path(pids, "0").exists():  # so that there is a rank to be ended
            time.sleep(0.01)
        if how == "raise":
            raise ValueError("my fault")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def fail_because_of_rank_1(folder: str) -> None:
    told = Path(folder, "told")
    if os.environ["RANK"] == "1":
        atexit.register(time.sleep, 5)  # the rank that fails first is the last to end
        told.touch()
        raise ValueError("the cause")
    while not told.exists():
        time.sleep(0.01)
    time.sleep(0.5)
    raise ValueError("a consequence")


def wait_for_ever(pids: str) -> None:
    with join("cpu") as here:
        written = Path(f"{pids}.{here.rank}")
        written.write_text(str(os.getpid()))
        written.rename(Path(pids, str(here.rank)))
        if here.rank == 0:
            dist.barrier()  # in C++, where no Python signal handler runs
        time.sleep(600)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def assert_all_end(pids: Path, seconds: float = 30.0) -> None:
    numbers = [int(file.read_text()) for file in pids.iterdir()]
    assert len(numbers) == 2
    deadline = time.monotonic() + seconds
    while left := [pid for pid in numbers if not has_ended(pid)]:
        assert time.monotonic() < deadline, f"processes {left} outlive the launcher"
        time.sleep(0.05)


def train_and_count_threads(offset: int) -> tuple[str, int]:
    assert train(TrainConfig(size="tiny", seq=32, batch=2, steps=1, sample=0)) == 0
    return os.environ["RANK"], offset + sum(
        "gloo" in name.read_text() for name in Path("/proc/self/task").glob("*/comm")
    )


def test_result_is_rank_0s_the_signal_handlers_are_as_before_and_nothing_of_gloo_is_left() -> None:
    """A thread of gloo that lets go of a tensor while the interpreter ends, aborts the process."""
    before = [signal.getsignal(number) for number in signals.HANDLED]
    assert launch.run_ranks(train_and_count_threads, (10,), 2) == ("0", 10)
    assert [signal.getsignal(number) for number in signals.HANDLED] == before


@pytest.mark.parametrize(("how", "words"), [("raise", "ValueError: my fault"), ("kill", "was killed by SIGKILL")])
def test_a_failing_rank_ends_the_others_and_is_named(tmp_path: Path, how: str, words: str) -> None:
    with pytest.raises(launch.RankError, match="rank 1") as caught:
        launch.run_ranks(fail_on_rank_1, (how, str(tmp_path)), 2)
    assert words in str(caught.value)
    assert_all_end(tmp_path)


def test_the_rank_that_failed_first_is_named_even_if_it_ends_last(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="rank 1") as caught:
        launch.run_ranks(fail_because_of_rank_1, (str(tmp_path),), 2)
    assert "ValueError: the cause" in str(caught.value)


# Imports once, and forks a launcher for each folder of the command line, which starts two ranks. Once it is told so, it
# tells how each launcher ended.
LAUNCHERS = """
import json, os, sys
from symm_overlap.cli import launch
from tests.cli.test_launch import wait_for_ever

def start(folder):
    if pid := os.fork():
        return pid
    try:
        launch.run_ranks(wait_for_ever, (folder,), 2)
    except KeyboardInterrupt:
        sys.exit(130)

if __name__ == "__main__":
    pids = [start(folder) for folder in sys.argv[1:]]
    print(json.dumps(pids), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))
"""
# For a SIGINT of a terminal, which the ranks get too, see test_interrupt.py.
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}


def test_a_signal_to_the_launcher_leaves_no_rank_behind(tmp_path: Path) -> None:
    folders = [tmp_path / number.name for number in CODES]
    for folder in folders:
        folder.mkdir()
    errors = tmp_path / "errors"
    command = [sys.executable, "-c", LAUNCHERS, *map(str, folders)]
    with errors.open("w") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)
    launchers: list[int] = []
    try:
        assert process.stdout is not None
        launchers = json.loads(process.stdout.readline())
        deadline = time.monotonic() + 120
        while any(len(list(folder.iterdir())) < 2 for folder in folders):
            assert process.poll() is None, errors.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for launcher, number in zip(launchers, CODES, strict=True):
            os.kill(launcher, number)
        assert dict(zip(CODES, json.loads(process.communicate(timeout=40)[0]), strict=True)) == CODES
        for folder in folders:
            assert_all_end(folder)
    finally:
        process.kill()
        process.wait()
        ranks = [int(file.read_text()) for folder in folders for file in folder.iterdir()]
        for pid in [*launchers, *ranks]:  # only where the test has failed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
