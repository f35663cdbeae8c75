"""The signal protocol of GPU lanes: csrc/cuda/signal.cuh, compiled for the host, with threads as GPUs."""

from pathlib import Path

import pytest

from tests.runtime.host_program import HOST, compile_program, run_program, shared_folder, thread_sanitizer

SOURCE = HOST / "signal_protocol.cpp"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_program(SOURCE, shared_folder(tmp_path_factory, "signal_protocol") / "plain")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shared_folder(tmp_path_factory, "signal_protocol")
    return compile_program(SOURCE, folder / "sanitized", thread_sanitizer(folder))


def test_every_wait_meets_its_signal_even_across_the_wrap_of_epochs(program: Path) -> None:
    run_program(program, "exchange")


def test_signals_order_plain_memory(sanitized: Path) -> None:
    run_program(sanitized, "exchange")


def test_a_late_wait_leaves_one_record_and_later_waits_do_not_wait(program: Path) -> None:
    run_program(program, "timeout")


def test_of_waits_that_fail_together_one_writes_the_record(sanitized: Path) -> None:
    """If several waits fail at the same time, only one of them writes the failure record."""
    run_program(sanitized, "race")


def test_whoever_gives_up_frees_all_others_and_is_named(program: Path) -> None:
    run_program(program, "told")


def test_who_is_handed_garbage_can_see_it_before_the_call_ends(program: Path) -> None:
    """A rank that has received garbage from a failed peer finds this before its own call ends."""
    run_program(program, "poison")


def test_a_rank_that_learns_of_a_failure_when_its_call_ends_tells_the_others_before_it_goes_on(program: Path) -> None:
    run_program(program, "end")


def test_when_a_host_gives_up_nobody_waits_for_it(program: Path) -> None:
    run_program(program, "host")


def test_a_failure_is_not_told_to_the_rank_where_it_began(program: Path) -> None:
    run_program(program, "hearsay")


def test_a_wait_for_a_rank_that_has_died_ends_unless_its_signal_has_come(program: Path) -> None:
    run_program(program, "death")


def test_the_last_signal_of_a_rank_that_has_died_is_not_overlooked(sanitized: Path) -> None:
    run_program(sanitized, "last signal")


def test_ranks_in_different_calls_fail(program: Path) -> None:
    run_program(program, "mismatch")


def test_the_announcement_of_a_call_is_ordered_by_its_signals(sanitized: Path) -> None:
    run_program(sanitized, "mismatch")


def test_a_wait_ends_when_its_peer_announces_another_call(program: Path) -> None:
    run_program(program, "idle mismatch")
