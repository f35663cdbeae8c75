"""Waits by memory operations of streams, and the hosts that check these waits: csrc/common/host_lane.h and watch.h,
compiled separately, with threads as streams.
"""

from pathlib import Path

import pytest

from tests.runtime.host_program import HOST, compile_program, run_program, shared_folder, thread_sanitizer

pytestmark = pytest.mark.slow  # because the program takes half a minute to compile


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shared_folder(tmp_path_factory, "host_lane")
    flags = thread_sanitizer(folder), str(HOST / "host_watch.cpp"), str(HOST / "host_calls.cpp")
    return compile_program(HOST / "host_lane.cpp", folder / "host_lane", *flags)


def test_signals_order_plain_memory(program: Path) -> None:
    run_program(program, "exchange")


def test_operations_compare_epochs_across_the_wrap(program: Path) -> None:
    run_program(program, "wrap")


def test_a_deadline_counts_from_when_the_stream_waits_and_names_who_lacks(program: Path) -> None:
    """A deadline counts from when the stream reaches the wait. The error names the peer whose signal is missing."""
    run_program(program, "timeout")


def test_late_signals_do_not_shut_a_stream_out_for_good(program: Path) -> None:
    """Late signals that lower a word which the host has raised do not block the stream for ever."""
    run_program(program, "late signals")


def test_a_signal_that_has_run_ahead_is_not_overwritten(program: Path) -> None:
    run_program(program, "ahead")


def test_whoever_gives_up_frees_all_others_and_is_named(program: Path) -> None:
    run_program(program, "told")


def test_who_is_handed_garbage_can_see_it_before_the_call_ends(program: Path) -> None:
    """A rank that has received garbage from a failed peer finds this before its own call ends."""
    run_program(program, "poison")


def test_a_wait_for_a_rank_that_has_died_ends_unless_its_signal_has_come(program: Path) -> None:
    run_program(program, "death")


def test_the_last_signal_of_a_rank_that_has_died_is_not_overlooked(program: Path) -> None:
    run_program(program, "last signal")


def test_kernels_of_captured_calls_and_hosts_learn_of_each_other_s_failures(program: Path) -> None:
    run_program(program, "kernels")


def test_the_host_keeps_the_lane_of_a_kernel_that_waits_and_ends_the_wait_with_the_process(program: Path) -> None:
    """The host checks a lane until its last kernel has run. If the process ends before, the host ends the wait."""
    run_program(program, "one launch")


def test_a_kernel_that_waits_sees_what_a_peer_announces_by_memory_operations(program: Path) -> None:
    """A waiting kernel notices that the peer is in another call, even if the peer signals by memory operations."""
    run_program(program, "elsewhere")


def test_ranks_in_different_calls_fail(program: Path) -> None:
    run_program(program, "mismatch")


def test_a_failure_is_not_told_to_the_rank_where_it_began(program: Path) -> None:
    run_program(program, "hearsay")


def test_a_barrier_of_kernels_compares_calls_where_kernels_announce_them(program: Path) -> None:
    run_program(program, "barrier")


def test_a_wait_that_the_host_has_ended_says_nothing_of_the_call_of_its_peer(program: Path) -> None:
    """After the host has ended a wait, a missing announcement of the peer does not count as a different call."""
    run_program(program, "no mismatch")


def test_the_watch_ends_waits_by_itself_within_a_second(program: Path) -> None:
    run_program(program, "watched")


def test_a_process_that_ends_leaves_no_wait_behind(program: Path) -> None:
    run_program(program, "exit")
