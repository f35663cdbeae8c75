"""How CPU ranks wait for an epoch: csrc/cpu/epoch_slot.cpp, compiled separately, with threads as ranks."""

from pathlib import Path

import pytest

from tests.runtime.host_program import CSRC, HOST, compile_program, run_program, shared_folder, thread_sanitizer

SOURCES = (HOST / "epoch_slot.cpp", CSRC / "cpu" / "epoch_slot.cpp")


@pytest.fixture(scope="module", params=["plain", "thread sanitizer"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shared_folder(tmp_path_factory, "epoch_slot")
    flags = [thread_sanitizer(folder)] if request.param == "thread sanitizer" else []
    return compile_program(SOURCES[0], folder / request.param.replace(" ", "_"), *flags, str(SOURCES[1]))


@pytest.mark.parametrize("how", ["spin", "sleep"])
def test_signals_order_memory_and_are_not_missed_across_the_wrap_of_epochs(program: Path, how: str) -> None:
    run_program(program, how)


def test_a_signal_is_found_ahead_of_its_wait_and_wakes_all_who_sleep(program: Path) -> None:
    run_program(program, "sleepers")


def test_a_sleep_asks_once_a_slice_whether_to_go_on(program: Path) -> None:
    """A sleeping wait calls ``idle`` once per time slice, and an exception from it ends the wait."""
    run_program(program, "idle")
