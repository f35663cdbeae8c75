"""Ranks started by the command end together, whatever happens to one of them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from symm_overlap.cli import fork_server, launch, signals
from symm_overlap.demo.config import TrainConfig
from symm_overlap.demo.rank import join
from symm_overlap.demo.training import train
from tests.ranks import forks

pytestmark = pytest.mark.usefixtures("forked_ranks")


def fail_on_rank_1(how: str, pids: str) -> None:
    rank = os.environ["RANK"]
    Path(pids, rank).write_text(str(os.getpid()))
    if rank == "1":
        while not Path(pids, "0").exists():  # rank 0 must run, so that there is a rank to end
            time.sleep(0.01)
        if how == "raise":
            raise ValueError("my fault")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def fail_because_of_rank_1(folder: str) -> None:
    told = Path(folder, "told")
    if os.environ["RANK"] == "1":
        threading.Thread(target=time.sleep, args=(5,)).start()  # the rank that fails first is the last to end
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
            dist.barrier()  # waits in C++, where no Python signal handler runs
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


def train_and_count_threads(offset: int) -> tuple[str, str | None, int]:
    assert train(TrainConfig(size="tiny", seq=32, batch=2, steps=1, sample=0)) == 0
    threads = sum("gloo" in name.read_text() for name in Path("/proc/self/task").glob("*/comm"))
    return os.environ["RANK"], os.environ.get("SYMM_OVERLAP_TEST"), offset + threads


def test_result_is_rank_0s_the_signal_handlers_are_as_before_and_nothing_of_gloo_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No thread of gloo may be left. It would abort the process if it released a tensor while the interpreter ends."""
    before = [signal.getsignal(number) for number in signals.HANDLED]
    monkeypatch.setenv("SYMM_OVERLAP_TEST", "set after the server has started")
    assert launch.run_ranks(train_and_count_threads, (10,), 2) == ("0", "set after the server has started", 10)
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


# This module reports that its import has begun. The import ends when the test creates the file "enough".
SLOW = """
import time
from pathlib import Path
here = Path(__file__).parent
(here / "importing").touch()
while not (here / "enough").exists():
    time.sleep(0.02)
"""


def wait_for_the_server(folder: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["PYTHONPATH"] = folder
    fork_server.COMPILER.clear()
    try:
        fork_server.start(["slow"])
    except KeyboardInterrupt:
        sys.exit(130)


def test_an_interrupt_does_not_wait_until_the_server_has_imported(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    process = forks().Process(target=wait_for_the_server, args=(str(tmp_path),))
    process.start()
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "importing").exists():
            assert process.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        process.join(20)
        assert process.exitcode == 130
    finally:
        (tmp_path / "enough").touch()  # the server ends its import and finds that no process needs it
        process.kill()


def launch_in(folder: str) -> None:
    fork_server.COMPILER.clear()  # no rank needs the compiler, and this process starts its own server
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        launch.run_ranks(wait_for_ever, (folder,), 2)
    except KeyboardInterrupt:
        sys.exit(130)


# test_interrupt.py covers a SIGINT from a terminal, which the ranks receive too.
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}


@pytest.mark.slow
def test_a_signal_to_the_launcher_leaves_no_rank_behind(tmp_path: Path) -> None:
    folders = [tmp_path / number.name for number in CODES]
    for folder in folders:
        folder.mkdir()
    launchers = [forks().Process(target=launch_in, args=(str(folder),)) for folder in folders]
    try:
        for launcher in launchers:
            launcher.start()
        deadline = time.monotonic() + 120
        while any(len(list(folder.iterdir())) < 2 for folder in folders):
            assert all(launcher.is_alive() for launcher in launchers)
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for launcher, number in zip(launchers, CODES, strict=True):
            assert launcher.pid is not None
            os.kill(launcher.pid, number)
        for launcher, code in zip(launchers, CODES.values(), strict=True):
            launcher.join(40)
            assert launcher.exitcode == code
        for folder in folders:
            assert_all_end(folder)
    finally:
        for launcher in launchers:
            launcher.kill()
        ranks = [int(file.read_text()) for folder in folders for file in folder.iterdir()]
        for pid in ranks:  # some are left only if the test has failed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
